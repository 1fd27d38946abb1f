// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>

#include <k3/cuda/device_upload.cuh>
#include <k3/cuda/expert_cache.cuh>

namespace k3 {

/// One decoder layer's weights in device memory; the parts are LayerWeights'.
struct DeviceLayerWeights {
  K3LayerSpec spec{};
  AnyVector<MemorySpace::device> input_layernorm, post_attention_layernorm;
  AnyVector<MemorySpace::device> self_attention_res_norm, self_attention_res_proj;
  AnyVector<MemorySpace::device> mlp_res_norm, mlp_res_proj;
  BasicKdaWeights<MemorySpace::device> kda{};
  BasicMlaWeights<MemorySpace::device> mla{};
  BasicMlpWeights<MemorySpace::device> mlp{};
  BasicLatentMoeWeights<MemorySpace::device> moe{};
  ExpertTable experts{};
};

/// A whole text model's weights in device memory.
struct DeviceDecoderWeights {
  AnyMatrix<MemorySpace::device> embed_tokens, lm_head;
  AnyVector<MemorySpace::device> norm, output_attn_res_norm, output_attn_res_proj;
  std::vector<DeviceLayerWeights> layers;
};

/// Called while a model is moved to the device: bytes there so far, bytes in all.
struct NoUploadProgress {
  void operator()(size, size) const {}
};

/// Makes a K3DeviceModel without its routed experts, which `place_experts` brings later.
struct WithoutExperts {};

/// A model's weights on the device, in their stored types, and the host model they came from (which keeps serving
/// mixers that run on the host). What the weights take is added up before the first byte is moved; where that is more
/// than is free, the constructor throws cuda_error, saying what is needed and what is there. Each expert is read, and
/// so checked, on the way. Routed experts may stay where they are, and come when they are needed (docs/streaming.md):
/// the constructor with WithoutExperts, then caches and decoders, then `place_experts` with what memory is left.
/// `read(from, bytes, to)` fetches the host model's weights; several threads call it.
class K3DeviceModel {
 public:
  template <class Progress = NoUploadProgress, class Read = CopyWeights>
  explicit K3DeviceModel(const K3CpuModel& model, Progress&& progress = {}, const Read& read = {})
      : K3DeviceModel(Unmade{}, model) {
    reserve(plan(model));
    upload(read, true, progress);
    complete_ = true;
  }
  template <class Progress = NoUploadProgress, class Read = CopyWeights>
  K3DeviceModel(WithoutExperts, const K3CpuModel& model, Progress&& progress = {}, const Read& read = {})
      : K3DeviceModel(Unmade{}, model) {
    reserve(plan_trunk(model));
    upload(read, false, progress);
    complete_ = plan_experts(model) == 0;
  }

  /// All memory that is free but a reserve for what CUDA allocates later.
  static constexpr size automatic = ~size{0};
  /// Gives the routed experts `memory` bytes of the device: all of them stay there if that is enough, and are streamed
  /// through it otherwise. Before the first pass, and once. Throws invalid_argument below the floor, the experts of one
  /// token in a layer, cuda_error where the device does not have the memory.
  template <class Progress = NoUploadProgress>
  void place_experts(size memory = automatic, Progress&& progress = {});

  /// A model whose weights are made on the device, for sizes that no host holds; its host model has none, so that no
  /// mixer can run on the host. `source.type(name)` is the type a weight is stored in and `source.fill(name, weight)`
  /// writes its elements, in order on the default stream; a routed expert's weights are named
  /// `expert_prefix(layer, expert)` and "w1", "w3" or "w2".
  template <class Source>
  K3DeviceModel(const K3Config& config, Source& source) {
    check(config, "K3DeviceModel");
    host_.config = config;
    host_.graph = K3Graph::from_config(config);
    reserve(plan(config, host_.graph, source));
    const auto make = [&](const std::string& name, auto& weight, const auto& shape, WeightRole) {
      weight = unplaced(source, name, weight, shape);
      weight.data = take(detail::data_bytes(weight));
      if (weight.type == ElementType::mxfp4) weight.scale = take(detail::scale_bytes(weight));
      source.fill(name, weight);
    };
    place_all(
        make,
        [&](DeviceLayerWeights& layer) {
          std::vector<DeviceExpertWeights> experts(config.moe.n_routed);
          for (size e = 0; e < experts.size(); ++e)
            experts[e] = expert_matrices(config.moe, expert_prefix(layer.spec.index, e), make);
          set_experts(layer, experts);
        },
        [] {});
    detail::check_cuda("K3DeviceModel", "cudaDeviceSynchronize", cudaDeviceSynchronize());
    complete_ = true;
  }

  const K3CpuModel& host_model() const { return host_; }
  const K3Config& config() const { return host_.config; }
  const DeviceDecoderWeights& weights() const { return weights_; }
  size bytes() const { return memory_.bytes() + expert_memory_.bytes() + (cache_ ? cache_->memory() : 0); }
  /// Whether every expert can be used; never of a model that was moved from.
  bool complete() const { return complete_ && memory_.count() > 0; }
  /// What streams the experts; null where they are all there.
  ExpertCache* expert_cache() const { return cache_.get(); }

  /// Bytes that the weights of `model` take on a device: all, all but the routed experts, and these. Throw
  /// invalid_argument where they do not fit 64 bits.
  static size plan(const K3CpuModel& model) { return detail::plan_sum(plan_trunk(model), plan_experts(model)); }
  static size plan_trunk(const K3CpuModel& model) {
    size bytes = 0;
    const auto add = [&](const std::string& name, const auto& weight, const auto&, WeightRole) {
      detail::require(weight.type == ElementType::f32 || weight.type == ElementType::bf16, "K3DeviceModel",
                      name.c_str(), "of another type", "F32 or BF16");
      bytes = detail::plan_sum(bytes, detail::planned_bytes(weight));
    };
    DecoderWeights weights = model.weights;
    for_each_model_weight(model.config, weights, add);
    for (LayerWeights& layer : weights.layers) for_each_layer_weight(model.config, layer.spec, layer, add);
    return bytes;
  }
  static size plan_experts(const K3CpuModel& model) {
    size bytes = 0;
    // All experts of a layer are stored alike; asking for one is enough for the plan.
    for (const LayerWeights& layer : model.weights.layers)
      if (layer.experts) {
        const size one = detail::planned_bytes((*layer.experts)[0]);
        bytes = detail::plan_sum(bytes, detail::plan_product(layer.experts->size(), one));
      }
    return bytes;
  }

 private:
  struct Unmade {};
  K3DeviceModel(Unmade, const K3CpuModel& model) : host_(model) { check(model); }

  void reserve(size needed) {
    detail::require_free("K3DeviceModel", "the weights need", needed);
    memory_ = DeviceBuffer<unsigned char>(needed, false);
  }
  unsigned char* take(size bytes) {
    detail::require(used_ + bytes <= memory_.count(), "K3DeviceModel", "the experts", "stored in different types",
                    "stored alike");
    unsigned char* result = memory_.data() + used_;
    used_ += detail::aligned_bytes(bytes);
    return result;
  }
  template <size Rank>
  AnyView<Rank, MemorySpace::device> move(const AnyView<Rank>& weight, detail::DeviceUpload& upload) {
    AnyView<Rank, MemorySpace::device> result;
    const auto copy = [&](const void* data, size bytes) {
      unsigned char* const to = take(bytes);
      upload.add(to, data, bytes);
      return to;
    };
    result.type = weight.type;
    for (size d = 0; d < Rank; ++d) result.extents[d] = weight.extents[d];
    result.data = copy(weight.data, detail::data_bytes(weight));
    if (weight.type == ElementType::mxfp4) result.scale = copy(weight.scale, detail::scale_bytes(weight));
    return result;
  }

  /// The host's weights in visiting order, so that the device's, visited in the same order, can take them one by one.
  struct Pending {
    std::vector<AnyVector<>> vectors;
    std::vector<AnyMatrix<>> matrices;
    size next_vector = 0, next_matrix = 0;
    void put(const AnyVector<>& weight) { vectors.push_back(weight); }
    void put(const AnyMatrix<>& weight) { matrices.push_back(weight); }
    const AnyVector<>& next(const AnyVector<MemorySpace::device>&) { return vectors[next_vector++]; }
    const AnyMatrix<>& next(const AnyMatrix<MemorySpace::device>&) { return matrices[next_matrix++]; }
  };

  /// The weights one after the other: place(name, weight, shape, role) of all but the experts, and experts(layer) for
  /// each layer that has some.
  template <class Place, class Experts, class Report>
  void place_all(Place&& place, Experts&& experts, Report&& report) {
    for_each_model_weight(host_.config, weights_, place);
    if (host_.config.tie_word_embeddings) weights_.lm_head = weights_.embed_tokens;
    for (const K3LayerSpec& spec : host_.graph.layers) {
      DeviceLayerWeights layer;
      layer.spec = spec;
      for_each_layer_weight(host_.config, spec, layer, place);
      if (spec.mlp == MlpKind::LatentMoe) experts(layer);
      weights_.layers.push_back(std::move(layer));
      report();
    }
  }
  void set_experts(DeviceLayerWeights& layer, const std::vector<DeviceExpertWeights>& experts) {
    layer.experts = ExpertTable(host_.config.moe, experts);
    repack_experts(gpu{}, layer.experts);  // where they have a packed layout: the same bits, read faster
    detail::check_cuda("K3DeviceModel", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  }

  template <class Read, class Progress>
  void upload(const Read& read, bool with_experts, Progress&& progress) {
    DecoderWeights host = host_.weights;
    Pending pending;
    const auto collect = [&](const std::string&, const auto& weight, const auto&, WeightRole) { pending.put(weight); };
    for_each_model_weight(host_.config, host, collect);
    for (LayerWeights& layer : host.layers) for_each_layer_weight(host_.config, layer.spec, layer, collect);
    detail::DeviceUpload upload(read);
    // What has been placed is there but for what waits to be uploaded.
    const auto report = [&](size arrived) { progress(used_ - upload.bytes() + arrived, memory_.bytes()); };
    place_all(
        [&](const std::string&, auto& weight, const auto&, WeightRole) { weight = move(pending.next(weight), upload); },
        [&](DeviceLayerWeights& layer) {
          if (with_experts) upload_experts(layer, upload, [&](size bytes) { return take(bytes); });
        },
        [&] { report(0); });
    upload.flush(report);
  }
  /// All experts of a layer, `take(bytes)` memory each.
  template <class Take>
  void upload_experts(DeviceLayerWeights& layer, detail::DeviceUpload& upload, Take&& take);

  template <class Source, size Rank>
  static AnyView<Rank, MemorySpace::device> unplaced(Source& source, const std::string& name,
                                                     AnyView<Rank, MemorySpace::device> weight,
                                                     const size (&shape)[Rank]) {
    weight.type = source.type(name);
    for (size d = 0; d < Rank; ++d) weight.extents[d] = shape[d];
    return weight;
  }
  template <class Make>
  static DeviceExpertWeights expert_matrices(const LatentMoeConfig& moe, const std::string& prefix, Make&& make) {
    const size inner[] = {moe.expert_hidden, moe_expert_width(moe)}, outer[] = {inner[1], inner[0]};
    DeviceExpertWeights expert;
    make(prefix + "w1", expert.w1, inner, WeightRole::plain);
    make(prefix + "w3", expert.w3, inner, WeightRole::plain);
    make(prefix + "w2", expert.w2, outer, WeightRole::plain);
    return expert;
  }
  template <class Source>
  static size plan(const K3Config& config, const K3Graph& graph, Source& source) {
    size bytes = 0;
    const auto add = [&](const std::string& name, const auto& weight, const auto& shape, WeightRole) {
      bytes = detail::plan_sum(bytes, detail::planned_bytes(unplaced(source, name, weight, shape)));
    };
    DeviceDecoderWeights model;
    for_each_model_weight(config, model, add);
    for (const K3LayerSpec& spec : graph.layers) {
      DeviceLayerWeights layer;
      for_each_layer_weight(config, spec, layer, add);
      if (spec.mlp != MlpKind::LatentMoe) continue;
      const size before = bytes;
      expert_matrices(config.moe, expert_prefix(spec.index, 0), add);
      bytes = detail::plan_sum(before, detail::plan_product(config.moe.n_routed, bytes - before));
    }
    return bytes;
  }

  K3CpuModel host_;
  DeviceBuffer<unsigned char> memory_, expert_memory_;
  size used_ = 0;
  DeviceDecoderWeights weights_;
  std::unique_ptr<ExpertCache> cache_;
  bool complete_ = false;
};

template <class Take>
void K3DeviceModel::upload_experts(DeviceLayerWeights& layer, detail::DeviceUpload& upload, Take&& take) {
  constexpr const char* operation = "K3DeviceModel";
  const ExpertSource& source = *host_.weights.layers[layer.spec.index].experts;
  std::vector<DeviceExpertWeights> experts(source.size());
  std::vector<size> ids(source.size());
  for (size e = 0; e < ids.size(); ++e) ids[e] = e;
  const auto place = [&](size, const ExpertWeights& expert) { return take(detail::planned_bytes(expert)); };
  cudaPointerAttributes memory{};
  detail::check_cuda(operation, "cudaPointerGetAttributes", cudaPointerGetAttributes(&memory, source[0].w1.data));
  if (memory.type == cudaMemoryTypeHost) {
    detail::ExpertTransfer transfer(host_.config.moe.top_k);
    transfer.bring(source, ids.data(), ids.size(), false, place,
                   [&](size e, const DeviceExpertWeights& there) { experts[e] = there; });
    transfer.finish();
    return set_experts(layer, experts);
  }
  // Sources have room for the experts of one token.
  const size step = host_.config.moe.top_k;
  source.need(ids.data(), ids.size());
  size released = 0, acquired = 0;
  const auto release = [&] {
    while (released < acquired) source.release(released++);
  };
  const auto move = [&](const AnyMatrix<>& matrix) {
    const size bytes = detail::data_bytes(matrix), scales = detail::scale_bytes(matrix);
    unsigned char* const data = take(detail::aligned_bytes(bytes) + detail::aligned_bytes(scales));
    unsigned char* const scale = data + detail::aligned_bytes(bytes);
    upload.add(data, matrix.data, bytes);
    upload.add(scale, matrix.scale, scales);
    return detail::device_matrix(matrix, data, scale);
  };
  try {
    while (released < ids.size()) {
      while (acquired < detail::smaller(released + step, ids.size())) {
        const ExpertWeights expert = source.acquire(acquired);
        DeviceExpertWeights& there = experts[acquired++];
        there = {move(expert.w1), move(expert.w3), move(expert.w2)};
      }
      upload.flush();
      release();
    }
  } catch (...) {
    release();
    throw;
  }
  set_experts(layer, experts);
}

template <class Progress>
void K3DeviceModel::place_experts(size memory, Progress&& progress) {
  constexpr const char* operation = "K3DeviceModel::place_experts";
  if (complete_) return;
  constexpr size reserve = size{512} << 20;
  const size free = detail::device_memory(operation).free, all = plan_experts(host_);
  if (memory == automatic) memory = free > reserve ? free - reserve : 0;
  std::vector<ExpertTable*> tables(weights_.layers.size());
  if (memory < all) {
    for (DeviceLayerWeights& layer : weights_.layers)
      if (layer.spec.mlp == MlpKind::LatentMoe) tables[layer.spec.index] = &layer.experts;
    cache_ = std::make_unique<ExpertCache>(host_, tables, memory);
    complete_ = true;
    return;
  }
  detail::require_free(operation, "the experts need", all);
  expert_memory_ = DeviceBuffer<unsigned char>(all, false);
  size used = 0;
  const CopyWeights read;
  detail::DeviceUpload upload(read);
  for (DeviceLayerWeights& layer : weights_.layers) {
    if (layer.spec.mlp != MlpKind::LatentMoe) continue;
    upload_experts(layer, upload, [&](size bytes) {
      detail::require(used + bytes <= all, operation, "the experts", "stored in different types", "stored alike");
      return expert_memory_.data() + std::exchange(used, used + detail::aligned_bytes(bytes));
    });
    progress(used, all);
  }
  complete_ = true;
}

}  // namespace k3
