// SPDX-License-Identifier: Apache-2.0
// KDA on the host: the definition in double, geometries, vector versions, threads, batches.

#include <algorithm>

#include <k3/geometry/presets.hpp>
#include <k3/ops/kda_decode_token.hpp>

#include "support/kda_oracle.hpp"
#include "support/refusal.hpp"

using namespace k3;
using namespace k3::test;

namespace {

const std::vector<KdaConfig> shapes = {{1, 1, 4},  {2, 2, 1},  {3, 5, 3},   {2, 7, 4},  {1, 13, 2},
                                       {2, 24, 4}, {3, 31, 5}, {1, 100, 4}, {2, 128, 4}};

std::string shape_name(const KdaConfig& g) {
  return std::to_string(g.heads) + " heads of " + std::to_string(g.head_dim) + ", kernel " +
         std::to_string(g.conv_kernel);
}

}  // namespace

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
  check_refused("KdaState", "its size", [] { KdaState<>(KdaConfig{size{1} << 40, 1024, 4}, size{1} << 20); });
  check_refused("KdaState", "slots", [] { KdaState<>(tiny::Kda{}, size{1} << 31); });
  const KdaState<float, bf16> taken = std::move(state);
  CHECK((taken.slots() == 3 && all(taken, 2, 2)));
  CHECK((state.slots() == 0 && state.view().recurrent.empty()));  // what was moved from is empty
  check_refused("KdaState", "slot", [&] { state.reset(0); });
}
