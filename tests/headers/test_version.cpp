// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string>

#include <k3/version.hpp>

#include "support/catch.hpp"

TEST_CASE("the version's parts, its text and the build's version agree") {
  const std::string parts = std::to_string(k3::version_major) + "." + std::to_string(k3::version_minor) + "." +
                            std::to_string(k3::version_patch);
  CHECK(parts == k3::version_string);
  if (const char* built = std::getenv("K3_VERSION")) CHECK(std::string(built) == k3::version_string);
}
