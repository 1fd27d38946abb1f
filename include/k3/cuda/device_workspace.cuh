// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/argmax.cuh>
#include <k3/cuda/buffer.cuh>
#include <k3/cuda/dense_mlp.cuh>
#include <k3/cuda/mix_routed_experts.cuh>
#include <k3/cuda/mla_decode_token.cuh>
#include <k3/geometry/decoder_geometry.hpp>

namespace k3 {

/// Page-locked host memory, which copies to and from the device need in order not to wait.
template <class T>
class PinnedBuffer {
 public:
  explicit PinnedBuffer(size count) {
    detail::check_cuda("PinnedBuffer", "cudaMallocHost",
                       cudaMallocHost(reinterpret_cast<void**>(&data_), (count ? count : 1) * sizeof(T)));
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer() { static_cast<void>(cudaFreeHost(data_)); }

  T* data() { return data_; }
  T& operator[](size i) { return data_[i]; }
  const T& operator[](size i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
};

/// All memory of a device decoder's pass for up to `max_rows` rows, allocated once.
template <precision P>
struct DeviceWorkspace {
  using Activation = typename P::activation;

  template <decoder_geometry G>
  DeviceWorkspace(G g, const K3Graph& graph, size max_rows, size max_logit_rows, size capacity)
      : rows(max_rows), snapshot_count(k3::snapshot_count(graph.layers.size(), g.attn_res_block_size)), host_tokens(rows),
        host_slots(rows), host_argmax(max_logit_rows), host_positions(rows), host_status(rows),
        host_logit_status(max_logit_rows), tokens(rows), slots(rows), positions(rows), status(rows),
        logit_status(max_logit_rows), argmax(max_logit_rows), stream(rows * g.hidden),
        snapshots(snapshot_count * rows * g.hidden), normed(rows * g.hidden), logits(max_logit_rows * g.vocab),
        argmax_work(max_logit_rows), has_kda(graph.kda_count() > 0), has_mla(graph.mla_count() > 0) {
    const size width = kda_width(g.kda);
    if (has_kda) {
      qkv = DeviceBuffer<Activation>(rows * kda_conv_channels(g.kda));
      low_rank = DeviceBuffer<Activation>(rows * g.kda.head_dim);
      gate_low_rank = DeviceBuffer<Activation>(rows * g.kda.head_dim);
      z = DeviceBuffer<Activation>(rows * width);
      beta = DeviceBuffer<Activation>(rows * g.kda.heads);
    }
    mixer_gate = DeviceBuffer<Activation>(rows * detail::larger(has_kda ? width : size{0}, has_mla ? mla_v_width(g.mla) : size{0}));
    mixer_out = DeviceBuffer<Activation>(mixer_gate.count());
    if (has_mla) {
      q_low_rank = DeviceBuffer<Activation>(rows * g.mla.q_lora_rank);
      q_normed = DeviceBuffer<Activation>(rows * g.mla.q_lora_rank);
      q = DeviceBuffer<Activation>(rows * mla_q_width(g.mla));
      kv_a = DeviceBuffer<Activation>(rows * mla_cache_width(g.mla));
      mla.emplace(g.mla, rows, capacity);
    }
    bool dense = false, experts = false;
    for (const K3LayerSpec& layer : graph.layers) (layer.mlp == MlpKind::Dense ? dense : experts) = true;
    if (dense) mlp.emplace(size{g.dense_intermediate}, rows);
    if (experts) {
      router_logits = DeviceBuffer<float>(rows * g.moe.n_routed);
      topk_ids = DeviceBuffer<id>(rows * g.moe.top_k);
      topk_weights = DeviceBuffer<float>(rows * g.moe.top_k);
      latent = DeviceBuffer<Activation>(rows * moe_expert_width(g.moe));
      combined = DeviceBuffer<Activation>(rows * moe_expert_width(g.moe));
      shared_mid = DeviceBuffer<Activation>(rows * moe_shared_width(g.moe));
      shared_out = DeviceBuffer<Activation>(rows * g.hidden);
      moe.emplace(g.moe, rows);
    }
  }

  size rows, snapshot_count;
  PinnedBuffer<id> host_tokens, host_slots, host_argmax;
  PinnedBuffer<size> host_positions;
  PinnedBuffer<unsigned> host_status, host_logit_status;
  DeviceBuffer<id> tokens, slots;
  DeviceBuffer<size> positions;
  DeviceBuffer<unsigned> status, logit_status;
  DeviceBuffer<id> argmax;
  DeviceBuffer<Activation> stream, snapshots, normed;
  DeviceBuffer<float> logits;
  DeviceArgmaxWorkspace argmax_work;
  bool has_kda, has_mla;
  DeviceBuffer<Activation> qkv, low_rank, gate_low_rank, z, beta, mixer_gate, mixer_out;
  DeviceBuffer<Activation> q_low_rank, q_normed, q, kv_a;
  DeviceBuffer<float> router_logits, topk_weights;
  DeviceBuffer<id> topk_ids;
  DeviceBuffer<Activation> latent, combined, shared_mid, shared_out;
  std::optional<MlaDeviceWorkspace<P>> mla;
  std::optional<DeviceMlpWorkspace<P>> mlp;
  std::optional<MoeDeviceWorkspace<P>> moe;
};

}  // namespace k3
