// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/bf16.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/formula/activation.hpp>
#include <k3/geometry/latent_moe_config.hpp>

namespace k3 {

/// One element of a gated MLP's activation, SiTU or SiLU as `glu` says.
template <class Real>
Real glu(Real gate, Real up, const GluConfig& config) {
  if (config.kind == GluConfig::Kind::silu) return silu(gate) * up;
  const Real beta = static_cast<Real>(config.beta);
  return config.linear_beta ? situ_glu(gate, up, beta, static_cast<Real>(*config.linear_beta))
                            : situ_glu_uncapped(gate, up, beta);
}

/// The activation of a gated MLP over rows: out = glu(gate, up), rounded once on store.
/// Shapes: gate, up and out [B, n]; out may be gate or up. Throws invalid_argument on shapes that do not fit and on
/// caps that are zero or not finite. Accuracy: <= 1e-6 relative to double for float.
template <host_tensor<2> Gate, host_tensor<2> Up, writable_host_tensor<2> Out>
void situ_glu_vec(const host& exec, const GluConfig& config, const Gate& gate, const Up& up, const Out& out) {
  using Acc = accumulator_t<typename Gate::value_type>;
  const size rows = gate.extent(0), count = gate.extent(1);
  detail::require_caps("situ_glu_vec", config);
  detail::require_shape("situ_glu_vec", "gate", gate, rows, count);
  detail::require_shape("situ_glu_vec", "up", up, rows, count);
  detail::require_shape("situ_glu_vec", "out", out, rows, count);
  detail::require_same_or_disjoint("situ_glu_vec", "out", out, "gate", gate);
  detail::require_same_or_disjoint("situ_glu_vec", "out", out, "up", up);
  // Weighted as 64 bytes an element: three transcendental functions cost more than their memory traffic.
  detail::parallel_chunks(exec, rows * count, 64, rows * count * 64, [&](size first, size last) {
    for (size i = first; i < last; ++i) {
      const size row = i / count, column = i % count;
      const Acc value = glu(static_cast<Acc>(gate(row, column)), static_cast<Acc>(up(row, column)), config);
      out(row, column) = static_cast<typename Out::value_type>(value);
    }
  });
}

}  // namespace k3
