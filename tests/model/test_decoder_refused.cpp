// SPDX-License-Identifier: Apache-2.0
// What no decoder is made for: weights that are not there, graphs that are not the config's, settings out of range. And
// what is said of numbers that are none.

#include <limits>

#include <k3/model/greedy_decode.hpp>
#include <k3/model/synthetic.hpp>

#include "support/catch.hpp"

using namespace k3;

namespace {

/// Of a synthetic model, whose floats are its own.
void set_weight(const AnyMatrix<>& weight, size row, size column, float value) {
  const_cast<float*>(static_cast<const float*>(weight.data))[row * weight.extents[1] + column] = value;
}

}  // namespace

TEST_CASE("a decoder is not made for a model or for settings that it could not run, and names what is wrong") {
  const auto refused = [](auto&& damage, const std::string& name) {
    K3CpuModel model = synthetic_small();
    damage(model);
    try {
      Decoder<Fp32> decoder(host{1}, model);
      FAIL("accepted without " << name);
    } catch (const invalid_argument& problem) {
      INFO(problem.what());
      CHECK(std::string(problem.what()).find(name) != std::string::npos);
    }
  };
  refused([](K3CpuModel& m) { m.weights.layers[2].kda.q_proj = {}; }, "model.layers.2.self_attn.q_proj.weight");
  refused([](K3CpuModel& m) { m.weights.layers[3].mla.kv_b_proj = m.weights.layers[3].mla.o_proj; }, "kv_b_proj");
  refused([](K3CpuModel& m) { m.weights.layers[1].experts = nullptr; }, "model.layers.1.block_sparse_moe.experts");
  refused([](K3CpuModel& m) { m.weights.lm_head = {}; }, "lm_head.weight");
  refused([](K3CpuModel& m) { m.weights.layers.pop_back(); }, "weights.layers");
  refused(
      [](K3CpuModel& m) {
        m.config.attn_res_block_size = 2;
        m.config.tie_word_embeddings = true;
        m.graph = K3Graph::from_config(m.config);
      },
      "lm_head");
  refused([](K3CpuModel& m) { m.graph.hidden = 3; }, "graph");
  refused([](K3CpuModel& m) { m.graph.attn_res_block_size = 1; }, "graph");
  refused([](K3CpuModel& m) { m.weights.layers[1].spec.index = 77; }, "model.layers.1.spec");
  refused([](K3CpuModel& m) { m.weights.layers[1].spec.mixer = MixerKind::Mla; }, "model.layers.1.spec");
  refused([](K3CpuModel& m) { m.weights.layers[0].spec.mlp = MlpKind::LatentMoe; }, "model.layers.0.spec");
  refused([](K3CpuModel& m) { m.weights.layers[0].kda.q_proj.data = nullptr; }, "layers.0.self_attn.q_proj.weight");
  std::vector<float> bias(4);
  bias[2] = std::numeric_limits<float>::quiet_NaN();
  refused([&](K3CpuModel& m) { m.weights.layers[5].moe.e_score_correction_bias = AnyVector<>(view(bias)); },
          "model.layers.5.block_sparse_moe.gate.e_score_correction_bias[2]");
  // Settings that no pass could have.
  refused([](K3CpuModel& m) { m.config.kda.gate_lower_bound = 1.0f; }, "gate_lower_bound");
  refused([](K3CpuModel& m) { m.config.mla.norm_eps = std::numeric_limits<float>::quiet_NaN(); }, "norm_eps");
  refused(
      [](K3CpuModel& m) {
        m.config.mla.mla_use_nope = false;
        m.graph = K3Graph::from_config(m.config);
      },
      "mla_use_nope");
  CHECK_THROWS_AS(Decoder<Fp32>(host{1}, synthetic_small(), 0, 1), invalid_argument);
  CHECK_THROWS_AS(Decoder<Fp32>(host{1}, synthetic_small(), 2, 3), invalid_argument);
  Ablation beyond;
  beyond.force_expert = 4;
  CHECK_THROWS_AS(Decoder<Fp32>(host{1}, synthetic_small(), 2, 1, beyond), invalid_argument);
  CHECK_THROWS_AS(Decoder<Fp32>(host{1}, synthetic_small(), size{1} << 62, 1), invalid_argument);
  CHECK_THROWS_AS(Decoder<Fp32>(host{1}, synthetic_small(), size{1} << 31, 1), invalid_argument);
  K3Config odd = synthetic_small().config;
  odd.mla.heads = 1;
  odd.mla.v_head_dim = 3;
  const K3CpuModel model = synthetic_model(odd, 0.5f);
  Ablation halves;
  halves.o_proj_tp = 2;
  CHECK_THROWS_AS(Decoder<Fp32>(host{1}, model, 2, 1, halves), invalid_argument);
  CHECK_NOTHROW(Decoder<Fp32>(host{1}, synthetic_small(), 2, 1, halves));
}

TEST_CASE("NaN is reported with the layer that met it") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto check_fault = [](const K3CpuModel& model, size layer, RowStatus status, const std::string& says) {
    INFO(says);
    Decoder<Fp32> decoder(host{1}, model, 4, 2);
    HybridCache<Fp32> cache = decoder.make_cache(2, 16);
    const std::vector<id> tokens = {0, 1, 2}, slots = {pad_slot, 1, 1};
    const std::vector<size> positions = {0, 0, 1}, wanted = {0, 2};
    decoder.forward(cache, {view(tokens), view(slots), view(positions), view(wanted)});
    CHECK(decoder.status(1) == status);
    CHECK(decoder.fault_layer(1) == layer);
    CHECK(decoder.fault_layer(0) == no_layer);
    CHECK(cache.fault_layer(1) == layer);
    CHECK(cache.fault_layer(0) == no_layer);
    const auto message = [](auto&& call) {
      try {
        call();
      } catch (const invalid_argument& problem) {
        return std::string(problem.what());
      }
      return std::string("nothing thrown");
    };
    CHECK(message([&] { decoder.argmax(1); }) == "Decoder: logits of row 1 is " + says + ", expected numbers");
    // What a prompt of several passes, the decoder's next caller and a snapshot are told.
    const std::string refused = message([&] { prefill(decoder, cache, 1, view(tokens)); });
    CHECK(refused == "Decoder::forward: the sequence in slot 1 is " + says +
                         ", expected one that was reset, restored or rolled back since");
    CHECK(message([&] { cache.snapshot(1); }).find(says) != std::string::npos);
    cache.reset(1);
    CHECK(cache.fault_layer(1) == no_layer);
    if (status == RowStatus::nan_logits) return;
    const std::vector<id> prompt = {1, 2, 3, 1, 2, 3};
    CHECK(message([&] { prefill(decoder, cache, 1, view(prompt)); }).find(says) != std::string::npos);
  };
  for (size layer = 1; layer < 8; ++layer) {
    K3CpuModel router = synthetic_small(), mixer = synthetic_small(), expert = synthetic_small();
    const std::string says = "NaN router logits in model.layers." + std::to_string(layer);
    set_weight(router.weights.layers[layer].moe.gate, 1, 1, nan);
    check_fault(router, layer, RowStatus::nan_router_logits, says);
    const LayerWeights& weights = mixer.weights.layers[layer];
    set_weight(weights.spec.mixer == MixerKind::Kda ? weights.kda.o_proj : weights.mla.o_proj, 0, 0, nan);
    check_fault(mixer, layer, RowStatus::nan_router_logits, says);
    // Behind its own router: the next one meets it, or the head.
    for (size e = 0; e < 4; ++e) set_weight((*expert.weights.layers[layer].experts)[e].w2, 0, 0, nan);
    if (layer < 7)
      check_fault(expert, layer + 1, RowStatus::nan_router_logits,
                  "NaN router logits in model.layers." + std::to_string(layer + 1));
    else
      check_fault(expert, 7, RowStatus::nan_logits, "NaN logits of lm_head, behind model.layers.7");
  }
  K3CpuModel head = synthetic_small();
  set_weight(head.weights.lm_head, 3, 0, nan);
  check_fault(head, 7, RowStatus::nan_logits, "NaN logits of lm_head, behind model.layers.7");
}
