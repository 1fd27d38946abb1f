// SPDX-License-Identifier: Apache-2.0
// KDA on the host: behaviour with exact numbers, sequences that share a cache, snapshots.

#include <k3/geometry/presets.hpp>
#include <k3/ops/kda_decode_token.hpp>
#include <k3/ops/kda_gate.hpp>

#include "support/kda_oracle.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// The x >= 0 with silu(x) = y, y >= 0.
double before_silu(double y) {
  double low = 0, high = y + 1;
  for (int i = 0; i < 200; ++i) {
    const double middle = (low + high) / 2;
    (middle / (1 + std::exp(-middle)) < y ? low : high) = middle;
  }
  return low;
}

std::vector<double> unit(size n, size index, double value = 1) {
  std::vector<double> v(n, 0.0);
  v[index] = value;
  return v;
}

struct Token {
  std::vector<double> q, k, v;  // after SiLU
  double log_decay, beta;
};

/// One head whose convolution passes the current input on, so that a token can be given by its q, k and v.
template <class T>
struct Head {
  size n;
  Isa isa = best_isa();
  KdaState<T, T> state{KdaConfig{1, n, 4}, 1};

  T& at(size key, size value) { return state.recurrent(0)(0, key, value); }

  std::vector<T> run(const std::vector<Token>& tokens) {
    const size rows = tokens.size();
    std::vector<T> x, decay, beta, out(rows * n), taps;
    for (const Token& t : tokens) {
      for (const auto* part : {&t.q, &t.k, &t.v})
        for (const double y : *part) x.push_back(static_cast<T>(before_silu(y)));
      decay.insert(decay.end(), n, static_cast<T>(t.log_decay));
      beta.push_back(static_cast<T>(t.beta));
    }
    for (size c = 0; c < 3 * n; ++c) taps.insert(taps.end(), {T(0), T(0), T(0), T(1)});
    const std::vector<id> slots(rows, 0);
    kda_decode_token(host{.isa = isa}, KdaConfig{1, n, 4}, view(x, rows, 3 * n),
                     kda_conv_weights(KdaConfig{1, n, 4}, view(taps, 3 * n, 4)), view(decay, rows, n),
                     view(beta, rows, 1), view(slots), state.view(), view(out, rows, n));
    return out;
  }
  std::vector<T> run(const Token& token) { return run(std::vector<Token>{token}); }
};

/// log_decay of kda_gate with A_log 0 and dt_bias 0 at lower bound -5.
double gate(double raw) {
  std::vector<double> z = {raw}, a = {0}, bias = {0}, out = {0};
  kda_gate(host{}, KdaConfig{1, 1, 4}, view(z, 1, 1), view(a), view(bias), -5.0f, view(out, 1, 1));
  return out[0];
}

template <class Got>
void check_near(const Got& got, const std::vector<double>& want, double relative = 1e-5, double absolute = 0) {
  check(compare(got, want, relative, absolute));
}

}  // namespace

TEMPLATE_TEST_CASE("the bounded gate is a scaled sigmoid, not a clamped softplus", "[kda][cases]", float, double) {
  const std::vector<TestType> z = {-4, 0, 2}, a_log = {0}, bias = {0, 0, 0};
  std::vector<TestType> out(3);
  kda_gate(host{}, KdaConfig{1, 3, 4}, view(z, 1, 3), view(a_log), view(bias), -5.0f, view(out, 1, 3));
  check_near(out, {-0.0899310, -2.5, -4.4039854});
  kda_gate(host{}, KdaConfig{1, 3, 4}, view(z, 1, 3), view(a_log), view(bias), std::nullopt, view(out, 1, 3));
  check_near(out, {-0.0181499, -0.6931472, -2.1269280});
}

TEMPLATE_TEST_CASE("A_log is one number per head and its padding is not read", "[kda][cases]", float, double) {
  const std::vector<TestType> z(8, 1), bias(8, 0);
  std::vector<TestType> out(8);
  for (const TestType padding : {TestType(0), TestType(NAN)}) {
    const std::vector<TestType> a_log = {std::log(TestType(2)), std::log(TestType(3)), padding, padding};
    kda_gate(host{}, KdaConfig{2, 4, 4}, view(z, 1, 8), view(a_log), view(bias), -5.0f, view(out, 1, 8));
    check_near(out, {-4.4039854, -4.4039854, -4.4039854, -4.4039854, -4.7628706, -4.7628706, -4.7628706, -4.7628706});
  }
}

TEMPLATE_TEST_CASE("64 tokens of strong decay stay finite, at once and one by one", "[kda][cases]", float, double) {
  for (const Isa isa : available_isas())
    for (const size n : {size{2}, size{128}}) {
      const std::vector<Token> tokens(64, {unit(n, 1), unit(n, 0), unit(n, 1), gate(30), 0});
      Head<TestType> together{n, isa}, single{n, isa};
      for (const TestType v : together.run(tokens)) REQUIRE(std::isfinite(v));
      for (const Token& t : tokens) single.run(t);
      check_near(std::vector<TestType>{together.at(0, 1), single.at(0, 1)}, {0.5016902, 0.5016902});
      CHECK(together.at(0, 1) == single.at(0, 1));
    }
}

TEST_CASE("a token's output does not depend on later tokens", "[kda][cases]") {
  const auto check_prefix = [](size tokens, size kept, Isa isa) {
    const KdaProblem p = kda_problem({2, 24, 4}, 1, tokens, 7);
    KdaProblem other = p;
    const KdaProblem source = kda_problem({2, 24, 4}, 1, tokens, 77);
    const size width = kda_width(p.g);
    for (size i = kept * 3 * width; i < p.x.size(); ++i) other.x[i] = source.x[i];
    for (size i = kept * width; i < p.log_decay.size(); ++i) other.log_decay[i] = source.log_decay[i];
    auto a = run_kda<float>(host{.isa = isa}, p.g, p).out, b = run_kda<float>(host{.isa = isa}, p.g, other).out;
    if (kept < tokens) CHECK_FALSE(same_bits(a, b).within);
    a.resize(kept * width), b.resize(kept * width);
    check(same_bits(a, b));
  };
  for (const Isa isa : available_isas()) {
    check_prefix(13, 8, isa);
    for (size tokens = 1; tokens <= 33; ++tokens) check_prefix(tokens, tokens - 1, isa);
  }
}

TEMPLATE_TEST_CASE("the eps of q's and k's norm is added to the sum of squares", "[kda][cases]", float, double) {
  for (const Isa isa : available_isas()) {
    const size n = 128;
    const std::vector<double> small(n, 1e-4);
    Head<TestType> key{n, isa}, query{n, isa};
    key.run({unit(n, 0), small, unit(n, 0), 0, 0});  // S[k, 0] = k / 2
    for (size k = 0; k < n; ++k) check_near(std::vector<TestType>{2 * key.at(k, 0)}, {0.0662266});
    query.at(5, 3) = 1;  // read by q alone: the key is 0
    const auto out = query.run({small, std::vector<double>(n, 0.0), unit(n, 0), 0, 0});
    check_near(std::vector<TestType>{out[3]}, {0.0662266 / std::sqrt(128.0)});
  }
}

TEMPLATE_TEST_CASE("a slow decay over 4096 tokens is not rounded away", "[kda][cases]", float, double) {
  const double log_decay = gate(-11.0429058);
  CHECK(std::abs(log_decay + 8e-5) < 1e-9);
  for (const Isa isa : available_isas()) {
    Head<TestType> head{2, isa};
    head.at(0, 0) = 1;
    const std::vector<double> zero(2, 0.0);
    head.run(std::vector<Token>(4096, {zero, zero, zero, log_decay, 0}));
    check_near(std::vector<TestType>{head.at(0, 0)}, {0.72059}, 1e-3);
  }
}

TEMPLATE_TEST_CASE("beta is a logit: its sigmoid, once, scales the write", "[kda][cases]", float, double) {
  for (const Isa isa : available_isas()) {
    Head<TestType> head{4, isa};
    head.run({unit(4, 0), unit(4, 0), unit(4, 0), 0, 0});
    check_near(std::vector<TestType>{head.at(0, 0)}, {0.5});
  }
}

TEMPLATE_TEST_CASE("what a key wrote is read by the same query, divided by sqrt(D), in the same token", "[kda][cases]",
                   float, double) {
  for (const Isa isa : available_isas())
    for (const size n : {size{2}, size{128}}) {
      std::vector<double> value(n, 0.0), want(n, 0.0);
      value[0] = 3, value[1] = 5;
      want[0] = 3 / std::sqrt(double(n)), want[1] = 5 / std::sqrt(double(n));
      Head<TestType> same{n, isa}, other{n, isa};
      check_near(same.run({unit(n, 0), unit(n, 0), value, 0, 30}), want);
      check_near(other.run({unit(n, 1), unit(n, 0), value, 0, 30}), std::vector<double>(n, 0.0), 0);
    }
}

TEMPLATE_TEST_CASE("the convolution's last tap is on the newest input", "[kda][cases]", float, double) {
  for (const Isa isa : available_isas()) {
    const std::vector<TestType> x = {1, 2, 3, 4}, taps = {1000, 100, 10, 1};
    std::vector<TestType> window(3, 0), out(4);
    const std::vector<id> slots(4, 0);
    short_conv(host{.isa = isa}, view(x, 4, 1), view(taps, 1, 4), view(slots), view(window, 1, 1, 3), view(out, 4, 1));
    check_near(out, {0.7310586, 11.9999263, 123, 1234});
    check(compare(window, std::vector<double>{2, 3, 4}, 0));
  }
}

TEST_CASE("sequences of lengths 1, 0, 7 and 1 give what each gives alone", "[kda][cases]") {
  const KdaProblem all = kda_problem({2, 24, 4}, 9, 1, 5);  // nine rows, nine slots
  const size width = kda_width(all.g), state = kda_state_elements(all.g), window = kda_conv_elements(all.g);
  KdaProblem batch = all;
  batch.slot = {0, 2, 2, 2, 2, 2, 2, 2, 3};
  for (const Isa isa : available_isas()) {
    const auto together = run_kda<float>(host{.isa = isa}, all.g, batch);
    for (const id slot : {0, 2, 3}) {
      KdaProblem alone = batch;
      for (id& s : alone.slot)
        if (s != slot) s = pad_slot;
      const auto got = run_kda<float>(host{.isa = isa}, all.g, alone);
      for (size i = 0; i < got.out.size(); ++i)
        if (batch.slot[i / width] == slot) REQUIRE((got.out[i] == together.out[i] && std::isfinite(got.out[i])));
      const size at = static_cast<size>(slot);
      for (size i = at * state; i < (at + 1) * state; ++i) REQUIRE(got.state[i] == together.state[i]);
    }
    for (size i = state; i < 2 * state; ++i) REQUIRE(together.state[i] == static_cast<float>(all.state[i]));
    for (size i = window; i < 2 * window; ++i) REQUIRE(together.window[i] == static_cast<float>(all.window[i]));
  }
}

TEMPLATE_TEST_CASE("a rewritten key holds the newest value", "[kda][cases]", float, double) {
  for (const Isa isa : available_isas()) {
    Head<TestType> head{4, isa};
    for (int t = 0; t < 16; ++t) {
      const double value = t % 2 == 0 ? 1 : 0;
      const auto out = head.run({unit(4, 0), unit(4, 0), unit(4, 2, value), gate(-30), 20});
      check_near(std::vector<TestType>{head.at(0, 2), out[2]}, {value, value / 2}, 0, 1e-4);
    }
  }
}

TEMPLATE_TEST_CASE("the delta is taken against the decayed state", "[kda][cases]", float, double) {
  CHECK(std::abs(gate(-1.8267204) - std::log(0.5)) < 1e-6);
  for (const Isa isa : available_isas()) {
    Head<TestType> head{4, isa};
    head.at(0, 0) = 4;
    head.run({unit(4, 0), unit(4, 0), unit(4, 0), gate(-1.8267204), 0});
    check_near(std::vector<TestType>{head.at(0, 0)}, {1.5});
  }
}

namespace {

/// A cache of several slots, and one token of a problem's sequence in one of them.
struct Cache {
  KdaConfig g;
  KdaState<float, float> state;
  std::vector<float> conv;

  Cache(const KdaProblem& p, size slots) : g(p.g), state(p.g, slots), conv(converted<float>(p.conv)) {}

  std::vector<float> step(const KdaProblem& p, size row, id slot) {
    const size width = kda_width(g);
    const auto x = converted<float>(p.x), decay = converted<float>(p.log_decay), beta = converted<float>(p.beta);
    std::vector<float> out(width);
    kda_decode_token(host{}, g, view(x.data() + row * 3 * width, 1, 3 * width),
                     kda_conv_weights(g, view(conv, 3 * width, g.conv_kernel)),
                     view(decay.data() + row * width, 1, width), view(beta.data() + row * g.heads, 1, g.heads),
                     view(&slot, 1), state.view(), view(out, 1, width));
    return out;
  }
};

}  // namespace

TEST_CASE("alternating sequences give what each gives alone in slot 0", "[kda][cases]") {
  const KdaProblem a = kda_problem({2, 24, 4}, 1, 6, 1);
  KdaProblem b = kda_problem({2, 24, 4}, 1, 6, 2);
  b.conv = a.conv;
  for (const auto& [first, second] : {std::pair<id, id>{0, 1}, {3, 7}}) {
    Cache shared(a, 8), alone_a(a, 1), alone_b(a, 1);
    for (size t = 0; t < 6; ++t) {
      check(same_bits(shared.step(a, t, first), alone_a.step(a, t, 0)));
      check(same_bits(shared.step(b, t, second), alone_b.step(b, t, 0)));
    }
  }
}

TEST_CASE("a slot that is reset gives what a fresh cache gives", "[kda][cases]") {
  const KdaProblem p = kda_problem({2, 24, 4}, 1, 5, 3);
  Cache used(p, 2), fresh(p, 2);
  for (size i = 0; i < used.state.recurrent(1).elements(); ++i) used.state.recurrent(1).data[i] = NAN;
  for (size i = 0; i < used.state.conv(1).elements(); ++i) used.state.conv(1).data[i] = NAN;
  CHECK(std::isnan(Cache(used).step(p, 0, 1)[0]));
  used.state.reset(1);
  for (size t = 0; t < 5; ++t) check(same_bits(used.step(p, t, 1), fresh.step(p, t, 1)));
}

TEST_CASE("a copied state goes its own way", "[kda][cases]") {
  const KdaProblem p = kda_problem({2, 24, 4}, 1, 12, 4);
  Cache original(p, 1);
  for (size t = 0; t < 6; ++t) original.step(p, t, 0);
  const Cache snapshot = original;
  Cache stale = original;
  const auto seventh = original.step(p, 6, 0);
  CHECK_FALSE(compare(original.step(p, 6, 0), converted<double>(seventh), 0, 1e-4).within);  // the state went on
  Cache restored = snapshot;
  check(same_bits(restored.step(p, 6, 0), seventh));
  for (size t = 6; t < 11; ++t) stale.step(p, t, 0);
  CHECK_FALSE(compare(stale.step(p, 6, 0), converted<double>(seventh), 0, 1e-4).within);  // of another position
}

TEST_CASE("a beta logit of 0 writes half, which is not nothing and not all", "[kda][cases]") {
  KdaProblem p = kda_problem({2, 24, 4}, 1, 4, 6);
  const auto with_beta = [&](double beta) {
    for (double& b : p.beta) b = beta;
    return run_kda<float>(host{}, p.g, p).out;
  };
  const auto none = with_beta(-100), half = with_beta(0), all = with_beta(100);
  CHECK_FALSE(compare(half, none, 0, 1e-4).within);
  CHECK_FALSE(compare(half, all, 0, 1e-4).within);
}

TEST_CASE("faults of the step are seen: no convolution, no sigmoid on beta", "[kda][cases]") {
  const KdaProblem p = kda_problem({2, 24, 4}, 1, 4, 8);
  const auto got = run_kda<float>(host{}, p.g, p).out;
  KdaProblem zero_taps = p;
  zero_taps.conv.assign(p.conv.size(), 0.0);
  CHECK_FALSE(compare(got, kda_oracle(zero_taps), 0, 1e-4).within);
  KdaProblem raw_beta = p;
  CHECK_FALSE(compare(got, kda_oracle(raw_beta, false), 0, 1e-4).within);
}
