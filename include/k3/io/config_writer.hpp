// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <k3/geometry/presets.hpp>
#include <k3/io/checkpoint_layout.hpp>

namespace k3 {

namespace detail {

/// A float as JSON shows it: 1e-05 and 2.446, not their nearest doubles' 17 digits.
inline double json_number(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
  for (int digits = 1; digits < 9; ++digits) {
    char shorter[32];
    std::snprintf(shorter, sizeof shorter, "%.*g", digits, static_cast<double>(value));
    if (std::strtof(shorter, nullptr) == value) return std::strtod(shorter, nullptr);
  }
  return std::strtod(text, nullptr);
}

inline nlohmann::ordered_json linear_attn_to_json(const K3Config& config) {
  nlohmann::ordered_json linear = {{"full_attn_layers", nlohmann::json::array()}};
  nlohmann::ordered_json kda_layers = nlohmann::json::array();
  for (size layer = 0; layer < config.mixers.size(); ++layer)
    (config.mixers[layer] == MixerKind::Mla ? linear["full_attn_layers"] : kda_layers).push_back(layer + 1);
  if (config.kda.gate_lower_bound) linear["gate_lower_bound"] = json_number(*config.kda.gate_lower_bound);
  linear["head_dim"] = config.kda.head_dim;
  linear["kda_layers"] = std::move(kda_layers);
  linear["num_heads"] = config.kda.heads;
  linear["short_conv_kernel_size"] = config.kda.conv_kernel;
  if (config.kda.use_full_rank_gate) linear["use_full_rank_gate"] = true;
  return linear;
}

inline nlohmann::ordered_json quantization_to_json() {
  const nlohmann::ordered_json weights = {{"num_bits", 4},     {"group_size", mxfp4_group},
                                          {"type", "float"},   {"strategy", "group"},
                                          {"symmetric", true}, {"scale_dtype", "torch.uint8"}};
  const nlohmann::ordered_json group = {{"format", "mxfp4-pack-quantized"},
                                        {"input_activations", nullptr},
                                        {"output_activations", nullptr},
                                        {"targets", {"Linear"}},
                                        {"weights", weights}};
  return {{"config_groups", {{"group_0", group}}},
          {"format", "mxfp4-pack-quantized"},
          {"ignore",
           {"re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
            "re:.*vision_tower.*", "re:.*mm_projector.*"}},
          {"kv_cache_scheme", nullptr},
          {"quant_method", "compressed-tensors"}};
}

inline nlohmann::ordered_json text_to_json(const K3Config& config, const CheckpointForm& form) {
  const bool situ = config.moe.activation.kind == GluConfig::Kind::situ;
  nlohmann::ordered_json text = {{"architectures", {"KimiLinearForCausalLM"}}, {"dtype", "bfloat16"}};
  if (situ) {
    text["activation_situ_beta"] = json_number(config.moe.activation.beta);
    text["activation_situ_linear_beta"] = nullptr;
    if (config.moe.activation.linear_beta)
      text["activation_situ_linear_beta"] = json_number(*config.moe.activation.linear_beta);
  }
  if (config.attn_res_block_size > 0) text["attn_res_block_size"] = config.attn_res_block_size;
  if (!config.eos_token_ids.empty()) text["eos_token_id"] = config.eos_token_ids[0];
  text["first_k_dense_replace"] = config.first_k_dense_replace;
  text["hidden_act"] = situ ? "situ" : "silu";
  text["hidden_size"] = config.hidden_size;
  text["intermediate_size"] = config.intermediate_size;
  text["kv_lora_rank"] = config.mla.kv_lora_rank;
  if (config.moe.latent > 0) text["latent_moe_use_norm"] = config.moe.use_norm;
  text["linear_attn_config"] = linear_attn_to_json(config);
  text["max_position_embeddings"] = config.max_position_embeddings;
  text["mla_use_nope"] = true;
  if (config.mla.mla_use_output_gate) text["mla_use_output_gate"] = true;
  text["model_type"] = "kimi_linear";
  text["moe_intermediate_size"] = config.moe.expert_hidden;
  text["moe_layer_freq"] = 1;
  text["moe_renormalize"] = config.moe.renormalize;
  text["moe_router_activation_func"] = "sigmoid";
  text["num_attention_heads"] = config.mla.heads;
  text["num_expert_group"] = 1;
  text["num_experts"] = config.moe.n_routed;
  text["num_experts_per_token"] = config.moe.top_k;
  text["num_hidden_layers"] = config.mixers.size();
  text["num_key_value_heads"] = config.mla.heads;
  text["num_nextn_predict_layers"] = 0;
  text["num_shared_experts"] = config.moe.n_shared;
  text["q_lora_rank"] = nullptr;
  if (config.mla.q_lora_rank > 0) text["q_lora_rank"] = config.mla.q_lora_rank;
  text["qk_nope_head_dim"] = config.mla.qk_nope_head_dim;
  text["qk_rope_head_dim"] = config.mla.qk_rope_head_dim;
  if (form.mxfp4) text["quantization_config"] = quantization_to_json();
  text["rms_norm_eps"] = json_number(config.rms_norm_eps);
  if (config.moe.latent > 0) text["routed_expert_hidden_size"] = config.moe.latent;
  text["routed_scaling_factor"] = json_number(config.moe.routed_scaling_factor);
  text["tie_word_embeddings"] = config.tie_word_embeddings;
  text["topk_group"] = 1;
  text["topk_method"] = "noaux_tc";
  text["use_grouped_topk"] = true;
  text["v_head_dim"] = config.mla.v_head_dim;
  text["vocab_size"] = config.vocab_size;
  return text;
}

}  // namespace detail

/// The config.json of a model, as config_from_json reads it back: with `form.wrapped` in the wrapper of the released
/// Kimi K3, otherwise bare as in Kimi-Linear.
inline nlohmann::ordered_json config_to_json(const K3Config& config, const CheckpointForm& form) {
  nlohmann::ordered_json text = detail::text_to_json(config, form);
  if (!form.wrapped) return text;
  nlohmann::ordered_json outer = {{"architectures", {"KimiK3ForConditionalGeneration"}}, {"dtype", "bfloat16"}};
  if (!config.eos_token_ids.empty()) outer["eos_token_id"] = config.eos_token_ids[0];
  outer["model_type"] = "kimi_k3";
  outer["text_config"] = std::move(text);
  outer["tie_word_embeddings"] = config.tie_word_embeddings;
  return outer;
}

/// A member of the family: its config, and the form in which it is released.
struct FamilyMember {
  K3Config config;
  CheckpointForm form;
};

namespace detail {

/// The family's layer map: MLA in every fourth layer and in the last, KDA elsewhere.
inline std::vector<MixerKind> family_mixers(size layers) {
  std::vector<MixerKind> mixers(layers);
  for (size layer = 0; layer < layers; ++layer)
    mixers[layer] = layer % 4 == 3 || layer + 1 == layers ? MixerKind::Mla : MixerKind::Kda;
  return mixers;
}

template <decoder_geometry G>
K3Config family_config(G g, size layers, size positions) {
  K3Config config;
  config.hidden_size = g.hidden;
  config.vocab_size = g.vocab;
  config.intermediate_size = g.dense_intermediate;
  config.first_k_dense_replace = 1;
  config.attn_res_block_size = g.attn_res_block_size;
  config.max_position_embeddings = positions;
  config.rms_norm_eps = g.rms_norm_eps;
  config.mixers = family_mixers(layers);
  config.kda = kda_config(g.kda);
  config.mla = mla_config(g.mla);
  config.moe = latent_moe_config(g.moe);
  return config;
}

}  // namespace detail

/// A member of the family by its name: kimi-k3, kimi-k3-0.40b, kimi-k3-0.40b-mxfp4, kimi-k3-tiny-random (the released
/// head sizes on a hidden size of 8), kimi-linear-48b, tiny. Throws invalid_argument for another name.
inline FamilyMember family_member(const std::string& name) {
  using namespace detail;
  if (name == "kimi-k3") return {family_config(kimi_k3::Decoder{}, 93, 1048576), {true, true, 128}};
  if (name == "kimi-k3-0.40b") return {family_config(kimi_k3_0_4b::Decoder{}, 8, 4096), {true, false, 0}};
  if (name == "kimi-k3-0.40b-mxfp4") return {family_config(kimi_k3_0_4b::Decoder{}, 8, 4096), {true, true, 0}};
  if (name == "kimi-linear-48b") return {family_config(kimi_linear_48b::Decoder{}, 27, 1048576), {false, false, 0}};
  FamilyMember member{family_config(tiny::Decoder{}, 4, 4096), {true, true, 4}};
  K3Config& config = member.config;
  config.vocab_size = 1024;
  if (name == "tiny") return member;
  require(name == "kimi-k3-tiny-random", "family_member", "name", printable(name),
          "kimi-k3, kimi-k3-0.40b, kimi-k3-0.40b-mxfp4, kimi-k3-tiny-random, kimi-linear-48b or tiny");
  config.vocab_size = 163840;
  config.mixers = family_mixers(17);
  config.attn_res_block_size = 8;
  config.intermediate_size = 32;
  config.max_position_embeddings = 1048576;
  config.kda = {8, 128, 4, -5.0f, true};
  config.mla = {8, 128, 64, 128, 256, 512, true, true, 1e-6f};
  config.moe = {8, 32, 32, 64, 16, 2, {}, true, true, 1.0f};
  member.form.a_log_length = 128;
  return member;
}

}  // namespace k3
