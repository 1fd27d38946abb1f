// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/overlap.hpp>
#include <k3/ops/linear_expanded.hpp>
#include <k3/ops/linear_packed_row.hpp>

namespace k3 {
namespace detail {

template <class W>
inline constexpr bool is_linear_weight = std::is_same_v<W, Mxfp4Matrix<>> || std::is_same_v<W, AnyMatrix<>>;
template <class T>
inline constexpr bool is_linear_weight<View<T, 2>> = is_real<std::remove_const_t<T>>;

template <class W>
void require_weight_shape(const char* operation, const W& weight, size rows, size columns) {
  if constexpr (std::is_same_v<W, AnyMatrix<>>)
    require_shape(operation, "weight", weight, {rows, columns});
  else
    require_shape(operation, "weight", weight, rows, columns);
}

/// The same matrix, read-only.
template <class T>
View<const T, 2> read_only(const View<T, 2>& matrix) {
  return matrix;
}
template <class T>
View<const T, 2> read_only(const View<const T, 2>& matrix) {
  return matrix;
}

/// f(View<const T, 2>) or f(Mxfp4Matrix).
template <class T, class F>
void with_weight(const View<T, 2>& weight, F&& f) {
  f(read_only(weight));
}
template <class F>
void with_weight(const Mxfp4Matrix<>& weight, F&& f) {
  f(weight);
}
template <class F>
void with_weight(const AnyMatrix<>& weight, F&& f) {
  visit_matrix(weight, f);
}
template <class F>
void with_dense_weight(const AnyMatrix<>& weight, F&& f) {
  visit(weight, f);
}
template <class T, class F>
void with_dense_weight(const View<T, 2>& weight, F&& f) {
  f(read_only(weight));
}

template <class Weight>
inline constexpr bool is_double_weight = std::is_same_v<Weight, View<const double, 2>>;

/// Float, unless the elements of x or of the weight are double.
template <class T, class Weight>
using product_t = std::conditional_t<std::is_same_v<T, double> || is_double_weight<Weight>, double, float>;

inline size weight_bytes(const Mxfp4Matrix<>& weight) { return weight.rows() * weight.columns() / 32 * 17; }
template <class T>
size weight_bytes(const View<const T, 2>& weight) {
  return weight.elements() * sizeof(T);
}

/// The version to run: what was asked for, if this processor has it.
inline Isa usable_isa(const host& exec) { return exec.isa > best_isa() ? best_isa() : exec.isa; }

/// The rows of x as floats: themselves, or converted into memory that the calling thread keeps.
inline View<const float, 2> float_rows(const View<const float, 2>& x) { return x; }
inline View<const float, 2> float_rows(const View<const bf16, 2>& x) {
  thread_local std::vector<float> memory;
  const size count = x.extents[0], columns = x.extents[1];
  if (memory.size() < count * columns) memory.resize(count * columns);
  for (size j = 0; j < count; ++j) {
    const bf16* from = x.data + j * x.strides[0];
    float* to = memory.data() + j * columns;
    for (size k = 0; k < columns; ++k) to[k] = from[k];
  }
  return view(static_cast<const float*>(memory.data()), count, columns);
}

template <class Weight, class Out>
void linear_rows(Isa isa, const View<const float, 2>& x, const Weight& weight, const Out& out, size first, size last) {
#if K3_X86_64
  if (isa == Isa::avx512) return linear_rows<Avx512>(x, weight, out, first, last);
  if (isa == Isa::avx2) return linear_rows<Avx2>(x, weight, out, first, last);
#endif
  static_cast<void>(isa);
  linear_rows_plain<float>(x, weight, out, first, last);
}

/// Products with an MXFP4 weight that have a kernel of their own, for many rows of x and for one; false where there is
/// none.
template <class T, class Weight, class Out>
bool linear_mxfp4([[maybe_unused]] const host& exec, [[maybe_unused]] const View<const T, 2>& x,
                  [[maybe_unused]] const Weight& weight, [[maybe_unused]] const Out& out,
                  [[maybe_unused]] size traffic) {
#if K3_X86_64
  if constexpr (std::is_same_v<Weight, Mxfp4Matrix<>>) {
    const Isa isa = usable_isa(exec);
    const bool many = x.extents[0] >= many_rows, one = x.extents[0] == 1 && isa == Isa::avx2;
    if (isa == Isa::plain || !(many || one)) return false;
    if (one)
      linear_packed_row(exec, x, weight, out, traffic);
    else if (isa == Isa::avx512)
      linear_expanded<Avx512>(exec, x, weight, out, traffic);
    else
      linear_expanded<Avx2>(exec, x, weight, out, traffic);
    return true;
  }
#endif
  return false;
}

/// body(x, out) for slabs of 16 rows: enough to hide the reading of the weights behind the arithmetic, few enough for x
/// to stay in the L2 cache.
template <class T, class Out, class Body>
void for_each_slab(const View<const T, 2>& x, const Out& out, Body&& body) {
  for (size b = 0; b < x.extents[0]; b += linear_slab) {
    const size count = smaller(linear_slab, x.extents[0] - b);
    body(x.slice(0, b, count), out.slice(0, b, count));
  }
}

template <class T, class Weight, class Out>
void linear_typed(const host& exec, const View<const T, 2>& x, const Weight& weight, const Out& out) {
  const size bytes = weight_bytes(weight);
  if constexpr (std::is_same_v<product_t<T, Weight>, double>) {
    parallel_chunks(exec, out.extents[1], 16, bytes * x.extents[0],
                    [&](size first, size last) { linear_rows_plain<double>(x, weight, out, first, last); });
  } else {
    for_each_slab(x, out, [&](const View<const T, 2>& x_slab, const Out& out_slab) {
      const size traffic = bytes * ((x_slab.extents[0] + 3) / 4);
      if (linear_mxfp4(exec, x_slab, weight, out_slab, traffic)) return;
      const View<const float, 2> floats = float_rows(x_slab);
      parallel_chunks(exec, out.extents[1], tile_rows, traffic, [&](size first, size last) {
        linear_rows(usable_isa(exec), floats, weight, out_slab, first, last);
      });
    });
  }
}

template <class Weight, class Out>
void transposed_columns(Isa isa, const View<const float, 2>& x, const Weight& weight, const Out& out, size first,
                        size last) {
#if K3_X86_64
  if (isa == Isa::avx512) return transposed_columns<Avx512>(x, weight, out, first, last);
  if (isa == Isa::avx2) return transposed_columns<Avx2>(x, weight, out, first, last);
#endif
  static_cast<void>(isa);
  transposed_columns_plain<float>(x, weight, out, first, last);
}

template <class T, class Weight, class Out>
void transposed_typed(const host& exec, const View<const T, 2>& x, const Weight& weight, const Out& out) {
  const size bytes = weight_bytes(weight);
  if constexpr (std::is_same_v<product_t<T, Weight>, double>) {
    parallel_chunks(exec, out.extents[1], 64, bytes * x.extents[0],
                    [&](size first, size last) { transposed_columns_plain<double>(x, weight, out, first, last); });
  } else {
    for_each_slab(x, out, [&](const View<const T, 2>& x_slab, const Out& out_slab) {
      const View<const float, 2> floats = float_rows(x_slab);
      parallel_chunks(exec, out.extents[1], 256, bytes * ((x_slab.extents[0] + 3) / 4), [&](size first, size last) {
        transposed_columns(usable_isa(exec), floats, weight, out_slab, first, last);
      });
    });
  }
}

}  // namespace detail

/// A weight matrix of a linear layer: a view of float, double or bf16, an Mxfp4Matrix, or an AnyMatrix.
template <class W>
concept linear_weight = detail::is_linear_weight<W>;
/// As above, for the transposed product: not an Mxfp4Matrix.
template <class W>
concept dense_linear_weight = linear_weight<W> && !std::same_as<W, Mxfp4Matrix<>>;

/// out = x W^T, the product of every linear layer.
/// Shapes: x [B, K], weight [N, K], out [B, N]; rows of x and out may lie apart. B, N or K may be 0.
/// Adds in float, or in double where x or the weight is double; out is rounded once. An MXFP4 weight counts as
/// e2m1 * scale rounded to float: bit for bit the product with the dequantised matrix. A row of out does not depend on
/// B, on the other rows or on threads; avx2 and avx512 give the same bits: 64 sums (column mod 64) by FMA, then a tree.
/// Throws invalid_argument on shapes that do not fit, an MXFP4 width that is no multiple of 32, out sharing memory.
/// Accuracy in float, K <= 33792: |error| <= 5e-7 sum |x w| (measured 1.8e-7) and, with random signs, <= 1.5e-6 of the
/// largest result (measured 4.1e-7); Isa::plain 3 times that.
/// Cost: 2 B N K FLOPs; reads the weight once per 16 rows of x and expands MXFP4 once for 6 to 16, else once per 4 (for
/// one row with AVX2 it looks codes up in a table of 8 KB, and the thread keeps a copy of the row). One row of BF16
/// weights runs at the speed of memory, of MXFP4 at up to half of it.
template <host_tensor<2> X, linear_weight Weight, writable_host_tensor<2> Out>
  requires(real<typename X::value_type> && real<typename Out::value_type>)
void linear(const host& exec, const X& x, const Weight& weight, const Out& out) {
  const size batch = x.extents[0], columns = x.extents[1], rows = out.extents[1];
  detail::require_shape("linear", "x", x, batch, columns);
  detail::require_shape("linear", "out", out, batch, rows);
  detail::require_weight_shape("linear", weight, rows, columns);
  detail::require_disjoint("linear", "out", out, "x", x);
  detail::with_weight(weight, [&](const auto& typed) {
    detail::require_disjoint("linear", "out", out, "weight", typed);
    if (rows > 0) detail::linear_typed(exec, detail::read_only(x), typed, out);
  });
}

/// out = x W, the product with a transposed weight (MLA's absorbed key and value maps).
/// Shapes: x [B, N], weight [N, K], out [B, K]; rows of all three may lie apart. B, N or K may be 0.
/// Adds rows of the weight in order, with FMA, in float (double where x or the weight is double); out is rounded once.
/// A row of out does not depend on B, on the other rows or on threads; avx2 and avx512 give the same bits.
/// Throws invalid_argument on shapes that do not fit, out sharing memory, an MXFP4 weight.
/// Accuracy in float, N <= 257: |error| <= 4e-7 sum |x w| (measured 1.1e-7); it grows at most like N.
/// Cost: 2 B N K FLOPs; reads the weight once per 4 rows of x.
template <host_tensor<2> X, dense_linear_weight Weight, writable_host_tensor<2> Out>
  requires(real<typename X::value_type> && real<typename Out::value_type>)
void linear_transposed(const host& exec, const X& x, const Weight& weight, const Out& out) {
  const size batch = x.extents[0], rows = x.extents[1], columns = out.extents[1];
  detail::require_shape("linear_transposed", "x", x, batch, rows);
  detail::require_shape("linear_transposed", "out", out, batch, columns);
  detail::require_weight_shape("linear_transposed", weight, rows, columns);
  if constexpr (std::same_as<Weight, AnyMatrix<>>)
    detail::require(weight.type != ElementType::mxfp4, "linear_transposed", "weight", "MXFP4", "F64, F32 or BF16");
  detail::require_disjoint("linear_transposed", "out", out, "x", x);
  detail::with_dense_weight(weight, [&](const auto& typed) {
    detail::require_disjoint("linear_transposed", "out", out, "weight", typed);
    if (columns > 0) detail::transposed_typed(exec, detail::read_only(x), typed, out);
  });
}

}  // namespace k3
