// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>
#include <k3/core/overlap.hpp>
#include <k3/cuda/launch.cuh>
#include <k3/kernels/row_ops.cuh>
#include <k3/ops/require_weight.hpp>

namespace k3 {

namespace detail {

/// Whether rows of `view` can be read 16 bytes at a time.
template <class T, size Rank>
bool rows_aligned(const DeviceView<T, Rank>& view) {
  bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (size d = 0; d + 1 < Rank; ++d) aligned = aligned && view.strides[d] * sizeof(T) % 16 == 0;
  return aligned;
}

/// f(typed view) of a weight that is F32 or BF16; throws invalid_argument for others.
template <class Weight, class F>
void with_device_weight(const char* operation, const char* argument, const Weight& weight, F&& f) {
  with_typed(weight, [&](const auto& typed) {
    using T = std::remove_const_t<typename std::remove_cvref_t<decltype(typed)>::value_type>;
    if constexpr (std::same_as<T, double>)
      throw invalid_argument(operation, argument, "F64", "F32 or BF16");
    else
      f(typed);
  });
}

template <class X, class W, class Out>
void launch_rms_norm(const gpu& exec, kernel::RmsNormArguments<X, W, Out>& a) {
  if (a.count <= kernel::rms_norm_warp_count)
    launch("rms_norm", exec.stream, dim3(grid_size(a.rows, 8)), dim3(256), 0, kernel::rms_norm<256, 32, 4, X, W, Out>,
           a);
  else
    launch("rms_norm", exec.stream, dim3(grid_size(a.rows, 1)), dim3(512), 0, kernel::rms_norm<512, 512, 2, X, W, Out>,
           a);
}

}  // namespace detail

/// RMSNorm of every row on the device: out = weight * x / sqrt(mean(x^2) + eps), rounded once on store.
/// Shapes: x [R, n] and out [R, n] of float or bf16, weight [n] of F32 or BF16; out may be x. A row's bits depend on
/// nothing else, aligned or not. Throws invalid_argument on a shape that does not fit, memory that overlaps in another
/// way, an eps that is negative or not finite, and other weight types. Cost: x read once up to n = 8192, twice beyond.
template <device_tensor<2> X, class Weight, writable_device_tensor<2> Out>
void rms_norm(const gpu& exec, const X& x, const Weight& weight, float eps, const Out& out) {
  const size rows = x.extent(0), count = x.extent(1);
  detail::require_shape("rms_norm", "x", x, rows, count);
  detail::require_weight("rms_norm", "weight", weight, count);
  detail::require(count < size{1} << 31, "rms_norm", "x's width", count, "below 2^31");
  detail::require_shape("rms_norm", "out", out, rows, count);
  detail::require(eps >= 0 && eps - eps == 0, "rms_norm", "eps", eps, "finite and not negative");
  detail::require_same_or_disjoint("rms_norm", "out", out, "x", x);
  detail::require_disjoint("rms_norm", "out", out, "weight", weight);
  detail::with_device_weight("rms_norm", "weight", weight, [&](const auto& w) {
    if (rows == 0 || count == 0) return;
    using Value = typename X::value_type;
    using Entry = std::remove_const_t<typename std::remove_cvref_t<decltype(w)>::value_type>;
    kernel::RmsNormArguments<Value, Entry, typename Out::value_type> a{
        x.data,
        w.data,
        out.data,
        x.strides[0],
        out.strides[0],
        rows,
        static_cast<unsigned>(count),
        eps,
        detail::rows_aligned(x) && detail::rows_aligned(w) && detail::rows_aligned(out)};
    detail::launch_rms_norm(exec, a);
  });
}

}  // namespace k3
