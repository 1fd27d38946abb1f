// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <limits>

#include <k3/core/types.hpp>

namespace k3 {

/// Statistics of a softmax over the scores seen so far: their largest, and sum = sum of e^(score - max).
/// As made it is that of no scores at all.
template <class Real>
struct SoftmaxState {
  static constexpr Real no_max = -std::numeric_limits<Real>::infinity();
  Real max = no_max;
  Real sum = 0;
};

/// What sums taken relative to `old_max` are multiplied by when the largest score becomes `new_max`: e^(old - new), 0
/// where there were no scores yet.
template <class Real>
K3_HOST_DEVICE Real softmax_rescale(Real old_max, Real new_max) {
  constexpr Real no_max = SoftmaxState<Real>::no_max;
  return old_max == no_max ? Real(0) : std::exp(old_max - new_max);
}

/// Statistics of two disjoint sets of scores. Weighted sums of values join in the same way, each multiplied by
/// softmax_rescale(its max, the joint max); divided by `sum` at the very end they are the attention output.
template <class Real>
K3_HOST_DEVICE SoftmaxState<Real> softmax_merge(const SoftmaxState<Real>& a, const SoftmaxState<Real>& b) {
  SoftmaxState<Real> joint;
  joint.max = detail::larger(a.max, b.max);
  joint.sum = a.sum * softmax_rescale(a.max, joint.max) + b.sum * softmax_rescale(b.max, joint.max);
  return joint;
}

/// The factor of the scores: 1 / sqrt(nope + rope), whatever width is cached.
template <class Real>
K3_HOST_DEVICE Real mla_score_scale(size qk_head_dim) {
  return Real(1) / std::sqrt(static_cast<Real>(qk_head_dim));
}

/// Angle by which RoPE turns pair `pair` of a slice of `rope` elements: position / theta^(2 pair / rope). In double: a
/// float's angle is wrong in its second decimal at a million positions.
K3_HOST_DEVICE double rope_angle(double position, size pair, size rope, double theta) {
  return position / std::pow(theta, 2.0 * static_cast<double>(pair) / static_cast<double>(rope));
}

/// (a, b) turned by the angle of the given cosine and sine. RoPE's pairs are elements i and i + rope/2 of the slice.
template <class Real>
K3_HOST_DEVICE void rotate_pair(Real& a, Real& b, Real cosine, Real sine) {
  const Real turned = a * cosine - b * sine;
  b = b * cosine + a * sine;
  a = turned;
}

}  // namespace k3
