// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include <k3/core/error.hpp>
#include <k3/ops/row_status.hpp>

namespace k3 {

/// Where a step found a fault, if it is known.
inline constexpr size no_layer = ~size{0};

/// A fault and its place: "NaN router logits in model.layers.5". NaN in a router began there or behind the router of
/// the layer before, which was still well; NaN logits began behind the last router, or, without routers, anywhere.
inline std::string text(RowStatus status, size layer) {
  std::string result = text(status);
  if (layer == no_layer || (status != RowStatus::nan_router_logits && status != RowStatus::nan_logits)) return result;
  result += status == RowStatus::nan_logits ? " of lm_head, behind model.layers." : " in model.layers.";
  return result + std::to_string(layer);
}

/// What a cache, on the host or on a device, remembers of the sequences in its slots: how many tokens each has taken,
/// whether it is usable, and which past it has.
class SequenceTable {
 public:
  /// `generation` names the past: it is the same at the same position, in whatever slot or cache, only where it was
  /// reached by the same tokens.
  struct Sequence {
    size position = 0, generation = 0;
    RowStatus status = RowStatus::ok;
    size layer = no_layer;  ///< of the fault
  };

  explicit SequenceTable(size slots) {
    detail::require(slots > 0 && slots < (size{1} << 31), "HybridCache", "slots", slots, "between 1 and 2^31 - 1");
    sequences_.resize(slots);
    for (size slot = 0; slot < slots; ++slot) replace(slot, 0);
  }
  /// Both go on from here, each on a branch of its own.
  SequenceTable(const SequenceTable& other) : sequences_(other.sequences_) {
    for (Slot& slot : sequences_) branch_off(slot);
  }
  SequenceTable(SequenceTable&&) noexcept = default;
  SequenceTable& operator=(const SequenceTable& other) { return *this = SequenceTable(other); }
  SequenceTable& operator=(SequenceTable&&) noexcept = default;

  size slots() const { return sequences_.size(); }

  /// Throws invalid_argument where there is no such slot.
  const Sequence& operator[](size slot) const {
    if (slot >= sequences_.size())
      throw invalid_argument("HybridCache", "slot", std::to_string(slot), "below " + std::to_string(slots()));
    return sequences_[slot];
  }
  /// As above, and where its sequence is not usable.
  const Sequence& usable(size slot, const char* operation) const {
    const Sequence& sequence = (*this)[slot];
    detail::require(
        sequence.status == RowStatus::ok, operation, "the slot's sequence",
        [&] { return text(sequence.status, sequence.layer); }, "a usable sequence");
    return sequence;
  }

  /// Another sequence, standing at `position`, is in the slot now.
  void replace(size slot, size position) {
    const size name = new_name();
    at(slot) = {{position, name}, name, {}};
  }
  void advance(size slot, size tokens) {
    at(slot).position += tokens;
    at(slot).generation = generation_at(at(slot), at(slot).position);
  }
  void invalidate(size slot, RowStatus status, size layer = no_layer) {
    at(slot).status = status;
    at(slot).layer = layer;
  }
  /// The same sequence, back at a position of its past.
  void rewind(size slot, size position) {
    Slot& s = at(slot);
    static_cast<Sequence&>(s) = {position, generation_at(s, position)};
    branch_off(s);
  }

  /// Throws invalid_argument unless a point of `generation` and `position` lies in the past of the slot's sequence.
  void require_past(size slot, size generation, size position, const char* operation) const {
    static_cast<void>((*this)[slot]);  // throws where there is no such slot
    const Slot& sequence = sequences_[slot];
    detail::require(generation == generation_at(sequence, position), operation, "the point",
                    "of another sequence or of tokens that were taken back", "one of the slot's present sequence");
    detail::require(position <= sequence.position, operation, "the point's position", position,
                    [&] { return "at most the sequence's, " + std::to_string(sequence.position); });
  }

 private:
  /// The tokens from `first` up to the next branch's were taken without a rollback between them.
  struct Branch {
    size first, name;
  };
  struct Slot : Sequence {
    size origin = 0;                 ///< name of the tokens before all branches
    std::vector<Branch> branches{};  ///< by `first`, ascending; never more than there are positions
  };

  static size new_name() {
    static std::atomic<size> last{0};
    return ++last;
  }
  /// The name of the branch that took the token before `position`.
  static size generation_at(const Slot& slot, size position) {
    for (size i = slot.branches.size(); i-- > 0;)
      if (slot.branches[i].first < position) return slot.branches[i].name;
    return slot.origin;
  }
  /// From the slot's position on, tokens are others than those that may have been there.
  static void branch_off(Slot& slot) {
    while (!slot.branches.empty() && slot.branches.back().first >= slot.position) slot.branches.pop_back();
    slot.branches.push_back({slot.position, new_name()});
  }
  Slot& at(size slot) {
    static_cast<void>((*this)[slot]);
    return sequences_[slot];
  }

  std::vector<Slot> sequences_;
};

}  // namespace k3
