// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cub/block/block_reduce.cuh>

#include <k3/kernels/common.cuh>
#include <k3/kernels/grid_order.cuh>

// The greedy choice. A logit becomes a 64-bit key, (order of the value, ~index): the largest key is the largest logit
// and of equals the first. Maxima of integers are exact in any order; NaN is the largest key of all.
namespace k3::kernel {

inline constexpr int argmax_threads = 256;
inline constexpr size argmax_share = 4096;  ///< a block has a multiple of so many logits, and reads them at once
inline constexpr unsigned argmax_most_blocks = 64;  ///< of a row
inline constexpr unsigned long long argmax_nan = ~0ull;

struct ArgmaxArguments {
  const float* logits;  // [rows, count]
  size stride, rows;
  unsigned count, share, blocks, nan_status;  // logits of a block, blocks of a row
  bool vector;                                // rows lie on multiples of 16 bytes
  unsigned long long* keys;                   // [rows, blocks]
  unsigned* arrived;                          // [rows], zero before and after
  id* ids;                                    // [rows]
  unsigned* status;                           // [rows], or null
};

/// The largest of the logits that a thread has seen, in rising order of their index.
struct ArgmaxBest {
  float value = -INFINITY;
  unsigned index = 0;
  bool any = false, nan = false;

  __device__ __forceinline__ void add(float logit, unsigned at) {
    nan |= logit != logit;
    if (logit > value || !any) value = logit, index = at;
    any = true;
  }
  __device__ __forceinline__ void add_four(const uint4& v, unsigned at) {
    add(__uint_as_float(v.x), at), add(__uint_as_float(v.y), at + 1);
    add(__uint_as_float(v.z), at + 2), add(__uint_as_float(v.w), at + 3);
  }
  __device__ __forceinline__ unsigned long long key() const {
    return nan ? argmax_nan : any ? order_key(value, index) : 0;
  }
};

/// The largest key among the logits [first, last) of a row, of this thread.
template <int Threads>
__device__ __forceinline__ unsigned long long argmax_scan(const float* logits, unsigned first, unsigned last,
                                                          bool vector) {
  ArgmaxBest best;
  if (vector) {
    constexpr unsigned step = Threads * 4;
    constexpr int ahead = argmax_share / step;
    for (unsigned at = first + threadIdx.x * 4; at < last; at += ahead * step) {
      uint4 four[ahead];
#pragma unroll
      for (int j = 0; j < ahead; ++j)
        if (at + j * step + 3 < last) four[j] = load_streaming(logits + at + j * step);
#pragma unroll
      for (int j = 0; j < ahead; ++j) {
        const unsigned i = at + j * step;
        if (i + 3 < last)
          best.add_four(four[j], i);
        else
          for (unsigned k = i; k < last; ++k) best.add(logits[k], k);
      }
    }
  } else {
    for (unsigned at = first + threadIdx.x; at < last; at += Threads) best.add(logits[at], at);
  }
  return best.key();
}

/// `blocks` blocks a row; the last one to arrive compares their keys and writes the row's id.
template <int Threads>
__global__ void __launch_bounds__(Threads) argmax(ArgmaxArguments a) {
  using Reduce = cub::BlockReduce<unsigned long long, Threads>;
  __shared__ typename Reduce::TempStorage scratch;
  __shared__ bool last;
  let_later_start();
  wait_for_earlier();
  for (size item = blockIdx.x; item < a.rows * a.blocks; item += gridDim.x) {
    const size row = item / a.blocks;
    const unsigned first = static_cast<unsigned>(item % a.blocks) * a.share;
    const unsigned end = detail::smaller(a.count, first + a.share);
    unsigned long long best = argmax_scan<Threads>(a.logits + row * a.stride, first, end, a.vector);
    best = Reduce(scratch).Reduce(best, LargerKey{});
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
    best = Reduce(scratch).Reduce(best, LargerKey{});
    if (threadIdx.x == 0) {
      const bool nan = best == argmax_nan;
      a.ids[row] = nan ? id{-1} : static_cast<id>(~static_cast<unsigned>(best));
      if (nan && a.status) a.status[row] = a.nan_status;
    }
    __syncthreads();  // the scratch memory is used again
  }
}

}  // namespace k3::kernel
