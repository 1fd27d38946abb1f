// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <k3/io/checkpoint_layout.hpp>

/// How a model is to be run.
struct MemoryQuestion {
  std::size_t context = 4096, batch = 1, gpus = 1;
  std::string precision = "bf16";
};

/// Bytes needed on each of the GPUs, or on the host where there is one.
struct MemoryNeed {
  std::uint64_t trunk = 0;      ///< weights of no expert
  std::uint64_t experts = 0;    ///< all routed experts
  std::uint64_t kda = 0;        ///< KDA states and convolution windows of the batch
  std::uint64_t mla = 0;        ///< MLA latents of the batch at full context
  std::uint64_t workspace = 0;  ///< of a pass of max(32, batch) rows, about
  std::uint64_t one_expert = 0, experts_of_token = 0;

  std::uint64_t total() const { return trunk + experts + kda + mla + workspace; }
};

/// Weights as the checkpoint stores them, spread over the GPUs by heads, columns and experts; what cannot be spread
/// (inner projections shared by all heads, norms, routers, the embedding, the MLA latents) is there on each.
inline MemoryNeed memory_need(const k3::K3Config& config, const k3::CheckpointForm& form, const MemoryQuestion& how) {
  const std::uint64_t gpus = how.gpus;
  const auto share = [&](std::uint64_t bytes) { return (bytes + gpus - 1) / gpus; };
  const auto whole = [](const std::string& name) {
    for (const char* part : {"norm", "_res_proj", "q_a_proj", "kv_a_proj", "f_a_proj", "g_a_proj",
                             "block_sparse_moe.gate.", "routed_expert_down_proj", "embed_tokens"})
      if (name.find(part) != name.npos) return true;
    return false;
  };
  MemoryNeed need;
  k3::for_each_planned_tensor(config, form, [&](const k3::PlannedTensor& tensor) {
    if (tensor.expert)
      need.experts += tensor.bytes();
    else
      need.trunk += whole(tensor.name) ? tensor.bytes() : share(tensor.bytes());
  });
  const k3::K3Graph graph = k3::K3Graph::from_config(config);
  const std::uint64_t layers = graph.layers.size() - config.first_k_dense_replace;
  if (layers > 0) need.one_expert = need.experts / layers / config.moe.n_routed;
  need.experts_of_token = need.one_expert * config.moe.top_k * layers;
  need.experts = share(need.experts);
  const std::uint64_t activation = how.precision == "bf16" ? 2 : how.precision == "fp64" ? 8 : 4;
  const std::uint64_t state = how.precision == "fp64" ? 8 : 4;
  need.kda = graph.kda_count() * how.batch *
             share(k3::kda_state_elements(config.kda) * state + k3::kda_conv_elements(config.kda) * activation);
  need.mla = graph.mla_count() * how.batch * how.context * k3::mla_cache_width(config.mla) * activation;
  const std::uint64_t rows = how.batch > 32 ? how.batch : 32;
  const std::uint64_t snapshots = k3::snapshot_count(graph.layers.size(), config.attn_res_block_size);
  need.workspace = rows *
                       ((snapshots + 5) * config.hidden_size + 9 * k3::kda_width(config.kda) / gpus +
                        config.moe.top_k * (k3::moe_expert_width(config.moe) + 2 * config.moe.expert_hidden)) *
                       state +
                   how.batch * config.vocab_size * state;
  return need;
}
