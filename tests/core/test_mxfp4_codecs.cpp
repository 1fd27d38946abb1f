// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <random>

#include <k3/core/mxfp4.hpp>

#include "support/catch.hpp"

using namespace k3;

namespace {

constexpr double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

/// The nearest of the eight magnitudes, ties to the even code.
unsigned nearest_magnitude(double value) {
  if (value > 6) return 7;
  unsigned best = 0;
  for (unsigned code = 1; code < 8; ++code) {
    const double distance = std::fabs(value - magnitudes[code]), best_distance = std::fabs(value - magnitudes[best]);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return best;
}

static_assert(e2m1_value(7) == 6.0f && e2m1_encode(6.0f) == 7 && e8m0_value(127) == 1.0f);

}  // namespace

TEST_CASE("e2m1: every code", "[mxfp4]") {
  for (unsigned byte = 0; byte < 256; ++byte) {  // the upper nibble is ignored
    const float value = e2m1_value(static_cast<std::uint8_t>(byte));
    CAPTURE(byte, value);
    CHECK(static_cast<double>(std::fabs(value)) == magnitudes[byte & 7u]);
    CHECK(std::signbit(value) == ((byte & 8u) != 0));
    CHECK(static_cast<unsigned>(e2m1_encode(value)) == (byte & 15u));
  }
}

TEST_CASE("e8m0: every byte", "[mxfp4]") {
  for (int byte = 0; byte < 255; ++byte) {
    CAPTURE(byte);
    CHECK(static_cast<double>(e8m0_value(static_cast<std::uint8_t>(byte))) == std::ldexp(1.0, byte - 127));
  }
  CHECK(std::isnan(e8m0_value(e8m0_nan)));
}

TEST_CASE("e2m1: encoding goes to the nearest value, ties to the even code", "[mxfp4]") {
  const auto check = [](float value) {
    const unsigned expected =
        nearest_magnitude(std::fabs(static_cast<double>(value))) | (std::signbit(value) ? 8u : 0u);
    const unsigned got = e2m1_encode(value);
    INFO("value " << value << ", code " << got << ", expected " << expected);
    REQUIRE(got == expected);
  };
  for (const float limit :
       {0.0f, 0.25f, 0.5f, 0.75f, 1.0f, 1.25f, 1.5f, 1.75f, 2.0f, 2.5f, 3.0f, 3.5f, 4.0f, 5.0f, 6.0f, 7.0f})
    for (const float sign : {1.0f, -1.0f}) {
      check(sign * limit);
      check(sign * std::nextafter(limit, 100.0f));
      check(sign * std::nextafter(limit, 0.0f));
    }
  std::mt19937 engine(3);
  std::uniform_real_distribution<float> uniform(-8.0f, 8.0f);
  for (int i = 0; i < 100000; ++i) check(uniform(engine));
  check(1e30f);
  check(1e-30f);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(e2m1_encode(infinity) == 7);
  CHECK(e2m1_encode(-infinity) == 15);
  CHECK((e2m1_encode(nan) & 7) == 7);
}
