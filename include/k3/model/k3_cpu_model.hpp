// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/model/weights.hpp>
#include <k3/ops/mla_kv.hpp>

namespace k3 {

/// A text model ready to run on the host: what it is, its weights, and whoever owns their memory (a checkpoint's file
/// maps, or vectors). Copies share the memory. Made by `from_pretrained` (k3/io/checkpoint.hpp) or `synthetic_*`
/// (k3/model/synthetic.hpp), or by hand.
struct K3CpuModel {
  K3Config config{};
  K3Graph graph{};
  DecoderWeights weights{};
  std::shared_ptr<const void> storage{};
};

namespace detail {

template <size Rank>
void check_weight(const std::string& name, const AnyView<Rank>& weight, const size (&shape)[Rank], WeightRole role) {
  const char* operation = "K3CpuModel";
  if (!weight) throw invalid_argument(operation, name, "absent", shape_text(shape));
  // A_log may keep its padding; everything else has exactly its shape.
  const bool padded = Rank == 1 && role == WeightRole::a_log && weight.extents[0] >= shape[0];
  bool same = true;
  for (size d = 0; d < Rank; ++d) same = same && weight.extents[d] == shape[d];
  if (!same && !padded) throw invalid_argument(operation, name, shape_text(weight.extents), shape_text(shape));
  if (weight.type == ElementType::mxfp4) throw invalid_argument(operation, name, "MXFP4", "F64, F32 or BF16");
  require_memory(operation, name.c_str(), weight);
}

}  // namespace detail

/// Throws invalid_argument, naming the tensor, unless graph and layers are the config's, the model has every weight
/// that its config asks for, with its shape, and no selection bias is NaN. The experts are checked as they are read.
inline void check(const K3CpuModel& model) {
  check(model.config, "K3CpuModel");
  const K3Graph expected = K3Graph::from_config(model.config);
  detail::require(model.graph == expected, "K3CpuModel", "graph", "not the config's", "K3Graph::from_config");
  detail::require(model.weights.layers.size() == expected.layers.size(), "K3CpuModel", "weights.layers",
                  model.weights.layers.size(), expected.layers.size());
  const auto check_one = [](const std::string& name, const auto& weight, const auto& shape, WeightRole role) {
    detail::check_weight(name, weight, shape, role);
  };
  DecoderWeights weights = model.weights;
  for_each_model_weight(model.config, weights, check_one);
  for (const MixerKind mixer : model.config.mixers)
    if (mixer == MixerKind::Mla) detail::require_nope(model.config.mla, "K3CpuModel");
  if (model.config.tie_word_embeddings)
    detail::require(weights.lm_head.data == weights.embed_tokens.data, "K3CpuModel", "lm_head", "a matrix of its own",
                    "embed_tokens (the config ties them)");
  for (const K3LayerSpec& spec : expected.layers) {
    LayerWeights& layer = weights.layers[spec.index];
    if (layer.spec != spec)
      throw invalid_argument("K3CpuModel", layer_prefix(spec.index) + "spec", "not the graph's", "the one of graph");
    for_each_layer_weight(model.config, spec, layer, check_one);
    if (spec.mlp != MlpKind::LatentMoe) continue;
    const std::string moe = layer_prefix(spec.index) + "block_sparse_moe.", experts = moe + "experts";
    detail::require(layer.experts && layer.experts->size() == model.config.moe.n_routed, "K3CpuModel", experts.c_str(),
                    layer.experts ? layer.experts->size() : 0, model.config.moe.n_routed);
    detail::require_no_nan_bias("K3CpuModel", (moe + "gate.e_score_correction_bias").c_str(),
                                layer.moe.e_score_correction_bias);
  }
}

}  // namespace k3
