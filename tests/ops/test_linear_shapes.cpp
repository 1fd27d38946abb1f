// SPDX-License-Identifier: Apache-2.0
// linear: strides, empty shapes, refusals, NaN; linear_transposed.
#include <limits>
#include <string>
#include <utility>

#include "ops/linear_support.hpp"

using namespace k3;
using namespace k3::test;

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
