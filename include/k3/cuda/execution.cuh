// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/execution.hpp>
#include <k3/cuda/check.cuh>

namespace k3 {

/// Run on a CUDA stream, the caller's. Calls return at once; all work of a call is ordered on this stream and on no
/// other, allocates nothing, waits for nothing and may be captured into a graph. `independent`: a sequence's bits do
/// not depend on the rest of its batch. False allows a faster choice that does not keep this: MLA attention then deals
/// its work evenly over the batch.
/// Weights must be complete when an operation is called: on compute capability 9.0 kernels fetch them before the work
/// in front of them on the stream is done, so they may not be what that work still writes. (DeviceBuffer's copies and
/// K3DeviceModel wait.) Everything else an operation reads may come from earlier work on its stream.
/// A process uses one device: what kernels are allowed and how they are divided is found out once, for the device that
/// was current at the first call.
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

/// Multiprocessors of the process's device.
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

/// Whether CUDA lets work on the stream be captured: not on the default stream.
inline bool capturable(cudaStream_t stream) { return stream != nullptr && stream != cudaStreamLegacy; }

}  // namespace detail
}  // namespace k3
