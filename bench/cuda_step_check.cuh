// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda_step_model.cuh"

// Values of a timed layer computed again in double.
namespace k3::bench {

/// What the layer that a pass took last left in its workspace: the router's logits and the experts' weighted sum of one
/// row, against the row's normed input.
inline void check_experts(Report& report, const DeviceWorkspace<Bf16>& work, size layer, size row) {
  const LatentMoeConfig g = LatentMoeConfig::production();
  const std::string prefix = layer_prefix(layer) + "block_sparse_moe.";
  const auto product = [&](const char* name, size rows, const std::vector<double>& x) {
    return random_product(RandomWeights::weight(prefix + name, x.size()), rows, x);
  };
  const std::vector<double> x = device_row(work.normed.data() + row * g.hidden, g.hidden);
  report.compare("a layer's router", device_row(work.router_logits.data() + row * g.n_routed, g.n_routed),
                 product("gate.weight", g.n_routed, x), 1e-5);
  std::vector<double> latent = product("routed_expert_down_proj.weight", g.latent, x);
  for (double& value : latent) value = rounded(value);
  const std::vector<double> weights = device_row(work.topk_weights.data() + row * g.top_k, g.top_k);
  std::vector<id> ids(g.top_k);
  work.topk_ids.copy_to(ids.data(), row * g.top_k, g.top_k);
  const std::vector<size> channels = sampled(g.latent);
  std::vector<double> want(channels.size(), 0.0);
  for (size j = 0; j < g.top_k; ++j) {
    const std::string expert = expert_prefix(layer, static_cast<size>(ids[j]));
    const auto source = [&](const char* name) { return RandomMxfp4{RandomWeights::seed(expert + name)}; };
    const RandomMxfp4 matrices[3] = {source("w1"), source("w3"), source("w2")};
    const std::vector<double> y = random_expert(g, matrices, latent, channels);
    for (size c = 0; c < want.size(); ++c) want[c] += weights[j] * y[c];
  }
  report.compare("a layer's experts", device_row(work.combined.data() + row * g.latent, g.latent, channels), want,
                 1e-2);
}

}  // namespace k3::bench
