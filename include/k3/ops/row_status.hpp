// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/types.hpp>

namespace k3 {

/// What became of one row of a batch during a step. Only values that no argument shows (NaN scores) set it; the other
/// rows of the batch are then bit for bit what they would have been, and the caller reports the failed one.
enum class RowStatus : unsigned char {
  ok,
  nan_router_logits,
  nan_logits,
  interrupted,
  bad_slot,
  bad_id,
  bad_expert,
  padding
};

inline const char* text(RowStatus status) {
  switch (status) {
    case RowStatus::nan_router_logits: return "NaN router logits";
    case RowStatus::nan_logits: return "NaN logits";
    case RowStatus::interrupted: return "a step that did not finish";
    case RowStatus::bad_slot: return "a slot, position or page that does not exist";
    case RowStatus::bad_id: return "a token id outside the vocabulary";
    case RowStatus::bad_expert: return "an expert that does not exist";
    case RowStatus::padding: return "a padding row";
    default: return "ok";
  }
}

}  // namespace k3
