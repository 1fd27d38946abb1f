// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/attnres_norm.cuh>
#include <k3/cuda/device_model.cuh>
#include <k3/cuda/embed_tokens.cuh>
#include <k3/cuda/host_mixer.cuh>
#include <k3/cuda/kda_decode_token.cuh>
#include <k3/cuda/rms_norm.cuh>
#include <k3/cuda/sigmoid_topk.cuh>
#include <k3/model/decoder.hpp>

namespace k3 {

/// One pass over the model for the rows whose tokens, slots and positions lie in a workspace: embed, layer by layer,
/// head. It only launches: all it does is ordered on the stream, allocates nothing and waits for nothing (but for
/// mixers on the host), and may be captured. An observer sees what Decoder's sees, as views of device memory that hold
/// their values once the stream has got there; its work on that stream comes before the rest of the pass.
template <precision P, decoder_geometry G, class Observer = NoObserver>
class DevicePass {
 public:
  using Activation = typename P::activation;
  using Vector = AnyVector<MemorySpace::device>;
  static constexpr bool observed = !std::same_as<std::remove_cv_t<Observer>, NoObserver>;

  /// `host_model`: for mixers that run on the host; `cache`: where experts are streamed, which makes each layer wait
  /// until the host knows the chosen ones and their reads are done. With an observer, makes what it is shown where
  /// `work` has none yet.
  DevicePass(const gpu& exec, G geometry, size rows, DeviceWorkspace<P>& work, Observer& observe,
             const Ablation& ablation = {}, const K3CpuModel* host_model = nullptr, ExpertCache* cache = nullptr)
      : exec_(exec),
        geometry_(geometry),
        rows_(rows),
        work_(work),
        observe_(observe),
        ablation_(ablation),
        host_model_(host_model),
        cache_(cache) {
    if constexpr (observed) work.observe(geometry.hidden);
  }

  void embed(const AnyMatrix<MemorySpace::device>& table) {
    const auto stream = rows_of(work_.stream, geometry_.hidden);
    embed_tokens(exec_, work_.tokens.view(rows_), table, stream, slots(), statuses());
    observe_("embed", size{0}, stream);
  }
  void layer(DeviceLayerCache<P>& cache, const DeviceLayerWeights& weights);
  /// The final mix and norm of all rows, then the head of the wanted ones (in ascending order) and their arg-max.
  void head(const DeviceDecoderWeights& weights, const std::vector<size>& wanted);

 private:
  template <class T>
  auto rows_of(const DeviceBuffer<T>& buffer, size width) const {
    return buffer.view(rows_, width);
  }
  DeviceView<const id, 1> slots() const { return work_.slots.view(rows_); }
  DeviceView<unsigned, 1> statuses() const { return work_.status.view(rows_); }
  /// What every sublayer's last linear does with its output.
  LinearAddOptions<Activation> adding() const {
    LinearAddOptions<Activation> add;
    if constexpr (observed) add.part = rows_of(work_.observed->part, geometry_.hidden);
    return add;
  }

  void norm_input(const Vector& res_norm, const Vector& res_proj, const Vector& norm, const char* probs_name,
                  size index);
  void kda(typename DeviceHybridCache<P>::Kda& state, const BasicKdaWeights<MemorySpace::device>& w,
           const LinearAddOptions<Activation>& add);
  void mla(typename DeviceHybridCache<P>::Mla& kv, const BasicMlaWeights<MemorySpace::device>& w,
           const LinearAddOptions<Activation>& add);
  void experts(const DeviceLayerWeights& layer, LinearAddOptions<Activation> add);
  enum class ExpertInputs { all, router, others };
  void project_experts(const BasicLatentMoeWeights<MemorySpace::device>& w, ExpertInputs which);
  bool end_shared_experts(const BasicLatentMoeWeights<MemorySpace::device>& w);
  void choose_experts(const DeviceLayerWeights& layer);
  void mix_experts(const DeviceLayerWeights& layer, size first, size end);
  void stream_experts(const DeviceLayerWeights& layer);

  gpu exec_;
  [[no_unique_address]] G geometry_;
  size rows_, snapshots_ = 0;
  DeviceWorkspace<P>& work_;
  Observer& observe_;
  Ablation ablation_;
  const K3CpuModel* host_model_;
  ExpertCache* cache_;
};

template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::layer(DeviceLayerCache<P>& cache, const DeviceLayerWeights& layer) {
  const size index = layer.spec.index, hidden = geometry_.hidden;
  norm_input(layer.self_attention_res_norm, layer.self_attention_res_proj, layer.input_layernorm, "attn_res_probs",
             index);
  // Where a block starts, the stream as it is becomes a snapshot and the sublayer's output the new stream.
  LinearAddOptions<Activation> add = adding();
  if (starts_block(index, geometry_.attn_res_block_size)) {
    add.replace = true;
    add.snapshot = device_view(work_.snapshots.data() + snapshots_++ * work_.rows * hidden, rows_, hidden);
  }
  if (auto* state = std::get_if<typename DeviceHybridCache<P>::Kda>(&cache))
    kda(*state, layer.kda, add);
  else if (auto* kv = std::get_if<typename DeviceHybridCache<P>::Mla>(&cache))
    mla(*kv, layer.mla, add);
  else
    detail::host_mixer<P>(exec_, geometry_, *host_model_, index, cache, rows_, work_, ablation_, add);
  observe_("attn_out", index, add.part);

  norm_input(layer.mlp_res_norm, layer.mlp_res_proj, layer.post_attention_layernorm, "mlp_res_probs", index);
  const auto stream = rows_of(work_.stream, hidden);
  if (layer.spec.mlp == MlpKind::LatentMoe)
    experts(layer, adding());
  else
    dense_mlp_add(exec_, geometry_.activation, rows_of(work_.normed, hidden), layer.mlp.gate_proj, layer.mlp.up_proj,
                  layer.mlp.down_proj, *work_.mlp, stream, adding());
  observe_("ffn_out", index, add.part);
  observe_("residual", index, stream);
}

/// normed = rms(mix(stream, snapshots)): a sublayer's input.
template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::norm_input(const Vector& res_norm, const Vector& res_proj, const Vector& norm,
                                            const char* probs_name, size index) {
  const size hidden = geometry_.hidden;
  const float eps = geometry_.rms_norm_eps;
  const auto stream = rows_of(work_.stream, hidden);
  const auto normed = rows_of(work_.normed, hidden);
  if (geometry_.attn_res_block_size == 0) return rms_norm(exec_, stream, norm, eps, normed);
  AttnResNormOptions options{ablation_.attnres_mix, {}, {}};
  if constexpr (observed) {
    options.mixed = rows_of(work_.observed->mixed, hidden);
    options.probs = rows_of(work_.observed->probs, snapshots_ + 1);
  }
  const auto snapshots = device_view(work_.snapshots.data(), work_.snapshot_count, work_.rows, hidden)
                             .slice(0, 0, snapshots_)
                             .slice(1, 0, rows_);  // [snapshots, R, hidden]
  options.before_product = true;
  attnres_norm(exec_, snapshots, stream, res_norm, res_proj, eps, norm, eps, normed, options);
  observe_(probs_name, index, options.probs);
  observe_("mixed", index, options.mixed);
}

template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::kda(typename DeviceHybridCache<P>::Kda& state,
                                     const BasicKdaWeights<MemorySpace::device>& w,
                                     const LinearAddOptions<Activation>& add) {
  const auto g = geometry_.kda;
  const size width = kda_width(g);
  const bool full_rank = g.use_full_rank_gate;
  const auto x = rows_of(work_.normed, geometry_.hidden);
  const auto qkv = rows_of(work_.qkv, kda_conv_channels(g));            // [R, 3*H*D]
  const auto low_rank = rows_of(work_.low_rank, g.head_dim);            // [R, D]
  const auto gate_low_rank = rows_of(work_.gate_low_rank, g.head_dim);  // [R, D]
  const auto z = rows_of(work_.z, width);                               // [R, H*D]
  const auto beta = rows_of(work_.beta, g.heads);                       // [R, H]
  const auto gate = rows_of(work_.mixer_gate, width);                   // [R, H*D]
  const auto out = rows_of(work_.mixer_out, width);                     // [R, H*D]
  projections(
      exec_, x,
      {projection(w.q_proj, qkv.slice(1, 0, width)), projection(w.k_proj, qkv.slice(1, width, width)),
       projection(w.v_proj, qkv.slice(1, 2 * width, width)), projection(w.f_a_proj, low_rank),
       projection(w.b_proj, beta), full_rank ? projection(w.g_proj, gate) : projection(w.g_a_proj, gate_low_rank)});
  linear(exec_, low_rank, w.f_b_proj, z);
  if (!full_rank) linear(exec_, gate_low_rank, w.g_b_proj, gate);
  kda_decode_fused(exec_, g, qkv, KdaConvWeights<AnyMatrix<MemorySpace::device>>{w.q_conv1d, w.k_conv1d, w.v_conv1d}, z,
                   w.A_log, w.dt_bias, beta, gate, w.o_norm, geometry_.rms_norm_eps, slots(), state.view(), out,
                   statuses());
  linear_add(exec_, out, w.o_proj, rows_of(work_.stream, geometry_.hidden), add);
}

template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::mla(typename DeviceHybridCache<P>::Mla& kv,
                                     const BasicMlaWeights<MemorySpace::device>& w,
                                     const LinearAddOptions<Activation>& add) {
  const auto g = geometry_.mla;
  const bool ranked = g.q_lora_rank > 0;
  const auto x = rows_of(work_.normed, geometry_.hidden);
  const auto q_low_rank = rows_of(work_.q_low_rank, g.q_lora_rank);  // [R, q_lora]
  const auto q = rows_of(work_.q, mla_q_width(g));                   // [R, h*(nope+rope)]
  const auto kv_a = rows_of(work_.kv_a, mla_cache_width(g));         // [R, kv_lora+rope]
  const auto out = rows_of(work_.mixer_out, mla_v_width(g));         // [R, h*v]
  DeviceView<Activation, 2> gate{};                                  // [R, h*v]
  const Projection query = ranked ? projection(w.q_a_proj, q_low_rank) : projection(w.q_proj, q);
  const Projection latent = projection(w.kv_a_proj_with_mqa, kv_a);
  if (g.mla_use_output_gate) {
    gate = rows_of(work_.mixer_gate, mla_v_width(g));
    projections(exec_, x, {query, latent, projection(w.g_proj, gate)});
  } else {
    projections(exec_, x, {query, latent});
  }
  if (ranked) {
    const auto q_normed = rows_of(work_.q_normed, g.q_lora_rank);
    rms_norm(exec_, q_low_rank, w.q_a_layernorm, g.norm_eps, q_normed);
    linear(exec_, q_normed, w.q_b_proj, q);
  }
  mla_decode_token(exec_, g, q, kv_a, w.kv_a_layernorm, w.kv_b_proj, gate, slots(), work_.positions.view(rows_),
                   kv.view(), *work_.mla, out, statuses());
  linear_add(exec_, out, w.o_proj, rows_of(work_.stream, geometry_.hidden), add);
}

/// Everything that reads the sublayer's input, in one launch: router, latent and the shared experts' gated half. The
/// router goes first, alone, where the host waits for it.
template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::project_experts(const BasicLatentMoeWeights<MemorySpace::device>& w,
                                                 ExpertInputs which) {
  const auto g = geometry_.moe;
  const auto x = rows_of(work_.normed, g.hidden);
  const Projection router = projection(w.gate, rows_of(work_.router_logits, g.n_routed));
  Projection latent, shared;
  if (g.latent > 0) latent = projection(w.routed_expert_down_proj, rows_of(work_.latent, g.latent));
  if (g.n_shared > 0)
    shared = gated_projection(g.activation, w.shared_experts.gate_proj, w.shared_experts.up_proj,
                              rows_of(work_.shared_mid, moe_shared_width(g)));
  const bool both = g.latent > 0 && g.n_shared > 0, none = g.latent == 0 && g.n_shared == 0;
  const Projection& first = g.latent > 0 ? latent : shared;
  if (none && which == ExpertInputs::others) return;
  if (none || which == ExpertInputs::router) return projections(exec_, x, {router});
  if (which == ExpertInputs::all)
    return both ? projections(exec_, x, {router, latent, shared}) : projections(exec_, x, {router, first});
  return both ? projections(exec_, x, {latent, shared}) : projections(exec_, x, {first});
}

/// The shared experts' second half, where it does not end the sublayer; whether there was one.
template <precision P, decoder_geometry G, class Observer>
bool DevicePass<P, G, Observer>::end_shared_experts(const BasicLatentMoeWeights<MemorySpace::device>& w) {
  const auto g = geometry_.moe;
  if (g.latent == 0 || g.n_shared == 0) return false;
  linear(exec_, rows_of(work_.shared_mid, moe_shared_width(g)), w.shared_experts.down_proj,
         rows_of(work_.shared_out, g.hidden));
  return true;
}

/// Router and choice. The choice is made while the shared experts end, where all that reads the input is one launch.
template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::choose_experts(const DeviceLayerWeights& layer) {
  const auto g = geometry_.moe;
  const size index = layer.spec.index;
  const auto logits = rows_of(work_.router_logits, g.n_routed);  // [R, experts]
  const auto ids = rows_of(work_.topk_ids, g.top_k);             // [R, k]
  const auto weights = rows_of(work_.topk_weights, g.top_k);     // [R, k]
  project_experts(layer.moe, cache_ ? ExpertInputs::router : ExpertInputs::all);
  if (ablation_.force_expert)
    detail::check_cuda("DevicePass", "cudaMemcpyAsync",
                       cudaMemcpyAsync(logits.data, work_.forced_logits.data(), logits.elements() * sizeof(float),
                                       cudaMemcpyDeviceToDevice, exec_.stream));
  const bool logits_older = !cache_ && end_shared_experts(layer.moe);
  sigmoid_topk(exec_, logits, layer.moe.e_score_correction_bias, g.top_k, g.renormalize, g.routed_scaling_factor, ids,
               weights, slots(), statuses(), logits_older);
  observe_("router_logits", index, logits);
  observe_("topk_ids", index, ids);
  observe_("topk_weights", index, weights);
}

/// combined = the weighted sum of the chosen experts, for rows [first, end).
template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::mix_experts(const DeviceLayerWeights& layer, size first, size end) {
  const auto g = geometry_.moe;
  const auto part = [&](const auto& rows) { return rows.slice(0, first, end - first); };
  mix_routed_experts(exec_, g, part(g.latent > 0 ? rows_of(work_.latent, g.latent) : rows_of(work_.normed, g.hidden)),
                     part(rows_of(work_.topk_ids, g.top_k)), part(rows_of(work_.topk_weights, g.top_k)), layer.experts,
                     *work_.moe, part(rows_of(work_.combined, moe_expert_width(g))), part(slots()), part(statuses()));
}

/// The same where experts come when they are needed: as many rows at once as their experts have room for. (A row's bits
/// do not depend on the others.)
template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::stream_experts(const DeviceLayerWeights& layer) {
  const size k = geometry_.moe.top_k;
  StreamedChoice& choice = *work_.choice;
  {
    const detail::BesideCaptures beside;
    choice.there.wait();
  }
  for (size first = 0; first < rows_;) {
    const size end =
        cache_->take_rows(choice.ids.data(), k, work_.host_slots.data(), first, rows_, choice.experts, choice.seen);
    ExpertCache::Use use = cache_->fetch(exec_, layer.spec.index, choice.experts);
    mix_experts(layer, first, end);
    use.end();
    first = end;
  }
}

template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::experts(const DeviceLayerWeights& layer, LinearAddOptions<Activation> add) {
  const auto g = geometry_.moe;
  const BasicLatentMoeWeights<MemorySpace::device>& w = layer.moe;
  const auto stream = rows_of(work_.stream, g.hidden);
  const auto latent = rows_of(work_.latent, moe_expert_width(g));      // [R, latent]
  const auto combined = rows_of(work_.combined, moe_expert_width(g));  // [R, latent]
  choose_experts(layer);
  if (cache_) {
    const auto ids = rows_of(work_.topk_ids, g.top_k);
    detail::check_cuda("DevicePass", "cudaMemcpyAsync",
                       cudaMemcpyAsync(work_.choice->ids.data(), ids.data, ids.elements() * sizeof(id),
                                       cudaMemcpyDeviceToHost, exec_.stream));
    work_.choice->there.record(exec_.stream);
    // What needs no routed expert is computed while they are read.
    project_experts(w, ExpertInputs::others);
    end_shared_experts(w);
    stream_experts(layer);
  } else {
    mix_experts(layer, 0, rows_);
  }
  if (g.latent == 0) {
    // The experts' sum is the routed output itself: the shared experts' linear ends the sublayer, one without columns
    // where there are none.
    add.other = combined;
    const auto shared_mid = rows_of(work_.shared_mid, moe_shared_width(g));  // [R, shared width]
    AnyMatrix<MemorySpace::device> down = w.shared_experts.down_proj;
    if (g.n_shared == 0) down = device_view(static_cast<const float*>(nullptr), g.hidden, size{0});
    return linear_add(exec_, shared_mid, down, stream, add);
  }
  if (g.use_norm) rms_norm(exec_, combined, w.routed_expert_norm, geometry_.rms_norm_eps, latent);
  if (g.n_shared > 0) add.other = rows_of(work_.shared_out, g.hidden);
  linear_add(exec_, g.use_norm ? latent : combined, w.routed_expert_up_proj, stream, add);
}

template <precision P, decoder_geometry G, class Observer>
void DevicePass<P, G, Observer>::head(const DeviceDecoderWeights& weights, const std::vector<size>& wanted) {
  const size count = wanted.size();
  if (count == 0) return;
  const size last = weights.layers.size();
  norm_input(weights.output_attn_res_norm, weights.output_attn_res_proj, weights.norm, "output_attn_res_probs", last);
  const auto normed = rows_of(work_.normed, geometry_.hidden);
  observe_("final_hidden", last, normed);
  const auto logits = work_.logits.view(count, geometry_.vocab);  // [wanted rows, vocab]
  for (size first = 0; first < count;) {
    size next = first + 1;  // wanted rows that follow each other are one product
    while (next < count && wanted[next] == wanted[next - 1] + 1) ++next;
    linear(exec_, normed.slice(0, wanted[first], next - first), weights.lm_head, logits.slice(0, first, next - first));
    first = next;
  }
  k3::argmax(exec_, logits, work_.argmax_work, work_.argmax.view(count), work_.logit_status.view(count));
}

}  // namespace k3
