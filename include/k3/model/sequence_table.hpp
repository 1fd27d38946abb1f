// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/core/error.hpp>
#include <k3/ops/row_status.hpp>

namespace k3 {

/// What a cache, on the host or on a device, remembers of the sequences in its slots: how many tokens each has taken,
/// whether it is usable, and a generation that changes whenever another sequence moves in.
class SequenceTable {
 public:
  struct Sequence {
    size position = 0, generation = 0;
    RowStatus status = RowStatus::ok;
  };

  explicit SequenceTable(size slots) {
    detail::require(slots > 0 && slots < (size{1} << 31), "HybridCache", "slots", slots, "between 1 and 2^31 - 1");
    sequences_.resize(slots);
  }

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
    detail::require(sequence.status == RowStatus::ok, operation, "the slot's sequence", text(sequence.status),
                    "a usable sequence");
    return sequence;
  }

  /// Another sequence, standing at `position`, is in the slot now.
  void replace(size slot, size position) { at(slot) = {position, (*this)[slot].generation + 1, RowStatus::ok}; }
  void advance(size slot, size tokens) { at(slot).position += tokens; }
  void invalidate(size slot, RowStatus status) { at(slot).status = status; }
  /// The same sequence, back at a position of its past.
  void rewind(size slot, size position) { at(slot) = {position, (*this)[slot].generation, RowStatus::ok}; }

  /// Throws invalid_argument unless a point of `generation` and `position` lies in the past of the slot's sequence.
  void require_past(size slot, size generation, size position, const char* operation) const {
    const Sequence& sequence = (*this)[slot];
    detail::require(generation == sequence.generation, operation, "the point", "of a sequence that has left the slot",
                    "one of the slot's present sequence");
    detail::require(position <= sequence.position, operation, "the point's position", position,
                    [&] { return "at most the sequence's, " + std::to_string(sequence.position); });
  }

 private:
  Sequence& at(size slot) { return const_cast<Sequence&>((*this)[slot]); }

  std::vector<Sequence> sequences_;
};

}  // namespace k3
