// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace k3::test {

/// Something that a kernel may use.
struct Feature {
  std::string name;
  bool for_launches, in_kernels;  ///< as launches are told, and as kernels were compiled
};
std::vector<Feature> features();

/// Compute capability times ten that kernels were compiled for.
int compiled_for();

}  // namespace k3::test
