// SPDX-License-Identifier: Apache-2.0
#pragma once
// Settings of the family's members, and how a refused one is checked.

#include <functional>

#include <k3/geometry/decoder_geometry.hpp>
#include <k3/geometry/presets.hpp>
#include <k3/io/checkpoint.hpp>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"
#include "support/data.hpp"

namespace k3::test {

using Json = nlohmann::json;

inline constexpr const char* file = "folder/config.json";

inline std::vector<int> every_fourth(int layers) {
  std::vector<int> result;
  for (int layer = 4; layer <= layers; layer += 4) result.push_back(layer);
  if (result.back() != layers) result.push_back(layers);
  return result;
}

inline Json layer_lists(int layers) {
  const std::vector<int> full = every_fourth(layers);
  std::vector<int> linear;
  for (int layer = 1; layer <= layers; ++layer)
    if (std::find(full.begin(), full.end(), layer) == full.end()) linear.push_back(layer);
  return {{"full_attn_layers", full}, {"kda_layers", linear}};
}

/// The released model's settings.
inline Json kimi_k3_config() {
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
inline Json twin_config() {
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
inline Json kimi_linear_config() {
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
inline Json four_layers() {
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
inline format_error refusal(const Json& config, const CheckpointHints& hints = {}) {
  CAPTURE(config.dump());
  const format_error problem = thrown<format_error>([&] { config_from_json(config, file, hints); });
  CHECK(problem.path().starts_with(file));
  return problem;
}

inline void check_refusal(const format_error& problem, const std::string& key, const std::string& part) {
  INFO(problem.what());
  CHECK(problem.tensor() == key);
  CHECK(contains(problem.what(), part));
}

/// Setting `key` to `value` in the text settings, wrapped or bare, must be refused by that key and with `part`.
inline void check_text_refused(const std::string& key, const Json& value, const std::string& part) {
  CAPTURE(key, value.dump());
  for (const bool wrapped : {true, false}) {
    Json config = four_layers();
    config["text_config"][key] = value;
    const format_error problem = refusal(wrapped ? config : config["text_config"]);
    check_refusal(problem, key, part);
    CHECK(problem.path() == (wrapped ? std::string(file) + ": text_config" : file));
  }
}

inline void check_linear_refused(const std::string& key, const Json& value, const std::string& part) {
  CAPTURE(key, value.dump());
  Json config = four_layers();
  config["text_config"]["linear_attn_config"][key] = value;
  check_refusal(refusal(config), key, part);
}

inline void check_key_needed(const std::string& key, const Json& base = four_layers()) {
  CAPTURE(key);
  Json config = base;
  Json& text = config.contains("text_config") ? config["text_config"] : config;
  REQUIRE(text.contains(key));
  text.erase(key);
  check_refusal(refusal(config), key, "is absent, expected");
}

inline std::vector<MixerKind> mixers_of(size layers, const Json& linear, const Json& full) {
  Json config = four_layers();
  config["text_config"]["num_hidden_layers"] = layers;
  config["text_config"]["linear_attn_config"].update({{"kda_layers", linear}, {"full_attn_layers", full}});
  return config_from_json(config, file).mixers;
}

inline format_error lists_refusal(size layers, const Json& linear, const Json& full) {
  CAPTURE(layers, linear.dump(), full.dump());
  return thrown<format_error>([&] { mixers_of(layers, linear, full); });
}

inline constexpr MixerKind kda = MixerKind::Kda, mla = MixerKind::Mla;

}  // namespace k3::test
