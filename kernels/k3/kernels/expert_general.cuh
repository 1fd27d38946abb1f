// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/expert_gemm.cuh>

// Products with experts without tensor cores: float rows or float weights, in float arithmetic.
namespace k3::kernel {

inline constexpr unsigned expert_general_threads = 256, expert_general_tokens = 4;

/// One row of weights, element by element.
template <class W>
struct GeneralWeights {
  const W* weights;

  __device__ GeneralWeights(const void* matrix, const std::uint8_t*, unsigned row, unsigned columns)
      : weights(static_cast<const W*>(matrix) + static_cast<size>(row) * columns) {}
  __device__ __forceinline__ float operator()(unsigned k) const { return linear_value(weights + k); }
};

/// Stand for MXFP4 as released and packed where a weight's type is named.
struct E2m1;
struct PackedE2m1;

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

template <>
struct GeneralWeights<PackedE2m1> {
  const uint2* words;
  const std::uint8_t* scales;
  unsigned row;

  __device__ GeneralWeights(const void* matrix, const std::uint8_t* scale, unsigned row_of_matrix, unsigned columns)
      : row(row_of_matrix % slab_rows) {
    const size slab = static_cast<size>(row_of_matrix / slab_rows) * (slab_rows * (columns / 32));
    words = static_cast<const uint2*>(matrix) + slab * 2;
    scales = scale + slab;
  }
  __device__ __forceinline__ float operator()(unsigned k) const {
    const unsigned block = k / 32;
    const uint2 two = unpack_codes(__ldg(words + packed_codes_at(row, block) * 2 + k % 32 / 16));
    return e2m1_value(static_cast<std::uint8_t>((k % 16 < 8 ? two.x : two.y) >> k % 8 * 4)) *
           e8m0_value(__ldg(scales + packed_scale_at(row, block)));
  }
};

/// A warp has one row of weights and four rows of x at a time.
template <class X, class W, bool Glu>
__global__ void __launch_bounds__(expert_general_threads)
    expert_general(const __grid_constant__ ExpertGemmArguments<X> a) {
  constexpr unsigned unit = expert_general_threads / 32;
  const unsigned units = (a.rows + unit - 1) / unit, tiles = *a.item_count * units;
  for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const ExpertItem item = a.items[tile / units];
    const unsigned row = tile % units * unit + threadIdx.x / 32;
    if (row >= a.rows) continue;
    const ExpertPointers& e = item.weights;
    for (unsigned token = 0; token < item.count; token += expert_general_tokens) {
      const X* x[expert_general_tokens];
#pragma unroll
      for (unsigned j = 0; j < expert_general_tokens; ++j)
        x[j] = a.template input<Glu>(item, detail::smaller(token + j, item.count - 1));
      float value[expert_general_tokens], up[expert_general_tokens] = {};
      const GeneralWeights<W> first(Glu ? e.w1 : e.w2, Glu ? e.scale1 : e.scale2, row, a.columns);
      general_dot(value, first, x, a.columns);
      if constexpr (Glu) general_dot(up, GeneralWeights<W>(e.w3, e.scale3, row, a.columns), x, a.columns);
      if (threadIdx.x % 32 != 0) continue;
#pragma unroll
      for (unsigned j = 0; j < expert_general_tokens; ++j)
        if (token + j < item.count) a.template store<Glu>(item, token + j, row, value[j], up[j]);
    }
  }
}

}  // namespace k3::kernel
