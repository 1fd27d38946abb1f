// SPDX-License-Identifier: Apache-2.0
// Acceptance gates C5 (residual mixture) and C6 (experts) on the device, each also with the fault it must notice.

#include "cuda/decoder_device.hpp"
#include "cuda/gates.hpp"
#include "cuda/layer_values.hpp"
#include "cuda/moe_device.hpp"
#include "cuda/row_ops_device.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// The mixtures of a pass: weights, and the mixed stream in front of the head.
Values mixtures(const Case& c, const Ablation& ablation = {}) {
  RunnerOptions options;
  options.ablation = ablation;
  options.max_rows = options.max_logit_rows = c.prompt.size();
  auto runner = make_device_runner(*c.model, options);
  Values seen;
  runner->forward(TokenRows(c.prompt, 0, c.prompt.size()).batch(),
                  [&](const std::string& part, size layer, std::vector<float>& values) {
                    const bool last = part == "mixed" && layer == c.model->graph.layers.size();
                    if (last || part.find("res_probs") != part.npos)
                      seen[last ? "output_mixed" : tensor_name(part, layer)].assign(values.begin(), values.end());
                  });
  return seen;
}

/// How many of the fixture's mixtures are not those seen; `compared` of them there are.
size other_mixtures(const Fixture& f, const Values& seen, size& compared) {
  size others = 0;
  compared = 0;
  for (const auto& [name, values] : seen) {
    if (!f.has(name)) continue;
    others += !compare(values, f.values(name), 4e-5, 0, true).within;
    ++compared;
  }
  return others;
}

K3CpuModel without_scores(K3CpuModel model, const std::vector<float>& zeros) {
  for (LayerWeights& layer : model.weights.layers) layer.self_attention_res_proj = layer.mlp_res_proj = view(zeros);
  model.weights.output_attn_res_proj = view(zeros);
  return model;
}

}  // namespace

TEST_CASE("device C5: the mixture's known values, its weights in the references, and what goes wrong without it") {
  RowCall call;
  call.is_bf16 = call.bf16_weight = false;
  MixCase known{1, 1, 4, {0, 1, 4, -3}, {1, 0, -0.5f, 2}, {1, 1, 1, 1}, {0.2f, -0.1f, 0.4f, 0.3f}, {1, 1, 1, 1}};
  const std::vector<double> want{0.5715999, 0.4284001, 1.4278004, -0.1420004};
  const MixResult mixed = device_attnres_norm(call, known);
  check(compare(mixed.probs, std::vector<double>{0.428400, 0.571600}, 0, 1e-5));
  check(compare(mixed.mixed, want, 0, 1e-5));
  MixCase unmixed = known, unscored = known;
  unmixed.mix = 0.0f;
  unscored.res_proj.assign(4, 0.0f);
  CHECK(device_attnres_norm(call, unmixed).mixed == known.running);
  CHECK_FALSE(compare(device_attnres_norm(call, unscored).mixed, want, 0, 1e-5).within);

  for (const char* name : {"k3-tiny-5l", "k3-tiny-13l"}) {
    if (small_only() && std::string(name) != "k3-tiny-5l") continue;
    const Fixture& f = fixture(name);
    const std::vector<float> zeros(f.model.config.hidden_size, 0.0f);
    const K3CpuModel flat = without_scores(f.model, zeros);
    const Case c{name, &f.model, f.ids(2)}, scoreless{name, &flat, c.prompt};
    Ablation none;
    none.attnres_mix = 0.0f;
    INFO(name);
    size compared = 0;
    CHECK(other_mixtures(f, mixtures(c), compared) == 0);
    CHECK(compared == 2 * f.model.graph.layers.size() + 1);
    if (small_only()) continue;
    CHECK(other_mixtures(f, mixtures(c, none), compared) > compared / 2);
    CHECK(other_mixtures(f, mixtures(scoreless), compared) > compared / 2);
    const auto whole = after(c, c.prompt);
    CHECK(whole->argmax(0) == f.generated(2)[0]);
    CHECK(after(c, c.prompt, none)->argmax(0) != whole->argmax(0));
    CHECK(largest_difference(after(scoreless, c.prompt)->logits(), whole->logits()) > 1e-2);
  }
}

namespace {

std::vector<unsigned char> bytes_of(const std::vector<float>& values) {
  std::vector<unsigned char> bytes(values.size() * sizeof(float));
  __builtin_memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// Two experts whose up weights differ in one element; the first one's output goes elsewhere.
MoeInputs<float> two_experts() {
  MoeInputs<float> in;
  in.g = {4, 4, 4, 2, 1, 0, {}, true, true, 1.0f};
  in.rows = 1, in.type = ElementType::f32;
  in.latent = {1, 0, 0, 0};
  const std::vector<float> identity{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  std::vector<float> doubled = identity, turned = identity;
  doubled[0] = 2;
  std::swap(turned[0], turned[4]);
  in.experts.resize(2);
  for (size e = 0; e < 2; ++e) {
    in.experts[e].data[0] = bytes_of(identity);
    in.experts[e].data[1] = bytes_of(e == 1 ? doubled : identity);
    in.experts[e].data[2] = bytes_of(e == 0 ? turned : identity);
  }
  return in;
}

}  // namespace

TEST_CASE("device C6: logits 0 and 4 choose expert 1, whose output is known, and a forced expert is noticed") {
  const std::vector<double> want{1.9999804, 0, 0, 0};
  const auto output = [](std::vector<float> logits) {
    const RouterOutputs routed = sigmoid_topk_on_device({1, 2, 1, true, 1.0f, std::move(logits), {0, 0}, {}});
    MoeInputs<float> in = two_experts();
    in.ids = routed.ids, in.weights = routed.weights;
    // The projections are the identity: what is left of the layer is the norm.
    const std::vector<float> mixed = mix_experts_on_device(in).out;
    RowCall call;
    call.is_bf16 = call.bf16_weight = false;
    return std::pair(routed, device_rms_norm(call, 1, 4, mixed, {1, 1, 1, 1}, 1e-5f));
  };
  const auto [routed, out] = output({0, 4});
  CHECK(routed.ids == std::vector<id>{1});
  check(compare(routed.weights, std::vector<double>{0.9820138}, 1e-6));
  check(compare(out, want, 0, 1e-6));
  const auto [forced, elsewhere] = output({8, 0});
  CHECK(forced.ids == std::vector<id>{0});
  CHECK(std::abs(static_cast<double>(elsewhere[0]) - want[0]) > 1);

  for (const Case& c : cases()) {
    const std::vector<float> logits = after(c, c.prompt)->logits();
    double largest = 0;
    for (size expert = 0; expert < (small_only() ? 1 : 2); ++expert) {
      Ablation one;
      one.force_expert = expert;
      largest = std::max(largest, largest_difference(after(c, c.prompt, one)->logits(), logits));
    }
    INFO(c.name << ": forcing expert 0 or 1 moves a logit by " << largest);
    CHECK(largest > 1e-4);
  }
}
