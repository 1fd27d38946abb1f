// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <k3/ops/dequantize_mxfp4.hpp>
#include <k3/ops/linear.hpp>

#include "support/catch.hpp"

using namespace k3;

namespace {

using sizes = std::initializer_list<size>;

std::vector<Isa> vector_isas() {
  std::vector<Isa> result;
  for (const Isa isa : {Isa::avx2, Isa::avx512})
    if (isa <= best_isa()) result.push_back(isa);
  return result;
}
std::vector<Isa> all_isas() {
  std::vector<Isa> result = vector_isas();
  result.push_back(Isa::plain);
  return result;
}

template <class T>
std::vector<T> random_values(size count, unsigned seed, bool positive = false) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (T& value : values) {
    const double drawn = normal(engine);
    value = static_cast<T>(positive ? std::fabs(drawn) : drawn);
  }
  return values;
}

/// A random MXFP4 matrix whose scales stay near 1.
struct Mxfp4Data {
  size rows, columns;
  std::vector<std::uint8_t> packed, scale;
  Mxfp4Data(size n, size k, unsigned seed) : rows(n), columns(k), packed(n * k / 2), scale(n * k / 32) {
    std::mt19937 engine(seed);
    for (auto& byte : packed) byte = static_cast<std::uint8_t>(engine());
    for (auto& byte : scale) byte = static_cast<std::uint8_t>(120 + engine() % 12);
  }
  Mxfp4Matrix<> matrix() const {
    return {view(packed.data(), rows, columns / 2), view(scale.data(), rows, columns / 32)};
  }
  double value(size n, size k) const {
    static constexpr double table[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const unsigned byte = packed[(n * columns + k) / 2], code = k % 2 ? byte >> 4 : byte & 15u;
    return (code & 8u ? -1 : 1) * table[code & 7u] * std::ldexp(1.0, scale[(n * columns + k) / 32] - 127);
  }
};

/// Largest |difference| over sum |x||w| and over the largest result, against sums in double of the same inputs.
struct Worst {
  double to_terms = 0, to_largest = 0, got = 0, expected = 0;
  size b = 0, n = 0;
};

template <class X, class W, class Out>
Worst worst_error(const std::vector<X>& x, W weight, const std::vector<Out>& out, size batch, size rows, size columns) {
  Worst worst;
  double largest = 0, difference_max = 0;
  for (size b = 0; b < batch; ++b)
    for (size n = 0; n < rows; ++n) {
      double sum = 0, terms = 0;
      for (size k = 0; k < columns; ++k) {
        const double product = static_cast<double>(x[b * columns + k]) * weight(n, k);
        sum += product;
        terms += std::fabs(product);
      }
      const double got = static_cast<double>(out[b * rows + n]), difference = std::fabs(got - sum);
      largest = (std::max)(largest, std::fabs(sum));
      difference_max = (std::max)(difference_max, difference);
      if (!(difference <= worst.to_terms * terms)) worst = {difference / (terms > 0 ? terms : 1), 0, got, sum, b, n};
    }
  worst.to_largest = largest > 0 ? difference_max / largest : difference_max;
  return worst;
}

void check_worst(const Worst& worst, double bound_terms, double bound_largest) {
  INFO("worst element [" << worst.b << ", " << worst.n << "]: " << worst.got << " for " << worst.expected << ", "
                         << worst.to_terms << " of the terms' sum (bound " << bound_terms << "), " << worst.to_largest
                         << " of the largest result (bound " << bound_largest << ")");
  CHECK(worst.to_terms <= bound_terms);
  CHECK(worst.to_largest <= bound_largest);
}

template <class T>
void check_same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  REQUIRE(a.size() == b.size());
  size first = 0;
  while (first < a.size() && std::memcmp(&a[first], &b[first], sizeof(T)) == 0) ++first;
  if (first < a.size())
    FAIL_CHECK("element " << first << ": " << static_cast<double>(a[first]) << " and "
                          << static_cast<double>(b[first]));
}

template <class Out, class X, class Weight>
std::vector<Out> product(const host& exec, const std::vector<X>& x, const Weight& weight, size batch, size rows) {
  std::vector<Out> out(batch * rows, static_cast<Out>(7.0f));
  linear(exec, view(x.data(), batch, x.size() / batch), weight, view(out, batch, rows));
  return out;
}

template <class Out, class X, class Weight>
std::vector<Out> transposed(const host& exec, const std::vector<X>& x, const Weight& weight, size batch, size columns) {
  std::vector<Out> out(batch * columns, static_cast<Out>(7.0f));
  linear_transposed(exec, view(x.data(), batch, x.size() / batch), weight, view(out, batch, columns));
  return out;
}

const std::vector<size> odd_columns = {1, 2, 31, 32, 63, 64, 65, 96, 127, 129, 640, 1024 + 33, 4096 + 64 + 7};

}  // namespace

TEST_CASE("linear: float and bf16 against sums in double", "[linear]") {
  for (const Isa isa : all_isas())
    for (const size columns : odd_columns)
      for (const size batch : sizes{1, 2, 3, 4, 5, 9, 19}) {
        const size rows = columns > 1000 ? 19 : 37;
        CAPTURE(static_cast<int>(isa), columns, batch);
        const auto x = random_values<float>(batch * columns, 1);
        const auto w = random_values<float>(rows * columns, 2);
        const auto wb = random_values<bf16>(rows * columns, 3);
        const host exec{.threads = 1, .isa = isa};
        const auto f = product<float>(exec, x, view(w, rows, columns), batch, rows);
        check_worst(worst_error(
                        x, [&](size n, size k) { return w[n * columns + k]; }, f, batch, rows, columns),
                    4e-7, 1.2e-6);
        const auto b = product<float>(exec, x, view(wb, rows, columns), batch, rows);
        check_worst(
            worst_error(
                x, [&](size n, size k) { return static_cast<double>(wb[n * columns + k]); }, b, batch, rows, columns),
            4e-7, 1.2e-6);
      }
}

TEST_CASE("linear: accuracy at the model's widths", "[linear]") {
  for (const Isa isa : all_isas())
    for (const bool positive : {false, true})
      for (const size columns : sizes{7168, 12288, 33792}) {
        CAPTURE(static_cast<int>(isa), columns, positive);
        const size rows = 48, batch = 4;
        const auto x = random_values<float>(batch * columns, 4, positive);
        const auto w = random_values<bf16>(rows * columns, 5, positive);
        const auto out = product<float>({.threads = 1, .isa = isa}, x, view(w, rows, columns), batch, rows);
        const Worst worst = worst_error(
            x, [&](size n, size k) { return static_cast<double>(w[n * columns + k]); }, out, batch, rows, columns);
        // The plain version has 16 sums in place of 64, each four times as long.
        if (isa == Isa::plain)
          check_worst(worst, positive ? 1.5e-6 : 8e-8, 2.5e-6);
        else
          check_worst(worst, positive ? 5e-7 : 4e-8, 1.5e-6);
      }
}

TEST_CASE("linear: every element type of x, weight and out", "[linear]") {
  const size batch = 3, rows = 21, columns = 200;
  const auto x = random_values<double>(batch * columns, 6);
  const auto w = random_values<double>(rows * columns, 7);
  const auto xf = random_values<float>(batch * columns, 6), wf = random_values<float>(rows * columns, 7);
  const auto xb = random_values<bf16>(batch * columns, 6), wb = random_values<bf16>(rows * columns, 7);
  const auto at = [&](const auto& values) {
    return [&](size n, size k) { return static_cast<double>(values[n * columns + k]); };
  };
  for (const Isa isa : all_isas()) {
    const host exec{.threads = 1, .isa = isa};
    check_worst(
        worst_error(x, at(w), product<double>(exec, x, view(w, rows, columns), batch, rows), batch, rows, columns),
        1e-15, 1e-14);
    check_worst(
        worst_error(xf, at(w), product<double>(exec, xf, view(w, rows, columns), batch, rows), batch, rows, columns),
        1e-15, 1e-14);
    check_worst(
        worst_error(x, at(wb), product<double>(exec, x, view(wb, rows, columns), batch, rows), batch, rows, columns),
        1e-15, 1e-14);
    check_worst(
        worst_error(xb, at(wf), product<float>(exec, xb, view(wf, rows, columns), batch, rows), batch, rows, columns),
        4e-7, 1.2e-6);
    // A bf16 result is the float result rounded once.
    const auto f = product<float>(exec, xb, view(wb, rows, columns), batch, rows);
    const auto b = product<bf16>(exec, xb, view(wb, rows, columns), batch, rows);
    const auto d = product<double>(exec, xb, view(wb, rows, columns), batch, rows);
    for (size i = 0; i < f.size(); ++i) {
      CHECK(b[i].bits == bf16(f[i]).bits);
      CHECK(d[i] == static_cast<double>(f[i]));
    }
    // MXFP4 in double.
    const Mxfp4Data m(rows, 192, 8);
    const std::vector<double> x192(x.begin(), x.begin() + 192 * 3);
    check_worst(worst_error(
                    x192, [&](size n, size k) { return m.value(n, k); },
                    product<double>(exec, x192, m.matrix(), 3, rows), 3, rows, 192),
                1e-15, 1e-14);
  }
}

TEST_CASE("linear: avx2, avx512, thread counts and batches give the same bits", "[linear]") {
  for (const size columns : odd_columns)
    for (const size rows : sizes{1, 3, 16, 100}) {
      CAPTURE(columns, rows);
      const size batch = 23;
      const auto x = random_values<bf16>(batch * columns, 9);
      const auto w = random_values<bf16>(rows * columns, 10);
      const auto wf = random_values<float>(rows * columns, 11);
      const host first{.threads = 1, .isa = best_isa()};
      const auto expected = product<float>(first, x, view(w, rows, columns), batch, rows);
      const auto expected_f = product<float>(first, x, view(wf, rows, columns), batch, rows);
      for (const Isa isa : vector_isas())
        for (const int threads : {1, 2, 3}) {
          check_same_bits(product<float>({threads, isa}, x, view(w, rows, columns), batch, rows), expected);
          check_same_bits(product<float>({threads, isa}, x, view(wf, rows, columns), batch, rows), expected_f);
        }
      for (const Isa isa : all_isas()) {
        const auto whole = product<float>({1, isa}, x, view(w, rows, columns), batch, rows);
        for (size b = 0; b < batch; ++b)
          for (const size count : sizes{1, 2, 3, 4, 6}) {
            if (b + count > batch) continue;
            const std::vector<bf16> part_x(&x[b * columns], &x[b * columns] + count * columns);
            const std::vector<float> part(&whole[b * rows], &whole[b * rows] + count * rows);
            check_same_bits(product<float>({1, isa}, part_x, view(w, rows, columns), count, rows), part);
          }
      }
    }
}

TEST_CASE("linear: threads share large products without changing a bit", "[linear]") {
  const size batch = 2, rows = 1001, columns = 1024;
  const auto x = random_values<float>(batch * columns, 12);
  const auto w = random_values<bf16>(rows * columns, 13);
  const Mxfp4Data m(rows, columns, 14);
  for (const Isa isa : all_isas()) {
    const auto one = product<float>({1, isa}, x, view(w, rows, columns), batch, rows);
    const auto one_m = product<float>({1, isa}, x, m.matrix(), batch, rows);
    for (const int threads : {2, 3, 0}) {
      check_same_bits(product<float>({threads, isa}, x, view(w, rows, columns), batch, rows), one);
      check_same_bits(product<float>({threads, isa}, x, m.matrix(), batch, rows), one_m);
    }
  }
}

TEST_CASE("linear: an MXFP4 product has the bits of dequantise, then multiply", "[linear][mxfp4]") {
  for (const size columns : sizes{32, 64, 96, 640, 4096 + 32, 8192 + 96})
    for (const size batch : sizes{1, 2, 7, 33}) {
      const size rows = 21;
      CAPTURE(columns, batch);
      const Mxfp4Data m(rows, columns, 15);
      const auto x = random_values<float>(batch * columns, 16);
      std::vector<float> w(rows * columns);
      dequantize_mxfp4({.threads = 1}, m.matrix(), view(w, rows, columns));
      for (const Isa isa : all_isas()) {
        const auto packed = product<float>({1, isa}, x, m.matrix(), batch, rows);
        check_same_bits(packed, product<float>({1, isa}, x, view(w, rows, columns), batch, rows));
        check_worst(worst_error(
                        x, [&](size n, size k) { return m.value(n, k); }, packed, batch, rows, columns),
                    4e-7, 1.2e-6);
      }
      const auto best = product<float>({1}, x, m.matrix(), batch, rows);
      for (const Isa isa : vector_isas()) check_same_bits(product<float>({1, isa}, x, m.matrix(), batch, rows), best);
    }
}

TEST_CASE("linear: every E2M1 code under every scale byte", "[linear][mxfp4]") {
  // Row n has scale byte n; column c of the first 32 holds code c % 16. x picks one column at a time.
  std::vector<std::uint8_t> packed(256 * 16), scale(256);
  for (size n = 0; n < 256; ++n) {
    scale[n] = static_cast<std::uint8_t>(n);
    for (size i = 0; i < 16; ++i) packed[n * 16 + i] = static_cast<std::uint8_t>((2 * i % 16) | (2 * i + 1) % 16 << 4);
  }
  const Mxfp4Matrix<> matrix{view(std::as_const(packed), 256, 16), view(std::as_const(scale), 256, 1)};
  static constexpr double table[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (const Isa isa : all_isas())
    for (size column = 0; column < 16; ++column) {
      std::vector<float> x(32, 0.0f), out;
      x[column] = x[column + 16] = 0.5f;  // the code twice, halved
      out = product<float>({1, isa}, x, matrix, 1, 256);
      for (int n = 0; n < 253; ++n) {  // later rows hold infinities or NaN, which a zero in x does not hide
        const double expected = (column & 8 ? -1 : 1) * table[column & 7] * std::ldexp(1.0, n - 127);
        CAPTURE(static_cast<int>(isa), column, n);
        CHECK(static_cast<double>(out[static_cast<size>(n)]) == expected);
      }
      for (size n = 253; n < 256; ++n) CHECK(std::isnan(out[n]));
    }
}

TEST_CASE("linear: strided rows, AnyMatrix, padding is not touched", "[linear]") {
  const size batch = 5, rows = 18, columns = 100;
  const auto x = random_values<float>(batch * columns, 17);
  const auto w = random_values<bf16>(rows * columns, 18);
  const auto expected = product<float>({1}, x, view(w, rows, columns), batch, rows);
  CHECK(product<float>({1}, x, AnyMatrix<>(view(w, rows, columns)), batch, rows) == expected);
  const Mxfp4Data m(rows, 96, 19);
  const std::vector<float> x96(x.begin(), x.begin() + 96);
  CHECK(product<float>({1}, x96, AnyMatrix<>(m.matrix()), 1, rows) == product<float>({1}, x96, m.matrix(), 1, rows));

  // Rows of x, of the weight and of out in the middle of wider ones; x and out share a buffer, side by side.
  const size pitch = 3 + columns + 5 + rows + 2;
  std::vector<float> buffer(batch * pitch, 99.0f);
  std::vector<bf16> wide(rows * (columns + 9), bf16(std::numeric_limits<float>::quiet_NaN()));
  const View<float, 2> x_view{buffer.data() + 3, {batch, columns}, {pitch, 1}};
  const View<float, 2> out_view{buffer.data() + 3 + columns + 5, {batch, rows}, {pitch, 1}};
  const View<bf16, 2> w_view{wide.data() + 4, {rows, columns}, {columns + 9, 1}};
  for (size b = 0; b < batch; ++b)
    for (size k = 0; k < columns; ++k) x_view(b, k) = x[b * columns + k];
  for (size n = 0; n < rows; ++n)
    for (size k = 0; k < columns; ++k) w_view(n, k) = w[n * columns + k];
  linear({1}, x_view, w_view, out_view);
  size untouched = 0;
  for (const float value : buffer) untouched += value == 99.0f;
  CHECK(untouched == batch * 10);
  for (size b = 0; b < batch; ++b)
    for (size n = 0; n < rows; ++n) CHECK(out_view(b, n) == expected[b * rows + n]);
}

TEST_CASE("linear: empty shapes", "[linear]") {
  for (const Isa isa : all_isas()) {
    const std::vector<float> x(12, 1.0f);
    std::vector<float> out(6, 5.0f);
    linear({1, isa}, view(x.data(), 3, 0), view(x.data(), 2, 0), view(out, 3, 2));
    CHECK(out == std::vector<float>(6, 0.0f));
    out.assign(6, 5.0f);
    linear({1, isa}, view(x.data(), 0, 4), view(x.data(), 2, 4), view(out.data(), 0, 2));
    linear({1, isa}, view(x.data(), 3, 4), view(x.data(), 0, 4), view(out.data(), 3, 0));
    linear({1, isa}, view(static_cast<const float*>(nullptr), 0, 0), view(static_cast<const float*>(nullptr), 0, 0),
           view(static_cast<float*>(nullptr), 0, 0));
    linear_transposed({1, isa}, view(x.data(), 0, 4), view(x.data(), 4, 2), view(out.data(), 0, 2));
    linear_transposed({1, isa}, view(x.data(), 3, 4), view(x.data(), 4, 0), view(out.data(), 3, 0));
    CHECK(out == std::vector<float>(6, 5.0f));
    linear_transposed({1, isa}, view(x.data(), 3, 0), view(x.data(), 0, 2), view(out, 3, 2));
    CHECK(out == std::vector<float>(6, 0.0f));
  }
}

TEST_CASE("linear: what does not fit is refused and changes nothing", "[linear]") {
  const size batch = 2, rows = 4, columns = 64;
  std::vector<float> x(batch * columns, 1.0f), w(rows * columns, 1.0f), out(batch * rows, 5.0f);
  const auto xv = view(x, batch, columns);
  const auto wv = view(w, rows, columns);
  const auto ov = view(out, batch, rows);
  const host exec{1};
  CHECK_THROWS_AS(linear(exec, xv, view(w.data(), rows, columns - 1), ov), invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, view(w.data(), rows - 1, columns), ov), invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, wv, view(out.data(), batch - 1, rows)), invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, view(static_cast<float*>(nullptr), rows, columns), ov), invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, AnyMatrix<>(), ov), invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, AnyMatrix<>(view(w.data(), rows, columns - 1)), ov), invalid_argument);
  CHECK_THROWS_AS(
      linear(exec, View<float, 2>{x.data(), {batch, columns / 2}, {columns, 2}}, view(w.data(), rows, columns / 2), ov),
      invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, wv, view(x.data() + 60, batch, rows)), invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, wv, view(w.data() + rows * columns - 1, batch, rows)), invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, wv, View<float, 2>{x.data() + 30, {batch, rows}, {columns, 1}}), invalid_argument);
  std::vector<float> wide(200, 5.0f);  // rows of out that reach into the next row of x
  CHECK_THROWS_AS(linear(exec, View<float, 2>{wide.data(), {batch, columns}, {columns + 2, 1}}, wv,
                         View<float, 2>{wide.data() + columns, {batch, rows}, {columns + 2, 1}}),
                  invalid_argument);
  CHECK(wide == std::vector<float>(200, 5.0f));
  CHECK_THROWS_AS(linear_transposed(exec, ov, wv, view(x.data(), batch, columns - 1)), invalid_argument);
  CHECK_THROWS_AS(linear_transposed(exec, ov, wv, view(w.data(), batch, columns)), invalid_argument);
  CHECK_THROWS_AS(linear_transposed(exec, ov, AnyMatrix<>(), xv), invalid_argument);

  const Mxfp4Data m(rows, columns, 20);
  CHECK_THROWS_AS(linear(exec, view(x.data(), batch, 40),
                         Mxfp4Matrix<>{view(m.packed.data(), rows, 20), view(m.scale.data(), rows, 1)}, ov),
                  invalid_argument);
  CHECK_THROWS_AS(linear(exec, xv, Mxfp4Matrix<>{view(m.packed.data(), rows, 32), view(m.scale.data(), rows, 1)}, ov),
                  invalid_argument);
  CHECK_THROWS_AS(linear_transposed(exec, ov, AnyMatrix<>(m.matrix()), xv), invalid_argument);
  CHECK(out == std::vector<float>(batch * rows, 5.0f));
  CHECK(x == std::vector<float>(batch * columns, 1.0f));
  try {
    linear(exec, xv, view(w.data(), rows, columns - 1), ov);
  } catch (const invalid_argument& e) {
    CHECK(e.operation() == "linear");
    CHECK(e.argument() == "weight");
    CHECK(std::string(e.what()) == "linear: weight is [4, 63], expected [4, 64]");
  }
}

TEST_CASE("linear: NaN and infinity stay in their row and column", "[linear]") {
  const size batch = 5, rows = 33, columns = 100;
  auto x = random_values<float>(batch * columns, 21);
  auto w = random_values<bf16>(rows * columns, 22);
  for (const Isa isa : all_isas()) {
    auto clean = product<float>({1, isa}, x, view(w, rows, columns), batch, rows);
    auto bad = x;
    bad[2 * columns + 99] = std::numeric_limits<float>::quiet_NaN();
    auto got = product<float>({1, isa}, bad, view(w, rows, columns), batch, rows);
    for (size n = 0; n < rows; ++n) {
      CHECK(std::isnan(got[2 * rows + n]));
      got[2 * rows + n] = clean[2 * rows + n];
    }
    check_same_bits(got, clean);
    auto bad_w = w;
    bad_w[32 * columns + 99] = bf16(std::numeric_limits<float>::infinity());
    got = product<float>({1, isa}, x, view(bad_w, rows, columns), batch, rows);
    for (size b = 0; b < batch; ++b) {
      CHECK(std::isinf(got[b * rows + 32]));
      got[b * rows + 32] = clean[b * rows + 32];
    }
    check_same_bits(got, clean);
  }
}

TEST_CASE("linear_transposed: against sums in double, same bits everywhere", "[linear]") {
  for (const size columns : sizes{1, 7, 8, 15, 16, 17, 64, 100, 300, 512, 1000})
    for (const size rows : sizes{1, 5, 128, 257}) {
      const size batch = 21;
      CAPTURE(columns, rows);
      const auto x = random_values<bf16>(batch * rows, 23);
      const auto w = random_values<bf16>(rows * columns, 24);
      const auto wf = random_values<float>(rows * columns, 25);
      const auto weight = [&](size k, size n) { return static_cast<double>(w[n * columns + k]); };
      for (const Isa isa : all_isas()) {
        const auto out = transposed<float>({1, isa}, x, view(w, rows, columns), batch, columns);
        const Worst worst = worst_error(x, weight, out, batch, columns, rows);
        check_worst(worst, 4e-7, 1e-6);
        CHECK(transposed<float>({1, isa}, x, AnyMatrix<>(view(w, rows, columns)), batch, columns) == out);
        const auto bits = transposed<bf16>({1, isa}, x, view(w, rows, columns), batch, columns);
        for (size i = 0; i < out.size(); ++i) REQUIRE(bits[i].bits == bf16(out[i]).bits);
        for (size b = 0; b < batch; ++b) {
          const std::vector<bf16> row(&x[b * rows], &x[b * rows] + rows);
          const std::vector<float> part(&out[b * columns], &out[b * columns] + columns);
          check_same_bits(transposed<float>({1, isa}, row, view(w, rows, columns), 1, columns), part);
        }
        for (const int threads : {2, 3})
          check_same_bits(transposed<float>({threads, isa}, x, view(w, rows, columns), batch, columns), out);
      }
      for (const Isa isa : vector_isas()) {
        check_same_bits(transposed<float>({1, isa}, x, view(w, rows, columns), batch, columns),
                        transposed<float>({1}, x, view(w, rows, columns), batch, columns));
        check_same_bits(transposed<float>({1, isa}, x, view(wf, rows, columns), batch, columns),
                        transposed<float>({1}, x, view(wf, rows, columns), batch, columns));
      }
      const auto xd = random_values<double>(batch * rows, 26);
      const auto wd = random_values<double>(rows * columns, 27);
      check_worst(worst_error(
                      xd, [&](size k, size n) { return wd[n * columns + k]; },
                      transposed<double>({1}, xd, view(wd, rows, columns), batch, columns), batch, columns, rows),
                  1e-15, 1e-14);
    }
}

TEST_CASE("linear_transposed: a head's block of a larger matrix", "[linear]") {
  const size heads = 3, head_rows = 20, columns = 70, batch = 2;
  const auto w = random_values<bf16>(heads * head_rows * columns, 28);
  const auto x = random_values<float>(batch * heads * head_rows, 29);
  std::vector<float> out(batch * heads * columns, 5.0f);
  for (size h = 0; h < heads; ++h)
    linear_transposed({1}, View<const float, 2>{x.data() + h * head_rows, {batch, head_rows}, {heads * head_rows, 1}},
                      view(w.data() + h * head_rows * columns, head_rows, columns),
                      View<float, 2>{out.data() + h * columns, {batch, columns}, {heads * columns, 1}});
  for (size b = 0; b < batch; ++b)
    for (size h = 0; h < heads; ++h)
      for (size k = 0; k < columns; ++k) {
        double sum = 0;
        for (size n = 0; n < head_rows; ++n)
          sum += static_cast<double>(x[(b * heads + h) * head_rows + n]) *
                 static_cast<double>(w[(h * head_rows + n) * columns + k]);
        CAPTURE(b, h, k, sum);
        CHECK(std::fabs(static_cast<double>(out[(b * heads + h) * columns + k]) - sum) < 1e-5);
      }
}
