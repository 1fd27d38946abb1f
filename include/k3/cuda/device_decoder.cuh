// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/attnres_norm.cuh>
#include <k3/cuda/device_hybrid_cache.cuh>
#include <k3/cuda/device_model.cuh>
#include <k3/cuda/device_workspace.cuh>
#include <k3/cuda/embed_tokens.cuh>
#include <k3/cuda/host_mixer.cuh>
#include <k3/cuda/kda_decode_token.cuh>
#include <k3/cuda/linear.cuh>
#include <k3/cuda/rms_norm.cuh>
#include <k3/cuda/sigmoid_topk.cuh>
#include <k3/model/decoder_batch.hpp>

namespace k3 {

/// Decoder on the device: the same batches, the same schedule, the same results. Between the token ids going in and the arg-max
/// coming out nothing leaves the device, allocates or waits; `argmax` and `logits` wait for what they return. A pass that
/// wants the logits of all its rows, a decode step, is captured into a CUDA graph the first time its number of rows is seen
/// (on a stream of the caller's own, with all mixers on the device) and replayed for as long as the cache stays the same.
/// Precision: Fp32 (for parity) and Bf16. Source: as Decoder.
template <precision P = Bf16, decoder_geometry G = DecoderGeometry>
class DeviceDecoder {
  static_assert(!std::same_as<typename P::accumulator, double>, "the device computes in float: use Fp32 or Bf16");

 public:
  using Activation = typename P::activation;
  using Accumulator = typename P::accumulator;

  /// `capacity`: positions of the longest cache this decoder will see. Throws as Decoder does; of the ablations,
  /// attnres_mix, force_expert and skip_layer are there.
  DeviceDecoder(const gpu& exec, const K3DeviceModel& model, size capacity, size max_rows = 32, size max_logit_rows = 1,
                const Ablation& ablation = {})
    requires std::same_as<G, DecoderGeometry>
      : DeviceDecoder(exec, model, decoder_geometry_from(model.config()), capacity, max_rows, max_logit_rows, ablation) {}

  DeviceDecoder(const gpu& exec, const K3DeviceModel& model, G geometry, size capacity, size max_rows,
                size max_logit_rows, const Ablation& ablation = {})
      : exec_(exec), model_(checked(model, geometry, max_rows, max_logit_rows, ablation)), geometry_(geometry),
        ablation_(ablation), max_rows_(max_rows), max_logit_rows_(max_logit_rows), capacity_(capacity),
        shapes_(detail::layer_shapes(model.host_model().graph, model.config().kda, model.config().mla)),
        work_(geometry, model.host_model().graph, max_rows, max_logit_rows, capacity) {
    if (ablation.force_expert && geometry.moe.n_routed > 0) {
      std::vector<float> forced(max_rows * geometry.moe.n_routed, 0.0f);
      for (size row = 0; row < max_rows; ++row) forced[row * geometry.moe.n_routed + *ablation.force_expert] = 8.0f;
      forced_logits_ = DeviceBuffer<float>(forced);
    }
  }
  DeviceDecoder(const DeviceDecoder&) = delete;
  DeviceDecoder& operator=(const DeviceDecoder&) = delete;
  ~DeviceDecoder() { drop_graphs(); }

  const K3CpuModel& model() const { return model_.host_model(); }
  size max_rows() const { return max_rows_; }
  size max_logit_rows() const { return max_logit_rows_; }

  /// A cache for this decoder's model and stream.
  DeviceHybridCache<P> make_cache(size slots, size capacity) const {
    return DeviceHybridCache<P>(exec_.stream, model().graph, model().config.kda, model().config.mla, slots, capacity);
  }

  /// Takes the batch's tokens into their sequences. Checked as Decoder::forward, before anything changes. Returns once the pass
  /// is on the stream (it first waits for the pass before it, whose results share its memory). The cache must outlive that.
  void forward(DeviceHybridCache<P>& cache, const DecoderBatch& batch) {
    finish();  // what the pass before found decides whether its sequences may go on
    detail::check_batch(batch, cache, shapes_, size{geometry_.vocab}, max_rows_, max_logit_rows_);
    detail::require(cache.capacity() <= capacity_, "DeviceDecoder::forward", "the cache's capacity", cache.capacity(),
                    capacity_);
    rows_ = batch.tokens.extent(0);
    logit_rows_.assign(batch.logit_rows.data, batch.logit_rows.data + batch.logit_rows.extent(0));
    for (size row = 0; row < rows_; ++row) {
      const bool padding = batch.slots(row) == pad_slot;
      work_.host_tokens[row] = padding ? 0 : batch.tokens(row);
      work_.host_slots[row] = batch.slots(row);
      work_.host_positions[row] = padding ? 0 : batch.positions(row);
    }
    const bool step = logit_rows_.size() == rows_;
    try {
      if (step && exec_.stream != nullptr && !cache.on_host()) replay(cache);
      else run(cache);
    } catch (...) {
      for (size row = 0; row < rows_; ++row)
        if (work_.host_slots[row] != pad_slot)
          cache.invalidate(static_cast<size>(work_.host_slots[row]), RowStatus::interrupted);
      logit_rows_.clear();
      throw;
    }
    pending_ = &cache;
    for (size row = 0; row < rows_; ++row)
      if (work_.host_slots[row] != pad_slot) cache.advance(static_cast<size>(work_.host_slots[row]), 1);
  }

  /// Logits of the last pass as a host matrix [wanted rows, vocab]; waits.
  std::vector<float> logits() {
    finish();
    std::vector<float> values(logit_rows_.size() * geometry_.vocab);
    if (!values.empty()) work_.logits.copy_to(values.data(), 0, values.size());
    return values;
  }
  /// The logits of the wanted row `index`; waits.
  std::vector<float> logits_row(size index) {
    require_index("DeviceDecoder::logits_row", index);
    std::vector<float> values(geometry_.vocab);
    work_.logits.copy_to(values.data(), index * geometry_.vocab, values.size());
    return values;
  }
  /// What became of the wanted row `index` of the last pass; waits.
  RowStatus status(size index) {
    require_index("DeviceDecoder::status", index);
    const unsigned row = work_.host_status[logit_rows_[index]];
    return static_cast<RowStatus>(row != 0 ? row : work_.host_logit_status[index]);
  }
  /// The most likely token of the wanted row `index`, as Decoder::argmax; waits.
  id argmax(size index) {
    if (status(index) != RowStatus::ok)
      throw invalid_argument("DeviceDecoder", "logits of row " + std::to_string(index), text(status(index)), "numbers");
    return work_.host_argmax[index];
  }

  /// Waits for the pass in flight and marks the sequences in which it found NaN.
  void finish() {
    if (!pending_) return;
    detail::check_cuda("DeviceDecoder", "cudaStreamSynchronize", cudaStreamSynchronize(exec_.stream));
    for (size row = 0; row < rows_; ++row) {
      const id slot = work_.host_slots[row];
      if (slot != pad_slot && work_.host_status[row] != 0)
        pending_->invalidate(static_cast<size>(slot), static_cast<RowStatus>(work_.host_status[row]));
    }
    for (size i = 0; i < logit_rows_.size(); ++i) {
      const id slot = work_.host_slots[logit_rows_[i]];
      if (slot != pad_slot && work_.host_status[logit_rows_[i]] == 0 && work_.host_logit_status[i] != 0)
        pending_->invalidate(static_cast<size>(slot), static_cast<RowStatus>(work_.host_logit_status[i]));
    }
    pending_ = nullptr;
  }

 private:
  struct Graph {
    size rows, cache;
    cudaGraphExec_t exec;
  };

  void drop_graphs() {
    for (Graph& graph : graphs_) static_cast<void>(cudaGraphExecDestroy(graph.exec));
    graphs_.clear();
  }
  static const K3DeviceModel& checked(const K3DeviceModel& model, G geometry, size max_rows, size max_logit_rows,
                                      const Ablation& ablation) {
    detail::require(runtime_geometry(geometry) == decoder_geometry_from(model.config()), "DeviceDecoder", "geometry",
                    "not the model's", "decoder_geometry_from(model.config())");
    detail::require(max_rows > 0, "DeviceDecoder", "max_rows", max_rows, "at least 1");
    detail::require(max_logit_rows > 0 && max_logit_rows <= max_rows, "DeviceDecoder", "max_logit_rows", max_logit_rows,
                    "between 1 and max_rows");
    check(ablation, model.host_model().graph.layers.size(), model.config().moe.n_routed, "DeviceDecoder");
    detail::require(ablation.o_proj_tp == 1, "DeviceDecoder", "ablation.o_proj_tp", ablation.o_proj_tp, "1 on a device");
    const LatentMoeConfig& moe = model.config().moe;
    detail::require(moe.latent > 0 || moe.n_shared > 0, "DeviceDecoder", "the experts", "without latent and shared experts",
                    "one of the two");
    return model;
  }

  void require_index(const char* operation, size index) {
    finish();
    detail::require(index < logit_rows_.size(), operation, "index", index, "below the number of wanted rows");
  }
  template <class T>
  auto rows_of(const DeviceBuffer<T>& buffer, size width) const { return buffer.view(rows_, width); }
  DeviceView<const id, 1> slots() const { return work_.slots.view(rows_); }
  DeviceView<unsigned, 1> statuses() const { return work_.status.view(rows_); }
  template <class T>
  void copy(T* to, const T* from, size count, cudaMemcpyKind kind) {
    if (count == 0) return;
    detail::check_cuda("DeviceDecoder", "cudaMemcpyAsync", cudaMemcpyAsync(to, from, count * sizeof(T), kind, exec_.stream));
  }

  void replay(DeviceHybridCache<P>& cache);
  void run(DeviceHybridCache<P>& cache);
  void run_layer(DeviceLayerCache<P>& cache, const DeviceLayerWeights& layer);
  void kda_mixer(typename DeviceHybridCache<P>::Kda& state, const DeviceLayerWeights& layer, const LinearAddOptions<Activation>& add);
  void mla_mixer(typename DeviceHybridCache<P>::Mla& kv, const DeviceLayerWeights& layer, const LinearAddOptions<Activation>& add);
  void experts(const DeviceLayerWeights& layer);
  void norm_input(const AnyVector<MemorySpace::device>& res_norm, const AnyVector<MemorySpace::device>& res_proj,
                  const AnyVector<MemorySpace::device>& norm);
  void head();

  gpu exec_;
  const K3DeviceModel& model_;
  [[no_unique_address]] G geometry_;
  Ablation ablation_;
  size max_rows_, max_logit_rows_, capacity_;
  size rows_ = 0, snapshots_ = 0;
  std::vector<size> logit_rows_;
  std::vector<detail::LayerShape> shapes_;
  DeviceWorkspace<P> work_;
  DeviceBuffer<float> forced_logits_;
  DeviceHybridCache<P>* pending_ = nullptr;
  std::vector<Graph> graphs_;
};

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::replay(DeviceHybridCache<P>& cache) {
  constexpr const char* operation = "DeviceDecoder";
  for (const Graph& graph : graphs_)
    if (graph.rows == rows_ && graph.cache == cache.identity())
      return detail::check_cuda(operation, "cudaGraphLaunch", cudaGraphLaunch(graph.exec, exec_.stream));
  // Graphs of another cache are of no use to this one, and that cache may be gone.
  if (!graphs_.empty() && graphs_.front().cache != cache.identity()) drop_graphs();
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t executable = nullptr;
  detail::check_cuda(operation, "cudaStreamBeginCapture", cudaStreamBeginCapture(exec_.stream, cudaStreamCaptureModeThreadLocal));
  try {
    run(cache);
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(exec_.stream, &captured));
    if (captured) static_cast<void>(cudaGraphDestroy(captured));
    throw;
  }
  detail::check_cuda(operation, "cudaStreamEndCapture", cudaStreamEndCapture(exec_.stream, &captured));
  const cudaError_t code = cudaGraphInstantiate(&executable, captured, 0);
  static_cast<void>(cudaGraphDestroy(captured));
  detail::check_cuda(operation, "cudaGraphInstantiate", code);
  graphs_.push_back({rows_, cache.identity(), executable});
  detail::check_cuda(operation, "cudaGraphLaunch", cudaGraphLaunch(executable, exec_.stream));
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::run(DeviceHybridCache<P>& cache) {
  snapshots_ = 0;
  copy(work_.tokens.data(), work_.host_tokens.data(), rows_, cudaMemcpyHostToDevice);
  copy(work_.slots.data(), work_.host_slots.data(), rows_, cudaMemcpyHostToDevice);
  copy(work_.positions.data(), work_.host_positions.data(), rows_, cudaMemcpyHostToDevice);
  const auto clear = [&](const DeviceBuffer<unsigned>& words) {
    detail::check_cuda("DeviceDecoder", "cudaMemsetAsync", cudaMemsetAsync(words.data(), 0, words.bytes(), exec_.stream));
  };
  clear(work_.status);
  clear(work_.logit_status);
  embed_tokens(exec_, work_.tokens.view(rows_), model_.weights().embed_tokens, rows_of(work_.stream, geometry_.hidden),
               slots(), statuses());
  for (const DeviceLayerWeights& layer : model_.weights().layers)
    if (ablation_.skip_layer != layer.spec.index) run_layer(cache.layer(layer.spec.index), layer);
  head();
  copy(work_.host_status.data(), work_.status.data(), rows_, cudaMemcpyDeviceToHost);
  copy(work_.host_logit_status.data(), work_.logit_status.data(), logit_rows_.size(), cudaMemcpyDeviceToHost);
  copy(work_.host_argmax.data(), work_.argmax.data(), logit_rows_.size(), cudaMemcpyDeviceToHost);
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::run_layer(DeviceLayerCache<P>& cache, const DeviceLayerWeights& layer) {
  const size index = layer.spec.index, hidden = geometry_.hidden;
  norm_input(layer.self_attention_res_norm, layer.self_attention_res_proj, layer.input_layernorm);
  // Where a block starts, the stream as it is becomes a snapshot and the sublayer's output the new stream.
  LinearAddOptions<Activation> add;
  if (starts_block(index, geometry_.attn_res_block_size)) {
    add.replace = true;
    add.snapshot = device_view(work_.snapshots.data() + snapshots_++ * max_rows_ * hidden, rows_, hidden);
  }
  if (auto* state = std::get_if<typename DeviceHybridCache<P>::Kda>(&cache)) kda_mixer(*state, layer, add);
  else if (auto* kv = std::get_if<typename DeviceHybridCache<P>::Mla>(&cache)) mla_mixer(*kv, layer, add);
  else
    detail::host_mixer<P>(exec_, geometry_, model(), index, cache, rows_, work_, ablation_, add);

  norm_input(layer.mlp_res_norm, layer.mlp_res_proj, layer.post_attention_layernorm);
  if (layer.spec.mlp == MlpKind::LatentMoe) return experts(layer);
  dense_mlp_add(exec_, geometry_.activation, rows_of(work_.normed, hidden), layer.mlp.gate_proj, layer.mlp.up_proj,
                layer.mlp.down_proj, *work_.mlp, rows_of(work_.stream, hidden));
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::kda_mixer(typename DeviceHybridCache<P>::Kda& state, const DeviceLayerWeights& layer,
                                    const LinearAddOptions<Activation>& add) {
  const auto g = geometry_.kda;
  const BasicKdaWeights<MemorySpace::device>& w = layer.kda;
  const size width = kda_width(g), d = g.head_dim;
  const auto x = rows_of(work_.normed, geometry_.hidden);
  const auto qkv = rows_of(work_.qkv, kda_conv_channels(g));
  const auto gate = rows_of(work_.mixer_gate, width);
  const bool full = g.use_full_rank_gate;
  projections(exec_, x,
              {projection(w.q_proj, qkv.slice(1, 0, width)), projection(w.k_proj, qkv.slice(1, width, width)),
               projection(w.v_proj, qkv.slice(1, 2 * width, width)), projection(w.f_a_proj, rows_of(work_.low_rank, d)),
               projection(w.b_proj, rows_of(work_.beta, g.heads)),
               full ? projection(w.g_proj, gate) : projection(w.g_a_proj, rows_of(work_.gate_low_rank, d))});
  linear(exec_, rows_of(work_.low_rank, d), w.f_b_proj, rows_of(work_.z, width));
  if (!full) linear(exec_, rows_of(work_.gate_low_rank, d), w.g_b_proj, gate);
  const auto out = rows_of(work_.mixer_out, width);
  kda_decode_fused(exec_, g, qkv, KdaConvWeights<AnyMatrix<MemorySpace::device>>{w.q_conv1d, w.k_conv1d, w.v_conv1d},
                   rows_of(work_.z, width), w.A_log, w.dt_bias, rows_of(work_.beta, g.heads), gate, w.o_norm,
                   geometry_.rms_norm_eps, slots(), state.view(), out, statuses());
  linear_add(exec_, out, w.o_proj, rows_of(work_.stream, geometry_.hidden), add);
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::mla_mixer(typename DeviceHybridCache<P>::Mla& kv, const DeviceLayerWeights& layer,
                                    const LinearAddOptions<Activation>& add) {
  const auto g = geometry_.mla;
  const BasicMlaWeights<MemorySpace::device>& w = layer.mla;
  const auto x = rows_of(work_.normed, geometry_.hidden);
  const auto q = rows_of(work_.q, mla_q_width(g));
  const auto kv_a = rows_of(work_.kv_a, mla_cache_width(g));
  const auto q_low_rank = rows_of(work_.q_low_rank, g.q_lora_rank);
  const bool ranked = g.q_lora_rank > 0;
  DeviceView<Activation, 2> gate{};
  const Projection query = ranked ? projection(w.q_a_proj, q_low_rank) : projection(w.q_proj, q);
  if (g.mla_use_output_gate) {
    gate = rows_of(work_.mixer_gate, mla_v_width(g));
    projections(exec_, x, {query, projection(w.kv_a_proj_with_mqa, kv_a), projection(w.g_proj, gate)});
  } else {
    projections(exec_, x, {query, projection(w.kv_a_proj_with_mqa, kv_a)});
  }
  if (ranked) {
    const auto q_normed = rows_of(work_.q_normed, g.q_lora_rank);
    rms_norm(exec_, q_low_rank, w.q_a_layernorm, g.norm_eps, q_normed);
    linear(exec_, q_normed, w.q_b_proj, q);
  }
  const auto out = rows_of(work_.mixer_out, mla_v_width(g));
  mla_decode_token(exec_, g, q, kv_a, w.kv_a_layernorm, w.kv_b_proj, gate, slots(), work_.positions.view(rows_), kv.view(),
                   *work_.mla, out, statuses());
  linear_add(exec_, out, w.o_proj, rows_of(work_.stream, geometry_.hidden), add);
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::experts(const DeviceLayerWeights& layer) {
  const auto g = geometry_.moe;
  const BasicLatentMoeWeights<MemorySpace::device>& w = layer.moe;
  const auto x = rows_of(work_.normed, g.hidden);
  const auto stream = rows_of(work_.stream, g.hidden);
  const auto logits = rows_of(work_.router_logits, g.n_routed);
  const auto latent = rows_of(work_.latent, moe_expert_width(g));
  const auto combined = rows_of(work_.combined, moe_expert_width(g));
  const auto ids = rows_of(work_.topk_ids, g.top_k);
  const auto weights = rows_of(work_.topk_weights, g.top_k);
  const auto shared_mid = rows_of(work_.shared_mid, moe_shared_width(g));
  const bool shared = g.n_shared > 0, has_latent = g.latent > 0;
  const auto& s = w.shared_experts;
  const Projection router = projection(w.gate, logits);
  if (shared && has_latent)
    projections(exec_, x, {router, projection(w.routed_expert_down_proj, latent), gated_projection(g.activation, s.gate_proj, s.up_proj, shared_mid)});
  else if (shared) projections(exec_, x, {router, gated_projection(g.activation, s.gate_proj, s.up_proj, shared_mid)});
  else projections(exec_, x, {router, projection(w.routed_expert_down_proj, latent)});
  if (ablation_.force_expert)
    copy(logits.data, static_cast<const float*>(forced_logits_.data()), logits.elements(), cudaMemcpyDeviceToDevice);
  sigmoid_topk(exec_, logits, w.e_score_correction_bias, g.top_k, g.renormalize, g.routed_scaling_factor, ids, weights, slots(), statuses());
  mix_routed_experts(exec_, g, has_latent ? latent : x, ids, weights, layer.experts, *work_.moe, combined, slots(), statuses());
  LinearAddOptions<Activation> add;
  if (!has_latent) {
    // The experts' sum is the routed output itself: the shared experts' linear ends the sublayer.
    add.other = combined;
    return linear_add(exec_, shared_mid, s.down_proj, stream, add);
  }
  auto up_in = combined;
  if (g.use_norm) {
    up_in = latent;
    rms_norm(exec_, combined, w.routed_expert_norm, geometry_.rms_norm_eps, latent);
  }
  if (shared) {
    const auto shared_out = rows_of(work_.shared_out, g.hidden);
    linear(exec_, shared_mid, s.down_proj, shared_out);
    add.other = shared_out;
  }
  linear_add(exec_, up_in, w.routed_expert_up_proj, stream, add);
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::norm_input(const AnyVector<MemorySpace::device>& res_norm,
                                     const AnyVector<MemorySpace::device>& res_proj,
                                     const AnyVector<MemorySpace::device>& norm) {
  const size hidden = geometry_.hidden;
  const auto stream = rows_of(work_.stream, hidden);
  const auto normed = rows_of(work_.normed, hidden);
  if (geometry_.attn_res_block_size == 0) return rms_norm(exec_, stream, norm, geometry_.rms_norm_eps, normed);
  const auto snapshots = device_view(work_.snapshots.data(), work_.snapshot_count, max_rows_, hidden)
                             .slice(0, 0, snapshots_)
                             .slice(1, 0, rows_);
  attnres_norm(exec_, snapshots, stream, res_norm, res_proj, geometry_.rms_norm_eps, norm, geometry_.rms_norm_eps, normed,
               {ablation_.attnres_mix, {}, {}});
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::head() {
  const size wanted = logit_rows_.size();
  if (wanted == 0) return;
  const DeviceDecoderWeights& w = model_.weights();
  norm_input(w.output_attn_res_norm, w.output_attn_res_proj, w.norm);
  const auto logits = work_.logits.view(wanted, geometry_.vocab);
  const auto normed = rows_of(work_.normed, geometry_.hidden);
  for (size first = 0; first < wanted;) {
    size count = 1;  // wanted rows that follow each other are one product
    while (first + count < wanted && logit_rows_[first + count] == logit_rows_[first] + count) ++count;
    linear(exec_, normed.slice(0, logit_rows_[first], count), w.lm_head, logits.slice(0, first, count));
    first += count;
  }
  k3::argmax(exec_, logits, work_.argmax_work, work_.argmax.view(wanted), work_.logit_status.view(wanted));
}

}  // namespace k3
