// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/mxfp4.hpp>
#include <k3/kernels/expert_worklist.cuh>
#include <k3/kernels/linear.cuh>

// Products of the chosen experts' matrices with the rows that chose them. A tile is an item of the work list and 16
// rows of weights (8 of w1 and the same 8 of w3, or 16 of w2) on the M side of the tensor cores, the item's rows on the
// N side, 8 at a time. The four warps of a block each take a quarter of K, in order of k, and result = (q0 + q1) + (q2
// + q3): whatever else is in the item. Blocks stay and take tiles in turn, so that the grid does not depend on how many
// there are.
namespace k3::kernel {

inline constexpr unsigned expert_threads = 128, expert_warps = expert_threads / 32;
inline constexpr unsigned expert_depth = 4;  ///< steps of weights that a warp has in flight
inline constexpr unsigned expert_general_threads = 256, expert_general_tokens = 4;

template <class X>
struct ExpertGemmArguments {
  const ExpertPointers* table = nullptr;
  const ExpertItem* items = nullptr;
  const unsigned* item_count = nullptr;
  const unsigned* order = nullptr;
  const X* x = nullptr;  ///< gate and up: of a row; down: of a place in the order
  size x_stride = 0;
  X* out = nullptr;  ///< gate and up: of a place in the order; down: of a choice
  size out_stride = 0;
  unsigned rows = 0, columns = 0;  ///< of a matrix
  unsigned padded_rows = 0;        ///< gate and up: elements of out that are read, those beyond `rows` as 0
  unsigned k = 0;
  RowOrder out_order = RowOrder::natural;
  LinearGlu glu{};

  template <bool Glu>
  __device__ __forceinline__ const X* input(const ExpertItem& item, unsigned token) const {
    const unsigned place = item.first + token;
    return x + static_cast<size>(Glu ? order[place] / k : place) * x_stride;
  }
  /// Stores what one row of weights (gate and up: of each matrix) gave for a token.
  template <bool Glu>
  __device__ __forceinline__ void store(const ExpertItem& item, unsigned token, unsigned row, float value,
                                        float up) const {
    const unsigned place = item.first + token;
    if constexpr (Glu) {
      X* const to = out + static_cast<size>(place) * out_stride;
      to[row_place(out_order, row)] = X(glu(float(X(value)), float(X(up))));
      if (row + 1 == rows)  // what the next product reads beyond the row, and multiplies by 0
        for (unsigned k = rows; k < padded_rows; ++k) to[row_place(out_order, k)] = X(0.0f);
    } else {
      out[static_cast<size>(order[place]) * out_stride + row] = X(value);
    }
  }
};

__device__ __forceinline__ unsigned multiply_pair(unsigned a, unsigned b) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0 keeps every product
  return d;
}

/// Codes I and I + 4 of a word as two bf16 of 2^-126 times their value: sign to bit 15, exponent and mantissa to bits 8
/// to 6, where E2M1's subnormal 0.5 is a bf16 subnormal.
template <int I>
__device__ __forceinline__ unsigned e2m1_pair(unsigned word) {
  const unsigned sign = word << (12 - 4 * I);
  const unsigned magnitude = I < 2 ? word << (I < 2 ? 6 - 4 * I : 0) : word >> (I < 2 ? 0 : 4 * I - 6);
  return (sign & 0x80008000u) | (magnitude & 0x01c001c0u);
}

/// A lane's share of one row of MXFP4 codes: every fourth block of 32. The scale goes to the weights, exactly, as
/// 2^(s-1) (up to 2^127, the rest in a second product that is almost never needed): bf16 has float's exponents, so
/// infinities and subnormals are what the float product gives. Scaling sums instead would need each block to have a
/// product of its own, and a lane's 16 bytes are one block.
template <bool Aligned>
struct Mxfp4Weights {
  static constexpr unsigned step = 128;
  struct Piece {
    uint4 codes;
    unsigned scale;
  };

  const std::uint8_t* codes;
  const std::uint8_t* scales;
  unsigned blocks, own;

  __device__ __forceinline__ Mxfp4Weights(const void* matrix, const std::uint8_t* scale, unsigned row, unsigned columns,
                                          unsigned lane)
      : blocks(columns / 32), own(lane % 4) {
    codes = static_cast<const std::uint8_t*>(matrix) + (static_cast<size>(row) * blocks + own) * 16;
    scales = scale + static_cast<size>(row) * blocks + own;
  }

  __device__ __forceinline__ Piece load(unsigned at, unsigned end) const {
    if (at >= end || at * 4 + own >= blocks) return {{0, 0, 0, 0}, 0};
    const std::uint8_t* const from = codes + static_cast<size>(at) * 64;
    Piece p;
    if constexpr (Aligned) {
      p.codes = load_streaming(from);
    } else {
      const auto word = [&](unsigned i) {
        return __ldg(from + i) | static_cast<unsigned>(__ldg(from + i + 1)) << 8 |
               static_cast<unsigned>(__ldg(from + i + 2)) << 16 | static_cast<unsigned>(__ldg(from + i + 3)) << 24;
      };
      p.codes = {word(0), word(4), word(8), word(12)};
    }
    p.scale = __ldg(scales + at * 4);
    return p;
  }

  /// 2^(s-1) and, for s > 128, 2^127 and 2^(s-128), in both halves.
  static __device__ __forceinline__ unsigned multiplier(unsigned scale) {
    return ((detail::smaller(scale, 128u) + 126) << 7) * 0x10001u;
  }
  static __device__ __forceinline__ unsigned second_multiplier(unsigned scale) {
    return scale == e8m0_nan ? 0x7fc07fc0u : ((detail::larger(scale, 128u) - 1) << 7) * 0x10001u;
  }

  template <int Tiles>
  static __device__ __forceinline__ void multiply(float (&sum)[Tiles][4], const Piece& low, const Piece& high,
                                                  const bf16* const (&x)[Tiles], unsigned at, unsigned count) {
    const unsigned scale_low = multiplier(low.scale), scale_high = multiplier(high.scale);
    const bool large = __any_sync(full_warp, low.scale > 128 || high.scale > 128);
    const auto word = [&](unsigned low_word, unsigned high_word, unsigned q) {
      unsigned a[4] = {e2m1_pair<0>(low_word), e2m1_pair<1>(low_word), e2m1_pair<2>(low_word), e2m1_pair<3>(low_word)};
      unsigned b[4] = {e2m1_pair<0>(high_word), e2m1_pair<1>(high_word), e2m1_pair<2>(high_word),
                       e2m1_pair<3>(high_word)};
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = multiply_pair(a[i], scale_low), b[i] = multiply_pair(b[i], scale_high);
      if (large)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[i] = multiply_pair(a[i], second_multiplier(low.scale)),
          b[i] = multiply_pair(b[i], second_multiplier(high.scale));
#pragma unroll
      for (unsigned tile = 0; tile < Tiles; ++tile) {
        if (tile > 0 && tile * 8 >= count) break;
        const uint4 v =
            x[tile] ? __ldg(reinterpret_cast<const uint4*>(x[tile] + (at * 4 + q) * 32)) : uint4{0, 0, 0, 0};
        multiply_add(sum[tile], a[0], b[0], a[1], b[1], v.x, v.y);
        multiply_add(sum[tile], a[2], b[2], a[3], b[3], v.z, v.w);
      }
    };
    word(low.codes.x, high.codes.x, 0);
    word(low.codes.y, high.codes.y, 1);
    word(low.codes.z, high.codes.z, 2);
    word(low.codes.w, high.codes.w, 3);
  }
};

/// A lane's share of one row of bf16 weights: eight of every 32 columns.
template <bool Aligned>
struct Bf16Weights {
  static constexpr unsigned step = 32;
  using Piece = uint4;

  const bf16* weights;
  unsigned columns, own;

  __device__ __forceinline__ Bf16Weights(const void* matrix, const std::uint8_t*, unsigned row, unsigned columns_of_row,
                                         unsigned lane)
      : weights(static_cast<const bf16*>(matrix) + static_cast<size>(row) * columns_of_row),
        columns(columns_of_row),
        own(lane % 4 * 8) {}

  __device__ __forceinline__ Piece load(unsigned at, unsigned end) const {
    const unsigned k = at * step + own;
    if (at >= end || k >= columns) return {0, 0, 0, 0};
    if constexpr (Aligned) {
      return load_streaming(weights + k);
    } else {
      const auto one = [&](unsigned i) {
        return k + i < columns ? static_cast<unsigned>(__ldg(&weights[k + i].bits)) : 0u;
      };
      return {one(0) | one(1) << 16, one(2) | one(3) << 16, one(4) | one(5) << 16, one(6) | one(7) << 16};
    }
  }

  template <int Tiles>
  static __device__ __forceinline__ void multiply(float (&sum)[Tiles][4], const Piece& low, const Piece& high,
                                                  const bf16* const (&x)[Tiles], unsigned at, unsigned count) {
#pragma unroll
    for (unsigned tile = 0; tile < Tiles; ++tile) {
      if (tile > 0 && tile * 8 >= count) break;
      const uint4 v = x[tile] ? __ldg(reinterpret_cast<const uint4*>(x[tile] + at * step)) : uint4{0, 0, 0, 0};
      multiply_add(sum[tile], low.x, high.x, low.y, high.y, v.x, v.y);
      multiply_add(sum[tile], low.z, high.z, low.w, high.w, v.z, v.w);
    }
  }
};

/// One tile with up to Tiles * 8 rows of x.
template <class Weights, bool Glu, int Tiles>
__device__ __forceinline__ void expert_tile(const ExpertGemmArguments<bf16>& a, const ExpertItem& item,
                                            unsigned first_row, float* shares) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, last = a.rows - 1, row = first_row + lane / 4;
  const ExpertPointers& e = a.table[item.expert];
  const Weights low(Glu ? e.w1 : e.w2, Glu ? e.scale1 : e.scale2, detail::smaller(row, last), a.columns, lane);
  const Weights high(Glu ? e.w3 : e.w2, Glu ? e.scale3 : e.scale2, detail::smaller(Glu ? row : row + 8, last),
                     a.columns, lane);
  const unsigned steps = (a.columns + Weights::step - 1) / Weights::step,
                 share = (steps + expert_warps - 1) / expert_warps;
  const unsigned begin = warp * share, end = detail::smaller(begin + share, steps);
  typename Weights::Piece l[expert_depth], h[expert_depth];
#pragma unroll
  for (unsigned d = 0; d < expert_depth; ++d) l[d] = low.load(begin + d, end), h[d] = high.load(begin + d, end);
  const bf16* x[Tiles];
#pragma unroll
  for (unsigned tile = 0; tile < Tiles; ++tile) {
    const unsigned token = tile * 8 + lane / 4;
    x[tile] = token < item.count ? a.template input<Glu>(item, token) + lane % 4 * 8 : nullptr;
  }
  float sum[Tiles][4] = {};
  for (unsigned from = begin; from < end; from += expert_depth) {
#pragma unroll
    for (unsigned d = 0; d < expert_depth; ++d) {
      if (from + d >= end) break;
      Weights::template multiply<Tiles>(sum, l[d], h[d], x, from + d, item.count);
      l[d] = low.load(from + d + expert_depth, end);
      h[d] = high.load(from + d + expert_depth, end);
    }
  }
#pragma unroll
  for (int i = 0; i < Tiles * 4; ++i) shares[(warp * Tiles * 4 + i) * 32 + lane] = sum[i / 4][i % 4];
  __syncthreads();
  for (unsigned i = warp; i < Tiles * 2; i += expert_warps) {
    const unsigned token = i / 2 * 8 + lane % 4 * 2 + i % 2;
    const auto total = [&](unsigned value) {
      const float* const s = shares + value * 32 + lane;
      constexpr unsigned next = Tiles * 4 * 32;
      return (s[0] + s[next]) + (s[2 * next] + s[3 * next]);
    };
    if (token >= item.count || row >= a.rows) continue;
    const float value = total(i / 2 * 4 + i % 2), other = total(i / 2 * 4 + 2 + i % 2);
    a.template store<Glu>(item, token, row, value, other);
    if (!Glu && row + 8 < a.rows) a.template store<Glu>(item, token, row + 8, other, 0);
  }
  __syncthreads();  // the next tile writes the shares again
}

/// bf16 rows, MXFP4 or bf16 weights.
template <class Weights, bool Glu>
__global__ void __launch_bounds__(expert_threads, 4)
    expert_tensor(const __grid_constant__ ExpertGemmArguments<bf16> a) {
  constexpr unsigned unit = Glu ? 8 : 16;
  constexpr int most_tiles = item_choices / 8;
  __shared__ float shares[expert_warps * most_tiles * 4 * 32];
  const unsigned units = (a.rows + unit - 1) / unit, tiles = *a.item_count * units;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const ExpertItem item = a.items[tile / units];
    const unsigned first_row = tile % units * unit;
    if (item.count <= 8)
      expert_tile<Weights, Glu, 1>(a, item, first_row, shares);
    else
      expert_tile<Weights, Glu, most_tiles>(a, item, first_row, shares);
  }
}

/// One row of weights for the kernel without tensor cores, element by element.
template <class W>
struct GeneralWeights {
  const W* weights;

  __device__ GeneralWeights(const void* matrix, const std::uint8_t*, unsigned row, unsigned columns)
      : weights(static_cast<const W*>(matrix) + static_cast<size>(row) * columns) {}
  __device__ __forceinline__ float operator()(unsigned k) const { return linear_value(weights + k); }
};

struct E2m1;  ///< stands for MXFP4 where a weight's type is named

template <>
struct GeneralWeights<E2m1> {
  const std::uint8_t* codes;
  const std::uint8_t* scales;

  __device__ GeneralWeights(const void* matrix, const std::uint8_t* scale, unsigned row, unsigned columns)
      : codes(static_cast<const std::uint8_t*>(matrix) + static_cast<size>(row) * (columns / 2)),
        scales(scale + static_cast<size>(row) * (columns / 32)) {}
  __device__ __forceinline__ float operator()(unsigned k) const {
    const unsigned byte = __ldg(codes + k / 2);
    return e2m1_value(static_cast<std::uint8_t>(k % 2 != 0 ? byte >> 4 : byte)) * e8m0_value(__ldg(scales + k / 32));
  }
};

/// sum[j] = w . x[j] by FMA: lane l takes k = l, l + 32, ..., then a butterfly.
template <class Weights, class X>
__device__ __forceinline__ void expert_dot(float (&sum)[expert_general_tokens], const Weights& w,
                                           const X* const (&x)[expert_general_tokens], unsigned columns) {
#pragma unroll
  for (float& s : sum) s = 0;
#pragma unroll 4
  for (unsigned k = threadIdx.x % 32; k < columns; k += 32) {
    const float weight = w(k);
#pragma unroll
    for (unsigned j = 0; j < expert_general_tokens; ++j) sum[j] = fmaf(weight, linear_value(x[j] + k), sum[j]);
  }
#pragma unroll
  for (float& s : sum) s = warp_sum(s);
}

/// Float rows or float weights, in float arithmetic: a warp has one row of weights and four rows of x at a time.
template <class X, class W, bool Glu>
__global__ void __launch_bounds__(expert_general_threads)
    expert_general(const __grid_constant__ ExpertGemmArguments<X> a) {
  constexpr unsigned unit = expert_general_threads / 32;
  const unsigned units = (a.rows + unit - 1) / unit, tiles = *a.item_count * units;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const ExpertItem item = a.items[tile / units];
    const unsigned row = tile % units * unit + threadIdx.x / 32;
    if (row >= a.rows) continue;
    const ExpertPointers& e = a.table[item.expert];
    for (unsigned token = 0; token < item.count; token += expert_general_tokens) {
      const X* x[expert_general_tokens];
#pragma unroll
      for (unsigned j = 0; j < expert_general_tokens; ++j)
        x[j] = a.template input<Glu>(item, detail::smaller(token + j, item.count - 1));
      float value[expert_general_tokens], up[expert_general_tokens] = {};
      const GeneralWeights<W> first(Glu ? e.w1 : e.w2, Glu ? e.scale1 : e.scale2, row, a.columns);
      expert_dot(value, first, x, a.columns);
      if constexpr (Glu) expert_dot(up, GeneralWeights<W>(e.w3, e.scale3, row, a.columns), x, a.columns);
      if (threadIdx.x % 32 != 0) continue;
#pragma unroll
      for (unsigned j = 0; j < expert_general_tokens; ++j)
        if (token + j < item.count) a.template store<Glu>(item, token + j, row, value[j], up[j]);
    }
  }
}

}  // namespace k3::kernel
