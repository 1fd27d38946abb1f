// SPDX-License-Identifier: Apache-2.0
// KDA on the host: fixtures, the definition in double, geometries, vector versions, batches, errors.

#include <algorithm>

#include <k3/geometry/presets.hpp>
#include <k3/ops/gated_rms_norm.hpp>
#include <k3/ops/kda_decode_token.hpp>
#include <k3/ops/kda_gate.hpp>
#include <k3/ops/rms_norm.hpp>

#include "support/kda_oracle.hpp"
#include "support/ops_fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

const std::vector<KdaConfig> shapes = {{1, 1, 4},  {2, 2, 1},  {3, 5, 3},   {2, 7, 4},  {1, 13, 2},
                                       {2, 24, 4}, {3, 31, 5}, {1, 100, 4}, {2, 128, 4}};

std::string shape_name(const KdaConfig& g) {
  return std::to_string(g.heads) + " heads of " + std::to_string(g.head_dim) + ", kernel " +
         std::to_string(g.conv_kernel);
}

/// Checks that `call` throws invalid_argument for `operation` and an argument that starts with `argument`.
template <class Call>
void check_refused(const char* operation, const std::string& argument, Call&& call) {
  INFO(operation << " should refuse " << argument);
  try {
    call();
    CHECK(false);
  } catch (const invalid_argument& e) {
    INFO(e.what());
    CHECK(e.operation() == operation);
    CHECK(e.argument().substr(0, argument.size()) == argument);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("rms_norm and the L2 factor reproduce the fixtures", "[kda][fixture]", float, double) {
  for (const OpsCase& c : ops_cases("rmsnorm")) {
    INFO(c.name);
    const OpsTensor given = c.tensor("x");
    const auto x = converted<TestType>(given.values), weight = converted<TestType>(c.tensor("weight").values);
    std::vector<TestType> y(x.size());
    rms_norm(host{}, view(x, given.shape[0], given.shape[1]), view(weight),
             static_cast<TestType>(c.params.at("eps").get<double>()), view(y, given.shape[0], given.shape[1]));
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
  }
  for (const OpsCase& c : ops_cases("l2norm")) {
    const OpsTensor given = c.tensor("x");
    auto x = converted<TestType>(given.values);
    const size n = given.shape[1];
    for (size row = 0; row < given.shape[0]; ++row) {
      TestType* at = x.data() + row * n;
      using Plain = k3::detail::KdaPlain<TestType>;
      Plain::scale(at, l2_scale(Plain::squares(at, n), static_cast<TestType>(KDA_L2_EPS)), n);
    }
    check(compare(x, c.tensor("y").values, c.rtol, c.atol));
  }
}

TEMPLATE_TEST_CASE("gated_rms_norm reproduces the fixture", "[kda][fixture]", float, double) {
  for (const OpsCase& c : ops_cases("gated_rmsnorm")) {
    const OpsTensor given = c.tensor("x");
    const size rows = given.shape[0];
    const KdaConfig g{given.shape[1], given.shape[2]};
    const auto x = converted<TestType>(given.values), gate = converted<TestType>(c.tensor("gate").values);
    const auto weight = converted<float>(c.tensor("weight").values);
    const auto eps = static_cast<TestType>(c.params.at("eps").get<double>());
    std::vector<TestType> y(x.size());
    gated_rms_norm(host{}, g, view(x, rows, kda_width(g)), view(gate, rows, kda_width(g)), AnyVector<>(view(weight)),
                   eps, view(y, rows, kda_width(g)));
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
    auto in_place = x;
    gated_rms_norm(host{}, g, view(in_place, rows, kda_width(g)), view(gate, rows, kda_width(g)), view(weight), eps,
                   view(in_place, rows, kda_width(g)));
    check(same_bits(in_place, y));
  }
}

TEMPLATE_TEST_CASE("short_conv reproduces the fixture, at once and token by token", "[kda][fixture]", float, double) {
  const Isa isa = GENERATE(from_range(available_isas()));
  for (const OpsCase& c : ops_cases("short_conv")) {
    INFO(c.name);
    const OpsTensor given = c.tensor("x");
    const size rows = given.shape[0], channels = given.shape[1], taps = c.params.at("kernel").get<size>();
    const auto x = converted<TestType>(given.values), weight = converted<TestType>(c.tensor("weight").values);
    auto window = converted<TestType>(c.tensor("state").values), stepped = window;
    const std::vector<id> slots(rows, 0);
    std::vector<TestType> y(x.size()), one(x.size());
    const host exec{.isa = isa};
    short_conv(exec, view(x, rows, channels), view(weight, channels, taps), view(slots),
               view(window.data(), 1, channels, taps - 1), view(y, rows, channels));
    check(compare(y, c.tensor("y").values, c.rtol, c.atol));
    check(compare(window, c.tensor("state_out").values, 0));
    for (size row = 0; row < rows; ++row)
      short_conv(exec, view(x.data() + row * channels, 1, channels), AnyMatrix<>(view(weight, channels, taps)),
                 view(slots.data(), 1), view(stepped.data(), 1, channels, taps - 1),
                 view(one.data() + row * channels, 1, channels));
    check(same_bits(one, y));
    check(same_bits(stepped, window));
  }
}

TEMPLATE_TEST_CASE("kda_gate reproduces the fixtures", "[kda][fixture]", float, double) {
  for (const OpsCase& c : ops_cases("kda_gate")) {
    INFO(c.name);
    const OpsTensor given = c.tensor("z");
    const KdaConfig g{given.shape[0], given.shape[1]};
    const auto z = converted<TestType>(given.values);
    const auto a_log = converted<float>(c.tensor("A_log").values), bias = converted<float>(c.tensor("dt_bias").values);
    std::optional<float> bound;
    if (!c.params.at("lower_bound").is_null()) bound = c.params.at("lower_bound").get<float>();
    std::vector<TestType> log_decay(z.size());
    kda_gate(host{}, g, view(z, 1, kda_width(g)), view(a_log), AnyVector<>(view(bias)), bound,
             view(log_decay, 1, kda_width(g)));
    check(compare(log_decay, c.tensor("log_decay").values, c.rtol, c.atol));
    for (TestType& v : log_decay) v = std::exp(v);
    check(compare(log_decay, c.tensor("decay").values, c.rtol, c.atol));
  }
}

namespace {

template <class Kernel>
void check_recurrence(const OpsCase& c) {
  using Acc = typename Kernel::Acc;
  const size tokens = c.params.at("tokens").get<size>(), heads = c.params.at("heads").get<size>(),
             n = c.params.at("head_dim").get<size>();
  const auto q = c.tensor("q_raw").values, k = c.tensor("k_raw").values, v = c.tensor("v").values;
  const auto log_decay = converted<Acc>(c.tensor("log_decay").values),
             beta = converted<Acc>(c.tensor("beta_logit").values);
  auto state = converted<Acc>(c.tensor("state_in").values);
  std::vector<Acc> out(q.size());
  k3::detail::KdaScratch<Acc, 128> s;
  for (size t = 0; t < tokens; ++t)
    for (size h = 0; h < heads; ++h) {
      const size at = (t * heads + h) * n;
      for (size d = 0; d < n; ++d) {
        s.query[d] = static_cast<Acc>(q[at + d]);
        s.key[d] = static_cast<Acc>(k[at + d]);
        s.value[d] = static_cast<Acc>(v[at + d]);
      }
      Acc* own = state.data() + h * n * n;
      k3::detail::kda_recurrence<Kernel>(s, n, log_decay.data() + at, beta[t * heads + h], own, own);
      std::copy(s.out, s.out + n, out.data() + at);
    }
  check(compare(out, c.tensor("o").values, c.rtol, c.atol));
  check(compare(state, c.tensor("state_out").values, c.rtol, c.atol));
}

}  // namespace

TEST_CASE("the recurrence reproduces the fixtures in every version", "[kda][fixture]") {
  for (const OpsCase& c : ops_cases("kda_recurrent_step")) {
    INFO(c.name);
    check_recurrence<k3::detail::KdaPlain<double>>(c);
    check_recurrence<k3::detail::KdaPlain<float>>(c);
#if K3_X86_64
    if (best_isa() >= Isa::avx2) check_recurrence<k3::detail::KdaAvx2>(c);
    if (best_isa() >= Isa::avx512) check_recurrence<k3::detail::KdaAvx512>(c);
#endif
  }
}

TEST_CASE("kda_decode_token agrees with the definition in double", "[kda]") {
  for (const KdaConfig& g : shapes) {
    INFO(shape_name(g));
    const KdaProblem given = kda_problem(g, 2, 5, 11);
    KdaProblem want = given;
    const auto out = kda_oracle(want);
    const auto exact = run_kda<double>(host{}, g, given);
    check(compare(exact.out, out, 4e-15, 0, true));
    check(compare(exact.state, want.state, 4e-15, 0, true));
    check(compare(exact.window, want.window, 0));
    for (const Isa isa : available_isas()) {
      INFO("isa " << static_cast<int>(isa));
      const auto got = run_kda<float>(host{.isa = isa}, g, given);
      check(compare(got.out, out, 1e-6, 0, true));
      check(compare(got.state, want.state, 1e-6, 0, true));
      check(compare(got.window, want.window, 0));
    }
  }
}

TEST_CASE("kda_decode_token in bf16 rounds what it convolves and nothing else", "[kda]") {
  const KdaConfig g{2, 24, 4};
  KdaProblem given = kda_problem(g, 1, 6, 21);
  given.x = converted<double>(converted<bf16>(given.x));
  given.window = converted<double>(converted<bf16>(given.window));
  KdaProblem unrounded = given;
  const auto out = kda_oracle(unrounded);
  const auto got = run_kda<bf16, float, bf16>(host{}, g, given);
  check(compare(got.window, unrounded.window, 0));
  check(compare(got.out, out, 4e-3, 0, true));
  CHECK_FALSE(compare(got.out, out, 1e-4, 0, true).within);  // the rounding is there
}

TEST_CASE("the state may be double where activations are float", "[kda]") {
  const KdaProblem given = kda_problem({2, 24, 4}, 1, 9, 31);
  KdaProblem want = given;
  const auto out = kda_oracle(want);
  check(compare(run_kda<float, double, float>(host{}, given.g, given).out, out, 5e-7, 0, true));
}

TEST_CASE("fixed and run-time geometries give the same bits", "[kda]") {
  for (const Isa isa : available_isas()) {
    const host exec{.isa = isa};
    const KdaProblem small = kda_problem(kda_config(tiny::Kda{}), 2, 3, 41);
    check_same_run(run_kda<float>(exec, tiny::Kda{}, small), run_kda<float>(exec, small.g, small));
    check_same_run(run_kda<double>(exec, tiny::Kda{}, small), run_kda<double>(exec, small.g, small));
    const KdaProblem large = kda_problem(kda_config(kimi_k3::Kda{}), 1, 2, 42);
    check_same_run(run_kda<float>(exec, kimi_k3::Kda{}, large), run_kda<float>(exec, large.g, large));
  }
}

TEST_CASE("both vector versions give the same bits", "[kda]") {
  if (best_isa() < Isa::avx512) return;
  for (const KdaConfig& g : shapes) {
    INFO(shape_name(g));
    const KdaProblem p = kda_problem(g, 2, 4, 51);
    check_same_run(run_kda<float>(host{.isa = Isa::avx2}, g, p), run_kda<float>(host{.isa = Isa::avx512}, g, p));
  }
}

TEST_CASE("results do not depend on threads", "[kda]") {
  const KdaProblem p = kda_problem({5, 64, 4}, 3, 4, 61);
  for (const Isa isa : available_isas())
    for (const int threads : {2, 3, 7})
      check_same_run(run_kda<float>(host{.threads = threads, .isa = isa}, p.g, p),
                     run_kda<float>(host{.threads = 1, .isa = isa}, p.g, p));
}

namespace {

/// Rows [first, first + count) of a problem as a problem of its own, with the given slots.
KdaProblem rows_of(const KdaProblem& p, size first, size count) {
  const auto part = [&](const std::vector<double>& v) {
    const auto width = static_cast<std::ptrdiff_t>(v.size() / p.rows);
    const auto begin = v.begin() + static_cast<std::ptrdiff_t>(first) * width;
    return std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(count) * width);
  };
  KdaProblem result = p;
  result.rows = count;
  result.x = part(p.x), result.log_decay = part(p.log_decay), result.beta = part(p.beta);
  const auto begin = p.slot.begin() + static_cast<std::ptrdiff_t>(first);
  result.slot.assign(begin, begin + static_cast<std::ptrdiff_t>(count));
  return result;
}

}  // namespace

TEST_CASE("several tokens in one call give the bits of one call each, and a batch those of its sequences alone",
          "[kda]") {
  for (const KdaConfig& g : shapes)
    for (const Isa isa : available_isas()) {
      INFO(shape_name(g) << ", isa " << static_cast<int>(isa));
      const KdaProblem p = kda_problem(g, 3, 4, 71);
      const auto together = run_kda<float>(host{.isa = isa}, g, p);
      auto single = p;
      std::vector<float> out;
      for (const size row : {8u, 9u, 10u, 11u, 0u, 1u, 2u, 3u, 4u, 5u, 6u, 7u}) {  // slot 2 first
        KdaProblem one = rows_of(p, row, 1);
        one.state = single.state, one.window = single.window;
        const auto step = run_kda<float>(host{.isa = isa}, g, one);
        single.state = converted<double>(step.state), single.window = converted<double>(step.window);
        out.insert(row < 8 ? out.end() - 4 * static_cast<std::ptrdiff_t>(kda_width(g)) : out.end(), step.out.begin(),
                   step.out.end());
      }
      check(same_bits(out, together.out));
      check(same_bits(converted<float>(single.state), together.state));
    }
}

TEST_CASE("a padding row gives zeros, changes no slot, and may hold NaN", "[kda]") {
  const KdaProblem p = kda_problem({2, 24, 4}, 3, 1, 81);
  KdaProblem padded = p;
  padded.slot[1] = pad_slot;
  const size width = kda_width(p.g);
  for (size c = 0; c < 3 * width; ++c) padded.x[3 * width + c] = NAN;
  for (size c = 0; c < width; ++c) padded.log_decay[width + c] = NAN;
  for (size h = 0; h < 2; ++h) padded.beta[2 + h] = NAN;
  const auto full = run_kda<float>(host{}, p.g, p), got = run_kda<float>(host{}, p.g, padded);
  for (size c = 0; c < width; ++c) {
    REQUIRE(got.out[c] == full.out[c]);
    REQUIRE(got.out[width + c] == 0.0f);
    REQUIRE(got.out[2 * width + c] == full.out[2 * width + c]);
  }
  const size state = kda_state_elements(p.g), window = kda_conv_elements(p.g);
  for (size i = 0; i < state; ++i) REQUIRE(got.state[state + i] == static_cast<float>(p.state[state + i]));
  for (size i = 0; i < window; ++i) REQUIRE(got.window[window + i] == static_cast<float>(p.window[window + i]));

  KdaProblem nothing = padded;
  nothing.slot = {pad_slot, pad_slot, pad_slot};
  const auto idle = run_kda<float>(host{}, p.g, nothing);
  check(same_bits(idle.state, converted<float>(p.state)));
  check(same_bits(idle.out, std::vector<float>(idle.out.size(), 0.0f)));
  const KdaProblem empty = kda_problem({2, 24, 4}, 3, 0, 81);
  check(same_bits(run_kda<float>(host{}, p.g, empty).state, converted<float>(empty.state)));
}

TEST_CASE("NaN inputs stay in their own sequence", "[kda]") {
  const KdaProblem p = kda_problem({2, 24, 4}, 3, 2, 91);
  const size width = kda_width(p.g), state = kda_state_elements(p.g);
  for (const Isa isa : available_isas()) {
    KdaProblem bad = p;
    for (size c = 0; c < 3 * width; ++c) bad.x[2 * 3 * width + c] = NAN;  // the first row of slot 1
    const auto want = run_kda<float>(host{.isa = isa}, p.g, p), got = run_kda<float>(host{.isa = isa}, p.g, bad);
    for (size c = 0; c < 2 * width; ++c) {
      REQUIRE(got.out[c] == want.out[c]);
      REQUIRE(std::isnan(got.out[2 * width + c]));
      REQUIRE(got.out[4 * width + c] == want.out[4 * width + c]);
    }
    CHECK(std::isnan(got.state[state]));
    for (size i = 0; i < state; ++i) REQUIRE(got.state[2 * state + i] == want.state[2 * state + i]);
  }
}

TEST_CASE("extreme inputs agree with double in every version", "[kda]") {
  KdaProblem p = kda_problem({1, 24, 4}, 1, 4, 101);
  const std::vector<double> values = {0.0, -0.0, 1e4, -1e4, 1e-30, -95.0, -88.0, 100.0, -1e-3, 60.0};
  for (size i = 0; i < p.x.size(); ++i) p.x[i] = static_cast<float>(values[i % values.size()]);
  const std::vector<double> decays = {0, -1e-8, -5, -80, -90, -103, -110, -1e30};
  for (size i = 0; i < p.log_decay.size(); ++i) p.log_decay[i] = static_cast<float>(decays[i % decays.size()]);
  KdaProblem want = p;
  const auto out = kda_oracle(want);
  for (const Isa isa : available_isas()) {
    const auto got = run_kda<float>(host{.isa = isa}, p.g, p);
    check(compare(got.out, out, 5e-7, 0, true));
    check(compare(got.state, want.state, 5e-7, 0, true));
  }
}

TEST_CASE("wide heads work up to the limit, which is refused beyond", "[kda]") {
  const KdaProblem p = kda_problem({1, 1024, 2}, 1, 1, 111);
  KdaProblem want = p;
  const auto out = kda_oracle(want);
  for (const Isa isa : available_isas())
    check(compare(run_kda<float>(host{.isa = isa}, p.g, p).out, out, 2e-6, 0, true));
  const KdaConfig wide{1, 1025, 2};
  const KdaProblem q = kda_problem(wide, 1, 1, 112);
  check_refused("kda_decode_token", "geometry.head_dim", [&] { run_kda<float>(host{}, wide, q); });
}

TEST_CASE("rows may be strided and weights of run-time type", "[kda]") {
  const KdaProblem p = kda_problem({2, 24, 4}, 3, 1, 121);
  const size width = kda_width(p.g), rows = p.rows, stride = 5 * width + 3;
  std::vector<float> buffer(rows * stride, 1e30f);  // x | log_decay | out side by side
  for (size r = 0; r < rows; ++r) {
    for (size c = 0; c < 3 * width; ++c) buffer[r * stride + c] = static_cast<float>(p.x[r * 3 * width + c]);
    for (size c = 0; c < width; ++c)
      buffer[r * stride + 3 * width + c] = static_cast<float>(p.log_decay[r * width + c]);
  }
  const auto conv = converted<float>(p.conv), beta = converted<float>(p.beta);
  auto state = converted<float>(p.state), window = converted<float>(p.window);
  const HostView<float, 2> all = view(buffer, rows, stride);
  kda_decode_token(host{}, p.g, all.slice(1, 0, 3 * width),
                   kda_conv_weights(p.g, AnyMatrix<>(view(conv, 3 * width, 4))), all.slice(1, 3 * width, width),
                   view(beta, rows, 2), view(p.slot),
                   KdaStateView<float, float>{view(state, 3, 2, 24, 24), view(window, 3, 3 * width, 3)},
                   all.slice(1, 4 * width, width));
  const auto want = run_kda<float>(host{}, p.g, p);
  check(same_bits(state, want.state));
  for (size r = 0; r < rows; ++r) {
    for (size c = 0; c < width; ++c) REQUIRE(buffer[r * stride + 4 * width + c] == want.out[r * width + c]);
    for (size c = 5 * width; c < stride; ++c) REQUIRE(buffer[r * stride + c] == 1e30f);
  }
}

TEST_CASE("kda_gate and gated_rms_norm agree with double", "[kda]") {
  const KdaConfig g{3, 37, 4};
  const size rows = 4, width = kda_width(g);
  const auto z = exact_in_float(random_normal(rows * width, 1, 4)), bias = exact_in_float(random_normal(width, 2));
  const auto a_log = exact_in_float(random_normal(3, 3, 0.5)), gate = exact_in_float(random_normal(rows * width, 4, 5));
  const auto weight = exact_in_float(random_normal(37, 5));
  const auto zf = converted<float>(z);
  std::vector<float> got(z.size());
  std::vector<double> want(z.size());
  for (const std::optional<float> bound : {std::optional<float>(-5.0f), std::optional<float>()}) {
    kda_gate(host{}, g, view(zf, rows, width), view(a_log), view(bias), bound, view(got, rows, width));
    for (size i = 0; i < z.size(); ++i) {
      const double rate = std::exp(a_log[i % width / 37]), at = z[i] + bias[i % width];
      want[i] = bound ? -5 / (1 + std::exp(-rate * at)) : -rate * std::log1p(std::exp(at));
    }
    check(bound ? compare(got, want, 0, 5 * 2e-7) : compare(got, want, 1e-6));
    std::vector<double> exact(z.size());
    kda_gate(host{}, g, view(z, rows, width), view(a_log), view(bias), bound, view(exact, rows, width));
    check(compare(exact, want, 2e-15));
  }
  const auto gatef = converted<float>(gate);
  gated_rms_norm(host{}, g, view(zf, rows, width), view(gatef, rows, width), view(weight), 1e-5f,
                 view(got, rows, width));
  for (size row = 0; row < rows * 3; ++row) {
    double sum = 0;
    for (size d = 0; d < 37; ++d) sum += z[row * 37 + d] * z[row * 37 + d];
    for (size d = 0; d < 37; ++d)
      want[row * 37 + d] =
          z[row * 37 + d] / std::sqrt(sum / 37 + 1e-5f) * weight[d] / (1 + std::exp(-gate[row * 37 + d]));
  }
  check(compare(got, want, 7e-7));
  std::vector<bf16> rounded(z.size());
  gated_rms_norm(host{}, g, view(zf, rows, width), view(gatef, rows, width), view(weight), 1e-5f,
                 view(rounded, rows, width));
  check(same_bits(rounded, converted<bf16>(got)));  // rounded once
}

TEST_CASE("KdaState is zero at first and after reset, and copies are independent", "[kda]") {
  KdaState<float, bf16> state(tiny::Kda{}, 3);
  CHECK(state.slots() == 3);
  CHECK(state.recurrent(2).elements() == kda_state_elements(tiny::Kda{}));
  CHECK(state.conv(2).elements() == kda_conv_elements(tiny::Kda{}));
  CHECK(state.recurrent(1).data == state.recurrent(0).data + state.recurrent(0).elements());
  CHECK(reinterpret_cast<std::uintptr_t>(state.recurrent(0).data) % 64 == 0);
  const auto fill = [&](size slot, float value) {
    for (size i = 0; i < state.recurrent(slot).elements(); ++i) state.recurrent(slot).data[i] = value;
    for (size i = 0; i < state.conv(slot).elements(); ++i) state.conv(slot).data[i] = bf16(value);
  };
  const auto all = [](const KdaState<float, bf16>& s, size slot, float value) {
    bool same = true;
    for (size i = 0; i < s.recurrent(slot).elements(); ++i) same = same && s.recurrent(slot).data[i] == value;
    for (size i = 0; i < s.conv(slot).elements(); ++i) same = same && float(s.conv(slot).data[i]) == value;
    return same;
  };
  for (size slot = 0; slot < 3; ++slot) CHECK(all(state, slot, 0));
  fill(0, 1), fill(1, NAN), fill(2, 2);
  const KdaState<float, bf16> copy = state;
  state.reset(1);
  CHECK((all(state, 0, 1) && all(state, 1, 0) && all(state, 2, 2)));
  CHECK((all(copy, 0, 1) && std::isnan(copy.recurrent(1).data[0])));
  check_refused("KdaState", "slot", [&] { state.reset(3); });
  check_refused("KdaState", "slot", [&] { copy.conv(7); });
  check_refused("KdaState", "geometry.heads", [] { KdaState<>(KdaConfig{0, 4, 4}, 1); });
  check_refused("KdaState", "", [] { KdaState<>(KdaConfig{size{1} << 30, size{1} << 20, 4}, 1); });
  check_refused("KdaState", "slots", [] { KdaState<>(KdaConfig{size{1} << 20, size{1} << 15, 4}, size{1} << 20); });
  check_refused("KdaState", "slots", [] { KdaState<>(tiny::Kda{}, size{1} << 31); });
}

TEST_CASE("kda_decode_token refuses what does not fit and changes nothing", "[kda][errors]") {
  using F2 = HostView<float, 2>;
  const KdaConfig g{2, 4, 4};
  const size width = 8;
  std::vector<float> memory(1000, 0.25f);
  std::vector<id> ids = {0, 1, 1};
  F2 x = view(memory.data(), 3, 3 * width), decay = view(memory.data() + 100, 3, width),
     beta = view(memory.data() + 150, 3, 2), out = view(memory.data() + 160, 3, width),
     conv = view(memory.data() + 200, 3 * width, 4);
  HostView<float, 4> recurrent = view(memory.data() + 300, 2, 2, 4, 4);
  HostView<float, 3> window = view(memory.data() + 400, 2, 3 * width, 3);
  const auto weights = kda_conv_weights(g, conv);
  const auto call = [&](const KdaConfig& geometry, const F2& a, const KdaConvWeights<F2>& w, const F2& d, const F2& b,
                        const HostView<float, 4>& s, const HostView<float, 3>& c, const F2& o) {
    kda_decode_token(host{}, geometry, a, w, d, b, view(ids), KdaStateView<float, float>{s, c}, o);
  };
  const auto refused = [&](const std::string& argument, auto&&... arguments) {
    const auto before = memory;
    check_refused("kda_decode_token", argument, [&] { call(arguments...); });
    check(same_bits(memory, before));
  };
  refused("geometry.heads", KdaConfig{0, 4, 4}, x, weights, decay, beta, recurrent, window, out);
  refused("x_qkv", g, x.slice(1, 0, 23), weights, decay, beta, recurrent, window, out);
  refused("x_qkv", g, F2{nullptr, {3, 24}, {24, 1}}, weights, decay, beta, recurrent, window, out);
  refused("x_qkv", g, F2{memory.data(), {3, 24}, {24, 2}}, weights, decay, beta, recurrent, window, out);
  refused("conv.q", g, x, KdaConvWeights{weights.q.slice(0, 0, 7), weights.k, weights.v}, decay, beta, recurrent,
          window, out);
  refused("conv.k", g, x, KdaConvWeights{weights.q, weights.k.slice(1, 0, 3), weights.v}, decay, beta, recurrent,
          window, out);
  refused("conv.v", g, x, KdaConvWeights{weights.q, weights.k, weights.v.slice(0, 0, 7)}, decay, beta, recurrent,
          window, out);
  refused("log_decay", g, x, weights, decay.slice(0, 0, 2), beta, recurrent, window, out);
  refused("beta", g, x, weights, decay, beta.slice(1, 0, 1), recurrent, window, out);
  refused("state.recurrent", g, x, weights, decay, beta, recurrent.slice(1, 0, 1), window, out);
  refused("state.conv", g, x, weights, decay, beta, recurrent, window.slice(0, 0, 1), out);
  refused("state", g, x, weights, decay, beta, recurrent, HostView<float, 3>{window.data, {2, 24, 3}, {100, 4, 1}},
          out);
  refused("out", g, x, weights, decay, beta, recurrent, window, out.slice(1, 0, 7));
  for (const auto& [name, data] : {std::pair("x_qkv", x.data),
                                   {"conv.q", weights.q.data},
                                   {"conv.k", weights.k.data},
                                   {"conv.v", weights.v.data},
                                   {"log_decay", decay.data},
                                   {"beta", beta.data},
                                   {"state.recurrent", recurrent.data + 63},
                                   {"state.conv", window.data + 143}}) {
    INFO("out over " << name);
    refused("out", g, x, weights, decay, beta, recurrent, window, view(data, 3, width));
  }
  refused("state.recurrent", g, x, weights, decay, beta, view(x.data, 2, 2, 4, 4), window, out);
  refused("state.conv", g, x, weights, decay, beta, recurrent, view(weights.q.data, 2, 3 * width, 3), out);
  for (const std::vector<id>& bad : {std::vector<id>{0, 2, 1}, {0, -2, 1}, {0, 1, 0}, {0, pad_slot, 0}, {0, 1}}) {
    ids = bad;
    refused("slots", g, x, weights, decay, beta, recurrent, window, out);
  }
  std::vector<double> other(32);
  const KdaConvWeights<AnyMatrix<>> mixed{weights.q, AnyMatrix<>(view(other, 8, 4)), weights.v};
  ids = {0, 1, 1};
  check_refused("kda_decode_token", "conv", [&] {
    kda_decode_token(host{}, g, x, mixed, decay, beta, view(ids), KdaStateView<float, float>{recurrent, window}, out);
  });
  check_refused("kda_decode_token", "conv.v", [&] {
    kda_decode_token(host{}, g, x, KdaConvWeights<AnyMatrix<>>{weights.q, weights.k, {}}, decay, beta, view(ids),
                     KdaStateView<float, float>{recurrent, window}, out);
  });
  call(g, x, weights, decay, beta, recurrent, window, out);  // and the arguments themselves fit
}

TEST_CASE("kda_gate, short_conv and gated_rms_norm refuse what does not fit", "[kda][errors]") {
  const KdaConfig g{2, 4, 4};
  std::vector<float> memory(200, 0.5f);
  const auto z = view(memory.data(), 3, 8), out = view(memory.data() + 50, 3, 8);
  const auto a_log = view(memory.data() + 100, 2), bias = view(memory.data() + 110, 8);
  const auto gate = [&](auto geometry, auto z_, auto a, auto b, std::optional<float> bound, auto o) {
    return [=] { kda_gate(host{}, geometry, z_, a, b, bound, o); };
  };
  check_refused("kda_gate", "geometry.head_dim", gate(KdaConfig{2, 0, 4}, z, a_log, bias, -5.0f, out));
  check_refused("kda_gate", "z", gate(g, z.slice(1, 0, 7), a_log, bias, -5.0f, out));
  check_refused("kda_gate", "A_log", gate(g, z, view(memory.data(), 1), bias, -5.0f, out));
  check_refused("kda_gate", "A_log", gate(g, z, AnyVector<>{}, bias, -5.0f, out));
  check_refused("kda_gate", "dt_bias", gate(g, z, a_log, view(memory.data(), 9), -5.0f, out));
  check_refused("kda_gate", "lower_bound", gate(g, z, a_log, bias, 0.0f, out));
  check_refused("kda_gate", "lower_bound", gate(g, z, a_log, bias, -INFINITY, out));
  check_refused("kda_gate", "lower_bound", gate(g, z, a_log, bias, NAN, out));
  check_refused("kda_gate", "log_decay", gate(g, z, a_log, bias, -5.0f, out.slice(0, 0, 2)));

  const auto norm = [&](auto core, auto gate_, auto weight, auto o) {
    return [=] { gated_rms_norm(host{}, g, core, gate_, weight, 1e-5f, o); };
  };
  const auto weight = view(memory.data() + 120, 4);
  check_refused("gated_rms_norm", "core", norm(z.slice(1, 0, 7), out, weight, out));
  check_refused("gated_rms_norm", "gate", norm(z, out.slice(0, 0, 1), weight, out));
  check_refused("gated_rms_norm", "weight", norm(z, out, bias, out));
  check_refused("gated_rms_norm", "out", norm(z, out, weight, out.slice(1, 0, 7)));

  std::vector<id> ids = {0, 0, 1};
  const auto taps = view(memory.data() + 130, 8, 3);
  const auto window = view(memory.data() + 160, 2, 8, 2);
  const auto conv = [&](auto x, auto w, auto state, auto o) {
    return [=, &ids] { short_conv(host{}, x, w, view(ids), state, o); };
  };
  check_refused("short_conv", "weight", conv(z, taps.slice(0, 0, 7), window, out));
  check_refused("short_conv", "weight's taps", conv(z, taps.slice(1, 0, 0), window, out));
  check_refused("short_conv", "window", conv(z, taps, view(memory.data() + 160, 2, 8, 1), out));
  check_refused("short_conv", "out", conv(z, taps, window, out.slice(1, 0, 7)));
  check_refused("short_conv", "out", conv(z, taps, window, z));
  check_refused("short_conv", "out", conv(z, taps, window, view(memory.data() + 161, 3, 8)));
  check_refused("short_conv", "window", conv(z, taps, view(memory.data() + 2, 2, 8, 2), out));
  ids = {0, 1, 0};
  check_refused("short_conv", "slots", conv(z, taps, window, out));
  check(same_bits(memory, std::vector<float>(200, 0.5f)));
}
