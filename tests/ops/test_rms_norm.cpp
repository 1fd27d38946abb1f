// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <k3/ops/rms_norm.hpp>

#include "support/compare.hpp"
#include "support/ops_fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

std::vector<double> naive_rms_norm(const std::vector<double>& x, const std::vector<double>& w, double eps) {
  const std::size_t n = w.size();
  std::vector<double> y(x.size());
  for (std::size_t row = 0; row < x.size() / n; ++row) {
    long double squares = 0;
    for (std::size_t i = 0; i < n; ++i) squares += static_cast<long double>(x[row * n + i]) * x[row * n + i];
    for (std::size_t i = 0; i < n; ++i)
      y[row * n + i] = static_cast<double>(x[row * n + i] / std::sqrt(squares / static_cast<double>(n) + eps) * w[i]);
  }
  return y;
}

template <class X, class W>
std::vector<X> norm(const std::vector<X>& x, const std::vector<W>& w, double eps, int threads = 0) {
  std::vector<X> y(x.size());
  rms_norm(host{.threads = threads}, view(x, x.size() / w.size(), w.size()), view(w),
           static_cast<accumulator_t<X>>(eps), view(y, x.size() / w.size(), w.size()));
  return y;
}

}  // namespace

TEMPLATE_TEST_CASE("rms_norm gives the fixture's values", "[rms_norm]", float, double) {
  for (const OpsCase& c : ops_cases("rmsnorm")) {
    INFO(c.name);
    const auto y = norm(converted<TestType>(c.tensor("x").values), converted<TestType>(c.tensor("weight").values),
                        c.params["eps"].template get<double>());
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
  }
}

TEST_CASE("rms_norm: float and double against the naive formula, within the stated bound", "[rms_norm]") {
  for (const std::size_t n : {1u, 2u, 15u, 16u, 17u, 33u, 576u, 7168u}) {
    INFO("n = " << n);
    const auto x = converted<float>(random_normal(3 * n, 5, 2.0)), w = converted<float>(random_normal(n, 6));
    const auto want = naive_rms_norm(converted<double>(x), converted<double>(w), 1e-5);
    check(compare(norm(x, w, 1e-5), want, 6e-7));
    check(compare(norm(converted<double>(x), w, 1e-5), want, 2e-15));
  }
}

TEST_CASE("rms_norm: the weight multiplies as it is, and eps counts", "[rms_norm]") {
  check(compare(norm(std::vector<double>{3, 4}, std::vector<double>{0, 2}, 0.0),
                std::vector<double>{0, 8 / std::sqrt(12.5)}, 1e-15));
  const auto y = norm(std::vector<double>{1e-3, 0}, std::vector<double>{1, 1}, 1e-5);
  check(compare(y, std::vector<double>{1e-3 / std::sqrt(0.5e-6 + 1e-5), 0}, 1e-14));
  CHECK(norm(std::vector<float>{0, 0, 0}, std::vector<float>{1, 2, 3}, 1e-5) == std::vector<float>{0, 0, 0});
}

TEST_CASE("rms_norm rounds once, after the weight", "[rms_norm]") {
  const auto x = converted<bf16>(random_normal(4 * 512, 7)), w = converted<bf16>(random_normal(512, 8));
  const auto exact = naive_rms_norm(converted<double>(x), converted<double>(w), 1e-5);
  auto twice = naive_rms_norm(converted<double>(x), std::vector<double>(512, 1.0), 1e-5);
  const auto got = norm(x, w, 1e-5);
  std::size_t once = 0, both = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double normed = static_cast<double>(bf16(twice[i])) * static_cast<double>(w[i % 512]);
    once += got[i].bits == bf16(exact[i]).bits;
    both += got[i].bits == bf16(normed).bits;
  }
  INFO(once << " of " << got.size() << " equal to one rounding, " << both << " to two");
  CHECK(once >= got.size() - 4);  // float's own error can tip a tie
  CHECK(both < got.size() * 9 / 10);
}

TEST_CASE("rms_norm: threads, other rows, run-time weights and doing it in place change no bit", "[rms_norm]") {
  const auto x = converted<float>(random_normal(64 * 576, 9));
  const auto w = converted<bf16>(random_normal(576, 10));
  const auto want = norm(x, w, 1e-5, 1);
  for (const int threads : {2, 3}) check(same_bits(norm(x, w, 1e-5, threads), want));
  const std::vector<float> alone(x.begin() + 5 * 576, x.begin() + 6 * 576);
  check(same_bits(norm(alone, w, 1e-5), std::vector<float>(want.begin() + 5 * 576, want.begin() + 6 * 576)));
  auto in_place = x;
  rms_norm(host{}, view(in_place, 64, 576), AnyVector<>(view(w)), 1e-5f, view(in_place, 64, 576));
  check(same_bits(in_place, want));
}

TEST_CASE("rms_norm takes rows that lie apart", "[rms_norm]") {
  const std::vector<float> x{1, 2, 99, 3, 4, 99}, w{1, 1};
  std::vector<float> y(4, 0.0f);
  rms_norm(host{}, View<const float, 2>{x.data(), {2, 2}, {3, 1}}, view(w), 0.0f, view(y, 2, 2));
  check(same_bits(y, norm(std::vector<float>{1, 2, 3, 4}, w, 0.0)));
}

TEST_CASE("rms_norm names what does not fit and changes nothing", "[rms_norm]") {
  const std::vector<float> x(6, 1.0f), w(2, 1.0f);
  std::vector<float> y(6, 7.0f);
  try {
    rms_norm(host{}, view(x, 2, 3), view(w), 1e-5f, view(y, 2, 3));
    FAIL("nothing thrown");
  } catch (const invalid_argument& e) {
    CHECK(e.operation() == "rms_norm");
    CHECK(e.argument().find("weight") == 0);
  }
  CHECK_THROWS_AS(rms_norm(host{}, view(x, 2, 3), view(x.data(), 3), 1e-5f, view(y, 3, 2)), invalid_argument);
  CHECK_THROWS_AS(rms_norm(host{}, view(x, 2, 3), AnyVector<>{}, 1e-5f, view(y, 2, 3)), invalid_argument);
  for (const float eps : {-1e-5f, INFINITY, NAN})
    CHECK_THROWS_AS(rms_norm(host{}, view(x, 2, 3), view(x.data(), 3), eps, view(y, 2, 3)), invalid_argument);
  CHECK(y == std::vector<float>(6, 7.0f));
}

TEST_CASE("rms_norm refuses a weight that is strided or has no memory", "[rms_norm]") {
  const std::vector<float> x(4, 1.0f), w{1, -9, 2, -9, 3, -9, 4, -9};
  std::vector<float> y(4, 7.0f);
  const auto refused = [&](const float* data, size stride) {
    try {
      rms_norm(host{}, view(x, 1, 4), View<const float, 1>{data, {4}, {stride}}, 0.0f, view(y, 1, 4));
      FAIL("nothing thrown");
    } catch (const invalid_argument& e) {
      CHECK(e.argument() == "weight");
    }
    CHECK(y == std::vector<float>(4, 7.0f));
  };
  refused(w.data(), 2);
  refused(nullptr, 1);
}
