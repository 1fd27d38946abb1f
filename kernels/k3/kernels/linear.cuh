// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/activation.hpp>
#include <k3/kernels/common.cuh>

// Products with weight matrices, out = x W^T, for the few rows of x (tokens) of a decode step. Weights are on the M
// side of the tensor cores' 16 x 8 tile and tokens on the N side, so that one order of accumulation serves every number
// of tokens:
//   K < 1024:  one sum over k in steps of 32, two products of 16 a step;
//   otherwise: K is cut into 8 pieces of whole steps, p0 to p7, each summed like that, and
//              result = (((p0 + p1) + p2) + p3) + (((p4 + p5) + p6) + p7).
// Who computes which piece is a matter of speed alone: with 8 tokens or less each piece has its own warp, with more a
// warp does four of them one after the other and a block has four times the rows, since then x is the larger part of
// what a block reads.
namespace k3::kernel {

inline constexpr unsigned linear_threads = 256, linear_warps = linear_threads / 32;
inline constexpr unsigned linear_step = 32;   ///< of k: 16 bytes in each of 4 lanes
inline constexpr unsigned linear_depth = 4;   ///< steps of weights that a warp has in flight
inline constexpr unsigned linear_pieces = 8;  ///< of K, from linear_split_columns on
inline constexpr unsigned linear_split_columns = 1024;
inline constexpr unsigned linear_most_segments = 8;
inline constexpr unsigned linear_general_tokens = 4;  ///< of one pass without tensor cores

/// The gate of a gated MLP, as GluConfig says it.
struct LinearGlu {
  bool silu = false, capped = true;
  float beta = 1, linear_beta = 1;

  __device__ float operator()(float gate, float up) const {
    if (silu) return k3::silu(gate) * up;
    return capped ? situ_glu(gate, up, beta, linear_beta) : situ_glu_uncapped(gate, up, beta);
  }
};

/// Rows of float or bf16, whichever the launch uses; reading gives floats and writing rounds.
struct LinearRows {
  void* data = nullptr;
  size stride = 0;

  __device__ __forceinline__ float get(size row, size column, bool is_float) const {
    const size at = row * stride + column;
    return is_float ? static_cast<const float*>(data)[at] : float(static_cast<const bf16*>(data)[at]);
  }
  __device__ __forceinline__ void put(size row, size column, bool is_float, float value) const {
    const size at = row * stride + column;
    if (is_float)
      static_cast<float*>(data)[at] = value;
    else
      static_cast<bf16*>(data)[at] = bf16(value);
  }
};

enum class LinearKind : unsigned char { store, glu, add };

/// One weight matrix of a launch and what becomes of its products.
struct LinearSegment {
  const void* weight = nullptr;  ///< [rows, columns]
  const void* up = nullptr;      ///< glu: the second matrix
  LinearRows out{};              ///< add: the stream
  unsigned rows = 0;             ///< outputs of a token
  unsigned end = 0;              ///< units of this and all earlier segments
  LinearKind kind = LinearKind::store;
  bool float_out = false;
  LinearGlu glu{};
};

/// Of a segment of kind add: part = round(product), part = round(part + other), snapshot = stream,
/// stream = replace ? part : round(stream + part); `other`, `part` and `snapshot` where they have memory.
struct LinearAdd {
  LinearRows other{}, part{}, snapshot{};
  bool replace = false;
};

template <class X>
struct LinearArguments {
  const X* x = nullptr;  ///< [tokens, columns]
  size x_stride = 0;
  unsigned tokens = 0, columns = 0;
  unsigned units = 0;  ///< of 16 rows of weights with tensor cores, of one row of out without
  unsigned groups =
      1;  ///< of tokens; those of one unit are neighbours in the grid and share its weights in the L2 cache
  LinearAdd add{};
  LinearSegment segment[linear_most_segments]{};
};

__device__ __forceinline__ float linear_rounded(float value, bool is_float) {
  return is_float ? value : float(bf16(value));
}

/// Takes the product of one row of a weight (two rows, for glu) and one token where it belongs.
__device__ inline void linear_finish(const LinearSegment& s, const LinearAdd& add, size token, unsigned row,
                                     float value, float up) {
  const bool wide = s.float_out;
  if (s.kind == LinearKind::store) return s.out.put(token, row, wide, value);
  float part = linear_rounded(value, wide);
  if (s.kind == LinearKind::glu) return s.out.put(token, row, wide, s.glu(part, linear_rounded(up, wide)));
  if (add.other.data) part = linear_rounded(part + add.other.get(token, row, wide), wide);
  if (add.part.data) add.part.put(token, row, wide, part);
  const float before = s.out.get(token, row, wide);
  if (add.snapshot.data) add.snapshot.put(token, row, wide, before);
  s.out.put(token, row, wide, add.replace ? part : before + part);
}

/// The segment that a unit belongs to, and the unit's place in it.
template <class X>
__device__ __forceinline__ unsigned find_segment(const LinearArguments<X>& a, unsigned& unit) {
  unsigned s = 0;
  while (unit >= a.segment[s].end) ++s;
  if (s > 0) unit -= a.segment[s - 1].end;
  return s;
}

/// Eight elements. `Aligned`: they lie on a multiple of 16 bytes.
template <bool Aligned, bool Streaming>
__device__ __forceinline__ uint4 load_eight(const bf16* p) {
  if constexpr (Aligned && Streaming)
    return load_streaming(p);
  else if constexpr (Aligned)
    return __ldg(reinterpret_cast<const uint4*>(p));
  const auto pair = [&](int i) { return __ldg(&p[i].bits) | static_cast<unsigned>(__ldg(&p[i + 1].bits)) << 16; };
  return {pair(0), pair(2), pair(4), pair(6)};
}

/// The first `left` of eight elements, then zeros; where `Aligned`, all or none.
template <bool Aligned, bool Streaming>
__device__ __forceinline__ uint4 load_eight(const bf16* p, int left) {
  if (left >= 8) return load_eight<Aligned, Streaming>(p);
  if (Aligned || left <= 0) return {0, 0, 0, 0};
  const auto one = [&](int i) { return i < left ? static_cast<unsigned>(__ldg(&p[i].bits)) : 0u; };
  return {one(0) | one(1) << 16, one(2) | one(3) << 16, one(4) | one(5) << 16, one(6) | one(7) << 16};
}

/// c += a b with a [16, 16] of weights, b [16, 8] of tokens.
__device__ __forceinline__ void multiply_add(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// The products of 16 rows of weights with Tiles * 8 tokens. In a step of 32 the first product takes elements 0 to 3 of
/// each lane's eight and the second 4 to 7: the same for weights and tokens, so that neither needs to be moved between
/// lanes.
template <int Tiles, bool Aligned, bool Pieces>
struct LinearProducts {
  static constexpr unsigned chunk = linear_depth * linear_step;
  enum class Next { whole, partly, none };

  const bf16 *low, *high;  // this lane's two rows of weights, at its elements of the chunk
  const bf16* x[Tiles];    // and its token of each tile
  unsigned piece = 0;      // steps of a piece of K, where pieces are summed apart
  float sum[Tiles][4] = {};
  float piece_sum[Tiles][4] = {};
  unsigned to_flush = 0;
  uint4 a[linear_depth], b[linear_depth];

  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < Tiles * 4; ++i) sum[i / 4][i % 4] += piece_sum[i / 4][i % 4], piece_sum[i / 4][i % 4] = 0;
  }

  /// Multiplies one chunk and fetches the next into registers as they become free. `left`: elements from here on; a
  /// chunk that is followed is whole.
  template <Next next>
  __device__ __forceinline__ void multiply(int left) {
#pragma unroll
    for (unsigned d = 0; d < linear_depth; ++d) {
      const int at = static_cast<int>(d * linear_step);
      if (next == Next::none && at >= left + static_cast<int>(threadIdx.x % 4 * 8)) break;  // the same for all lanes
      if constexpr (Pieces) {
        if (to_flush == 0) flush(), to_flush = piece;
        --to_flush;
      }
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        const uint4 v = next == Next::none ? load_eight<Aligned, false>(x[tile] + at, left - at)
                                           : load_eight<Aligned, false>(x[tile] + at);
        multiply_add(piece_sum[tile], a[d].x, b[d].x, a[d].y, b[d].y, v.x, v.y);
        multiply_add(piece_sum[tile], a[d].z, b[d].z, a[d].w, b[d].w, v.z, v.w);
      }
      if constexpr (next == Next::whole) {
        a[d] = load_eight<Aligned, true>(low + chunk + at);
        b[d] = load_eight<Aligned, true>(high + chunk + at);
      } else if constexpr (next == Next::partly) {
        fetch(d, chunk, left);
      }
    }
    low += chunk, high += chunk;
#pragma unroll
    for (const bf16*& token : x) token += chunk;
  }

  __device__ __forceinline__ void fetch(unsigned d, unsigned ahead, int left) {
    const unsigned at = ahead + d * linear_step;
    a[d] = load_eight<Aligned, true>(low + at, left - static_cast<int>(at));
    b[d] = load_eight<Aligned, true>(high + at, left - static_cast<int>(at));
  }

  /// Over k in [begin, end); the rows and tokens are given at k = 0.
  __device__ __forceinline__ void run(unsigned begin, unsigned end) {
    const unsigned own = threadIdx.x % 4 * 8;
    begin = detail::smaller(begin, end);
    low += begin + own, high += begin + own;
#pragma unroll
    for (const bf16*& token : x) token += begin + own;
    to_flush = piece;
    int left = static_cast<int>(end - begin) - static_cast<int>(own);
#pragma unroll
    for (unsigned d = 0; d < linear_depth; ++d) fetch(d, 0, left);
    unsigned whole = (end - begin) / chunk;
    for (; whole > 1; --whole, left -= chunk) multiply<Next::whole>(left);
    if (whole == 1) multiply<Next::partly>(left), left -= chunk;
    multiply<Next::none>(left);
    flush();
  }
};

/// bf16 weights and bf16 x. `Parallel` warps share the K of a unit of 16 rows: 1 (K not cut), 2 (four pieces each)
/// or 8.
template <int Parallel, int Tiles, bool Aligned>
__global__ void __launch_bounds__(linear_threads, Tiles == 1   ? 4
                                                  : Tiles == 8 ? 1
                                                               : 2)
    linear_tensor(const __grid_constant__ LinearArguments<bf16> a) {
  constexpr unsigned block_units = linear_warps / Parallel;
  __shared__ float shares[Parallel > 1 ? linear_warps * Tiles * 4 * 32 : 1];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / block_units;
  const unsigned slot = blockIdx.x / a.groups * block_units + warp % block_units;
  const unsigned first_token = blockIdx.x % a.groups * (Tiles * 8);
  unsigned unit =
      detail::smaller(slot, a.units - 1);  // a warp too many repeats the last unit and keeps the result to itself
  const LinearSegment& s = a.segment[find_segment(a, unit)];

  const bool glu = s.kind == LinearKind::glu;
  const unsigned row = unit * (glu ? 8 : 16) + lane / 4, last = s.rows - 1;
  const bf16* const weight = static_cast<const bf16*>(s.weight);
  const bf16* const low = weight + static_cast<size>(detail::smaller(row, last)) * a.columns;
  const bf16* const high =
      glu ? static_cast<const bf16*>(s.up) + static_cast<size>(detail::smaller(row, last)) * a.columns
          : weight + static_cast<size>(detail::smaller(row + 8, last)) * a.columns;
  LinearProducts<Tiles, Aligned, Parallel == 2> products;
  products.low = low, products.high = high;
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile)
    products.x[tile] =
        a.x + static_cast<size>(detail::smaller(first_token + tile * 8 + lane / 4, a.tokens - 1)) * a.x_stride;

  const unsigned steps = (a.columns + linear_step - 1) / linear_step;
  products.piece = (steps + linear_pieces - 1) / linear_pieces;
  const unsigned width = Parallel == 1 ? a.columns : products.piece * (linear_pieces / Parallel) * linear_step;
  products.run(share * width, detail::smaller((share + 1) * width, a.columns));

  auto& sum = products.sum;
  const auto finish = [&](unsigned token, float value, float other) {
    if (slot >= a.units || token >= a.tokens) return;
#pragma unroll 1
    for (unsigned half = 0; half < (glu ? 1 : 2) && row + half * 8 < s.rows; ++half)
      linear_finish(s, a.add, token, row + half * 8, half == 0 ? value : other, other);
  };
  const unsigned token = first_token + lane % 4 * 2;
  if constexpr (Parallel == 1) {
#pragma unroll
    for (int i = 0; i < Tiles * 2; ++i) finish(token + i / 2 * 8 + i % 2, sum[i / 2][i % 2], sum[i / 2][2 + i % 2]);
  } else {
    // Sums go through shared memory, so that all warps can finish them.
    constexpr unsigned values = Tiles * 4;
#pragma unroll
    for (int i = 0; i < Tiles * 4; ++i) shares[(warp * values + i) * 32 + lane] = sum[i / 4][i % 4];
    __syncthreads();
    for (unsigned i = share; i < Tiles * 2; i += Parallel) {
      const auto total = [&](unsigned value) {
        const auto of = [&](unsigned p) {
          return shares[((p * block_units + warp % block_units) * values + value) * 32 + lane];
        };
        if constexpr (Parallel == 2)
          return of(0) + of(1);
        else
          return (((of(0) + of(1)) + of(2)) + of(3)) + (((of(4) + of(5)) + of(6)) + of(7));
      };
      finish(token + i / 2 * 8 + i % 2, total(i / 2 * 4 + i % 2), total(i / 2 * 4 + 2 + i % 2));
    }
  }
}

__device__ __forceinline__ float linear_value(const float* p) { return __ldg(p); }
__device__ __forceinline__ float linear_value(const bf16* p) { return bf16::from_bits(__ldg(&p->bits)); }

/// sum[j] = w . x[j]: lane l takes k = l, l + 32, ... by FMA, then a butterfly.
template <class W, class X>
__device__ __forceinline__ void linear_dot(float (&sum)[linear_general_tokens], const W* w,
                                           const X* const (&x)[linear_general_tokens], unsigned columns) {
#pragma unroll
  for (float& s : sum) s = 0;
#pragma unroll 4
  for (unsigned k = threadIdx.x % 32; k < columns; k += 32) {
    const float weight = linear_value(w + k);
#pragma unroll
    for (unsigned j = 0; j < linear_general_tokens; ++j) sum[j] = fmaf(weight, linear_value(x[j] + k), sum[j]);
  }
#pragma unroll
  for (float& s : sum) s = warp_sum(s);
}

/// Float weights or float x, in float arithmetic: a warp has one row of out and a few tokens.
template <class X, class W>
__global__ void __launch_bounds__(linear_threads) linear_general(const __grid_constant__ LinearArguments<X> a) {
  const unsigned slot = blockIdx.x / a.groups * linear_warps + threadIdx.x / 32;
  const unsigned first_token = blockIdx.x % a.groups * linear_general_tokens;
  if (slot >= a.units) return;
  unsigned row = slot;
  const LinearSegment& s = a.segment[find_segment(a, row)];
  const X* x[linear_general_tokens];
#pragma unroll
  for (unsigned j = 0; j < linear_general_tokens; ++j)
    x[j] = a.x + static_cast<size>(detail::smaller(first_token + j, a.tokens - 1)) * a.x_stride;
  const size offset = static_cast<size>(row) * a.columns;
  float value[linear_general_tokens], up[linear_general_tokens] = {};
  linear_dot(value, static_cast<const W*>(s.weight) + offset, x, a.columns);
  if (s.kind == LinearKind::glu) linear_dot(up, static_cast<const W*>(s.up) + offset, x, a.columns);
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (unsigned j = 0; j < linear_general_tokens; ++j)
    if (first_token + j < a.tokens) linear_finish(s, a.add, first_token + j, row, value[j], up[j]);
}

}  // namespace k3::kernel
