// SPDX-License-Identifier: Apache-2.0
// KDA on the host: the gate, the norm and the convolution against double, and what each operation refuses.

#include <algorithm>

#include <k3/geometry/presets.hpp>
#include <k3/ops/gated_rms_norm.hpp>
#include <k3/ops/kda_decode_token.hpp>
#include <k3/ops/kda_gate.hpp>
#include <k3/ops/rms_norm.hpp>

#include "support/kda_oracle.hpp"
#include "support/ops_fixture.hpp"
#include "support/refusal.hpp"

using namespace k3;
using namespace k3::test;

namespace {

constexpr double short_conv_bound = 6e-7;  // of the sum of |terms|

}  // namespace

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

TEST_CASE("short_conv agrees with double", "[kda]") {
  const size rows = 40, channels = 1000;
  const std::vector<id> slots(rows, 0);
  double worst = 0;
  for (const size taps : {size{1}, size{2}, size{3}, size{4}, size{7}}) {
    const auto x = exact_in_float(random_normal(rows * channels, static_cast<std::uint32_t>(taps), 3));
    const auto weight = exact_in_float(random_normal(channels * taps, 50 + static_cast<std::uint32_t>(taps)));
    for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512}) {
      std::vector<float> window(channels * (taps - 1)), out(rows * channels);
      const auto xf = converted<float>(x), wf = converted<float>(weight);
      short_conv(host{.isa = isa}, view(xf, rows, channels), view(wf, channels, taps), view(slots),
                 view(window, 1, channels, taps - 1), view(out, rows, channels));
      for (size t = 0; t < rows; ++t)
        for (size c = 0; c < channels; ++c) {
          double sum = 0, terms = 0;
          for (size j = 0; j < taps; ++j)
            if (t + j + 1 >= taps) {
              const double term = weight[c * taps + j] * x[(t + j + 1 - taps) * channels + c];
              sum += term;
              terms += std::fabs(term);
            }
          const double want = sum / (1 + std::exp(-sum)), got = static_cast<double>(out[t * channels + c]);
          const double error = std::fabs(got - want) / terms;
          worst = std::max(worst, error);
          if (error > short_conv_bound) {
            FAIL_CHECK("token " << t << ", channel " << c << " of " << taps << " taps: " << got << " for " << want
                                << ", " << error << " of the terms' sum, bound " << short_conv_bound);
          }
        }
    }
  }
  CAPTURE(worst);
  CHECK(worst > 0);
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
  for (const float eps : {-1e-5f, INFINITY, NAN})
    check_refused("gated_rms_norm", "eps", [&] { gated_rms_norm(host{}, g, z, out, weight, eps, out); });
  const auto strided = [&](size count) { return View<const float, 1>{memory.data() + 120, {count}, {2}}; };
  const auto nowhere = [](size count) { return View<const float, 1>{nullptr, {count}, {1}}; };
  check_refused("gated_rms_norm", "weight", norm(z, out, strided(4), out));
  check_refused("gated_rms_norm", "weight", norm(z, out, nowhere(4), out));
  check_refused("kda_gate", "A_log", gate(g, z, strided(2), bias, -5.0f, out));
  check_refused("kda_gate", "A_log", gate(g, z, nowhere(2), bias, -5.0f, out));
  check_refused("kda_gate", "dt_bias", gate(g, z, a_log, strided(8), -5.0f, out));
  check_refused("kda_gate", "dt_bias", gate(g, z, a_log, nowhere(8), -5.0f, out));

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
