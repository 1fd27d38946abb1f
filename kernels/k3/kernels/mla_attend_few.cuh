// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/mla_few_copies.cuh>

// Absorbed attention as mla_attend_wide computes it, with the same bits, for few rows. A block takes 48 heads of a row
// through tiles of 64 positions with four warpgroups. One keeps the queries in registers and computes
//   scores [48, 64] = Q C^T, and their weights, rounded to bf16, to shared memory,
// two others, each for half of the latent columns and in registers throughout,
//   values^T [256, 48] += C^T weights,
// and the last one copies. Values of a tile wait until the products of the next one's scores are on their way: so they
// are added while the weights of these are computed, and do not delay the scores, which everything else waits for.
namespace k3::kernel {

/// The warpgroup that computes scores and weights. Products have 64 rows: the last warp's are none.
struct MlaFewScores : MlaFewPart {
  using MlaFewPart::MlaFewPart;
  unsigned segments = 0;
  unsigned q[36][4];  // queries: heads warp * 16 + lane / 4 (+ 8), columns 16 k + lane % 4 * 2 (+ 1, + 8, + 9)
  float s[32];        // scores: the same heads, keys 8 j + lane % 4 * 2 (+ 1)
  float max[2];       // of these heads

  __device__ __forceinline__ void take_queries() {
    async::wait(memory.queries, segments++ % 2);
    const unsigned from = async::shared_address(queries()) + (warp * 16 + lane % 16) * 128;
#pragma unroll
    for (unsigned k = 0; k < 36; ++k) {
      q[k][0] = q[k][1] = q[k][2] = q[k][3] = 0;
      if (warp < 3)
        load_matrices(from + k / 4 * (mla_few_heads * 128) + (((k % 4 * 2 + lane / 16) ^ lane % 8) * 16), q[k]);
    }
    group_sync<128>(mla_few_scores);  // clear_tail may write there
  }

  __device__ __forceinline__ void load_first(unsigned first, unsigned count) const {
    if (warp == 0) load_queries(8);
    if (warp < 2 && warp < count) load_keys((at.ordinal + warp) % 2, place_of(first + warp));
  }

  /// s += of 64 columns.
  __device__ __forceinline__ void add_scores(unsigned column, bool add) {
    const unsigned keys = column < 8 ? piece_operand(column) : keys_operand();
    if (column < 8)
      async::wait(memory.full[at.buffer][column], at.passed);
    else
      async::wait(memory.keys_full[at.pair()], at.parity());
    wgmma_fence();
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) wgmma_64(s, q[4 * column + k], keys + 2 * k, add || k > 0);
  }
  __device__ __forceinline__ void compute_scores() {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      add_scores(i, i > 0);
      add_scores(4 + i, true);
      if (i == 1) add_scores(8, true);
    }
    release(memory.issued[at.pair()]);
    wgmma_commit();
    wgmma_wait<0>();
    release(memory.keys_empty[at.pair()]);
  }

  /// The last tile of a row: scores of positions from `valid` on are none, and their values zeros.
  __device__ __forceinline__ void clear_tail(unsigned valid) {
#pragma unroll
    for (unsigned i = 0; i < 32; ++i)
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= valid) s[i] = SoftmaxState<float>::no_max;
    for (unsigned i = thread; i < (mla_tile - valid) * 64; i += 128)
      *reinterpret_cast<uint4*>(memory.pieces[at.buffer][i / 8 % 8] + (valid + i / 64) * 128 + i % 8 * 16) =
          make_uint4(0, 0, 0, 0);
  }

  /// Raises the maxima of heads that a score exceeds by too much.
  __device__ __forceinline__ void raise() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = s[2 * i];
#pragma unroll
      for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(full_warp, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(full_warp, largest, 2));
      const float factor = mla_raise(max[i], largest, w.a.scale);
      const unsigned head = warp * 16 + i * 8 + lane / 4;
      if (lane % 4 == 0) memory.control.max[head] = max[i], memory.factor[at.pair()][head] = factor;
    }
    __syncwarp();
  }
  /// Weights from the scores and the maxima of now; returns the largest exponent.
  __device__ __forceinline__ float exponentiate(unsigned (&packed)[16]) const {
    float most = SoftmaxState<float>::no_max;
#pragma unroll
    for (int j = 0; j < 16; ++j) packed[j] = mla_weigh(s[2 * j], s[2 * j + 1], w.a.scale, max[j % 2], max[j % 2], most);
    return most;
  }
  /// Weights of a tile, to shared memory.
  __device__ __forceinline__ void compute_weights() {
    unsigned packed[16];
    const bool raised = warp < 3 && __any_sync(full_warp, exponentiate(packed) > mla_wide_slack);
    // Nobody reads those of two tiles before, and their factors, any more.
    async::wait(memory.weights_empty[at.pair()], at.parity() ^ 1);
    if (warp < 3) {
      if (raised) {
        raise();
        exponentiate(packed);
      }
      if (lane == 0) memory.rescale[at.pair()][warp] = raised;
      const unsigned to = async::shared_address(memory.weights[at.pair()]) + (warp * 16 + lane % 16) * 128;
#pragma unroll
      for (unsigned j = 0; j < 4; ++j)
        store_matrices(to + ((2 * j + lane / 16) ^ lane % 8) * 16, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2],
                       packed[4 * j + 3]);
    }
    async::fence();
    async::arrive(memory.weights_full[at.pair()]);
  }

  __device__ __forceinline__ void run() {
    const MlaSegment& g = memory.control.segment;
    const unsigned first = uniform(g.first), count = uniform(g.count);
    max[0] = max[1] = SoftmaxState<float>::no_max;
    take_queries();
    for (unsigned i = 0; i < count; ++i, at.next()) {
      compute_scores();
      const unsigned valid = g.length - (first + i) * mla_tile;
      if (valid < mla_tile) clear_tail(valid);
      compute_weights();
    }
  }
};

/// A result to be stored.
struct MlaFewResult {
  unsigned row, place;
  bool whole, missing;
};

/// A warpgroup that computes the values of half of the latent columns.
struct MlaFewValues : MlaFewPart {
  using MlaFewPart::MlaFewPart;
  static constexpr unsigned own = mla_few_heads / 2;  // heads whose weights it adds
  MlaFewResult result{};
  float o[4][24];  // values: columns (half * 4 + c) * 64 + warp * 16 + lane / 4 (+ 8), heads 8 j + lane % 4 * 2 (+ 1)

  /// The queries and the first two tiles, this warp's columns.
  __device__ __forceinline__ void load_first(unsigned first, unsigned count) const {
    const unsigned column = half * 4 + warp;
    load_queries(column);
    const MlaPlace place = place_of(first), second = place_of(first + 1);
    load_piece(at.buffer, column, place);
    if (count > 1) load_piece(at.buffer == mla_few_tiles - 1 ? 0 : at.buffer + 1, column, second);
    mla_check_pages(w, memory.control);
  }

  __device__ __forceinline__ void rescale() {
    const float2* const factors = reinterpret_cast<const float2*>(memory.factor[at.pair()]) + lane % 4;
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      if (!memory.rescale[at.pair()][j / 2]) continue;
      const float2 f = factors[4 * j];
#pragma unroll
      for (int c = 0; c < 4; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[c][4 * j + e] *= e % 2 ? f.y : f.x;
    }
  }
  /// Of 64 columns.
  __device__ __forceinline__ void add_values(unsigned c, bool first) {
    const unsigned values = piece_operand(half * 4 + c), weights = weights_operand();
    wgmma_fence();
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) wgmma<1>(o[c], values + 128 * k, weights + 2 * k, !first || k > 0);
    wgmma_commit();
  }

  /// The weights as they were rounded, in a fixed order: two threads a head.
  __device__ __forceinline__ void add_weights(bool first) const {
    if (thread >= 2 * own) return;
    const unsigned head = half * own + thread / 2;
    const float sum = mla_sum_weights(memory.weights[at.pair()], head, __activemask());
    if (thread % 2 != 0) return;
    const float before = first ? 0.0f : memory.control.sum[head];
    memory.control.sum[head] =
        __fmaf_rn(before, memory.rescale[at.pair()][head / 16] ? memory.factor[at.pair()][head] : 1.0f, sum);
  }

  /// Keeps what is to be known of the segment when its result is stored. Maxima are free then, sums inverted.
  __device__ __forceinline__ void conclude() {
    group_sync<256>(mla_few_values);  // the sums are there, and what either half has found of the pages
    const MlaSegment& g = memory.control.segment;
    result = {g.row, g.place, g.whole != 0, memory.control.missing != 0};
    if (thread >= own) return;
    const unsigned head = half * own + thread;
    const float sum = memory.control.sum[head];
    if (result.whole)
      memory.control.sum[head] = result.missing ? 0.0f : 1 / sum;
    else
      w.stats[result.place * size{8} * w.octets() + group * mla_few_heads + head] = {memory.control.max[head],
                                                                                     result.missing ? -1.0f : sum};
  }
  /// Output of a row that is all here.
  __device__ __forceinline__ void store_result() const {
    const bool missing = result.missing;
    const unsigned stride = static_cast<unsigned>(w.a.out_head), first = lane % 4 * 2;
    const unsigned heads = w.a.heads - group * mla_few_heads;
    float* out = w.a.out + result.row * w.a.out_row + (group * mla_few_heads + first) * w.a.out_head + half * 256 +
                 warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 6; ++j, out += 8 * stride)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (first + 8 * j + e >= heads) break;
        const float factor = memory.control.sum[first + 8 * j + e];
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            store_float(out + e * stride + c * 64 + i * 8, missing ? 0.0f : o[c][4 * j + 2 * i + e] * factor);
      }
    if (threadIdx.x == 0 && group == 0) {
      w.a.live[result.row] = !missing;
      if (missing) w.a.rows.report(result.row);
    }
  }

  /// The result, a part of a row for mla_combine_wide or a whole one.
  __device__ __forceinline__ void store() const {
    if (result.whole)
      store_result();
    else
      mla_store_values<mla_few_heads>(w, ((result.place * size{w.octets()} + group * 6) * 4 + half * 2) * 128 + thread,
                                      o);
    group_sync<256>(mla_few_values);  // nobody reads the sums any more
  }

  __device__ __forceinline__ void run() {
    const unsigned count = uniform(memory.control.segment.count);
    for (unsigned i = 0; i < count; ++i, at.next()) {
      const auto done = [&](unsigned c) { release(memory.empty[at.buffer][half * 4 + c]); };
      async::wait(memory.weights_full[at.pair()], at.parity());
      if (i > 0) {
        const uint4 raised = *reinterpret_cast<const uint4*>(memory.rescale[at.pair()]);
        if (raised.x | raised.y | raised.z) rescale();
      }
      if (i + 1 < count) async::wait(memory.issued[at.pair() ^ 1], (at.ordinal + 1) / 2 % 2);
      add_values(0, i == 0);
      add_values(1, i == 0);
      wgmma_wait<1>();
      done(0);
      add_values(2, i == 0);
      wgmma_wait<1>();
      done(1);
      add_values(3, i == 0);
      wgmma_wait<1>();
      done(2);
      add_weights(i == 0);
      wgmma_wait<0>();
      done(3);
      async::arrive(memory.weights_empty[at.pair()]);
    }
  }
};

/// What a warpgroup does for all of its block's segments. A result is stored while the next segment begins.
template <class Part>
__device__ __forceinline__ void mla_few_run(Part part, const MlaRuns& runs) {
  MlaWideControl& control = part.memory.control;
  unsigned phase = 0;
  const auto sync_all = [&] {  // warpgroups are at different places of the code, so not by a hardware barrier
    async::arrive(part.memory.all);
    async::wait(part.memory.all, phase++ % 2);
  };
  const auto start = [&] {
    const unsigned first = uniform(control.segment.first), count = uniform(control.segment.count);
    if (count > 0) part.load_first(first, count);
    if (threadIdx.x == mla_few_threads - 128) runs.look_ahead();
    __syncwarp();
    return count > 0;
  };
  if (threadIdx.x < mla_few_heads) control.max[threadIdx.x] = SoftmaxState<float>::no_max;
  sync_all();
  if (!start()) return;
  bool more = true;
  do {
    part.run();
    part.conclude();
    sync_all();
    runs.advance();
    if (threadIdx.x < mla_few_heads) control.max[threadIdx.x] = SoftmaxState<float>::no_max;
    sync_all();
    more = start();
    part.store();
  } while (more);
}

/// Grid: a block to a multiprocessor, at least one for 48 heads.
static __global__ void __launch_bounds__(mla_few_threads, 1)
    mla_attend_few(const __grid_constant__ MlaWideArguments w, const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap kv_map) {
  if constexpr (on_hopper) {
    extern __shared__ __align__(1024) unsigned char mla_few_shared[];
    MlaFewShared& memory = *reinterpret_cast<MlaFewShared*>(mla_few_shared);
    if (threadIdx.x == 32) async::prefetch_map(&q_map);
    if (threadIdx.x == 64) async::prefetch_map(&kv_map);
    if (threadIdx.x == 96) {
      for (unsigned i = 0; i < mla_few_tiles; ++i) {
        for (async::Barrier& full : memory.full[i]) async::init(full, 1);
        for (async::Barrier& empty : memory.empty[i]) async::init(empty, 4);
      }
      for (unsigned i = 0; i < 2; ++i) {
        async::init(memory.keys_full[i], 1);
        async::init(memory.keys_empty[i], 4);
        async::init(memory.issued[i], 4);
        async::init(memory.weights_full[i], 128);
        async::init(memory.weights_empty[i], 256);
      }
      async::init(memory.queries, 9);
      async::init(memory.all, mla_few_threads);
      async::init_fence();
    }
    wait_for_earlier();
    let_later_start();
    MlaRow row;
    if (threadIdx.x < w.a.rows.count) row = w.a.rows.find(threadIdx.x, w.a.cache);
    const unsigned groups = (w.a.heads + mla_few_heads - 1) / mla_few_heads, group = blockIdx.x % groups;
    const MlaRuns runs{w, memory.control, detail::larger(gridDim.x / groups, 1u), blockIdx.x / groups};
    runs.make(row);
    const unsigned role = uniform(threadIdx.x / 128);
    // 512 threads begin with 128 registers each; what the copies give up goes to the queries.
    if (role < 2) {
      mla_few_run(MlaFewValues(w, memory, &q_map, &kv_map, group, role), runs);
    } else if (role == 2) {
      take_registers<232>();
      mla_few_run(MlaFewScores(w, memory, &q_map, &kv_map, group, 0), runs);
    } else {
      give_registers<24>();
      mla_few_run(MlaFewCopies(w, memory, &q_map, &kv_map, group, 0), runs);
    }
  }
}

}  // namespace k3::kernel
