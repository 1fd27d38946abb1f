// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/device_decoder.cuh>
#include <k3/geometry/presets.hpp>

#include "cuda_harness.cuh"

// The released model cut to seven layers, its weights random numbers made on the device, and what its parts must read.
namespace k3::bench {

/// Layer 0 with its dense MLP, then six layers with all 896 experts, every fourth layer MLA: the released order.
inline K3Config depth_cut_config() {
  using released = kimi_k3::Decoder;
  K3Config config;
  config.hidden_size = released::hidden;
  config.vocab_size = released::vocab;
  config.intermediate_size = released::dense_intermediate;
  config.first_k_dense_replace = 1;
  config.attn_res_block_size = released::attn_res_block_size;
  config.max_position_embeddings = size{1} << 20;
  config.rms_norm_eps = released::rms_norm_eps;
  config.kda = KdaConfig::production();
  config.mla = MlaConfig::production();
  config.moe = LatentMoeConfig::production();
  for (size layer = 0; layer < 7; ++layer) config.mixers.push_back(layer % 4 == 3 ? MixerKind::Mla : MixerKind::Kda);
  return config;
}

/// The whole model's graph, from which a pass's memory is sized so that as many snapshots fit as its last layers mix.
inline K3Graph whole_graph() {
  K3Config config = depth_cut_config();
  while (config.mixers.size() < 92)
    config.mixers.push_back(config.mixers.size() % 4 == 3 ? MixerKind::Mla : MixerKind::Kda);
  config.mixers.push_back(MixerKind::Mla);
  return K3Graph::from_config(config);
}

/// The source of K3DeviceModel: numbers with which every product keeps the magnitude of its input, in the types of the
/// released checkpoint.
struct RandomWeights {
  static bool contains(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

  static ElementType type(const std::string& name) {
    if (contains(name, ".experts.")) return ElementType::mxfp4;
    for (const char* part : {"conv1d", "A_log", "dt_bias", "o_norm", "e_score_correction_bias"})
      if (contains(name, part)) return ElementType::f32;
    return ElementType::bf16;
  }

  static std::uint64_t seed(const std::string& name) {
    std::uint64_t hash = 1469598103934665603ull;
    for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    return (hash ^ hash >> 24 ^ hash >> 48) & 0xffffff;
  }

  /// Of a weight whose rows have `columns` elements.
  static RandomWeight weight(const std::string& name, size columns) {
    if (contains(name, "norm") || contains(name, "layernorm")) return {seed(name), 0.2f, 1};
    if (contains(name, "embed_tokens")) return {seed(name), 1.7f, 0};
    if (contains(name, "e_score_correction_bias")) return {seed(name), 0.02f, 0};
    if (contains(name, "A_log") || contains(name, "dt_bias")) return {seed(name), 1, 0};
    if (contains(name, "conv1d")) return {seed(name), 0.7f, 0};
    return {seed(name), std::sqrt(3.0f / static_cast<float>(columns)), 0};
  }

  template <size Rank>
  void fill(const std::string& name, const AnyView<Rank, MemorySpace::device>& w) const {
    const size count = detail::element_count(w);
    const RandomWeight random = weight(name, w.extents[Rank - 1]);
    void* const data = const_cast<void*>(w.data);
    if (w.type == ElementType::mxfp4) {
      fill_mxfp4(data, const_cast<std::uint8_t*>(w.scale), count, random.seed);
    } else if (w.type == ElementType::f32) {
      fill_uniform(static_cast<float*>(data), count, random.seed, random.range, random.offset);
    } else {
      fill_uniform(static_cast<bf16*>(data), count, random.seed, random.range, random.offset);
    }
  }
};

/// Bytes that a step of `rows` sequences reads and writes at least, without routed experts: each weight, state and
/// cached position once.
struct StepBytes {
  K3Config config = depth_cut_config();

  static constexpr double expert = 17547264;

  static auto adding(double& bytes) {
    return [&bytes](const std::string& name, auto&, const auto& shape, WeightRole) {
      size count = 1;
      for (const size extent : shape) count *= extent;
      bytes += static_cast<double>(count) * (RandomWeights::type(name) == ElementType::f32 ? 4 : 2);
    };
  }

  double layer(const K3LayerSpec& spec, size rows, double context) const {
    double bytes = 0;
    DeviceLayerWeights unused;
    for_each_layer_weight(config, spec, unused, adding(bytes));
    const auto sequences = static_cast<double>(rows);
    if (spec.mixer == MixerKind::Mla)
      return bytes + sequences * context * static_cast<double>(mla_cache_width(config.mla)) * sizeof(bf16);
    return bytes + sequences * 2 *
                       static_cast<double>(kda_state_elements(config.kda) * sizeof(float) +
                                           kda_conv_elements(config.kda) * sizeof(bf16));
  }

  double step(size rows, double context) const {
    double bytes = 0;
    DeviceDecoderWeights unused;
    for_each_model_weight(config, unused, adding(bytes));
    // Of the embedding only the tokens' rows.
    bytes -= static_cast<double>((config.vocab_size - rows) * config.hidden_size * sizeof(bf16));
    for (const K3LayerSpec& spec : K3Graph::from_config(config).layers) bytes += layer(spec, rows, context);
    return bytes;
  }
};

/// An observer that counts the distinct experts of each layer, on average over the passes it sees.
struct ExpertCounter {
  double distinct = 0;
  size layers = 0;

  template <class Values>
  void operator()(const char* name, size, const Values& values) {
    if constexpr (std::same_as<typename Values::value_type, id>) {
      if (std::strcmp(name, "topk_ids") != 0) return;
      std::vector<id> ids(values.elements());
      check_cuda(cudaDeviceSynchronize());
      check_cuda(cudaMemcpy(ids.data(), values.data, ids.size() * sizeof(id), cudaMemcpyDeviceToHost));
      std::sort(ids.begin(), ids.end());
      distinct += static_cast<double>(std::unique(ids.begin(), ids.end()) - ids.begin());
      ++layers;
    }
  }
  double mean() const { return layers ? distinct / static_cast<double>(layers) : 0; }
};

}  // namespace k3::bench
