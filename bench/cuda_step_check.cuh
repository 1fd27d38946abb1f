// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include <k3/core/mxfp4.hpp>
#include <k3/formula/activation.hpp>

#include "cuda_step_model.cuh"

// Values of a timed layer computed again on the host in double. Weights are made again from their seeds, so that
// nothing of the device's memory (which may hold the experts in another order) goes into the reference but the layer's
// input.
namespace k3::bench {

inline double random_element(const RandomWeight& w, size i) {
  return static_cast<double>(static_cast<float>(bf16(uniform(w.seed, i, w.range, w.offset))));
}

/// out = W x, W [rows, x.size()] a bf16 weight of this name.
inline std::vector<double> random_product(const std::string& name, size rows, const std::vector<double>& x) {
  const RandomWeight w = RandomWeights::weight(name, x.size());
  std::vector<double> out(rows, 0.0);
  for (size row = 0; row < rows; ++row)
    for (size k = 0; k < x.size(); ++k) out[row] += random_element(w, row * x.size() + k) * x[k];
  return out;
}

/// out = W x, W [rows, x.size()] MXFP4.
inline std::vector<double> random_mxfp4_product(const std::string& name, size rows, const std::vector<double>& x) {
  const std::uint64_t seed = RandomWeights::seed(name);
  const auto byte = [](std::uint64_t of, size i) {
    return static_cast<std::uint8_t>(mixed_bits((of << 40) + i / 8) >> i % 8 * 8);
  };
  const size columns = x.size();
  double values[16];
  for (std::uint8_t code = 0; code < 16; ++code) values[code] = static_cast<double>(e2m1_value(code));
  std::vector<double> out(rows, 0.0);
  for (size row = 0; row < rows; ++row)
    for (size group = 0; group < columns; group += mxfp4_group) {
      double sum = 0;
      for (size k = group; k < group + mxfp4_group; k += 16) {
        std::uint64_t codes = mixed_bits((seed << 40) + (row * columns + k) / 16);
        for (size j = 0; j < 16; ++j, codes >>= 4) sum += values[codes & 15] * x[k + j];
      }
      const unsigned scale = byte(seed + 1, (row * columns + group) / mxfp4_group) & RandomWeights::scale_mask;
      out[row] += sum * static_cast<double>(e8m0_value(static_cast<std::uint8_t>(scale + RandomWeights::lowest_scale)));
    }
  return out;
}

inline double rounded(double value) { return static_cast<double>(static_cast<float>(bf16(static_cast<float>(value)))); }

/// |got - want| / |want|.
inline double relative_l2(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (size i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

template <class T>
std::vector<double> device_row(const DeviceBuffer<T>& buffer, size row, size width) {
  std::vector<T> values(width);
  buffer.copy_to(values.data(), row * width, width);
  std::vector<double> result(width);
  for (size i = 0; i < width; ++i) result[i] = static_cast<double>(static_cast<float>(values[i]));
  return result;
}

inline void require_close(const char* what, double error, double bound) {
  std::printf("  %s: relative error %.2e (bound %.0e)\n", what, error, bound);
  if (!(error <= bound)) throw invalid_argument("bench", what, std::to_string(error), std::to_string(bound));
}

/// What the layer that a pass took last left in its workspace: the router's logits and the experts' weighted sum of one
/// row, against the row's normed input.
inline void check_experts(const DeviceWorkspace<Bf16>& work, size layer, size row) {
  const LatentMoeConfig g = LatentMoeConfig::production();
  const std::string prefix = layer_prefix(layer) + "block_sparse_moe.";
  check_cuda(cudaDeviceSynchronize());
  const std::vector<double> x = device_row(work.normed, row, g.hidden);
  require_close("router",
                relative_l2(device_row(work.router_logits, row, g.n_routed),
                            random_product(prefix + "gate.weight", g.n_routed, x)),
                1e-5);
  std::vector<double> latent = random_product(prefix + "routed_expert_down_proj.weight", g.latent, x);
  for (double& value : latent) value = rounded(value);
  const std::vector<double> weights = device_row(work.topk_weights, row, g.top_k);
  std::vector<id> ids(g.top_k);
  work.topk_ids.copy_to(ids.data(), row * g.top_k, g.top_k);
  std::vector<double> want(g.latent, 0.0);
  for (size j = 0; j < g.top_k; ++j) {
    const std::string expert = expert_prefix(layer, static_cast<size>(ids[j]));
    const std::vector<double> gate = random_mxfp4_product(expert + "w1", g.expert_hidden, latent);
    const std::vector<double> up = random_mxfp4_product(expert + "w3", g.expert_hidden, latent);
    std::vector<double> mid(g.expert_hidden);
    for (size i = 0; i < mid.size(); ++i)
      mid[i] = rounded(situ_glu(gate[i], up[i], static_cast<double>(g.activation.beta),
                                static_cast<double>(*g.activation.linear_beta)));
    const std::vector<double> y = random_mxfp4_product(expert + "w2", g.latent, mid);
    for (size i = 0; i < y.size(); ++i) want[i] += weights[j] * y[i];
  }
  require_close("experts", relative_l2(device_row(work.combined, row, g.latent), want), 1e-2);
}

}  // namespace k3::bench
