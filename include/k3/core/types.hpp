// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <k3/core/config.hpp>

namespace k3 {

/// Counts, extents and offsets. 64 bits: caches of a million positions and 896 experts pass 2^32 elements.
using size = std::size_t;

/// Token ids and expert ids, signed as in the checkpoint's index tensors so that -1 can be recognised and refused.
using id = std::int32_t;

/// The slot of a padding row: the row is computed by nobody and touches no state.
inline constexpr id pad_slot = -1;

namespace detail {

// Not std::min and std::max: those are no device functions, and a consumer may have macros of these names.
template <class T>
K3_HOST_DEVICE constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
K3_HOST_DEVICE constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

}  // namespace detail
}  // namespace k3
