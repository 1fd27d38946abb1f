// SPDX-License-Identifier: Apache-2.0
#include <k3/model/attn_res_hub.hpp>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/catch.hpp"

using namespace k3;

TEST_CASE("AttnResHub keeps an entry per key", "[attn_res_hub]") {
  AttnResHub<std::vector<float>> hub;
  CHECK_FALSE(hub.contains(1));
  CHECK(hub.get(1) == nullptr);
  hub.insert(1, {1.0f});
  hub.insert(~std::uint64_t{0}, {2.0f, 3.0f});
  REQUIRE(hub.get(1) != nullptr);
  hub.get(1)->push_back(4.0f);
  CHECK(*hub.get(1) == std::vector<float>{1.0f, 4.0f});
  CHECK(*std::as_const(hub).get(~std::uint64_t{0}) == std::vector<float>{2.0f, 3.0f});
  CHECK(hub.insert(1, {9.0f}) == std::vector<float>{9.0f});
  CHECK(hub.count() == 2);
  CHECK(hub.remove(1));
  CHECK_FALSE(hub.remove(1));
  CHECK_FALSE(hub.contains(1));
  CHECK(hub.contains(~std::uint64_t{0}));
}

TEST_CASE("AttnResHub::decode removes the entry where the step throws, and only then", "[attn_res_hub]") {
  AttnResHub<int> hub;
  hub.insert(7, 1);
  hub.insert(8, 2);
  const auto fail = [](int& value) -> int {
    value = 99;
    throw std::runtime_error("step failed");
  };
  CHECK_THROWS_AS(hub.decode(7, fail), std::runtime_error);
  CHECK_FALSE(hub.contains(7));
  REQUIRE(hub.contains(8));
  CHECK(*hub.get(8) == 2);

  CHECK(hub.decode(8, [](int& value) { return ++value; }) == 3);
  REQUIRE(hub.contains(8));
  CHECK(*hub.get(8) == 3);
  hub.decode(8, [&](int&) { hub.insert(9, 5); });  // a step may add entries
  CHECK(hub.count() == 2);
}

TEST_CASE("AttnResHub::decode says which key is not there", "[attn_res_hub]") {
  AttnResHub<std::unique_ptr<int>> hub;
  hub.insert(3, std::make_unique<int>(4));
  bool called = false;
  try {
    hub.decode(5, [&](std::unique_ptr<int>&) { called = true; });
    FAIL("nothing thrown");
  } catch (const invalid_argument& e) {
    CHECK(e.operation() == "AttnResHub::decode");
    CHECK(e.argument() == "key");
    CHECK(e.found() == "5");
  }
  CHECK_FALSE(called);
  CHECK(hub.contains(3));
}
