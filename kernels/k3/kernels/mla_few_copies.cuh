// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <k3/kernels/mla_wide_runs.cuh>

// How tiles of the cache, and queries, come into the shared memory of a block of mla_attend_few.
namespace k3::kernel {

inline constexpr unsigned mla_few_threads = 640, mla_few_heads = 48;

/// Two tiles are there, even and odd ones.
struct MlaFewShared {
  alignas(1024) MlaWideControl control;  // its barriers, factor and rescale are not used: they are below, for two tiles
  MlaBarrier full[2][9], empty[2][9];    // of pieces: they are there, no warp needs them any more
  MlaBarrier queries;                    // of a segment are there
  // These order ordinary accesses to shared memory: every thread arrives, since that is what racecheck sees.
  MlaBarrier weights_full[2], weights_empty[2];
  MlaBarrier decided[2];  // the maxima that a tile's weights are relative to
  MlaBarrier all;         // threads of the block
  float factor[2][mla_few_heads];
  unsigned rescale[2];
  alignas(1024) unsigned char q[9][mla_few_heads * 128];
  alignas(1024) unsigned char pieces[2][9][mla_piece_bytes];
  alignas(1024) unsigned char weights[2][mla_few_heads * 128];
};
static_assert(sizeof(MlaFewShared) <= 227 * 1024);

/// Where a box of a piece is in the cache.
struct MlaFewPlace {
  unsigned row;  // of the page
  id page;
};

/// What a thread knows of its block.
struct MlaFewPart {
  const MlaWideArguments& w;
  MlaFewShared& memory;
  const CUtensorMap *q_map, *kv_map;
  unsigned group;  // of 48 heads
  unsigned half;   // of the latent columns, or of the tiles
  unsigned thread = threadIdx.x % 128, lane = thread % 32, warp = uniform(thread / 32);
  unsigned operands;     // as matrix products name the block's memory
  unsigned ordinal = 0;  // tiles before the one at hand

  __device__ __forceinline__ MlaFewPart(const MlaWideArguments& arguments, MlaFewShared& block,
                                        const CUtensorMap* queries, const CUtensorMap* cache, unsigned heads,
                                        unsigned of)
      : w(arguments),
        memory(block),
        q_map(queries),
        kv_map(cache),
        group(heads),
        half(of),
        operands(wgmma_operand(uniform(shared_address(&block)))) {}

  __device__ __forceinline__ unsigned piece_operand(unsigned column) const {
    return operands + static_cast<unsigned>(offsetof(MlaFewShared, pieces) / 16) +
           (ordinal % 2 * 9 + column) * (mla_piece_bytes / 16);
  }
  __device__ __forceinline__ unsigned weights_operand() const {
    return operands + static_cast<unsigned>(offsetof(MlaFewShared, weights) / 16) +
           ordinal % 2 * (mla_few_heads * 128 / 16);
  }
  /// Of barriers that are passed once for every second tile.
  __device__ __forceinline__ unsigned parity() const { return ordinal / 2 % 2; }

  /// This warp's matrix products no longer need a piece.
  __device__ __forceinline__ void release(unsigned buffer, unsigned column) const {
    if (lane == 0) barrier_arrive(&memory.empty[buffer][column]);
  }

  /// Where a box of a tile is. Of a tile that ends behind the row's last page, the rest comes from that one, and is not
  /// used.
  __device__ __forceinline__ MlaFewPlace place_of(unsigned tile, unsigned box) const {
    const unsigned position = tile * mla_tile + detail::smaller(box, w.boxes - 1) * w.box_rows;
    const unsigned index = position / w.a.cache.page_size;
    return {position - index * w.a.cache.page_size,
            memory.control.segment.table[detail::smaller(index, memory.control.segment.last_page)]};
  }
  /// Columns [64 column, ..) of a tile.
  __device__ __forceinline__ void load(unsigned buffer, unsigned column, MlaFewPlace from) const {
    if (lane == 0) barrier_expect(&memory.full[buffer][column], mla_piece_bytes);
    if (lane < w.boxes)
      copy_box(memory.pieces[buffer][column] + lane * w.box_rows * 128, kv_map,
               static_cast<int>(column * mla_piece_columns), static_cast<int>(from.row), from.page,
               &memory.full[buffer][column]);
    __syncwarp();
  }
  /// The same columns of the queries.
  __device__ __forceinline__ void load_queries(unsigned column) const {
    if (lane == 0) {
      barrier_expect(&memory.queries, mla_few_heads * 128);
      copy_box(memory.q[column], q_map, static_cast<int>(column * mla_piece_columns),
               static_cast<int>(group * mla_few_heads), static_cast<int>(memory.control.segment.row), &memory.queries);
    }
    __syncwarp();
  }
};

/// The warpgroup that copies the tiles behind the first two: warp i piece i of either half, the last one the keys' own
/// part, too.
struct MlaFewCopies : MlaFewPart {
  using MlaFewPart::MlaFewPart;

  __device__ __forceinline__ void replace(unsigned column, MlaFewPlace from) const {
    const unsigned buffer = ordinal % 2;
    barrier_wait(&memory.empty[buffer][column], parity());
    load(buffer, column, from);
  }
  __device__ __forceinline__ void run() {
    const MlaSegment& g = memory.control.segment;
    const unsigned first = uniform(g.first), count = uniform(g.count);
    MlaFewPlace next = place_of(first + 2, lane);
    for (unsigned i = 0; i < count; ++i, ++ordinal) {
      if (count - i <= 2) continue;
      const MlaFewPlace from = next;
      next = place_of(first + i + 3, lane);
      if (warp == 3) replace(8, from);
      replace(warp, from);
      replace(4 + warp, from);
    }
  }
};

}  // namespace k3::kernel
