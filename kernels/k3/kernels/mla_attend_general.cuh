// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/mla_cache.cuh>

namespace k3::kernel {

inline constexpr unsigned mla_general_heads = 4;

/// Absorbed attention with float arithmetic, for any type and width: a block takes one split of a row for four heads.
/// The weighted sums are kept in `part`, each element by the thread that owns it.
template <class T>
__global__ void __launch_bounds__(mla_threads) mla_attend_general(MlaAttendArguments<T> a) {
  constexpr unsigned heads = mla_general_heads;
  __shared__ const T* rows[mla_tile];
  __shared__ float weights[mla_tile][heads];
  __shared__ float factors[heads];
  const size row = blockIdx.z;
  const MlaRow r = a.rows.find(row, a.cache);
  const unsigned split = blockIdx.x, each = mla_split_tiles(r.length), first_head = blockIdx.y * heads;
  if (!r.live || split >= mla_splits(r.length)) return;
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto head_of = [&](unsigned h) { return first_head + h < a.heads ? first_head + h : a.heads - 1; };
  const T* q[heads];
#pragma unroll
  for (unsigned h = 0; h < heads; ++h) q[h] = a.q + row * a.q_row + head_of(h) * a.q_head;

  MlaStats stats{SoftmaxState<float>::no_max, 0};  // of head `warp`
  bool missing = false;
  const unsigned end = detail::smaller((split + 1) * each * mla_tile, r.length);
  for (unsigned first = split * each * mla_tile; first < end; first += mla_tile) {
    const unsigned count = detail::smaller(mla_tile, end - first);
    const bool opening = first == split * each * mla_tile;
    if (threadIdx.x < count) rows[threadIdx.x] = a.cache.row(r.slot, first + threadIdx.x);
    __syncthreads();
    for (unsigned j = warp; j < count; j += mla_warps) {
      const T* const from = rows[j];
      float score[heads] = {};
      missing = missing || from == nullptr;
      if (from)
        for (unsigned i = lane; i < a.width; i += 32) {
          const float c = static_cast<float>(from[i]);
#pragma unroll
          for (unsigned h = 0; h < heads; ++h) score[h] = __fmaf_rn(static_cast<float>(q[h][i]), c, score[h]);
        }
#pragma unroll
      for (unsigned h = 0; h < heads; ++h) {
        const float sum = warp_sum(score[h]);
        if (lane == 0) weights[j][h] = sum * a.scale;
      }
    }
    __syncthreads();
    if (warp < heads) {
      const float score[2] = {lane < count ? weights[lane][warp] : SoftmaxState<float>::no_max,
                              lane + 32 < count ? weights[lane + 32][warp] : SoftmaxState<float>::no_max};
      const float largest = warp_max(score[0] < score[1] ? score[1] : score[0]);
      const float joint = largest > stats.max ? largest : stats.max;
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[i] = lane + i * 32 < count ? exp2f(score[i] - joint) : 0.0f;
        if (lane + i * 32 < count) weights[lane + i * 32][warp] = static_cast<float>(static_cast<T>(weight[i]));
      }
      const float factor = mla_rescale(stats.max, joint);
      stats.sum = __fmaf_rn(stats.sum, factor, warp_sum(weight[0] + weight[1]));
      stats.max = joint;
      if (lane == 0) factors[warp] = factor;
    }
    __syncthreads();
    for (unsigned c = threadIdx.x; c < a.latent; c += mla_threads) {
      float value[heads];
#pragma unroll
      for (unsigned h = 0; h < heads; ++h)
        value[h] = opening ? 0.0f : a.part[a.split_at(row, head_of(h), split) * a.latent + c] * factors[h];
#pragma unroll 8
      for (unsigned j = 0; j < count; ++j) {
        const float element = rows[j] ? static_cast<float>(rows[j][c]) : 0.0f;
#pragma unroll
        for (unsigned h = 0; h < heads; ++h) value[h] = __fmaf_rn(weights[j][h], element, value[h]);
      }
#pragma unroll
      for (unsigned h = 0; h < heads; ++h)
        if (first_head + h < a.heads) a.part[a.split_at(row, first_head + h, split) * a.latent + c] = value[h];
    }
    __syncthreads();
  }
  missing = __syncthreads_or(missing);
  if (warp < heads && lane == 0 && first_head + warp < a.heads)
    a.stats[a.split_at(row, first_head + warp, split)] = {stats.max, missing ? -1.0f : stats.sum};
}

}  // namespace k3::kernel
