// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include <k3/io/checkpoint_experts.hpp>
#include <k3/io/checkpoint_tensors.hpp>
#include <k3/io/config.hpp>
#include <k3/model/k3_cpu_model.hpp>

namespace k3 {

/// Called while a checkpoint is opened: layers bound so far, layers in all.
using LoadProgress = std::function<void(size done, size total)>;

/// The settings of a checkpoint folder: its config.json, and the end tokens of generation_config.json where there is
/// one. Throws format_error for what config_from_json and read_json_file refuse.
inline K3Config read_config(const std::string& directory, const CheckpointHints& hints = {}) {
  const std::string path = detail::in_folder(directory, "config.json");
  K3Config config = config_from_json(read_json_file(path), path, hints);
  const std::string generation_path = detail::in_folder(directory, "generation_config.json");
  if (detail::exists(generation_path)) {
    const nlohmann::json generation = read_json_file(generation_path);
    detail::add_stops({generation, generation_path}, config.vocab_size, config.eos_token_ids);
  }
  return config;
}

/// Opens a checkpoint folder in the released layout: config.json, and the text tensors of its safetensors files with or
/// without the prefix `language_model.`. Weights stay in the file maps in their stored type and are read when they are
/// used; opening reads headers, and the A_log of each KDA layer. A tensor that does not lie aligned for its type is
/// copied. Throws format_error, naming file, tensor and byte, for what is missing, unknown, of another shape or type,
/// or unpaired; tensors of the vision tower and its projector are passed over. Nothing of an expert is read: its scale
/// bytes are checked the first time it is used. Source: kimi-k3 checkpoint layout.
inline K3CpuModel from_pretrained(const std::string& directory, const LoadProgress& progress = {}) {
  const auto files = std::make_shared<const Safetensors>(open_safetensors_set(directory));
  detail::CheckpointTensors tensors(files);
  K3CpuModel model;
  model.config = read_config(directory, tensors.hints());
  model.graph = K3Graph::from_config(model.config);
  const auto bind = [&](const std::string& name, auto& weight, const auto& shape, WeightRole role) {
    tensors.bind(name, weight, shape, role);
  };
  for_each_model_weight(model.config, model.weights, bind);
  if (model.config.tie_word_embeddings) {
    model.weights.lm_head = model.weights.embed_tokens;
    // Tied checkpoints may repeat the matrix; what counts is the embedding.
    tensors.pass_over("lm_head.weight");
  }
  for (const K3LayerSpec& spec : model.graph.layers) {
    LayerWeights layer;
    layer.spec = spec;
    for_each_layer_weight(model.config, spec, layer, bind);
    if (spec.mlp == MlpKind::LatentMoe)
      layer.experts = std::make_shared<detail::CheckpointExperts>(tensors, spec.index, model.config.moe);
    model.weights.layers.push_back(std::move(layer));
    if (progress) progress(model.weights.layers.size(), model.graph.layers.size());
  }
  tensors.require_all_used();
  model.storage = tensors.storage();
  return model;
}

}  // namespace k3
