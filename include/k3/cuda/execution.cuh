// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/execution.hpp>
#include <k3/cuda/check.cuh>

namespace k3 {

/// Run on a CUDA stream, the caller's. Calls return at once; all work of a call is ordered on this stream and on no
/// other, allocates nothing, waits for nothing and may be captured into a graph. `independent`: a sequence's bits do
/// not depend on the rest of its batch. False allows a faster choice that does not keep this: MLA attention then deals
/// its work evenly over the batch.
struct gpu {
  cudaStream_t stream = nullptr;
  bool independent = true;
};

namespace detail {

/// Blocks of `per_block` items for `count` items, as many as a grid's first dimension takes at most; kernels loop.
inline unsigned grid_size(size count, size per_block) {
  const size blocks = (count + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 0x7fffffffu ? blocks : 0x7fffffffu);
}

/// Multiprocessors of the device that was current at the first call.
inline int multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    check_cuda("multiprocessors", "cudaGetDevice", cudaGetDevice(&device));
    check_cuda("multiprocessors", "cudaDeviceGetAttribute",
               cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device));
    return value;
  }();
  return count;
}

}  // namespace detail
}  // namespace k3
