// SPDX-License-Identifier: Apache-2.0
// KDA on the device against the host: accuracy and rounding.

#include <k3/geometry/presets.hpp>

#include "cuda/kda_device.hpp"
#include "cuda/kda_problem.hpp"
#include "support/differences.hpp"

using namespace k3;
using namespace k3::test;

TEST_CASE("cuda kda: the token step in float agrees with double", "[cuda][kda]") {
  for (const KdaConfig& g : kda_shapes()) {
    INFO(name(g));
    const auto in = kda_device_problem<float>(g, 2, 3, 11);
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
  for (KdaConfig g : kda_shapes())
    for (const std::optional<float> bound : all_or_few<std::optional<float>>(
             {-5.0f, std::nullopt}, {g.heads == 2 ? std::optional<float>(-5.0f) : std::nullopt})) {
      g.gate_lower_bound = bound;
      INFO(name(g));
      const auto in = kda_device_problem<float>(g, 2, 3, 21);
      const auto want = on_host<double>(in);
      const auto got = kda_fused_on_device(in);
      check(compare(got.out, want.out, 2e-6, 0, true));
      check(compare(got.state, want.state, 2e-6, 0, true));
      check(compare(got.window, want.window, 0));
      CHECK(got.status == std::vector<unsigned>(in.rows, 0u));
    }
}

TEST_CASE("cuda kda: bf16 rounds where the host's bf16 path does", "[cuda][kda]") {
  auto geometries = kda_shapes();
  if (!small_only()) geometries.push_back(KdaConfig::production());
  for (KdaConfig g : geometries) {
    g.gate_lower_bound = -5.0f;
    INFO(name(g));
    const auto in = kda_device_problem<bf16>(g, 2, 2, 31);
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

TEST_CASE("cuda kda: sampled sequences of the released geometry agree with double", "[cuda][kda]") {
  KdaConfig g = small_only() ? KdaConfig{2, 128, 4} : KdaConfig::production();
  g.gate_lower_bound = -5.0f;
  for (const size tokens : {size{1}, size{3}}) {
    const size sequences = tokens == 1 ? 12 : 1, width = kda_width(g), state = kda_state_elements(g);
    const auto in = kda_device_problem<float>(g, sequences, tokens, 56);
    const auto got = kda_fused_on_device(in, {.static_geometry = g == KdaConfig::production()});
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

TEST_CASE("cuda kda: extreme inputs agree with double", "[cuda][kda]") {
  for (const KdaConfig& g : {KdaConfig{1, 24, 4}, KdaConfig{1, 128, 4}}) {
    auto in = kda_device_problem<float>(g, 1, 4, 81);
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
    auto in = kda_device_problem<float>({1, n, 4}, 1, tokens, 91);
    for (auto* v : {&in.x, &in.window}) v->assign(v->size(), 0.0f);
    in.log_decay.assign(tokens * n, -8e-5f);
    in.state.assign(n * n, 0.0f);
    in.state[0] = 1;
    const std::vector<float> left = {kda_token_on_device(in).state[0]};
    // Each factor is a float near 1: half an ulp of it, 4096 times over, is 2.4e-4.
    check(compare(left, std::vector<double>{std::exp(-8e-5 * static_cast<double>(tokens))}, 1e-3));
  }
}
