// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <vector>

#include <k3/ops/linear_avx512.hpp>

// Products of many rows of x with MXFP4 weights: parts of some weight rows are expanded to floats once for all rows of
// x, and both sides lie in the order in which the kernel reads them. Sums are those of the other products, bit by bit:
// column k is added to lane k % 64, in order.
namespace k3::detail {

/// From how many rows of x on this is the faster way.
inline constexpr size many_rows = 6;

/// Rows of x that are worked on together, at most.
inline constexpr size linear_slab = 16;

/// Rows of the next block of x, where `left` are left: 1, 2 or 4, the last of them repeated where there are only 3.
inline size x_block(size left) { return left < 3 ? left : 4; }

/// The rows of x by blocks, in each [lanes / Width][columns / 64][rows of the block][Width], zeros beyond the last
/// column. In memory that the calling thread keeps, at most 16 rows of floats.
template <size Width, class T>
const float* packed_rows(const View<const T, 2>& x) {
  thread_local std::vector<float> memory;
  const size count = x.extents[0], columns = x.extents[1], steps = (columns + dot_lanes - 1) / dot_lanes;
  constexpr size line = 16;  // floats; blocks begin at the start of one
  const size needed = (count + 3) * steps * dot_lanes + line;
  if (memory.size() < needed) memory.resize(needed);
  float* const begin = memory.data() + (line - reinterpret_cast<std::uintptr_t>(memory.data()) / 4 % line) % line;
  for (size first = 0; first < count; first += 4) {
    const size rows = x_block(count - first);
    float* const block = begin + first * steps * dot_lanes;
    for (size j = 0; j < rows; ++j) {
      const T* const row = x.data + smaller(first + j, count - 1) * x.strides[0];
      for (size step = 0; step < steps; ++step) {
        const size left = columns - step * dot_lanes;
        PaddedTail<const T*> tail;
        const T* const from = left < dot_lanes ? tail.fill(row, step * dot_lanes, columns) : row + step * dot_lanes;
        for (size group = 0; group < dot_lanes / Width; ++group)
          for (size i = 0; i < Width; ++i)
            block[((group * steps + step) * rows + j) * Width + i] = static_cast<float>(from[group * Width + i]);
      }
    }
  }
  return begin;
}

/// Sums of one group of weight rows with all blocks of x.
template <class Kernel>
struct ExpandedTile {
  static constexpr size rows = Kernel::expanded_rows, width = Kernel::width, part = 1024;
  alignas(64) float weights[rows * part];
  alignas(64) float lanes[linear_slab / 4][rows][4][dot_lanes];

  /// lanes += w x^T over `columns` columns from `first` on, whole steps of 64.
  void add(const Mxfp4Row (&w)[rows], const float* x, size count, size steps, size first, size columns) {
    Kernel::expand(w, first, columns, weights);
    add_expanded(x, count, steps, first / dot_lanes, columns / dot_lanes);
  }
  /// The last columns, less than 64.
  void add_tail(const Mxfp4Row (&w)[rows], const float* x, size count, size steps, size first, size last) {
    PaddedTail<Mxfp4Row> tails[rows];
    Mxfp4Row padded[rows];
    for (size r = 0; r < rows; ++r) padded[r] = tails[r].fill(w[r], first, last);
    Kernel::expand(padded, 0, dot_lanes, weights);
    add_expanded(x, count, steps, first / dot_lanes, 1);
  }

 private:
  void add_expanded(const float* x, size count, size steps, size step, size part_steps) {
    for (size group = 0; group < dot_lanes / width; ++group) {
      const float* const w = weights + group * part_steps * rows * width;
      for (size b = 0; b < count; b += 4) {
        const size block = x_block(count - b);
        const float* const from = x + b * steps * dot_lanes + (group * steps + step) * block * width;
        float(*const to)[4][dot_lanes] = lanes[b / 4];
        if (block == 1)
          Kernel::template multiply_expanded<1, rows>(w, from, part_steps, to, group * width);
        else if (block == 2)
          Kernel::template multiply_expanded<2, rows>(w, from, part_steps, to, group * width);
        else
          Kernel::template multiply_expanded<4, rows>(w, from, part_steps, to, group * width);
      }
    }
  }
};

/// out[:, first..last) for up to 16 rows of x, packed, of `columns` columns.
template <class Kernel, class Out>
void linear_expanded(const float* x, size count, size columns, const Mxfp4Matrix<>& weight, const Out& out, size first,
                     size last) {
  using Tile = ExpandedTile<Kernel>;
  Tile tile;
  const size steps = (columns + dot_lanes - 1) / dot_lanes, whole = columns / dot_lanes * dot_lanes;
  for (size n = first; n < last; n += Tile::rows) {
    const size row_count = smaller(Tile::rows, last - n);
    Mxfp4Row w[Tile::rows];
    for (size r = 0; r < Tile::rows; ++r) w[r] = weight_row(weight, n + smaller(r, row_count - 1));
    std::memset(tile.lanes, 0, sizeof tile.lanes[0] * ((count + 3) / 4));
    for (size k = 0; k < whole; k += Tile::part) tile.add(w, x, count, steps, k, smaller(Tile::part, whole - k));
    if (whole < columns) tile.add_tail(w, x, count, steps, whole, columns);
    for (size b = 0; b < count; ++b)
      for (size r = 0; r < row_count; ++r)
        out(b, n + r) = static_cast<typename Out::value_type>(Kernel::lane_sum(tile.lanes[b / 4][r][b % 4]));
  }
}

/// out = x W^T for up to 16 rows of x; `bytes` are the memory traffic.
template <class Kernel, class T, class Out>
void linear_expanded(const host& exec, const View<const T, 2>& x, const Mxfp4Matrix<>& weight, const Out& out,
                     size bytes) {
  const size count = x.extents[0], columns = x.extents[1];
  const float* const packed = packed_rows<Kernel::width>(x);
  parallel_chunks(exec, out.extents[1], 4 * Kernel::expanded_rows, bytes, [&](size first, size last) {
    linear_expanded<Kernel>(packed, count, columns, weight, out, first, last);
  });
}

}  // namespace k3::detail
