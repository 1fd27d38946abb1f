// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <k3/ops/dequantize_mxfp4.hpp>
#include <k3/ops/quantize_mxfp4.hpp>

#include "support/compare.hpp"
#include "support/ops_fixture.hpp"

using namespace k3;

namespace {

constexpr double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

double code_value(unsigned code) { return (code & 8u ? -1 : 1) * magnitudes[code & 7u]; }

template <class Out>
std::vector<Out> dequantised(const std::vector<std::uint8_t>& packed, const std::vector<std::uint8_t>& scale,
                             size rows) {
  const size columns = packed.size() * 2 / rows;
  std::vector<Out> out(rows * columns);
  dequantize_mxfp4({}, {view(packed.data(), rows, columns / 2), view(scale.data(), rows, columns / 32)},
                   view(out, rows, columns));
  return out;
}

struct Quantised {
  std::vector<std::uint8_t> packed, scale;
};
template <class T>
Quantised quantised(const std::vector<T>& x, size rows, int threads = 1) {
  const size columns = x.size() / rows;
  Quantised q{std::vector<std::uint8_t>(rows * columns / 2), std::vector<std::uint8_t>(rows * columns / 32)};
  quantize_mxfp4({threads}, view(x.data(), rows, columns), view(q.packed, rows, columns / 2),
                 view(q.scale, rows, columns / 32));
  return q;
}

/// What a fixture says, bit for bit; any NaN is one.
template <class T>
void check_values(const std::vector<T>& got, const std::vector<double>& want) {
  REQUIRE(got.size() == want.size());
  size wrong = 0;
  for (size i = 0; i < want.size(); ++i) {
    const double value = static_cast<double>(got[i]);
    const bool same =
        std::isnan(want[i]) ? std::isnan(value) : value == want[i] && std::signbit(value) == std::signbit(want[i]);
    if (!same && ++wrong <= 3) FAIL_CHECK("element " << i << ": got " << value << ", want " << want[i]);
  }
  CHECK(wrong == 0);
}

/// The rule in long arithmetic: the scale from a loop over powers of two, the code from all eight distances.
unsigned nearest_code(double value, double scale) {
  unsigned best = 0;
  double best_distance = std::fabs(value);
  for (unsigned code = 1; code < 8; ++code) {
    const double distance = std::fabs(std::fabs(value) - magnitudes[code] * scale);
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code, best_distance = distance;
  }
  return best | (std::signbit(value) ? 8u : 0u);
}
int scale_exponent(double largest) {
  int exponent = 127;
  while (exponent > -127 && std::ldexp(1.0, exponent + 2) > largest) --exponent;
  return exponent;
}

template <class T>
void check_against_rule(const std::vector<T>& x, size rows) {
  const size columns = x.size() / rows;
  const Quantised q = quantised(x, rows);
  for (size group = 0; group < x.size() / 32; ++group) {
    double largest = 0;
    for (size i = 0; i < 32; ++i) largest = (std::max)(largest, std::fabs(static_cast<double>(x[group * 32 + i])));
    const int exponent = scale_exponent(largest);
    INFO("group " << group << " of rows of " << columns << ", largest " << largest);
    REQUIRE(static_cast<int>(q.scale[group]) == exponent + 127);
    for (size i = 0; i < 32; ++i) {
      const double value = static_cast<double>(x[group * 32 + i]);
      const unsigned byte = q.packed[(group * 32 + i) / 2], code = i % 2 ? byte >> 4 : byte & 15u;
      INFO("element " << i << ": " << value);
      REQUIRE(code == nearest_code(value, std::ldexp(1.0, exponent)));
      const double scale = std::ldexp(1.0, exponent), error = std::fabs(code_value(code) * scale - value);
      REQUIRE(error <=
              (std::fabs(value) > 6 * scale ? std::fabs(value) / 4 : (std::max)(std::fabs(value) / 5, scale / 4)));
    }
  }
}

}  // namespace

TEST_CASE("mxfp4: the lower nibble is the lower column", "[mxfp4]") {
  std::vector<std::uint8_t> packed(16, 0);
  packed[0] = 0x21;
  const auto out = dequantised<float>(packed, {127}, 1);
  CHECK(out[0] == 0.5f);
  CHECK(out[1] == 1.0f);
  for (size i = 2; i < 32; ++i) CHECK(out[i] == 0.0f);
}

TEST_CASE("mxfp4: scale byte 0 is 2^-127 and nothing is flushed to zero", "[mxfp4]") {
  std::vector<std::uint8_t> packed(16, 0);
  packed[0] = 0x27;  // 6, then 1
  const auto out = dequantised<float>(packed, {0}, 1);
  CHECK(out[0] == 3.5264831e-38f);
  CHECK(out[1] == 5.8774718e-39f);
  CHECK(static_cast<double>(out[1]) == std::ldexp(1.0, -127));
}

TEMPLATE_TEST_CASE("mxfp4: small scales survive in every output type", "[mxfp4]", float, double, bf16) {
  const std::vector<std::uint8_t> packed(16, 0x22);
  for (unsigned byte = 103; byte <= 112; ++byte) {
    const auto out = dequantised<TestType>(packed, {static_cast<std::uint8_t>(byte)}, 1);
    CAPTURE(byte);
    for (const TestType value : out) CHECK(static_cast<double>(value) == std::ldexp(1.0, static_cast<int>(byte) - 127));
  }
  CHECK(static_cast<float>(dequantised<TestType>(packed, {103}, 1)[0]) == 5.9604645e-8f);
}

TEMPLATE_TEST_CASE("mxfp4: all 256 scales by 16 codes", "[mxfp4]", float, double, bf16) {
  std::vector<std::uint8_t> packed(256 * 16), scale(256);
  for (size row = 0; row < 256; ++row) {
    scale[row] = static_cast<std::uint8_t>(row);
    for (size i = 0; i < 16; ++i)
      packed[row * 16 + i] = static_cast<std::uint8_t>((2 * i % 16) | (2 * i + 1) % 16 << 4);
  }
  for (const int threads : {1, 3}) {
    std::vector<TestType> out(256 * 32);
    dequantize_mxfp4({threads}, {view(std::as_const(packed), 256, 16), view(std::as_const(scale), 256, 1)},
                     view(out, 256, 32));
    for (size row = 0; row < 256; ++row)
      for (size column = 0; column < 32; ++column) {
        const double got = static_cast<double>(out[row * 32 + column]);
        double expected = code_value(static_cast<unsigned>(column % 16)) * std::ldexp(1.0, static_cast<int>(row) - 127);
        if (std::fabs(expected) >= std::ldexp(1.0, 128))
          expected = std::copysign(std::numeric_limits<double>::infinity(), expected);
        CAPTURE(row, column, got, expected);
        if (row == 255)
          CHECK(std::isnan(got));
        else
          CHECK((got == expected && std::signbit(got) == std::signbit(expected)));
        if (column == 0 && row < 255) CHECK(got == 0);
      }
  }
}

TEST_CASE("mxfp4: widths and scale counts that do not fit are refused", "[mxfp4]") {
  std::vector<std::uint8_t> packed(64, 0x22), scale(4, 127);
  std::vector<float> out(128, 5.0f), x(128, 1.0f);
  const auto p = [&](size rows, size columns) { return view(packed.data(), rows, columns); };
  const auto s = [&](size rows, size columns) { return view(scale.data(), rows, columns); };
  CHECK_THROWS_AS(dequantize_mxfp4({}, {p(2, 20), s(2, 1)}, view(out.data(), 2, 40)), invalid_argument);
  CHECK_THROWS_AS(dequantize_mxfp4({}, {p(2, 32), s(2, 1)}, view(out.data(), 2, 64)), invalid_argument);
  CHECK_THROWS_AS(dequantize_mxfp4({}, {p(2, 32), s(1, 2)}, view(out.data(), 2, 64)), invalid_argument);
  CHECK_THROWS_AS(dequantize_mxfp4({}, {p(2, 32), s(2, 2)}, view(out.data(), 2, 32)), invalid_argument);
  CHECK_THROWS_AS(quantize_mxfp4({}, view(x.data(), 2, 40), p(2, 20), s(2, 1)), invalid_argument);
  CHECK_THROWS_AS(quantize_mxfp4({}, view(x.data(), 2, 64), p(2, 32), s(2, 1)), invalid_argument);
  CHECK_THROWS_AS(quantize_mxfp4({}, view(x.data(), 2, 64), p(2, 16), s(2, 2)), invalid_argument);
  CHECK(out == std::vector<float>(128, 5.0f));
  dequantize_mxfp4({}, {p(0, 32), s(0, 2)}, view(out.data(), 0, 64));
  dequantize_mxfp4({}, {p(2, 0), s(2, 0)}, view(out.data(), 2, 0));
  quantize_mxfp4({}, view(x.data(), 0, 64), p(0, 32), s(0, 2));
  CHECK(packed == std::vector<std::uint8_t>(64, 0x22));
}

TEST_CASE("quantize_mxfp4: the scale rounds down, the largest value up to 6", "[mxfp4]") {
  std::vector<float> x(32, 0.0f);
  x[5] = 2.7f;
  Quantised q = quantised(x, 1);
  CHECK(q.scale[0] == 126);
  CHECK(dequantised<float>(q.packed, q.scale, 1)[5] == 3.0f);
  x[5] = -5.5f;
  q = quantised(x, 1);
  CHECK(q.scale[0] == 127);
  CHECK(dequantised<float>(q.packed, q.scale, 1)[5] == -6.0f);
}

TEMPLATE_TEST_CASE("mxfp4: the fixture's table of all scales and codes", "[mxfp4]", float, double, bf16) {
  for (const test::OpsCase& one : test::ops_cases("mxfp4_table")) {
    INFO(one.name);
    const auto scale = test::converted<std::uint8_t>(one.tensor("scale_byte").values);
    const auto code = test::converted<std::uint8_t>(one.tensor("nibble").values);
    const size rows = scale.size(), codes = code.size();
    REQUIRE((rows == 256 && codes == 16));
    const std::vector<double> value = one.tensor("value").values;
    std::vector<std::uint8_t> packed(rows * codes);  // each code twice, so that a row is one group
    std::vector<double> want(rows * 2 * codes);
    for (size row = 0; row < rows; ++row)
      for (size i = 0; i < codes; ++i) {
        packed[row * codes + i] = static_cast<std::uint8_t>(code[i] | code[codes - 1 - i] << 4);
        want[row * 2 * codes + 2 * i] = value[row * codes + i];
        want[row * 2 * codes + 2 * i + 1] = value[row * codes + codes - 1 - i];
      }
    check_values(dequantised<TestType>(packed, scale, rows), want);
  }
}

TEMPLATE_TEST_CASE("mxfp4: the fixture's matrices", "[mxfp4]", float, double, bf16) {
  const std::vector<test::OpsCase> cases = test::ops_cases("mxfp4_dequant");
  CHECK(cases.size() == 2);
  for (const test::OpsCase& one : cases) {
    INFO(one.name);
    const test::OpsTensor packed = one.tensor("weight_packed"), scale = one.tensor("weight_scale");
    check_values(dequantised<TestType>(test::converted<std::uint8_t>(packed.values),
                                       test::converted<std::uint8_t>(scale.values), packed.shape[0]),
                 one.tensor("weight").values);
  }
}

TEST_CASE("quantize_mxfp4: zeros and the ends of the range", "[mxfp4]") {
  const Quantised zero = quantised(std::vector<float>(64, 0.0f), 2);
  CHECK(zero.scale == std::vector<std::uint8_t>(2, 0));
  CHECK(zero.packed == std::vector<std::uint8_t>(32, 0));
  CHECK(quantised(std::vector<float>(32, std::numeric_limits<float>::denorm_min()), 1).packed ==
        std::vector<std::uint8_t>(16, 0));
  const Quantised largest = quantised(std::vector<float>(32, (std::numeric_limits<float>::max)()), 1);
  CHECK(largest.scale[0] == 252);
  CHECK(largest.packed == std::vector<std::uint8_t>(16, 0x77));
  const Quantised huge = quantised(std::vector<double>(32, -1e300), 1);
  CHECK(huge.scale[0] == 254);
  CHECK(huge.packed == std::vector<std::uint8_t>(16, 0xff));
  const Quantised tiny = quantised(std::vector<double>(32, 1e-300), 1);
  CHECK(tiny.scale[0] == 0);
  CHECK(tiny.packed == std::vector<std::uint8_t>(16, 0));
}

TEMPLATE_TEST_CASE("quantize_mxfp4: against the rule, value by value", "[mxfp4]", float, double, bf16) {
  std::mt19937 engine(1);
  std::normal_distribution<double> normal;
  std::vector<TestType> x(64 * 96);
  for (size i = 0; i < x.size(); ++i)
    x[i] = static_cast<TestType>(normal(engine) * std::ldexp(1.0, static_cast<int>(i / 32 % 170) - 135));
  check_against_rule(x, 64);

  // Every limit between two codes, itself and its neighbours, under several scales.
  std::vector<double> limits;
  for (const double limit : {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0})
    for (const double side : {-1e-15, -1e-9, 0.0, 1e-9, 1e-15}) limits.push_back(limit * (1 + side));
  std::vector<TestType> y;
  for (const int exponent : {-100, -3, 0, 1, 90})
    for (size i = 0; i < limits.size(); i += 31) {
      y.push_back(static_cast<TestType>(std::ldexp(4.0, exponent)));
      for (size j = 0; j < 31; ++j) {
        const double value = i + j < limits.size() ? limits[i + j] : 0;
        y.push_back(static_cast<TestType>(std::ldexp(j % 2 ? -value : value, exponent)));
      }
    }
  check_against_rule(y, 1);
}

TEST_CASE("quantize_mxfp4: what it wrote is reproduced exactly", "[mxfp4]") {
  std::mt19937 engine(2);
  std::vector<std::uint8_t> packed(8 * 64), scale(8 * 4);
  for (auto& byte : packed) byte = static_cast<std::uint8_t>(engine());
  for (auto& byte : scale) byte = static_cast<std::uint8_t>(engine() % 252);
  for (size group = 0; group < scale.size(); ++group) packed[group * 16] = 0x7f;  // a 6 in each group fixes its scale
  const auto x = dequantised<float>(packed, scale, 8);
  for (const int threads : {1, 2, 3}) {
    const Quantised q = quantised(x, 8, threads);
    CHECK(q.packed == packed);
    CHECK(q.scale == scale);
  }
}

TEST_CASE("quantize_mxfp4: NaN and infinity are named", "[mxfp4]") {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(3 * 64, 1.0f);
    x[2 * 64 + 33] = bad;
    std::vector<std::uint8_t> packed(3 * 32, 0xaa), scale(6, 0xaa);
    std::string text;
    try {
      quantize_mxfp4({}, view(x, 3, 64), view(packed, 3, 32), view(scale, 3, 2));
    } catch (const invalid_argument& e) {
      text = e.what();
    }
    CAPTURE(text);
    CHECK(text.find("quantize_mxfp4: x[2, 33] is ") == 0);
    CHECK(packed == std::vector<std::uint8_t>(3 * 32, 0xaa));
    CHECK(scale == std::vector<std::uint8_t>(6, 0xaa));
  }
}
