// SPDX-License-Identifier: Apache-2.0
// The parts of a LatentMoE layer, known points, and what is refused.
#include <cstdlib>

#include "ops/moe_problem.hpp"

using namespace k3;
using namespace k3::test;

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
  Doubles want(2 * w);
  for (std::size_t j = 0; j < 6; ++j) {
    const auto e = static_cast<std::size_t>(ids[j]);
    const auto x = latent.begin() + static_cast<std::ptrdiff_t>(j / 3 * w);
    const Doubles y = naive_mlp(medium.activation, l.w1[e], l.w3[e], l.w2[e],
                                converted<double>(std::vector<float>(x, x + static_cast<std::ptrdiff_t>(w))),
                                Rounding::none(), false);
    for (std::size_t i = 0; i < w; ++i) want[j / 3 * w + i] += static_cast<double>(weights[j]) * y[i];
  }
  check(compare(out, want, 8e-7, 0, true));
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

/// `medium` at compile time.
struct Medium {
  static constexpr size hidden = 48, latent = 32, expert_hidden = 40, n_routed = 9, top_k = 3, n_shared = 2;
  static constexpr GluConfig activation{};
  static constexpr bool use_norm = true, renormalize = true;
  static constexpr float routed_scaling_factor = 1.0f;
};
static_assert(latent_moe_config(Medium{}) == medium);

/// mix_routed_experts in P, its outputs widened.
template <class P, class G>
Doubles mixed(const host& exec, G g, const Layer& l, const Doubles& latent, const std::vector<id>& ids,
              const Doubles& weights) {
  const std::size_t rows = ids.size() / l.g.top_k, w = moe_expert_width(l.g);
  const Stored<typename P::activation> stored(l);
  const auto x = converted<typename P::activation>(latent);
  const auto weight = converted<typename P::accumulator>(weights);
  MoeWorkspace<P> workspace(g, rows);
  std::vector<typename P::accumulator> out(rows * w);
  mix_routed_experts(exec, g, view(x, rows, w), view(ids, rows, size{l.g.top_k}), view(weight, rows, size{l.g.top_k}),
                     stored.experts, workspace, view(out, rows, w));
  return converted<double>(out);
}

}  // namespace

TEST_CASE("mix_routed_experts against the naive sum of naive experts", "[latent_moe]") {
  const LatentMoeConfig wide{64, 96, 256, 12, 6, 0, {}, true, true, 1.0f};
  const LatentMoeConfig no_latent{70, 0, 33, 5, 2, 0, GluConfig::silu(), false, true, 2.446f};
  const host every_isa[] = {{1, Isa::plain}, {1, Isa::avx2}, {2, Isa::avx512}};
  std::uint32_t seed = 300;
  for (const LatentMoeConfig& g : {medium, wide, no_latent}) {
    const Layer l = random_layer(g, seed += 100);
    const std::size_t rows = 37, w = moe_expert_width(g);  // an expert may have more rows than one product takes
    const Doubles latent = exact_normal(rows * w, seed + 90, 1.0),
                  weights = exact_normal(rows * g.top_k, seed + 91, 0.5);
    std::vector<id> ids(rows * g.top_k);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<id>(i * i % 11 % g.n_routed);
    Doubles want(rows * w);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto e = static_cast<std::size_t>(ids[i]), row = i / g.top_k;
      const auto x = latent.begin() + static_cast<std::ptrdiff_t>(row * w);
      const Doubles y = naive_mlp(g.activation, l.w1[e], l.w3[e], l.w2[e],
                                  Doubles(x, x + static_cast<std::ptrdiff_t>(w)), Rounding::none(), false);
      for (std::size_t c = 0; c < w; ++c) want[row * w + c] += weights[i] * y[c];
    }
    for (const host& exec : every_isa) {
      const Comparison fp32 = compare(mixed<Fp32>(exec, g, l, latent, ids, weights), want, 8e-7, 0, true);
      CAPTURE(w, static_cast<int>(exec.isa), fp32.worst);
      const Comparison fp64 = compare(mixed<Fp64>(exec, g, l, latent, ids, weights), want, 2e-15, 0, true);
      if (std::getenv("K3_TEST_VERBOSE")) WARN("float " << fp32.worst << ", double " << fp64.worst);
      check(fp32);
      check(fp64);
    }
  }
}

TEMPLATE_TEST_CASE("mix_routed_experts gives the same bits with compile-time geometry", "[latent_moe]", Fp32, Fp64,
                   Bf16) {
  const Layer l = random_layer(medium, 700);
  const Doubles latent = exact_normal(5 * medium.latent, 701, 1.0), weights = exact_normal(15, 702, 0.5);
  const std::vector<id> ids{5, 2, 8, 0, 5, 1, 3, 3, 3, 7, 6, 5, 4, 2, 0};
  check(same_bits(mixed<TestType>(host{}, Medium{}, l, latent, ids, weights),
                  mixed<TestType>(host{}, medium, l, latent, ids, weights)));
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
  CHECK(thrown_by([&] { MoeWorkspace<Fp32>(medium, ~size{0} / 2); }) == "MoeWorkspace/its size");
  for (const size rows : {size{1} << 62, size{1} << 61, size{1} << 60})
    CHECK(thrown_by([&] { MoeWorkspace<Fp32>(LatentMoeConfig{4, 4, 4, 2, 1, 1}, rows); }) == "MoeWorkspace/its size");
  CHECK(thrown_by([] { MlpWorkspace<Fp32>((size{1} << 62) + 1, 2); }) == "MlpWorkspace/its size");
  CHECK(thrown_by([] { MlpWorkspace<Fp32>(size{1} << 63, 2); }) == "MlpWorkspace/width");
  CHECK(thrown_by([] { MlpWorkspace<Fp32>(size{1} << 60, 1); }) == "MlpWorkspace/its size");
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

TEST_CASE("a workspace that was moved from has no rows", "[latent_moe]") {
  const Layer l = random_layer(medium, 131);
  const Stored<float> stored(l);
  const auto x = converted<float>(exact_normal(2 * medium.hidden, 130, 1.0));
  MoeWorkspace<Fp32> moe(medium, 2);
  const std::vector<float> want = forward<Fp32>(medium, x, stored.weights, stored.experts, moe);
  MoeWorkspace<Fp32> taken(std::move(moe));
  CHECK(moe.max_rows() == 0);
  CHECK(thrown_by([&] { forward<Fp32>(medium, x, stored.weights, stored.experts, moe); }) ==
        "latent_moe_forward/workspace.max_rows");
  CHECK(thrown_by([&] { moe.expert_rows(0); }) == "MoeWorkspace::expert_rows/e");
  CHECK(moe.router_logits().extent(0) == 0);
  check(same_bits(forward<Fp32>(medium, x, stored.weights, stored.experts, taken), want));
  moe = std::move(taken);
  check(same_bits(forward<Fp32>(medium, x, stored.weights, stored.experts, moe), want));
  CHECK(thrown_by([&] { moe.expert_rows(medium.n_routed); }) == "MoeWorkspace::expert_rows/e");

  MlpWorkspace<Fp32> mlp(4, 3);
  const MlpWorkspace<Fp32> kept(std::move(mlp));
  CHECK((mlp.width() == 0 && mlp.max_rows() == 0 && kept.width() == 4 && kept.max_rows() == 3));
}
