// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/mla_attend_general.cuh>
#include <k3/kernels/mla_hopper.cuh>

// Absorbed attention on tensor cores. Keys are on the M side of the 16 x 8 tile and heads on the N side, so that 96
// heads are 12 tiles and nothing is padded. A block of 8 warps takes up to 48 heads of one row through tiles of 64
// positions in shared memory:
//   scores   [64, heads] = C q^T, cut over warps into 2 (positions) x 2 (heads) x 2 (halves of the width),
//   weights  a warp for every 1/8 of the heads, rounded to bf16,
//   values   [latent, heads] += C^T weights: each warp owns up to 4 times 16 latent columns for all heads, in
//   registers.
namespace k3::kernel {

inline constexpr unsigned mla_widest_latent = 512;          ///< 8 warps x 4 x 16
inline constexpr unsigned mla_score_stride = mla_tile + 4;  ///< floats; rows 4 banks apart

__host__ __device__ constexpr unsigned mla_padded_width(unsigned width) { return (width + 31) / 32 * 32; }
/// Elements between rows in shared memory: 16 bytes more than the width, so that 8 rows lie in different banks.
__host__ __device__ constexpr unsigned mla_row_stride(unsigned width) { return mla_padded_width(width) + 8; }
/// Bytes of shared memory of a block.
__host__ __device__ constexpr size mla_shared_bytes(unsigned group, unsigned width, unsigned stages) {
  return size{stages * mla_tile + group} * mla_row_stride(width) * sizeof(bf16) +
         size{2 * mla_score_stride + 3} * group * sizeof(float);
}

/// 16 bytes to shared memory, or 16 zero bytes.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(async::shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(async::shared_address(p))
               : "memory");
}
__device__ __forceinline__ void load_transposed(unsigned (&r)[4], const bf16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(async::shared_address(p))
               : "memory");
}
/// A block's work on one row for `Tiles * 8` heads. The members live in registers.
template <int Tiles>
struct MlaTensorBlock {
  static constexpr unsigned group = Tiles * 8;
  using Arguments = MlaAttendArguments<bf16>;

  const Arguments& a;
  MlaRow r;
  size row;
  unsigned first_head, stride, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bf16 *tiles, *q;
  float *scores, *factors;            // [2, group, mla_score_stride], [3, group]
  bool missing = false;               // a page
  MlaStats split[Tiles], all[Tiles];  // of heads warp * Tiles + i: of the current split, of those before
  float sums[4][Tiles][4];            // latent columns (warp + 8 i) * 16.., heads n * 8..

  __device__ __forceinline__ MlaTensorBlock(const Arguments& arguments, size row_index, const MlaRow& found,
                                            uint4* shared)
      : a(arguments),
        r(found),
        row(row_index),
        first_head(blockIdx.y * group),
        stride(mla_row_stride(a.width)),
        tiles(reinterpret_cast<bf16*>(shared)),
        q(tiles + a.stages * mla_tile * stride),
        scores(reinterpret_cast<float*>(q + group * stride)),
        factors(scores + 2 * group * mla_score_stride) {
    start_split();
#pragma unroll
    for (int i = 0; i < Tiles; ++i) all[i] = {SoftmaxState<float>::no_max, 0};
  }

  __device__ __forceinline__ void start_split() {
#pragma unroll
    for (int i = 0; i < Tiles; ++i) split[i] = {SoftmaxState<float>::no_max, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int n = 0; n < Tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][n][e] = 0;
  }

  /// Zeros behind the width, once, and the queries, zeros for heads that are none.
  __device__ __forceinline__ void load_queries() const {
    const unsigned padded = mla_padded_width(a.width), extra = padded - a.width;
    for (unsigned i = threadIdx.x; i < a.stages * mla_tile * extra; i += mla_threads)
      tiles[i / extra * stride + a.width + i % extra] = bf16::from_bits(0);
    const unsigned eights = padded / 8;
    for (unsigned i = threadIdx.x; i < group * eights; i += mla_threads) {
      const unsigned h = i / eights, c = i % eights * 8;
      const bool there = first_head + h < a.heads;
      const bf16* const from = a.q + row * a.q_row + (there ? first_head + h : 0) * a.q_head;
      bf16* const to = q + h * stride + c;
      if (a.q_vector && c + 8 <= a.width) {
        copy_async(to, from + c, there);
      } else {
        for (unsigned e = 0; e < 8; ++e) to[e] = there && c + e < a.width ? from[c + e] : bf16::from_bits(0);
      }
    }
  }

  /// Four threads a position. Positions past the row's last are zeros, and not read.
  __device__ __forceinline__ void load_tile(unsigned tile, unsigned stage) {
    const unsigned at = threadIdx.x / 4, part = threadIdx.x % 4, position = tile * mla_tile + at;
    const bf16* const from = position < r.length ? a.cache.row(r.slot, position) : nullptr;
    missing = missing || (position < r.length && from == nullptr);
    bf16* const to = tiles + (stage * mla_tile + at) * stride;
    if (a.vector) {
      const bf16* const safe = from ? from : a.cache.pages;
#pragma unroll 6
      for (unsigned c = part * 8; c < a.width; c += 32)
        copy_async(to + c, safe + c * (from != nullptr), from != nullptr);
    } else {
      for (unsigned c = part; c < a.width; c += 4) to[c] = from ? from[c] : bf16::from_bits(0);
    }
  }

  __device__ __forceinline__ void compute_scores(const bf16* tile) const {
    constexpr int half_tiles = Tiles / 2;
    const unsigned m = warp % 2, n = warp / 2 % 2, half = warp / 4;
    const unsigned steps = mla_padded_width(a.width) / 32, middle = (steps + 1) / 2;
    const bf16* const keys = tile + (m * 32 + lane % 16) * stride + lane / 16 * 8;
    const bf16* const queries = q + (n * half_tiles * 8 + lane % 8) * stride + lane / 8 * 8;
    float s[2][half_tiles][4] = {};
#pragma unroll 3
    for (unsigned k = half ? middle : 0; k < (half ? steps : middle); ++k) {
      unsigned b[half_tiles][4];
#pragma unroll
      for (int i = 0; i < half_tiles; ++i) load_matrices(b[i], queries + i * 8 * stride + k * 32);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          unsigned key[4];
          load_matrices(key, keys + j * 16 * stride + k * 32 + e * 16);
#pragma unroll
          for (int i = 0; i < half_tiles; ++i)
            multiply_add(s[j][i], key[0], key[1], key[2], key[3], b[i][2 * e], b[i][2 * e + 1]);
        }
    }
    float* const to =
        scores + (half * group + n * half_tiles * 8 + lane % 4 * 2) * mla_score_stride + m * 32 + lane / 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < half_tiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[(i * 8 + e % 2) * mla_score_stride + j * 16 + e / 2 * 8] = s[j][i][e];
  }

  /// Scores to weights; those of a head, in bf16, take the place of its first scores.
  __device__ __forceinline__ void compute_weights(unsigned tile) {
    constexpr float none = SoftmaxState<float>::no_max;
    const unsigned position = tile * mla_tile + lane * 2;
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
      const unsigned head = warp * Tiles + i;
      float* const mine = scores + head * mla_score_stride;
      const float2 x = *reinterpret_cast<const float2*>(mine + lane * 2);
      const float2 y = *reinterpret_cast<const float2*>(mine + group * mla_score_stride + lane * 2);
      const float s0 = position < r.length ? (x.x + y.x) * a.scale : none;
      const float s1 = position + 1 < r.length ? (x.y + y.y) * a.scale : none;
      const float largest = warp_max(s0 < s1 ? s1 : s0);
      const float joint = largest > split[i].max ? largest : split[i].max;
      const float w0 = position < r.length ? exp2f(s0 - joint) : 0.0f;
      const float w1 = position + 1 < r.length ? exp2f(s1 - joint) : 0.0f;
      const float factor = mla_rescale(split[i].max, joint);
      split[i].sum = __fmaf_rn(split[i].sum, factor, warp_sum(w0 + w1));
      split[i].max = joint;
      __syncwarp();
      reinterpret_cast<unsigned*>(mine)[lane] = bf16(w0).bits | static_cast<unsigned>(bf16(w1).bits) << 16;
      if (lane == 0) factors[head] = factor;
    }
  }

  /// The two numbers that `from` [group] has for the heads of this thread's columns of tile n.
  __device__ __forceinline__ float2 of_heads(const float* from, int n) const {
    return *reinterpret_cast<const float2*>(from + n * 8 + lane % 4 * 2);
  }

  __device__ __forceinline__ void add_values(const bf16* tile) {
    bool changed = false;
#pragma unroll
    for (int n = 0; n < Tiles; ++n) {
      const float2 factor = of_heads(factors, n);
      changed = changed || !(factor.x == 1.0f && factor.y == 1.0f);
    }
    if (__any_sync(full_warp, changed)) {
#pragma unroll
      for (int n = 0; n < Tiles; ++n) {
        const float2 factor = of_heads(factors, n);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[i][n][e] *= e % 2 ? factor.y : factor.x;
      }
    }
    const bf16* const weights =
        reinterpret_cast<const bf16*>(scores) + lane % 8 * (2 * mla_score_stride) + lane / 8 * 8;
    const bf16* const values = tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      unsigned b[Tiles][4];
#pragma unroll
      for (int n = 0; n < Tiles; ++n) load_matrices(b[n], weights + n * 8 * (2 * mla_score_stride) + k * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned column = (warp + mla_warps * i) * 16;
        if (column >= a.latent) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          unsigned value[4];
          load_transposed(value, values + (k * 32 + e * 16) * stride + column);
#pragma unroll
          for (int n = 0; n < Tiles; ++n)
            multiply_add(sums[i][n], value[0], value[1], value[2], value[3], b[n][2 * e], b[n][2 * e + 1]);
        }
      }
    }
  }

  /// f(sum, head, latent column, number of the column's pair) for every sum of this thread that is wanted.
  template <class F>
  __device__ __forceinline__ void for_each_sum(F&& f) {
#pragma unroll
    for (int n = 0; n < Tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const unsigned head = n * 8 + lane % 4 * 2 + e % 2,
                         column = (warp + mla_warps * i) * 16 + lane / 4 + e / 2 * 8;
          if (first_head + head < a.heads && column < a.latent) f(sums[i][n][e], head, column);
        }
  }

  /// Leaves a split to mla_combine.
  __device__ __forceinline__ void store_split(unsigned number) {
    const bool incomplete = __syncthreads_or(missing);
    for_each_sum([&](float sum, unsigned head, unsigned column) {
      a.part[a.split_at(row, first_head + head, number) * a.latent + column] = sum;
    });
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
      const unsigned head = first_head + warp * Tiles + i;
      if (lane == 0 && head < a.heads)
        a.stats[a.split_at(row, head, number)] = {split[i].max, incomplete ? -1.0f : split[i].sum};
    }
  }

  /// Joins a split to what `out` holds of those before it.
  __device__ __forceinline__ void join_split(bool first, bool last) {
#pragma unroll
    for (int i = 0; i < Tiles; ++i) {
      const MlaJoin join(all[i], split[i]);
      const unsigned head = warp * Tiles + i;
      if (lane == 0) {
        factors[head] = join.old_factor;
        factors[group + head] = join.new_factor;
        factors[2 * group + head] = all[i].sum;
      }
    }
    const bool incomplete = __syncthreads_or(missing);
    for_each_sum([&](float sum, unsigned head, unsigned column) {
      float& out = a.out[row * a.out_row + (first_head + head) * a.out_head + column];
      const float value = MlaJoin::join(first ? 0.0f : out, factors[head], sum, factors[group + head]);
      out = !last ? value : incomplete ? 0.0f : value / factors[2 * group + head];
    });
    if (last && threadIdx.x == 0 && first_head == 0) {
      a.live[row] = !incomplete;
      if (incomplete) a.rows.report(row);
    }
  }

  /// Tiles [begin, end) of the row, `each` to a split.
  __device__ __forceinline__ void run(unsigned begin, unsigned end, unsigned each) {
    load_queries();
    load_tile(begin, 0);
    for (unsigned t = begin; t < end; ++t) {
      const unsigned stage = a.stages == 2 ? (t - begin) % 2 : 0;
      const bf16* const tile = tiles + stage * mla_tile * stride;
      copy_async_wait();
      __syncthreads();  // the tile is there for all, and nobody reads the one before it
      if (a.stages == 2 && t + 1 < end) load_tile(t + 1, 1 - stage);
      compute_scores(tile);
      __syncthreads();
      compute_weights(t);
      __syncthreads();
      add_values(tile);
      if (a.stages == 1 && t + 1 < end) {
        __syncthreads();
        load_tile(t + 1, 0);
      }
      if ((t + 1) % each != 0 && t + 1 != end) continue;
      __syncthreads();  // all have read the factors
      if (a.whole)
        join_split(t < each, t + 1 == end);
      else
        store_split(t / each);
      start_split();
    }
  }
};

/// Grid: splits (one where `whole`), groups of heads, rows.
template <int Tiles>
__global__ void __launch_bounds__(mla_threads, 1)
    mla_attend_tensor(const __grid_constant__ MlaAttendArguments<bf16> a) {
  extern __shared__ uint4 mla_shared[];
  for (size row = blockIdx.z; row < a.rows.count; row += gridDim.z) {
    const MlaRow r = a.rows.find(row, a.cache);
    if (!r.live) {
      if (!a.whole) continue;  // mla_combine writes the zeros
      const unsigned first = blockIdx.y * Tiles * 8, end = detail::smaller(first + Tiles * 8, a.heads);
      for (unsigned i = threadIdx.x; i < (end - first) * a.latent; i += mla_threads)
        a.out[row * a.out_row + (first + i / a.latent) * a.out_head + i % a.latent] = 0;
      if (threadIdx.x == 0 && first == 0) {
        a.live[row] = 0;
        if (r.bad) a.rows.report(row);
      }
      continue;
    }
    const unsigned count = (r.length + mla_tile - 1) / mla_tile, each = mla_split_tiles(r.length);
    const unsigned begin = a.whole ? 0 : blockIdx.x * each,
                   end = a.whole ? count : detail::smaller(begin + each, count);
    if (begin >= end) continue;
    __syncthreads();  // the row before has been finished
    MlaTensorBlock<Tiles>(a, row, r, mla_shared).run(begin, end, each);
  }
}

}  // namespace k3::kernel
