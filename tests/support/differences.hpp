// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>

#include <k3/core/view.hpp>

namespace k3::test {

/// |got - want| / |want| in L2 over all elements; infinite where there are not equally many. `norm_of_zeros` takes the
/// place of |want|^2 where that is 0.
template <class Got, class Want>
double relative_l2(const Got& got, const Want& want, double norm_of_zeros = 0) {
  if (got.size() != want.size()) return HUGE_VAL;
  double difference = 0, norm = 0;
  for (size i = 0; i < want.size(); ++i) {
    const double g = static_cast<double>(got[i]), w = static_cast<double>(want[i]);
    difference += (g - w) * (g - w), norm += w * w;
  }
  return std::sqrt(difference / (norm > 0 ? norm : norm_of_zeros));
}

/// max |a - b| over all elements; infinite where there are not equally many.
template <class A, class B>
double largest_difference(const A& a, const B& b) {
  if (a.size() != b.size()) return HUGE_VAL;
  double largest = 0;
  for (size i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return largest;
}

}  // namespace k3::test
