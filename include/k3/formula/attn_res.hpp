// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

#include <k3/formula/rms_norm.hpp>

namespace k3 {

/// The score of one source s of Attention Residuals: sum_i u_i s_i / sqrt(mean(s^2) + eps) with u = norm * proj, from
/// its two sums `dot` = sum_i u_i s_i and `squares` = sum_i s_i^2. There is no 1/sqrt(d).
template <class Real>
K3_HOST_DEVICE Real attn_res_score(Real dot, Real squares, size count, Real eps) {
  return dot * rms_scale(squares, count, eps);
}

/// A softmax-weighted sum that is built one source at a time: before the source with the next score is added with
/// factor `add`, what was summed so far is multiplied by `keep`; at the end everything is divided by `denominator`. No
/// score is too large: only differences from the largest so far are exponentiated. The first source has keep 0, add 1.
template <class Real>
struct SoftmaxSum {
  struct Factors {
    Real keep, add;
  };

  Real maximum = -std::numeric_limits<Real>::infinity();
  Real denominator = 0;

  K3_HOST_DEVICE Factors next(Real score) {
    Factors factors{Real(1), Real(1)};
    if (score > maximum) {
      factors.keep = std::exp(maximum - score);
      maximum = score;
    } else {
      factors.add = std::exp(score - maximum);
    }
    denominator = denominator * factors.keep + factors.add;
    return factors;
  }

  /// The weight of a source with this score, once all scores have been seen.
  K3_HOST_DEVICE Real weight(Real score) const { return std::exp(score - maximum) / denominator; }
};

/// (1 - mix) skip + mix mixed, exactly `skip` at mix 0 and exactly `mixed` at mix 1.
template <class Real>
K3_HOST_DEVICE constexpr Real attn_res_blend(Real skip, Real mixed, Real mix) {
  return mix == Real(0) ? skip : mix == Real(1) ? mixed : (Real(1) - mix) * skip + mix * mixed;
}

}  // namespace k3
