// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/formula/activation.hpp>
#include <k3/formula/rms_norm.hpp>
#include <k3/geometry/kda_config.hpp>
#include <k3/ops/reduce.hpp>
#include <k3/ops/require_weight.hpp>

namespace k3 {

namespace detail {

/// One head of one row. `out` may be `core` or `gate`, if of the same type.
template <class Acc, class Core, class Gate, class W, class Out>
void gated_rms_norm_head(const Core* core, const Gate* gate, const W* weight, Acc eps, Out* out, size count) {
  const Acc squares = lane_sum<Acc>(count, [&](size i) {
    const Acc value = static_cast<Acc>(core[i]);
    return value * value;
  });
  const Acc scale = rms_scale(squares, count, eps);
  for (size i = 0; i < count; ++i) {
    const Acc normed = static_cast<Acc>(core[i]) * scale * static_cast<Acc>(weight[i]);
    out[i] = static_cast<Out>(normed * sigmoid(static_cast<Acc>(gate[i])));
  }
}

}  // namespace detail

/// KDA's output gate: every head's core output is RMS-normalised, weighted and multiplied by sigmoid(gate):
/// out[h] = weight * core[h] / sqrt(mean(core[h]^2) + eps) * sigmoid(gate[h]), rounded once on store.
/// Shapes: core [R, H*D], gate [R, H*D] (g_proj x), weight [D] shared by the heads, out [R, H*D], which may be core or
/// gate. Throws invalid_argument on shapes that do not fit, memory that overlaps in another way and an eps that is
/// negative or not finite.
/// Accuracy: <= 7e-7 relative to double for float. Source: `o_norm.weight`, `rms_norm_eps`.
template <kda_geometry G, host_tensor<2> Core, host_tensor<2> Gate, class Weight, writable_host_tensor<2> Out>
void gated_rms_norm(const host& exec, G geometry, const Core& core, const Gate& gate, const Weight& weight,
                    accumulator_t<typename Core::value_type> eps, const Out& out) {
  using Acc = accumulator_t<typename Core::value_type>;
  constexpr const char* operation = "gated_rms_norm";
  check(geometry, operation);
  const size rows = core.extent(0), heads = geometry.heads, head_dim = geometry.head_dim;
  detail::require_shape(operation, "core", core, rows, kda_width(geometry));
  detail::require_shape(operation, "gate", gate, rows, kda_width(geometry));
  detail::require_weight(operation, "weight", weight, head_dim);
  detail::require_shape(operation, "out", out, rows, kda_width(geometry));
  detail::require(eps >= 0 && eps - eps == 0, operation, "eps", eps, "finite and not negative");
  detail::require_same_or_disjoint(operation, "out", out, "core", core);
  detail::require_same_or_disjoint(operation, "out", out, "gate", gate);
  detail::require_disjoint(operation, "out", out, "weight", weight);
  detail::with_typed(weight, [&](const auto& w) {
    // Weighted as 64 bytes a channel: the sigmoid costs more than the memory traffic.
    detail::parallel_chunks(exec, rows * heads, 1, rows * heads * head_dim * 64, [&](size first, size last) {
      for (size unit = first; unit < last; ++unit) {
        const size row = unit / heads, channel = unit % heads * head_dim;
        detail::gated_rms_norm_head<Acc>(&core(row, channel), &gate(row, channel), w.data, eps, &out(row, channel),
                                         head_dim);
      }
    });
  });
}

}  // namespace k3
