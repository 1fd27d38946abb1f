// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/mla_cache.cuh>
#include <k3/kernels/mla_hopper.cuh>

// The softmax of mla_attend_wide and mla_attend_few: both give the same bits because these are the only ones who
// compute weights, their sums and maxima.
namespace k3::kernel {

inline constexpr float mla_wide_slack = 8;  ///< of a score over the maximum, in units of ln 2

/// A head's new maximum where a score exceeds the old one by too much; returns the factor of what is summed up so far.
/// Whether it grows is decided by the exponent of a weight, which does not depend on the other heads of the block.
__device__ __forceinline__ float mla_raise(float& max, float largest, float scale) {
  if (!(__fmaf_rn(largest, scale, -max) > mla_wide_slack)) return 1.0f;
  const float old = max;
  max = largest * scale;
  return mla_rescale(old, max);
}

/// Weights of two scores, rounded to bf16; `most` becomes the largest exponent.
__device__ __forceinline__ unsigned mla_weigh(float s, float t, float scale, float max_s, float max_t, float& most) {
  const float x = __fmaf_rn(s, scale, -max_s), y = __fmaf_rn(t, scale, -max_t);
  most = fmaxf(most, fmaxf(x, y));
  return bf16_pair(exp2_fast(x), exp2_fast(y));
}

/// The sum of a head's 64 weights as they were rounded, in a fixed order, by two threads of the lanes in `active`.
/// `weights` [heads, 64] with 16-byte pieces permuted as operands of matrix products are.
__device__ __forceinline__ float mla_sum_weights(const unsigned char* weights, unsigned head, unsigned active) {
  const uint4* const from = reinterpret_cast<const uint4*>(weights + head * 128);
  float sum = 0;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) {
    const uint4 eight = from[(threadIdx.x % 2 * 4 + i) ^ head % 8];
    const unsigned two[4] = {eight.x, eight.y, eight.z, eight.w};
    float pair[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) pair[e] = low_of(two[e]) + high_of(two[e]);
    sum += (pair[0] + pair[1]) + (pair[2] + pair[3]);
  }
  return sum + __shfl_xor_sync(active, sum, 1);
}

}  // namespace k3::kernel
