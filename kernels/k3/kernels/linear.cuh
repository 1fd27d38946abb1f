// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/activation.hpp>
#include <k3/geometry/latent_moe_config.hpp>
#include <k3/kernels/common.cuh>

// Products with weight matrices, out = x W^T, for the few rows of x (tokens) of a decode step: what all kernels share,
// and those for targets older than sm_90a, for odd addresses and for float. linear_stream.cuh has the fast one.
//
// All products of bf16 with bf16 have one order of sums, whatever the number of tokens, the kernel and the company:
//   K < 1024, or a matrix of 65536 rows or more (a head): tensor cores add up k in steps of 16;
//   otherwise: K is cut into four pieces of whole 64s, each summed like that, and result = ((p0 + p1) + p2) + p3.
// Whether weights are on the M side of the tensor cores' tile and tokens on the N side or the other way round, mma.sync
// and wgmma of any width give the same bits (tests/cuda/test_linear.cpp), and the order of the 16 of a step has no
// influence.
namespace k3::kernel {

inline constexpr unsigned linear_threads = 256, linear_warps = linear_threads / 32;
inline constexpr unsigned linear_step = 64;   ///< of k; pieces are whole steps
inline constexpr unsigned linear_pieces = 4;  ///< of K, from linear_split_columns on
inline constexpr unsigned linear_split_columns = 1024;
inline constexpr unsigned linear_whole_rows = 65536;  ///< of a matrix whose K is not cut
inline constexpr unsigned linear_most_segments = 8;
inline constexpr unsigned linear_general_tokens = 4;  ///< of one pass without tensor cores

/// Steps of K, and of each of its pieces.
struct LinearSteps {
  unsigned all, piece;

  __host__ __device__ LinearSteps(unsigned columns, bool whole)
      : all((columns + linear_step - 1) / linear_step),
        piece(whole ? all : (all + linear_pieces - 1) / linear_pieces) {}
};

/// e^x by the special function unit.
__device__ __forceinline__ float fast_exp(float x) { return __expf(x); }

__device__ __forceinline__ float fast_sigmoid(float x) { return __fdividef(1.0f, 1 + fast_exp(-x)); }

/// A quotient whose division is left for later.
struct Quotient {
  float above, below;
};
/// tanh, without a branch; within 2e-6 of its size.
__device__ __forceinline__ Quotient fast_tanh(float x) {
  const float q = __fmul_rn(x, x), e = fast_exp(-2 * fabsf(x));
  const bool small = q < 0.01f;
  return {small ? __fmul_rn(x, fmaf(q, fmaf(q, 2.0f / 15, -1.0f / 3), 1.0f)) : copysignf(1 - e, x), small ? 1 : 1 + e};
}

__device__ __forceinline__ float fast_silu_glu(float gate, float up) {
  const float s = fast_sigmoid(gate);
  return __fmul_rn(s == 0 ? 0 : __fmul_rn(gate, s), up);
}

/// The gate of a gated MLP, as GluConfig says it.
struct LinearGlu {
  bool silu = false, capped = true;
  float beta = 1, linear_beta = 1, inverse_beta = 1, inverse_linear_beta = 1;

  LinearGlu() = default;
  explicit LinearGlu(const GluConfig& glu)
      : silu(glu.kind == GluConfig::Kind::silu),
        capped(glu.linear_beta.has_value()),
        beta(glu.beta),
        linear_beta(glu.linear_beta.value_or(1.0f)),
        inverse_beta(1 / beta),
        inverse_linear_beta(1 / linear_beta) {}

  __device__ float operator()(float gate, float up) const {
    if (silu) return k3::silu(gate) * up;
    return capped ? situ_glu(gate, up, beta, linear_beta) : situ_glu_uncapped(gate, up, beta);
  }
  /// The same within 4e-6 of its size, with one division: for results that are rounded to bf16 at once.
  __device__ __forceinline__ float rounded_soon(float gate, float up) const {
    return silu ? fast_silu_glu(gate, up) : fast_situ(gate, up);
  }
  /// Of SiTU alone, and without a branch.
  __device__ __forceinline__ float fast_situ(float gate, float up) const {
    const Quotient g = fast_tanh(__fmul_rn(gate, inverse_beta)), u = fast_tanh(__fmul_rn(up, inverse_linear_beta));
    const float up_above = capped ? __fmul_rn(linear_beta, u.above) : up, up_below = capped ? u.below : 1;
    return __fdividef(__fmul_rn(__fmul_rn(beta, g.above), up_above),
                      __fmul_rn(__fmul_rn(g.below, up_below), 1 + fast_exp(-gate)));
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
  unsigned units = 0;   ///< of 16 rows of weights with tensor cores, of one row of out without
  unsigned groups = 1;  ///< of tokens
  bool whole = false;   ///< K is one piece
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
  if (s.kind == LinearKind::glu)
    return s.out.put(token, row, wide, wide ? s.glu(part, up) : s.glu.rounded_soon(part, linear_rounded(up, wide)));
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

/// Four elements, the first `left` of them, then zeros. `Aligned`: they lie on a multiple of 8 bytes; all or none.
template <bool Aligned>
__device__ __forceinline__ uint2 load_four(const bf16* p, int left) {
  if (left <= 0) return {0, 0};
  if constexpr (Aligned) return __ldg(reinterpret_cast<const uint2*>(p));
  const auto one = [&](int i) { return i < left ? static_cast<unsigned>(__ldg(&p[i].bits)) : 0u; };
  return {one(0) | one(1) << 16, one(2) | one(3) << 16};
}

/// c += the products of 16 rows of weights, of which a lane has two, with Tiles * 8 tokens, over k in [begin, end). Of
/// the 16 of a product, a lane has four neighbours, the same for weights and tokens.
template <int Tiles, bool Aligned>
__device__ __forceinline__ void linear_products(float (&c)[Tiles][4], const bf16* low, const bf16* high,
                                                const bf16* const (&x)[Tiles], unsigned begin, unsigned end) {
  constexpr unsigned parts = linear_step / 16;
  for (unsigned k = begin; k < end; k += linear_step) {
    uint2 a[parts], b[parts];
    int left[parts];
#pragma unroll
    for (unsigned i = 0; i < parts; ++i) {
      const unsigned at = k + i * 16 + threadIdx.x % 4 * 4;
      left[i] = static_cast<int>(end) - static_cast<int>(at);
      a[i] = load_four<Aligned>(low + at, left[i]);
      b[i] = load_four<Aligned>(high + at, left[i]);
    }
#pragma unroll
    for (unsigned i = 0; i < parts; ++i)
#pragma unroll
      for (int tile = 0; tile < Tiles; ++tile) {
        const uint2 v = load_four<Aligned>(x[tile] + k + i * 16 + threadIdx.x % 4 * 4, left[i]);
        multiply_add(c[tile], a[i].x, b[i].x, a[i].y, b[i].y, v.x, v.y);
      }
  }
}

/// bf16 weights and bf16 x on any target, at any address. `Pieces` warps share the K of a unit of 16 rows: 1 where it
/// is not cut, or 4.
template <int Pieces, int Tiles, bool Aligned>
__global__ void __launch_bounds__(linear_threads) linear_tensor(const __grid_constant__ LinearArguments<bf16> a) {
  constexpr unsigned block_units = linear_warps / Pieces, values = Tiles * 4;
  __shared__ float shares[Pieces > 1 ? linear_warps * values * 32 : 1];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / block_units;
  const unsigned slot = blockIdx.x / a.groups * block_units + warp % block_units;
  const unsigned first_token = blockIdx.x % a.groups * (Tiles * 8);
  unsigned unit = detail::smaller(slot, a.units - 1);  // a warp too many repeats the last and keeps it to itself
  const LinearSegment& s = a.segment[find_segment(a, unit)];

  const bool glu = s.kind == LinearKind::glu;
  const unsigned row = unit * (glu ? 8 : 16) + lane / 4, last = s.rows - 1;
  const bf16* const weight = static_cast<const bf16*>(s.weight);
  const bf16* const low = weight + static_cast<size>(detail::smaller(row, last)) * a.columns;
  const bf16* const high =
      glu ? static_cast<const bf16*>(s.up) + static_cast<size>(detail::smaller(row, last)) * a.columns
          : weight + static_cast<size>(detail::smaller(row + 8, last)) * a.columns;
  const bf16* x[Tiles];
#pragma unroll
  for (int tile = 0; tile < Tiles; ++tile)
    x[tile] = a.x + static_cast<size>(detail::smaller(first_token + tile * 8 + lane / 4, a.tokens - 1)) * a.x_stride;

  float sum[Tiles][4] = {};
  const unsigned width = LinearSteps(a.columns, a.whole).piece * linear_step;
  linear_products<Tiles, Aligned>(sum, low, high, x, share * width, detail::smaller((share + 1) * width, a.columns));
  const auto finish = [&](unsigned token, float value, float other) {
    if (slot >= a.units || token >= a.tokens) return;
#pragma unroll 1
    for (unsigned half = 0; half < (glu ? 1 : 2) && row + half * 8 < s.rows; ++half)
      linear_finish(s, a.add, token, row + half * 8, half == 0 ? value : other, other);
  };
  const unsigned token = first_token + lane % 4 * 2;
  if constexpr (Pieces == 1) {
#pragma unroll
    for (int i = 0; i < Tiles * 2; ++i) finish(token + i / 2 * 8 + i % 2, sum[i / 2][i % 2], sum[i / 2][2 + i % 2]);
  } else {
    // Sums go through shared memory, so that all warps can finish them.
#pragma unroll
    for (int i = 0; i < Tiles * 4; ++i) shares[(warp * values + i) * 32 + lane] = sum[i / 4][i % 4];
    __syncthreads();
    for (unsigned i = share; i < Tiles * 2; i += Pieces) {
      const auto total = [&](unsigned value) {
        float p = shares[(warp % block_units * values + value) * 32 + lane];
#pragma unroll
        for (unsigned j = 1; j < Pieces; ++j)
          p += shares[((j * block_units + warp % block_units) * values + value) * 32 + lane];
        return p;
      };
      finish(token + i / 2 * 8 + i % 2, total(i / 2 * 4 + i % 2), total(i / 2 * 4 + 2 + i % 2));
    }
  }
}

__device__ __forceinline__ float linear_value(const float* p) { return __ldg(p); }
__device__ __forceinline__ float linear_value(const bf16* p) { return bf16::from_bits(__ldg(&p->bits)); }

/// sum[j] = w . x[j], with w(k) a weight: lane l takes k = l, l + 32, ... by FMA, then a butterfly.
template <unsigned Count, class Weight, class X>
__device__ __forceinline__ void general_dot(float (&sum)[Count], const Weight& w, const X* const (&x)[Count],
                                            unsigned columns) {
#pragma unroll
  for (float& s : sum) s = 0;
#pragma unroll 4
  for (unsigned k = threadIdx.x % 32; k < columns; k += 32) {
    const float weight = w(k);
#pragma unroll
    for (unsigned j = 0; j < Count; ++j) sum[j] = fmaf(weight, linear_value(x[j] + k), sum[j]);
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
  general_dot(
      value, [p = static_cast<const W*>(s.weight) + offset](unsigned k) { return linear_value(p + k); }, x, a.columns);
  if (s.kind == LinearKind::glu)
    general_dot(
        up, [p = static_cast<const W*>(s.up) + offset](unsigned k) { return linear_value(p + k); }, x, a.columns);
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (unsigned j = 0; j < linear_general_tokens; ++j)
    if (first_token + j < a.tokens) linear_finish(s, a.add, first_token + j, row, value[j], up[j]);
}

}  // namespace k3::kernel
