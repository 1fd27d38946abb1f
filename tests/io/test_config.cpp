// SPDX-License-Identifier: Apache-2.0
#include <k3/io/checkpoint.hpp>

#include <sys/stat.h>

#include <functional>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"
#include "support/data.hpp"

#include <k3/geometry/decoder_geometry.hpp>
#include <k3/geometry/presets.hpp>

using namespace k3;
using k3::test::contains;
using k3::test::thrown;
using Json = nlohmann::json;

namespace {

constexpr const char* file = "folder/config.json";

std::vector<int> every_fourth(int layers) {
  std::vector<int> result;
  for (int layer = 4; layer <= layers; layer += 4) result.push_back(layer);
  if (result.back() != layers) result.push_back(layers);
  return result;
}

Json layer_lists(int layers) {
  const std::vector<int> full = every_fourth(layers);
  std::vector<int> linear;
  for (int layer = 1; layer <= layers; ++layer)
    if (std::find(full.begin(), full.end(), layer) == full.end()) linear.push_back(layer);
  return {{"full_attn_layers", full}, {"kda_layers", linear}};
}

/// The released model's settings.
Json kimi_k3_config() {
  Json linear = layer_lists(93);
  linear.update({{"num_heads", 96},
                 {"head_dim", 128},
                 {"short_conv_kernel_size", 4},
                 {"use_full_rank_gate", true},
                 {"gate_lower_bound", -5.0}});
  const Json weights = {{"num_bits", 4},     {"group_size", 32},    {"type", "float"},
                        {"symmetric", true}, {"strategy", "group"}, {"scale_dtype", "torch.uint8"}};
  const Json quantization = {
      {"quant_method", "compressed-tensors"},
      {"format", "mxfp4-pack-quantized"},
      {"kv_cache_scheme", nullptr},
      {"ignore", {"re:.*self_attn.*", "re:.*lm_head.*"}},
      {"config_groups",
       {{"group_0", {{"format", "mxfp4-pack-quantized"}, {"input_activations", nullptr}, {"weights", weights}}}}}};
  return {{"architectures", {"KimiK3ForConditionalGeneration"}},
          {"model_type", "kimi_k3"},
          {"bos_token_id", 163584},
          {"eos_token_id", 163586},
          {"pad_token_id", 163839},
          {"tie_word_embeddings", false},
          {"vision_config", {{"patch_size", 14}}},
          {"text_config",
           {{"model_type", "kimi_linear"},
            {"vocab_size", 163840},
            {"hidden_size", 7168},
            {"num_hidden_layers", 93},
            {"num_attention_heads", 96},
            {"num_key_value_heads", 96},
            {"intermediate_size", 33792},
            {"first_k_dense_replace", 1},
            {"moe_layer_freq", 1},
            {"num_experts", 896},
            {"num_experts_per_token", 16},
            {"num_shared_experts", 2},
            {"moe_intermediate_size", 3072},
            {"routed_expert_hidden_size", 3584},
            {"latent_moe_use_norm", true},
            {"moe_renormalize", true},
            {"moe_router_activation_func", "sigmoid"},
            {"routed_scaling_factor", 1.0},
            {"topk_method", "noaux_tc"},
            {"use_grouped_topk", true},
            {"num_expert_group", 1},
            {"topk_group", 1},
            {"hidden_act", "situ"},
            {"activation_situ_beta", 4.0},
            {"activation_situ_linear_beta", 25.0},
            {"q_lora_rank", 1536},
            {"kv_lora_rank", 512},
            {"qk_nope_head_dim", 128},
            {"qk_rope_head_dim", 64},
            {"v_head_dim", 128},
            {"mla_use_nope", true},
            {"mla_use_output_gate", true},
            {"attn_res_block_size", 12},
            {"rms_norm_eps", 1e-5},
            {"rope_theta", 10000.0},
            {"rope_scaling", nullptr},
            {"max_position_embeddings", 1048576},
            {"num_nextn_predict_layers", 0},
            {"eos_token_id", 163586},
            {"tie_word_embeddings", false},
            {"dtype", "bfloat16"},
            {"linear_attn_config", linear},
            {"quantization_config", quantization}}}};
}

/// The 0.40B sibling: fewer keys, no lower bound, and the leftover end token 2.
Json twin_config() {
  Json config = kimi_k3_config();
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vision_config"})
    config.erase(key);
  Json& text = config["text_config"];
  for (const char* key : {"quantization_config", "routed_scaling_factor", "use_grouped_topk", "num_expert_group",
                          "topk_group", "rope_scaling", "max_position_embeddings", "num_nextn_predict_layers", "dtype"})
    text.erase(key);
  Json linear = layer_lists(8);
  linear.update({{"num_heads", 8}, {"head_dim", 32}, {"short_conv_kernel_size", 4}, {"use_full_rank_gate", true}});
  text.update({{"hidden_size", 1024},
               {"num_hidden_layers", 8},
               {"num_attention_heads", 8},
               {"num_key_value_heads", 8},
               {"intermediate_size", 2048},
               {"num_experts", 8},
               {"num_experts_per_token", 2},
               {"num_shared_experts", 1},
               {"moe_intermediate_size", 256},
               {"routed_expert_hidden_size", 512},
               {"q_lora_rank", 256},
               {"kv_lora_rank", 128},
               {"qk_nope_head_dim", 64},
               {"qk_rope_head_dim", 32},
               {"v_head_dim", 64},
               {"attn_res_block_size", 4},
               {"eos_token_id", 2},
               {"linear_attn_config", linear}});
  return config;
}

/// Kimi-Linear-48B-A3B: bare, silu, no residual scores, no latent space, no query rank, no gate.
Json kimi_linear_config() {
  Json text = kimi_k3_config()["text_config"];
  for (const char* key :
       {"quantization_config", "routed_expert_hidden_size", "latent_moe_use_norm", "activation_situ_beta",
        "activation_situ_linear_beta", "mla_use_output_gate", "attn_res_block_size", "topk_method"})
    text.erase(key);
  Json linear = layer_lists(27);
  linear.update({{"num_heads", 32}, {"head_dim", 128}, {"short_conv_kernel_size", 4}});
  text.update({{"hidden_act", "silu"},
               {"hidden_size", 2304},
               {"num_hidden_layers", 27},
               {"num_attention_heads", 32},
               {"num_key_value_heads", 32},
               {"head_dim", 72},
               {"intermediate_size", 9216},
               {"num_experts", 256},
               {"num_experts_per_token", 8},
               {"num_shared_experts", 1},
               {"moe_intermediate_size", 1024},
               {"q_lora_rank", nullptr},
               {"routed_scaling_factor", 2.446},
               {"linear_attn_config", linear}});
  return text;
}

/// A K3 of four layers, by the numbers of case 61.
Json four_layers() {
  Json config = twin_config();
  Json& text = config["text_config"];
  text["num_hidden_layers"] = 4;
  text["linear_attn_config"].update({{"kda_layers", {1, 2, 3}}, {"full_attn_layers", {4}}});
  text["vocab_size"] = 100;
  text["eos_token_id"] = 99;
  return config;
}

using Change = std::function<void(Json&)>;

/// The refusal of a config; its message names the file.
format_error refusal(const Json& config, const CheckpointHints& hints = {}) {
  CAPTURE(config.dump());
  const format_error problem = thrown<format_error>([&] { config_from_json(config, file, hints); });
  CHECK(problem.path().starts_with(file));
  return problem;
}

void check_refusal(const format_error& problem, const std::string& key, const std::string& part) {
  INFO(problem.what());
  CHECK(problem.tensor() == key);
  CHECK(contains(problem.what(), part));
}

/// Setting `key` to `value` in the text settings, wrapped or bare, must be refused by that key and with `part`.
void check_text_refused(const std::string& key, const Json& value, const std::string& part) {
  CAPTURE(key, value.dump());
  for (const bool wrapped : {true, false}) {
    Json config = four_layers();
    config["text_config"][key] = value;
    const format_error problem = refusal(wrapped ? config : config["text_config"]);
    check_refusal(problem, key, part);
    CHECK(problem.path() == (wrapped ? std::string(file) + ": text_config" : file));
  }
}

void check_linear_refused(const std::string& key, const Json& value, const std::string& part) {
  CAPTURE(key, value.dump());
  Json config = four_layers();
  config["text_config"]["linear_attn_config"][key] = value;
  check_refusal(refusal(config), key, part);
}

void check_key_needed(const std::string& key, const Json& base = four_layers()) {
  CAPTURE(key);
  Json config = base;
  Json& text = config.contains("text_config") ? config["text_config"] : config;
  REQUIRE(text.contains(key));
  text.erase(key);
  check_refusal(refusal(config), key, "is absent, expected");
}

std::vector<MixerKind> mixers_of(size layers, const Json& linear, const Json& full) {
  Json config = four_layers();
  config["text_config"]["num_hidden_layers"] = layers;
  config["text_config"]["linear_attn_config"].update({{"kda_layers", linear}, {"full_attn_layers", full}});
  return config_from_json(config, file).mixers;
}

format_error lists_refusal(size layers, const Json& linear, const Json& full) {
  CAPTURE(layers, linear.dump(), full.dump());
  return thrown<format_error>([&] { mixers_of(layers, linear, full); });
}

constexpr MixerKind kda = MixerKind::Kda, mla = MixerKind::Mla;

}  // namespace

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

TEST_CASE("config: the layer lists (case 61)", "[config]") {
  const std::vector<MixerKind> expected = {kda, kda, kda, mla};
  CHECK(mixers_of(4, {1, 2, 3}, Json::array({4})) == expected);
  CHECK(mixers_of(4, {0, 1, 2}, Json::array({3})) == expected);
  CHECK(mixers_of(4, {2, 3, 1}, Json::array({4})) == expected);
  // Neither list alone tells the base: the largest entry of kda_layers is below the count in both forms.
  CHECK(mixers_of(4, {1, 2}, {3, 4}) == std::vector<MixerKind>{kda, kda, mla, mla});
  CHECK(mixers_of(4, {0, 1}, {2, 3}) == std::vector<MixerKind>{kda, kda, mla, mla});

  check_refusal(lists_refusal(4, {1, 2, 3}, {3, 4}), "full_attn_layers", "layer 3 comes again");
  check_refusal(lists_refusal(4, {1, 2, 2, 3}, Json::array({4})), "kda_layers", "layer 2 comes again");
  check_refusal(lists_refusal(4, {1, 3}, Json::array({4})), "full_attn_layers", "layer 2 in it or in kda_layers");
  check_refusal(lists_refusal(4, {0, 1}, Json::array({3})), "full_attn_layers", "layer 2 in it or in kda_layers");
  check_refusal(lists_refusal(4, {0, 1, 2, 3}, Json::array({4})), "kda_layers", "layers from 1 to 4, not 0");
  check_refusal(lists_refusal(4, {1, 2, 3}, Json::array({5})), "full_attn_layers", "layers from 1 to 4, not 5");
  check_refusal(lists_refusal(4, {1, 2, 3, 5}, Json::array({4})), "kda_layers", "layers from 1 to 4, not 5");
  check_refusal(lists_refusal(4, {1, 2}, Json::array({3})), "full_attn_layers", "layer 0 in it or in kda_layers");
  check_refusal(lists_refusal(4, Json::array(), {1, 2, 3, 4}), "kda_layers", "a list of layers that is not empty");
  check_refusal(lists_refusal(4, {1, 2, 3, 4}, Json::array()), "full_attn_layers",
                "a list of layers that is not empty");
  check_refusal(lists_refusal(4, {1, 2, 4}, Json::array({3})), "full_attn_layers", "the last layer in it");
  check_refusal(lists_refusal(4, {1, 2, -3}, Json::array({4})), "kda_layers", "whole numbers that are not negative");
  check_refusal(lists_refusal(4, {1, 2, 3.0}, Json::array({4})), "kda_layers", "whole numbers");
  check_refusal(lists_refusal(4, {1, 2, 1e300}, Json::array({4})), "kda_layers", "whole numbers");
  check_refusal(lists_refusal(4, {1, 2, "3"}, Json::array({4})), "kda_layers", "whole numbers");
  check_refusal(lists_refusal(4, {1, 2, nullptr}, Json::array({4})), "kda_layers", "whole numbers");
  check_refusal(lists_refusal(4, {1, 2, 18446744073709551615ull}, Json::array({4})), "kda_layers",
                "layers from 1 to 4, not 18446744073709551615");
  check_refusal(lists_refusal(4, 3, Json::array({4})), "kda_layers", "is 3, expected a list");
  check_refusal(lists_refusal(4, {{"a", 1}}, Json::array({4})), "kda_layers", "expected a list");
  check_refusal(lists_refusal(4, nullptr, Json::array({4})), "kda_layers", "is null, expected a list");
  check_refusal(lists_refusal(3, {1, 2, 3}, Json::array({4})), "full_attn_layers", "layers from 1 to 3, not 4");
}

TEST_CASE("config: what is not supported is refused by key and value", "[config]") {
  check_text_refused("num_expert_group", 2, "is 2, expected 1: expert groups are not supported");
  check_text_refused("n_group", 8, "is 8, expected 1");
  check_text_refused("topk_group", 4, "is 4, expected 1");
  check_text_refused("moe_layer_freq", 2, "is 2, expected 1");
  check_text_refused("num_nextn_predict_layers", 1, "is 1, expected 0");
  check_text_refused("moe_router_activation_func", "softmax", "is \"softmax\", expected sigmoid");
  check_text_refused("scoring_func", "softmax", "is \"softmax\", expected sigmoid");
  check_text_refused("topk_method", "greedy", "is \"greedy\", expected noaux_tc");
  check_text_refused("rope_scaling", {{"type", "yarn"}, {"factor", 4}},
                     "is {\"factor\":4,\"type\":\"yarn\"}, expected null");
  check_text_refused("mla_use_nope", false, "is false, expected true");
  for (const char* key : {"attention_bias", "mlp_bias", "use_bias"})
    check_text_refused(key, true, "is true, expected false");
  for (const char* key : {"final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "embedding_scale"})
    check_text_refused(key, 30.0, "is 30.0, expected null or nothing");
  check_text_refused("num_key_value_heads", 2, "is 2, expected num_attention_heads, 8");
  check_linear_refused("gate_lower_bound", 0.5, "is 0.5, expected a negative number");
  // Neutral values pass.
  Json config = four_layers();
  config["text_config"].update({{"num_expert_group", 1},
                                {"n_group", 1},
                                {"topk_group", 1},
                                {"rope_scaling", nullptr},
                                {"attention_bias", false},
                                {"num_nextn_predict_layers", 0},
                                {"scoring_func", "sigmoid"},
                                {"logit_scale", nullptr},
                                {"num_key_value_heads", nullptr},
                                {"something_new", 5}});
  CHECK_NOTHROW(config_from_json(config, file));
}

TEST_CASE("config: the quantisation", "[config]") {
  const auto refused = [](const char* where, const char* key, const Json& value, const std::string& part) {
    for (const bool outer : {false, true}) {
      CAPTURE(where, key, value.dump(), outer);
      Json config = kimi_k3_config();
      Json quantization = config["text_config"]["quantization_config"];
      quantization[Json::json_pointer(where)][key] = value;
      if (outer) config["text_config"].erase("quantization_config");
      (outer ? config : config["text_config"])["quantization_config"] = quantization;
      check_refusal(refusal(config), key, part);
    }
  };
  const char* const group = "/config_groups/group_0";
  const char* const weights = "/config_groups/group_0/weights";
  refused("", "quant_method", "gptq", "is \"gptq\", expected compressed-tensors");
  refused("", "format", "nvfp4-pack-quantized", "is \"nvfp4-pack-quantized\", expected mxfp4-pack-quantized");
  refused("", "kv_cache_scheme", {{"num_bits", 8}}, "is {\"num_bits\":8}, expected null");
  refused("", "config_groups", 3, "is 3, expected an object");
  refused("/config_groups", "group_0", nullptr, "is null, expected a value");
  refused("/config_groups", "group_0", 7, "is 7, expected an object");
  refused(group, "format", "pack-quantized", "is \"pack-quantized\", expected mxfp4");
  refused(group, "input_activations", {{"num_bits", 8}}, "expected null");
  refused(group, "output_activations", {{"num_bits", 8}}, "expected null");
  refused(group, "weights", "x", "is \"x\", expected an object");
  refused(weights, "num_bits", 8, "is 8, expected 4");
  refused(weights, "group_size", 16, "is 16, expected 32");
  refused(weights, "type", "int", "is \"int\", expected float");
  refused(weights, "strategy", "channel", "is \"channel\", expected group");
  refused(weights, "symmetric", false, "is false, expected true");
  refused("", "format", 4, "is 4, expected a string");
  check_text_refused("quantization_config", "mxfp4", "is \"mxfp4\", expected an object");
  Json config = kimi_k3_config();
  config["text_config"]["quantization_config"] = {{"quant_method", "compressed-tensors"}};
  CHECK_NOTHROW(config_from_json(config, file));
}

TEST_CASE("config: numbers that cannot be (case 59)", "[config]") {
  check_text_refused("num_hidden_layers", 0, "is 0, expected at least 1");
  check_text_refused("num_hidden_layers", -1, "is -1, expected a number that is not negative");
  check_text_refused("num_hidden_layers", 1000000, "is 1000000, expected at most 10000");
  check_linear_refused("head_dim", 0, "is 0, expected at least 1");
  check_text_refused("num_experts", 0, "is 0, expected at least 1");
  check_text_refused("num_experts_per_token", 9, "is 9, expected at most num_experts, 8");
  check_text_refused("num_experts_per_token", 0, "is 0, expected at least 1");
  check_text_refused("attn_res_block_size", 0, "is 0, expected at least 1");
  check_text_refused("first_k_dense_replace", 5, "is 5, expected at most num_hidden_layers, 4");
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_experts",
        "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "v_head_dim", "attn_res_block_size", "max_position_embeddings"}) {
    check_text_refused(key, 0, "is 0, expected at least 1");
    check_text_refused(key, -1, "is -1, expected a number that is not negative");
    check_text_refused(key, std::int64_t{-9223372036854775807}, "expected a number that is not negative");
    check_text_refused(key, 1.5, "is 1.5, expected a whole number");
    check_text_refused(key, 4.0, "is 4.0, expected a whole number");
    check_text_refused(key, 1e300, "is 1e+300, expected a whole number");
    check_text_refused(key, "4", "is \"4\", expected a whole number");
    check_text_refused(key, true, "is true, expected a whole number");
    check_text_refused(key, Json::array({4}), "is [4], expected a whole number");
    check_text_refused(key, std::uint64_t{1} << 31, "is 2147483648, expected a number below 2^31");
    check_text_refused(key, ~std::uint64_t{0}, "expected a number below 2^31");
  }
  for (const char* key : {"qk_rope_head_dim", "first_k_dense_replace", "num_shared_experts", "moe_layer_freq"}) {
    check_text_refused(key, -1, "is -1, expected a number that is not negative");
    check_text_refused(key, "1", "is \"1\", expected a whole number");
    check_text_refused(key, 0.5, "is 0.5, expected a whole number");
  }
  for (const char* key : {"num_heads", "head_dim", "short_conv_kernel_size"}) {
    check_linear_refused(key, 0, "is 0, expected at least 1");
    check_linear_refused(key, -4, "is -4, expected a number that is not negative");
    check_linear_refused(key, "4", "expected a whole number");
    check_linear_refused(key, nullptr, "is null, expected a whole number");
  }
  for (const char* key :
       {"rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor"}) {
    check_text_refused(key, "4.0", "is \"4.0\", expected a number");
    check_text_refused(key, 1e300, "is 1e+300, expected a number of at most 1e30");
    check_text_refused(key, true, "is true, expected a number");
    check_text_refused(key, 0.0, "is 0.0, expected ");
    check_text_refused(key, 1e-300, "is 1e-300, expected ");  // zero as a float
    check_text_refused(key, -1.0, "is -1.0, expected ");
  }
  check_text_refused("rms_norm_eps", 1.0, "expected between 0 and 1");
  check_text_refused("rms_norm_eps", nullptr, "is null, expected a number");
  check_text_refused("activation_situ_beta", nullptr, "is null, expected a number");
  for (const char* key : {"mla_use_nope", "mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize",
                          "attention_bias", "tie_word_embeddings"})
    check_text_refused(key, 1, "is 1, expected true or false");
  check_linear_refused("use_full_rank_gate", "true", "is \"true\", expected true or false");
  check_text_refused("linear_attn_config", Json::array({1}), "is [1], expected an object");
  check_text_refused("linear_attn_config", "none", "is \"none\", expected an object");
  check_text_refused("model_type", 5, "is 5, expected a string");
}

TEST_CASE("config: sizes whose products pass 64 bits", "[config]") {
  Json config = four_layers();
  const int most = 2147483647;
  config["text_config"]["linear_attn_config"].update({{"num_heads", most}, {"head_dim", most}});
  const format_error problem = refusal(config);
  CHECK(contains(problem.what(), "too large, expected a product below 2^64"));
  config = four_layers();
  config["text_config"].update({{"num_attention_heads", most},
                                {"num_key_value_heads", most},
                                {"qk_nope_head_dim", most},
                                {"qk_rope_head_dim", most},
                                {"v_head_dim", most},
                                {"kv_lora_rank", most}});
  CHECK(contains(refusal(config).what(), "a product below 2^64"));
  config = four_layers();
  config["text_config"].update({{"num_experts", most}, {"hidden_size", most}, {"moe_intermediate_size", most}});
  CHECK(contains(refusal(config).what(), "a product below 2^64"));
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

TEST_CASE("config: files that are no config", "[config]") {
  const test::ScratchFolder folder;
  const auto refused = [&](const std::string& content, const std::string& part) {
    for (const char* name : {"config.json", "generation_config.json"}) {
      CAPTURE(name, content.substr(0, 200));
      test::write_file(folder / "config.json", four_layers().dump());
      test::write_file(folder / name, content);
      const auto problem = thrown<format_error>([&] { read_config(folder.path); });
      INFO(problem.what());
      CHECK(problem.path() == folder / name);
      CHECK(contains(problem.what(), part));
      CHECK(std::string(problem.what()).size() < 1000);
      std::filesystem::remove(folder / "generation_config.json");
    }
  };
  refused("", "is empty");
  refused("   ", "is not valid JSON");
  refused("{", "is not valid JSON");
  refused("{}x", "is not valid JSON");
  refused("{\"a\":\"\xff\"}", "is not valid JSON");
  refused("{\"a\":1e999}", "is not valid JSON");
  refused("{\"a\":NaN}", "is not valid JSON");
  refused(std::string("{\0}", 3), "is not valid JSON");
  refused("[]", "is [], expected an object of settings");
  refused("null", "is null, expected an object of settings");
  refused("7", "is 7, expected an object of settings");
  refused("[\"" + std::string(300, '7') + "\"]", "..., expected an object of settings");
  refused("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}", "nested more than 64 levels deep");
  refused(std::string(10000000, '['), "nested more than 64 levels deep");
  std::string objects;
  for (int level = 0; level < 1000; ++level) objects += "{\"a\":";
  refused(objects, "nested more than 64 levels deep");
  refused(std::string(20000000, ' '), "has 20000000 bytes, more than the limit of 16777216");
  refused("{\"hidden_size\":1,\"x\":{},\"hidden_size\":1}", "hidden_size: comes twice in the same object");
  refused("{\"a\":[{\"b\":{\"c\":1,\"c\":2}}]}", "c: comes twice in the same object");
  refused("{\"a\":{\"b\":1},\"c\":{\"b\":1},\"\\u0061\":2}", "a: comes twice in the same object");
  const auto position = thrown<format_error>([&] {
    test::write_file(folder / "x", "{\"a\":#}");
    read_json_file(folder / "x");
  });
  CHECK(position.offset() == 5);
}

TEST_CASE("config: the same key in different objects is no repetition", "[config]") {
  const test::ScratchFolder folder;
  test::write_file(folder / "x", R"({"a":{"a":[{"a":1},{"a":2}],"b":{}},"b":{"a":3}})");
  CHECK(read_json_file(folder / "x")["a"]["a"][1]["a"] == 2);
}

TEST_CASE("config: no file, and what is no file", "[config]") {
  const test::ScratchFolder folder;
  CHECK(contains(thrown<format_error>([&] { read_config(folder.path); }).what(), "/config.json: cannot be opened"));
  std::filesystem::create_directory(folder / "config.json");
  CHECK(contains(thrown<format_error>([&] { read_config(folder.path); }).what(), "config.json: is not a regular file"));
  std::filesystem::remove(folder / "config.json");
  REQUIRE(::mkfifo((folder / "config.json").c_str(), 0600) == 0);
  CHECK(contains(thrown<format_error>([&] { read_config(folder.path); }).what(), "config.json: is not a regular file"));
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
