// SPDX-License-Identifier: Apache-2.0
#include <k3/ops/sigmoid_topk.hpp>

#include <algorithm>
#include <numeric>

#include "support/compare.hpp"
#include "support/ops_fixture.hpp"
#include "support/thrown_by.hpp"

using namespace k3;
using namespace k3::test;

namespace {

template <class Real>
struct Routed {
  std::vector<id> ids;
  std::vector<Real> weights;
};

template <class Real, class Bias>
Routed<Real> route(const std::vector<Real>& logits, const std::vector<Bias>& bias, std::size_t k,
                   bool renormalize = true, float scale = 1.0f, int threads = 0) {
  const std::size_t rows = logits.size() / bias.size();
  Routed<Real> r{std::vector<id>(rows * k, -7), std::vector<Real>(rows * k)};
  sigmoid_topk(host{.threads = threads}, view(logits, rows, bias.size()), view(bias), k, renormalize, scale,
               view(r.ids, rows, k), view(r.weights, rows, k));
  return r;
}

/// Written for reading: sort all experts of a row.
Routed<double> naive_route(const std::vector<double>& logits, const std::vector<double>& bias, std::size_t k,
                           bool renormalize, double scale) {
  Routed<double> r;
  for (std::size_t row = 0; row < logits.size() / bias.size(); ++row) {
    std::vector<double> p, score;
    for (std::size_t e = 0; e < bias.size(); ++e) {
      p.push_back(1 / (1 + std::exp(-logits[row * bias.size() + e])));
      score.push_back(p[e] + bias[e]);
    }
    std::vector<id> order(bias.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](id a, id b) {
      return score[static_cast<std::size_t>(a)] > score[static_cast<std::size_t>(b)];
    });
    double sum = 0;
    for (std::size_t j = 0; j < k; ++j) sum += p[static_cast<std::size_t>(order[j])];
    for (std::size_t j = 0; j < k; ++j) {
      r.ids.push_back(order[j]);
      r.weights.push_back(p[static_cast<std::size_t>(order[j])] * scale / (renormalize && k > 1 ? sum + 1e-20 : 1.0));
    }
  }
  return r;
}

template <class Real>
constexpr Real not_a_number = std::numeric_limits<Real>::quiet_NaN();
template <class Real>
constexpr Real infinite = std::numeric_limits<Real>::infinity();

}  // namespace

TEMPLATE_TEST_CASE("sigmoid_topk gives the fixture's experts and weights", "[sigmoid_topk]", float, double) {
  for (const OpsCase& c : ops_cases("sigmoid_topk")) {
    INFO(c.name);
    const auto got = route(converted<TestType>(c.tensor("logits").values), converted<TestType>(c.tensor("bias").values),
                           c.params["k"].template get<std::size_t>(), c.params["renormalize"].template get<bool>(),
                           c.params["scale"].template get<float>());
    check(compare(got.ids, c.tensor("ids").values, 0));
    check(compare(got.weights, c.tensor("weights").values, c.rtol, c.atol));
  }
}

TEMPLATE_TEST_CASE("sigmoid_topk at known points (cases 13, 14, 17, 18, 22)", "[sigmoid_topk]", float, double) {
  using Vector = std::vector<TestType>;
  auto r = route(Vector{-18, -17, -20, -30}, Vector{12, 12, 0, 0}, 2);
  if (r.ids[0] == 1) {  // in double the scores differ; in float they are equal
    std::swap(r.ids[0], r.ids[1]);
    std::swap(r.weights[0], r.weights[1]);
  }
  CHECK(r.ids == std::vector<id>{0, 1});
  check(compare(r.weights, std::vector<double>{0.2689414, 0.7310586}, 1e-5));

  r = route(Vector{2, 1, 0}, Vector{-10, 0, 0}, 2);
  CHECK(r.ids == std::vector<id>{1, 2});
  check(compare(r.weights, std::vector<double>{0.5938455, 0.4061545}, 1e-5));

  r = route(Vector{1, 0, -1, -2}, Vector(4), 2, false, 2.5f);
  check(compare(r.weights, std::vector<double>{1.8276464, 1.25}, 1e-5));

  r = route(Vector{3, 3, 3, 3}, Vector(4, TestType(0.5)), 2);
  CHECK(r.ids == std::vector<id>{0, 1});
  CHECK(r.weights == Vector{0.5, 0.5});

  r = route(Vector{TestType(1.0), TestType(1.001), TestType(1.002)}, Vector(3), 2);
  CHECK(r.ids == std::vector<id>{2, 1});
  check(compare(r.weights, std::vector<double>{0.5000672, 0.4999328}, 1e-6));
}

TEMPLATE_TEST_CASE("sigmoid_topk finds the last 16 of 896 (case 16)", "[sigmoid_topk]", float, double) {
  std::vector<TestType> logits(896);
  for (std::size_t i = 880; i < 896; ++i) logits[i] = static_cast<TestType>(1 + static_cast<double>(i - 880) / 100);
  auto r = route(logits, std::vector<TestType>(896), 16);
  std::vector<id> want(16);
  std::iota(want.begin(), want.end(), 880);
  CHECK(std::is_sorted(r.ids.rbegin(), r.ids.rend()));  // the largest logit first
  std::sort(r.ids.begin(), r.ids.end());
  CHECK(r.ids == want);
}

TEMPLATE_TEST_CASE("sigmoid_topk with infinite logits and biases (case 19)", "[sigmoid_topk]", float, double) {
  using Vector = std::vector<TestType>;
  const TestType i = infinite<TestType>;
  for (const TestType bias : {TestType(0), TestType(-3), -i}) {
    const auto r = route(Vector(6, -i), Vector(6, bias), 3);
    CHECK(r.ids == std::vector<id>{0, 1, 2});
    CHECK(r.weights == Vector{0, 0, 0});
  }
  const auto r = route(Vector{-i, i, 0, i}, Vector{0, 0, 1, -i}, 4, false);
  CHECK(r.ids == std::vector<id>{2, 1, 0, 3});  // scores 0, 1, 1.5, -inf
  CHECK(r.weights == Vector{0.5, 1, 0, 1});
}

TEMPLATE_TEST_CASE("sigmoid_topk reports NaN and leaves the other rows alone (case 15)", "[sigmoid_topk]", float,
                   double) {
  const std::size_t rows = 5, experts = 9, k = 3;
  const auto clean = converted<TestType>(random_normal(rows * experts, 11));
  const auto bias = converted<TestType>(random_normal(experts, 12, 0.1));
  const auto want = route(clean, bias, k);
  for (const bool all : {false, true})
    for (const std::size_t bad : {0u, 2u, 4u}) {
      auto logits = clean;
      for (std::size_t e = all ? 0 : 7; e < (all ? experts : 8); ++e)
        logits[bad * experts + e] = not_a_number<TestType>;
      Routed<TestType> r{std::vector<id>(rows * k, -7), std::vector<TestType>(rows * k, TestType(-7))};
      CHECK(thrown_by([&] {
              sigmoid_topk(host{}, view(logits, rows, experts), view(bias), k, true, 1.0f, view(r.ids, rows, k),
                           view(r.weights, rows, k));
            }) == "sigmoid_topk/logits of row " + std::to_string(bad));
      auto expected = want;
      for (std::size_t j = 0; j < k; ++j) {
        expected.ids[bad * k + j] = static_cast<id>(j);
        expected.weights[bad * k + j] = 0;
      }
      CHECK(r.ids == expected.ids);
      check(same_bits(r.weights, expected.weights));

      std::vector<RowStatus> status(rows, RowStatus::ok);
      k3::detail::route_rows(host{}, view(logits, rows, experts), view(bias), k, true, TestType(1),
                             view(r.ids, rows, k), view(r.weights, rows, k), view(status));
      for (std::size_t row = 0; row < rows; ++row)
        CHECK(status[row] == (row == bad ? RowStatus::nan_router_logits : RowStatus::ok));
    }
}

TEST_CASE("sigmoid_topk: float and double against the sorted oracle, within the stated bound", "[sigmoid_topk]") {
  for (const std::size_t experts : {1u, 2u, 7u, 64u, 896u})
    for (const std::size_t k : {std::size_t{1}, (experts + 1) / 2, experts}) {
      INFO(experts << " experts, " << k << " chosen");
      const auto logits = converted<float>(random_normal(7 * experts, 13, 2.0));
      const auto bias = converted<float>(random_normal(experts, 14, 0.3));
      for (const bool renormalize : {false, true}) {
        const auto want = naive_route(converted<double>(logits), converted<double>(bias), k, renormalize, 2.446f);
        const auto exact = route(converted<double>(logits), bias, k, renormalize, 2.446f);
        CHECK(exact.ids == want.ids);
        check(compare(exact.weights, want.weights, 1e-14));
        const auto got = route(logits, bias, k, renormalize, 2.446f);
        if (k > 64) continue;  // among hundreds of chosen scores some are equal as floats and rank differently
        CHECK(got.ids == want.ids);
        check(compare(got.weights, want.weights, 1e-6));
      }
    }
}

TEST_CASE("sigmoid_topk: threads, other rows, run-time biases and rows that lie apart change no bit",
          "[sigmoid_topk]") {
  const std::size_t rows = 64, experts = 896, k = 16;
  const auto logits = converted<float>(random_normal(rows * experts, 15));
  const auto bias = converted<float>(random_normal(experts, 16, 0.1));
  const auto want = route(logits, bias, k, true, 1.0f, 1);
  for (const int threads : {2, 3}) {
    const auto r = route(logits, bias, k, true, 1.0f, threads);
    CHECK(r.ids == want.ids);
    check(same_bits(r.weights, want.weights));
  }
  const auto alone = route(std::vector<float>(logits.begin() + 9 * experts, logits.begin() + 10 * experts), bias, k);
  CHECK(alone.ids == std::vector<id>(want.ids.begin() + 9 * k, want.ids.begin() + 10 * k));
  check(same_bits(alone.weights, std::vector<float>(want.weights.begin() + 9 * k, want.weights.begin() + 10 * k)));

  std::vector<id> ids(rows * (k + 1), -7);
  std::vector<float> weights(rows * (k + 3), -7.0f);
  sigmoid_topk(host{}, view(logits, rows, experts), AnyVector<>(view(bias)), k, true, 1.0f,
               View<id, 2>{ids.data(), {rows, k}, {k + 1, 1}}, View<float, 2>{weights.data(), {rows, k}, {k + 3, 1}});
  for (std::size_t row = 0; row < rows; ++row) {
    CHECK(std::equal(&want.ids[row * k], &want.ids[row * k] + k, &ids[row * (k + 1)]));
    CHECK(std::equal(&want.weights[row * k], &want.weights[row * k] + k, &weights[row * (k + 3)]));
    CHECK(ids[row * (k + 1) + k] == -7);
    CHECK(weights[row * (k + 3) + k] == -7.0f);
  }
}

TEST_CASE("sigmoid_topk names what does not fit and changes nothing", "[sigmoid_topk]") {
  const std::vector<float> logits(8, 1.0f), bias(4), short_bias(3);
  std::vector<float> weights(4, 7.0f);
  std::vector<id> ids(4, 7);
  const auto call = [&](auto bias_view, std::size_t k, float scale, std::size_t id_columns) {
    return thrown_by([&] {
      sigmoid_topk(host{}, view(logits, 2, 4), bias_view, k, true, scale, view(ids.data(), 2, id_columns),
                   view(weights.data(), 2, 2));
    });
  };
  CHECK(call(view(bias), 0, 1, 2) == "sigmoid_topk/k");
  CHECK(call(view(bias), 5, 1, 2) == "sigmoid_topk/k");
  CHECK(call(view(short_bias), 2, 1, 2) == "sigmoid_topk/bias");
  CHECK(call(AnyVector<>{}, 2, 1, 2) == "sigmoid_topk/bias");
  CHECK(call(view(bias), 2, infinite<float>, 2) == "sigmoid_topk/scale");
  CHECK(call(view(bias), 2, 1, 1) == "sigmoid_topk/ids");
  CHECK(call(view(bias), 1, 1, 1) == "sigmoid_topk/weights");
  const std::vector<float> bad_bias{0, 0, not_a_number<float>, 0};
  CHECK(call(view(bad_bias), 2, 1, 2) == "sigmoid_topk/bias[2]");
  CHECK(ids == std::vector<id>(4, 7));
  CHECK(weights == std::vector<float>(4, 7.0f));
  sigmoid_topk(host{}, view(logits.data(), 0, 4), view(bias), 2, true, 1.0f, view(ids.data(), 0, 2),
               view(weights.data(), 0, 2));  // no rows: nothing to do
  CHECK(ids == std::vector<id>(4, 7));
}
