// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/argmax.cuh>
#include <k3/cuda/dense_mlp.cuh>
#include <k3/cuda/mix_routed_experts.cuh>
#include <k3/cuda/mla_decode_token.cuh>
#include <k3/cuda/pinned_buffer.cuh>
#include <k3/cuda/stream.cuh>
#include <k3/geometry/decoder_geometry.hpp>

namespace k3 {

/// The chosen experts on their way to the host, where experts are streamed.
struct StreamedChoice {
  PinnedBuffer<id> ids;             // [R, k]
  DeviceEvent there;                // ids are
  std::vector<size> experts, seen;  // for ExpertCache::take_rows

  StreamedChoice(size rows, size k, size n_routed) : ids(rows * k) {
    experts.reserve(detail::smaller(rows * k, n_routed));
    seen.reserve(n_routed);
  }
};

/// What is computed for an observer only. Allocated by the first pass that has one.
template <precision P>
struct DeviceObserved {
  DeviceBuffer<float> mixed;                  // [R, hidden]
  DeviceBuffer<float> probs;                  // [R, snapshots + 1]
  DeviceBuffer<typename P::activation> part;  // [R, hidden]
};

/// All memory of a device decoder's pass for up to `max_rows` rows (R below), allocated once. Buffers of parts that the
/// model does not have stay empty. Throws cuda_error where there is no memory.
template <precision P>
struct DeviceWorkspace {
  using Activation = typename P::activation;

  template <decoder_geometry G>
  DeviceWorkspace(G g, const K3Graph& graph, size max_rows, size max_logit_rows, size capacity)
      : rows(max_rows),
        snapshot_count(k3::snapshot_count(graph.layers.size(), g.attn_res_block_size)),
        host_tokens(rows),
        host_slots(rows),
        host_argmax(max_logit_rows),
        host_positions(rows),
        host_status(rows),
        host_logit_status(max_logit_rows),
        tokens(rows),
        slots(rows),
        argmax(max_logit_rows),
        positions(rows),
        status(rows),
        logit_status(max_logit_rows),
        stream(rows * g.hidden),
        snapshots(detail::checked_product("DeviceWorkspace", "max_rows", snapshot_count, rows * g.hidden)),
        normed(rows * g.hidden),
        logits(max_logit_rows * g.vocab),
        argmax_work(max_logit_rows) {
    const bool kda = graph.kda_count() > 0, latent_attention = graph.mla_count() > 0;
    bool dense = false, experts = false;
    for (const K3LayerSpec& layer : graph.layers) (layer.mlp == MlpKind::Dense ? dense : experts) = true;
    const size kda_out = kda ? kda_width(g.kda) : 0, mla_out = latent_attention ? mla_v_width(g.mla) : 0;
    make(mixer_gate, detail::larger(kda_out, mla_out));
    make(mixer_out, detail::larger(kda_out, mla_out));
    if (kda) make_kda(g.kda);
    if (latent_attention) make_mla(g.mla, capacity);
    if (dense) mlp.emplace(size{g.dense_intermediate}, rows);
    if (experts) make_experts(g.moe);
  }

  size rows, snapshot_count;

  // The batch, and what came of it.
  PinnedBuffer<id> host_tokens, host_slots, host_argmax;  // [R], [R], [wanted rows]
  PinnedBuffer<size> host_positions;                      // [R]
  PinnedBuffer<unsigned> host_status, host_logit_status;  // [R], [wanted rows]
  DeviceBuffer<id> tokens, slots, argmax;                 // [R], [R], [wanted rows]
  DeviceBuffer<size> positions;                           // [R]
  DeviceBuffer<unsigned> status, logit_status;            // [R], [wanted rows]

  // Between sublayers.
  DeviceBuffer<Activation> stream;     // [R, hidden]
  DeviceBuffer<Activation> snapshots;  // [snapshots, R, hidden]
  DeviceBuffer<Activation> normed;     // [R, hidden]: a sublayer's input
  DeviceBuffer<float> logits;          // [wanted rows, vocab]
  DeviceArgmaxWorkspace argmax_work;

  // Mixers.
  DeviceBuffer<Activation> mixer_gate, mixer_out;    // [R, the wider of H*D and h*v]
  DeviceBuffer<Activation> qkv, z, beta;             // [R, 3*H*D], [R, H*D], [R, H]
  DeviceBuffer<Activation> low_rank, gate_low_rank;  // [R, D]: f_a's output, and g_a's
  DeviceBuffer<Activation> q_low_rank, q_normed;     // [R, q_lora]
  DeviceBuffer<Activation> q, kv_a;                  // [R, h*(nope+rope)], [R, kv_lora+rope]
  std::optional<MlaDeviceWorkspace<P>> mla;

  // MLPs.
  std::optional<DeviceMlpWorkspace<P>> mlp;
  DeviceBuffer<float> router_logits, forced_logits;  // [R, experts]; the second for an ablation
  DeviceBuffer<float> topk_weights;                  // [R, k]
  DeviceBuffer<id> topk_ids;                         // [R, k]
  DeviceBuffer<Activation> latent, combined;         // [R, latent]
  DeviceBuffer<Activation> shared_mid, shared_out;   // [R, shared width], [R, hidden]
  std::optional<MoeDeviceWorkspace<P>> moe;
  std::optional<StreamedChoice> choice;

  std::optional<DeviceObserved<P>> observed;

  /// Makes what an observer is shown.
  void observe(size hidden) {
    if (observed) return;
    observed.emplace(DeviceObserved<P>{DeviceBuffer<float>(rows * hidden),
                                       DeviceBuffer<float>(rows * (snapshot_count + 1)),
                                       DeviceBuffer<Activation>(rows * hidden)});
  }

 private:
  template <class T>
  void make(DeviceBuffer<T>& buffer, size width) {
    buffer = DeviceBuffer<T>(detail::checked_product("DeviceWorkspace", "max_rows", rows, width));
  }
  template <kda_geometry G>
  void make_kda(G g) {
    make(qkv, kda_conv_channels(g));
    make(z, kda_width(g));
    make(beta, g.heads);
    make(low_rank, g.head_dim);
    make(gate_low_rank, g.head_dim);
  }
  template <mla_geometry G>
  void make_mla(G g, size capacity) {
    make(q_low_rank, g.q_lora_rank);
    make(q_normed, g.q_lora_rank);
    make(q, mla_q_width(g));
    make(kv_a, mla_cache_width(g));
    mla.emplace(g, rows, capacity);
  }
  template <latent_moe_geometry G>
  void make_experts(G g) {
    make(router_logits, g.n_routed);
    make(topk_weights, g.top_k);
    make(topk_ids, g.top_k);
    make(latent, moe_expert_width(g));
    make(combined, moe_expert_width(g));
    make(shared_mid, moe_shared_width(g));
    make(shared_out, g.hidden);
    moe.emplace(g, rows);
    choice.emplace(rows, size{g.top_k}, size{g.n_routed});
  }
};

}  // namespace k3
