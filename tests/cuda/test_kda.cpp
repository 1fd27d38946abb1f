// SPDX-License-Identifier: Apache-2.0
// KDA on the device against the host: accuracy, rounding, batches, runs of tokens, memory layout, graphs, bad
// arguments.

#include <k3/geometry/presets.hpp>
#include <k3/ops/gated_rms_norm.hpp>
#include <k3/ops/kda_gate.hpp>
#include <k3/ops/row_status.hpp>

#include "cuda/device_test.hpp"
#include "cuda/kda_device.hpp"
#include "support/kda_oracle.hpp"

using namespace k3;
using namespace k3::test;

namespace {

const unsigned bad_slot = static_cast<unsigned>(RowStatus::bad_slot);

std::vector<KdaConfig> shapes() {
  std::vector<KdaConfig> result = {{1, 1, 4},  {2, 2, 1},  {3, 5, 3},  {2, 7, 4},   {1, 13, 2},  {3, 24, 4},
                                   {2, 31, 5}, {3, 64, 4}, {1, 97, 4}, {3, 128, 4}, {2, 128, 1}, {1, 128, 7}};
  if (!small_only())
    for (const KdaConfig g : {KdaConfig{2, 129, 4}, KdaConfig{3, 256, 4}, KdaConfig{1, 300, 3}, KdaConfig{1, 1024, 2}})
      result.push_back(g);
  return result;
}

std::string name(const KdaConfig& g) {
  return std::to_string(g.heads) + " heads of " + std::to_string(g.head_dim) + ", kernel " +
         std::to_string(g.conv_kernel) + (g.gate_lower_bound ? ", bounded" : "");
}

/// A random problem whose numbers are exact in bf16 where X is; row r belongs to slot r / tokens.
template <class X>
KdaDeviceInputs<X> problem(KdaConfig g, size slots, size tokens, std::uint32_t seed) {
  const KdaProblem p = kda_problem(g, slots, tokens, seed);
  const size width = kda_width(g);
  const auto normal = [&](size count, std::uint32_t offset, double scale) {
    return random_normal(count, seed + offset, scale);
  };
  const auto weights = [&](const std::vector<double>& values) { return converted<float>(converted<bf16>(values)); };
  KdaDeviceInputs<X> in;
  in.g = g, in.rows = p.rows, in.slots = slots;
  in.x = converted<X>(p.x), in.window = converted<X>(p.window), in.state = converted<float>(p.state), in.slot = p.slot;
  in.conv = weights(p.conv);
  in.log_decay = converted<float>(p.log_decay), in.beta_float = converted<float>(p.beta),
  in.beta = converted<X>(p.beta);
  in.z = converted<X>(normal(p.rows * width, 10, 2)), in.gate = converted<X>(normal(p.rows * width, 11, 2));
  in.a_log = weights(normal(g.heads, 12, 0.5)), in.dt_bias = weights(normal(width, 13, 1));
  in.o_norm = weights(normal(g.head_dim, 14, 1));
  in.a_log.push_back(NAN);  // padding that must not be read
  return in;
}

/// The host's result in T for both activations and accumulation where T is a float or double, or in bf16.
template <class T, class X>
KdaDeviceOutputs<T, T> on_host(const KdaDeviceInputs<X>& given, std::vector<accumulator_t<T>>* core_out = nullptr,
                               bool from_log_decay = false) {
  using Acc = accumulator_t<T>;
  const KdaConfig g = given.g;
  const size rows = given.rows, width = kda_width(g), channels = kda_conv_channels(g);
  const auto x = converted<T>(given.x), z = converted<T>(given.z), gate = converted<T>(given.gate);
  auto beta = converted<Acc>(from_log_decay ? given.beta_float : converted<float>(given.beta));
  auto log_decay = converted<Acc>(given.log_decay);
  auto state = converted<Acc>(given.state);
  KdaDeviceOutputs<T, T> result;
  result.window = converted<T>(given.window);
  std::vector<Acc> core(rows * width);
  result.out.resize(rows * width);
  const host exec{.isa = Isa::plain};
  if (!from_log_decay)
    kda_gate(exec, g, view(z, rows, width), view(given.a_log), view(given.dt_bias), g.gate_lower_bound,
             view(log_decay, rows, width));
  kda_decode_token(exec, g, view(x, rows, channels), kda_conv_weights(g, view(given.conv, channels, g.conv_kernel)),
                   view(log_decay, rows, width), view(beta, rows, g.heads), view(given.slot),
                   KdaStateView<Acc, T>{view(state, given.slots, g.heads, g.head_dim, g.head_dim),
                                        view(result.window, given.slots, channels, g.conv_kernel - 1)},
                   view(core, rows, width));
  if (core_out) *core_out = core;
  gated_rms_norm(exec, g, view(core, rows, width), view(gate, rows, width), view(given.o_norm),
                 static_cast<Acc>(given.norm_eps), view(result.out, rows, width));
  result.state = converted<float>(state);
  return result;
}

template <class Outputs>
void check_same(const Outputs& got, const Outputs& want) {
  check(same_bits(got.out, want.out));
  check(same_bits(got.state, want.state));
  check(same_bits(got.window, want.window));
  CHECK(got.gaps_kept);
}

template <class Got, class Want>
double relative_l2(const Got& got, const Want& want) {
  double difference = 0, norm = 0;
  for (size i = 0; i < got.size(); ++i) {
    const double g = static_cast<double>(got[i]), w = static_cast<double>(want[i]);
    difference += (g - w) * (g - w), norm += w * w;
  }
  return std::sqrt(difference / norm);
}

/// `count` rows of a problem from row `first` on, with the whole state.
template <class X>
KdaDeviceInputs<X> rows_of(const KdaDeviceInputs<X>& in, size first, size count) {
  const auto cut = [&](auto& v) {
    const size width = v.size() / in.rows;
    v.erase(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(first * width));
    v.resize(count * width);
  };
  KdaDeviceInputs<X> result = in;
  cut(result.x), cut(result.z), cut(result.beta), cut(result.gate), cut(result.log_decay), cut(result.beta_float);
  cut(result.slot);
  result.rows = count;
  return result;
}

template <class V>
V slice(const V& v, size first, size count) {
  const auto begin = v.begin() + static_cast<std::ptrdiff_t>(first);
  return V(begin, begin + static_cast<std::ptrdiff_t>(count));
}

const KdaDeviceOptions plain{};

}  // namespace

TEST_CASE("cuda kda: the token step in float agrees with double", "[cuda][kda]") {
  for (const KdaConfig& g : shapes()) {
    INFO(name(g));
    const auto in = problem<float>(g, 2, 3, 11);
    std::vector<double> core;
    const auto want = on_host<double>(in, &core, true);
    const auto got = kda_token_on_device(in);
    check(compare(got.out, core, 2e-6, 0, true));
    check(compare(got.state, want.state, 2e-6, 0, true));
    check(compare(got.window, want.window, 0));
    CHECK(got.gaps_kept);
  }
}

TEST_CASE("cuda kda: the fused form in float agrees with double, bounded and not", "[cuda][kda]") {
  for (KdaConfig g : shapes())
    for (const std::optional<float> bound : {std::optional<float>(-5.0f), std::optional<float>()}) {
      g.gate_lower_bound = bound;
      INFO(name(g));
      const auto in = problem<float>(g, 2, 3, 21);
      const auto want = on_host<double>(in);
      const auto got = kda_fused_on_device(in);
      check(compare(got.out, want.out, 2e-6, 0, true));
      check(compare(got.state, want.state, 2e-6, 0, true));
      check(compare(got.window, want.window, 0));
      CHECK(got.status == std::vector<unsigned>(in.rows, 0u));
    }
}

TEST_CASE("cuda kda: bf16 rounds where the host's bf16 path does", "[cuda][kda]") {
  auto geometries = shapes();
  if (!small_only()) geometries.push_back(KdaConfig::production());
  for (KdaConfig g : geometries) {
    g.gate_lower_bound = -5.0f;
    INFO(name(g));
    const auto in = problem<bf16>(g, 2, 2, 31);
    const auto want = on_host<bf16>(in);
    const auto got = kda_fused_on_device(in, {.static_geometry = g == KdaConfig::production()});
    check(same_bits(got.window, want.window));
    const double out = relative_l2(got.out, want.out), state = relative_l2(got.state, want.state);
    INFO("relative L2 of the output " << out << ", of the state " << state);
    // A convolution that lands on the other side of a rounding boundary moves a bf16 by 2^-8: much where there are few.
    const double bound = kda_width(g) < 64 ? 5e-3 : 5e-4;
    CHECK(out <= bound);
    CHECK(state <= bound);
    std::vector<float> core;
    on_host<bf16>(in, &core, true);
    const double unfused = relative_l2(kda_token_on_device(in).out, core);
    INFO("relative L2 of the token step " << unfused);
    CHECK(unfused <= bound);
  }
}

TEST_CASE("cuda kda: fixed geometries, weights' types, alignment and strides do not change bits", "[cuda][kda]") {
  std::vector<KdaConfig> geometries = {kda_config(tiny::Kda{}), {3, 24, 4, -5.0f}, {3, 128, 4, std::nullopt}};
  if (!small_only()) geometries.push_back(KdaConfig::production());
  for (const KdaConfig& g : geometries) {
    INFO(name(g));
    const bool fixed = g.head_dim == 4 || g.heads == 96;
    const auto in = problem<bf16>(g, 2, 2, 41);
    const auto in_float = problem<float>(g, 2, 2, 42);
    const auto fused = kda_fused_on_device(in);
    const auto fused_float = kda_fused_on_device(in_float);
    const auto token = kda_token_on_device(in_float);
    for (const KdaDeviceOptions& o :
         {plain, KdaDeviceOptions{.static_geometry = fixed}, KdaDeviceOptions{.bf16_weights = true},
          KdaDeviceOptions{.shift = 1}, KdaDeviceOptions{.gap = 3}, KdaDeviceOptions{.gap = 4},
          KdaDeviceOptions{.bf16_weights = true, .shift = 1, .gap = 1},
          KdaDeviceOptions{.static_geometry = fixed, .shift = 3}}) {
      INFO("static " << o.static_geometry << ", bf16 weights " << o.bf16_weights << ", shift " << o.shift << ", gap "
                     << o.gap);
      check_same(kda_fused_on_device(in, o), fused);
      check_same(kda_fused_on_device(in_float, o), fused_float);
      check_same(kda_token_on_device(in_float, o), token);
    }
  }
}

TEST_CASE("cuda kda: a row's bits do not depend on its batch, nor on the run", "[cuda][kda]") {
  for (const KdaConfig& g : {KdaConfig{2, 128, 4, -5.0f}, KdaConfig{3, 24, 4, std::nullopt}}) {
    INFO(name(g));
    const size most = small_only() ? 9 : 128;
    const auto all = problem<bf16>(g, most, 1, 51);
    const size width = kda_width(g), state = kda_state_elements(g);
    const auto alone = kda_fused_on_device(rows_of(all, 0, 1));
    check_same(kda_fused_on_device(rows_of(all, 0, 1)), alone);
    for (const size rows : {2u, 7u, 8u, 9u, 33u, 128u}) {
      if (rows > most) continue;
      INFO(rows << " rows");
      auto batch = rows_of(all, 0, rows);
      const auto together = kda_fused_on_device(batch);
      check(same_bits(slice(together.out, 0, width), alone.out));
      check(same_bits(slice(together.state, 0, state), slice(alone.state, 0, state)));
      const auto last = kda_fused_on_device(rows_of(all, rows - 1, 1));
      check(same_bits(slice(together.out, (rows - 1) * width, width), last.out));
      check(same_bits(slice(together.state, (rows - 1) * state, state), slice(last.state, (rows - 1) * state, state)));
      check_same(kda_fused_on_device(batch), together);
    }
  }
}

TEST_CASE("cuda kda: however a head is shared out over blocks, its bits are the same", "[cuda][kda]") {
  // One or two sequences of 96 heads are split over clusters, more are not; off its alignment a head stays in memory.
  if (small_only()) return;
  const KdaConfig g = KdaConfig::production();
  const size rows = 4, width = kda_width(g), state = kda_state_elements(g), window = kda_conv_elements(g);
  const auto all = problem<bf16>(g, rows, 1, 55);
  const auto together = kda_fused_on_device(all);
  check_same(kda_fused_on_device(all, {.shift = 1}), together);
  for (const size count : {size{1}, size{2}})
    for (size first = 0; first + count <= rows; ++first)
      for (const size shift : {size{0}, size{1}}) {
        INFO("rows " << first << " to " << first + count - 1 << ", shift " << shift);
        const auto some = kda_fused_on_device(rows_of(all, first, count), {.shift = shift});
        check(same_bits(some.out, slice(together.out, first * width, count * width)));
        check(same_bits(slice(some.state, first * state, count * state),
                        slice(together.state, first * state, count * state)));
        check(same_bits(slice(some.window, first * window, count * window),
                        slice(together.window, first * window, count * window)));
      }
}

TEST_CASE("cuda kda: sampled sequences of the released geometry agree with double", "[cuda][kda]") {
  if (small_only()) return;
  KdaConfig g = KdaConfig::production();
  g.gate_lower_bound = -5.0f;
  for (const size tokens : {size{1}, size{3}}) {
    const size sequences = tokens == 1 ? 12 : 1, width = kda_width(g), state = kda_state_elements(g);
    const auto in = problem<float>(g, sequences, tokens, 56);
    const auto got = kda_fused_on_device(in, {.static_geometry = true});
    for (const size sequence : {size{0}, sequences / 2, sequences - 1}) {
      INFO(tokens << " tokens, sequence " << sequence << " of " << sequences);
      auto one = rows_of(in, sequence * tokens, tokens);
      one.slot.assign(tokens, 0), one.slots = 1;
      one.state = slice(in.state, sequence * state, state);
      one.window = slice(in.window, sequence * kda_conv_elements(g), kda_conv_elements(g));
      const auto want = on_host<double>(one);
      check(compare(slice(got.out, sequence * tokens * width, tokens * width), want.out, 2e-6, 0, true));
      check(compare(slice(got.state, sequence * state, state), want.state, 2e-6, 0, true));
    }
  }
}

TEST_CASE("cuda kda: steps that follow each other at once see the state that the last one left", "[cuda][kda]") {
  // Direct calls of one state: each may start before the one before it has ended. A replayed graph has one step.
  for (KdaConfig g : {KdaConfig{2, 128, 4, -5.0f}, KdaConfig{96, 128, 4, -5.0f}, KdaConfig{3, 24, 4, std::nullopt}}) {
    if (small_only() && g.heads > 8) continue;
    for (const size slots : {size{1}, size{4}}) {
      INFO(name(g) << ", " << slots << " sequences");
      const auto in = problem<bf16>(g, slots, 1, 57);
      const auto want = kda_fused_on_device(in, {.calls = 24, .graph = true});
      for (int repeat = 0; repeat < 3; ++repeat) check_same(kda_fused_on_device(in, {.calls = 24}), want);
    }
  }
}

TEST_CASE("cuda kda: several tokens in one call give the bits of one call each", "[cuda][kda]") {
  for (const KdaConfig& g : shapes()) {
    INFO(name(g));
    auto in = problem<bf16>(g, 3, 5, 61);
    in.slot[4] = pad_slot;  // sequence 0 has four tokens, then padding
    const auto together = kda_fused_on_device(in);
    std::vector<bf16> out;
    auto one = in;
    for (size row = 0; row < in.rows; ++row) {
      auto step = rows_of(in, row, 1);
      step.state = one.state, step.window = one.window;
      const auto got = kda_fused_on_device(step);
      one.state = got.state, one.window = got.window;
      out.insert(out.end(), got.out.begin(), got.out.end());
    }
    check(same_bits(together.out, out));
    check(same_bits(together.state, one.state));
    check(same_bits(together.window, one.window));
  }
}

TEST_CASE("cuda kda: padding and bad slots give zeros and touch nothing; NaN stays in its sequence", "[cuda][kda]") {
  for (const KdaConfig& g : {KdaConfig{2, 128, 4}, KdaConfig{3, 24, 4}}) {
    INFO(name(g));
    const size width = kda_width(g), state = kda_state_elements(g), window = kda_conv_elements(g);
    const auto good = problem<float>(g, 6, 1, 71);
    const auto want = kda_fused_on_device(good);
    for (const id slot : {pad_slot, id{6}, id{-2}, id{0x7fffffff}, id{0}}) {  // 0 comes back after slot 1
      INFO("slot " << slot);
      auto in = good;
      in.slot[2] = slot;
      for (auto* values : {&in.x, &in.z, &in.gate})
        for (size c = 0; c < values->size() / 6; ++c) (*values)[2 * values->size() / 6 + c] = NAN;
      for (size h = 0; h < g.heads; ++h) in.beta[2 * g.heads + h] = NAN;
      const auto got = kda_fused_on_device(in);
      for (size row = 0; row < 6; ++row) {
        INFO("row " << row);
        CHECK(got.status[row] == (row == 2 && slot != pad_slot ? bad_slot : 0u));
        const bool bad = row == 2;
        check(same_bits(slice(got.out, row * width, width),
                        bad ? std::vector<float>(width, 0.0f) : slice(want.out, row * width, width)));
        check(
            same_bits(slice(got.state, row * state, state), slice(bad ? good.state : want.state, row * state, state)));
        check(same_bits(slice(got.window, row * window, window),
                        slice(bad ? good.window : want.window, row * window, window)));
      }
    }
    auto in = good;
    for (size c = 0; c < 3 * width; ++c) in.x[3 * 3 * width + c] = NAN;
    const auto got = kda_fused_on_device(in);
    for (size row = 0; row < 6; ++row)
      if (row == 3)
        for (size c = 0; c < width; ++c) REQUIRE(std::isnan(got.out[row * width + c]));
      else
        check(same_bits(slice(got.out, row * width, width), slice(want.out, row * width, width)));
    auto nobody = good;
    nobody.slot.assign(6, pad_slot);
    check(same_bits(kda_token_on_device(nobody).out, std::vector<float>(6 * width, 0.0f)));
    const auto none = kda_fused_on_device(rows_of(good, 0, 0));
    CHECK(none.out.empty());
    check(same_bits(none.state, good.state));
  }
}

TEST_CASE("cuda kda: extreme inputs agree with double", "[cuda][kda]") {
  for (const KdaConfig& g : {KdaConfig{1, 24, 4}, KdaConfig{1, 128, 4}}) {
    auto in = problem<float>(g, 1, 4, 81);
    const std::vector<float> values = {0.0f, -0.0f, 1e4f, -1e4f, 1e-30f, -95.0f, -88.0f, 100.0f, -1e-3f, 60.0f};
    for (size i = 0; i < in.x.size(); ++i) in.x[i] = values[i % values.size()];
    const std::vector<float> decays = {0, -1e-8f, -5, -80, -90, -103, -110, -1e30f};
    for (size i = 0; i < in.log_decay.size(); ++i) in.log_decay[i] = decays[i % decays.size()];
    std::vector<double> core;
    const auto want = on_host<double>(in, &core, true);
    const auto got = kda_token_on_device(in);
    check(compare(got.out, core, 2e-6, 0, true));
    check(compare(got.state, want.state, 2e-6, 0, true));
  }
}

TEST_CASE("cuda kda: a slow decay over 4096 tokens is not rounded away", "[cuda][kda][cases]") {
  const size tokens = small_only() ? 64 : 4096;
  for (const size n : {size{2}, size{128}}) {
    auto in = problem<float>({1, n, 4}, 1, tokens, 91);
    for (auto* v : {&in.x, &in.window}) v->assign(v->size(), 0.0f);
    in.log_decay.assign(tokens * n, -8e-5f);
    in.state.assign(n * n, 0.0f);
    in.state[0] = 1;
    const std::vector<float> left = {kda_token_on_device(in).state[0]};
    // Each factor is a float near 1: half an ulp of it, 4096 times over, is 2.4e-4.
    check(compare(left, std::vector<double>{std::exp(-8e-5 * static_cast<double>(tokens))}, 1e-3));
  }
}

TEST_CASE("cuda kda: 70,000 rows give the bits of blocks of 1,000", "[cuda][kda][cases]") {
  if (small_only()) return;
  const size rows = 70000, width = 4;
  const auto all = problem<float>({1, 4, 4, -5.0f}, rows, 1, 101);
  const auto got = kda_fused_on_device(all);
  for (const size first : {size{0}, size{64800}, size{69000}}) {
    const auto part = kda_fused_on_device(rows_of(all, first, 1000));
    check(same_bits(slice(got.out, first * width, 1000 * width), part.out));
    check(same_bits(slice(got.state, first * 16, 16000), slice(part.state, first * 16, 16000)));
  }
}

TEST_CASE("cuda kda: a captured step replayed gives the bits of direct calls", "[cuda][kda][cases]") {
  for (const KdaConfig& g : {KdaConfig{2, 128, 4, -5.0f}, KdaConfig{3, 24, 4, std::nullopt}}) {
    const auto in = problem<bf16>(g, 3, 1, 111);
    check_same(kda_fused_on_device(in, {.calls = 3, .graph = true}), kda_fused_on_device(in, {.calls = 3}));
    check_same(kda_token_on_device(in, {.calls = 3, .graph = true}), kda_token_on_device(in, {.calls = 3}));
  }
}

TEST_CASE("cuda kda: the launch forms give the bits of the operation", "[cuda][kda]") {
  for (const KdaConfig& g : {KdaConfig{2, 128, 4}, KdaConfig{3, 24, 1}}) {
    auto in = problem<bf16>(g, 3, 2, 121);
    in.slot[1] = pad_slot;
    auto want = kda_token_on_device(in);
    want.status.clear();
    check_same(kda_launched(in, true), want);
    check_same(kda_launched(in, false), want);
    in.slot[5] = 3;
    CHECK_THROWS_AS(kda_launched(in, true), invalid_argument);
    CHECK_THROWS_AS(kda_launched(in, false), invalid_argument);
  }
}

TEST_CASE("cuda kda: device states come back byte for byte", "[cuda][kda]") { CHECK(kda_device_state_fault() == ""); }

TEST_CASE("cuda kda: wrong arguments are refused by name", "[cuda][kda]") {
  const std::vector<std::pair<std::string, std::string>> cases = {{"nothing", "accepted"},
                                                                  {"head_dim", "geometry.head_dim"},
                                                                  {"conv_kernel", "geometry.conv_kernel"},
                                                                  {"bound", "geometry.gate_lower_bound"},
                                                                  {"x_qkv", "x_qkv"},
                                                                  {"conv.q", "conv.q"},
                                                                  {"conv.k", "conv.k"},
                                                                  {"conv.v", "conv.v"},
                                                                  {"f64", "conv.k"},
                                                                  {"z", "z"},
                                                                  {"beta", "beta"},
                                                                  {"gate", "gate"},
                                                                  {"A_log", "A_log"},
                                                                  {"dt_bias", "dt_bias"},
                                                                  {"o_norm", "o_norm"},
                                                                  {"slots", "slots"},
                                                                  {"status", "status"},
                                                                  {"out", "out"},
                                                                  {"state.recurrent", "state.recurrent"},
                                                                  {"state.conv", "state.conv"},
                                                                  {"out over x", "out"},
                                                                  {"out over state", "out"},
                                                                  {"out over gate", "out"},
                                                                  {"state over conv", "state.conv"}};
  for (const auto& [wrong, argument] : cases) {
    INFO(wrong);
    CHECK(kda_refused_argument(wrong) == argument);
  }
}
