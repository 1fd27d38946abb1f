// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/geometry/k3_config.hpp>

namespace k3 {

/// One layer of the graph: its index from 0 and what it is made of.
struct K3LayerSpec {
  size index = 0;
  MixerKind mixer = MixerKind::Kda;
  MlpKind mlp = MlpKind::Dense;

  friend bool operator==(const K3LayerSpec&, const K3LayerSpec&) = default;
};

/// The layer map of a model and the switches that change its mathematics.
struct K3Graph {
  std::vector<K3LayerSpec> layers;
  size hidden = 0;
  size attn_res_block_size = 0;  ///< 0: plain residual adds
  float situ_beta = 4.0f;
  std::optional<float> situ_linear_beta = 25.0f;
  bool use_full_rank_gate = true;
  bool mla_use_nope = true;
  bool mla_use_output_gate = true;

  /// The graph of a config: layers below `first_k_dense_replace` are dense, the others LatentMoE.
  static K3Graph from_config(const K3Config& config) {
    K3Graph graph{{},
                  config.hidden_size,
                  config.attn_res_block_size,
                  config.moe.activation.beta,
                  config.moe.activation.linear_beta,
                  config.kda.use_full_rank_gate,
                  config.mla.mla_use_nope,
                  config.mla.mla_use_output_gate};
    for (size index = 0; index < config.mixers.size(); ++index)
      graph.layers.push_back(
          {index, config.mixers[index], index < config.first_k_dense_replace ? MlpKind::Dense : MlpKind::LatentMoe});
    return graph;
  }

  size kda_count() const {
    size count = 0;
    for (const K3LayerSpec& layer : layers) count += layer.mixer == MixerKind::Kda;
    return count;
  }
  friend bool operator==(const K3Graph&, const K3Graph&) = default;

  size mla_count() const { return layers.size() - kda_count(); }
  bool last_is_mla() const { return !layers.empty() && layers.back().mixer == MixerKind::Mla; }
};

/// True where layer `index` stores the stream that enters it and starts a new block.
K3_HOST_DEVICE constexpr bool starts_block(size index, size block_size) {
  return block_size > 0 && index % block_size == 0;
}
/// Snapshots held once `layers` layers have started: ceil(layers / block_size); 0 without Attention Residuals.
K3_HOST_DEVICE constexpr size snapshot_count(size layers, size block_size) {
  return block_size > 0 ? (layers + block_size - 1) / block_size : 0;
}
/// Vectors mixed before the attention of layer `index`: the snapshots of the layers before it and the running sum.
K3_HOST_DEVICE constexpr size attention_mix_sources(size index, size block_size) {
  return snapshot_count(index, block_size) + 1;
}
/// Vectors mixed before the MLP of layer `index`: its own snapshot is among them already.
K3_HOST_DEVICE constexpr size mlp_mix_sources(size index, size block_size) {
  return snapshot_count(index + 1, block_size) + 1;
}

}  // namespace k3
