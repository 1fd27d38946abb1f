// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/grid_order.cuh>
#include <k3/kernels/mla_weights.cuh>

// Which block of mla_attend_wide or mla_attend_few takes which tiles of which row, and what it keeps in shared memory.
namespace k3::kernel {

inline constexpr unsigned mla_wide_latent = 512, mla_wide_width = 576;
inline constexpr unsigned mla_wide_threads = 256;
inline constexpr unsigned mla_wide_rows = 256;  ///< of one launch
inline constexpr unsigned mla_piece_columns = 64, mla_piece_bytes = mla_tile * mla_piece_columns * 2;
/// Tiles for each block up to which blocks of mla_attend_wide take 48 heads. Two such blocks take longer than one of 96
/// heads, but a row's tiles are then spread over half as many of them, so that half as many parts must be joined.
__host__ __device__ constexpr unsigned mla_wide_few(bool independent) { return independent ? 4 : 1; }
inline constexpr unsigned mla_wide_cost = 2;  ///< of a further part, in tiles

struct MlaWideArguments {
  MlaAttendArguments<bf16> a{};
  unsigned boxes = 1, box_rows = mla_tile;  ///< copies of one piece: a page may be shorter than a tile
  bool independent = true;                  ///< rows are cut by their own length alone
  uint4* part = nullptr;                    ///< [places, octets of heads, 4, 128]: 8 values each, see mla_packed
  unsigned char* exponents = nullptr;       ///< of them
  MlaStats* stats = nullptr;                ///< [places, octets, 8]
  uint2* segments = nullptr;                ///< [rows]: the first place of a row and how many it has, or 0

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

/// Values of partial results have 16 bits each, and 8 of a head a common exponent (of their last bit, plus 127). An
/// error is at most 2^-15 of the largest of the 8; an infinity or a NaN spoils all 8.
__device__ __forceinline__ unsigned mla_exponent(float largest) {
  // a little more than `largest`, so that its 16 bits do not round up to 2^15
  const unsigned x = __float_as_uint(largest * 1.00006103515625f) >> 23;
  return x == 255 ? x : detail::larger(x, 15u) - 14;
}
__device__ __forceinline__ unsigned mla_packed(float a, float b, float scale) {
  constexpr float magic = 12582912.0f + 32768.0f;  // the last 16 bits are the number, plus 2^15
  return __byte_perm(__float_as_uint(__fmaf_rn(a, scale, magic)), __float_as_uint(__fmaf_rn(b, scale, magic)), 0x5410);
}
__device__ __forceinline__ float mla_unpacked(unsigned two, bool second) {
  return __uint_as_float(__byte_perm(two, 0x4b000000u, second ? 0x7632 : 0x7610)) - (8388608.0f + 32768.0f);
}

/// A thread's share of a partial result, from `at` on: of every 8 of N heads, 8 values of each of two.
template <int N>
__device__ __forceinline__ void mla_store_values(const MlaWideArguments& w, size at, const float (&o)[4][N / 2]) {
  uint4* const out = w.part + at;
  unsigned char* const exponents = w.exponents + at;
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float largest = 0;
#pragma unroll
      for (int c = 0; c < 4; ++c) largest = fmaxf(largest, fmaxf(fabsf(o[c][4 * j + e]), fabsf(o[c][4 * j + 2 + e])));
      const unsigned x = mla_exponent(largest);
      const float scale = __uint_as_float((254 - x) << 23);
      unsigned two[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) two[c] = mla_packed(o[c][4 * j + e], o[c][4 * j + 2 + e], scale);
      out[j * 512 + e * 128] = make_uint4(two[0], two[1], two[2], two[3]);
      exponents[j * 512 + e * 128] = static_cast<unsigned char>(x);
    }
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
  async::Barrier full[17], empty[16], weights_empty;
  float max[96], factor[96], sum[96], scratch[4][96];
  unsigned rescale[2], missing;
  MlaSegment segment, coming;       ///< and the one behind it
  unsigned begin, end, row, start;  ///< the state of MlaRuns
};

/// Marks the segment where a page of it is missing. 256 threads.
__device__ __forceinline__ void mla_check_pages(const MlaWideArguments& w, MlaWideControl& control) {
  const MlaSegment& g = control.segment;
  const MlaCache<const bf16>& cache = w.a.cache;
  const unsigned last = detail::smaller((g.first + g.count) * mla_tile, g.length) - 1;
  bool missing = false;
  for (unsigned i = g.first * mla_tile / cache.page_size + threadIdx.x; i <= last / cache.page_size; i += 256)
    missing = missing || g.table[i] < 0 || static_cast<size>(g.table[i]) >= cache.page_count;
  if (missing) control.missing = 1;
}

/// Where a box of a tile is in the cache.
struct MlaPlace {
  unsigned index, row;  // of the page among the row's, and in the page
  id page;
};
/// A page of the segment's row. Of a tile that ends behind the row's last one, the rest comes from that one, and is not
/// used.
__device__ __forceinline__ id mla_page(const MlaSegment& segment, unsigned index) {
  return segment.table[detail::smaller(index, segment.last_page)];
}
__device__ __forceinline__ MlaPlace mla_place(const MlaWideArguments& w, const MlaSegment& segment, unsigned tile,
                                              unsigned box) {
  const unsigned position = tile * mla_tile + detail::smaller(box, w.boxes - 1) * w.box_rows;
  const unsigned index = position / w.a.cache.page_size;
  return {index, position - index * w.a.cache.page_size, mla_page(segment, index)};
}

template <int N>
struct MlaWideShared {
  static constexpr unsigned ring = N == 96 ? 6 : 8;  ///< pieces of either half of the latents
  alignas(1024) MlaWideControl control;
  alignas(1024) unsigned char q[9][N * 128];
  alignas(1024) unsigned char pieces[2 * ring + 1][mla_piece_bytes];
  alignas(1024) unsigned char weights[N * 128];
};
static_assert(sizeof(MlaWideShared<96>) <= 227 * 1024 && sizeof(MlaWideShared<48>) <= sizeof(MlaWideShared<96>));

/// Whose tiles are whose. With `independent` rows are cut into parts whose size their length decides, and parts are
/// dealt in order, equally many to each of `blocks` blocks. Otherwise a block's share is `each` tiles. Where it
/// suffices, a row is cut into as many shares as it needs, and no block has two rows; elsewhere tiles of all rows are
/// dealt in order, and each row is preceded by `lead` that stand for the cost of a further part. In shared memory,
/// `begin` and `end`: the parts or tiles left; `row`, `start`: the row at their beginning, and the number of its first.
struct MlaRuns {
  const MlaWideArguments& w;
  MlaWideControl& shared;
  unsigned blocks, block;

  static __device__ __forceinline__ unsigned tiles(const MlaRow& r) {
    return r.live ? (r.length + mla_tile - 1) / mla_tile : 0;
  }
  static __device__ __forceinline__ unsigned quotient(unsigned x, unsigned y) { return (x + y - 1) / y; }

  /// The row that `shared.begin` is in.
  __device__ __forceinline__ void take(MlaSegment& s, const MlaRow& r, unsigned row, unsigned start,
                                       unsigned lead = mla_wide_cost) const {
    const unsigned all = tiles(r);
    unsigned stop, end;
    bool over = true;
    if (w.independent) {
      const unsigned each = mla_wide_tiles(all);
      s.first = (shared.begin - start) * each;
      stop = detail::smaller(s.first + each, all);
      over = stop == all;
      end = ++shared.begin;
      s.place = end - 1;
    } else {
      start += lead;
      s.first = detail::larger(shared.begin, start) - start;
      stop = detail::smaller(all, shared.end - start);
      end = start + all;
      shared.begin = end + lead;
      s.place = 2 * block + (s.first == 0 ? 1 : 0);
    }
    s.row = row, s.count = stop - s.first, s.length = r.length;
    s.whole = s.first == 0 && stop == all;
    s.last_page = (r.length - 1) / w.a.cache.page_size;
    s.table = w.a.cache.table + r.slot * w.a.cache.table_stride;
    shared.row = over ? row + 1 : row;
    shared.start = over ? end : start;
  }

  /// The sum of the values of threads before this one. `sums`: a word for each warp.
  __device__ __forceinline__ unsigned before(unsigned value, unsigned* sums, unsigned& total) const {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = value;
#pragma unroll
    for (unsigned offset = 1; offset < 32; offset *= 2) {
      const unsigned other = __shfl_up_sync(full_warp, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == 31 && warp < mla_wide_rows / 32) sums[warp] = sum;
    __syncthreads();
    unsigned result = sum - value;
    total = 0;
#pragma unroll
    for (unsigned i = 0; i < mla_wide_rows / 32; ++i) {
      if (i < warp) result += sums[i];
      total += sums[i];
    }
    return result;
  }

  /// The first segment. All threads of the block, with the row of their number.
  __device__ __forceinline__ void make(const MlaRow& r) const {
    constexpr unsigned warps = mla_wide_rows / 32;
    unsigned* const scratch = reinterpret_cast<unsigned*>(shared.scratch);
    unsigned *const sums = scratch + mla_wide_rows, *const lives = sums + warps, *const shares = lives + warps;
    const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const unsigned rows = static_cast<unsigned>(w.a.rows.count), all = tiles(r);
    const unsigned mine = w.independent && all > 0 ? quotient(all, mla_wide_tiles(all)) : all;
    if (thread == 0) shared.segment.count = shared.missing = shared.begin = shared.end = 0;
    const unsigned live = __ballot_sync(full_warp, all > 0);
    if (lane == 0 && warp < warps) lives[warp] = __popc(live);
    if (thread < mla_wide_rows) scratch[thread] = all;
    unsigned total, lead = 0, start = before(mine, sums, total);
    unsigned each = detail::larger(quotient(total, blocks), 1u);
    bool cut = false;
    if (w.independent || rows == 1) {
      cut = !w.independent;
    } else {
      unsigned earlier = __popc(live & ((1u << lane) - 1)), lives_all = 0;
#pragma unroll
      for (unsigned i = 0; i < warps; ++i) {
        if (i < warp) earlier += lives[i];
        lives_all += lives[i];
      }
      unsigned needs = 0;  // blocks that all rows need where a share is `each + warp` tiles: each warp tries one size
      for (unsigned i = lane; i < rows; i += 32) needs += quotient(scratch[i], each + warp);
      needs = __reduce_add_sync(full_warp, needs);
      if (lane == 0 && warp < warps) shares[warp] = needs;
      __syncthreads();
      // Shares are worth it where they are not longer than runs over rows would be, which cost mla_wide_cost a row.
      const unsigned most = detail::larger(quotient(total + mla_wide_cost * lives_all, blocks), mla_wide_cost + 1);
      unsigned share = most + 1;
#pragma unroll
      for (unsigned i = warps; i-- > 0;)
        if (shares[i] <= blocks) share = each + i;
      cut = share <= most;
      if (cut) {
        each = share;
        start = before(quotient(all, each), sums, total) * each;
      } else {
        each = most;
        start += mla_wide_cost * earlier;
        lead = mla_wide_cost;
      }
    }
    const unsigned begin = block * each, first = (start + lead) / each;
    if (blockIdx.x == 0 && thread < rows)
      w.segments[thread] = w.independent || mine == 0 ? make_uint2(start, mine)
                                                      : make_uint2(first, (start + lead + mine - 1) / each - first + 1);
    if (mine == 0) return;
    if (start <= begin && begin < start + lead + mine) {
      shared.begin = begin;
      shared.end = w.independent ? detail::smaller(begin + each, total) : begin + each;
      take(shared.segment, r, thread, start, lead);
      if (cut) shared.begin = shared.end;
    }
  }

  /// The segment behind this one, its count 0 where there is none. One thread.
  __device__ __forceinline__ void look_ahead() const {
    MlaSegment& s = shared.coming;
    s.count = 0;
    if (shared.begin >= shared.end) return;
    for (unsigned row = shared.row; row < w.a.rows.count; ++row) {
      MlaRow r;
      if (row == shared.segment.row) {
        r.live = true, r.length = shared.segment.length;
      } else {
        r = w.a.rows.find(row, w.a.cache);
        if (!r.live) continue;
      }
      take(s, r, row, shared.start);
      if (row == shared.segment.row) s.table = shared.segment.table;
      return;
    }
  }
  /// Makes it the segment. The first warp.
  __device__ __forceinline__ void advance() const {
    constexpr unsigned words = sizeof(MlaSegment) / 4;
    if (threadIdx.x < words)
      reinterpret_cast<unsigned*>(&shared.segment)[threadIdx.x] =
          reinterpret_cast<const unsigned*>(&shared.coming)[threadIdx.x];
    if (threadIdx.x == 0) shared.missing = 0;
  }
};

}  // namespace k3::kernel
