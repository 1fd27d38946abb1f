// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include <k3/io/checkpoint_experts.hpp>
#include <k3/io/checkpoint_tensors.hpp>
#include <k3/io/config.hpp>
#include <k3/io/streamed_layer.hpp>
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

namespace detail {

/// Opens a checkpoint; bind_experts(tensors, layer) sees to the routed experts of each layer that has some.
template <class BindExperts>
K3CpuModel load_checkpoint(const std::string& directory, std::shared_ptr<const Safetensors> files,
                           const LoadProgress& progress, BindExperts&& bind_experts) {
  CheckpointTensors tensors(std::move(files));
  K3CpuModel model;
  model.config = read_config(directory, tensors.hints());
  model.graph = K3Graph::from_config(model.config);
  tensors.set_padded_a_log(model.config.kda.head_dim);
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
    if (spec.mlp == MlpKind::LatentMoe) bind_experts(tensors, model.config.moe, layer);
    model.weights.layers.push_back(std::move(layer));
    if (progress) progress(model.weights.layers.size(), model.graph.layers.size());
  }
  tensors.require_all_used();
  model.storage = tensors.storage();
  return model;
}

}  // namespace detail

/// from_pretrained(directory) below with its tensors, which are open already, so that no header is read twice.
inline K3CpuModel from_pretrained(const std::string& directory, std::shared_ptr<const Safetensors> files,
                                  const LoadProgress& progress = {}) {
  return detail::load_checkpoint(
      directory, std::move(files), progress,
      [](detail::CheckpointTensors& tensors, const LatentMoeConfig& moe, LayerWeights& layer) {
        layer.experts = std::make_shared<detail::CheckpointExperts>(tensors, layer.spec.index, moe);
      });
}

/// Opens a checkpoint folder in the released layout: config.json, and the text tensors of its safetensors files with or
/// without the prefix `language_model.`. Weights stay in the file maps in their stored type and are read when they are
/// used; opening reads headers, and the A_log of each KDA layer. A tensor that does not lie aligned for its type is
/// copied. Throws format_error, naming file, tensor and byte, for what is missing, unknown, of another shape or type,
/// or unpaired; tensors of the vision tower and its projector are passed over. Nothing of an expert is read: its scale
/// bytes are checked the first time it is used. Source: kimi-k3 checkpoint layout.
inline K3CpuModel from_pretrained(const std::string& directory, const LoadProgress& progress = {}) {
  return from_pretrained(directory, std::make_shared<const Safetensors>(open_safetensors_set(directory)), progress);
}

/// A model whose routed experts are streamed, and what streams them; null where the model has none.
struct StreamedModel {
  K3CpuModel model;
  std::shared_ptr<const StreamedExperts> experts;
};

/// stream_pretrained(directory) below with its tensors, which are open already.
inline StreamedModel stream_pretrained(const std::string& directory, std::shared_ptr<const Safetensors> files,
                                       const StreamingOptions& options, const LoadProgress& progress = {}) {
  std::vector<detail::BoundExpert> experts;
  StreamedModel streamed;
  streamed.model = detail::load_checkpoint(
      directory, std::move(files), progress,
      [&](detail::CheckpointTensors& tensors, const LatentMoeConfig& moe, LayerWeights& layer) {
        const std::vector<detail::BoundExpert> own = detail::ExpertBinder(tensors).bind(layer.spec.index, moe);
        experts.insert(experts.end(), own.begin(), own.end());
      });
  if (experts.empty()) return streamed;
  const auto storage = std::static_pointer_cast<const detail::CheckpointStorage>(streamed.model.storage);
  const LatentMoeConfig& moe = streamed.model.config.moe;
  // A use counts half after 64 tokens: measured, see docs/streaming.md.
  const double token = static_cast<double>(experts.size() / moe.n_routed * moe.top_k);
  const auto shared = std::make_shared<StreamedExperts>(storage, std::move(experts), moe.top_k, 64 * token, options);
  size first = 0;
  for (LayerWeights& layer : streamed.model.weights.layers) {
    if (layer.spec.mlp != MlpKind::LatentMoe) continue;
    layer.experts = std::make_shared<detail::StreamedLayer>(shared, first, moe.n_routed);
    first += moe.n_routed;
  }
  streamed.experts = shared;
  return streamed;
}

/// As from_pretrained, but routed experts are read from the files on demand into `options.memory` bytes, and never
/// mapped. Results have the same bits at every budget. Throws what from_pretrained does, and invalid_argument for a
/// budget below the floor, the experts of one token; decoding throws format_error where a file fails or has become
/// shorter. (For what is mapped, the rest of the model, see catch_lost_pages.)
inline StreamedModel stream_pretrained(const std::string& directory, const StreamingOptions& options,
                                       const LoadProgress& progress = {}) {
  return stream_pretrained(directory, std::make_shared<const Safetensors>(open_safetensors_set(directory)), options,
                           progress);
}

}  // namespace k3
