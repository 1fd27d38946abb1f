// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <vector>

#include <k3/core/types.hpp>

namespace k3::detail {

/// How often each of `count` things was used, where a use weighs half as much after `half_life` others.
class UseCounts {
 public:
  UseCounts(size count, double half_life) : counts_(count, 0.0), growth_(std::exp2(1 / half_life)) {}

  void use(size i) {
    // Later uses weigh more instead of earlier ones less, which would change every count.
    weight_ *= growth_;
    counts_[i] += weight_;
    if (weight_ < 1e100) return;
    for (double& count : counts_) count /= weight_;
    weight_ = 1;
  }
  double operator[](size i) const { return counts_[i]; }

 private:
  std::vector<double> counts_;
  double growth_, weight_ = 1;
};

}  // namespace k3::detail
