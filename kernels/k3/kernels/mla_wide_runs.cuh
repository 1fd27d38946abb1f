// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/mla_cache.cuh>
#include <k3/kernels/mla_hopper.cuh>

// Which block of mla_attend_wide takes which tiles of which row, and what it keeps in shared memory.
namespace k3::kernel {

inline constexpr unsigned mla_wide_latent = 512, mla_wide_width = 576;
inline constexpr unsigned mla_wide_threads = 256;
inline constexpr unsigned mla_wide_rows = 256;  ///< of one launch
inline constexpr unsigned mla_piece_columns = 64, mla_piece_bytes = mla_tile * mla_piece_columns * 2;
inline constexpr unsigned mla_wide_few = 4;  ///< tiles for each block
inline constexpr float mla_wide_slack = 8;   ///< of a score over the maximum, in units of ln 2

struct MlaWideArguments {
  MlaAttendArguments<bf16> a{};
  unsigned boxes = 1, box_rows = mla_tile;  ///< copies of one piece: a page may be shorter than a tile
  bool independent = true;                  ///< rows are cut by their own length alone
  float* part = nullptr;                    ///< [places, 8, octets of heads, 128, 4]
  MlaStats* stats = nullptr;                ///< [places, octets, 8]
  uint2* segments = nullptr;                ///< [rows]: the first place of a row and how many it has

  /// Groups of 8 heads that there is room for.
  __host__ __device__ __forceinline__ unsigned octets() const { return (a.heads + 95) / 96 * 12; }
};

/// A row that is cut by its length alone has at most 32 parts, or 64 from 65,536 positions on. A part costs as much as
/// some tiles: it has at least 8, or 4 where the row then still has at most 8 parts.
inline constexpr unsigned mla_wide_least = 8, mla_wide_shortest = 4;
__host__ __device__ constexpr unsigned mla_wide_most(unsigned tiles) { return tiles < 1024 ? 32 : 64; }
__host__ __device__ constexpr unsigned mla_wide_tiles(unsigned tiles) {
  const unsigned least = detail::smaller(detail::larger((tiles + 7) / 8, mla_wide_shortest), mla_wide_least);
  const unsigned most = mla_wide_most(tiles);
  return detail::larger((tiles + most - 1) / most, least);
}
/// Parts at most of rows of so many tiles or fewer.
__host__ __device__ constexpr unsigned mla_wide_parts_of(unsigned tiles) {
  return detail::smaller(detail::larger((tiles + mla_wide_least - 1) / mla_wide_least, 8u), mla_wide_most(tiles));
}

/// Some tiles of a row, and where their result goes.
struct MlaSegment {
  unsigned row, first, count;
  unsigned length;     ///< positions of the row
  unsigned place;      ///< among the partial results
  unsigned whole;      ///< the row is all here: to the output
  unsigned last_page;  ///< of the row's, counted from 0
  const id* table;     ///< the row's pages
};

/// What a block keeps in shared memory besides operands.
struct MlaWideControl {
  MlaBarrier full[17], empty[16], weights_empty;
  float max[96], factor[96], sum[96], scratch[4][96];
  unsigned rescale[2], missing;
  MlaSegment segment;
  unsigned begin, end, row, start;  ///< the state of MlaRuns
};

template <int N>
struct MlaWideShared {
  static constexpr unsigned ring = N == 96 ? 6 : 8;  ///< pieces of either half of the latents
  alignas(1024) MlaWideControl control;
  alignas(1024) unsigned char q[9][N * 128];
  alignas(1024) unsigned char pieces[2 * ring + 1][mla_piece_bytes];
  alignas(1024) unsigned char weights[N * 128];
};
static_assert(sizeof(MlaWideShared<96>) <= 227 * 1024 && sizeof(MlaWideShared<48>) <= sizeof(MlaWideShared<96>));

/// Whose tiles are whose: all rows are cut into units, which are dealt in order, equally many to each of `blocks`
/// blocks. With `independent` a unit is a part of a row whose size its length decides. Otherwise it is a tile, and
/// neighbouring ones are one part; where rows are so alike that cutting them gains nothing, a row is a block's. In
/// shared memory, `begin` and `end`: the units left; `row`, `start`: the row at their beginning, and the number of its
/// first unit.
struct MlaRuns {
  const MlaWideArguments& w;
  MlaWideControl& shared;
  unsigned blocks, block;

  static __device__ __forceinline__ unsigned tiles(const MlaRow& r) {
    return r.live ? (r.length + mla_tile - 1) / mla_tile : 0;
  }
  __device__ __forceinline__ unsigned unit(unsigned tiles) const { return w.independent ? mla_wide_tiles(tiles) : 1; }
  __device__ __forceinline__ unsigned units(unsigned tiles) const { return (tiles + unit(tiles) - 1) / unit(tiles); }

  /// The row that `shared.begin` is in.
  __device__ __forceinline__ void take(const MlaRow& r, unsigned row, unsigned start) const {
    MlaSegment& s = shared.segment;
    const unsigned all = tiles(r), each = unit(all), end = start + units(all), from = shared.begin - start;
    const unsigned stop =
        w.independent ? detail::smaller((from + 1) * each, all) : detail::smaller(all, shared.end - start);
    s.row = row, s.first = from * each, s.count = stop - s.first, s.length = r.length;
    s.whole = s.first == 0 && stop == all;
    s.place = w.independent ? shared.begin : 2 * block + (from == 0 ? 1 : 0);
    s.last_page = (r.length - 1) / w.a.cache.page_size;
    s.table = w.a.cache.table + r.slot * w.a.cache.table_stride;
    shared.missing = 0;
    const bool over = !w.independent || stop == all;
    shared.begin = w.independent ? shared.begin + 1 : end;
    shared.row = over ? row + 1 : row;
    shared.start = over ? end : start;
  }

  /// The first segment. All threads of the block, with the row of their number.
  __device__ __forceinline__ void make(const MlaRow& r) const {
    unsigned* const scratch = reinterpret_cast<unsigned*>(shared.scratch);
    const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const unsigned rows = static_cast<unsigned>(w.a.rows.count), mine = units(tiles(r));
    unsigned sum = mine, most = mine;
#pragma unroll
    for (unsigned offset = 1; offset < 32; offset *= 2) {
      const unsigned before = __shfl_up_sync(full_warp, sum, offset);
      if (lane >= offset) sum += before;
      most = detail::larger(most, __shfl_xor_sync(full_warp, most, offset));
    }
    if (lane == 31) scratch[warp] = sum, scratch[16 + warp] = most;
    if (thread == 0) shared.segment.count = 0, shared.begin = shared.end = 0;
    __syncthreads();
    unsigned total = 0, start = sum - mine;
    most = 0;
#pragma unroll
    for (unsigned i = 0; i < mla_wide_rows / 32; ++i) {
      if (i < warp) start += scratch[i];
      total += scratch[i];
      most = detail::larger(most, scratch[16 + i]);
    }
    unsigned each = detail::larger((total + blocks - 1) / blocks, 1u);
    if (!w.independent && rows <= blocks && most <= each + each / 32 + 1) {
      each = detail::larger(most, 1u);
      start = thread * each;
      total = rows * each;
    }
    if (mine == 0) return;
    const unsigned begin = block * each, first = start / each;
    if (blockIdx.x == 0)
      w.segments[thread] =
          w.independent ? make_uint2(start, mine) : make_uint2(first, (start + mine - 1) / each - first + 1);
    if (start <= begin && begin < start + mine) {
      shared.begin = begin;
      shared.end = detail::smaller(begin + each, total);
      take(r, thread, start);
    }
  }

  /// The next segment of this block, its count 0 where there is none. One thread.
  __device__ __forceinline__ void next() const {
    shared.segment.count = 0;
    if (shared.begin >= shared.end) return;
    for (unsigned row = shared.row; row < w.a.rows.count; ++row) {
      const MlaRow r = w.a.rows.find(row, w.a.cache);
      if (!r.live) continue;
      take(r, row, shared.start);
      return;
    }
  }
};

}  // namespace k3::kernel
