// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <string>

namespace k3::test {

/// Path of a file below tests/data; K3_TEST_DATA names that folder when the tests run from elsewhere than the source
/// root.
inline std::string data_path(const std::string& name) {
  const char* root = std::getenv("K3_TEST_DATA");
  return std::string(root ? root : "tests/data") + "/" + name;
}

/// Path of the trained checkpoint that the examples ship, or of a file in it.
inline std::string austen_path(const std::string& name = "") {
  const char* root = std::getenv("K3_AUSTEN");
  return std::string(root ? root : "examples/data/austen") + (name.empty() ? "" : "/" + name);
}

}  // namespace k3::test
