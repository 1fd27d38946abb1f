// SPDX-License-Identifier: Apache-2.0
// A whole LatentMoE layer: fixture, double, bf16, geometries, threads, padding, NaN.
#include "ops/moe_problem.hpp"
#include "support/ops_fixture.hpp"

using namespace k3;
using namespace k3::test;

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
  for (bool Rounding::* point : {&Rounding::latent, &Rounding::branches, &Rounding::glu, &Rounding::expert,
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
