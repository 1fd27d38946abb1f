// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/grid_order.cuh>
#include <k3/kernels/mla_wide_runs.cuh>

namespace k3::kernel {

inline constexpr unsigned mla_wide_parts = 256;  ///< of a row, at most
/// Parts 8 c to 8 c + 7 are added in one chain; chain c + 8 continues chain c, and so on. The 8 chains are added in
/// their order.
inline constexpr unsigned mla_chain = 8, mla_chains = 8;

/// A row to be joined.
struct MlaWideRow {
  unsigned row, place, parts;
};

/// What a block joins: 4 heads of 8 (every other one) and half of the latent columns, or a part of these.
struct MlaWideJoin {
  const MlaWideArguments& w;
  unsigned octet, side;  // side: half of the columns, and whether the heads are odd
  MlaWideRow r;

  __device__ __forceinline__ size place(unsigned s) const {
    return w.independent ? r.place + s : s == 0 ? 2 * r.place + 1 : 2 * (r.place + s);
  }
  /// Where the values of part s begin.
  __device__ __forceinline__ size index(unsigned s) const { return ((place(s) * w.octets() + octet) * 4 + side) * 128; }
  __device__ __forceinline__ MlaStats stats(unsigned head, unsigned s) const {
    return s < r.parts ? w.stats[(place(s) * w.octets() + octet) * 8 + head] : MlaStats{SoftmaxState<float>::no_max, 0};
  }
  /// Weights of a head's parts; `first`: statistics of those of its lane. One warp. Returns 1 / their sum, or -1 where
  /// a part is missing.
  __device__ __forceinline__ float weigh(unsigned head, const MlaStats (&first)[2], float* weights) const {
    const unsigned lane = threadIdx.x % 32;
    float largest = fmaxf(first[0].max, first[1].max), sum = 0;
    for (unsigned s = lane + 64; s < r.parts; s += 32) largest = fmaxf(largest, stats(head, s).max);
    largest = warp_max(largest);
    bool bad = false;
    for (unsigned s = lane; s < r.parts; s += 32) {
      const MlaStats one = s < 32 ? first[0] : s < 64 ? first[1] : stats(head, s);
      const float weight = mla_rescale(one.max, largest);
      weights[s] = weight;
      sum = __fmaf_rn(one.sum, weight, sum);
      bad = bad || one.sum < 0;
    }
    sum = warp_sum(sum);
    return __any_sync(full_warp, bad) ? -1.0f : 1 / sum;
  }
};

/// Joins the parts of rows, or writes the zeros of those that have no result. A thread joins 8 values of a head; Shares
/// threads share the chains of the same values. A block of Width Shares threads; a grid of any size, whose blocks take
/// pieces in turn: 48 * 128 / Width for 96 heads of a row. None of these numbers changes a bit.
template <int Width, int Shares>
__global__ void __launch_bounds__(Width* Shares, 768 / (Width * Shares))
    mla_combine_wide(const __grid_constant__ MlaWideArguments w) {
  constexpr int values = 8, pieces_each = 128 / Width;
  __shared__ float weights[4][mla_wide_parts];
  __shared__ float sums[Shares > 1 ? mla_chains : 1][values][Shares > 1 ? Width : 1];
  __shared__ float divisors[4];
  __shared__ MlaWideRow list[mla_wide_rows];
  __shared__ unsigned listed;
  const unsigned in_share = threadIdx.x % Width, share = threadIdx.x / Width;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  wait_for_earlier();
  let_later_start();
  if (warp == 0) {
    constexpr unsigned each = mla_wide_rows / 32;
    uint2 segments[each];
#pragma unroll
    for (unsigned i = 0; i < each; ++i)
      segments[i] = i * 32 + lane < w.a.rows.count ? __ldcg(w.segments + i * 32 + lane) : make_uint2(0, 1);
    unsigned count = 0;
#pragma unroll
    for (unsigned i = 0; i < each; ++i) {  // a row of one part was written where it was computed
      const unsigned joined = __ballot_sync(full_warp, segments[i].y != 1);
      const unsigned at = count + __popc(joined & ((1u << lane) - 1));
      if (segments[i].y != 1) list[at] = {i * 32 + lane, segments[i].x, segments[i].y};
      count += __popc(joined);
    }
    if (lane == 0) listed = count;
  }
  __syncthreads();
  const unsigned pieces = (w.a.heads + 7) / 8 * 4 * pieces_each, items = pieces * listed;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const unsigned in_list = item / pieces, piece = item - in_list * pieces;
    const unsigned side = piece / pieces_each % 4, octet = piece / pieces_each / 4;
    const unsigned thread = piece % pieces_each * Width + in_share;
    const MlaWideJoin join{w, octet, side, list[in_list]};
    const unsigned parts = join.r.parts, own = 2 * warp + side % 2;
    const bool weighs = warp < 4;
    MlaStats first[2]{};
    if (weighs) {
      first[0] = join.stats(own, lane);
      first[1] = join.stats(own, lane + 32);
    }
    uint4 ahead[mla_chain];
    unsigned exponents[mla_chain];
    const auto load = [&](unsigned chain) {
#pragma unroll
      for (unsigned k = 0; k < mla_chain; ++k) {
        const unsigned s = chain * mla_chain + k;
        if (s >= parts) continue;
        const size at = join.index(s);
        ahead[k] = __ldcg(w.part + at + thread);
        exponents[k] = __ldcg(w.exponents + at + thread);
      }
    };
    load(share);
    if (weighs) {
      const float divided = join.weigh(own, first, weights[warp]);
      if (lane == 0) divisors[warp] = divided;
    }
    __syncthreads();
    const unsigned quarter = thread % 4;
    float total[values] = {};
#pragma unroll 1
    for (unsigned chain = share; chain < mla_chains && chain * mla_chain < parts; chain += Shares) {
      float sum[values] = {};
#pragma unroll 1
      for (unsigned part = chain; part * mla_chain < parts; part += mla_chains) {
        if (part != share) load(part);
#pragma unroll
        for (unsigned k = 0; k < mla_chain; ++k) {
          const unsigned s = part * mla_chain + k;
          if (s >= parts) continue;
          const float weight = weights[quarter][s] * __uint_as_float(exponents[k] << 23);
          const unsigned four[4] = {ahead[k].x, ahead[k].y, ahead[k].z, ahead[k].w};
#pragma unroll
          for (int i = 0; i < values; ++i) sum[i] = __fmaf_rn(mla_unpacked(four[i / 2], i % 2), weight, sum[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < values; ++i) {
        if constexpr (Shares > 1)
          sums[chain][i][in_share] = sum[i];
        else
          total[i] = chain == 0 ? sum[i] : total[i] + sum[i];
      }
    }
    if constexpr (Shares > 1) __syncthreads();
    const float divisor = divisors[quarter];
    const bool missing = parts == 0 || divisor < 0;
    const unsigned h = octet * 8 + 2 * quarter + side % 2;
    const unsigned column = side / 2 * 256 + thread / 32 * 16 + thread % 32 / 4;
    float* const out = w.a.out + join.r.row * w.a.out_row + h * w.a.out_head + column;
#pragma unroll
    for (int i = 0; i < values; ++i) {
      if (Shares > 1 && i % Shares != static_cast<int>(share)) continue;
      if constexpr (Shares > 1)
        for (unsigned chain = 0; chain < mla_chains && chain * mla_chain < parts; ++chain)
          total[i] = chain == 0 ? sums[0][i][in_share] : total[i] + sums[chain][i][in_share];
      if (h < w.a.heads) out[i / 2 * 64 + i % 2 * 8] = missing ? 0.0f : total[i] * divisor;
    }
    if (piece == 0 && threadIdx.x == 0) {
      w.a.live[join.r.row] = !missing;
      if (missing && (parts > 0 || w.a.rows.find(join.r.row, w.a.cache).bad)) w.a.rows.report(join.r.row);
    }
    __syncthreads();
  }
}

}  // namespace k3::kernel
