// SPDX-License-Identifier: Apache-2.0
#include <k3/ops/attnres_softmax_mix.hpp>

#include <algorithm>

#include "support/compare.hpp"
#include "support/ops_fixture.hpp"
#include "support/thrown_by.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// Sources [n + 1, rows, hidden], the running stream last.
struct Problem {
  std::size_t stored, rows, hidden;
  std::vector<double> sources, norm, proj;
};

struct Mixture {
  std::vector<double> out, probs;
};

Mixture naive_mix(const Problem& p, double eps) {
  const std::size_t n = p.stored + 1, h = p.hidden;
  Mixture m{std::vector<double>(p.rows * h), {}};
  for (std::size_t row = 0; row < p.rows; ++row) {
    std::vector<double> score(n);
    for (std::size_t j = 0; j < n; ++j) {
      const double* s = &p.sources[(j * p.rows + row) * h];
      double squares = 0;
      for (std::size_t i = 0; i < h; ++i) squares += s[i] * s[i];
      for (std::size_t i = 0; i < h; ++i)
        score[j] += s[i] / std::sqrt(squares / static_cast<double>(h) + eps) * p.norm[i] * p.proj[i];
    }
    const double most = *std::max_element(score.begin(), score.end());
    double sum = 0;
    for (const double s : score) sum += std::exp(s - most);
    for (std::size_t j = 0; j < n; ++j) {
      m.probs.push_back(std::exp(score[j] - most) / sum);
      for (std::size_t i = 0; i < h; ++i) m.out[row * h + i] += m.probs.back() * p.sources[(j * p.rows + row) * h + i];
    }
  }
  return m;
}

template <class T>
struct Mixed {
  std::vector<accumulator_t<T>> out, probs;
};

/// attnres_mix with everything stored as T.
template <class T>
Mixed<T> mixed(const Problem& p, double eps, float mix = 1.0f, int threads = 0) {
  const auto sources = converted<T>(p.sources), norm = converted<T>(p.norm), proj = converted<T>(p.proj);
  const std::size_t n = p.stored, r = p.rows, h = p.hidden;
  Mixed<T> m{std::vector<accumulator_t<T>>(r * h), std::vector<accumulator_t<T>>(r * (n + 1))};
  attnres_mix(host{.threads = threads}, view(sources.data(), n, r, h), view(sources.data() + n * r * h, r, h),
              view(norm), view(proj), static_cast<accumulator_t<T>>(eps), mix, view(m.out, r, h),
              view(m.probs, r, n + 1));
  return m;
}

/// Values that every type stores exactly.
Problem random_problem(std::size_t stored, std::size_t rows, std::size_t hidden, std::uint32_t seed,
                       double score = 1.0) {
  const auto exact = [](const std::vector<double>& values) { return converted<double>(converted<bf16>(values)); };
  return {stored,
          rows,
          hidden,
          exact(random_normal((stored + 1) * rows * hidden, seed)),
          exact(random_normal(hidden, seed + 1)),
          exact(random_normal(hidden, seed + 2, score / std::sqrt(static_cast<double>(hidden))))};
}

}  // namespace

TEMPLATE_TEST_CASE("attnres_softmax_mix gives the fixture's mixtures", "[attnres]", float, double) {
  for (const OpsCase& c : ops_cases("attnres_softmax_mix")) {
    INFO(c.name);
    const auto sources = converted<TestType>(c.tensor("sources").values);  // [rows, n + 1, hidden]
    const auto norm = converted<TestType>(c.tensor("norm_weight").values);
    const auto proj = converted<TestType>(c.tensor("proj_weight").values);
    const auto shape = c.tensor("sources").shape;
    const size rows = shape[0], n = shape[1] - 1, hidden = shape[2];
    std::vector<TestType> out(rows * hidden), probs(rows * (n + 1));
    const View<const TestType, 3> snapshots{sources.data(), {n, rows, hidden}, {hidden, (n + 1) * hidden, 1}};
    const View<const TestType, 2> running{sources.data() + n * hidden, {rows, hidden}, {(n + 1) * hidden, 1}};
    attnres_softmax_mix(host{}, snapshots, running, view(norm), view(proj), c.params["eps"].template get<TestType>(),
                        view(out, rows, hidden), view(probs, rows, n + 1));
    double largest = 1;
    for (const TestType s : sources) largest = std::max(largest, std::abs(static_cast<double>(s)));
    const bool extreme = c.name.find("extreme") != std::string::npos;
    check(compare(probs, c.tensor("probs").values, c.rtol, c.atol));
    check(compare(out, c.tensor("out").values, c.rtol, extreme ? c.atol * largest : c.atol));
    if (std::is_same_v<TestType, double>) check(compare(probs, c.tensor("probs").values, 1e-9, 1e-12));
  }
}

TEMPLATE_TEST_CASE("attnres_softmax_mix at known points (cases 36, 38)", "[attnres]", float, double) {
  // The score weight is divided by the repeats of the pair, so that the width does not matter.
  for (const std::size_t repeats : {1u, 8u, 64u}) {
    Problem p{1, 1, 2 * repeats, {}, std::vector<double>(2 * repeats, 1.0), {}};
    std::vector<double> want;
    for (std::size_t i = 0; i < repeats; ++i) {
      p.sources.insert(p.sources.end(), {1, 0});
      p.proj.insert(p.proj.end(), {0.4901291 / static_cast<double>(repeats), 0});
      want.insert(want.end(), {0.66667, 0.66667});
    }
    for (std::size_t i = 0; i < repeats; ++i) p.sources.insert(p.sources.end(), {0, 2});
    const auto m = mixed<TestType>(p, 1e-5);
    check(compare(m.probs, std::vector<double>{2.0 / 3, 1.0 / 3}, 1e-4));
    check(compare(m.out, want, 1e-4));
  }
  const auto flat = mixed<TestType>({2, 1, 2, {1, 0, 4, 4, 0, 2}, {1, 1}, {0, 0}}, 1e-5);
  check(compare(flat.out, std::vector<double>{1.6666667, 2.0}, 1e-6));
}

TEMPLATE_TEST_CASE("attnres: gate C5 and its planted faults", "[attnres]", float, double) {
  const Problem p{1, 1, 4, {0, 1, 4, -3, 1, 0, -0.5, 2}, {1, 1, 1, 1}, {0.2, -0.1, 0.4, 0.3}};
  const std::vector<double> want{0.5715999, 0.4284001, 1.4278004, -0.1420004};
  const auto m = mixed<TestType>(p, 1e-5);
  check(compare(m.probs, std::vector<double>{0.428400, 0.571600}, 0, 1e-5));
  check(compare(m.out, want, 0, 1e-5));

  const auto off = mixed<TestType>(p, 1e-5, 0.0f);
  CHECK_FALSE(compare(off.out, want, 0, 1e-5).within);
  CHECK(off.out == std::vector<TestType>{1, 0, -0.5, 2});
  CHECK(std::abs(off.out[2] - m.out[2]) > 0.5);
  auto no_weight = p;
  no_weight.proj.assign(4, 0.0);
  CHECK_FALSE(compare(mixed<TestType>(no_weight, 1e-5).out, want, 0, 1e-5).within);
}

TEMPLATE_TEST_CASE("attnres: one source has weight 1 and passes unchanged", "[attnres]", float, double, bf16) {
  const Problem p = random_problem(0, 3, 65, 31, 1e3);
  const auto m = mixed<TestType>(p, 1e-5);
  check(same_bits(m.probs, std::vector<accumulator_t<TestType>>(3, 1)));
  check(same_bits(m.out, converted<accumulator_t<TestType>>(p.sources)));
}

TEST_CASE("attnres_softmax_mix: float, bf16 and double against the naive mixture, within the stated bounds",
          "[attnres]") {
  for (const std::size_t hidden : {1u, 7u, 16u, 576u, 7168u})
    for (const std::size_t stored : {1u, 2u, 8u, 30u}) {
      INFO(hidden << " wide, " << stored << " stored");
      const Problem p = random_problem(stored, 2, hidden, 32);
      const Mixture want = naive_mix(p, 1e-5);
      check(compare(mixed<double>(p, 1e-5).out, want.out, 2e-14, 0, true));
      check(compare(mixed<float>(p, 1e-5).out, want.out, 2e-6, 0, true));
      check(compare(mixed<bf16>(p, 1e-5).out, want.out, 2e-6, 0, true));  // bf16 is only how it is stored
      check(compare(mixed<float>(p, 1e-5).probs, want.probs, 6e-6));
    }
}

TEST_CASE("attnres: scores of any size, rising, falling or all the same", "[attnres]") {
  for (const double score : {1e3, 1e5}) {
    const Problem p = random_problem(8, 3, 64, 33, score);
    check(compare(mixed<double>(p, 1e-5).out, naive_mix(p, 1e-5).out, 1e-9, 0, true));
    for (const float value : mixed<float>(p, 1e-5).out) CHECK(std::isfinite(value));
  }
  // Equal sources: equal weights, whatever the scores.
  Problem same = random_problem(0, 1, 64, 34, 1e4);
  const auto one = same.sources;
  for (int i = 0; i < 3; ++i) same.sources.insert(same.sources.end(), one.begin(), one.end());
  same.stored = 3;
  const auto m = mixed<float>(same, 1e-5);
  CHECK(m.probs == std::vector<float>(4, 0.25f));
  check(same_bits(m.out, converted<float>(one)));
  // Zeros and NaN: no division by zero, and NaN is not hidden.
  Problem zero = random_problem(1, 1, 8, 35);
  zero.sources.assign(16, 0.0);
  CHECK(mixed<float>(zero, 1e-5).out == std::vector<float>(8, 0.0f));
  zero.sources[3] = std::numeric_limits<double>::quiet_NaN();
  CHECK(std::isnan(mixed<float>(zero, 1e-5).out[3]));
}

TEMPLATE_TEST_CASE("attnres_mix and attnres_blend: mix 0 and 1 are exact, between them it is linear", "[attnres]",
                   float, double) {
  const Problem p = random_problem(3, 2, 33, 36);
  auto running = converted<TestType>(std::vector<double>(p.sources.end() - 66, p.sources.end()));
  const auto whole = mixed<TestType>(p, 1e-5);
  check(same_bits(mixed<TestType>(p, 1e-5, 0.0f).out, running));
  const Mixture naive = naive_mix(p, 1e-5);
  std::vector<double> want;
  for (std::size_t i = 0; i < 66; ++i) want.push_back(0.75 * p.sources[3 * 66 + i] + 0.25 * naive.out[i]);
  check(compare(mixed<TestType>(p, 1e-5, 0.25f).out, want, 1e-6, 0, true));

  std::vector<TestType> out(66);
  attnres_softmax_mix(host{}, view(converted<TestType>(p.sources).data(), 0, 2, 33), view(running, 2, 33),
                      view(converted<TestType>(p.norm).data(), 33), view(converted<TestType>(p.proj).data(), 33),
                      TestType(1e-5), view(out, 2, 33));
  check(same_bits(out, running));
  // Neither -0 nor an infinity on the side that does not count gets through.
  running[0] = TestType(-0.0);
  std::vector<TestType> wild(66, std::numeric_limits<TestType>::infinity());
  attnres_blend(host{}, view(running, 2, 33), view(wild, 2, 33), 0.0f, view(out, 2, 33));
  check(same_bits(out, running));
  attnres_blend(host{}, view(wild, 2, 33), view(running, 2, 33), 1.0f, view(out, 2, 33));
  check(same_bits(out, running));
  check(same_bits(mixed<TestType>(p, 1e-5, 1.0f).out, whole.out));
}

TEST_CASE("attnres: threads, other rows, the weights' kind and asking for probs change no bit", "[attnres]") {
  const Problem p = random_problem(4, 32, 576, 37);
  const auto want = mixed<bf16>(p, 1e-5, 1.0f, 1);
  for (const int threads : {2, 3}) check(same_bits(mixed<bf16>(p, 1e-5, 1.0f, threads).out, want.out));

  const auto sources = converted<bf16>(p.sources), norm = converted<bf16>(p.norm), proj = converted<bf16>(p.proj);
  const auto all = view(sources.data(), size{5}, size{32}, size{576});
  std::vector<float> out(576);
  for (const size row : {0u, 7u, 31u}) {
    const auto stored = all.slice(1, row, 1).slice(0, 0, 4);
    attnres_softmax_mix(host{}, stored, all[4].slice(0, row, 1), AnyVector<>(view(norm)),
                        AnyMatrix<>(view(proj, 1, 576)), 1e-5f, view(out, 1, 576));
    check(same_bits(out, std::vector<float>(&want.out[row * 576], &want.out[row * 576] + 576)));
  }
}

TEST_CASE("attnres operations name what does not fit and change nothing", "[attnres]") {
  const std::vector<float> s(2 * 2 * 3, 1.0f), w(4, 1.0f);
  std::vector<float> out(6, 7.0f), probs(6, 7.0f);
  const auto stored = view(s, 2, 2, 3);
  const auto running = view(s.data(), 2, 3);
  const auto norm = view(w.data(), 3);
  const auto mix = [&](auto stored_, auto norm_, auto proj_, float eps, float mix_, auto out_, auto probs_) {
    return thrown_by([&] { attnres_mix(host{}, stored_, running, norm_, proj_, eps, mix_, out_, probs_); });
  };
  const auto to = view(out, 2, 3);
  const View<float, 2> none{};
  CHECK(mix(view(s, 3, 2, 2), norm, norm, 1e-5f, 1.0f, to, none) == "attnres_mix/snapshots");
  CHECK(mix(stored, view(w), norm, 1e-5f, 1.0f, to, none) == "attnres_mix/norm_weight");
  CHECK(mix(stored, norm, view(w), 1e-5f, 1.0f, to, none) == "attnres_mix/proj_weight");
  CHECK(mix(stored, norm, view(w.data(), 3, 1), 1e-5f, 1.0f, to, none) == "attnres_mix/proj_weight");
  CHECK(mix(stored, norm, AnyMatrix<>{}, 1e-5f, 1.0f, to, none) == "attnres_mix/proj_weight");
  CHECK(mix(stored, norm, norm, -1.0f, 1.0f, to, none) == "attnres_mix/eps");
  CHECK(mix(stored, norm, norm, 1e-5f, 1.5f, to, none) == "attnres_mix/mix");
  CHECK(mix(stored, norm, norm, 1e-5f, std::numeric_limits<float>::quiet_NaN(), to, none) == "attnres_mix/mix");
  CHECK(mix(stored, norm, norm, 1e-5f, 1.0f, view(out, 3, 2), none) == "attnres_mix/out");
  CHECK(mix(stored, norm, norm, 1e-5f, 1.0f, to, view(probs, 3, 2)) == "attnres_mix/probs");
  CHECK(thrown_by([&] { attnres_softmax_mix(host{}, stored, view(out, 2, 3), norm, norm, 1e-5f, to); }) ==
        "attnres_softmax_mix/out");
  CHECK(thrown_by([&] { attnres_blend(host{}, running, view(s, 4, 3), 0.5f, to); }) == "attnres_blend/mixed");
  CHECK(thrown_by([&] { attnres_blend(host{}, running, running, -0.5f, to); }) == "attnres_blend/mix");
  CHECK(out == std::vector<float>(6, 7.0f));
}
