// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/buffer.cuh>
#include <k3/cuda/repack_experts.cuh>
#include <k3/model/k3_cpu_model.hpp>

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

namespace detail {

/// Tensors start on multiples of this many bytes, so that every vector load is possible.
inline constexpr size device_alignment = 256;

template <size Rank, MemorySpace Space>
size element_count(const AnyView<Rank, Space>& weight) {
  size count = 1;
  for (size d = 0; d < Rank; ++d) count *= weight.extents[d];
  return count;
}

/// Bytes of a weight's elements, or of an MXFP4 matrix's codes.
template <size Rank, MemorySpace Space>
size data_bytes(const AnyView<Rank, Space>& weight) {
  const size count = element_count(weight);
  switch (weight.type) {
    case ElementType::f32: return 4 * count;
    case ElementType::bf16: return 2 * count;
    case ElementType::mxfp4: return count / 2;
    default:
      throw invalid_argument("K3DeviceModel", "a weight", weight.type == ElementType::f64 ? "F64" : "absent",
                             "F32, BF16 or MXFP4");
  }
}
template <size Rank, MemorySpace Space>
size scale_bytes(const AnyView<Rank, Space>& weight) {
  return weight.type == ElementType::mxfp4 ? element_count(weight) / mxfp4_group : 0;
}
inline size aligned_bytes(size bytes) { return (bytes + device_alignment - 1) / device_alignment * device_alignment; }
template <size Rank, MemorySpace Space>
size planned_bytes(const AnyView<Rank, Space>& weight) {
  return aligned_bytes(data_bytes(weight)) + aligned_bytes(scale_bytes(weight));
}

}  // namespace detail

/// A model's weights on the device, in their stored types, and the host model they came from (which keeps serving
/// mixers that run on the host). What the weights take is added up before the first byte is moved; where that is more
/// than is free, the constructor throws cuda_error, saying what is needed and what is there. Each expert is read, and
/// so checked, on the way.
class K3DeviceModel {
 public:
  template <class Progress = NoUploadProgress>
  explicit K3DeviceModel(const K3CpuModel& model, Progress&& progress = {}) : host_(model) {
    check(model);
    reserve(plan(model));
    upload([&] { progress(used_, memory_.bytes()); });
  }

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
        make, [&](size layer, size e) { return expert_matrices(config.moe, expert_prefix(layer, e), make); }, [] {});
    detail::check_cuda("K3DeviceModel", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  }

  const K3CpuModel& host_model() const { return host_; }
  const K3Config& config() const { return host_.config; }
  const DeviceDecoderWeights& weights() const { return weights_; }
  size bytes() const { return memory_.bytes(); }

  /// Bytes that the weights of `model` take on a device.
  static size plan(const K3CpuModel& model) {
    size bytes = 0;
    const auto add = [&](const std::string&, const auto& weight, const auto&, WeightRole) {
      bytes += detail::planned_bytes(weight);
    };
    DecoderWeights weights = model.weights;
    for_each_model_weight(model.config, weights, add);
    for (LayerWeights& layer : weights.layers) {
      for_each_layer_weight(model.config, layer.spec, layer, add);
      if (!layer.experts) continue;
      // All experts of a layer are stored alike; asking for one is enough for the plan.
      const ExpertWeights expert = (*layer.experts)[0];
      bytes += layer.experts->size() *
               (detail::planned_bytes(expert.w1) + detail::planned_bytes(expert.w3) + detail::planned_bytes(expert.w2));
    }
    return bytes;
  }

 private:
  void reserve(size needed) {
    size free = 0, total = 0;
    detail::check_cuda("K3DeviceModel", "cudaMemGetInfo", cudaMemGetInfo(&free, &total));
    if (needed > free)
      throw cuda_error("K3DeviceModel", "the memory plan", static_cast<int>(cudaErrorMemoryAllocation),
                       "the weights need " + std::to_string(needed) + " bytes, " + std::to_string(free) + " of " +
                           std::to_string(total) + " are free");
    memory_ = DeviceBuffer<unsigned char>(needed, false);
  }
  unsigned char* take(size bytes) {
    detail::require(used_ + bytes <= memory_.count(), "K3DeviceModel", "the experts", "stored in different types",
                    "stored alike");
    unsigned char* result = memory_.data() + used_;
    used_ += detail::aligned_bytes(bytes);
    return result;
  }
  const unsigned char* copy(const void* data, size bytes) {
    unsigned char* result = take(bytes);
    memory_.copy_from(static_cast<const unsigned char*>(data), static_cast<size>(result - memory_.data()), bytes);
    return result;
  }
  template <size Rank>
  AnyView<Rank, MemorySpace::device> move(const AnyView<Rank>& weight) {
    AnyView<Rank, MemorySpace::device> result;
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

  /// The weights one after the other: place(name, weight, shape, role) of all but the experts, then for each layer
  /// experts(layer, index of an expert).
  template <class Place, class Experts, class Report>
  void place_all(Place&& place, Experts&& expert, Report&& report) {
    for_each_model_weight(host_.config, weights_, place);
    if (host_.config.tie_word_embeddings) weights_.lm_head = weights_.embed_tokens;
    for (const K3LayerSpec& spec : host_.graph.layers) {
      DeviceLayerWeights layer;
      layer.spec = spec;
      for_each_layer_weight(host_.config, spec, layer, place);
      if (spec.mlp == MlpKind::LatentMoe) {
        std::vector<DeviceExpertWeights> experts(host_.config.moe.n_routed);
        for (size e = 0; e < experts.size(); ++e) experts[e] = expert(spec.index, e);
        layer.experts = ExpertTable(host_.config.moe, experts);
        repack_experts(gpu{}, layer.experts);  // where they have a packed layout: the same bits, read faster
        detail::check_cuda("K3DeviceModel", "cudaDeviceSynchronize", cudaDeviceSynchronize());
      }
      weights_.layers.push_back(std::move(layer));
      report();
    }
  }

  template <class Report>
  void upload(Report&& report) {
    DecoderWeights host = host_.weights;
    Pending pending;
    const auto collect = [&](const std::string&, const auto& weight, const auto&, WeightRole) { pending.put(weight); };
    for_each_model_weight(host_.config, host, collect);
    for (LayerWeights& layer : host.layers) for_each_layer_weight(host_.config, layer.spec, layer, collect);
    place_all([&](const std::string&, auto& weight, const auto&, WeightRole) { weight = move(pending.next(weight)); },
              [&](size layer, size e) -> DeviceExpertWeights {
                const ExpertWeights expert = (*host.layers[layer].experts)[e];
                return {move(expert.w1), move(expert.w3), move(expert.w2)};
              },
              report);
  }

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
      bytes += detail::planned_bytes(unplaced(source, name, weight, shape));
    };
    DeviceDecoderWeights model;
    for_each_model_weight(config, model, add);
    for (const K3LayerSpec& spec : graph.layers) {
      DeviceLayerWeights layer;
      for_each_layer_weight(config, spec, layer, add);
      if (spec.mlp != MlpKind::LatentMoe) continue;
      const size before = bytes;
      expert_matrices(config.moe, expert_prefix(spec.index, 0), add);
      bytes = before + config.moe.n_routed * (bytes - before);
    }
    return bytes;
  }

  K3CpuModel host_;
  DeviceBuffer<unsigned char> memory_;
  size used_ = 0;
  DeviceDecoderWeights weights_;
};

}  // namespace k3
