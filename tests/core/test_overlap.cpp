// SPDX-License-Identifier: Apache-2.0
#include <random>
#include <set>

#include <k3/core/overlap.hpp>

#include "support/catch.hpp"

using namespace k3;

TEST_CASE("footprints share a byte exactly where sets of bytes do", "[core]") {
  std::mt19937 engine(5);
  const auto draw = [&](unsigned below) { return engine() % below; };
  size shared = 0, apart = 0, careful = 0;
  for (int round = 0; round < 20000; ++round) {
    detail::Footprint f[2];
    std::set<std::uintptr_t> set[2];
    const size stride = 1 + draw(12);
    for (int i = 0; i < 2; ++i) {
      f[i] = {1000 + draw(60), draw(5), 1 + draw(static_cast<unsigned>(stride)),
              draw(4) ? stride : stride + 1 + draw(3)};
      if (f[i].rows == 1 && draw(2)) f[i].stride = 0;
      for (size row = 0; row < f[i].rows; ++row)
        for (size byte = 0; byte < f[i].width; ++byte) set[i].insert(f[i].first + row * f[i].stride + byte);
    }
    bool really = false;
    for (const auto byte : set[0]) really = really || set[1].count(byte) > 0;
    const bool says = detail::shares_bytes(f[0], f[1]);
    REQUIRE(says == detail::shares_bytes(f[1], f[0]));
    if (really) REQUIRE(says);
    // Exact for rows that lie equally far apart; otherwise ranges that meet count as sharing.
    if (says && !really) {
      REQUIRE((f[0].stride != f[1].stride && f[0].rows > 1 && f[1].rows > 1));
      ++careful;
    }
    ++(really ? shared : apart);
  }
  CAPTURE(shared, apart, careful);
  CHECK((shared > 1000 && apart > 1000));
}
