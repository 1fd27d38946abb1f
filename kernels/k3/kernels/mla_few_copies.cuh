// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include <k3/kernels/mla_wide_runs.cuh>

// How tiles of the cache, and queries, come into the shared memory of a block of mla_attend_few.
namespace k3::kernel {

inline constexpr unsigned mla_few_threads = 512, mla_few_heads = 48;
inline constexpr unsigned mla_few_tiles = 3;  ///< whose latents are there at a time

/// Latents of three tiles are there, the keys' own columns and weights of two.
struct MlaFewShared {
  alignas(1024) MlaWideControl control;  // its barriers, factor and rescale are not used: they are below, for two tiles
  async::Barrier full[mla_few_tiles][8], empty[mla_few_tiles][8];  // pieces of latents: they are there, are not needed
  async::Barrier keys_full[2], keys_empty[2];                      // the keys' own part
  async::Barrier queries;                                          // of a segment are there
  async::Barrier issued[2];                                        // all products of a tile's scores are on their way
  // These order ordinary accesses to shared memory: every thread arrives, since that is what racecheck sees.
  async::Barrier weights_full[2], weights_empty[2];
  async::Barrier all;  // threads of the block
  float factor[2][mla_few_heads];
  alignas(16) unsigned rescale[2][4];  // whether factors of 16 heads each are other than 1
  alignas(1024) unsigned char pieces[mla_few_tiles][8][mla_piece_bytes];
  alignas(1024) unsigned char keys[2][mla_piece_bytes];
  alignas(1024) unsigned char weights[2][mla_few_heads * 128];
};
static_assert(sizeof(MlaFewShared) <= 227 * 1024);
static_assert(9 * mla_few_heads * 128 <= 8 * mla_piece_bytes);  // queries come to the place of a tile

// Hardware barriers: of the warpgroups of the values, of the one of the scores.
inline constexpr unsigned mla_few_values = 1, mla_few_scores = 2;

/// Tiles in their order, and where they are.
struct MlaFewTurn {
  unsigned ordinal = 0;             // tiles before this one
  unsigned buffer = 0, passed = 0;  // of latents, and the parity of their barriers

  __device__ __forceinline__ void next() {
    ++ordinal;
    if (++buffer == mla_few_tiles) buffer = 0, passed ^= 1;
  }
  /// Of what there is for two tiles.
  __device__ __forceinline__ unsigned pair() const { return ordinal % 2; }
  __device__ __forceinline__ unsigned parity() const { return ordinal / 2 % 2; }
};

/// What a thread knows of its block.
struct MlaFewPart {
  const MlaWideArguments& w;
  MlaFewShared& memory;
  const CUtensorMap *q_map, *kv_map;
  unsigned group;  // of 48 heads
  unsigned half;   // of the latent columns
  unsigned thread = threadIdx.x % 128, lane = thread % 32, warp = uniform(thread / 32);
  unsigned operands;  // as matrix products name the block's memory
  MlaFewTurn at{};    // the tile at hand

  __device__ __forceinline__ MlaFewPart(const MlaWideArguments& arguments, MlaFewShared& block,
                                        const CUtensorMap* queries, const CUtensorMap* cache, unsigned heads,
                                        unsigned of)
      : w(arguments),
        memory(block),
        q_map(queries),
        kv_map(cache),
        group(heads),
        half(of),
        operands(wgmma_operand(uniform(async::shared_address(&block)))) {}

  __device__ __forceinline__ unsigned piece_operand(unsigned column) const {
    return operands + static_cast<unsigned>(offsetof(MlaFewShared, pieces) / 16) +
           (at.buffer * 8 + column) * (mla_piece_bytes / 16);
  }
  __device__ __forceinline__ unsigned keys_operand() const {
    return operands + static_cast<unsigned>(offsetof(MlaFewShared, keys) / 16) + at.pair() * (mla_piece_bytes / 16);
  }
  __device__ __forceinline__ unsigned weights_operand() const {
    return operands + static_cast<unsigned>(offsetof(MlaFewShared, weights) / 16) +
           at.pair() * (mla_few_heads * 128 / 16);
  }
  /// Where the segment's queries come: the place of its third tile.
  __device__ __forceinline__ unsigned char* queries() const {
    return memory.pieces[at.buffer == 0 ? mla_few_tiles - 1 : at.buffer - 1][0];
  }

  /// This warp no longer needs what the barrier stands for.
  __device__ __forceinline__ void release(async::Barrier& empty) const {
    if (lane == 0) async::arrive(empty);
  }

  // What a warpgroup may have to do between segments.
  __device__ __forceinline__ void load_first(unsigned, unsigned) const {}
  __device__ __forceinline__ void conclude() const {}
  __device__ __forceinline__ void store() const {}

  /// Where this lane's part of a tile is.
  __device__ __forceinline__ MlaPlace place_of(unsigned tile) const {
    return mla_place(w, memory.control.segment, tile, lane);
  }
  /// Columns [64 column, ..) of a tile.
  __device__ __forceinline__ void load(unsigned char* to, unsigned column, MlaPlace from, async::Barrier& full) const {
    if (lane == 0) async::arrive_expecting(full, mla_piece_bytes);
    if (lane < w.boxes)
      async::copy_box(async::shared_address(to + lane * w.box_rows * 128), kv_map,
                      static_cast<int>(column * mla_piece_columns), static_cast<int>(from.row), from.page, full);
    __syncwarp();
  }
  __device__ __forceinline__ void load_piece(unsigned buffer, unsigned column, MlaPlace from) const {
    load(memory.pieces[buffer][column], column, from, memory.full[buffer][column]);
  }
  __device__ __forceinline__ void load_keys(unsigned pair, MlaPlace from) const {
    load(memory.keys[pair], 8, from, memory.keys_full[pair]);
  }
  /// The same columns of the queries.
  __device__ __forceinline__ void load_queries(unsigned column) const {
    if (lane == 0) {  // ordinary reads follow: the arrival behind the copy is what racecheck sees
      async::copy_box(async::shared_address(queries() + column * (mla_few_heads * 128)), q_map,
                      static_cast<int>(column * mla_piece_columns), static_cast<int>(group * mla_few_heads),
                      static_cast<int>(memory.control.segment.row), memory.queries);
      async::arrive_expecting(memory.queries, mla_few_heads * 128);
    }
    __syncwarp();
  }
};

/// The warpgroup that copies the tiles behind the first two: warp i piece i of either half, the last one the keys' own
/// part, too.
struct MlaFewCopies : MlaFewPart {
  using MlaFewPart::MlaFewPart;

  __device__ __forceinline__ void replace(unsigned column, MlaPlace from, bool used) const {
    if (used) async::wait(memory.empty[at.buffer][column], at.passed ^ 1);
    load_piece(at.buffer, column, from);
  }
  __device__ __forceinline__ void run() {
    const MlaSegment& g = memory.control.segment;
    const unsigned first = uniform(g.first), count = uniform(g.count);
    MlaPlace next = place_of(first + 2);
    for (unsigned i = 0; i < count; ++i, at.next()) {
      if (i < 2) continue;
      const MlaPlace from = next;
      next = place_of(first + i + 1);
      if (warp == 3) {
        async::wait(memory.keys_empty[at.pair()], at.parity() ^ 1);
        load_keys(at.pair(), from);
      }
      // The third tile takes the place where the queries were until the first one's products had them.
      if (i == 2) async::wait(memory.issued[at.pair()], at.parity() ^ 1);
      replace(warp, from, i > 2);
      replace(4 + warp, from, i > 2);
    }
  }
};

}  // namespace k3::kernel
