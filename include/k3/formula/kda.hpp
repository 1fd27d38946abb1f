// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/activation.hpp>
#include <k3/formula/rms_norm.hpp>

namespace k3 {

/// Log-decay of one key channel with a lower bound: bound * sigmoid(rate * z), between `lower_bound` (< 0) and 0.
/// z = f_b(f_a(x)) + dt_bias, rate = exp(A_log) of the head. Source: `gate_lower_bound`, `A_log`, `dt_bias`.
template <class Real>
K3_HOST_DEVICE Real kda_log_decay_bounded(Real z, Real rate, Real lower_bound) {
  return lower_bound * sigmoid(rate * z);
}

/// Log-decay of one key channel without a lower bound: -rate * log(1 + e^z), for any z without overflow.
template <class Real>
K3_HOST_DEVICE Real kda_log_decay_softplus(Real z, Real rate) {
  return -rate * softplus(z);
}

/// What the delta rule writes into one value column: beta * (value - read), read = S^T k of the decayed state.
template <class Real>
K3_HOST_DEVICE Real kda_delta(Real value, Real read, Real beta) {
  return beta * (value - read);
}

/// The factor of a head's query: L2 normalisation, then 1 / sqrt(head_dim). A key has the first only (l2_scale).
template <class Real>
K3_HOST_DEVICE Real kda_query_scale(Real sum_of_squares, size head_dim, Real eps) {
  return l2_scale(sum_of_squares, eps) / std::sqrt(static_cast<Real>(head_dim));
}

}  // namespace k3
