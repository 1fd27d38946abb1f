// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/formula/rms_norm.hpp>
#include <k3/ops/reduce.hpp>
#include <k3/ops/require_weight.hpp>

namespace k3 {

namespace detail {

/// One row of RMSNorm. `x` and `out` may be the same row.
template <class Acc, class X, class W, class Out>
void rms_norm_row(const X* x, const W* weight, Acc eps, Out* out, size count) {
  const Acc squares = lane_sum<Acc>(count, [&](size i) {
    const Acc value = static_cast<Acc>(x[i]);
    return value * value;
  });
  const Acc scale = rms_scale(squares, count, eps);
  for (size i = 0; i < count; ++i)
    out[i] = static_cast<Out>(static_cast<Acc>(x[i]) * scale * static_cast<Acc>(weight[i]));
}

}  // namespace detail

/// RMSNorm of every row: out = weight * x / sqrt(mean(x^2) + eps), a plain weight (no 1 + w), rounded once on store.
/// Shapes: x [B, n], weight [n], out [B, n]; out may be x. Throws invalid_argument on a shape that does not fit, memory
/// that overlaps in another way and an eps that is negative or not finite.
/// Accuracy: <= 6e-7 relative to double for float. Source: `input_layernorm` and its sisters, `rms_norm_eps`.
template <host_tensor<2> X, class Weight, writable_host_tensor<2> Out>
void rms_norm(const host& exec, const X& x, const Weight& weight, accumulator_t<typename X::value_type> eps,
              const Out& out) {
  using Acc = accumulator_t<typename X::value_type>;
  const size rows = x.extent(0), count = x.extent(1);
  detail::require_shape("rms_norm", "x", x, rows, count);
  detail::require_weight("rms_norm", "weight", weight, count);
  detail::require_shape("rms_norm", "out", out, rows, count);
  detail::require(eps >= 0 && eps - eps == 0, "rms_norm", "eps", eps, "finite and not negative");
  detail::require_same_or_disjoint("rms_norm", "out", out, "x", x);
  detail::require_disjoint("rms_norm", "out", out, "weight", weight);
  detail::with_typed(weight, [&](const auto& w) {
    detail::parallel_chunks(exec, rows, 1, rows * count * 16, [&](size first, size last) {
      for (size row = first; row < last; ++row) detail::rms_norm_row<Acc>(&x(row, 0), w.data, eps, &out(row, 0), count);
    });
  });
}

}  // namespace k3
