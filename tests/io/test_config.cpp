// SPDX-License-Identifier: Apache-2.0
// config.json: the members of the family, their variants, what may be left out, end tokens.
#include "io/config_support.hpp"

using namespace k3;
using namespace k3::test;

TEST_CASE("config: Kimi K3", "[config]") {
  const K3Config config = config_from_json(kimi_k3_config(), file);
  CHECK(decoder_geometry_from(config) == runtime_geometry(kimi_k3::Decoder{}));
  CHECK(kda_from(config) == KdaConfig::production());
  CHECK(mla_from(config) == MlaConfig::production());
  CHECK(moe_from(config) == LatentMoeConfig::production());
  CHECK(config.first_k_dense_replace == 1);
  CHECK(config.max_position_embeddings == 1048576);
  CHECK_FALSE(config.tie_word_embeddings);
  CHECK(config.eos_token_ids == std::vector<id>{163586});
  const K3Graph graph = K3Graph::from_config(config);
  REQUIRE(graph.layers.size() == 93);
  CHECK(graph.kda_count() == 69);
  CHECK(graph.mla_count() == 24);
  CHECK(graph.last_is_mla());
  for (size layer = 0; layer < 93; ++layer) {
    CAPTURE(layer);
    CHECK(graph.layers[layer].index == layer);
    CHECK(graph.layers[layer].mixer == (layer % 4 == 3 || layer == 92 ? mla : kda));
    CHECK(graph.layers[layer].mlp == (layer == 0 ? MlpKind::Dense : MlpKind::LatentMoe));
  }
  // Case 37.
  const size block = graph.attn_res_block_size;
  CHECK(snapshot_count(93, block) == 8);
  const size expected[][3] = {{0, 1, 2}, {1, 2, 2}, {11, 2, 2}, {12, 2, 3}, {13, 3, 3}, {84, 8, 9}, {92, 9, 9}};
  for (const auto& [layer, attention, mlp] : expected) {
    CAPTURE(layer);
    CHECK(attention_mix_sources(layer, block) == attention);
    CHECK(mlp_mix_sources(layer, block) == mlp);
  }
  // Case 45.
  CHECK(moe_expert_weights(config.moe) == 33030144);
  CHECK(moe_shared_width(config.moe) == 6144);
  CHECK(moe_shared_weights(config.moe) == 132120576);
}

TEST_CASE("config: the 0.40B sibling", "[config]") {
  const K3Config config = config_from_json(twin_config(), file);
  CHECK(decoder_geometry_from(config) == runtime_geometry(kimi_k3_0_4b::Decoder{}));
  CHECK(config.mixers == std::vector<MixerKind>{kda, kda, kda, mla, kda, kda, kda, mla});
  CHECK_FALSE(config.kda.gate_lower_bound.has_value());
  CHECK(config.eos_token_ids == std::vector<id>{163585});
  CHECK(K3Graph::from_config(config).attn_res_block_size == 4);
}

TEST_CASE("config: Kimi-Linear-48B", "[config]") {
  const K3Config config = config_from_json(kimi_linear_config(), file);
  CHECK(decoder_geometry_from(config) == runtime_geometry(kimi_linear_48b::Decoder{}));
  const K3Graph graph = K3Graph::from_config(config);
  CHECK(graph.kda_count() == 20);
  CHECK(graph.mla_count() == 7);
  CHECK(graph.layers[26].mixer == mla);
  CHECK(graph.layers[25].mixer == kda);
  CHECK(graph.attn_res_block_size == 0);
}

TEST_CASE("config: with and without the wrapper (case 60)", "[config]") {
  const Json wrapped = kimi_k3_config();
  const K3Config a = config_from_json(wrapped, file), b = config_from_json(wrapped["text_config"], file);
  CHECK(decoder_geometry_from(a) == decoder_geometry_from(b));
  CHECK(a.mixers == b.mixers);
  const Json linear = {{"model_type", "kimi_linear"}, {"text_config", kimi_linear_config()}};
  CHECK(decoder_geometry_from(config_from_json(linear, file)) == runtime_geometry(kimi_linear_48b::Decoder{}));
  for (const Json& text : {Json(nullptr), Json()}) {
    Json config = wrapped;
    config["text_config"] = text;
    check_refusal(refusal(config), "hidden_size", "is absent");
  }
  for (const Json& text : {Json("x"), Json(1), Json::array()}) {
    Json config = wrapped;
    config["text_config"] = text;
    check_refusal(refusal(config), "text_config", "expected an object of settings");
  }
  for (const Json& whole : {Json(nullptr), Json(1), Json("x"), Json::array({1})})
    CHECK(contains(refusal(whole).what(), "is " + whole.dump() + ", expected an object of settings"));
}

TEST_CASE("config: what a config must say", "[config]") {
  for (const char* key : {"vocab_size",
                          "hidden_size",
                          "num_hidden_layers",
                          "num_attention_heads",
                          "intermediate_size",
                          "first_k_dense_replace",
                          "num_experts",
                          "num_experts_per_token",
                          "moe_intermediate_size",
                          "moe_renormalize",
                          "routed_expert_hidden_size",
                          "activation_situ_beta",
                          "activation_situ_linear_beta",
                          "q_lora_rank",
                          "kv_lora_rank",
                          "qk_nope_head_dim",
                          "qk_rope_head_dim",
                          "v_head_dim",
                          "attn_res_block_size",
                          "rms_norm_eps",
                          "linear_attn_config",
                          "mla_use_nope",
                          "hidden_act"})
    check_key_needed(key);
  for (const char* key : {"num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers"}) {
    CAPTURE(key);
    Json config = four_layers();
    config["text_config"]["linear_attn_config"].erase(key);
    check_refusal(refusal(config), key, "is absent");
  }
  for (const char* key : {"vocab_size", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank", "linear_attn_config",
                          "moe_renormalize", "mla_use_nope", "hidden_act"})
    check_key_needed(key, kimi_linear_config());
}

TEST_CASE("config: what a config may leave out", "[config]") {
  Json config = four_layers();
  Json& text = config["text_config"];
  for (const char* key :
       {"mla_use_output_gate", "latent_moe_use_norm", "num_shared_experts", "moe_router_activation_func", "topk_method",
        "moe_layer_freq", "num_key_value_heads", "tie_word_embeddings", "eos_token_id", "model_type"})
    text.erase(key);
  text["linear_attn_config"].erase("use_full_rank_gate");
  config.erase("model_type");
  const K3Config result = config_from_json(config, file);
  CHECK_FALSE(result.mla.mla_use_output_gate);
  CHECK_FALSE(result.moe.use_norm);
  CHECK_FALSE(result.kda.use_full_rank_gate);
  CHECK(result.moe.n_shared == 0);
  CHECK(result.moe.routed_scaling_factor == 1.0f);
  CHECK(result.max_position_embeddings == 1048576);
  CHECK(result.eos_token_ids.empty());
  CHECK_FALSE(result.tie_word_embeddings);
  CHECK(result.mla.norm_eps == 1e-6f);

  // No dense layer, no width of one; only dense layers.
  text["first_k_dense_replace"] = 0;
  text.erase("intermediate_size");
  CHECK(config_from_json(config, file).intermediate_size == 0);
  text["first_k_dense_replace"] = 4;
  check_refusal(refusal(config), "intermediate_size", "is absent");
  text["intermediate_size"] = 7;
  CHECK(K3Graph::from_config(config_from_json(config, file)).layers[3].mlp == MlpKind::Dense);
}

TEST_CASE("config: the variants", "[config]") {
  Json config = four_layers();
  Json& text = config["text_config"];
  text.update({{"activation_situ_linear_beta", nullptr},
               {"q_lora_rank", nullptr},
               {"qk_rope_head_dim", 0},
               {"routed_expert_hidden_size", nullptr},
               {"latent_moe_use_norm", false},
               {"moe_renormalize", false},
               {"routed_scaling_factor", 2.5}});
  text["linear_attn_config"]["gate_lower_bound"] = nullptr;
  K3Config result = config_from_json(config, file);
  CHECK_FALSE(result.moe.activation.linear_beta.has_value());  // uncapped
  CHECK(result.moe.activation.beta == 4.0f);
  CHECK(result.mla.q_lora_rank == 0);
  CHECK(result.mla.qk_rope_head_dim == 0);
  CHECK(result.moe.latent == 0);
  CHECK_FALSE(result.moe.renormalize);
  CHECK(result.moe.routed_scaling_factor == 2.5f);
  CHECK_FALSE(result.kda.gate_lower_bound.has_value());
  text["linear_attn_config"]["gate_lower_bound"] = 0.0;
  CHECK_FALSE(config_from_json(config, file).kda.gate_lower_bound.has_value());
  text["linear_attn_config"]["gate_lower_bound"] = -3;
  CHECK(config_from_json(config, file).kda.gate_lower_bound == -3.0f);
  text["latent_moe_use_norm"] = true;
  check_refusal(refusal(config), "latent_moe_use_norm", "is true, expected false without routed_expert_hidden_size");
  text["latent_moe_use_norm"] = false;
  text.erase("num_experts_per_token");
  text["num_experts_per_tok"] = 3;
  CHECK(config_from_json(config, file).moe.top_k == 3);
  text["num_experts_per_tok"] = 9;
  check_refusal(refusal(config), "num_experts_per_tok", "is 9, expected at most num_experts, 8");
}

TEST_CASE("config: the family decides which keys there must be (case 56)", "[config]") {
  const CheckpointHints scores{true, false}, latent{false, true}, both{true, true};
  // Kimi K3 by its activation alone, by the outer name alone, by the tensors alone.
  Json bare = four_layers()["text_config"];
  CHECK(config_from_json(bare, file).attn_res_block_size == 4);
  for (const char* key :
       {"attn_res_block_size", "routed_expert_hidden_size", "activation_situ_beta", "activation_situ_linear_beta"}) {
    CAPTURE(key);
    Json without = bare;
    without.erase(key);
    check_refusal(refusal(without), key, "is absent");
    check_refusal(refusal(without, both), key, "is absent");
  }
  Json silu = four_layers();
  silu["text_config"]["hidden_act"] = "silu";
  check_refusal(refusal(silu), "hidden_act", "is \"silu\", expected situ");
  Json linear = kimi_linear_config();
  check_refusal(refusal({{"model_type", "kimi_k3"}, {"text_config", linear}}), "attn_res_block_size", "is absent");
  check_refusal(refusal(linear, scores), "attn_res_block_size", "is absent");
  check_refusal(refusal(linear, latent), "routed_expert_hidden_size", "is absent");
  linear["routed_expert_hidden_size"] = nullptr;
  check_refusal(refusal(linear, latent), "routed_expert_hidden_size", "is null, expected the width");
  Json null_latent = four_layers();
  null_latent["text_config"]["routed_expert_hidden_size"] = nullptr;
  null_latent["text_config"]["latent_moe_use_norm"] = false;
  check_refusal(refusal(null_latent, both), "routed_expert_hidden_size", "is null, expected the width");
  // Kimi-Linear with a key of Kimi K3.
  for (const char* key :
       {"attn_res_block_size", "routed_expert_hidden_size", "activation_situ_beta", "activation_situ_linear_beta"}) {
    CAPTURE(key);
    Json config = kimi_linear_config();
    config[key] = 8;
    check_refusal(refusal(config), key, "is 8, expected null or nothing in a Kimi-Linear config");
    config[key] = nullptr;
    CHECK_NOTHROW(config_from_json(config, file));
  }
  for (const Json& act : {Json("gelu"), Json("SiTU"), Json(""), Json("silu "), Json("relu")}) {
    Json config = kimi_linear_config();
    config["hidden_act"] = act;
    check_refusal(refusal(config), "hidden_act",
                  "is " + act.dump() + ", expected silu (Kimi-Linear) or situ (Kimi K3)");
    check_text_refused("hidden_act", act, "is " + act.dump() + ", expected si");
  }
  Json other = kimi_linear_config();
  other["model_type"] = "llama";
  check_refusal(refusal(other), "model_type", "is \"llama\", expected kimi_k3 or kimi_linear");
}

TEST_CASE("config: tied embeddings", "[config]") {
  Json config = four_layers();
  config["tie_word_embeddings"] = true;
  config["text_config"].erase("tie_word_embeddings");
  CHECK(config_from_json(config, file).tie_word_embeddings);
  config["text_config"]["tie_word_embeddings"] = true;
  CHECK(config_from_json(config, file).tie_word_embeddings);
  config["text_config"]["tie_word_embeddings"] = false;
  check_refusal(refusal(config), "tie_word_embeddings", "is true, expected false, as in text_config");
  config.erase("tie_word_embeddings");
  CHECK_FALSE(config_from_json(config, file).tie_word_embeddings);
}

TEST_CASE("config: the end tokens are the union of all places", "[config]") {
  const auto stops = [](const Json& outer, const Json& text, const Json& generation, int vocab = 100) {
    const test::ScratchFolder folder;
    Json config = four_layers();
    config["text_config"]["vocab_size"] = vocab;
    config["eos_token_id"] = outer;
    config["text_config"]["eos_token_id"] = text;
    test::write_file(folder / "config.json", config.dump());
    if (!generation.is_null())
      test::write_file(folder / "generation_config.json", Json{{"eos_token_id", generation}}.dump());
    return read_config(folder.path).eos_token_ids;
  };
  CHECK(stops(5, {6, 7}, 8) == std::vector<id>{5, 6, 7, 8});
  CHECK(stops({7, 5, 7}, 7, {5, 0, 99}) == std::vector<id>{0, 5, 7, 99});
  CHECK(stops(nullptr, nullptr, nullptr).empty());
  CHECK(stops(nullptr, nullptr, 3) == std::vector<id>{3});
  CHECK(stops(Json::array(), nullptr, Json::array()).empty());
  CHECK(stops(2, 2, 2, 163840) == std::vector<id>{163585});
  CHECK(stops({2, 163586}, nullptr, 2, 163840) == std::vector<id>{163585, 163586});
  CHECK(stops(2, nullptr, nullptr, 163839) == std::vector<id>{2});  // only that vocabulary has the leftover

  const auto refused = [&](const Json& value, const std::string& part) {
    for (int place = 0; place < 3; ++place) {
      CAPTURE(value.dump(), place);
      const auto problem = thrown<format_error>(
          [&] { stops(place == 0 ? value : Json(), place == 1 ? value : Json(), place == 2 ? value : Json()); });
      check_refusal(problem, "eos_token_id", part);
      CHECK(contains(problem.path(), place == 2 ? "/generation_config.json" : "/config.json"));
      CHECK(problem.path().ends_with("text_config") == (place == 1));
    }
  };
  refused(100, "is 100, expected ids below vocab_size, 100");
  refused({1, 163586}, "expected ids below vocab_size, 100");
  for (const Json& value :
       {Json(-1), Json("5"), Json(5.0), Json({5, -1}), Json({5, "x"}), Json(1e300), Json(true), Json({{"a", 5}}),
        Json(18446744073709551615ull), Json({5, nullptr}), Json(Json::array({Json::array({5})}))})
    refused(value, "expected a token id or a list of them");
}

TEST_CASE("config: the checkpoints of the tests", "[config]") {
  const auto whole = [](const std::string& folder) { return read_config(folder); };
  const K3Config five = whole(test::data_path("k3-tiny-5l"));
  CHECK(five.mixers == std::vector<MixerKind>{kda, kda, kda, mla, mla});
  CHECK(five.eos_token_ids == std::vector<id>{91});
  CHECK(five.moe == LatentMoeConfig{64, 32, 32, 8, 2, 2, {}, true, true, 1.0f});
  CHECK(five.kda == KdaConfig{4, 16, 4, -5.0f, true});
  CHECK(five.mla == MlaConfig{4, 16, 8, 16, 32, 32, true, true, 1e-6f});
  CHECK(whole(test::data_path("k3-tiny-13l")).mixers.size() == 13);
  const K3Config linear = whole(test::data_path("kimi-linear-5l"));
  CHECK(linear.attn_res_block_size == 0);
  CHECK(linear.moe.activation == GluConfig::silu());
  CHECK(whole(test::austen_path()).eos_token_ids == std::vector<id>{1794});
}
