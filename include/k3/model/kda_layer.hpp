// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/precision.hpp>
#include <k3/model/output_projection.hpp>
#include <k3/model/weights.hpp>
#include <k3/ops/gated_rms_norm.hpp>
#include <k3/ops/kda_decode_token.hpp>
#include <k3/ops/kda_gate.hpp>
#include <k3/ops/linear.hpp>

namespace k3 {

/// Scratch of a KDA mixer for up to `max_rows` rows, allocated once.
template <precision P>
struct KdaWorkspace {
  using Activation = typename P::activation;
  using Accumulator = typename P::accumulator;

  template <kda_geometry G>
  KdaWorkspace(G g, size max_rows)
      : qkv(length<Activation>(max_rows, kda_conv_channels(g))),
        low_rank(length<Activation>(max_rows, g.head_dim)),
        z(length<Activation>(max_rows, kda_width(g))),
        gate(z.size()),
        normed(z.size()),
        beta(length<Activation>(max_rows, g.heads)),
        log_decay(length<Accumulator>(max_rows, kda_width(g))),
        core(log_decay.size()) {}

  std::vector<Activation> qkv, low_rank, z, gate, normed, beta;
  std::vector<Accumulator> log_decay, core;

 private:
  template <class T>
  static size length(size rows, size width) {
    return detail::checked_length<T>("KdaWorkspace", rows, width);
  }
};

/// The KDA mixer of a layer on R normed rows: projections, decay, recurrence, gated norm, output projection.
/// q, k, v = W x; g = gate(W_fb W_fa x); beta = W_b x; out = W_o [ o_norm(core) sigmoid(W_g x) ].
/// Shapes: x [R, hidden], slots [R] (several rows of a slot are consecutive tokens), out [R, hidden]. Each linear's
/// output is rounded to the activation type. Checked by the caller. Source: kimi_linear KDA, tensors `self_attn.*` of
/// KDA layers.
template <precision P, kda_geometry G>
void kda_layer(const host& exec, G g, const KdaWeights& weights, float norm_eps,
               HostView<const typename P::activation, 2> x, HostView<const id, 1> slots, const Ablation& ablation,
               const KdaStateView<typename P::state, typename P::activation>& state, KdaWorkspace<P>& scratch,
               HostView<typename P::activation, 2> out) {
  using Acc = typename P::accumulator;
  const size rows = x.extent(0), width = kda_width(g);
  const auto qkv = view(scratch.qkv.data(), rows, kda_conv_channels(g));        // [R, 3*H*D]
  const auto low_rank = view(scratch.low_rank.data(), rows, size{g.head_dim});  // [R, D]
  const auto z = view(scratch.z.data(), rows, width);                           // [R, H*D]
  const auto beta = view(scratch.beta.data(), rows, size{g.heads});             // [R, H]
  const auto gate = view(scratch.gate.data(), rows, width);                     // [R, H*D]
  const auto log_decay = view(scratch.log_decay.data(), rows, width);           // [R, H*D]
  const auto core = view(scratch.core.data(), rows, width);                     // [R, H*D]
  const auto normed = view(scratch.normed.data(), rows, width);                 // [R, H*D]

  linear(exec, x, weights.q_proj, qkv.slice(1, 0, width));
  linear(exec, x, weights.k_proj, qkv.slice(1, width, width));
  linear(exec, x, weights.v_proj, qkv.slice(1, 2 * width, width));
  linear(exec, x, weights.f_a_proj, low_rank);
  linear(exec, low_rank, weights.f_b_proj, z);
  linear(exec, x, weights.b_proj, beta);
  if (g.use_full_rank_gate) {
    linear(exec, x, weights.g_proj, gate);
  } else {
    linear(exec, x, weights.g_a_proj, low_rank);
    linear(exec, low_rank, weights.g_b_proj, gate);
  }
  kda_gate(exec, g, z, weights.A_log, weights.dt_bias, g.gate_lower_bound, log_decay);
  kda_decode_token(exec, g, qkv, KdaConvWeights{weights.q_conv1d, weights.k_conv1d, weights.v_conv1d}, log_decay, beta,
                   slots, state, core);
  gated_rms_norm(exec, g, core, gate, weights.o_norm, static_cast<Acc>(norm_eps), normed);
  output_projection(exec, ablation, normed, weights.o_proj, out);
}

}  // namespace k3
