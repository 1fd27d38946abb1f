// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/expert_weights.cuh>

// Products of the chosen experts' matrices with the rows that chose them, for weights of any layout on any tensor
// cores. A tile is an item of the work list and 16 rows of weights (8 of w1 and the same 8 of w3, or 16 of w2) on the M
// side, the item's rows on the N side, 8 at a time. A warp does a tile. The order of a row's sum is that of
// expert_stream.cuh, whatever else is in the item: products of 16 columns go to two sums in turn, from zero, in order
// of K, and the two are added in the end.
namespace k3::kernel {

inline constexpr unsigned expert_threads = 128, expert_warps = expert_threads / 32;
inline constexpr unsigned expert_depth = 4;  ///< steps of weights that a warp has in flight

template <class X>
struct ExpertGemmArguments {
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
  __device__ __forceinline__ X activated(float gate, float up) const {
    if constexpr (sizeof(X) == 2)
      return X(glu.rounded_soon(gate, up));
    else
      return glu(gate, up);
  }
  /// Stores what one row of weights (gate and up: of each matrix) gave for a token.
  template <bool Glu>
  __device__ __forceinline__ void store(const ExpertItem& item, unsigned token, unsigned row, float value,
                                        float up) const {
    const unsigned place = item.first + token;
    if constexpr (Glu) {
      X* const to = out + static_cast<size>(place) * out_stride;
      to[row_place(out_order, row)] = activated(float(X(value)), float(X(up)));
      if (row + 1 == rows)  // what the next product reads beyond the row, and multiplies by 0
        for (unsigned k = rows; k < padded_rows; ++k) to[row_place(out_order, k)] = X(0.0f);
    } else {
      out[static_cast<size>(order[place]) * out_stride + row] = X(value);
    }
  }
};

/// One tile with up to Tiles * 8 rows of x.
template <class Weights, bool Glu, int Tiles>
__device__ __forceinline__ void expert_tile(const ExpertGemmArguments<bf16>& a, const ExpertItem& item,
                                            unsigned first_row) {
  const unsigned lane = threadIdx.x % 32, last = a.rows - 1, row = first_row + lane / 4;
  const ExpertPointers& e = item.weights;
  const Weights low(Glu ? e.w1 : e.w2, Glu ? e.scale1 : e.scale2, detail::smaller(row, last), a.columns, lane);
  const Weights high(Glu ? e.w3 : e.w2, Glu ? e.scale3 : e.scale2, detail::smaller(Glu ? row : row + 8, last),
                     a.columns, lane);
  const unsigned end = (a.columns + Weights::step - 1) / Weights::step;
  typename Weights::Piece l[expert_depth], h[expert_depth];
#pragma unroll
  for (unsigned d = 0; d < expert_depth; ++d) l[d] = low.load(d, end), h[d] = high.load(d, end);
  const bf16* x[Tiles];
#pragma unroll
  for (unsigned tile = 0; tile < Tiles; ++tile)  // columns beyond the item's rows repeat its last and are not stored
    x[tile] = a.template input<Glu>(item, detail::smaller(tile * 8 + lane / 4, item.count - 1)) + lane % 4 * 8;
  float sum[Tiles][2][4] = {};
  for (unsigned from = 0; from < end; from += expert_depth) {
#pragma unroll
    for (unsigned d = 0; d < expert_depth; ++d) {
      if (from + d >= end) break;
      Weights::template multiply<Tiles>(sum, l[d], h[d], x, from + d, item.count);
      l[d] = low.load(from + d + expert_depth, end);
      h[d] = high.load(from + d + expert_depth, end);
    }
  }
#pragma unroll
  for (int i = 0; i < Tiles * 2; ++i) {
    const unsigned token = i / 2 * 8 + lane % 4 * 2 + i % 2;
    if (token >= item.count || row >= a.rows) continue;
    const float(&both)[2][4] = sum[i / 2];
    const float value = both[0][i % 2] + both[1][i % 2], other = both[0][2 + i % 2] + both[1][2 + i % 2];
    a.template store<Glu>(item, token, row, value, other);
    if (!Glu && row + 8 < a.rows) a.template store<Glu>(item, token, row + 8, other, 0);
  }
}

/// bf16 rows, MXFP4 or bf16 weights. Blocks stay and take tiles in turn, so that the grid does not depend on how many
/// there are.
template <class Weights, bool Glu>
__global__ void __launch_bounds__(expert_threads, 3)
    expert_tensor(const __grid_constant__ ExpertGemmArguments<bf16> a) {
  constexpr unsigned unit = Glu ? 8 : 16;
  constexpr int most_tiles = item_choices / 8;
  const unsigned units = (a.rows + unit - 1) / unit, tiles = *a.item_count * units;
  for (unsigned tile = blockIdx.x * expert_warps + threadIdx.x / 32; tile < tiles; tile += gridDim.x * expert_warps) {
    const ExpertItem item = a.items[tile / units];
    const unsigned first_row = tile % units * unit;
    if (item.count <= 8)
      expert_tile<Weights, Glu, 1>(a, item, first_row);
    else
      expert_tile<Weights, Glu, most_tiles>(a, item, first_row);
  }
}

}  // namespace k3::kernel
