// SPDX-License-Identifier: Apache-2.0
#include <k3/geometry/decoder_geometry.hpp>
#include <k3/geometry/presets.hpp>

#include <limits>
#include <type_traits>

#include "support/catch.hpp"

using namespace k3;

namespace {

/// `layers` layers with latent attention in every fourth and in the last one.
K3Config config_of(size layers, size dense) {
  K3Config config;
  config.hidden_size = 7168;
  config.vocab_size = 163840;
  config.intermediate_size = 33792;
  config.first_k_dense_replace = dense;
  config.attn_res_block_size = 12;
  config.max_position_embeddings = 1048576;
  for (size layer = 0; layer < layers; ++layer)
    config.mixers.push_back(layer % 4 == 3 || layer + 1 == layers ? MixerKind::Mla : MixerKind::Kda);
  config.kda = KdaConfig::production();
  config.mla = MlaConfig::production();
  config.moe = LatentMoeConfig::production();
  return config;
}

/// check(g) must refuse, naming `argument`.
template <class G>
void check_refused(const G& g, const std::string& argument) {
  CAPTURE(argument);
  try {
    check(g, "test");
    FAIL_CHECK("accepted");
  } catch (const invalid_argument& problem) {
    INFO(problem.what());
    CHECK(problem.operation() == "test");
    CHECK(problem.argument().find(argument) != std::string::npos);
  }
}

template <class G, class F>
G with(G g, F&& change) {
  change(g);
  return g;
}

}  // namespace

TEST_CASE("geometry: the fixed ones are empty and equal their run-time twins", "[geometry]") {
  CHECK(std::is_empty_v<kimi_k3::Decoder>);
  CHECK(std::is_empty_v<kimi_k3_0_4b::Decoder>);
  CHECK(std::is_empty_v<kimi_linear_48b::Decoder>);
  CHECK(std::is_empty_v<tiny::Decoder>);
  CHECK(decoder_geometry_from(config_of(93, 1)) == runtime_geometry(kimi_k3::Decoder{}));
  CHECK(runtime_geometry(kimi_k3_0_4b::Decoder{}).kda == KdaConfig::twin_0_40b());
  CHECK(runtime_geometry(kimi_k3_0_4b::Decoder{}).mla == MlaConfig::twin_0_40b());
  CHECK(runtime_geometry(kimi_k3_0_4b::Decoder{}).moe == LatentMoeConfig::twin_0_40b());
  CHECK_FALSE(runtime_geometry(kimi_k3::Decoder{}) == runtime_geometry(kimi_k3_0_4b::Decoder{}));
  CHECK(runtime_geometry(kimi_linear_48b::Decoder{}).activation == GluConfig::silu());
  // A geometry that differs in one place is another one.
  for (size field = 0; field < 4; ++field) {
    CAPTURE(field);
    DecoderGeometry g = runtime_geometry(kimi_k3::Decoder{});
    if (field == 0) g.kda.gate_lower_bound = std::nullopt;
    if (field == 1) g.mla.norm_eps = 1e-5f;
    if (field == 2) g.moe.activation.linear_beta = std::nullopt;
    if (field == 3) g.rms_norm_eps = 1e-6f;
    CHECK_FALSE(g == runtime_geometry(kimi_k3::Decoder{}));
  }
  for (const DecoderGeometry& g : {runtime_geometry(kimi_k3::Decoder{}), runtime_geometry(kimi_k3_0_4b::Decoder{}),
                                   runtime_geometry(kimi_linear_48b::Decoder{}), runtime_geometry(tiny::Decoder{})}) {
    CHECK_NOTHROW(check(g.kda, "test"));
    CHECK_NOTHROW(check(g.mla, "test"));
    CHECK_NOTHROW(check(g.moe, "test"));
    CHECK(g.moe.hidden == g.hidden);
  }
}

TEST_CASE("geometry: the layer map of Kimi K3", "[geometry]") {
  const K3Config config = config_of(93, 1);
  CHECK_NOTHROW(check(config, "test"));
  const K3Graph graph = K3Graph::from_config(config);
  REQUIRE(graph.layers.size() == 93);
  CHECK(graph.kda_count() == 69);
  CHECK(graph.mla_count() == 24);
  CHECK(graph.last_is_mla());
  for (size layer = 0; layer < 93; ++layer) {
    const bool latent_attention = layer == 92 || layer % 4 == 3;
    CHECK(graph.layers[layer] == K3LayerSpec{layer, latent_attention ? MixerKind::Mla : MixerKind::Kda,
                                             layer == 0 ? MlpKind::Dense : MlpKind::LatentMoe});
  }
  CHECK(graph.hidden == 7168);
  CHECK(graph.attn_res_block_size == 12);
  CHECK(graph.situ_beta == 4.0f);
  CHECK(graph.situ_linear_beta == 25.0f);
  CHECK(graph.use_full_rank_gate);
  CHECK(graph.mla_use_nope);
  CHECK(graph.mla_use_output_gate);
  CHECK(K3Graph::from_config(config_of(8, 8)).layers.back().mlp == MlpKind::Dense);
  CHECK(K3Graph::from_config(config_of(8, 0)).layers.front().mlp == MlpKind::LatentMoe);
  CHECK_FALSE(K3Graph{}.last_is_mla());
  CHECK(K3Graph{}.kda_count() == 0);
}

TEST_CASE("geometry: snapshots and mixtures of 93 layers in blocks of 12 (case 37)", "[geometry]") {
  std::vector<size> starts;
  for (size layer = 0; layer < 93; ++layer)
    if (starts_block(layer, 12)) starts.push_back(layer);
  CHECK(starts == std::vector<size>{0, 12, 24, 36, 48, 60, 72, 84});
  CHECK(snapshot_count(93, 12) == 8);
  const size expected[][3] = {{0, 1, 2}, {1, 2, 2}, {11, 2, 2}, {12, 2, 3}, {13, 3, 3}, {84, 8, 9}, {92, 9, 9}};
  for (const auto& [layer, attention, mlp] : expected) {
    CAPTURE(layer);
    CHECK(attention_mix_sources(layer, 12) == attention);
    CHECK(mlp_mix_sources(layer, 12) == mlp);
  }
  // Against counting by hand, for any block size; a single source is no mixture.
  for (const size block : {1u, 2u, 3u, 12u, 93u, 100u}) {
    size snapshots = 0, mixtures = 1;  // the one after the last layer
    for (size layer = 0; layer < 93; ++layer) {
      CAPTURE(block, layer);
      CHECK(attention_mix_sources(layer, block) == snapshots + 1);
      mixtures += snapshots > 0;
      snapshots += layer % block == 0;
      CHECK(mlp_mix_sources(layer, block) == snapshots + 1);
      ++mixtures;
      CHECK(snapshot_count(layer + 1, block) == snapshots);
    }
    CHECK(mixtures == 186);
  }
  // Without Attention Residuals there is nothing to store or to mix.
  CHECK_FALSE(starts_block(0, 0));
  CHECK(snapshot_count(93, 0) == 0);
  CHECK(attention_mix_sources(50, 0) == 1);
  CHECK(mlp_mix_sources(50, 0) == 1);
}

TEST_CASE("geometry: derived sizes (case 45 and the released model's state)", "[geometry]") {
  CHECK(moe_expert_weights(kimi_k3::LatentMoe{}) == 33030144);
  CHECK(moe_shared_width(kimi_k3::LatentMoe{}) == 6144);
  CHECK(moe_shared_weights(kimi_k3::LatentMoe{}) == 132120576);
  CHECK(moe_expert_width(kimi_k3::LatentMoe{}) == 3584);
  CHECK(moe_expert_width(kimi_linear_48b::LatentMoe{}) == 2304);
  CHECK(kda_width(kimi_k3::Kda{}) == 12288);
  CHECK(kda_conv_channels(kimi_k3::Kda{}) == 36864);
  CHECK(kda_state_elements(kimi_k3::Kda{}) * sizeof(float) == 6291456);
  CHECK(kda_conv_elements(kimi_k3::Kda{}) == 110592);
  CHECK(mla_qk_head_dim(kimi_k3::Mla{}) == 192);
  CHECK(mla_q_width(kimi_k3::Mla{}) == 18432);
  CHECK(mla_v_width(kimi_k3::Mla{}) == 12288);
  CHECK(mla_kv_b_rows(kimi_k3::Mla{}) == 24576);
  CHECK(mla_cache_width(kimi_k3::Mla{}) == 576);
  CHECK(mla_cache_width(kimi_k3::Mla{}) * 24 * 2 == 27648);  // bytes of a position in bf16
  static_assert(kda_width(kimi_k3_0_4b::Kda{}) == 256 && mla_qk_head_dim(kimi_k3_0_4b::Mla{}) == 96);
}

TEST_CASE("geometry: what cannot be a geometry", "[geometry]") {
  const KdaConfig kda = KdaConfig::production();
  check_refused(with(kda, [](auto& g) { g.heads = 0; }), "heads");
  check_refused(with(kda, [](auto& g) { g.head_dim = 0; }), "head_dim");
  check_refused(with(kda, [](auto& g) { g.conv_kernel = 0; }), "conv_kernel");
  check_refused(with(kda, [](auto& g) { g.heads = ~size{0} / 2; }), "heads * head_dim");
  check_refused(with(kda, [](auto& g) { g.heads = size{1} << 56; }), "state");
  const MlaConfig mla = MlaConfig::production();
  check_refused(with(mla, [](auto& g) { g.heads = 0; }), "heads");
  check_refused(with(mla, [](auto& g) { g.qk_nope_head_dim = 0; }), "qk_nope_head_dim");
  check_refused(with(mla, [](auto& g) { g.v_head_dim = 0; }), "v_head_dim");
  check_refused(with(mla, [](auto& g) { g.kv_lora_rank = 0; }), "kv_lora_rank");
  check_refused(with(mla, [](auto& g) { g.kv_lora_rank = size{1} << 31; }), "widest");
  check_refused(with(mla, [](auto& g) { g.heads = size{1} << 60; }), "width");
  CHECK_NOTHROW(check(with(mla, [](auto& g) { g.qk_rope_head_dim = 0; }), "test"));
  const LatentMoeConfig moe = LatentMoeConfig::production();
  check_refused(with(moe, [](auto& g) { g.hidden = 0; }), "hidden");
  check_refused(with(moe, [](auto& g) { g.expert_hidden = 0; }), "expert_hidden");
  check_refused(with(moe, [](auto& g) { g.n_routed = 0; }), "n_routed");
  check_refused(with(moe, [](auto& g) { g.n_routed = size{1} << 31; }), "n_routed");
  check_refused(with(moe, [](auto& g) { g.top_k = 0; }), "top_k");
  check_refused(with(moe, [](auto& g) { g.top_k = 897; }), "top_k");
  check_refused(with(moe, [](auto& g) { g.latent = size{1} << 31; }), "widest");
  CHECK_NOTHROW(check(with(moe, [](auto& g) { g.latent = g.n_shared = 0, g.use_norm = false; }), "test"));
  const K3Config config = config_of(93, 1);
  check_refused(with(config, [](auto& c) { c.hidden_size = 0; }), "hidden_size");
  check_refused(with(config, [](auto& c) { c.hidden_size = 7169; }), "moe.hidden");
  check_refused(with(config, [](auto& c) { c.vocab_size = 0; }), "vocab_size");
  check_refused(with(config, [](auto& c) { c.vocab_size = size{1} << 31; }), "vocab_size");
  check_refused(with(config, [](auto& c) { c.intermediate_size = 0; }), "intermediate_size");
  check_refused(with(config, [](auto& c) { c.first_k_dense_replace = 94; }), "first_k_dense_replace");
  check_refused(with(config, [](auto& c) { c.max_position_embeddings = 0; }), "max_position_embeddings");
  check_refused(with(config, [](auto& c) { c.rms_norm_eps = 0; }), "rms_norm_eps");
  check_refused(with(config, [](auto& c) { c.mixers.clear(); }), "num_hidden_layers");
  check_refused(with(config, [](auto& c) { c.mixers.resize(10001); }), "num_hidden_layers");
  check_refused(with(config, [](auto& c) { c.kda.heads = 0; }), "heads");
  check_refused(with(config, [](auto& c) { c.moe.top_k = 897; }), "top_k");
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinite = std::numeric_limits<float>::infinity();
  check_refused(with(config, [](auto& c) { c.kda.head_dim = 1025; }), "head_dim");
  for (const float bound : {0.0f, 1.0f, nan, -infinite})
    check_refused(with(config, [&](auto& c) { c.kda.gate_lower_bound = bound; }), "gate_lower_bound");
  for (const float eps : {-1.0f, 1.0f, nan})
    check_refused(with(config, [&](auto& c) { c.mla.norm_eps = eps; }), "norm_eps");
  for (const float factor : {infinite, nan})
    check_refused(with(config, [&](auto& c) { c.moe.routed_scaling_factor = factor; }), "routed_scaling_factor");
  for (const float cap : {0.0f, infinite, nan}) {
    check_refused(with(config, [&](auto& c) { c.moe.activation.beta = cap; }), "beta");
    check_refused(with(config, [&](auto& c) { c.moe.activation.linear_beta = cap; }), "linear_beta");
    // Dense layers have the activation too.
    check_refused(with(config_of(4, 4), [&](auto& c) { c.moe.activation.beta = cap; }), "beta");
  }
}

TEST_CASE("a norm in the latent space needs a latent space", "[geometry]") {
  k3::LatentMoeConfig moe = k3::LatentMoeConfig::twin_0_40b();
  k3::check(moe, "test");
  moe.latent = 0;
  try {
    k3::check(moe, "test");
    FAIL("accepted");
  } catch (const k3::invalid_argument& problem) {
    INFO(problem.what());
    CHECK(problem.argument() == "geometry.use_norm");
  }
  moe.use_norm = false;
  k3::check(moe, "test");
}
