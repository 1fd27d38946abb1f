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

/// Two floats rounded to bf16, `low` in the lower half; and back.
__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float low_of(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

/// A vector of float or bf16, as its tensor is stored.
struct ScalarVector {
  const void* data = nullptr;
  bool is_bf16 = false;

  __device__ __forceinline__ float operator[](unsigned i) const {
    return is_bf16 ? static_cast<float>(static_cast<const bf16*>(data)[i]) : static_cast<const float*>(data)[i];
  }
};

/// c [16, 8] += a [16, 16] b [16, 8] in bf16, by a warp. A lane has rows lane / 4 (a0, a2, c[0], c[1]) and lane / 4 + 8
/// (a1, a3, c[2], c[3]).
__device__ __forceinline__ void multiply_add(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// A key of the order of (value, lower index first), of a value that is no NaN; never 0.
__device__ __forceinline__ unsigned long long order_key(float value, unsigned index) {
  const unsigned bits = value == 0 ? 0u : __float_as_uint(value);  // -0 and 0 are the same
  const unsigned ordered = bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
  return static_cast<unsigned long long>(ordered) << 32 | static_cast<unsigned>(~index);
}
struct LargerKey {
  __device__ __forceinline__ unsigned long long operator()(unsigned long long a, unsigned long long b) const {
    return a < b ? b : a;
  }
};

/// 16 bytes from global memory through the read-only path, marked as used once.
__device__ __forceinline__ uint4 load_streaming(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

}  // namespace k3::kernel
