// SPDX-License-Identifier: Apache-2.0
#pragma once
// LatentMoE layers of random weights, the layer written from the formula in double, and how the tests call it.

#include <algorithm>
#include <numeric>

#include <k3/geometry/presets.hpp>
#include <k3/ops/latent_moe_forward.hpp>

#include "support/compare.hpp"
#include "support/thrown_by.hpp"

namespace k3::test {

using Doubles = std::vector<double>;

/// Everything a layer needs, as numbers that bf16 holds exactly.
struct Layer {
  LatentMoeConfig g;
  Doubles gate, bias, down, norm, up;  // the router and the latent space
  Doubles shared_gate, shared_up, shared_down;
  std::vector<Doubles> w1, w3, w2;  // one per expert
};

inline Doubles exact_normal(std::size_t count, std::uint32_t seed, double scale) {
  return converted<double>(converted<bf16>(random_normal(count, seed, scale)));
}

inline Layer random_layer(const LatentMoeConfig& g, std::uint32_t seed) {
  Layer l;
  l.g = g;
  const std::size_t w = moe_expert_width(g), s = moe_shared_width(g);
  const auto scale = [](std::size_t columns) { return 1.5 / std::sqrt(static_cast<double>(columns)); };
  l.gate = exact_normal(g.n_routed * g.hidden, seed, scale(g.hidden));
  l.bias = exact_normal(g.n_routed, seed + 1, 0.1);
  l.down = exact_normal(g.latent * g.hidden, seed + 2, scale(g.hidden));
  l.norm = g.use_norm ? exact_normal(w, seed + 3, 1.0) : Doubles{};
  l.up = exact_normal(g.hidden * g.latent, seed + 4, scale(w));
  l.shared_gate = exact_normal(s * g.hidden, seed + 5, scale(g.hidden));
  l.shared_up = exact_normal(s * g.hidden, seed + 6, scale(g.hidden));
  l.shared_down = exact_normal(g.hidden * s, seed + 7, s ? scale(s) : 1.0);
  for (std::uint32_t e = 0; e < g.n_routed; ++e) {
    l.w1.push_back(exact_normal(g.expert_hidden * w, seed + 10 + 3 * e, scale(w)));
    l.w3.push_back(exact_normal(g.expert_hidden * w, seed + 11 + 3 * e, scale(w)));
    l.w2.push_back(exact_normal(w * g.expert_hidden, seed + 12 + 3 * e, scale(g.expert_hidden)));
  }
  return l;
}

/// A layer's weights stored as T, and views of them.
template <class T>
struct Stored {
  std::vector<std::vector<T>> memory;
  LatentMoeWeights weights;
  std::vector<ExpertWeights> experts;

  explicit Stored(const Layer& l) {
    memory.reserve(8 + 3 * l.w1.size());
    const LatentMoeConfig& g = l.g;
    const std::size_t w = moe_expert_width(g), s = moe_shared_width(g);
    weights.gate = matrix(l.gate, g.n_routed, g.hidden);
    weights.e_score_correction_bias = vector(l.bias);
    if (g.latent) weights.routed_expert_down_proj = matrix(l.down, g.latent, g.hidden);
    if (g.use_norm) weights.routed_expert_norm = vector(l.norm);
    if (g.latent) weights.routed_expert_up_proj = matrix(l.up, g.hidden, g.latent);
    if (g.n_shared)
      weights.shared_experts = {matrix(l.shared_gate, s, g.hidden), matrix(l.shared_up, s, g.hidden),
                                matrix(l.shared_down, g.hidden, s)};
    for (std::size_t e = 0; e < l.w1.size(); ++e)
      experts.push_back({matrix(l.w1[e], g.expert_hidden, w), matrix(l.w3[e], g.expert_hidden, w),
                         matrix(l.w2[e], w, g.expert_hidden)});
  }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

 private:
  AnyMatrix<> matrix(const Doubles& values, std::size_t rows, std::size_t columns) {
    memory.push_back(converted<T>(values));
    return view(std::as_const(memory.back()), rows, columns);
  }
  AnyVector<> vector(const Doubles& values) {
    memory.push_back(converted<T>(values));
    return view(std::as_const(memory.back()));
  }
};

/// Rounding to the 8 significant bits of bf16, ties to even; or none.
inline double round_to(bool on, double value) {
  if (!on || value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

inline Doubles times(const Doubles& matrix, const Doubles& x, bool round) {
  Doubles y(matrix.size() / x.size());
  for (std::size_t n = 0; n < y.size(); ++n) {
    double sum = 0;
    for (std::size_t k = 0; k < x.size(); ++k) sum += matrix[n * x.size() + k] * x[k];
    y[n] = round_to(round, sum);
  }
  return y;
}

/// Where the oracle rounds to bf16.
struct Rounding {
  bool latent = true, branches = true, glu = true, expert = true, sum = true, norm = true, routed = true, shared = true,
       out = true;
  static Rounding none() { return {false, false, false, false, false, false, false, false, false}; }
};

inline Doubles naive_mlp(const GluConfig& glu, const Doubles& gate, const Doubles& up, const Doubles& down,
                         const Doubles& x, const Rounding& round, bool round_out) {
  Doubles a = times(gate, x, round.branches);
  const Doubles b = times(up, x, round.branches);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double sigma = 1 / (1 + std::exp(-a[i]));
    const double value = glu.kind == GluConfig::Kind::silu
                             ? a[i] * sigma * b[i]
                             : glu.beta * std::tanh(a[i] / glu.beta) * sigma *
                                   (glu.linear_beta ? *glu.linear_beta * std::tanh(b[i] / *glu.linear_beta) : b[i]);
    a[i] = round_to(round.glu, value);
  }
  return times(down, a, round_out);
}

/// One token of the layer, written from the formula.
inline Doubles naive_token(const Layer& l, const Doubles& x, double eps, const Rounding& round) {
  const LatentMoeConfig& g = l.g;
  const Doubles logits = times(l.gate, x, false);
  Doubles p(logits);
  for (double& value : p) value = 1 / (1 + std::exp(-value));
  std::vector<std::size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return p[a] + l.bias[a] > p[b] + l.bias[b]; });
  double total = 0;
  for (std::size_t j = 0; j < g.top_k; ++j) total += p[order[j]];
  const Doubles z = g.latent ? times(l.down, x, round.latent) : x;
  Doubles sum(z.size());
  for (std::size_t j = 0; j < g.top_k; ++j) {
    const std::size_t e = order[j];
    const Doubles y = naive_mlp(g.activation, l.w1[e], l.w3[e], l.w2[e], z, round, round.expert);
    const double weight = (g.renormalize && g.top_k > 1 ? p[e] / (total + 1e-20) : p[e]) * g.routed_scaling_factor;
    for (std::size_t i = 0; i < z.size(); ++i) sum[i] += weight * y[i];
  }
  for (double& value : sum) value = round_to(round.sum, value);
  if (g.use_norm) {
    double squares = 0;
    for (const double value : sum) squares += value * value;
    for (std::size_t i = 0; i < sum.size(); ++i)
      sum[i] = round_to(round.norm, sum[i] / std::sqrt(squares / static_cast<double>(sum.size()) + eps) * l.norm[i]);
  }
  Doubles out = g.latent ? times(l.up, sum, round.routed) : sum;
  if (g.n_shared) {
    const Doubles shared = naive_mlp(g.activation, l.shared_gate, l.shared_up, l.shared_down, x, round, round.shared);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = round_to(round.out, out[i] + shared[i]);
  }
  return out;
}

inline Doubles naive_layer(const Layer& l, const Doubles& x, double eps, const Rounding& round = Rounding::none()) {
  Doubles out;
  for (std::size_t first = 0; first < x.size(); first += l.g.hidden) {
    const Doubles row(x.begin() + static_cast<std::ptrdiff_t>(first),
                      x.begin() + static_cast<std::ptrdiff_t>(first + l.g.hidden));
    const Doubles y = naive_token(l, row, eps, round);
    out.insert(out.end(), y.begin(), y.end());
  }
  return out;
}

/// latent_moe_forward over all of x.
template <class P, class G, class Experts>
std::vector<typename P::activation> forward(G g, const std::vector<typename P::activation>& x,
                                            const LatentMoeWeights& w, Experts& experts, MoeWorkspace<P>& workspace,
                                            const LatentMoeOptions& options = {}, int threads = 0) {
  using A = typename P::activation;
  const std::size_t rows = x.size() / g.hidden;
  std::vector<A> out(x.size(), A(-7.0f));
  latent_moe_forward(host{.threads = threads}, g, view(x, rows, size{g.hidden}), w, experts,
                     static_cast<typename P::accumulator>(1e-5), workspace, view(out, rows, size{g.hidden}), options);
  return out;
}

template <class P, class G, class Experts>
std::vector<typename P::activation> forward(G g, const std::vector<typename P::activation>& x,
                                            const LatentMoeWeights& w, Experts& experts,
                                            const LatentMoeOptions& options = {}, int threads = 0) {
  MoeWorkspace<P> workspace(g, x.size() / g.hidden);
  return forward<P>(g, x, w, experts, workspace, options, threads);
}

template <class V>
auto elements(const V& matrix) {
  std::vector<typename V::value_type> values;
  for (std::size_t row = 0; row < matrix.extent(0); ++row)
    for (std::size_t i = 0; i < matrix.extent(1); ++i) values.push_back(matrix(row, i));
  return values;
}

/// A source that counts how often each expert is fetched and can refuse one.
struct CountingSource {
  const std::vector<ExpertWeights>& experts;
  std::vector<int> fetched;
  std::size_t refused;

  explicit CountingSource(const std::vector<ExpertWeights>& from, std::size_t refuse = ~std::size_t{0})
      : experts(from), fetched(from.size()), refused(refuse) {}
  std::size_t size() const { return experts.size(); }
  ExpertWeights operator[](std::size_t e) {
    if (e == refused) throw format_error("model.safetensors", "experts." + std::to_string(e) + ".w1", "scale 255", 17);
    ++fetched[e];
    return experts[e];
  }
};

inline constexpr LatentMoeConfig medium{48, 32, 40, 9, 3, 2, {}, true, true, 1.0f};

}  // namespace k3::test
