// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/grid_order.cuh>
#include <k3/kernels/mla_wide_runs.cuh>

namespace k3::kernel {

inline constexpr unsigned mla_wide_parts = 256;   ///< of a row, at most
inline constexpr unsigned mla_combine_lanes = 8;  ///< sums of every eighth part, added in their order

/// Joins the parts of a row, or writes the zeros of one that has no result. Grid: 128 / Width for each 64 columns of 8
/// heads, rows; a block of Width Shares threads. Neither number changes a bit.
template <int Width, int Shares>
__global__ void __launch_bounds__(Width* Shares, Shares == 1 ? 9 : 1)
    mla_combine_wide(const __grid_constant__ MlaWideArguments w) {
  constexpr int each = mla_combine_lanes / Shares, warps = Width * Shares / 32, heads_each = 8 / warps;
  __shared__ float weights[8][mla_wide_parts];
  __shared__ float4 sums[Shares > 1 ? mla_combine_lanes : 1][Width];
  __shared__ float divisors[8];
  const unsigned row = blockIdx.y, piece = blockIdx.x / (128 / Width), in_share = threadIdx.x % Width;
  const unsigned thread = blockIdx.x % (128 / Width) * Width + in_share, share = threadIdx.x / Width;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned octets = w.octets(), octet = piece % octets, c = piece / octets;
  if (octet * 8 >= w.a.heads) return wait_for_earlier();
  wait_for_earlier();
  let_later_start();
  uint2 segment = w.segments[row];
  const MlaRow r = w.a.rows.find(row, w.a.cache);
  if (!r.live) segment = make_uint2(0, 0);
  if (segment.y == 1) return;  // written where it was computed
  const auto place = [&](unsigned s) {
    return static_cast<size>(w.independent ? segment.x + s : s == 0 ? 2 * segment.x + 1 : 2 * (segment.x + s));
  };
  const auto part = [&](unsigned s) {
    return reinterpret_cast<const float4*>(w.part)[((place(s) * 8 + c) * octets + octet) * 128 + thread];
  };
  const auto stats = [&](unsigned head, unsigned s) {
    return s < segment.y ? w.stats[(place(s) * octets + octet) * 8 + head] : MlaStats{SoftmaxState<float>::no_max, 0};
  };
  MlaStats first[heads_each];
#pragma unroll
  for (unsigned i = 0; i < heads_each; ++i) first[i] = stats(warp + i * warps, lane);
  float4 ahead[8 / each][each];  // loaded before their weights are known
#pragma unroll
  for (unsigned i = 0; i < 8 / each; ++i)
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
      const unsigned s = i * mla_combine_lanes + share * each + k;
      ahead[i][k] = s < segment.y ? part(s) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
  for (unsigned i = 0; i < heads_each; ++i) {
    const unsigned head = warp + i * warps;
    float largest = first[i].max, sum = 0;
    for (unsigned s = lane + 32; s < segment.y; s += 32) largest = fmaxf(largest, stats(head, s).max);
    largest = warp_max(largest);
    bool bad = false;
    MlaStats one = first[i];
    for (unsigned s = lane; s < segment.y; s += 32) {
      if (s != lane) one = stats(head, s);
      const float weight = mla_rescale(one.max, largest);
      weights[head][s] = weight;
      sum = __fmaf_rn(one.sum, weight, sum);
      bad = bad || one.sum < 0;
    }
    sum = warp_sum(sum);
    bad = __any_sync(full_warp, bad);
    if (lane == 0) divisors[head] = bad ? -1.0f : 1 / sum;
  }
  __syncthreads();
  const unsigned pair = thread % 4 * 2;
  float4 total[each] = {};
  const auto add = [&](float4& to, const float4& from, unsigned s) {
    const float x = weights[pair][s], y = weights[pair + 1][s];
    to.x = __fmaf_rn(from.x, x, to.x), to.y = __fmaf_rn(from.y, y, to.y);
    to.z = __fmaf_rn(from.z, x, to.z), to.w = __fmaf_rn(from.w, y, to.w);
  };
#pragma unroll
  for (unsigned i = 0; i < 8 / each; ++i)
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
      const unsigned s = i * mla_combine_lanes + share * each + k;
      if (s < segment.y) add(total[k], ahead[i][k], s);
    }
#pragma unroll 2
  for (unsigned i = 8 / each; i * mla_combine_lanes < segment.y; ++i)
#pragma unroll
    for (unsigned k = 0; k < each; ++k) {
      const unsigned s = i * mla_combine_lanes + share * each + k;
      if (s < segment.y) add(total[k], part(s), s);
    }
  if constexpr (Shares > 1) {
#pragma unroll
    for (unsigned k = 0; k < each; ++k) sums[share * each + k][in_share] = total[k];
    __syncthreads();
  }
  const bool missing = !r.live || divisors[0] < 0;
  if (share == 0) {
    float4 all = Shares > 1 ? sums[0][in_share] : total[0];
#pragma unroll
    for (unsigned i = 1; i < mla_combine_lanes; ++i) {
      const float4 other = Shares > 1 ? sums[Shares > 1 ? i : 0][in_share] : total[i % each];
      all.x += other.x, all.y += other.y, all.z += other.z, all.w += other.w;
    }
    const unsigned h = octet * 8 + pair, column = c * 64 + thread / 32 * 16 + thread % 32 / 4;
    float* const out = w.a.out + row * w.a.out_row + column;
    const float x = divisors[pair], y = divisors[pair + 1];
    if (h < w.a.heads) {
      out[h * w.a.out_head] = missing ? 0.0f : all.x * x;
      out[h * w.a.out_head + 8] = missing ? 0.0f : all.z * x;
    }
    if (h + 1 < w.a.heads) {
      out[(h + 1) * w.a.out_head] = missing ? 0.0f : all.y * y;
      out[(h + 1) * w.a.out_head + 8] = missing ? 0.0f : all.w * y;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    w.a.live[row] = !missing;
    if (r.bad || (r.live && missing)) w.a.rows.report(row);
  }
}

}  // namespace k3::kernel
