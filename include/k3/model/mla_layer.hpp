// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/precision.hpp>
#include <k3/model/output_projection.hpp>
#include <k3/model/weights.hpp>
#include <k3/ops/linear.hpp>
#include <k3/ops/mla_decode_token.hpp>
#include <k3/ops/rms_norm.hpp>

namespace k3 {

/// Scratch of an MLA mixer for up to `max_rows` rows, allocated once.
template <precision P>
struct MlaLayerWorkspace {
  using Activation = typename P::activation;

  template <mla_geometry G>
  MlaLayerWorkspace(G g, size max_rows)
      : q_low_rank(length(max_rows, g.q_lora_rank)),
        q(length(max_rows, mla_q_width(g))),
        kv_a(length(max_rows, mla_cache_width(g))),
        gate(g.mla_use_output_gate ? length(max_rows, mla_v_width(g)) : 0),
        attended(length(max_rows, mla_v_width(g))),
        attention(g, max_rows) {}

  std::vector<Activation> q_low_rank, q, kv_a, gate, attended;
  MlaWorkspace<Activation, typename P::accumulator> attention;

 private:
  static size length(size rows, size width) {
    return detail::checked_length<Activation>("MlaLayerWorkspace", rows, width);
  }
};

/// The gated NoPE MLA mixer of a layer on R normed rows: q = W_qb rms(W_qa x) (or W_q x), [latent | key part] = W_kva x
/// appended to the cache, absorbed attention over it, out = W_o [ o sigmoid(W_g x) ]. Shapes: x [R, hidden], slots and
/// positions [R], out [R, hidden]. Each linear's output is rounded to the activation type. Checked by the caller.
/// Source: DeepSeek-V2's MLA as `kimi_linear` uses it, tensors `self_attn.*` of full-attention layers.
template <precision P, mla_geometry G>
void mla_layer(const host& exec, G g, const MlaWeights& weights, HostView<const typename P::activation, 2> x,
               HostView<const id, 1> slots, HostView<const size, 1> positions, const Ablation& ablation,
               const MlaKvView<typename P::activation>& kv, MlaLayerWorkspace<P>& scratch,
               HostView<typename P::activation, 2> out) {
  using Acc = typename P::accumulator;
  const size rows = x.extent(0);
  const auto q = view(scratch.q.data(), rows, mla_q_width(g));                // [R, h*(nope+rope)]
  const auto kv_a = view(scratch.kv_a.data(), rows, mla_cache_width(g));      // [R, kv_lora+rope]
  const auto attended = view(scratch.attended.data(), rows, mla_v_width(g));  // [R, h*v]
  HostView<typename P::activation, 2> gate{};

  if (g.q_lora_rank > 0) {
    const auto low_rank = view(scratch.q_low_rank.data(), rows, size{g.q_lora_rank});  // [R, q_lora]
    linear(exec, x, weights.q_a_proj, low_rank);
    rms_norm(exec, low_rank, weights.q_a_layernorm, static_cast<Acc>(g.norm_eps), low_rank);
    linear(exec, low_rank, weights.q_b_proj, q);
  } else {
    linear(exec, x, weights.q_proj, q);
  }
  linear(exec, x, weights.kv_a_proj_with_mqa, kv_a);
  if (g.mla_use_output_gate) {
    gate = view(scratch.gate.data(), rows, mla_v_width(g));  // [R, h*v]
    linear(exec, x, weights.g_proj, gate);
  }
  mla_decode_token(exec, g, q, kv_a, weights.kv_a_layernorm, weights.kv_b_proj, gate, slots, positions, kv,
                   scratch.attention, attended);
  output_projection(exec, ablation, attended, weights.o_proj, out);
}

}  // namespace k3
