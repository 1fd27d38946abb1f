// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include <k3/core/types.hpp>

namespace k3 {

/// The factor of RMSNorm: 1 / sqrt(sum_of_squares / count + eps).
template <class Real>
K3_HOST_DEVICE Real rms_scale(Real sum_of_squares, size count, Real eps) {
  return Real(1) / std::sqrt(sum_of_squares / static_cast<Real>(count) + eps);
}

/// The factor of L2 normalisation: 1 / sqrt(sum_of_squares + eps). The eps is added to the sum, inside the root.
template <class Real>
K3_HOST_DEVICE Real l2_scale(Real sum_of_squares, Real eps) {
  return Real(1) / std::sqrt(sum_of_squares + eps);
}

}  // namespace k3
