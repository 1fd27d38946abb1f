// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <string>

namespace k3::test {

/// True where only small shapes are wanted: under the sanitizers, which slow kernels down a hundredfold.
inline bool small_only() {
  const char* value = std::getenv("K3_GPU_SMALL");
  return value && std::string(value) == "1";
}

}  // namespace k3::test
