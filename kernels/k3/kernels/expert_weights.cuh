// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/mxfp4.hpp>
#include <k3/kernels/expert_packing.cuh>
#include <k3/kernels/linear.cuh>

// Rows of weights as operands of the tensor cores.
namespace k3::kernel {

/// As load_streaming, 4 bytes.
__device__ __forceinline__ unsigned load_streaming_word(const void* address) {
  unsigned v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ unsigned multiply_pair(unsigned a, unsigned b) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0 keeps every product
  return d;
}

/// A block's E8M0 scale goes to the weights, exactly, as 2^(s-1) (up to 2^127, the rest in a second product that is
/// almost never needed): bf16 has float's exponents, so infinities and subnormals are what the float product gives.
struct E8m0Pair {
  unsigned first, second;

  /// 2^(s-1) in both halves, for s <= 128.
  static __device__ __forceinline__ unsigned small(unsigned scale) { return scale * 0x00800080u + 0x3f003f00u; }
  /// 2^(s-1) or 2^127, and what is missing: 2^(s-128), NaN for 255.
  static __device__ __forceinline__ E8m0Pair any(unsigned scale) {
    return {small(detail::smaller(scale, 128u)),
            scale == e8m0_nan ? 0x7fc07fc0u : ((detail::larger(scale, 128u) - 1) << 7) * 0x10001u};
  }
};

/// Pairs of codes of rows lane / 4 and lane / 4 + 8 become scaled weights. `Large`: a scale may be above 128.
template <bool Large, int Pairs>
__device__ __forceinline__ void scale_pairs(unsigned (&low)[Pairs], unsigned (&high)[Pairs], const E8m0Pair& low_scale,
                                            const E8m0Pair& high_scale) {
#pragma unroll
  for (int i = 0; i < Pairs; ++i) {
    low[i] = multiply_pair(low[i], low_scale.first), high[i] = multiply_pair(high[i], high_scale.first);
    if constexpr (Large)
      low[i] = multiply_pair(low[i], low_scale.second), high[i] = multiply_pair(high[i], high_scale.second);
  }
}
/// Two packed words of either row as scaled weights in pairs.
template <bool Large>
__device__ __forceinline__ void scaled_packed(unsigned (&low)[8], unsigned (&high)[8], uint2 low_words,
                                              uint2 high_words, const E8m0Pair& low_scale, const E8m0Pair& high_scale) {
  packed_pairs(low, low_words);
  packed_pairs(high, high_words);
  scale_pairs<Large>(low, high, low_scale, high_scale);
}
/// One word of either row as released.
template <bool Large>
__device__ __forceinline__ void scaled_released(unsigned (&low)[4], unsigned (&high)[4], unsigned low_word,
                                                unsigned high_word, const E8m0Pair& low_scale,
                                                const E8m0Pair& high_scale) {
  released_pairs(low, low_word);
  released_pairs(high, high_word);
  scale_pairs<Large>(low, high, low_scale, high_scale);
}

/// A lane's share of one row of MXFP4 codes: every fourth block of 32. Scaling sums instead of weights would need each
/// block to have a product of its own, and a lane's 16 bytes are one block.
template <bool Aligned, bool Packed>
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
    const size first = Packed ? static_cast<size>(row / slab_rows) * slab_rows * blocks + (row % slab_rows) * 4 + own
                              : static_cast<size>(row) * blocks + own;
    codes = static_cast<const std::uint8_t*>(matrix) + first * 16;
    scales = scale + first + (Packed ? 3 * ((row % slab_rows) * 4 + own) : 0);
  }

  __device__ __forceinline__ Piece load(unsigned at, unsigned end) const {
    if (at >= end || at * 4 + own >= blocks) return {{0, 0, 0, 0}, 0};
    const std::uint8_t* const from = codes + static_cast<size>(at) * (Packed ? 512 : 64);
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
    p.scale = __ldg(scales + (Packed ? at / 4 * piece_scale_bytes + at % 4 : at * 4));
    return p;
  }

  template <bool Large, int Tiles>
  static __device__ __forceinline__ void scaled(float (&sum)[Tiles][2][4], const Piece& low, const Piece& high,
                                                const bf16* const (&x)[Tiles], unsigned at, unsigned count) {
    const E8m0Pair low_scale = E8m0Pair::any(low.scale), high_scale = E8m0Pair::any(high.scale);
    const auto add = [&](const unsigned* a, const unsigned* b, unsigned q) {
#pragma unroll
      for (unsigned tile = 0; tile < Tiles; ++tile) {
        if (tile > 0 && tile * 8 >= count) break;
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(x[tile] + (at * 4 + q) * 32));
        multiply_add(sum[tile][0], a[0], b[0], a[1], b[1], v.x, v.y);
        multiply_add(sum[tile][1], a[2], b[2], a[3], b[3], v.z, v.w);
      }
    };
    const unsigned l[4] = {low.codes.x, low.codes.y, low.codes.z, low.codes.w};
    const unsigned h[4] = {high.codes.x, high.codes.y, high.codes.z, high.codes.w};
#pragma unroll
    for (unsigned q = 0; q < 4; q += Packed ? 2 : 1) {
      if constexpr (Packed) {
        unsigned a[8], b[8];
        scaled_packed<Large>(a, b, {l[q], l[q + 1]}, {h[q], h[q + 1]}, low_scale, high_scale);
        add(a, b, q), add(a + 4, b + 4, q + 1);
      } else {
        unsigned a[4], b[4];
        scaled_released<Large>(a, b, l[q], h[q], low_scale, high_scale);
        add(a, b, q);
      }
    }
  }
  template <int Tiles>
  static __device__ __forceinline__ void multiply(float (&sum)[Tiles][2][4], const Piece& low, const Piece& high,
                                                  const bf16* const (&x)[Tiles], unsigned at, unsigned count) {
    if (__any_sync(full_warp, low.scale > 128 || high.scale > 128))
      scaled<true, Tiles>(sum, low, high, x, at, count);
    else
      scaled<false, Tiles>(sum, low, high, x, at, count);
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
  static __device__ __forceinline__ void multiply(float (&sum)[Tiles][2][4], const Piece& low, const Piece& high,
                                                  const bf16* const (&x)[Tiles], unsigned at, unsigned count) {
#pragma unroll
    for (unsigned tile = 0; tile < Tiles; ++tile) {
      if (tile > 0 && tile * 8 >= count) break;
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(x[tile] + at * step));
      multiply_add(sum[tile][0], low.x, high.x, low.y, high.y, v.x, v.y);
      multiply_add(sum[tile][1], low.z, high.z, low.w, high.w, v.z, v.w);
    }
  }
};

}  // namespace k3::kernel
