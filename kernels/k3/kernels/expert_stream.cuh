// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/expert_weights.cuh>

// Both products of all chosen experts in one kernel, for packed MXFP4 experts. One block an SM stays and streams tiles
// of 16 rows of weights by all of K (8 of w1 and the same 8 of w3; then 16 of w2) through a ring in shared memory:
//   the copier (one thread) takes tiles, waits for a free stage and starts four bulk copies, up to `stages` tiles
//     ahead, across experts and from the first product into the second, whose weights do not depend on its rows;
//   multipliers (a warp for each piece of 256 columns of K) hold their columns of the rows in registers as long as the
//     item stays, expand their part of the tile and multiply;
//   adders (two warps, tiles in turn) add the pieces in order, apply the activation and store.
// Tiles are handed out by a counter, large parts first: no block waits for one that has not started, and a slow SM
// takes fewer. The second product's multipliers wait for the tiles of the first that make their rows.
namespace k3::kernel {

inline constexpr unsigned stream_adders = 2, stream_other_warps = 1 + stream_adders;
inline constexpr unsigned stream_pieces = 14;  ///< most pieces of K: warps that multiply
inline constexpr unsigned stream_threads = 32 * (stream_other_warps + stream_pieces);
inline constexpr unsigned stream_sums = 4;    ///< tiles whose pieces wait to be added
inline constexpr unsigned stream_jobs = 16;   ///< tiles that are somewhere between copier and adders, at most
inline constexpr unsigned stream_stages = 6;  ///< most tiles between copier and multipliers

struct ExpertStreamArguments {
  const ExpertPointers* table = nullptr;
  const ExpertItem* items = nullptr;
  const unsigned* item_count = nullptr;
  const unsigned* order = nullptr;
  unsigned* ready = nullptr;    ///< by item: tiles of the first product that are done
  unsigned* tickets = nullptr;  ///< by product
  const bf16* x = nullptr;      ///< [rows, width], RowOrder::e2m1
  bf16* mid = nullptr;          ///< [choices, hidden] by place, RowOrder::e2m1
  bf16* y = nullptr;            ///< [choices, width]
  unsigned width = 0, hidden = 0, k = 0;
  unsigned stages = 0;
  LinearGlu glu{};

  /// A stage holds the codes of two slabs, then their scales, each with room for the longer rows.
  __host__ __device__ unsigned columns() const { return width > hidden ? width : hidden; }
  __host__ __device__ unsigned slab_codes() const { return columns() * (slab_rows / 2); }
  __host__ __device__ unsigned slab_scales() const { return columns() / (32 / slab_rows); }
  __host__ __device__ unsigned stage_bytes() const { return 2 * (slab_codes() + slab_scales()); }
};

/// A tile on its way through a block.
struct __align__(16) StreamJob {
  unsigned rows;  ///< of x, for whom: 2 * item + product (0 gate and up, 1 down), or stream_end
  unsigned first, count;
  unsigned row;  ///< of the weights, the first; its highest bit: a scale may be above 128

  __device__ __forceinline__ unsigned item() const { return rows / 2; }
  __device__ __forceinline__ unsigned product() const { return rows % 2; }
  __device__ __forceinline__ bool large() const { return row >> 31 != 0; }
};
inline constexpr unsigned stream_end = ~0u;

struct StreamShared {
  ExpertBarrier full[stream_stages], empty[stream_stages];  ///< of a stage
  ExpertBarrier added[stream_sums], summed[stream_sums];    ///< of a tile's pieces: free again; all there
  StreamJob jobs[stream_jobs];
  float4 sums[stream_sums][stream_pieces][32];
};

/// Counts through a ring, with the parity of the round.
template <unsigned Size>
struct RingPlace {
  unsigned at = 0, parity = 0;
  __device__ __forceinline__ void next(unsigned size = Size) {
    if (++at == size) at = 0, parity ^= 1;
  }
};

/// The copier: hands out tiles.
struct StreamCopier {
  const ExpertStreamArguments& a;
  StreamShared& s;
  std::uint8_t* ring;
  RingPlace<stream_stages> stage{};
  unsigned job = 0, item_index = ~0u;
  ExpertItem item{};
  ExpertPointers expert{};

  __device__ __forceinline__ void put(const StreamJob& j, const void* low, const void* high, const void* low_scale,
                                      const void* high_scale, unsigned columns) {
    s.empty[stage.at].wait(stage.parity ^ 1);
    s.jobs[job] = j;
    job = (job + 1) % stream_jobs;
    const unsigned codes = slab_rows * columns / 2, scales = slab_rows * columns / 32;
    std::uint8_t* const at = ring + stage.at * a.stage_bytes();
    std::uint8_t* const scale_at = at + 2 * a.slab_codes();
    ExpertBarrier& full = s.full[stage.at];
    full.arrive_expecting(2 * (codes + scales));
    expert_copy(at, low, codes, full);
    expert_copy(at + a.slab_codes(), high, codes, full);
    expert_copy(scale_at, low_scale, scales, full);
    expert_copy(scale_at + a.slab_scales(), high_scale, scales, full);
    stage.next(a.stages);
  }

  /// Tile `unit` of a product: an expert's tiles in order, each for all items of the expert.
  __device__ __forceinline__ void tile(unsigned product, unsigned unit, unsigned tiles) {
    if (unit / tiles != item_index) {
      item_index = unit / tiles;
      item = a.items[item_index];
      expert = a.table[item.expert];
    }
    unsigned tile = unit - item.head * tiles, part = 0;
    ExpertItem own = item;
    if (item.items > 1) {
      part = tile % item.items, tile /= item.items;
      own = a.items[item.head + part];
    }
    const unsigned columns = product == 0 ? a.width : a.hidden;
    const size codes = slab_rows * columns / 2, scales = slab_rows * columns / 32;
    const StreamJob j{2 * (item.head + part) + product, own.first, own.count,
                      tile * (product == 0 ? 8 : 16) | expert.large_scales << 31};
    const auto bytes = [](const void* p) { return static_cast<const std::uint8_t*>(p); };
    if (product == 0) {
      put(j, bytes(expert.w1) + tile * codes, bytes(expert.w3) + tile * codes, expert.scale1 + tile * scales,
          expert.scale3 + tile * scales, columns);
    } else {
      const std::uint8_t* const low = bytes(expert.w2) + 2 * tile * codes;
      const std::uint8_t* const low_scale = expert.scale2 + 2 * tile * scales;
      put(j, low, low + codes, low_scale, low_scale + scales, columns);
    }
  }

  __device__ __forceinline__ void run() {
    const unsigned items = *a.item_count, blocks = gridDim.x;
    for (unsigned product = 0; product < 2; ++product) {
      const unsigned tiles = product == 0 ? a.hidden / 8 : a.width / 16, total = items * tiles;
      // seven eighths in one part for each block, the rest in small ones
      const unsigned first = total - total / 8, small = detail::larger(1u, (total - first) / (blocks * 4));
      const auto edge = [&](unsigned ticket) {
        if (ticket <= blocks) return static_cast<unsigned>(static_cast<unsigned long long>(first) * ticket / blocks);
        const unsigned long long at = first + static_cast<unsigned long long>(ticket - blocks) * small;
        return static_cast<unsigned>(at < total ? at : total);
      };
      for (;;) {
        const unsigned ticket = atomicAdd(a.tickets + product, 1u);
        const unsigned from = edge(ticket), to = edge(ticket + 1);
        if (from >= total) break;
        for (unsigned unit = from; unit < to; ++unit) tile(product, unit, tiles);
      }
      item_index = ~0u;
    }
    s.empty[stage.at].wait(stage.parity ^ 1);
    for (unsigned i = 0; i < stream_adders; ++i) s.jobs[(job + i) % stream_jobs].rows = stream_end;
    s.full[stage.at].arrive();
  }
};

/// A multiplier's columns of an item's rows, as the tensor cores take them.
struct StreamRows {
  uint4 x[2][4];

  __device__ __forceinline__ void load(const ExpertStreamArguments& a, const StreamJob& j, unsigned piece,
                                       unsigned lane) {
    if (j.product() == 1) {
      if (lane == 0) expert_acquire(a.ready + j.item(), a.hidden / 8);
      __syncwarp();
    }
    const size place = j.first + detail::smaller(lane / 4, j.count - 1);  // the last row again, where there are less
    const bf16* const from =
        j.product() == 0 ? a.x + static_cast<size>(a.order[place] / a.k) * a.width : a.mid + place * a.hidden;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      x[i / 4][i % 4] = *reinterpret_cast<const uint4*>(from + piece * piece_columns + i * 32 + lane % 4 * 8);
  }
};

/// A multiplier's part of a tile.
struct StreamPiece {
  uint4 low[2], high[2];
  unsigned low_scale, high_scale;  ///< of both steps

  /// `codes` and `scales`: the lane's in the lower slab; the other slab's are so many bytes further.
  __device__ __forceinline__ void load(const std::uint8_t* codes, const std::uint8_t* scales, unsigned other_codes,
                                       unsigned other_scales) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] = *reinterpret_cast<const uint4*>(codes + i * (piece_code_bytes / 2));
      high[i] = *reinterpret_cast<const uint4*>(codes + other_codes + i * (piece_code_bytes / 2));
    }
    low_scale = *reinterpret_cast<const unsigned short*>(scales);
    high_scale = *reinterpret_cast<const unsigned short*>(scales + other_scales);
  }

  template <bool Large>
  __device__ __forceinline__ void multiply(float (&sum)[4], const StreamRows& rows) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto scale_of = [&](unsigned both) {
        const unsigned scale = i == 0 ? both & 255 : both >> 8;
        return Large ? E8m0Pair::any(scale) : E8m0Pair{E8m0Pair::small(scale), 0};
      };
      const E8m0Pair l = scale_of(low_scale), h = scale_of(high_scale);
      const unsigned low_word[4] = {low[i].x, low[i].y, low[i].z, low[i].w};
      const unsigned high_word[4] = {high[i].x, high[i].y, high[i].z, high[i].w};
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        unsigned p[4], r[4];
        multiply_word<true, Large>(p, r, low_word[q], high_word[q], l, h);
        const uint4& v = rows.x[i][q];
        multiply_add(sum, p[0], r[0], p[1], r[1], v.x, v.y);
        multiply_add(sum, p[2], r[2], p[3], r[3], v.z, v.w);
      }
    }
  }
};

__device__ __forceinline__ void stream_multiply(const ExpertStreamArguments& a, StreamShared& s,
                                                const std::uint8_t* ring, unsigned piece, unsigned lane) {
  const bool in_width = piece * piece_columns < a.width, in_hidden = piece * piece_columns < a.hidden;
  const unsigned other_codes = a.slab_codes(), other_scales = a.slab_scales(), stage_bytes = a.stage_bytes();
  const std::uint8_t* const codes = ring + piece * piece_code_bytes + lane * 16;
  const std::uint8_t* const scales = ring + 2 * other_codes + piece * piece_scale_bytes + lane * 2;
  RingPlace<stream_stages> stage;
  RingPlace<stream_sums> sums;
  StreamRows rows;
  unsigned own_rows = stream_end;
  for (unsigned job = 0;; job = (job + 1) % stream_jobs) {
    s.full[stage.at].wait(stage.parity);
    const StreamJob j = s.jobs[job];
    if (j.rows == stream_end) break;
    const bool mine = j.product() == 0 ? in_width : in_hidden;
    StreamPiece own;
    if (mine) own.load(codes + stage.at * stage_bytes, scales + stage.at * stage_bytes, other_codes, other_scales);
    __syncwarp();
    if (lane == 0) s.empty[stage.at].arrive();
    stage.next(a.stages);
    if (mine) {
      if (j.rows != own_rows) rows.load(a, j, piece, lane);
      own_rows = j.rows;
      float sum[4] = {};
      if (j.large())
        own.multiply<true>(sum, rows);
      else
        own.multiply<false>(sum, rows);
      s.added[sums.at].wait(sums.parity ^ 1);
      if (lane % 4 * 2 < j.count) s.sums[sums.at][piece][lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      __syncwarp();
    } else {
      s.added[sums.at].wait(sums.parity ^ 1);
    }
    if (lane == 0) s.summed[sums.at].arrive();
    sums.next();
  }
  for (unsigned i = 0; i < stream_adders; ++i, sums.next()) {
    s.added[sums.at].wait(sums.parity ^ 1);
    if (lane == 0) s.summed[sums.at].arrive();
  }
}

/// Pieces in order, from zero.
__device__ __forceinline__ void stream_total(float (&sum)[4], const float4 (&of_tile)[stream_pieces][32],
                                             unsigned pieces, unsigned lane) {
#pragma unroll
  for (unsigned p = 0; p < stream_pieces; ++p) {
    if (p >= pieces) break;
    const float4 v = of_tile[p][lane];
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
}

__device__ __forceinline__ void stream_add(const ExpertStreamArguments& a, StreamShared& s, unsigned adder,
                                           unsigned lane) {
  RingPlace<stream_sums> sums;
  sums.at = adder;
  for (unsigned job = adder;; job = (job + stream_adders) % stream_jobs) {
    s.summed[sums.at].wait(sums.parity);
    const StreamJob j = s.jobs[job];
    if (j.rows == stream_end) return;
    float sum[4] = {};
    if (lane % 4 * 2 < j.count)
      stream_total(sum, s.sums[sums.at], (j.product() == 0 ? a.width : a.hidden) / piece_columns, lane);
    __syncwarp();
    if (lane == 0) s.added[sums.at].arrive();
    for (unsigned i = 0; i < stream_adders; ++i) sums.next();
    const unsigned row = (j.row & ~(1u << 31)) + lane / 4;
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned token = lane % 4 * 2 + i;
      if (token >= j.count) continue;
      const size place = j.first + token;
      if (j.product() == 0) {
        const float gate = float(bf16(sum[i])), up = float(bf16(sum[2 + i]));
        a.mid[place * a.hidden + row_place(RowOrder::e2m1, row)] = bf16(a.glu(gate, up));
      } else {
        bf16* const to = a.y + static_cast<size>(a.order[place]) * a.width + row;
        to[0] = bf16(sum[i]), to[8] = bf16(sum[2 + i]);
      }
    }
    if (j.product() != 0) continue;
    __syncwarp();
    if (lane == 0) expert_release(a.ready + j.item());
  }
}

/// Dynamic shared memory: StreamShared, then `stages` stages.
static __global__ void __launch_bounds__(stream_threads, 1)
    expert_stream(const __grid_constant__ ExpertStreamArguments a) {
  if constexpr (expert_async) {
    extern __shared__ __align__(128) std::uint8_t stream_memory[];
    StreamShared& s = *reinterpret_cast<StreamShared*>(stream_memory);
    std::uint8_t* const ring = stream_memory + (sizeof(StreamShared) + 127) / 128 * 128;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    expert_start_next();
    if (threadIdx.x == 0) {
      for (unsigned i = 0; i < stream_stages; ++i) s.full[i].init(1), s.empty[i].init(stream_pieces);
      for (unsigned i = 0; i < stream_sums; ++i) s.summed[i].init(stream_pieces), s.added[i].init(1);
      expert_barriers_ready();
    }
    __syncthreads();
    expert_wait_before();
    if (warp >= stream_other_warps)
      stream_multiply(a, s, ring, warp - stream_other_warps, lane);
    else if (warp >= 1)
      stream_add(a, s, warp - 1, lane);
    else if (lane == 0)
      StreamCopier{a, s, ring}.run();
  }
}

}  // namespace k3::kernel
