// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/types.hpp>

namespace k3::detail {

/// term(0) + ... + term(count - 1) in 16 lanes (lane = index mod 16) that are added pairwise at the end: a fixed order
/// that compilers vectorise, with a rounding error of about count/16 + 4 steps.
template <class Acc, class Term>
Acc lane_sum(size count, Term&& term) {
  constexpr size lanes = 16;
  Acc sum[lanes] = {};
  const size left = count % lanes, whole = count - left;
  for (size i = 0; i < whole; i += lanes)
    for (size lane = 0; lane < lanes; ++lane) sum[lane] += term(i + lane);
  for (size lane = 0; lane < left; ++lane) sum[lane] += term(whole + lane);
  for (size width = lanes / 2; width > 0; width /= 2)
    for (size lane = 0; lane < width; ++lane) sum[lane] += sum[lane + width];
  return sum[0];
}

}  // namespace k3::detail
