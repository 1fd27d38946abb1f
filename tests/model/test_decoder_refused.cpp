// SPDX-License-Identifier: Apache-2.0
// What no decoder is made for: weights that are not there, graphs that are not the config's, settings out of range.

#include <limits>

#include <k3/model/decoder.hpp>
#include <k3/model/synthetic.hpp>

#include "support/catch.hpp"

using namespace k3;

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
