// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/view.hpp>

// What operations with per-sequence state check about the rows of a batch, without allocating.
namespace k3::detail {

/// Consecutive rows of one slot: the next tokens of one sequence, in order.
struct SlotRun {
  size first = 0, count = 0, slot = 0;
};

/// The first run at or after `row`, padding rows skipped; count 0 where there is none.
inline SlotRun next_run(const HostView<const id, 1>& slots, size row) {
  const size rows = slots.extents[0];
  while (row < rows && slots[row] == pad_slot) ++row;
  if (row == rows) return {rows, 0, 0};
  size end = row + 1;
  while (end < rows && slots[end] == slots[row]) ++end;
  return {row, end - row, static_cast<size>(slots[row])};
}

/// Throws invalid_argument for a slot that is neither padding nor below `slot_count`, and for a slot that comes back
/// after other rows: a sequence's tokens are consecutive rows. Returns the number of runs.
inline size require_slots(const char* operation, const HostView<const id, 1>& slots, size rows, size slot_count) {
  require_shape(operation, "slots", slots, rows);
  for (size row = 0; row < rows; ++row)
    if (slots[row] != pad_slot && (slots[row] < 0 || static_cast<size>(slots[row]) >= slot_count))
      throw invalid_argument(operation, "slots[" + std::to_string(row) + "]", std::to_string(slots[row]),
                             "pad_slot or 0 to " + std::to_string(slot_count) + " (exclusive)");
  size runs = 0;
  for (SlotRun run = next_run(slots, 0); run.count > 0; run = next_run(slots, run.first + run.count), ++runs)
    for (size earlier = 0; earlier < run.first; ++earlier)
      if (slots[earlier] == slots[run.first])
        throw invalid_argument(operation, "slots",
                               "slot " + std::to_string(run.slot) + " again in row " + std::to_string(run.first),
                               "the rows of a sequence to be consecutive");
  return runs;
}

/// The bytes that a tensor touches: `rows` pieces of `width` bytes, `stride` bytes apart.
struct Footprint {
  std::uintptr_t first = 0;
  size rows = 0, width = 0, stride = 0;
  std::uintptr_t last() const { return first + (rows - 1) * stride + width; }
};

template <class T, size Rank>
Footprint footprint(const View<T, Rank>& v) {
  if (v.elements() == 0) return {};
  const auto first = reinterpret_cast<std::uintptr_t>(v.data);
  if constexpr (Rank == 2) return {first, v.extents[0], v.extents[1] * sizeof(T), v.strides[0] * sizeof(T)};
  size furthest = 0;
  for (size d = 0; d < Rank; ++d) furthest += (v.extents[d] - 1) * v.strides[d];
  return {first, 1, (furthest + 1) * sizeof(T), 0};
}

/// Whether two tensors share a byte. Column blocks of one buffer (equal strides, disjoint columns) do not.
inline bool shares_bytes(const Footprint& a, const Footprint& b) {
  if (a.rows == 0 || b.rows == 0 || a.last() <= b.first || b.last() <= a.first) return false;
  if (a.stride != b.stride || a.stride == 0) return true;
  const size apart =
      b.first >= a.first ? (b.first - a.first) % a.stride : (a.stride - (a.first - b.first) % a.stride) % a.stride;
  return apart < a.width || apart + b.width > a.stride;
}

/// Throws invalid_argument where `written` shares memory with `read`.
inline void require_disjoint(const char* operation, const char* written, const Footprint& to, const char* read,
                             const Footprint& from) {
  if (shares_bytes(to, from))
    throw invalid_argument(operation, written, std::string("overlapping ") + read, "memory of its own");
}

}  // namespace k3::detail
