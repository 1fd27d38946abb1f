// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <k3/core/bf16.hpp>
#include <k3/core/view.hpp>

namespace k3::kernel {

inline constexpr unsigned full_warp = 0xffffffffu;

/// Sum over the lanes of a warp, the same bits in every lane: a butterfly, whose order is fixed.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(full_warp, value, offset);
  return value;
}

template <class T>
__device__ __forceinline__ T warp_max(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(full_warp, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

/// Sum over a block of `Threads` threads, the same bits in every thread. `scratch` holds Threads / 32 values and may be
/// used again after the next barrier.
template <int Threads, class T>
__device__ __forceinline__ T block_sum(T value, T* scratch) {
  constexpr int warps = Threads / 32;
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  T total = scratch[0];
#pragma unroll
  for (int warp = 1; warp < warps; ++warp) total += scratch[warp];
  return total;
}

/// 16 bytes from global memory through the read-only path, marked as used once.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

}  // namespace k3::kernel
