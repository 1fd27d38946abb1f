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

}  // namespace k3::detail
