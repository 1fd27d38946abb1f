// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/model/k3_cpu_model.hpp>

namespace k3 {

namespace detail {

/// A deterministic number in (-0.5, 0.5) for element `index` of weight number `weight`: a mixed 64-bit counter.
inline float hashed_fill(std::uint64_t weight, std::uint64_t index) {
  std::uint64_t x = (weight << 40) + index + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  return static_cast<float>(x >> 40) / 16777216.0f - 0.5f;
}

/// Owns the weights of a made-up model.
class SyntheticStorage {
 public:
  explicit SyntheticStorage(float scale) : scale_(scale) {}

  /// Matrices get ones on their diagonal plus the fill, norm weights ones plus the fill, other vectors the fill.
  template <size Rank>
  void make(const std::string& name, AnyView<Rank>& weight, const size (&shape)[Rank]) {
    const size columns = shape[Rank - 1], count = Rank == 2 ? shape[0] * columns : columns;
    auto values = std::make_unique<std::vector<float>>(count);
    const bool norm = name.find("norm") != std::string::npos;
    for (size i = 0; i < count; ++i) {
      const bool one = Rank == 2 ? i / columns == i % columns : norm;
      (*values)[i] = (one ? 1.0f : 0.0f) + scale_ * hashed_fill(made_, i);
    }
    ++made_;
    if constexpr (Rank == 2)
      weight = view(*values, shape[0], columns);
    else
      weight = view(*values);
    values_.push_back(std::move(values));
  }

  /// The weights made last, to set single ones.
  std::vector<float>& last() { return *values_.back(); }

 private:
  float scale_;
  std::uint64_t made_ = 0;
  std::vector<std::unique_ptr<std::vector<float>>> values_;
};

}  // namespace detail

/// A model of any config with made-up float weights: identity-like matrices plus a deterministic fill of +-scale/2, the
/// same on every machine. Expert e > 0 has its first up weight set to 1 + e, so that experts differ. Throws
/// invalid_argument for a config that cannot be a model.
inline K3CpuModel synthetic_model(const K3Config& config, float scale) {
  check(config, "synthetic_model");
  auto storage = std::make_shared<detail::SyntheticStorage>(scale);
  const auto make = [&](const std::string& name, auto& weight, const auto& shape, WeightRole) {
    storage->make(name, weight, shape);
  };
  K3CpuModel model;
  model.config = config;
  model.graph = K3Graph::from_config(config);
  for_each_model_weight(config, model.weights, make);
  if (config.tie_word_embeddings) model.weights.lm_head = model.weights.embed_tokens;
  for (const K3LayerSpec& spec : model.graph.layers) {
    LayerWeights layer;
    layer.spec = spec;
    for_each_layer_weight(config, spec, layer, make);
    if (spec.mlp == MlpKind::LatentMoe) {
      const size width = moe_expert_width(config.moe), inner = config.moe.expert_hidden;
      std::vector<ExpertWeights> experts(config.moe.n_routed);
      for (size e = 0; e < experts.size(); ++e) {
        storage->make("w1", experts[e].w1, {inner, width});
        storage->make("w3", experts[e].w3, {inner, width});
        if (e > 0) storage->last()[0] = 1.0f + static_cast<float>(e);
        storage->make("w2", experts[e].w2, {width, inner});
      }
      layer.experts = std::make_shared<ResidentExperts>(std::move(experts));
    }
    model.weights.layers.push_back(std::move(layer));
  }
  model.storage = storage;
  return model;
}

namespace detail {

/// Eight layers, KDA but for 3 and 7, layer 0 dense, blocks of 4: the pattern of the 0.40B sibling at any width.
inline K3Config twin_pattern(size hidden, size vocab, size inner, KdaConfig kda, MlaConfig mla, LatentMoeConfig moe) {
  K3Config config;
  config.hidden_size = hidden;
  config.vocab_size = vocab;
  config.intermediate_size = inner;
  config.first_k_dense_replace = 1;
  config.attn_res_block_size = 4;
  config.max_position_embeddings = 1024;
  for (size layer = 0; layer < 8; ++layer) config.mixers.push_back(layer % 4 == 3 ? MixerKind::Mla : MixerKind::Kda);
  config.kda = kda;
  config.mla = mla;
  config.moe = moe;
  return config;
}

}  // namespace detail

/// The smallest whole model: hidden 4, one head everywhere, 2 experts of which one is chosen, vocabulary 8.
inline K3CpuModel synthetic_tiny() {
  return synthetic_model(
      detail::twin_pattern(4, 8, 8, {1, 2, 4, std::nullopt, true}, {1, 2, 2, 2, 4, 2, true, true, 1e-6f},
                           {4, 4, 4, 2, 1, 1, {}, true, true, 1.0f}),
      0.5f);
}

/// Hidden 8, two heads, 4 experts of which two are chosen, vocabulary 16.
inline K3CpuModel synthetic_small() {
  return synthetic_model(detail::twin_pattern(8, 16, 16, {2, 4, 4, -5.0f, true}, {2, 4, 2, 4, 8, 4, true, true, 1e-6f},
                                              {8, 8, 8, 4, 2, 1, {}, true, true, 1.0f}),
                         0.5f);
}

/// The released hidden size and head count with everything else small: a KDA layer with a dense MLP, an MLA layer with
/// a mixture of experts. About 300 MB.
inline K3CpuModel synthetic_prod_width_dummy() {
  K3Config config =
      detail::twin_pattern(7168, 256, 64, {96, 2, 4, -5.0f, true}, {96, 2, 2, 2, 64, 32, true, true, 1e-6f},
                           {7168, 64, 64, 8, 2, 2, {}, true, true, 1.0f});
  config.mixers = {MixerKind::Kda, MixerKind::Mla};
  config.attn_res_block_size = 12;
  return synthetic_model(config, 0.02f);
}

}  // namespace k3
