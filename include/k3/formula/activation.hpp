// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include <k3/core/types.hpp>

namespace k3 {

/// 1 / (1 + e^-x), without overflow on either side; NaN stays NaN.
template <class Real>
K3_HOST_DEVICE Real sigmoid(Real x) {
  const Real e = std::exp(x < 0 ? x : -x);
  return (x < 0 ? e : Real(1)) / (Real(1) + e);
}

/// x sigmoid(x).
template <class Real>
K3_HOST_DEVICE Real silu(Real x) {
  // -inf * 0 would be NaN; the limit is 0.
  const Real s = sigmoid(x);
  return s == Real(0) ? Real(0) : x * s;
}

/// log(1 + e^x), without overflow.
template <class Real>
K3_HOST_DEVICE Real softplus(Real x) {
  return (x > 0 ? x : Real(0)) + std::log1p(std::exp(x > 0 ? -x : x));
}

/// cap * tanh(x / cap): x for small x, +-cap for large; NaN stays NaN. `cap` must be finite and not zero.
template <class Real>
K3_HOST_DEVICE Real softcap(Real x, Real cap) {
  return cap * std::tanh(x / cap);
}

/// SiTU-GLU: [beta tanh(gate/beta) sigmoid(gate)] [linear_beta tanh(up/linear_beta)]. The sigmoid takes the uncapped
/// gate, so |result| <= beta * linear_beta (100 in Kimi K3). Source: `hidden_act: situ`.
template <class Real>
K3_HOST_DEVICE Real situ_glu(Real gate, Real up, Real beta, Real linear_beta) {
  return softcap(gate, beta) * sigmoid(gate) * softcap(up, linear_beta);
}

/// SiTU-GLU with an uncapped up branch (`activation_situ_linear_beta: null`).
template <class Real>
K3_HOST_DEVICE Real situ_glu_uncapped(Real gate, Real up, Real beta) {
  return softcap(gate, beta) * sigmoid(gate) * up;
}

}  // namespace k3
