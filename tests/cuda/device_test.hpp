// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

namespace k3::test {

/// True where only small shapes are wanted, and few calls: under the sanitizers, which slow kernels down a hundredfold
/// and make a call of the runtime take a millisecond. Every kernel still runs.
inline bool small_only() {
  const char* value = std::getenv("K3_GPU_SMALL");
  return value && std::string(value) == "1";
}

/// `few` where only small shapes are wanted, otherwise `all`.
template <class T>
std::vector<T> all_or_few(std::initializer_list<T> all, std::initializer_list<T> few) {
  return small_only() ? few : all;
}

}  // namespace k3::test
