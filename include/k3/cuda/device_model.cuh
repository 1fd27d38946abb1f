// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/buffer.cuh>
#include <k3/cuda/expert_table.cuh>
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
template <size Rank>
size data_bytes(const AnyView<Rank>& weight) {
  const size count = element_count(weight);
  switch (weight.type) {
    case ElementType::f32: return 4 * count;
    case ElementType::bf16: return 2 * count;
    case ElementType::mxfp4: return count / 2;
    default: throw invalid_argument("K3DeviceModel", "a weight", weight.type == ElementType::f64 ? "F64" : "absent", "F32, BF16 or MXFP4");
  }
}
template <size Rank>
size scale_bytes(const AnyView<Rank>& weight) {
  return weight.type == ElementType::mxfp4 ? element_count(weight) / mxfp4_group : 0;
}
inline size aligned_bytes(size bytes) { return (bytes + device_alignment - 1) / device_alignment * device_alignment; }
template <size Rank>
size planned_bytes(const AnyView<Rank>& weight) { return aligned_bytes(data_bytes(weight)) + aligned_bytes(scale_bytes(weight)); }

}  // namespace detail

/// A model's weights on the device, in their stored types, and the host model they came from (which keeps serving mixers that
/// run on the host). What the weights take is added up before the first byte is moved; where that is more than is free, the
/// constructor throws cuda_error, saying what is needed and what is there. Each expert is read, and so checked, on the way.
class K3DeviceModel {
 public:
  template <class Progress = NoUploadProgress>
  explicit K3DeviceModel(const K3CpuModel& model, Progress&& progress = {}) : host_(model) {
    check(model);
    const size needed = plan(model);
    size free = 0, total = 0;
    detail::check_cuda("K3DeviceModel", "cudaMemGetInfo", cudaMemGetInfo(&free, &total));
    if (needed > free)
      throw cuda_error("K3DeviceModel", "the memory plan", static_cast<int>(cudaErrorMemoryAllocation),
                       "the weights need " + std::to_string(needed) + " bytes, " + std::to_string(free) + " of " +
                           std::to_string(total) + " are free");
    memory_ = DeviceBuffer<unsigned char>(needed, false);
    const auto report = [&] { progress(used_, needed); };
    upload(report);
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
      bytes += layer.experts->size() * (detail::planned_bytes(expert.w1) + detail::planned_bytes(expert.w3) + detail::planned_bytes(expert.w2));
    }
    return bytes;
  }

 private:
  const unsigned char* copy(const void* data, size bytes) {
    detail::require(used_ + bytes <= memory_.count(), "K3DeviceModel", "the experts", "stored in different types", "stored alike");
    memory_.copy_from(static_cast<const unsigned char*>(data), used_, bytes);
    const unsigned char* result = memory_.data() + used_;
    used_ += detail::aligned_bytes(bytes);
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

  template <class Report>
  void upload(Report&& report) {
    DecoderWeights host = host_.weights;
    Pending pending;
    const auto collect = [&](const std::string&, const auto& weight, const auto&, WeightRole) { pending.put(weight); };
    const auto place = [&](const std::string&, auto& weight, const auto&, WeightRole) { weight = move(pending.next(weight)); };
    for_each_model_weight(host_.config, host, collect);
    for_each_model_weight(host_.config, weights_, place);
    if (host_.config.tie_word_embeddings) weights_.lm_head = weights_.embed_tokens;
    for (LayerWeights& layer : host.layers) {
      DeviceLayerWeights placed;
      placed.spec = layer.spec;
      for_each_layer_weight(host_.config, layer.spec, layer, collect);
      for_each_layer_weight(host_.config, layer.spec, placed, place);
      if (layer.experts) {
        std::vector<DeviceExpertWeights> experts(layer.experts->size());
        for (size e = 0; e < experts.size(); ++e) {
          const ExpertWeights expert = (*layer.experts)[e];
          experts[e] = {move(expert.w1), move(expert.w3), move(expert.w2)};
        }
        placed.experts = ExpertTable(host_.config.moe, experts);
      }
      weights_.layers.push_back(std::move(placed));
      report();
    }
  }

  K3CpuModel host_;
  DeviceBuffer<unsigned char> memory_;
  size used_ = 0;
  DeviceDecoderWeights weights_;
};

}  // namespace k3
