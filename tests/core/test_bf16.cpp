// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include <k3/core/bf16.hpp>

#include "support/catch.hpp"

using namespace k3;

namespace {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

/// The value of a pattern from its fields.
double pattern_value(unsigned bits) {
  const int exponent = static_cast<int>(bits >> 7 & 255u), mantissa = static_cast<int>(bits & 127u);
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
  return bits & 0x8000u ? -magnitude : magnitude;
}

/// Nearest pattern, ties to the even one, by bisection over the positive finite patterns; infinity from 2^128 - 2^119
/// on.
unsigned nearest_pattern(double value) {
  const unsigned sign = std::signbit(value) ? 0x8000u : 0u;
  const double magnitude = std::fabs(value);
  if (magnitude >= std::ldexp(511.0, 119)) return sign | 0x7f80u;
  unsigned low = 0, high = 0x7f80u;  // value(low) <= magnitude < value(high), 0x7f80 standing for 2^128
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (pattern_value(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - pattern_value(low), above = pattern_value(high) - magnitude;
  return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

template <class T>
void check_rounding(T value) {
  const unsigned got = bf16(value).bits, expected = nearest_pattern(static_cast<double>(value));
  INFO("value " << value << ", pattern " << got << ", expected " << expected);
  REQUIRE(got == expected);
}

static_assert(bf16(1.0f).bits == 0x3f80 && static_cast<float>(bf16(1.0)) == 1.0f);

}  // namespace

TEST_CASE("bf16: all 65,536 patterns go to float and back", "[bf16]") {
  for (unsigned bits = 0; bits < 65536; ++bits) {
    const bf16 value = bf16::from_bits(static_cast<std::uint16_t>(bits));
    const float f = value;
    const bool nan = (bits & 0x7fffu) > 0x7f80u;
    INFO("pattern " << bits);
    REQUIRE(bits_as<std::uint32_t>(f) == bits << 16);
    REQUIRE(std::isnan(f) == nan);
    if (!nan && (bits & 0x7fffu) != 0x7f80u) REQUIRE(static_cast<double>(f) == pattern_value(bits));
    const unsigned expected = nan ? bits | 0x40u : bits;  // a NaN comes back quiet
    REQUIRE(bf16(f).bits == expected);
    REQUIRE((bf16(static_cast<double>(f)).bits | (nan ? 0x40u : 0u)) == expected);
  }
}

TEST_CASE("bf16: float rounds to nearest, ties to even", "[bf16]") {
  std::mt19937 engine(4);
  for (int i = 0; i < 300000; ++i) {
    const float value = bits_as<float>(static_cast<std::uint32_t>(engine()));
    if (std::isfinite(value)) check_rounding(value);
  }
  for (unsigned bits = 0; bits < 0x7f80u; bits += 7)  // the middle between two neighbours, and next to it
    for (const int side : {-1, 0, 1}) {
      check_rounding(bits_as<float>((bits << 16 | 0x8000u) + static_cast<std::uint32_t>(side)));
      check_rounding(bits_as<float>((bits << 16 | 0x80008000u) + static_cast<std::uint32_t>(side)));
    }
  for (const float value : {0.0f, -0.0f, std::numeric_limits<float>::denorm_min(), (std::numeric_limits<float>::max)(),
                            std::numeric_limits<float>::lowest(), 3.3895314e38f})
    check_rounding(value);
}

TEST_CASE("bf16: double rounds once", "[bf16]") {
  // 1 + 2^-8 + 2^-40 lies above the middle of 1 and 1 + 2^-7, but its nearest float is that middle.
  CHECK(bf16(1 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40)).bits == 0x3f81);
  CHECK(bf16(1 + std::ldexp(3.0, -8) - std::ldexp(1.0, -40)).bits == 0x3f81);
  std::mt19937_64 engine(5);
  for (int i = 0; i < 300000; ++i) {
    const double value = bits_as<double>(static_cast<std::uint64_t>(engine()));
    if (std::isfinite(value)) check_rounding(value);
    // The same mantissa within float's range, and one close to a middle.
    const double mantissa = 1 + static_cast<double>(engine() >> 11) * 0x1p-53;
    const int exponent = static_cast<int>(engine() % 290) - 150;
    check_rounding(std::ldexp(mantissa, exponent));
    const double middle = std::ldexp(static_cast<double>(257 + 2 * (engine() % 128)), exponent - 8);
    for (const double side : {-1e-16, -1e-12, 0.0, 1e-12, 2e-16}) check_rounding(middle * (side + 1));
  }
  for (const double value : {0.0, -0.0, 1e-300, -1e-300, 1e300, -1e300, std::ldexp(1.0, -134), std::ldexp(1.0, -150),
                             std::ldexp(511.0, 119), std::nextafter(std::ldexp(511.0, 119), 0.0)})
    check_rounding(value);
}

TEST_CASE("bf16: infinities and NaN", "[bf16]") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(bf16(infinity).bits == 0x7f80);
  CHECK(bf16(-infinity).bits == 0xff80);
  CHECK(bf16(static_cast<double>(infinity)).bits == 0x7f80);
  for (const std::uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0xffc00000u, 0xff800001u, 0xffffffffu}) {
    CAPTURE(bits);
    const bf16 rounded = bf16(bits_as<float>(bits));
    CHECK(std::isnan(static_cast<float>(rounded)));
    CHECK((rounded.bits >> 15) == (bits >> 31));
    CHECK((rounded.bits & 0x40) != 0);
  }
  CHECK(std::isnan(static_cast<float>(bf16(std::numeric_limits<double>::quiet_NaN()))));
}
