// SPDX-License-Identifier: Apache-2.0
#include <k3/geometry/presets.hpp>
#include <k3/ops/latent_moe_forward.hpp>

#include <algorithm>
#include <numeric>

#include "support/compare.hpp"
#include "support/ops_fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

using Doubles = std::vector<double>;

/// Everything a layer needs, as numbers that bf16 holds exactly.
struct Layer {
  LatentMoeConfig g;
  Doubles gate, bias, down, norm, up;  // the router and the latent space
  Doubles shared_gate, shared_up, shared_down;
  std::vector<Doubles> w1, w3, w2;  // one per expert
};

Doubles exact_normal(std::size_t count, std::uint32_t seed, double scale) {
  return converted<double>(converted<bf16>(random_normal(count, seed, scale)));
}

Layer random_layer(const LatentMoeConfig& g, std::uint32_t seed) {
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
double round_to(bool on, double value) {
  if (!on || value == 0 || !std::isfinite(value)) return value;
  int exponent = 0;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

Doubles times(const Doubles& matrix, const Doubles& x, bool round) {
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

Doubles naive_mlp(const GluConfig& glu, const Doubles& gate, const Doubles& up, const Doubles& down, const Doubles& x,
                  const Rounding& round, bool round_out) {
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
Doubles naive_token(const Layer& l, const Doubles& x, double eps, const Rounding& round) {
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

Doubles naive_layer(const Layer& l, const Doubles& x, double eps, const Rounding& round = Rounding::none()) {
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

template <class F>
std::string thrown_by(F&& f) {
  try {
    f();
  } catch (const invalid_argument& e) {
    return e.operation() + "/" + e.argument();
  }
  return "nothing thrown";
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

constexpr LatentMoeConfig medium{48, 32, 40, 9, 3, 2, {}, true, true, 1.0f};

}  // namespace

TEMPLATE_TEST_CASE("latent_moe_forward gives the fixture's values", "[latent_moe]", Fp32, Fp64) {
  using A = typename TestType::activation;
  const auto cases = ops_cases("latent_moe_forward");
  const OpsCase& with_experts = cases[0];
  for (const OpsCase& c : cases) {
    INFO(c.name);
    const auto shape = [&](const char* name) { return c.tensor(name).shape; };
    LatentMoeConfig g{shape("x")[1],
                      shape("w_down_latent")[0],
                      with_experts.tensor("expert0_w1_packed").shape[0],
                      shape("w_gate")[0],
                      c.params["k"].get<size>(),
                      1,
                      {},
                      true,
                      c.params["renormalize"].get<bool>(),
                      c.params["scale"].get<float>()};
    // The fixture's shared MLP is narrower than an expert: filled up with zeros.
    const auto filled = [&](const char* name, bool rows) {
      const auto t = c.tensor(name);
      const size from = t.shape[1], to = rows ? from : g.expert_hidden;
      Doubles values((rows ? g.expert_hidden : t.shape[0]) * to);
      for (size i = 0; i < t.values.size(); ++i) values[i / from * to + i % from] = t.values[i];
      return values;
    };
    Layer l;
    l.g = g;
    l.gate = c.tensor("w_gate").values;
    l.bias = c.tensor("w_bias").values;
    l.down = c.tensor("w_down_latent").values;
    l.norm = c.tensor("w_latent_norm").values;
    l.up = c.tensor("w_up_latent").values;
    l.shared_gate = filled("w_shared_gate", true);
    l.shared_up = filled("w_shared_up", true);
    l.shared_down = filled("w_shared_down", false);
    const Stored<float> stored(l);
    std::vector<std::vector<std::uint8_t>> bytes;
    bytes.reserve(6 * g.n_routed);
    const auto packed = [&](size e, const std::string& w) -> AnyMatrix<> {
      const std::string name = "expert" + std::to_string(e) + "_" + w;
      const auto codes = with_experts.tensor(name + "_packed"), scale = with_experts.tensor(name + "_scale");
      bytes.push_back(converted<std::uint8_t>(codes.values));
      const auto code_view = view(std::as_const(bytes.back()), codes.shape[0], codes.shape[1]);
      bytes.push_back(converted<std::uint8_t>(scale.values));
      return Mxfp4Matrix<>{code_view, view(std::as_const(bytes.back()), scale.shape[0], scale.shape[1])};
    };
    std::vector<ExpertWeights> experts;
    for (size e = 0; e < g.n_routed; ++e) experts.push_back({packed(e, "w1"), packed(e, "w3"), packed(e, "w2")});

    MoeWorkspace<TestType> workspace(g, 4);
    const auto out = forward<TestType>(g, converted<A>(c.tensor("x").values), stored.weights, experts, workspace);
    check(compare(elements(workspace.topk_ids()), c.tensor("ids").values, 0));
    check(compare(elements(workspace.topk_weights()), c.tensor("weights").values, c.rtol, c.atol));
    check(compare(elements(workspace.expert_sum()), c.tensor("latent_sum").values, c.rtol, c.atol));
    check(compare(elements(workspace.routed()), c.tensor("routed").values, c.rtol, c.atol));
    check(compare(elements(workspace.shared()), c.tensor("shared").values, c.rtol, c.atol));
    check(compare(out, c.tensor("out").values, c.rtol, c.atol));
  }
}

TEST_CASE("latent_moe_forward: float and double against the naive layer, within the stated bounds", "[latent_moe]") {
  LatentMoeConfig plain = medium, scaled = medium, silu = medium, uncapped = medium, alone = medium, one = medium;
  scaled.renormalize = false;
  scaled.routed_scaling_factor = 2.446f;
  silu.latent = 0;
  silu.use_norm = false;
  silu.activation = GluConfig::silu();
  uncapped.use_norm = false;
  uncapped.activation.linear_beta.reset();
  alone.n_shared = 0;
  one.top_k = 1;
  const LatentMoeConfig wide{512, 512, 256, 12, 8, 2, {}, true, true, 1.0f};
  for (const LatentMoeConfig& g : {plain, scaled, silu, uncapped, alone, one, wide}) {
    INFO("latent " << g.latent << ", norm " << g.use_norm << ", shared " << g.n_shared << ", top " << g.top_k);
    const Layer l = random_layer(g, 41);
    const Doubles x = exact_normal(7 * g.hidden, 40, 1.0);
    const Doubles want = naive_layer(l, x, 1e-5);
    Stored<double> doubles(l);
    check(compare(forward<Fp64>(g, x, doubles.weights, doubles.experts), want, 6e-15, 0, true));
    Stored<bf16> halves(l);
    check(compare(forward<Fp32>(g, converted<float>(x), halves.weights, halves.experts), want, 8e-7, 0, true));
  }
}

TEST_CASE("latent_moe_forward in bf16 rounds where the released model rounds, and nowhere else", "[latent_moe]") {
  const Layer l = random_layer(medium, 51);
  const Doubles x = exact_normal(13 * medium.hidden, 50, 1.0);
  Stored<bf16> stored(l);
  const auto got = forward<Bf16>(medium, converted<bf16>(x), stored.weights, stored.experts);
  const auto agreeing = [&](const Rounding& round) {
    const Doubles want = naive_layer(l, x, 1e-5, round);
    std::size_t equal = 0;
    for (std::size_t i = 0; i < got.size(); ++i) equal += static_cast<double>(got[i]) == round_to(true, want[i]);
    return static_cast<double>(equal) / static_cast<double>(got.size());
  };
  const double all = agreeing({});
  INFO("equal with all rounding points: " << all);
  CHECK(all > 0.97);  // float sums tip a rounding now and then
  check(compare(got, naive_layer(l, x, 1e-5, {}), 4e-3, 0, true));
  for (bool Rounding::*point : {&Rounding::latent, &Rounding::branches, &Rounding::glu, &Rounding::expert,
                                &Rounding::sum, &Rounding::norm, &Rounding::routed, &Rounding::shared}) {
    Rounding without;
    without.*point = false;
    const double equal = agreeing(without);
    INFO("equal without one of them: " << equal);
    CHECK(equal < 0.9);
  }
  MoeWorkspace<Bf16> workspace(medium, 13);
  forward<Bf16>(medium, converted<bf16>(x), stored.weights, stored.experts, workspace);
  Doubles logits;  // not rounded
  for (std::size_t row = 0; row < 13; ++row) {
    const auto first = x.begin() + static_cast<std::ptrdiff_t>(row * medium.hidden);
    const Doubles y = times(l.gate, Doubles(first, first + medium.hidden), false);
    logits.insert(logits.end(), y.begin(), y.end());
  }
  check(compare(elements(workspace.router_logits()), logits, 1e-6, 0, true));
}

TEST_CASE("latent_moe_forward: fixed and run-time geometry give the same bits", "[latent_moe]") {
  const tiny::LatentMoe fixed;
  const Layer l = random_layer(latent_moe_config(fixed), 61);
  Stored<bf16> stored(l);
  const Doubles x = exact_normal(5 * fixed.hidden, 60, 1.0);
  check(same_bits(forward<Fp32>(fixed, converted<float>(x), stored.weights, stored.experts),
                  forward<Fp32>(latent_moe_config(fixed), converted<float>(x), stored.weights, stored.experts)));
  check(same_bits(forward<Bf16>(fixed, converted<bf16>(x), stored.weights, stored.experts),
                  forward<Bf16>(latent_moe_config(fixed), converted<bf16>(x), stored.weights, stored.experts)));
}

TEMPLATE_TEST_CASE("latent_moe_forward: threads and other rows change no bit", "[latent_moe]", Fp64, Fp32, Bf16) {
  using A = typename TestType::activation;
  const LatentMoeConfig g{64, 256, 96, 8, 4, 1, {}, true, true, 1.0f};
  const Layer l = random_layer(g, 71);
  Stored<bf16> stored(l);
  const std::size_t rows = 37;
  const auto x = converted<A>(exact_normal(rows * g.hidden, 70, 1.0));
  MoeWorkspace<TestType> workspace(g, rows + 3);
  const auto want = forward<TestType>(g, x, stored.weights, stored.experts, workspace, {}, 1);
  for (const int threads : {2, 3})
    check(same_bits(forward<TestType>(g, x, stored.weights, stored.experts, workspace, {}, threads), want));
  for (const std::size_t count : {1u, 2u, 5u}) {
    std::vector<A> pieces;
    for (std::size_t row = 0; row < rows; row += count) {
      const auto first = x.begin() + static_cast<std::ptrdiff_t>(row * g.hidden);
      const auto last = x.begin() + static_cast<std::ptrdiff_t>(std::min(rows, row + count) * g.hidden);
      const auto y = forward<TestType>(g, std::vector<A>(first, last), stored.weights, stored.experts, workspace);
      pieces.insert(pieces.end(), y.begin(), y.end());
    }
    check(same_bits(pieces, want));
  }
  auto in_place = x;
  latent_moe_forward(host{}, g, view(in_place, rows, g.hidden), stored.weights, stored.experts,
                     static_cast<typename TestType::accumulator>(1e-5), workspace, view(in_place, rows, g.hidden));
  check(same_bits(in_place, want));
}

TEST_CASE("latent_moe_forward fetches each chosen expert once and no other", "[latent_moe]") {
  const Layer l = random_layer(medium, 81);
  Stored<float> stored(l);
  const auto x = converted<float>(exact_normal(6 * medium.hidden, 80, 1.0));
  CountingSource source(stored.experts);
  MoeWorkspace<Fp32> workspace(medium, 6);
  const auto out = forward<Fp32>(medium, x, stored.weights, source, workspace);
  check(same_bits(out, forward<Fp32>(medium, x, stored.weights, stored.experts)));
  const auto ids = elements(workspace.topk_ids());
  std::size_t total = 0;
  for (std::size_t e = 0; e < 9; ++e) {
    const auto chosen = static_cast<std::size_t>(std::count(ids.begin(), ids.end(), static_cast<id>(e)));
    CHECK(source.fetched[e] == (chosen > 0 ? 1 : 0));
    CHECK(workspace.expert_rows(e) == chosen);
    total += workspace.expert_rows(e);
  }
  CHECK(total == 6 * 3);
}

TEST_CASE("latent_moe_forward passes on what the experts' source throws and leaves out alone", "[latent_moe]") {
  const Layer l = random_layer(medium, 81);
  Stored<float> stored(l);
  const auto x = converted<float>(exact_normal(6 * medium.hidden, 80, 1.0));
  MoeWorkspace<Fp32> workspace(medium, 6);
  forward<Fp32>(medium, x, stored.weights, stored.experts, workspace);
  CountingSource source(stored.experts, static_cast<std::size_t>(workspace.topk_ids()(5, 2)));
  std::vector<float> out(x.size(), 7.0f);
  CHECK_THROWS_AS(latent_moe_forward(host{}, medium, view(x, 6, medium.hidden), stored.weights, source, 1e-5f,
                                     workspace, view(out, 6, medium.hidden)),
                  format_error);
  CHECK(out == std::vector<float>(x.size(), 7.0f));
}

TEMPLATE_TEST_CASE("latent_moe_forward skips padding rows (case 21)", "[latent_moe]", Fp32, Bf16) {
  using A = typename TestType::activation;
  const Layer l = random_layer(medium, 91);
  Stored<bf16> stored(l);
  auto x = converted<A>(exact_normal(5 * medium.hidden, 90, 1.0));
  const auto want = forward<TestType>(medium, x, stored.weights, stored.experts);
  x.resize(8 * medium.hidden, A(std::numeric_limits<float>::quiet_NaN()));
  const std::vector<id> slots{4, 0, 2, 3, 1, pad_slot, pad_slot, pad_slot};
  MoeWorkspace<TestType> workspace(medium, 8);
  auto out = forward<TestType>(medium, x, stored.weights, stored.experts, workspace, {{}, view(slots), {}});
  std::size_t total = 0;
  for (std::size_t e = 0; e < medium.n_routed; ++e) total += workspace.expert_rows(e);
  CHECK(total == 5 * medium.top_k);
  for (std::size_t i = 5 * medium.hidden; i < out.size(); ++i) REQUIRE(static_cast<float>(out[i]) == 0.0f);
  out.resize(5 * medium.hidden);
  check(same_bits(out, want));
}

TEST_CASE("latent_moe_forward reports NaN router logits and reads no expert for that row", "[latent_moe]") {
  const Layer l = random_layer(medium, 91);
  Stored<float> stored(l);
  const std::size_t h = medium.hidden;
  auto x = converted<float>(exact_normal(4 * h, 90, 1.0));
  const auto clean = forward<Fp32>(medium, x, stored.weights, stored.experts);
  x[2 * h + 5] = std::numeric_limits<float>::quiet_NaN();
  MoeWorkspace<Fp32> workspace(medium, 4);
  const auto others_unchanged = [&](const std::vector<float>& out) {
    for (std::size_t row = 0; row < 4; ++row)
      for (std::size_t i = 0; i < h; ++i)
        if (row == 2 ? !std::isnan(out[row * h + i]) : out[row * h + i] != clean[row * h + i]) return false;
    std::size_t total = 0;
    for (std::size_t e = 0; e < medium.n_routed; ++e) total += workspace.expert_rows(e);
    return total == 3 * medium.top_k;
  };
  std::vector<float> out(4 * h, 7.0f);
  CHECK(thrown_by([&] {
          latent_moe_forward(host{}, medium, view(x, 4, h), stored.weights, stored.experts, 1e-5f, workspace,
                             view(out, 4, h));
        }) == "latent_moe_forward/router logits of row 2");
  CHECK(others_unchanged(out));
  for (const id e : elements(workspace.topk_ids())) CHECK((e >= 0 && e < 9));

  std::vector<RowStatus> status(4, RowStatus::ok);
  status[1] = RowStatus::nan_logits;  // what an earlier layer found stays
  out = forward<Fp32>(medium, x, stored.weights, stored.experts, workspace, {{}, {}, view(status)});
  CHECK(others_unchanged(out));
  CHECK(status ==
        std::vector<RowStatus>{RowStatus::ok, RowStatus::nan_logits, RowStatus::nan_router_logits, RowStatus::ok});
}

TEMPLATE_TEST_CASE("mix_routed_experts refuses ids that are no expert (case 20)", "[latent_moe]", Fp32, Fp64) {
  using A = typename TestType::activation;
  using Acc = typename TestType::accumulator;
  const Layer l = random_layer(medium, 101);
  Stored<float> stored(l);
  const auto latent = converted<A>(exact_normal(2 * medium.latent, 100, 1.0));
  const std::vector<Acc> weights(6, Acc(0.25));
  MoeWorkspace<TestType> workspace(medium, 2);
  std::vector<Acc> out(2 * medium.latent, Acc(7));
  for (const id bad : {id{-1}, id{9}, std::numeric_limits<id>::max()}) {
    const std::vector<id> ids{0, 1, 2, 3, bad, 5};
    CountingSource source(stored.experts);
    const auto mix = [&](HostView<const id, 1> slots) {
      mix_routed_experts(host{}, medium, view(latent, 2, medium.latent), view(ids, 2, 3), view(weights, 2, 3), source,
                         workspace, view(out, 2, medium.latent), slots);
    };
    CHECK(thrown_by([&] { mix({}); }) == "mix_routed_experts/ids[1, 1]");
    CHECK(source.fetched == std::vector<int>(9));
    CHECK(out == std::vector<Acc>(2 * medium.latent, Acc(7)));
    const std::vector<id> slots{0, pad_slot};  // nobody looks at a padding row's ids
    auto before = out;
    mix(view(slots));
    CHECK(std::all_of(out.begin() + medium.latent, out.end(), [](Acc value) { return value == Acc(0); }));
    out = before;
  }
}

TEST_CASE("mix_routed_experts sums in order of rank, repeated experts included", "[latent_moe]") {
  const Layer l = random_layer(medium, 111);
  Stored<float> stored(l);
  const std::size_t w = medium.latent;
  const auto latent = converted<float>(exact_normal(2 * w, 110, 1.0));
  const std::vector<id> ids{5, 2, 5, 5, 5, 5};  // more choices of one expert than rows
  const std::vector<float> weights{0.5f, -1.0f, 0.0f, 0.3f, 1e-3f, 100.0f};
  MoeWorkspace<Fp32> workspace(medium, 2);
  std::vector<float> out(2 * w);
  mix_routed_experts(host{}, medium, view(latent, 2, w), view(ids, 2, 3), view(weights, 2, 3), stored.experts,
                     workspace, view(out, 2, w));
  std::vector<float> want(2 * w);
  for (std::size_t row = 0; row < 2; ++row)
    for (std::size_t j = 0; j < 3; ++j) {
      const auto e = static_cast<std::size_t>(ids[row * 3 + j]);
      std::vector<float> y(w);
      MlpWorkspace<Fp32> mlp(medium.expert_hidden, 1);
      dense_mlp(host{}, medium.activation, view(latent, 2, w).slice(0, row, 1), stored.experts[e].w1,
                stored.experts[e].w3, stored.experts[e].w2, mlp, view(y, 1, w));
      for (std::size_t i = 0; i < w; ++i) want[row * w + i] += weights[row * 3 + j] * y[i];
    }
  check(compare(out, want, 3e-7, 0, true));
  CHECK(workspace.expert_rows(5) == 5);
  auto rows_swapped = std::vector<float>(latent.begin() + static_cast<std::ptrdiff_t>(w), latent.end());
  rows_swapped.insert(rows_swapped.end(), latent.begin(), latent.begin() + static_cast<std::ptrdiff_t>(w));
  const std::vector<id> other_ids{5, 5, 5, 5, 2, 5};
  const std::vector<float> other_weights{0.3f, 1e-3f, 100.0f, 0.5f, -1.0f, 0.0f};
  std::vector<float> swapped(2 * w);
  mix_routed_experts(host{}, medium, view(rows_swapped, 2, w), view(other_ids, 2, 3), view(other_weights, 2, 3),
                     stored.experts, workspace, view(swapped, 2, w));
  std::rotate(swapped.begin(), swapped.begin() + static_cast<std::ptrdiff_t>(w), swapped.end());
  check(same_bits(swapped, out));
}

namespace {

/// Two experts on a latent of 2 whose outputs are (a, 0) and (0, b) for x = (1, 0), one shared expert with gate 3,
/// up 50.
Layer known_layer(double a, double b) {
  Layer l;
  l.g = {2, 2, 1, 2, 2, 1, {}, true, true, 1.0f};
  l.gate = {0, 0, 0, 0};
  l.bias = {0, 0};
  l.down = l.up = {1, 0, 0, 1};
  l.norm = {1, 1};
  l.w1 = {{3, 0}, {3, 0}};
  l.w3 = {{1, 0}, {1, 0}};
  const double value = 4 * std::tanh(0.75) / (1 + std::exp(-3.0)) * 25 * std::tanh(1.0 / 25);
  l.w2 = {{a / value, 0}, {0, b / value}};
  l.shared_gate = {3, 0};
  l.shared_up = {50, 0};
  l.shared_down = {1, 0};
  return l;
}

}  // namespace

TEMPLATE_TEST_CASE("LatentMoE at known points (cases 43, 44, 45)", "[latent_moe]", Fp32, Fp64) {
  using A = typename TestType::activation;
  const std::vector<A> x{1, 0};
  {
    Stored<A> stored(known_layer(0, 0));
    const auto out = forward<TestType>(known_layer(0, 0).g, x, stored.weights, stored.experts);
    check(compare(out, Doubles{58.3262193, 0}, 1e-6));
    std::vector<A> dense(2);  // the same as a dense layer
    MlpWorkspace<TestType> workspace(1, 1);
    const MlpWeights& w = stored.weights.shared_experts;
    dense_mlp(host{}, GluConfig{}, view(x, 1, 2), w.gate_proj, w.up_proj, w.down_proj, workspace, view(dense, 1, 2));
    check(same_bits(dense, out));
  }
  {
    Layer l = known_layer(6, 8);
    l.g.n_shared = 0;
    Stored<A> stored(l);
    MoeWorkspace<TestType> workspace(l.g, 1);
    check(compare(forward<TestType>(l.g, x, stored.weights, stored.experts, workspace), Doubles{0.8485281, 1.1313708},
                  1e-5));
    check(compare(elements(workspace.topk_weights()), Doubles{0.5, 0.5}, 0));
    check(compare(elements(workspace.expert_sum()), Doubles{3, 4}, 1e-6));
  }
  static_assert(moe_expert_weights(kimi_k3::LatentMoe{}) == 33030144);
  static_assert(moe_shared_width(kimi_k3::LatentMoe{}) == 6144);
  static_assert(moe_shared_weights(kimi_k3::LatentMoe{}) == 132120576);
}

TEMPLATE_TEST_CASE("LatentMoE: gate C6 and its planted fault", "[latent_moe]", Fp32, Fp64) {
  using A = typename TestType::activation;
  Layer l;
  l.g = {4, 4, 4, 2, 1, 0, {}, true, true, 1.0f};
  const Doubles identity{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  l.gate = {0, 0, 0, 0, 4, 0, 0, 0};
  l.bias = {0, 0};
  l.down = l.up = identity;
  l.norm = Doubles(4, 1.0);
  l.w1 = l.w3 = l.w2 = {identity, identity};
  l.w3[1][0] = 2;  // the experts' up weights differ in one element
  Stored<A> stored(l);
  const std::vector<A> x{1, 0, 0, 0};
  MoeWorkspace<TestType> workspace(l.g, 1);
  const Doubles want{1.9999804, 0, 0, 0};
  check(compare(forward<TestType>(l.g, x, stored.weights, stored.experts, workspace), want, 0, 1e-6));
  CHECK(elements(workspace.topk_ids()) == std::vector<id>{1});
  check(compare(elements(workspace.topk_weights()), Doubles{0.9820138}, 1e-6));  // one expert: not renormalised
  CHECK_FALSE(compare(forward<TestType>(l.g, x, stored.weights, stored.experts, {0, {}, {}}), want, 0, 1e-5).within);

  // With an expert that points elsewhere the fault is no longer small.
  std::swap(l.w2[0][0], l.w2[0][4]);
  Stored<A> turned(l);
  check(compare(forward<TestType>(l.g, x, turned.weights, turned.experts), want, 0, 1e-6));
  const auto forced = forward<TestType>(l.g, x, turned.weights, turned.experts, workspace, {0, {}, {}});
  CHECK(elements(workspace.topk_ids()) == std::vector<id>{0});
  check(compare(elements(workspace.router_logits()), Doubles{8, 0}, 0));
  CHECK(std::abs(static_cast<double>(forced[0]) - want[0]) > 1);
}

TEST_CASE("dense_mlp against the naive formula, as a column block of a wider buffer", "[latent_moe]") {
  const std::size_t rows = 5, hidden = 33, width = 70;
  const Doubles gate = exact_normal(width * hidden, 121, 0.3), up = exact_normal(width * hidden, 122, 0.3);
  const Doubles down = exact_normal(hidden * width, 123, 0.2), x = exact_normal(rows * hidden, 124, 1.0);
  Doubles want;
  for (std::size_t row = 0; row < rows; ++row) {
    const auto first = x.begin() + static_cast<std::ptrdiff_t>(row * hidden);
    const Doubles y = naive_mlp({}, gate, up, down, Doubles(first, first + hidden), Rounding::none(), false);
    want.insert(want.end(), y.begin(), y.end());
  }
  const auto gate_b = converted<bf16>(gate), up_b = converted<bf16>(up);
  const auto down_f = converted<float>(down);
  auto x_f = converted<float>(x);
  MlpWorkspace<Fp32> workspace(100, 7);  // wider and longer than needed
  std::vector<float> out(rows * (hidden + 3), 7.0f);
  dense_mlp(host{}, GluConfig{}, view(x_f, rows, hidden), view(gate_b, width, hidden), view(up_b, width, hidden),
            view(down_f, hidden, width), workspace, View<float, 2>{out.data(), {rows, hidden}, {hidden + 3, 1}});
  std::vector<float> got;
  for (std::size_t row = 0; row < rows; ++row) {
    got.insert(got.end(), &out[row * (hidden + 3)], &out[row * (hidden + 3)] + hidden);
    CHECK(out[row * (hidden + 3) + hidden] == 7.0f);
  }
  check(compare(got, want, 6e-7, 0, true));
  dense_mlp(host{}, GluConfig{}, view(x_f, rows, hidden), view(gate_b, width, hidden), view(up_b, width, hidden),
            view(down_f, hidden, width), workspace, view(x_f, rows, hidden));
  check(same_bits(x_f, got));
}

TEST_CASE("the mixture-of-experts operations name what does not fit and change nothing", "[latent_moe]") {
  const Layer l = random_layer(medium, 131);
  Stored<float> stored(l);
  const std::size_t h = medium.hidden;
  const std::vector<float> x(2 * h, 0.5f);
  std::vector<float> out(2 * h, 7.0f);
  const std::vector<id> slots(3);
  std::vector<RowStatus> status(3);
  struct Call {
    LatentMoeConfig g = medium;
    LatentMoeWeights w;
    std::vector<ExpertWeights> experts;
    float eps = 1e-5f;
    size rows = 2;
    LatentMoeOptions options{};
  };
  const auto error = [&](auto&& change) {
    MoeWorkspace<Fp32> workspace(medium, 2);
    Call call;
    call.w = stored.weights;
    call.experts = stored.experts;
    change(call);
    return thrown_by([&] {
      latent_moe_forward(host{}, call.g, view(x.data(), call.rows, h), call.w, call.experts, call.eps, workspace,
                         view(out, 2, h), call.options);
    });
  };
  const std::string op = "latent_moe_forward/";
  CHECK(error([](Call& c) { c.g.top_k = 0; }) == op + "geometry.top_k");
  CHECK(error([](Call& c) { c.g.top_k = 10; }) == op + "geometry.top_k");
  CHECK(error([](Call& c) { c.g.top_k = 2; }) == op + "workspace");
  CHECK(error([](Call& c) { c.g.hidden = 47; }) == op + "x");
  CHECK(error([](Call& c) { c.rows = 1; }) == op + "out");
  CHECK(error([](Call& c) { c.g.activation.beta = 0.0f; }) == op + "beta");
  CHECK(error([](Call& c) { c.g.routed_scaling_factor = std::numeric_limits<float>::infinity(); }) ==
        op + "geometry.routed_scaling_factor");
  CHECK(error([](Call& c) { c.eps = -1.0f; }) == op + "eps");
  CHECK(error([](Call& c) { c.w.gate = {}; }) == op + "gate");
  CHECK(error([](Call& c) { std::swap(c.w.gate.extents[0], c.w.gate.extents[1]); }) == op + "gate");
  CHECK(error([](Call& c) { c.w.e_score_correction_bias = {}; }) == op + "e_score_correction_bias");
  CHECK(error([](Call& c) { c.w.routed_expert_down_proj = {}; }) == op + "routed_expert_down_proj");
  CHECK(error([](Call& c) { c.w.routed_expert_norm = {}; }) == op + "routed_expert_norm");
  CHECK(error([](Call& c) { c.g.use_norm = false; }) == op + "routed_expert_norm");
  CHECK(error([](Call& c) { c.w.routed_expert_up_proj = {}; }) == op + "routed_expert_up_proj");
  CHECK(error([](Call& c) { c.g.latent = 0; }) == op + "geometry.use_norm");
  CHECK(error([](Call& c) { c.g.latent = 0, c.g.use_norm = false; }) == op + "routed_expert_down_proj");
  CHECK(error([](Call& c) { c.w.shared_experts.up_proj = {}; }) == op + "shared_experts.up_proj");
  CHECK(error([](Call& c) { c.g.n_shared = 0; }) == op + "shared_experts.gate_proj");
  CHECK(error([](Call& c) { c.g.n_shared = 1; }) == op + "shared_experts.gate_proj");
  CHECK(error([](Call& c) { c.experts.pop_back(); }) == op + "experts.size()");
  CHECK(error([](Call& c) {
          for (ExpertWeights& e : c.experts) e.w3 = {};
        }).find("].w3") != std::string::npos);
  CHECK(error([](Call& c) {
          for (ExpertWeights& e : c.experts) std::swap(e.w1, e.w2);
        }).find("].w1") != std::string::npos);
  CHECK(error([](Call& c) { c.options.force_expert = 9; }) == op + "force_expert");
  CHECK(error([&](Call& c) { c.options.slots = view(slots); }) == op + "slots");
  CHECK(error([&](Call& c) { c.options.status = view(status); }) == op + "status");
  std::vector<float> bias(9);
  bias[4] = std::numeric_limits<float>::quiet_NaN();
  CHECK(error([&](Call& c) { c.w.e_score_correction_bias = view(bias); }) == op + "e_score_correction_bias[4]");
  CHECK(out == std::vector<float>(2 * h, 7.0f));
  CHECK(error([](Call&) {}) == "nothing thrown");
  std::fill(out.begin(), out.end(), 7.0f);

  MoeWorkspace<Fp32> small(medium, 1);
  CHECK(thrown_by([&] { forward<Fp32>(medium, x, stored.weights, stored.experts, small); }) ==
        op + "workspace.max_rows");
  CHECK(thrown_by([&] { MoeWorkspace<Fp32>(LatentMoeConfig{}, 1); }) == "MoeWorkspace/geometry.hidden");
  CHECK(thrown_by([&] { MoeWorkspace<Fp32>(medium, ~size{0} / 2); }) == "MoeWorkspace/max_rows * top_k");
  MlpWorkspace<Fp32> narrow(3, 2);
  const MlpWeights& w = stored.weights.shared_experts;
  CHECK(thrown_by([&] {
          dense_mlp(host{}, GluConfig{}, view(x, 2, h), w.gate_proj, w.up_proj, w.down_proj, narrow, view(out, 2, h));
        }) == "dense_mlp/workspace.width");
  CHECK(thrown_by([&] {
          dense_mlp(host{}, GluConfig{}, view(x, 2, h), w.gate_proj, w.down_proj, w.down_proj, narrow, view(out, 2, h));
        }) == "dense_mlp/up_proj");
  CHECK(out == std::vector<float>(2 * h, 7.0f));

  MoeWorkspace<Fp32> none(medium, 0);  // no rows: nothing to do
  const std::vector<float> nothing;
  CHECK(forward<Fp32>(medium, nothing, stored.weights, stored.experts, none).empty());
}
