// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include <k3/core/mxfp4.hpp>
#include <k3/geometry/k3_config.hpp>
#include <k3/io/config_reader.hpp>

namespace k3 {

/// What a checkpoint's tensor names say about its family; it settles what `config.json` may leave out.
struct CheckpointHints {
  bool has_residual_scores = false;     ///< any `*_res_proj` tensor
  bool has_latent_projections = false;  ///< any `routed_expert_down_proj` tensor
  bool has_packed_experts = false;      ///< any `weight_packed` tensor
};

namespace detail {

/// The mixer of each layer from `kda_layers` and `full_attn_layers`. They count from 1 exactly where the largest entry
/// of both together is the number of layers; one list alone cannot tell (its own largest may be smaller).
inline std::vector<MixerKind> mixers_from(const ConfigReader& linear, size layers) {
  const char* const keys[2] = {"kda_layers", "full_attn_layers"};
  const MixerKind kinds[2] = {MixerKind::Kda, MixerKind::Mla};
  std::vector<size> lists[2];
  size largest = 0;
  for (int which = 0; which < 2; ++which) {
    if (!linear.has(keys[which]) || !linear.at(keys[which]).is_array() || linear.at(keys[which]).empty())
      linear.refuse(keys[which], "a list of layers that is not empty");
    for (const nlohmann::json& item : linear.at(keys[which])) {
      if (!is_whole(item)) linear.refuse(keys[which], "whole numbers that are not negative");
      lists[which].push_back(item.get<std::uint64_t>());
      largest = larger(largest, lists[which].back());
    }
  }
  const size first = largest >= layers ? 1 : 0;
  std::vector<MixerKind> mixers(layers);
  std::vector<bool> seen(layers);
  for (int which = 0; which < 2; ++which) {
    for (const size entry : lists[which]) {
      if (entry < first || entry - first >= layers)
        linear.refuse(keys[which], "layers from " + std::to_string(first) + " to " +
                                       std::to_string(layers - 1 + first) + ", not " + std::to_string(entry));
      if (seen[entry - first])
        linear.refuse(keys[which],
                      "every layer once in one of the lists, but layer " + std::to_string(entry) + " comes again");
      seen[entry - first] = true;
      mixers[entry - first] = kinds[which];
    }
  }
  for (size layer = 0; layer < layers; ++layer)
    if (!seen[layer])
      linear.refuse(keys[1], "layer " + std::to_string(layer + first) + " in it or in kda_layers, counted from " +
                                 std::to_string(first));
  if (mixers.back() != MixerKind::Mla) linear.refuse(keys[1], "the last layer in it");
  return mixers;
}

/// Refuses keys by the form of their names: biases, multipliers, clipping, another activation. They are what a relative
/// of this family would add, and each changes the mathematics.
inline void refuse_families(const ConfigReader& settings, const std::string& activation) {
  for (const auto& item : settings.object().items()) {
    const std::string& key = item.key();
    const nlohmann::json& value = item.value();
    if (value.is_null() || value.is_structured()) continue;
    const bool off = value == false || value == 0, one = value.is_number() && value == 1;
    const auto only = [&](bool good, const std::string& expected) {
      if (!good) settings.refuse(key, expected);
      settings.contains(key.c_str());  // read
    };
    if (key.ends_with("_bias") && !key.ends_with("correction_bias") && !key.ends_with("expert_bias"))
      off ? only(true, "") : settings.only_flag(key.c_str(), false, ": linears have no bias");
    if (key.ends_with("_multiplier") || key.ends_with("_scaling")) only(one, "1 or nothing");
    if (key.starts_with("clip_")) only(off, "null or nothing");
    if (key.ends_with("qk_norm")) only(off, "false: q and k have no norm of their own");
    if (key.ends_with("_act")) only(value == activation, "hidden_act, " + printable(activation));
  }
}

/// Refuses settings that would change the mathematics in a way this library does not compute.
inline void refuse_unsupported(const ConfigReader& text) {
  refuse_families(text, text.text_or("hidden_act", ""));
  for (const char* key : {"num_expert_group", "n_group", "topk_group"})
    text.only_count(key, 1, ": expert groups are not supported");
  text.only_count("moe_layer_freq", 1, ": every layer after the dense ones has experts");
  text.only_count("num_nextn_predict_layers", 0, ": draft layers are not supported");
  text.only_text("moe_router_activation_func", "sigmoid");
  text.only_text("scoring_func", "sigmoid");
  text.only_text("topk_method", "noaux_tc");
  text.only_absent("rope_scaling", ": there is no rotary embedding to scale");
  if (!text.flag_or("mla_use_nope", false))
    text.refuse("mla_use_nope", "true: rotary embedding with a latent cache is not supported");
  for (const char* key : {"final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "embedding_scale",
                          "sliding_window", "swiglu_limit"})
    text.only_absent(key);
  text.only_number("partial_rotary_factor", 1.0f, ": there is no rotary embedding");
  if (text.has("moe_renormalize"))
    text.only_flag("norm_topk_prob", text.flag("moe_renormalize"), ", as moe_renormalize");
  const size heads = text.positive("num_attention_heads");
  if (text.count_or("num_key_value_heads", heads) != heads)
    text.refuse("num_key_value_heads", "num_attention_heads, " + std::to_string(heads));
}

/// The quantisation of the routed experts: none, or MXFP4 in groups of 32. What a tensor really is, its name says.
inline void check_quantization(const ConfigReader& settings) {
  if (!settings.has("quantization_config")) return;
  const ConfigReader quantization(settings, "quantization_config");
  quantization.only_text("quant_method", "compressed-tensors");
  quantization.only_text("format", "mxfp4-pack-quantized");
  quantization.only_absent("kv_cache_scheme");
  if (!quantization.has("config_groups")) return;
  const ConfigReader groups(quantization, "config_groups");
  for (const auto& entry : groups.object().items()) {
    const ConfigReader group(groups, entry.key().c_str());
    group.only_text("format", "mxfp4-pack-quantized");
    group.only_absent("input_activations");
    group.only_absent("output_activations");
    if (!group.has("weights")) continue;
    const ConfigReader weights(group, "weights");
    weights.only_count("num_bits", 4);
    weights.only_count("group_size", mxfp4_group);
    weights.only_text("type", "float");
    weights.only_text("strategy", "group");
    weights.only_flag("symmetric", true);
    weights.only_absent("actorder");
    weights.only_flag("dynamic", false);
  }
}

inline MlaConfig mla_from_json(const ConfigReader& text) {
  MlaConfig mla;
  mla.heads = text.positive("num_attention_heads");
  mla.qk_nope_head_dim = text.positive("qk_nope_head_dim");
  mla.qk_rope_head_dim = text.count("qk_rope_head_dim");
  mla.v_head_dim = text.positive("v_head_dim");
  if (!text.contains("q_lora_rank")) text.refuse("q_lora_rank", "a rank, or null for none");
  mla.q_lora_rank = text.has("q_lora_rank") ? text.positive("q_lora_rank") : 0;
  mla.kv_lora_rank = text.positive("kv_lora_rank");
  mla.mla_use_nope = true;
  mla.mla_use_output_gate = text.flag_or("mla_use_output_gate", false);
  return mla;
}

inline KdaConfig kda_from_json(const ConfigReader& linear) {
  refuse_families(linear, "silu");
  linear.only_flag("use_qk_l2norm", true);
  linear.only_flag("allow_neg_eigval", false);
  KdaConfig kda;
  kda.heads = linear.positive("num_heads");
  kda.head_dim = linear.positive("head_dim");
  if (kda.head_dim > kda_max_head_dim) linear.refuse("head_dim", "at most " + std::to_string(kda_max_head_dim));
  kda.conv_kernel = linear.positive("short_conv_kernel_size");
  // Some writers of configs put 0 where they mean "no bound".
  const float bound = linear.number_or("gate_lower_bound", 0.0f);
  if (bound > 0.0f) linear.refuse("gate_lower_bound", "a negative number, or null");
  if (bound < 0.0f) kda.gate_lower_bound = bound;
  kda.use_full_rank_gate = linear.flag_or("use_full_rank_gate", false);
  return kda;
}

/// The activation, by family: Kimi K3 must name its caps (null leaves the up branch uncapped), Kimi-Linear has none.
inline GluConfig activation_from_json(const ConfigReader& text, bool kimi_k3) {
  if (!kimi_k3) return GluConfig::silu();
  if (text.text_or("hidden_act", "") != "situ") text.refuse("hidden_act", "situ, as in every Kimi K3");
  GluConfig glu;
  glu.beta = text.number("activation_situ_beta");
  if (!(glu.beta > 0.0f)) text.refuse("activation_situ_beta", "a positive number");
  if (!text.contains("activation_situ_linear_beta"))
    text.refuse("activation_situ_linear_beta", "a number, or null for an uncapped up branch");
  glu.linear_beta = std::nullopt;
  if (text.has("activation_situ_linear_beta")) {
    glu.linear_beta = text.number("activation_situ_linear_beta");
    if (!(*glu.linear_beta > 0.0f)) text.refuse("activation_situ_linear_beta", "a positive number, or null");
  }
  return glu;
}

inline LatentMoeConfig moe_from_json(const ConfigReader& text, bool kimi_k3, const CheckpointHints& hints) {
  LatentMoeConfig moe;
  moe.hidden = text.positive("hidden_size");
  moe.expert_hidden = text.positive("moe_intermediate_size");
  moe.n_routed = text.positive("num_experts");
  const char* const top_k = !text.has("num_experts_per_token") && text.has("num_experts_per_tok")
                                ? "num_experts_per_tok"
                                : "num_experts_per_token";
  moe.top_k = text.positive(top_k);
  if (moe.top_k > moe.n_routed) text.refuse(top_k, "at most num_experts, " + std::to_string(moe.n_routed));
  moe.n_shared = text.count_or("num_shared_experts", 0);
  moe.activation = activation_from_json(text, kimi_k3);
  if ((kimi_k3 || hints.has_latent_projections) && !text.contains("routed_expert_hidden_size"))
    text.refuse("routed_expert_hidden_size", "the experts' latent width, or null for none");
  moe.latent = text.has("routed_expert_hidden_size") ? text.positive("routed_expert_hidden_size") : 0;
  if (hints.has_latent_projections && moe.latent == 0)
    text.refuse("routed_expert_hidden_size", "the width of the latent projections in the files");
  moe.use_norm = text.flag_or("latent_moe_use_norm", false);
  if (moe.use_norm && moe.latent == 0) text.refuse("latent_moe_use_norm", "false without routed_expert_hidden_size");
  moe.renormalize = text.flag("moe_renormalize");
  moe.routed_scaling_factor = text.number_or("routed_scaling_factor", 1.0f);
  if (!(moe.routed_scaling_factor > 0.0f)) text.refuse("routed_scaling_factor", "a positive number");
  return moe;
}

/// Whether the settings are Kimi K3's; otherwise they are Kimi-Linear's, and have nothing that only Kimi K3 has.
inline bool is_kimi_k3(const ConfigReader& outer, const ConfigReader& text, const CheckpointHints& hints) {
  bool kimi_k3 = text.text_or("hidden_act", "") == "situ" || hints.has_residual_scores;
  for (const ConfigReader* settings : {&outer, &text}) {
    const std::string type = settings->text_or("model_type", "kimi_linear");
    kimi_k3 = kimi_k3 || type.starts_with("kimi_k3");
    if (!type.starts_with("kimi_k3") && !type.starts_with("kimi_linear"))
      settings->refuse("model_type", "kimi_k3 or kimi_linear");
  }
  if (kimi_k3) return true;
  if (text.text_or("hidden_act", "") != "silu") text.refuse("hidden_act", "silu (Kimi-Linear) or situ (Kimi K3)");
  for (const char* key : {"attn_res_block_size", "activation_situ_beta", "activation_situ_linear_beta"})
    text.only_absent(key, " in a Kimi-Linear config (hidden_act is not situ)");
  if (!hints.has_latent_projections)
    text.only_absent("routed_expert_hidden_size", " in a Kimi-Linear config (hidden_act is not situ)");
  return false;
}

inline bool tied_from_json(const ConfigReader& outer, const ConfigReader& text) {
  const bool outer_tied = outer.flag_or("tie_word_embeddings", false);
  const bool tied = text.flag_or("tie_word_embeddings", outer_tied);
  if (outer.has("tie_word_embeddings") && outer_tied != tied)
    outer.refuse("tie_word_embeddings", tied ? "true, as in text_config" : "false, as in text_config");
  return tied;
}

/// Adds the end tokens under `eos_token_id` to a sorted set. The one known wrong id (2 with the 163840-entry
/// vocabulary) stands for [EOS], 163585; an id outside the vocabulary is refused.
inline void add_stops(const ConfigReader& settings, size vocab_size, std::vector<id>& stops) {
  for (id token : token_ids(settings, "eos_token_id")) {
    if (vocab_size == 163840 && token == 2) token = 163585;
    if (static_cast<size>(token) >= vocab_size)
      settings.refuse("eos_token_id", "ids below vocab_size, " + std::to_string(vocab_size));
    stops.push_back(token);
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
}

/// Keys that say nothing about the text model's mathematics.
inline constexpr const char* passed_over[] = {"_name_or_path",    "architectures",        "attention_dropout",
                                              "auto_map",         "bos_token_id",         "dtype",
                                              "head_dim",         "initializer_range",    "media_placeholder_token_id",
                                              "model_type",       "pad_token_id",         "rope_theta",
                                              "torch_dtype",      "transformers_version", "use_cache",
                                              "use_grouped_topk", "vision_config"};

/// The keys of these settings that were neither read nor are known to say nothing.
inline void add_unread(const ConfigReader& settings, const std::string& prefix, std::vector<std::string>& keys) {
  for (const std::string& key : settings.unread())
    if (std::find(std::begin(passed_over), std::end(passed_over), key) == std::end(passed_over))
      keys.push_back(prefix + printable(key));
}

}  // namespace detail

/// The model that a parsed `config.json` describes, outer wrapper or bare text settings. Throws format_error, naming
/// file, key and value, for what is missing, contradictory or not supported. `hints` is what the tensor names say.
/// Family: `hidden_act` situ, `model_type` kimi_k3 or residual scores in the files mean Kimi K3, which must have its
/// keys; otherwise it is Kimi-Linear, which must not. Keys that it does not know are named in `unread_keys`.
inline K3Config config_from_json(const nlohmann::json& json, const std::string& path,
                                 const CheckpointHints& hints = {}) {
  const detail::ConfigReader outer(json, path);
  const bool wrapped = outer.has("text_config");
  const detail::ConfigReader text = wrapped ? detail::ConfigReader(outer, "text_config") : outer;
  const bool kimi_k3 = detail::is_kimi_k3(outer, text, hints);
  K3Config config;
  config.hidden_size = text.positive("hidden_size");
  config.vocab_size = text.positive("vocab_size");
  const size layers = text.positive("num_hidden_layers");
  if (layers > 10000) text.refuse("num_hidden_layers", "at most 10000");
  detail::refuse_unsupported(text);
  detail::check_quantization(text);
  if (wrapped) detail::check_quantization(outer);
  if (hints.has_packed_experts && !text.has("quantization_config") && !outer.has("quantization_config"))
    text.refuse("quantization_config", "the settings of mxfp4-pack-quantized, since the files hold packed experts");
  if (!text.has("linear_attn_config")) text.refuse("linear_attn_config", "an object of settings");
  const detail::ConfigReader linear(text, "linear_attn_config");
  config.mixers = detail::mixers_from(linear, layers);
  config.kda = detail::kda_from_json(linear);
  config.mla = detail::mla_from_json(text);
  if (kimi_k3) config.attn_res_block_size = text.positive("attn_res_block_size");
  config.moe = detail::moe_from_json(text, kimi_k3, hints);
  config.first_k_dense_replace = text.count("first_k_dense_replace");
  if (config.first_k_dense_replace > layers)
    text.refuse("first_k_dense_replace", "at most num_hidden_layers, " + std::to_string(layers));
  config.intermediate_size = config.first_k_dense_replace > 0 ? text.positive("intermediate_size") : 0;
  config.rms_norm_eps = text.number("rms_norm_eps");
  if (!(config.rms_norm_eps > 0.0f && config.rms_norm_eps < 1.0f)) text.refuse("rms_norm_eps", "between 0 and 1");
  // Nothing in the graph depends on positions; the limit is the released model's where a config has none.
  config.max_position_embeddings =
      text.has("max_position_embeddings") ? text.positive("max_position_embeddings") : 1048576;
  config.tie_word_embeddings = detail::tied_from_json(outer, text);
  detail::add_stops(outer, config.vocab_size, config.eos_token_ids);
  detail::add_stops(text, config.vocab_size, config.eos_token_ids);
  if (wrapped) detail::add_unread(outer, "", config.unread_keys);
  detail::add_unread(text, wrapped ? "text_config." : "", config.unread_keys);
  detail::add_unread(linear, wrapped ? "text_config.linear_attn_config." : "linear_attn_config.", config.unread_keys);
  try {
    check(config, "config");
  } catch (const invalid_argument& problem) {  // products of sizes that pass 2^64
    throw format_error(path, problem.argument(), "is " + problem.found() + ", expected " + problem.expected());
  }
  return config;
}

}  // namespace k3
