// SPDX-License-Identifier: Apache-2.0
// One step of Kimi Delta Attention, with a geometry that the compiler knows and with the same one at run time.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include <k3/geometry/presets.hpp>
#include <k3/ops/kda_decode_token.hpp>
#include <k3/ops/kda_gate.hpp>

namespace {

/// Inputs of one token: what the projections of a layer would give.
template <class G>
struct Token {
  std::vector<float> qkv, z, beta;
  explicit Token(G g) : qkv(k3::kda_conv_channels(g)), z(k3::kda_width(g)), beta(g.heads, 0.5f) {
    for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] = 3 * std::sin(static_cast<float>(i + 1));
    for (std::size_t i = 0; i < z.size(); ++i) z[i] = std::cos(static_cast<float>(i + 1));
  }
};

/// The output of `tokens` equal tokens, the last one's.
// example-begin kda_step
template <k3::kda_geometry G>
std::vector<float> run(G g, int tokens) {
  const std::size_t width = k3::kda_width(g), channels = k3::kda_conv_channels(g);
  const Token token(g);
  std::vector<float> taps(channels * g.conv_kernel, 0.0f), a_log(g.heads, 0.0f), bias(width, 0.0f);
  for (std::size_t c = 0; c < channels; ++c) taps[c * g.conv_kernel + g.conv_kernel - 1] = 1;  // the token itself
  std::vector<float> log_decay(width), out(width);
  k3::KdaState<float> state(g, 1);  // one sequence, empty
  const std::vector<k3::id> slots{0};

  for (int t = 0; t < tokens; ++t) {
    k3::kda_gate(k3::host{}, g, k3::view(token.z, 1, width), k3::view(a_log), k3::view(bias), g.gate_lower_bound,
                 k3::view(log_decay, 1, width));
    k3::kda_decode_token(k3::host{}, g, k3::view(token.qkv, 1, channels),
                         k3::kda_conv_weights(g, k3::view(taps, channels, g.conv_kernel)),
                         k3::view(log_decay, 1, width), k3::view(token.beta, 1, g.heads), k3::view(slots), state.view(),
                         k3::view(out, 1, width));
  }
  return out;
}
// example-end kda_step

/// The first token of an empty state by hand: S = k (beta v)^T, so out = beta (k . q) v.
template <class G>
double first_output(G g) {
  const Token token(g);
  const std::size_t width = k3::kda_width(g);
  const auto silu = [](double x) { return x / (1 + std::exp(-x)); };
  double qk = 0, qq = 0, kk = 0;
  for (std::size_t i = 0; i < g.head_dim; ++i) {
    const double q = silu(token.qkv[i]), k = silu(token.qkv[width + i]);
    qk += q * k, qq += q * q, kk += k * k;
  }
  const double scale = std::sqrt((qq + 1e-6) * (kk + 1e-6) * static_cast<double>(g.head_dim));
  return qk / scale * silu(token.qkv[2 * width]) / (1 + std::exp(-0.5));
}

}  // namespace

int main() {
  constexpr k3::tiny::Kda fixed;                                    // 2 heads of 4, an empty type
  const k3::KdaConfig read{2, 4, 4, fixed.gate_lower_bound, true};  // the same numbers in memory
  const std::vector<float> a = run(fixed, 3), b = run(read, 3);
  for (std::size_t i = 0; i < a.size(); ++i) std::printf("%s%.4f", i ? " " : "out: ", static_cast<double>(a[i]));
  const bool same = std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  const double difference = std::abs(static_cast<double>(run(fixed, 1)[0]) - first_output(fixed));
  std::printf("\nfixed and run-time geometry: %s bits; first token against the formula: %s\n",
              same ? "the same" : "different", difference < 1e-6 ? "within 1e-6" : "WRONG");
  return same && difference < 1e-6 ? 0 : 1;
}
