// SPDX-License-Identifier: Apache-2.0
#include "cuda/target_device.hpp"
#include "support/catch.hpp"

using namespace k3::test;

TEST_CASE("launches use what kernels were compiled for, whatever the device has", "[cuda]") {
  const bool newer = compiled_for() >= 90;
  for (const Feature& feature : features()) {
    INFO(feature.name << " in kernels compiled for " << compiled_for());
    CHECK(feature.for_launches == feature.in_kernels);
    if (feature.name != "warpgroup_products") CHECK(feature.for_launches == newer);
  }
}
