// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>

#include <k3/geometry/decoder_geometry.hpp>
#include <k3/model/decoder_batch.hpp>
#include <k3/model/decoder_workspace.hpp>
#include <k3/model/k3_cpu_model.hpp>
#include <k3/ops/argmax.hpp>
#include <k3/ops/attnres_softmax_mix.hpp>
#include <k3/ops/embed_tokens.hpp>

namespace k3 {

/// Sees nothing. An observer is called as observe("layer.part", layer, view) with the inner values of a pass.
struct NoObserver {
  template <class V>
  void operator()(const char*, size, const V&) const {}
};

/// The decoder's schedule on the host, for one model and one precision; geometry fixed at compile time or read from the
/// config. All memory of a pass is allocated by the constructor. One Decoder serves one thread at a time; the model may
/// be shared. Per token, with p the running stream and B the snapshots:
///   x = mix(p, B); every `attn_res_block_size` layers: push p on B and empty p;  p += Mixer(rms(x));
///   x = mix(p, B);  p += FFN(rms(x));  after the last layer: logits = lm_head rms(mix(p, B)).
/// Without Attention Residuals x is p. Source: kimi-k3 graph, config.json.
template <precision P = Fp32, decoder_geometry G = DecoderGeometry>
class Decoder {
 public:
  using Activation = typename P::activation;
  using Accumulator = typename P::accumulator;

  /// `max_rows` rows a pass, of which `max_logit_rows` may ask for logits. Throws invalid_argument where a weight is
  /// absent or has another shape, or `geometry` is not the config's.
  Decoder(const host& exec, const K3CpuModel& model, size max_rows = 32, size max_logit_rows = 1,
          const Ablation& ablation = {})
    requires std::same_as<G, DecoderGeometry>
      : Decoder(exec, model, decoder_geometry_from(model.config), max_rows, max_logit_rows, ablation) {}

  Decoder(const host& exec, const K3CpuModel& model, G geometry, size max_rows, size max_logit_rows,
          const Ablation& ablation = {})
      : exec_(exec),
        model_(checked(model, geometry, max_rows, max_logit_rows, ablation)),
        geometry_(geometry),
        ablation_(ablation),
        max_rows_(max_rows),
        max_logit_rows_(max_logit_rows),
        shapes_(detail::layer_shapes(model.graph, model.config.kda, model.config.mla)),
        work_(geometry, model.graph, max_rows, max_logit_rows) {}

  const K3CpuModel& model() const { return model_; }
  size max_rows() const { return max_rows_; }
  size max_logit_rows() const { return max_logit_rows_; }

  /// A cache for this decoder's model.
  HybridCache<P> make_cache(size slots, size capacity) const {
    return HybridCache<P>(model_.graph, model_.config.kda, model_.config.mla, slots, capacity);
  }

  /// Takes the batch's tokens into their sequences and computes the wanted logits. Shapes, ids, slots, positions and
  /// capacity are checked first (invalid_argument, nothing changed), and that no pass of this decoder is running: an
  /// observer cannot start one. NaN found on the way is recorded: see status(). An exception from an expert source or
  /// an observer leaves the batch's sequences unusable until reset, restored or rolled back, and the wanted rows
  /// interrupted.
  template <class Observer = NoObserver>
  void forward(HybridCache<P>& cache, const DecoderBatch& batch, Observer&& observe = {}) {
    detail::require(!running_, "Decoder::forward", "the decoder", "in a pass", "no call by an observer of its own");
    detail::check_batch(batch, cache, shapes_, size{geometry_.vocab}, max_rows_, max_logit_rows_);
    load_rows(batch);
    running_ = true;
    try {
      run(cache, observe);
    } catch (...) {
      running_ = false;
      interrupt(cache);
      throw;
    }
    running_ = false;
    for (size row = 0; row < rows_; ++row) {
      const size slot = static_cast<size>(work_.slots[row]);
      cache.advance(slot, 1);
      if (work_.status[row] != RowStatus::ok) cache.invalidate(slot, work_.status[row], work_.fault_layer[row]);
    }
  }

  /// Logits of the last pass, [wanted rows, vocab], in the accumulator type: 0 for padding rows, NaN where the pass did
  /// not finish.
  HostView<const Accumulator, 2> logits() const {
    return view(static_cast<const Accumulator*>(work_.logits.data()), logit_count_, size{geometry_.vocab});
  }
  /// A copy of the logits of the wanted row `index`.
  std::vector<Accumulator> logits_row(size index) const {
    require_index("Decoder::logits_row", index);
    const auto row = logits()[index];
    return {row.data, row.data + row.extent(0)};
  }
  /// What became of the wanted row `index` of the last pass.
  RowStatus status(size index) const {
    require_index("Decoder::status", index);
    return work_.logit_status[index];
  }
  /// The layer in which NaN was found in the wanted row `index`: the one whose router met it, or the last for NaN
  /// logits; else `no_layer`.
  size fault_layer(size index) const {
    const RowStatus found = status(index);
    const bool nan = found == RowStatus::nan_router_logits || found == RowStatus::nan_logits;
    return nan ? work_.fault_layer[work_.logit_rows[index]] : no_layer;
  }
  /// The most likely token of the wanted row `index`; ties go to the lower id. Throws invalid_argument where the row is
  /// not ok.
  id argmax(size index) const {
    if (status(index) != RowStatus::ok)
      throw invalid_argument("Decoder", "logits of row " + std::to_string(index),
                             text(status(index), fault_layer(index)), "numbers");
    return work_.argmax[index];
  }

 private:
  void require_index(const char* operation, size index) const {
    detail::require(index < logit_count_, operation, "index", index, "below the number of wanted rows");
  }
  template <class T>
  auto rows_of(std::vector<T>& memory, size width) const {
    return view(memory.data(), rows_, width);
  }

  static const K3CpuModel& checked(const K3CpuModel& model, G geometry, size max_rows, size max_logit_rows,
                                   const Ablation& ablation);
  void load_rows(const DecoderBatch& batch);
  void interrupt(HybridCache<P>& cache);
  template <class Observer>
  void run(HybridCache<P>& cache, Observer& observe);
  template <class Observer>
  void run_layer(LayerCache<P>& cache, const LayerWeights& layer, Observer& observe);
  template <class Observer>
  void norm_input(const AnyVector<>& res_norm, const AnyVector<>& res_proj, const AnyVector<>& norm,
                  const char* probs_name, size layer, Observer& observe);
  void add_to_stream(bool empty);
  /// Rows whose status is new were found wrong in this layer.
  void note_faults(size layer) {
    for (size row = 0; row < rows_; ++row)
      if (work_.status[row] != RowStatus::ok && work_.fault_layer[row] == no_layer) work_.fault_layer[row] = layer;
  }
  template <class Observer>
  void head(Observer& observe);

  host exec_;
  const K3CpuModel model_;
  [[no_unique_address]] G geometry_;
  Ablation ablation_;
  detail::OwnedSize max_rows_, max_logit_rows_;
  bool running_ = false;
  size rows_ = 0, logit_count_ = 0, snapshots_ = 0;
  std::vector<detail::LayerShape> shapes_;
  DecoderWorkspace<P> work_;
};

template <precision P, decoder_geometry G>
const K3CpuModel& Decoder<P, G>::checked(const K3CpuModel& model, G geometry, size max_rows, size max_logit_rows,
                                         const Ablation& ablation) {
  check(model);
  detail::require(runtime_geometry(geometry) == decoder_geometry_from(model.config), "Decoder", "geometry",
                  "not the model's", "decoder_geometry_from(model.config)");
  detail::require(max_rows > 0 && max_rows < (size{1} << 31), "Decoder", "max_rows", max_rows,
                  "between 1 and 2^31 - 1");
  detail::require(max_logit_rows > 0 && max_logit_rows <= max_rows, "Decoder", "max_logit_rows", max_logit_rows,
                  "between 1 and max_rows");
  check(ablation, model.config, "Decoder");
  return model;
}

// Padding rows go no further than this: what follows sees only rows of sequences.
template <precision P, decoder_geometry G>
void Decoder<P, G>::load_rows(const DecoderBatch& batch) {
  rows_ = 0;
  logit_count_ = batch.logit_rows.extent(0);
  size next = 0;
  for (size row = 0; row < batch.tokens.extent(0); ++row) {
    const bool wanted = next < logit_count_ && batch.logit_rows(next) == row;
    const bool padding = batch.slots(row) == pad_slot;
    if (wanted) {
      work_.logit_status[next] = RowStatus::interrupted;  // until the pass is through
      work_.logit_rows[next++] = padding ? ~size{0} : rows_;
    }
    if (padding) continue;
    work_.tokens[rows_] = batch.tokens(row);
    work_.slots[rows_] = batch.slots(row);
    work_.positions[rows_] = batch.positions(row);
    work_.status[rows_] = RowStatus::ok;
    work_.fault_layer[rows_] = no_layer;
    ++rows_;
  }
}

// A pass that an exception ended has no results, and its sequences have taken an unknown part of their tokens.
template <precision P, decoder_geometry G>
void Decoder<P, G>::interrupt(HybridCache<P>& cache) {
  for (size row = 0; row < rows_; ++row) cache.invalidate(static_cast<size>(work_.slots[row]), RowStatus::interrupted);
  for (size i = 0; i < logit_count_ * geometry_.vocab; ++i)
    work_.logits[i] = std::numeric_limits<Accumulator>::quiet_NaN();
}

template <precision P, decoder_geometry G>
template <class Observer>
void Decoder<P, G>::run(HybridCache<P>& cache, Observer& observe) {
  snapshots_ = 0;
  embed_tokens(exec_, view(work_.tokens.data(), rows_), model_.weights.embed_tokens,
               rows_of(work_.stream, geometry_.hidden));
  observe("embed", size{0}, rows_of(work_.stream, geometry_.hidden));
  for (const LayerWeights& layer : model_.weights.layers) {
    if (ablation_.skip_layer == layer.spec.index) continue;
    run_layer(cache.layer(layer.spec.index), layer, observe);
  }
  head(observe);
}

template <precision P, decoder_geometry G>
template <class Observer>
void Decoder<P, G>::run_layer(LayerCache<P>& cache, const LayerWeights& layer, Observer& observe) {
  const size index = layer.spec.index, hidden = geometry_.hidden;
  const auto normed = rows_of(work_.normed, hidden);
  const auto part = rows_of(work_.part, hidden);
  const HostView<const id, 1> slots = view(work_.slots.data(), rows_);

  norm_input(layer.self_attention_res_norm, layer.self_attention_res_proj, layer.input_layernorm, "attn_res_probs",
             index, observe);
  const bool new_block = starts_block(index, geometry_.attn_res_block_size);
  if (new_block) {
    // The stream that enters the layer, before mixing, becomes a snapshot; the running sum starts anew.
    const size count = rows_ * hidden;
    Activation* const snapshot = work_.snapshots.data() + snapshots_++ * max_rows_ * hidden;
    for (size i = 0; i < count; ++i) snapshot[i] = work_.stream[i];
  }
  if (layer.spec.mixer == MixerKind::Kda) {
    kda_layer<P>(exec_, geometry_.kda, layer.kda, geometry_.rms_norm_eps, normed, slots, ablation_,
                 std::get<typename HybridCache<P>::Kda>(cache).view(), *work_.kda, part);
  } else {
    mla_layer<P>(exec_, geometry_.mla, layer.mla, normed, slots, view(work_.positions.data(), rows_), ablation_,
                 std::get<typename HybridCache<P>::Mla>(cache).view(), *work_.mla, part);
  }
  observe("attn_out", index, part);
  add_to_stream(new_block);

  norm_input(layer.mlp_res_norm, layer.mlp_res_proj, layer.post_attention_layernorm, "mlp_res_probs", index, observe);
  if (layer.spec.mlp == MlpKind::Dense) {
    dense_mlp(exec_, geometry_.activation, normed, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj,
              *work_.mlp, part);
  } else {
    latent_moe_forward(exec_, geometry_.moe, normed, layer.moe, *layer.experts,
                       static_cast<Accumulator>(geometry_.rms_norm_eps), *work_.moe, part,
                       {ablation_.force_expert, {}, view(work_.status.data(), rows_)});
    note_faults(index);
    observe("router_logits", index, work_.moe->router_logits());
    observe("topk_ids", index, work_.moe->topk_ids());
    observe("topk_weights", index, work_.moe->topk_weights());
  }
  observe("ffn_out", index, part);
  add_to_stream(false);
  observe("residual", index, rows_of(work_.stream, hidden));
}

/// normed = rms(mix(stream, snapshots)): a sublayer's input.
template <precision P, decoder_geometry G>
template <class Observer>
void Decoder<P, G>::norm_input(const AnyVector<>& res_norm, const AnyVector<>& res_proj, const AnyVector<>& norm,
                               const char* probs_name, size layer, Observer& observe) {
  const size hidden = geometry_.hidden;
  const auto stream = rows_of(work_.stream, hidden);
  const auto normed = rows_of(work_.normed, hidden);
  const auto eps = static_cast<Accumulator>(geometry_.rms_norm_eps);
  if (geometry_.attn_res_block_size == 0) return rms_norm(exec_, stream, norm, eps, normed);
  const auto mixed = rows_of(work_.mixed, hidden);
  const auto snapshots =
      view(static_cast<const Activation*>(work_.snapshots.data()), work_.snapshot_count, max_rows_, hidden)
          .slice(0, 0, snapshots_)
          .slice(1, 0, rows_);                                         // [snapshots, R, hidden]
  const auto probs = view(work_.probs.data(), rows_, snapshots_ + 1);  // [R, sources]
  attnres_mix(exec_, snapshots, stream, res_norm, res_proj, eps, ablation_.attnres_mix, mixed, probs);
  observe(probs_name, layer, probs);
  observe("mixed", layer, mixed);
  rms_norm(exec_, mixed, norm, eps, normed);
}

/// stream = part where the stream is empty, stream + part elsewhere, rounded to the activation type.
template <precision P, decoder_geometry G>
void Decoder<P, G>::add_to_stream(bool empty) {
  const size count = rows_ * geometry_.hidden;
  Activation* const stream = work_.stream.data();
  const Activation* const part = work_.part.data();
  if (empty)
    for (size i = 0; i < count; ++i) stream[i] = part[i];
  else
    for (size i = 0; i < count; ++i)
      stream[i] = static_cast<Activation>(static_cast<Accumulator>(stream[i]) + static_cast<Accumulator>(part[i]));
}

/// The final mix and norm of all rows, then the head of the wanted ones.
template <precision P, decoder_geometry G>
template <class Observer>
void Decoder<P, G>::head(Observer& observe) {
  if (logit_count_ == 0) return;
  const size hidden = geometry_.hidden, vocab = geometry_.vocab, last = model_.weights.layers.size();
  const DecoderWeights& weights = model_.weights;
  norm_input(weights.output_attn_res_norm, weights.output_attn_res_proj, weights.norm, "output_attn_res_probs", last,
             observe);
  observe("final_hidden", last, rows_of(work_.normed, hidden));
  for (size i = 0; i < logit_count_; ++i)
    for (size j = 0; j < hidden; ++j)
      work_.head_input[i * hidden + j] =
          work_.logit_rows[i] < rows_ ? work_.normed[work_.logit_rows[i] * hidden + j] : Activation(0.0f);
  const auto logits = view(work_.logits.data(), logit_count_, vocab);
  linear(exec_, view(work_.head_input.data(), logit_count_, hidden), weights.lm_head, logits);
  for (size i = 0; i < logit_count_; ++i) work_.logit_status[i] = RowStatus::ok;
  detail::argmax_rows(exec_, logits, view(work_.argmax.data(), logit_count_),
                      view(work_.logit_status.data(), logit_count_));
  for (size i = 0; i < logit_count_; ++i) {
    const size row = work_.logit_rows[i];
    if (row >= rows_) {
      work_.logit_status[i] = RowStatus::padding;
      continue;
    }
    // The first fault found names the row: NaN router logits end as NaN logits too.
    if (work_.status[row] == RowStatus::ok) work_.status[row] = work_.logit_status[i];
    work_.logit_status[i] = work_.status[row];
  }
  note_faults(last - 1);
}

}  // namespace k3
