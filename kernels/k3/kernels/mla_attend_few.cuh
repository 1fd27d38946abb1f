// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/mla_few_copies.cuh>

// Absorbed attention as mla_attend_wide computes it, with the same bits, for few rows. A block takes 48 heads of a row
// through tiles of 64 positions with five warpgroups. Two compute, of every second tile each,
//   scores^T [64, 48] = C Q^T, and their weights, rounded to bf16, to shared memory as [48, 64],
// two others, each for half of the latent columns and in registers throughout,
//   values^T [256, 48] += C^T weights,
// and the last one copies. There are two tiles in shared memory: scores of one are computed while the values of the
// other are added.
namespace k3::kernel {

/// A warpgroup that computes scores and weights of every second tile.
struct MlaFewScores : MlaFewPart {
  using MlaFewPart::MlaFewPart;
  unsigned segments = 0;
  float s[24];  // scores: keys warp * 16 + lane / 4 (+ 8), heads 8 j + lane % 4 * 2 (+ 1)

  __device__ __forceinline__ void sync() const { group_sync<128>(1 + half); }

  /// s += of 64 columns.
  __device__ __forceinline__ void add_scores(unsigned column, bool add) {
    const unsigned keys = piece_operand(column);
    const unsigned queries =
        operands + static_cast<unsigned>(offsetof(MlaFewShared, q) / 16) + column * (mla_few_heads * 128 / 16);
    barrier_wait(&memory.full[ordinal % 2][column], parity());
    wgmma_fence();
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) wgmma<0>(s, keys + 2 * k, queries + 2 * k, add || k > 0);
  }
  __device__ __forceinline__ void compute_scores() {
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      add_scores(i, i > 0);
      add_scores(4 + i, true);
      if (i == 1) add_scores(8, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    release(half, 8);
  }

  /// The last tile of a row: scores of positions from `valid` on are none, and their values zeros.
  __device__ __forceinline__ void clear_tail(unsigned valid) {
    const unsigned key = warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 24; ++i)
      if (key + i / 2 % 2 * 8 >= valid) s[i] = SoftmaxState<float>::no_max;
    for (unsigned i = thread; i < (mla_tile - valid) * 64; i += 128)
      *reinterpret_cast<uint4*>(memory.pieces[ordinal % 2][i / 8 % 8] + (valid + i / 64) * 128 + i % 8 * 16) =
          make_uint4(0, 0, 0, 0);
  }

  /// Raises the maxima of heads that a score exceeds by too much.
  __device__ __forceinline__ void raise() {
    barrier_wait(&memory.weights_empty[half], parity() ^ 1);  // nobody reads weights and factors of two tiles before
    // Where the weights will be is free until then: scratch memory.
    float(&largest_of)[4][48] = *reinterpret_cast<float(*)[4][48]>(memory.weights[half]);
#pragma unroll
    for (int j = 0; j < 6; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float largest = fmaxf(s[4 * j + e], s[4 * j + 2 + e]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          largest = fmaxf(largest, __shfl_xor_sync(full_warp, largest, offset));
        if (lane < 4) largest_of[warp][8 * j + 2 * lane + e] = largest;
      }
    sync();
    if (thread < 48) {
      const float old = memory.control.max[thread];
      float largest = largest_of[0][thread];
#pragma unroll
      for (int i = 1; i < 4; ++i) largest = fmaxf(largest, largest_of[i][thread]);
      largest *= w.a.scale;
      const bool grows = largest > old + mla_wide_slack;
      memory.control.max[thread] = grows ? largest : old;
      memory.factor[half][thread] = grows ? mla_rescale(old, largest) : 1.0f;
    }
    sync();
  }
  /// Weights from the scores and the maxima of now; returns the largest exponent.
  __device__ __forceinline__ float exponentiate(unsigned (&packed)[12]) const {
    const float2* const max = reinterpret_cast<const float2*>(memory.control.max) + lane % 4;
    float most = SoftmaxState<float>::no_max;
#pragma unroll
    for (int j = 0; j < 6; ++j) {
      const float2 m = max[4 * j];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = __fmaf_rn(s[4 * j + 2 * i], w.a.scale, -m.x),
                    y = __fmaf_rn(s[4 * j + 2 * i + 1], w.a.scale, -m.y);
        most = fmaxf(most, fmaxf(x, y));
        packed[2 * j + i] = pack_bf16(exp2_fast(x), exp2_fast(y));
      }
    }
    return most;
  }
  __device__ __forceinline__ void compute_weights(bool first) {
    unsigned packed[12];
    if (!first) barrier_wait(&memory.decided[half ^ 1], (ordinal - 1) / 2 % 2);
    const bool raised = group_any<128>(1 + half, exponentiate(packed) > mla_wide_slack);
    if (raised) {
      raise();
      exponentiate(packed);
    }
    barrier_arrive(&memory.decided[half]);
    barrier_wait(&memory.weights_empty[half], parity() ^ 1);
    if (thread == 0) memory.rescale[half] = raised;
    const unsigned head = lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
    const unsigned to = shared_address(memory.weights[half]) + head * 128 + (piece ^ lane % 8) * 16;
#pragma unroll
    for (int j = 0; j < 3; ++j)
      store_transposed(to + j * 2048, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
    async_fence();
    barrier_arrive(&memory.weights_full[half]);
  }

  __device__ __forceinline__ void run() {
    const MlaSegment& g = memory.control.segment;
    const unsigned first = uniform(g.first), count = uniform(g.count);
    unsigned i = (ordinal ^ half) & 1;  // the first one of this warpgroup
    ordinal += i;
    if (warp == 0) {
      if (half == 0) load_queries(8);
      if (i < count) load(half, 8, place_of(first + i, lane));
    }
    barrier_wait(&memory.queries, segments++ % 2);
    for (; i < count; i += 2, ordinal += 2) {
      compute_scores();
      const unsigned valid = g.length - (first + i) * mla_tile;
      if (valid < mla_tile) clear_tail(valid);
      compute_weights(i == 0);
    }
    ordinal -= i - count;  // tiles of the whole segment, as the other warpgroups count them
  }
};

/// A warpgroup that computes the values of half of the latent columns.
struct MlaFewValues : MlaFewPart {
  using MlaFewPart::MlaFewPart;
  static constexpr unsigned own = mla_few_heads / 2;  // heads whose weights it adds
  float o[4][24];  // values: columns (half * 4 + c) * 64 + warp * 16 + lane / 4 (+ 8), heads 8 j + lane % 4 * 2 (+ 1)

  /// The queries and the first two tiles, this warp's columns.
  __device__ __forceinline__ void load_first(unsigned first, unsigned count) const {
    const unsigned column = half * 4 + warp, buffer = ordinal % 2;
    load_queries(column);
    const MlaFewPlace place = place_of(first, lane), second = place_of(first + 1, lane);
    load(buffer, column, place);
    if (count > 1) load(buffer ^ 1, column, second);
  }

  __device__ __forceinline__ void rescale() {
    const float2* const factors = reinterpret_cast<const float2*>(memory.factor[ordinal % 2]) + lane % 4;
#pragma unroll
    for (int j = 0; j < 6; ++j) {
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
    const uint4* const from = reinterpret_cast<const uint4*>(memory.weights[ordinal % 2] + head * 128);
    float sum = 0;
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) {
      const uint4 eight = from[(thread % 2 * 4 + i) ^ head % 8];
      const unsigned two[4] = {eight.x, eight.y, eight.z, eight.w};
      float pair[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) pair[e] = __uint_as_float(two[e] << 16) + __uint_as_float(two[e] & 0xffff0000u);
      sum += (pair[0] + pair[1]) + (pair[2] + pair[3]);
    }
    sum += __shfl_xor_sync(__activemask(), sum, 1);
    if (thread % 2 != 0) return;
    const float before = first ? 0.0f : memory.control.sum[head];
    memory.control.sum[head] =
        __fmaf_rn(before, memory.rescale[ordinal % 2] ? memory.factor[ordinal % 2][head] : 1.0f, sum);
  }

  /// Output of a row that is all here.
  __device__ __forceinline__ void store_result(const MlaSegment& g) {
    const bool missing = memory.control.missing;
    if (thread < own)
      memory.control.sum[half * own + thread] = missing ? 0.0f : 1 / memory.control.sum[half * own + thread];
    group_sync<256>(5);
    const unsigned stride = static_cast<unsigned>(w.a.out_head), first = lane % 4 * 2;
    const unsigned heads = w.a.heads - group * mla_few_heads;
    float* out = w.a.out + g.row * w.a.out_row + (group * mla_few_heads + first) * w.a.out_head + half * 256 +
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
      w.a.live[g.row] = !missing;
      if (missing) w.a.rows.report(g.row);
    }
  }

  /// Part of a row, for mla_combine_wide.
  __device__ __forceinline__ void store_part(const MlaSegment& g) const {
    const size octets = w.octets();
    mla_store_values<mla_few_heads>(w, ((g.place * octets + group * 6) * 4 + half * 2) * 128 + thread, o);
    const unsigned head = half * own + thread;
    if (thread < own)
      w.stats[g.place * size{8} * octets + group * mla_few_heads + head] = {
          memory.control.max[head], memory.control.missing ? -1.0f : memory.control.sum[head]};
  }

  __device__ __forceinline__ void run() {
    const MlaSegment& g = memory.control.segment;
    const unsigned first = uniform(g.first), count = uniform(g.count);
    load_first(first, count);
    mla_check_pages(w, memory.control);
    for (unsigned i = 0; i < count; ++i, ++ordinal) {
      barrier_wait(&memory.weights_full[ordinal % 2], parity());
      if (i > 0 && memory.rescale[ordinal % 2]) rescale();
      add_values(0, i == 0);
      add_values(1, i == 0);
      wgmma_wait<1>();
      release(ordinal % 2, half * 4 + 0);
      add_values(2, i == 0);
      wgmma_wait<1>();
      release(ordinal % 2, half * 4 + 1);
      add_values(3, i == 0);
      wgmma_wait<1>();
      release(ordinal % 2, half * 4 + 2);
      add_weights(i == 0);
      wgmma_wait<0>();
      release(ordinal % 2, half * 4 + 3);
      barrier_arrive(&memory.weights_empty[ordinal % 2]);
    }
    group_sync<256>(5);  // the sums are there, and what either half has found of the pages
    if (!g.whole) {
      store_part(g);
    } else {
      store_result(g);
    }
  }
};

/// What a warpgroup does for all of its block's segments.
template <class Part>
__device__ __forceinline__ void mla_few_run(Part part, const MlaRuns& runs) {
  MlaWideControl& control = part.memory.control;
  unsigned phase = 0;
  const auto sync_all = [&] {  // warpgroups are at different places of the code, so not by __syncthreads
    barrier_arrive(&part.memory.all);
    barrier_wait(&part.memory.all, phase++ % 2);
  };
  while (true) {
    if (threadIdx.x < mla_few_heads) control.max[threadIdx.x] = SoftmaxState<float>::no_max;
    sync_all();
    if (uniform(control.segment.count) == 0) break;
    if (threadIdx.x == mla_few_threads - 128) runs.look_ahead();
    __syncwarp();
    part.run();
    sync_all();
    runs.advance();
  }
}

/// Grid: a block to a multiprocessor, at least one for 48 heads.
static __global__ void __launch_bounds__(mla_few_threads, 1)
    mla_attend_few(const __grid_constant__ MlaWideArguments w, const __grid_constant__ CUtensorMap q_map,
                   const __grid_constant__ CUtensorMap kv_map) {
  if constexpr (mla_on_hopper) {
    extern __shared__ __align__(1024) unsigned char mla_few_shared[];
    MlaFewShared& memory = *reinterpret_cast<MlaFewShared*>(mla_few_shared);
    if (threadIdx.x == 32) prefetch_map(&q_map);
    if (threadIdx.x == 64) prefetch_map(&kv_map);
    if (threadIdx.x == 96) {
      for (unsigned i = 0; i < 2; ++i) {
        for (MlaBarrier& full : memory.full[i]) barrier_init(&full, 1);
        for (MlaBarrier& empty : memory.empty[i]) barrier_init(&empty, 4);
        barrier_init(&memory.weights_full[i], 128);
        barrier_init(&memory.weights_empty[i], 256);
        barrier_init(&memory.decided[i], 128);
      }
      barrier_init(&memory.queries, 9);
      barrier_init(&memory.all, mla_few_threads);
      barrier_init_fence();
    }
    wait_for_previous();
    start_next();
    MlaRow row;
    if (threadIdx.x < w.a.rows.count) row = w.a.rows.find(threadIdx.x, w.a.cache);
    const unsigned groups = (w.a.heads + mla_few_heads - 1) / mla_few_heads, group = blockIdx.x % groups;
    const MlaRuns runs{w, memory.control, detail::larger(gridDim.x / groups, 1u), blockIdx.x / groups};
    runs.make(row);
    const unsigned role = uniform(threadIdx.x / 128);
    // 640 threads begin with 96 registers each (640 * 96 = 256 * 128 + 256 * 96 + 128 * 32); what the copies give up
    // goes to the values.
    if (role < 2) {
      more_registers<128>();
      mla_few_run(MlaFewValues(w, memory, &q_map, &kv_map, group, role), runs);
    } else if (role < 4) {
      fewer_registers<96>();
      mla_few_run(MlaFewScores(w, memory, &q_map, &kv_map, group, role - 2), runs);
    } else {
      fewer_registers<32>();
      mla_few_run(MlaFewCopies(w, memory, &q_map, &kv_map, group, 0), runs);
    }
  }
}

}  // namespace k3::kernel
