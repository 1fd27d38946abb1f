// SPDX-License-Identifier: Apache-2.0
// The smallest program that uses k3: RMSNorm of two rows. The three folders beside it build it in three ways.
#include <cmath>
#include <cstdio>
#include <vector>

#include <k3/k3.hpp>

int main() {
  const std::vector<float> x{1, 2, 3, 4, 0.5f, -0.5f, 0.5f, -0.5f};  // [2, 4]
  const std::vector<float> weight{1, 1, 1, 2};                       // [4]
  std::vector<float> out(x.size());                                  // [2, 4]
  k3::rms_norm(k3::host{}, k3::view(x, 2, 4), k3::view(weight), 1e-6f, k3::view(out, 2, 4));
  for (const float value : out) std::printf("%.5f ", static_cast<double>(value));
  std::printf("from k3 %s\n", k3::version_string);
  return std::abs(out[3] - 8 / std::sqrt(7.5f)) < 1e-5f ? 0 : 1;
}
