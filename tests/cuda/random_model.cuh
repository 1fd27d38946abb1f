// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <memory>

#include <k3/cuda/device_model.cuh>

namespace k3::test {

template <class T>
__global__ void fill_normal_range(T* to, size count, unsigned seed, float middle, float half_width) {
  const size step = size{gridDim.x} * blockDim.x;
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < count; i += step) {
    unsigned bits = static_cast<unsigned>(i ^ i >> 32) * 2654435761u + seed * 0x9e3779b9u;
    bits = (bits ^ (bits >> 15)) * 2246822519u;
    bits ^= bits >> 13;
    to[i] = static_cast<T>(middle + half_width * (static_cast<float>(bits >> 8) / 8388608.0f - 1));
  }
}

/// Whether the program has kernels for this GPU: of one that has none CUDA says so at the first use.
inline cudaError_t code_for_this_device() {
  cudaFuncAttributes attributes;
  const cudaError_t code = cudaFuncGetAttributes(&attributes, fill_normal_range<float>);
  detail::ignore_cuda(code);
  return code;
}

/// Numbers around `middle`, made on the device: the same for the same seed. (Zeros where no kernel can run.)
template <class T>
void fill(T* to, size count, unsigned seed, float middle, float half_width) {
  if (count == 0) return;
  static const bool any_code = code_for_this_device() == cudaSuccess;
  if (!any_code) return detail::check_cuda("fill", "cudaMemset", cudaMemset(to, 0, count * sizeof(T)));
  fill_normal_range<<<1024, 256>>>(to, count, seed, middle, half_width);
  detail::check_launch("fill");
  detail::check_cuda("fill", "cudaDeviceSynchronize", cudaDeviceSynchronize());
}

/// A model's weights in device memory, made there: as the released checkpoint stores them, of about 1 / sqrt(columns),
/// vectors near 1. Of each layer's experts only a few exist; the others are the same memory under other ids.
class RandomModel {
 public:
  K3Config config;
  K3Graph graph;
  DeviceDecoderWeights weights;

  RandomModel(const K3Config& c, size physical_experts) : config(c), graph(K3Graph::from_config(c)) {
    const auto make = [&](const std::string& name, auto& weight, const auto& shape, WeightRole role) {
      const bool single = role == WeightRole::conv || role == WeightRole::a_log || name.find("bias") != name.npos ||
                          name.find("o_norm") != name.npos;
      single ? put<float>(weight, shape) : put<bf16>(weight, shape);
    };
    for_each_model_weight(config, weights, make);
    for (const K3LayerSpec& spec : graph.layers) {
      DeviceLayerWeights layer;
      layer.spec = spec;
      for_each_layer_weight(config, spec, layer, make);
      if (spec.mlp == MlpKind::LatentMoe) layer.experts = experts(physical_experts);
      weights.layers.push_back(std::move(layer));
    }
  }

 private:
  template <class T>
  T* numbers(size count, float middle, float half_width) {
    memory_.emplace_back(count * sizeof(T), false);
    T* const data = reinterpret_cast<T*>(memory_.back().data());
    fill(data, count, ++seed_, middle, half_width);
    return data;
  }
  template <class T>
  void put(AnyVector<MemorySpace::device>& weight, const size (&shape)[1]) {
    weight = device_view(static_cast<const T*>(numbers<T>(shape[0], 1.0f, 0.2f)), shape[0]);
  }
  template <class T>
  void put(AnyMatrix<MemorySpace::device>& weight, const size (&shape)[2]) {
    const float scale = 1.7f / std::sqrt(static_cast<float>(shape[1]));
    weight = device_view(static_cast<const T*>(numbers<T>(shape[0] * shape[1], 0.0f, scale)), shape[0], shape[1]);
  }
  AnyMatrix<MemorySpace::device> packed(size rows, size columns) {
    // Scale bytes of 127 - log2(sqrt(columns)) - 2 and the one above: numbers of about 1 / sqrt(columns).
    const float scale = 125.0f - std::round(std::log2(static_cast<float>(columns)) / 2);
    const std::uint8_t* const codes = numbers<std::uint8_t>(rows * columns / 2, 128.0f, 127.0f);
    const std::uint8_t* const scales = numbers<std::uint8_t>(rows * columns / mxfp4_group, scale + 0.9f, 0.9f);
    return Mxfp4Matrix<MemorySpace::device>{device_view(codes, rows, columns / 2),
                                            device_view(scales, rows, columns / mxfp4_group)};
  }
  ExpertTable experts(size physical) {
    const LatentMoeConfig& g = config.moe;
    std::vector<DeviceExpertWeights> few, all;
    for (size e = 0; e < physical; ++e)
      few.push_back({packed(g.expert_hidden, moe_expert_width(g)), packed(g.expert_hidden, moe_expert_width(g)),
                     packed(moe_expert_width(g), g.expert_hidden)});
    for (size e = 0; e < g.n_routed; ++e) all.push_back(few[e % physical]);
    return ExpertTable(g, all);
  }

  std::vector<DeviceBuffer<unsigned char>> memory_;
  unsigned seed_ = 0;
};

/// A config of three layers (KDA and dense; KDA and experts; MLA and experts) of given geometries, a snapshot before
/// each.
inline K3Config three_layers(const DecoderGeometry& g) {
  K3Config c;
  c.hidden_size = g.hidden, c.vocab_size = g.vocab, c.intermediate_size = g.dense_intermediate;
  c.first_k_dense_replace = 1, c.attn_res_block_size = 1, c.max_position_embeddings = 1 << 20;
  c.rms_norm_eps = g.rms_norm_eps;
  c.mixers = {MixerKind::Kda, MixerKind::Kda, MixerKind::Mla};
  c.kda = g.kda, c.mla = g.mla, c.moe = g.moe;
  return c;
}

}  // namespace k3::test
