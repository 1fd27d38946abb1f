// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>
#include <k3/core/execution.hpp>

// What the host's matrix products share: rows of a weight, the plain loops, and the walk over a range of weight rows
// that the vector kernels (linear_avx2.hpp, linear_avx512.hpp) are plugged into.
namespace k3::detail {

/// The vector kernels add column k of a dot product in lane k % 64, in column order, then add the lanes pairwise.
inline constexpr size dot_lanes = 64;

/// One row of an MXFP4 matrix.
struct Mxfp4Row {
  const std::uint8_t* packed;
  const std::uint8_t* scale;
};

template <class T>
const T* weight_row(const View<const T, 2>& weight, size row) {
  return weight.data + row * weight.strides[0];
}
inline Mxfp4Row weight_row(const Mxfp4Matrix<>& weight, size row) {
  return {weight.packed.data + row * weight.packed.strides[0], weight.scale.data + row * weight.scale.strides[0]};
}

struct E8m0Table {
  float value[256];
  constexpr E8m0Table() : value{} {
    for (unsigned byte = 0; byte < 256; ++byte) value[byte] = e8m0_value(static_cast<std::uint8_t>(byte));
  }
};
inline constexpr E8m0Table e8m0_table;

struct E2m1Table {
  float value[16];
  constexpr E2m1Table() : value{} {
    for (unsigned code = 0; code < 16; ++code) value[code] = e2m1_value(static_cast<std::uint8_t>(code));
  }
};
inline constexpr E2m1Table e2m1_table;

/// Columns [first, first + columns) of a row, whole groups, as floats.
inline void expand_plain(const Mxfp4Row& row, size first, size columns, float* to) {
  for (size k = 0; k < columns; k += mxfp4_group) {
    const std::uint8_t* packed = row.packed + (first + k) / 2;
    const float scale = e8m0_table.value[row.scale[(first + k) / mxfp4_group]];
    for (size i = 0; i < mxfp4_group / 2; ++i) {
      to[k + 2 * i] = e2m1_table.value[packed[i] & 15u] * scale;
      to[k + 2 * i + 1] = e2m1_table.value[packed[i] >> 4] * scale;
    }
  }
}

/// Asks for the 64 weights from column k on. That may lie beyond the matrix: a prefetch of any address is harmless.
inline void prefetch_bytes(const void* row, size offset, size count) {
  const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(row) + offset;
  for (size i = 0; i < count; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(from + i));
}
template <class T>
void prefetch_weights(const T* row, size k) {
  prefetch_bytes(row, k * sizeof(T), dot_lanes * sizeof(T));
}
inline void prefetch_weights(const Mxfp4Row& row, size k) { prefetch_bytes(row.packed, k / 2, dot_lanes / 2); }

/// How many columns ahead: 6 KiB keep one core's share of the memory busy where rows are read one after the other.
template <class Row>
inline constexpr size read_ahead = 0;
template <class T>
inline constexpr size read_ahead<const T*> = size{6144} / sizeof(T);
template <>
inline constexpr size read_ahead<Mxfp4Row> = size{6144} * 2;

/// The last, partial group of 64 columns of a row, filled up with zeros.
template <class Row>
struct PaddedTail;
template <class T>
struct PaddedTail<const T*> {
  T values[dot_lanes];
  const T* fill(const T* row, size first, size last) {
    for (size lane = 0; lane < dot_lanes; ++lane) values[lane] = first + lane < last ? row[first + lane] : T{};
    return values;
  }
};
template <>
struct PaddedTail<Mxfp4Row> {
  std::uint8_t packed[dot_lanes / 2];
  std::uint8_t scale[dot_lanes / mxfp4_group];
  Mxfp4Row fill(const Mxfp4Row& row, size first, size last) {
    for (size i = 0; i < dot_lanes / 2; ++i) packed[i] = first + 2 * i < last ? row.packed[first / 2 + i] : 0;
    for (size i = 0; i < dot_lanes / mxfp4_group; ++i)
      scale[i] = first + mxfp4_group * i < last ? row.scale[first / mxfp4_group + i] : 127;
    return {packed, scale};
  }
};

/// Partial sums of a plain dot product, so that a compiler can vectorise it: column k is added to number k % 16.
inline constexpr size plain_lanes = 16;

/// partial += x . row over `columns` columns.
template <class Acc, class X, class W>
void plain_products(const X* x, const W* row, size columns, Acc (&partial)[plain_lanes]) {
  size k = 0;
  for (; k + plain_lanes <= columns; k += plain_lanes)
    for (size lane = 0; lane < plain_lanes; ++lane)
      partial[lane] += static_cast<Acc>(x[k + lane]) * static_cast<Acc>(row[k + lane]);
  for (; k < columns; ++k) partial[k % plain_lanes] += static_cast<Acc>(x[k]) * static_cast<Acc>(row[k]);
}

/// The readable dot product: the partial sums, then those in order.
template <class Acc>
Acc plain_sum(const Acc (&partial)[plain_lanes]) {
  Acc sum{};
  for (const Acc part : partial) sum += part;
  return sum;
}

/// out[:, first..last) by plain dot products.
template <class Acc, class X, class T, class Out>
void linear_rows_plain(const X& x, const View<const T, 2>& weight, const Out& out, size first, size last) {
  for (size n = first; n < last; ++n)
    for (size b = 0; b < x.extents[0]; ++b) {
      Acc partial[plain_lanes] = {};
      plain_products(x.data + b * x.strides[0], weight_row(weight, n), x.extents[1], partial);
      out(b, n) = static_cast<typename Out::value_type>(plain_sum(partial));
    }
}

/// As above; a part of a weight's row is expanded once for all rows of x, up to 16 at a time.
template <class Acc, class X, class Out>
void linear_rows_plain(const X& x, const Mxfp4Matrix<>& weight, const Out& out, size first, size last) {
  constexpr size slab = 16, part = 512;
  float expanded[part];
  for (size n = first; n < last; ++n)
    for (size b = 0; b < x.extents[0]; b += slab) {
      const size count = smaller(slab, x.extents[0] - b);
      Acc partial[slab][plain_lanes] = {};
      for (size k = 0; k < x.extents[1]; k += part) {
        const size columns = smaller(part, x.extents[1] - k);
        expand_plain(weight_row(weight, n), k, columns, expanded);
        for (size j = 0; j < count; ++j)
          plain_products(x.data + (b + j) * x.strides[0] + k, expanded, columns, partial[j]);
      }
      for (size j = 0; j < count; ++j) out(b + j, n) = static_cast<typename Out::value_type>(plain_sum(partial[j]));
    }
}

/// Weight rows that are worked on together: they stay in the L2 cache while the rows of x pass over them.
inline constexpr size tile_rows = 16;

/// lanes[group][r][j] += (row r of the group) . x[j], for several rows of x by chunks of columns: a chunk of x stays in
/// the L1 cache while the tile's rows pass over it. One row of x reads whole rows of the weight, at memory's own pace.
/// A kernel that keeps less than 64 lanes of each row in registers makes several passes over a chunk.
template <class Kernel, size XRows, size WRows, class Row>
void accumulate_tile(const Row* w, const float* const (&x)[XRows], size columns, size groups,
                     float (*lanes)[WRows][XRows][dot_lanes]) {
  constexpr size pass_lanes = Kernel::template registers<XRows> * Kernel::width;
  constexpr size chunk = XRows == 1 ? ~size{0} / 2 : size{4096} / XRows, ahead = XRows == 1 ? read_ahead<Row> : chunk;
  const size whole = columns / dot_lanes * dot_lanes;
  for (size first = 0; first < whole; first += chunk)
    for (size g = 0; g < groups; ++g)
      for (size lane = 0; lane < dot_lanes; lane += pass_lanes)
        Kernel::template accumulate<XRows, WRows, ahead>(w + g * WRows, x, first, smaller(whole, first + chunk), lane,
                                                         lanes[g]);
  if (whole == columns) return;
  PaddedTail<Row> w_tail[WRows];
  PaddedTail<const float*> x_tail[XRows];
  Row w_rows[WRows];
  const float* x_rows[XRows];
  for (size j = 0; j < XRows; ++j) x_rows[j] = x_tail[j].fill(x[j], whole, columns);
  for (size g = 0; g < groups; ++g) {
    for (size r = 0; r < WRows; ++r) w_rows[r] = w_tail[r].fill(w[g * WRows + r], whole, columns);
    for (size lane = 0; lane < dot_lanes; lane += pass_lanes)
      Kernel::template accumulate<XRows, WRows, ahead>(w_rows, x_rows, 0, dot_lanes, lane, lanes[g]);
  }
}

/// out[b.., n..n + count) for up to XRows rows of x from row b on. Missing rows of either side repeat the last one.
template <class Kernel, size XRows, class Weight, class Out>
void linear_tile(const View<const float, 2>& x, const Weight& weight, const Out& out, size b, size n, size count) {
  constexpr size w_rows = Kernel::template rows<XRows>;
  static_assert(tile_rows % w_rows == 0);
  const size x_count = smaller(XRows, x.extents[0] - b), groups = (count + w_rows - 1) / w_rows;
  const float* x_row[XRows];
  for (size j = 0; j < XRows; ++j) x_row[j] = x.data + (b + smaller(j, x_count - 1)) * x.strides[0];
  decltype(weight_row(weight, 0)) w_row[tile_rows] = {};
  for (size r = 0; r < groups * w_rows; ++r) w_row[r] = weight_row(weight, n + smaller(r, count - 1));
  alignas(64) float lanes[tile_rows / w_rows][w_rows][XRows][dot_lanes] = {};
  accumulate_tile<Kernel, XRows, w_rows>(w_row, x_row, x.extents[1], groups, lanes);
  for (size r = 0; r < count; ++r)
    for (size j = 0; j < x_count; ++j)
      out(b + j, n + r) = static_cast<typename Out::value_type>(Kernel::lane_sum(lanes[r / w_rows][r % w_rows][j]));
}

/// out[:, first..last) by a vector kernel, rows of x in blocks of 4: a weight is read from memory once and expanded
/// once per block.
template <class Kernel, class Weight, class Out>
void linear_rows(const View<const float, 2>& x, const Weight& weight, const Out& out, size first, size last) {
  for (size n = first; n < last; n += tile_rows) {
    const size count = smaller(tile_rows, last - n);
    for (size b = 0; b < x.extents[0]; b += 4) {
      const size left = x.extents[0] - b;
      if (left == 1)
        linear_tile<Kernel, 1>(x, weight, out, b, n, count);
      else if (left == 2)
        linear_tile<Kernel, 2>(x, weight, out, b, n, count);
      else
        linear_tile<Kernel, 4>(x, weight, out, b, n, count);
    }
  }
}

/// out[:, first..last) = (x W)[:, first..last), plain: every column adds its weight rows in order.
template <class Acc, class X, class Weight, class Out>
void transposed_columns_plain(const X& x, const Weight& weight, const Out& out, size first, size last) {
  for (size b = 0; b < x.extents[0]; ++b)
    for (size k = first; k < last; ++k) {
      Acc sum{};
      for (size n = 0; n < x.extents[1]; ++n) sum += static_cast<Acc>(x(b, n)) * static_cast<Acc>(weight(n, k));
      out(b, k) = static_cast<typename Out::value_type>(sum);
    }
}

/// As above for `count` <= XRows rows of x from b on and as many columns as Kernel's registers hold, then the rest.
template <class Kernel, size XRows, class Weight, class Out>
void transposed_x_block(const View<const float, 2>& x, const Weight& weight, const Out& out, size b, size first,
                        size last) {
  constexpr size width = Kernel::width, block = Kernel::template axpy_registers<XRows> * width;
  const size count = smaller(XRows, x.extents[0] - b), rows = x.extents[1];
  const float* x_row[XRows];
  for (size j = 0; j < XRows; ++j) x_row[j] = x.data + (b + smaller(j, count - 1)) * x.strides[0];
  alignas(64) float sum[XRows][block];
  for (size k = first; k < last;) {
    const size left = last - k, columns = left >= block ? block : left >= width ? width : left;
    const auto* w = weight.data + k;
    if (columns == block)
      Kernel::template axpy<block / width>(x_row, w, weight.strides[0], rows, sum);
    else if (columns == width)
      Kernel::template axpy<1>(x_row, w, weight.strides[0], rows, sum);
    else
      Kernel::axpy_tail(x_row, w, weight.strides[0], rows, columns, sum);
    for (size j = 0; j < count; ++j)
      for (size i = 0; i < columns; ++i) out(b + j, k + i) = static_cast<typename Out::value_type>(sum[j][i]);
    k += columns;
  }
}

template <class Kernel, class Weight, class Out>
void transposed_columns(const View<const float, 2>& x, const Weight& weight, const Out& out, size first, size last) {
  for (size b = 0; b < x.extents[0]; b += 4) {
    const size left = x.extents[0] - b;
    if (left == 1)
      transposed_x_block<Kernel, 1>(x, weight, out, b, first, last);
    else if (left == 2)
      transposed_x_block<Kernel, 2>(x, weight, out, b, first, last);
    else
      transposed_x_block<Kernel, 4>(x, weight, out, b, first, last);
  }
}

}  // namespace k3::detail
