// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/geometry/kda_config.hpp>
#include <k3/geometry/latent_moe_config.hpp>
#include <k3/geometry/mla_config.hpp>

namespace k3 {

/// Which mixer a layer has: Kimi Delta Attention or multi-head latent attention.
enum class MixerKind : unsigned char { Kda, Mla };
/// Which feed-forward part a layer has.
enum class MlpKind : unsigned char { Dense, LatentMoe };

/// The text settings of a checkpoint, resolved: what `config.json` says with the family's rules applied. Plain data
/// that io/config.hpp fills and that a test may fill by hand; `check` holds the relations between the fields.
struct K3Config {
  size hidden_size = 0;
  size vocab_size = 0;
  size intermediate_size = 0;  ///< of the dense layers
  size first_k_dense_replace = 0;
  size attn_res_block_size = 0;  ///< 0: no Attention Residuals (Kimi-Linear), plain residual adds
  size max_position_embeddings = 0;
  float rms_norm_eps = 1e-5f;
  bool tie_word_embeddings = false;
  std::vector<MixerKind> mixers;           ///< one per layer
  std::vector<id> eos_token_ids;           ///< the union of all places that name one
  std::vector<std::string> unread_keys{};  ///< of config.json: what nobody knew
  KdaConfig kda{};
  MlaConfig mla{};
  LatentMoeConfig moe{};

  size num_hidden_layers() const { return mixers.size(); }
};

/// The KDA geometry of a config.
inline KdaConfig kda_from(const K3Config& config) { return config.kda; }
/// The MLA geometry of a config.
inline MlaConfig mla_from(const K3Config& config) { return config.mla; }
/// The mixture-of-experts geometry of a config.
inline LatentMoeConfig moe_from(const K3Config& config) { return config.moe; }

/// Throws invalid_argument, naming the field, where a config cannot be a model: zero or overflowing sizes, no layers or
/// more than 10,000, more dense layers than layers, a hidden size that the experts do not share, numbers that no
/// operation takes (the geometries' checks).
inline void check(const K3Config& config, const char* operation) {
  const auto at_least_one = [&](size value, const char* name) {
    detail::require(value > 0 && value < (size{1} << 31), operation, name, value, "between 1 and 2^31 - 1");
  };
  at_least_one(config.hidden_size, "hidden_size");
  at_least_one(config.vocab_size, "vocab_size");
  at_least_one(config.max_position_embeddings, "max_position_embeddings");
  detail::require(!config.mixers.empty() && config.mixers.size() <= 10000, operation, "num_hidden_layers",
                  config.mixers.size(), "between 1 and 10000");
  detail::require(config.first_k_dense_replace <= config.mixers.size(), operation, "first_k_dense_replace",
                  config.first_k_dense_replace, "at most num_hidden_layers");
  if (config.first_k_dense_replace > 0) at_least_one(config.intermediate_size, "intermediate_size");
  detail::require(config.rms_norm_eps > 0.0f && config.rms_norm_eps < 1.0f, operation, "rms_norm_eps",
                  config.rms_norm_eps, "between 0 and 1");
  bool any_kda = false, any_mla = false;
  for (const MixerKind mixer : config.mixers) (mixer == MixerKind::Kda ? any_kda : any_mla) = true;
  detail::require_caps(operation, config.moe.activation);  // the dense layers have it too
  if (any_kda) check(config.kda, operation);
  if (any_mla) check(config.mla, operation);
  if (config.first_k_dense_replace < config.mixers.size()) {
    check(config.moe, operation);
    detail::require(config.moe.hidden == config.hidden_size, operation, "moe.hidden", config.moe.hidden, "hidden_size");
  }
}

}  // namespace k3
