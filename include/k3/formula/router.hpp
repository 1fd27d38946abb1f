// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/activation.hpp>

namespace k3 {

/// What experts are chosen by: sigmoid(logit) + bias. The bias decides who is chosen, never with which weight.
/// Source: `moe_router_activation_func: sigmoid`, `gate.e_score_correction_bias`.
template <class Real>
K3_HOST_DEVICE Real selection_score(Real logit, Real bias) {
  return sigmoid(logit) + bias;
}

/// True where expert `a` is chosen before expert `b`: the higher score, at equal scores the lower index.
template <class Real>
K3_HOST_DEVICE constexpr bool ranks_before(Real score_a, id a, Real score_b, id b) {
  return score_a > score_b || (score_a == score_b && a < b);
}

/// The weight of a chosen expert: p * scale, or p / (sum + 1e-20) * scale with `divide`, where p = sigmoid(logit) and
/// `sum` adds the p of all chosen experts. The 1e-20 makes 0/0 a weight of 0. Source: `moe_renormalize`,
/// `routed_scaling_factor`.
template <class Real>
K3_HOST_DEVICE constexpr Real routing_weight(Real p, Real sum, bool divide, Real scale) {
  return (divide ? p / (sum + Real(1e-20)) : p) * scale;
}

}  // namespace k3
