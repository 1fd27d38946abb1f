// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <k3/kernels/mla_wide_copies.cuh>

// Absorbed attention of latents of 512 and keys of 576 on the tensor cores of sm_90a. A block takes N heads (96 or 48)
// of a row through tiles of 64 positions with two warpgroups. Each computes
//   scores^T [64, N / 2] = C Q^T of half the heads, and their weights, rounded to bf16, to shared memory as [N, 64],
//   values^T [256, N] += C^T weights of half the latent columns, in registers throughout.
// Keys, and latent columns, are on the M side of the product and heads on the N side: 96 heads are not padded. A tile
// arrives as 9 pieces of 64 columns. Pieces of 256 latent columns go round in a ring that the warpgroup which adds
// these values refills as soon as it has added one; the key part has a place of its own. Scores of the next tile are
// computed while the values of this one are added.
//
// A head's weights are relative to a maximum that is only raised when a weight would be above 2^8, so values
// seldom have to be rescaled. Each head decides for itself: its bits do not depend on the others of the block.
namespace k3::kernel {

/// A block's two warpgroups: both compute the scores of half the heads, and the values of half the latent columns.
template <int N>
struct MlaWideBlock : MlaWideCopies<N> {
  using Base = MlaWideCopies<N>;
  using Base::after, Base::at, Base::group, Base::half, Base::key_place, Base::keys, Base::lane, Base::later,
      Base::load;
  using Base::load_first, Base::memory, Base::next_place, Base::replace, Base::ring, Base::shared, Base::sync_half;
  using Base::thread, Base::w, Base::warp, Base::Base;
  static constexpr unsigned own = N / 2;  // heads whose weights a warpgroup computes
  unsigned ordinal = 0;                   // tiles before it
  float s[N / 4];  // scores, weights: keys warp * 16 + lane / 4 (+ 8), heads half * own + 8 j + lane % 4 * 2 (+ 1)
  float o[4]
         [N / 2];  // values: columns (half * 4 + c) * 64 + warp * 16 + lane / 4 (+ 8), heads 8 j + lane % 4 * 2 (+ 1)

  // As matrix products name the block's memory, the queries of this half, and a piece.
  const unsigned operands = wgmma_operand(uniform(async::shared_address(&memory)));
  const unsigned query_operands =
      operands + static_cast<unsigned>(offsetof(MlaWideShared<N>, q) / 16) + half * (own * 128 / 16);
  __device__ __forceinline__ unsigned piece_operand(unsigned slot) const {
    return operands + static_cast<unsigned>(offsetof(MlaWideShared<N>, pieces) / 16) + slot * (mla_piece_bytes / 16);
  }

  __device__ __forceinline__ void wait_full(unsigned slot, unsigned parity) const {
    async::wait(shared.full[slot], parity);
  }
  /// s += of 64 columns.
  __device__ __forceinline__ void add_scores(unsigned slot, unsigned column, bool add) {
    const unsigned keys = piece_operand(slot), queries = query_operands + column * (N * 128 / 16);
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) wgmma<0>(s, keys + 2 * k, queries + 2 * k, add || k > 0);
  }
  /// Of piece i of both halves of a tile.
  __device__ __forceinline__ void add_pieces(const MlaRing<ring>& of, unsigned i) {
    add_scores(of.slot(i), i, i > 0);
    add_scores(ring + of.slot(i), 4 + i, true);
  }
  __device__ __forceinline__ void wait_pieces(const MlaRing<ring>& of, unsigned i) const {
    wait_full(of.slot(i), of.phase(i));
    wait_full(ring + of.slot(i), of.phase(i));
  }
  /// Of the first two pieces of both halves.
  __device__ __forceinline__ void compute_first_scores(const MlaRing<ring>& of) {
    wait_pieces(of, 0);
    wait_pieces(of, 1);
    wgmma_fence();
    add_pieces(of, 0);
    add_pieces(of, 1);
    wgmma_commit();
  }
  /// Of the keys' own part and the other pieces.
  __device__ __forceinline__ void compute_other_scores(const MlaRing<ring>& of, unsigned number) {
    wait_full(2 * ring, number % 2);
    wait_pieces(of, 2);
    wgmma_fence();
    add_scores(2 * ring, 8, true);
    add_pieces(of, 2);
    wait_pieces(of, 3);
    wgmma_fence();
    add_pieces(of, 3);
    wgmma_commit();
  }

  /// The last tile of a row: scores of positions from `valid` on are none, and their values zeros.
  __device__ __forceinline__ void clear_tail(unsigned valid) {
    const unsigned key = warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      if (key + i / 2 % 2 * 8 >= valid) s[i] = SoftmaxState<float>::no_max;
    for (unsigned i = thread; i < (mla_tile - valid) * 32; i += 128) {
      const unsigned slot = half * ring + at.slot(i / 8 % 4);
      *reinterpret_cast<uint4*>(memory.pieces[slot] + (valid + i / 32) * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }

  /// Raises the maxima of heads that a score exceeds by too much.
  __device__ __forceinline__ void raise() {
#pragma unroll
    for (int j = 0; j < N / 16; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float largest = fmaxf(s[4 * j + e], s[4 * j + 2 + e]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(full_warp, largest, offset));
        if (lane < 4) shared.scratch[warp][half * own + 8 * j + 2 * lane + e] = largest;
      }
    async::wait(shared.weights_empty, (ordinal & 1) ^ 1);  // nobody reads the factors of the tile before
    sync_half();
    if (thread < own) {
      const unsigned head = half * own + thread;
      float max = shared.max[head], largest = shared.scratch[0][head];
#pragma unroll
      for (int i = 1; i < 4; ++i) largest = fmaxf(largest, shared.scratch[i][head]);
      shared.factor[head] = mla_raise(max, largest, w.a.scale);
      shared.max[head] = max;
    }
    sync_half();
  }

  /// Weights from the scores and the maxima of now; returns the largest exponent.
  __device__ __forceinline__ float exponentiate(unsigned (&packed)[N / 8]) const {
    const float2* const max = reinterpret_cast<const float2*>(shared.max + half * own) + lane % 4;
    float most = SoftmaxState<float>::no_max;
#pragma unroll
    for (int j = 0; j < N / 16; ++j) {
      const float2 m = max[4 * j];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        packed[2 * j + i] = mla_weigh(s[4 * j + 2 * i], s[4 * j + 2 * i + 1], w.a.scale, m.x, m.y, most);
    }
    return most;
  }
  /// Returns whether values must be rescaled.
  __device__ __forceinline__ bool compute_weights() {
    unsigned packed[N / 8];
    const bool raised = group_any<128>(1 + half, exponentiate(packed) > mla_wide_slack);
    if (raised) {
      raise();
      exponentiate(packed);
    }
    async::wait(shared.weights_empty, (ordinal & 1) ^ 1);
    if (thread == 0) shared.rescale[half] = raised;
    const unsigned head = half * own + lane % 8, piece = warp * 2 + lane / 8 % 2;
    const unsigned to = async::shared_address(memory.weights) + head * 128 + (piece ^ lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < N / 16; ++j) store_transposed(to + j * 1024, packed[2 * j], packed[2 * j + 1]);
    async::fence();
    return group_any<256>(3, raised);
  }

  __device__ __forceinline__ void rescale() {
    const float2* const factors = reinterpret_cast<const float2*>(shared.factor) + lane % 4;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if (!shared.rescale[j / (N / 16)]) continue;
      const float2 f = factors[4 * j];
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[c][4 * j + e] *= e % 2 ? f.y : f.x;
    }
  }

  __device__ __forceinline__ void add_values(bool first) {
    const unsigned weights = operands + static_cast<unsigned>(offsetof(MlaWideShared<N>, weights) / 16);
    wgmma_fence();
#pragma unroll
    for (unsigned c = 0; c < 4; ++c) {
      const unsigned values = piece_operand(half * ring + at.slot(c));
#pragma unroll
      for (unsigned k = 0; k < 4; ++k) wgmma<1>(o[c], values + 128 * k, weights + 2 * k, !first || k > 0);
      wgmma_commit();
    }
  }

  /// The weights as they were rounded, in a fixed order: two threads a head.
  __device__ __forceinline__ void add_weights(bool first) const {
    if (thread >= 2 * own) return;
    const unsigned head = half * own + thread / 2;
    const float sum = mla_sum_weights(memory.weights, head, own < 48 ? __activemask() : full_warp);
    if (thread % 2 != 0) return;
    const float before = first ? 0.0f : shared.sum[head];
    shared.sum[head] = __fmaf_rn(before, shared.rescale[half] ? shared.factor[head] : 1.0f, sum);
  }

  /// Output of a row that is all here; the sums are inverted.
  __device__ __forceinline__ void store_result(unsigned row, bool missing) const {
    const unsigned head = lane % 4 * 2, column = half * 256 + warp * 16 + lane / 4;
    const unsigned heads = w.a.heads - group * N, stride = static_cast<unsigned>(w.a.out_head);
    float* const out = w.a.out + row * w.a.out_row + group * N * w.a.out_head + column;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const unsigned h = head + 8 * j + e;
        const float factor = shared.sum[h];
        if (h >= heads) continue;
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            out[h * stride + c * 64 + i * 8] = missing ? 0.0f : o[c][4 * j + 2 * i + e] * factor;
      }
    if (threadIdx.x == 0 && group == 0) {
      w.a.live[row] = !missing;
      if (missing) w.a.rows.report(row);
    }
  }

  /// Part of a row, for mla_combine_wide.
  __device__ __forceinline__ void store_part(unsigned place) const {
    mla_store_values<N>(w, ((place * size{w.octets()} + group * (N / 8)) * 4 + half * 2) * 128 + thread, o);
  }

  /// Asks for the first tiles of the segment, whose queries may be there already.
  __device__ __forceinline__ void start(const MlaRuns& runs, bool again) {
    load_first(uniform(shared.segment.first), uniform(shared.segment.count), again);
    if (threadIdx.x == 0) runs.look_ahead();
    mla_check_pages(w, shared);
  }
  /// Stores what the segment gave while the next one's first tiles come.
  __device__ __forceinline__ void finish(const MlaRuns& runs) {
    const MlaSegment& g = shared.segment;
    const unsigned row = g.row, place = g.place, whole = g.whole, head = half * own + thread;
    const bool missing = shared.missing;
    group_sync<256>(3);  // the sums are there, the operands no longer needed
    runs.advance();
    if (thread < own) {
      const float sum = shared.sum[head];
      if (whole)
        shared.sum[head] = missing ? 0.0f : 1 / sum;
      else
        w.stats[place * size{8} * w.octets() + group * N + head] = {shared.max[head], missing ? -1.0f : sum};
      shared.max[head] = SoftmaxState<float>::no_max;
    }
    group_sync<256>(3);
    if (g.count > 0) start(runs, g.row == row);
    if (whole)
      store_result(row, missing);
    else
      store_part(place);
  }

  __device__ __forceinline__ void run(const MlaRuns& runs) {
    const MlaSegment& g = shared.segment;
    const unsigned first = uniform(g.first), count = uniform(g.count);
    compute_first_scores(at);
    compute_other_scores(at, ordinal);
    wgmma_wait<0>();
    for (unsigned i = 0; i < count; ++i) {
      const unsigned left = count - i, valid = g.length - (first + i) * mla_tile;
      if (valid < mla_tile) clear_tail(valid);
      if (compute_weights() && i > 0) rescale();
      add_values(i == 0);
      if (keys && left > 1) load(2 * ring, 8, key_place);  // all are past the scores
      MlaRing<ring> ahead = at;
      ahead.next_tile();
      if (left > 1) {
        wgmma_wait<3>();
        replace(0, left);
        wgmma_wait<2>();
        replace(1, left);
        compute_first_scores(ahead);
        if (half == 0) add_weights(i == 0);  // not when the other half does: one of them keeps the tensor cores busy
        wgmma_wait<2>();
        replace(2, left);
        wgmma_wait<1>();
        replace(3, left);
        if (lane == 0) async::arrive(shared.weights_empty);
        compute_other_scores(ahead, ordinal + 1);
        key_place = next_place;
        if (left > later + 1) next_place = after(next_place);
      } else {
        wgmma_wait<0>();
        for (unsigned c = 0; c < 4; ++c) replace(c, left);
        if (lane == 0) async::arrive(shared.weights_empty);
      }
      if (half == 1 || left == 1) add_weights(i == 0);
      wgmma_wait<0>();
      at = ahead;
      ++ordinal;
    }
    finish(runs);
  }
};

/// A block's whole work, with N heads to a block.
template <int N>
__device__ __forceinline__ void mla_wide_run(const MlaWideArguments& w, const CUtensorMap* q_map,
                                             const CUtensorMap* kv_map, unsigned char* memory, const MlaRow& row) {
  MlaWideShared<N>& shared = *reinterpret_cast<MlaWideShared<N>*>(memory);
  const unsigned groups = (w.a.heads + N - 1) / N;
  const MlaRuns runs{w, shared.control, detail::larger(gridDim.x / groups, 1u), blockIdx.x / groups};
  runs.make(row);
  MlaWideBlock<N> block(w, shared, q_map, kv_map, blockIdx.x % groups);
  if (threadIdx.x < N) shared.control.max[threadIdx.x] = SoftmaxState<float>::no_max;
  __syncthreads();
  if (uniform(shared.control.segment.count) == 0) return;
  block.start(runs, false);
  do block.run(runs);
  while (uniform(shared.control.segment.count) > 0);
}

/// Grid: a block to a multiprocessor, at least one for 48 heads. Where there are few tiles 48 heads to a block are
/// faster, elsewhere 96; a row's bits are the same.
static __global__ void __launch_bounds__(mla_wide_threads, 1)
    mla_attend_wide(const __grid_constant__ MlaWideArguments w, const __grid_constant__ CUtensorMap q_map,
                    const __grid_constant__ CUtensorMap kv_map) {
  if constexpr (on_hopper) {
    extern __shared__ __align__(1024) unsigned char mla_wide_shared[];
    MlaWideControl& shared = *reinterpret_cast<MlaWideControl*>(mla_wide_shared);
    if (threadIdx.x == 32) async::prefetch_map(&q_map);
    if (threadIdx.x == 64) async::prefetch_map(&kv_map);
    if (threadIdx.x == 96) {
      for (async::Barrier& full : shared.full) async::init(full, 1);
      for (async::Barrier& empty : shared.empty) async::init(empty, 4);
      async::init(shared.weights_empty, 8);
      async::init_fence();
    }
    wait_for_earlier();
    let_later_start();
    MlaRow row;
    if (threadIdx.x < w.a.rows.count) row = w.a.rows.find(threadIdx.x, w.a.cache);
    const unsigned tiles = MlaRuns::tiles(row), most = mla_wide_few(w.independent) * gridDim.x;
    // Saturated, so that the sum of all threads does not wrap.
    const unsigned sum = __reduce_add_sync(full_warp, detail::smaller(tiles, most + 1));
    unsigned* const sums = reinterpret_cast<unsigned*>(shared.max);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    unsigned total = 0;
#pragma unroll
    for (unsigned i = 0; i < mla_wide_threads / 32; ++i) total += sums[i];
    __syncthreads();
    total = uniform(total);
    if (w.a.heads <= 48 || total <= most)
      mla_wide_run<48>(w, &q_map, &kv_map, mla_wide_shared, row);
    else
      mla_wide_run<96>(w, &q_map, &kv_map, mla_wide_shared, row);
  }
}

}  // namespace k3::kernel
