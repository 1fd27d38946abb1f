// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cub/block/block_reduce.cuh>

#include <k3/kernels/common.cuh>

// The greedy choice. A logit becomes a 64-bit key, (order of the value, ~index): the largest key is the largest logit
// and of equals the first. Maxima of integers are exact in any order; NaN is the largest key of all.
namespace k3::kernel {

inline constexpr int argmax_threads = 256;
inline constexpr size argmax_share = 4096;          ///< logits of a block, at least
inline constexpr unsigned argmax_most_blocks = 64;  ///< of a row
inline constexpr unsigned long long argmax_nan = ~0ull;

__device__ __forceinline__ unsigned long long argmax_key(float value, unsigned index) {
  if (value != value) return argmax_nan;
  const unsigned bits = value == 0 ? 0u : __float_as_uint(value);  // -0 ties with 0
  const unsigned order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(order) << 32 | static_cast<unsigned>(~index);
}

struct ArgmaxMaximum {
  __device__ __forceinline__ unsigned long long operator()(unsigned long long a, unsigned long long b) const {
    return a > b ? a : b;
  }
};

struct ArgmaxArguments {
  const float* logits;  // [rows, count]
  size stride, rows;
  unsigned count, blocks, nan_status;  // blocks of a row
  unsigned long long* keys;            // [rows, blocks]
  unsigned* arrived;                   // [rows], zero before and after
  id* ids;                             // [rows]
  unsigned* status;                    // [rows], or null
};

/// `blocks` blocks a row; the last one to arrive compares their keys and writes the row's id.
template <int Threads>
__global__ void __launch_bounds__(Threads) argmax(ArgmaxArguments a) {
  using Reduce = cub::BlockReduce<unsigned long long, Threads>;
  __shared__ typename Reduce::TempStorage scratch;
  __shared__ bool last;
  for (size item = blockIdx.x; item < a.rows * a.blocks; item += gridDim.x) {
    const size row = item / a.blocks;
    const float* const logits = a.logits + row * a.stride;
    unsigned long long best = 0;
    for (unsigned i = static_cast<unsigned>(item % a.blocks) * Threads + threadIdx.x; i < a.count;
         i += a.blocks * Threads)
      best = ArgmaxMaximum{}(best, argmax_key(logits[i], i));
    best = Reduce(scratch).Reduce(best, ArgmaxMaximum{});
    if (threadIdx.x == 0) {
      a.keys[item] = best;
      __threadfence();
      last = atomicInc(a.arrived + row, a.blocks - 1) == a.blocks - 1;  // counts back to zero by itself
    }
    __syncthreads();
    const bool mine = last;
    __syncthreads();
    if (!mine) continue;
    __threadfence();
    best = threadIdx.x < a.blocks ? __ldcg(a.keys + row * a.blocks + threadIdx.x) : 0;
    best = Reduce(scratch).Reduce(best, ArgmaxMaximum{});
    if (threadIdx.x == 0) {
      const bool nan = best == argmax_nan;
      a.ids[row] = nan ? id{-1} : static_cast<id>(~static_cast<unsigned>(best));
      if (nan && a.status) a.status[row] = a.nan_status;
    }
    __syncthreads();  // the scratch memory is used again
  }
}

}  // namespace k3::kernel
