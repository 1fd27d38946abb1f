// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/geometry/k3_graph.hpp>

namespace k3 {

/// What the decoder reads: the sizes that all layers share and one geometry for each kind of layer.
template <class G>
concept decoder_geometry = requires(G g) {
  { g.hidden } -> std::convertible_to<size>;
  { g.vocab } -> std::convertible_to<size>;
  { g.dense_intermediate } -> std::convertible_to<size>;
  { g.attn_res_block_size } -> std::convertible_to<size>;
  { g.rms_norm_eps } -> std::convertible_to<float>;
  { g.activation } -> std::convertible_to<GluConfig>;
  requires kda_geometry<std::remove_cvref_t<decltype(g.kda)>>;
  requires mla_geometry<std::remove_cvref_t<decltype(g.mla)>>;
  requires latent_moe_geometry<std::remove_cvref_t<decltype(g.moe)>>;
};

/// The run-time kind, read from a config.
struct DecoderGeometry {
  size hidden = 0;
  size vocab = 0;
  size dense_intermediate = 0;
  size attn_res_block_size = 0;
  float rms_norm_eps = 1e-5f;
  GluConfig activation{};
  KdaConfig kda{};
  MlaConfig mla{};
  LatentMoeConfig moe{};

  friend bool operator==(const DecoderGeometry&, const DecoderGeometry&) = default;
};

inline DecoderGeometry decoder_geometry_from(const K3Config& config) {
  return {config.hidden_size,
          config.vocab_size,
          config.intermediate_size,
          config.attn_res_block_size,
          config.rms_norm_eps,
          config.moe.activation,
          config.kda,
          config.mla,
          config.moe};
}

/// The run-time twin of a fixed geometry; comparing it with a config's tells whether the fixed one fits a checkpoint.
template <decoder_geometry G>
constexpr DecoderGeometry runtime_geometry(G g) {
  return {g.hidden,     g.vocab,           g.dense_intermediate, g.attn_res_block_size,   g.rms_norm_eps,
          g.activation, kda_config(g.kda), mla_config(g.mla),    latent_moe_config(g.moe)};
}

}  // namespace k3
