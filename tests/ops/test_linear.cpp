// SPDX-License-Identifier: Apache-2.0
// linear: accuracy, types, bits.
#include <limits>
#include <string>
#include <utility>

#include "ops/linear_support.hpp"

using namespace k3;
using namespace k3::test;

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
        check_worst(
            worst_error(x, [&](size n, size k) { return w[n * columns + k]; }, f, batch, rows, columns), 4e-7, 1.2e-6);
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
    for (const size batch : sizes{1, 2, 5, 6, 7, 9, 18, 33}) {
      const size rows = 21;
      CAPTURE(columns, batch);
      const Mxfp4Data m(rows, columns, 15);
      const auto x = random_values<float>(batch * columns, 16);
      std::vector<float> w(rows * columns);
      dequantize_mxfp4({.threads = 1}, m.matrix(), view(w, rows, columns));
      for (const Isa isa : all_isas()) {
        const auto packed = product<float>({1, isa}, x, m.matrix(), batch, rows);
        check_same_bits(packed, product<float>({1, isa}, x, view(w, rows, columns), batch, rows));
        check_worst(
            worst_error(x, [&](size n, size k) { return m.value(n, k); }, packed, batch, rows, columns), 4e-7, 1.2e-6);
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
