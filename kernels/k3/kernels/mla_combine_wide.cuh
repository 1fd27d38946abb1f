// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/grid_order.cuh>
#include <k3/kernels/mla_wide_runs.cuh>

namespace k3::kernel {

inline constexpr unsigned mla_wide_parts = 256;   ///< of a row, at most
inline constexpr unsigned mla_combine_lanes = 8;  ///< sums of every eighth part, added in their order

/// Joins the parts of a row, or writes the zeros of one that has no result. Grid: steps, rows; a block of 128 `Shares`
/// threads does 64 columns of 8 heads at a time. The number of shares changes no bit.
template <int Shares>
__global__ void __launch_bounds__(128 * Shares) mla_combine_wide(const __grid_constant__ MlaWideArguments w) {
  constexpr int each = mla_combine_lanes / Shares;
  __shared__ float weights[8][mla_wide_parts];
  __shared__ float4 sums[mla_combine_lanes][128];
  __shared__ float divisors[8];
  const unsigned row = blockIdx.y, thread = threadIdx.x % 128, share = threadIdx.x / 128;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  wait_for_earlier();
  let_later_start();
  uint2 segment = w.segments[row];
  const MlaRow r = w.a.rows.find(row, w.a.cache);
  if (!r.live) segment = make_uint2(0, 0);
  if (segment.y == 1) return;  // written where it was computed
  const unsigned octets = w.octets(), pieces = 8 * octets;
  bool missing = false;
  for (unsigned p = blockIdx.x; p < pieces; p += gridDim.x) {
    const unsigned octet = p % octets, c = p / octets;
    if (octet * 8 >= w.a.heads) continue;
    const auto place = [&](unsigned s) {
      return static_cast<size>(w.independent ? segment.x + s : s == 0 ? 2 * segment.x + 1 : 2 * (segment.x + s));
    };
    const auto part = [&](unsigned s) {
      return reinterpret_cast<const float4*>(w.part)[((place(s) * 8 + c) * octets + octet) * 128 + thread];
    };
    float4 ahead[8 / each][each];  // loaded before their weights are known
#pragma unroll
    for (unsigned i = 0; i < 8 / each; ++i)
#pragma unroll
      for (unsigned k = 0; k < each; ++k) {
        const unsigned s = i * mla_combine_lanes + share * each + k;
        ahead[i][k] = s < segment.y ? part(s) : make_float4(0, 0, 0, 0);
      }
    __syncthreads();
    for (unsigned head = warp; head < 8; head += 4 * Shares) {
      const auto stats = [&](unsigned s) { return w.stats[(place(s) * octets + octet) * 8 + head]; };
      float largest = SoftmaxState<float>::no_max, sum = 0;
      for (unsigned s = lane; s < segment.y; s += 32) largest = fmaxf(largest, stats(s).max);
      largest = warp_max(largest);
      bool bad = false;
      for (unsigned s = lane; s < segment.y; s += 32) {
        const MlaStats one = stats(s);
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
#pragma unroll 4
    for (unsigned i = 8 / each; i * mla_combine_lanes < segment.y; ++i)
#pragma unroll
      for (unsigned k = 0; k < each; ++k) {
        const unsigned s = i * mla_combine_lanes + share * each + k;
        if (s < segment.y) add(total[k], part(s), s);
      }
#pragma unroll
    for (unsigned k = 0; k < each; ++k) sums[share * each + k][thread] = total[k];
    __syncthreads();
    missing = !r.live || divisors[0] < 0;
    if (share == 0) {
      float4 all = sums[0][thread];
#pragma unroll
      for (unsigned i = 1; i < mla_combine_lanes; ++i) {
        const float4 other = sums[i][thread];
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
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    w.a.live[row] = !missing;
    if (r.bad || (r.live && missing)) w.a.rows.report(row);
  }
}

}  // namespace k3::kernel
