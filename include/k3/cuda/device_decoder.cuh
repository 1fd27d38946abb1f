// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>

#include <k3/cuda/device_hybrid_cache.cuh>
#include <k3/cuda/device_model.cuh>
#include <k3/cuda/device_pass.cuh>
#include <k3/cuda/device_workspace.cuh>
#include <k3/model/decoder_batch.hpp>

namespace k3 {

/// Decoder on the device: the same batches, the same schedule, the same results. Between the token ids going in and the
/// arg-max coming out nothing leaves the device, allocates or waits; `argmax` and `logits` wait for what they return. A
/// pass that wants the logits of all its rows, a decode step, is captured into a CUDA graph the first time its number
/// of rows is seen (not on the default stream, and with all mixers on the device) and replayed for as long as the
/// cache stays the same. With streamed experts (K3DeviceModel::place_experts) no pass is captured, and each layer waits
/// for the reads that it needs; an exception of the expert source leaves the batch's sequences interrupted. Precision:
/// Fp32 (for parity) and Bf16. Source: as Decoder.
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
      : DeviceDecoder(exec, model, decoder_geometry_from(model.config()), capacity, max_rows, max_logit_rows,
                      ablation) {}

  DeviceDecoder(const gpu& exec, const K3DeviceModel& model, G geometry, size capacity, size max_rows,
                size max_logit_rows, const Ablation& ablation = {})
      : exec_(exec),
        model_(checked(model, geometry, max_rows, max_logit_rows, ablation)),
        geometry_(geometry),
        ablation_(ablation),
        max_rows_(max_rows),
        max_logit_rows_(max_logit_rows),
        capacity_(capacity),
        shapes_(detail::layer_shapes(model.host_model().graph, model.config().kda, model.config().mla)),
        work_(workspace(geometry, model.host_model().graph, max_rows, max_logit_rows, capacity)) {
    if (!ablation.force_expert || geometry.moe.n_routed == 0) return;
    std::vector<float> forced(max_rows * geometry.moe.n_routed, 0.0f);
    for (size row = 0; row < max_rows; ++row) forced[row * geometry.moe.n_routed + *ablation.force_expert] = 8.0f;
    work_.forced_logits = DeviceBuffer<float>(forced);
  }
  DeviceDecoder(const DeviceDecoder&) = delete;
  DeviceDecoder& operator=(const DeviceDecoder&) = delete;
  ~DeviceDecoder() { drop_graphs(); }

  const K3CpuModel& model() const { return model_.host_model(); }
  size max_rows() const { return max_rows_; }
  size max_logit_rows() const { return max_logit_rows_; }
  /// Numbers of rows whose step has been captured for the cache in use; 0 where steps are launched directly.
  size captured_steps() const { return graphs_.size(); }

  /// A cache for this decoder's model and stream.
  DeviceHybridCache<P> make_cache(size slots, size capacity) const {
    return DeviceHybridCache<P>(exec_.stream, model().graph, model().config.kda, model().config.mla, slots, capacity);
  }

  /// Takes the batch's tokens into their sequences. Checked as Decoder::forward, before anything changes. Returns once
  /// the pass is on the stream (it first waits for the pass before it, whose results share its memory). The cache must
  /// outlive that. A pass with an observer (see DevicePass) is not captured, and the first one allocates. An error on
  /// the way (of CUDA, or thrown by the observer) leaves the batch's sequences unusable until reset, restored or rolled
  /// back, and the wanted rows interrupted.
  template <class Observer = NoObserver>
  void forward(DeviceHybridCache<P>& cache, const DecoderBatch& batch, Observer&& observe = {}) {
    constexpr bool observed = !std::same_as<std::remove_cvref_t<Observer>, NoObserver>;
    detail::require(!running_, "DeviceDecoder::forward", "the decoder", "in a pass",
                    "no call by an observer of its own");
    finish();  // what the pass before found decides whether its sequences may go on
    detail::check_batch(batch, cache, shapes_, size{geometry_.vocab}, max_rows_, max_logit_rows_);
    detail::require(model_.complete(), "DeviceDecoder::forward", "the model", "incomplete",
                    "one with its experts placed and not moved from");
    detail::require(cache.capacity() <= capacity_, "DeviceDecoder::forward", "the cache's capacity", cache.capacity(),
                    capacity_);
    if constexpr (observed) work_.observe(geometry_.hidden);  // allocates: before anything changes
    load_rows(batch);
    const bool step =
        logit_rows_.size() == rows_ && detail::capturable(exec_.stream) && !cache.on_host() && !model_.expert_cache();
    running_ = true;
    try {
      if (step && !observed)
        replay(cache);
      else
        run(cache, observe);
    } catch (...) {
      running_ = false;
      // What was launched before the error still reads the rows; it must end before another pass writes them.
      const detail::BesideCaptures beside;
      detail::ignore_cuda(cudaStreamSynchronize(exec_.stream));
      interrupt(cache);
      throw;
    }
    running_ = false;
    pending_ = &cache;
    for (size row = 0; row < rows_; ++row)
      if (work_.host_slots[row] != pad_slot) cache.advance(static_cast<size>(work_.host_slots[row]), 1);
  }

  /// Logits of the last pass as a host matrix [wanted rows, vocab], as Decoder::logits; waits.
  std::vector<float> logits() {
    finish();
    return fetch_logits(0, logit_rows_.size());
  }
  /// The logits of the wanted row `index`; waits.
  std::vector<float> logits_row(size index) {
    require_index("DeviceDecoder::logits_row", index);
    return fetch_logits(index, 1);
  }
  /// What became of the wanted row `index` of the last pass; waits.
  RowStatus status(size index) {
    require_index("DeviceDecoder::status", index);
    const size at = logit_rows_[index];
    const unsigned row = work_.host_status[at];
    if (row == 0 && work_.host_slots[at] == pad_slot) return RowStatus::padding;
    return static_cast<RowStatus>(row != 0 ? row : work_.host_logit_status[index]);
  }
  /// The most likely token of the wanted row `index`, as Decoder::argmax; waits.
  id argmax(size index) {
    if (status(index) != RowStatus::ok)
      throw invalid_argument("DeviceDecoder", "logits of row " + std::to_string(index), text(status(index)), "numbers");
    return work_.host_argmax[index];
  }

  /// Waits for the pass in flight and marks the sequences in which it found NaN, or all of them where it failed.
  void finish();

 private:
  struct Graph {
    size rows, cache;
    cudaGraphExec_t exec;
  };

  static const K3DeviceModel& checked(const K3DeviceModel& model, G geometry, size max_rows, size max_logit_rows,
                                      const Ablation& ablation);
  /// Says what the memory is for where there is too little.
  static DeviceWorkspace<P> workspace(G geometry, const K3Graph& graph, size max_rows, size max_logit_rows,
                                      size capacity) {
    try {
      return DeviceWorkspace<P>(geometry, graph, max_rows, max_logit_rows, capacity);
    } catch (const cuda_error& problem) {
      if (problem.code() != static_cast<int>(cudaErrorMemoryAllocation)) throw;
      throw cuda_error("DeviceDecoder",
                       "a workspace for passes of up to " + std::to_string(max_rows) + " rows, " +
                           std::to_string(max_logit_rows) + " with logits, of up to " + std::to_string(capacity) +
                           " positions",
                       problem.code(), problem.what());
    }
  }
  void require_index(const char* operation, size index) {
    finish();
    detail::require(index < logit_rows_.size(), operation, "index", index, "below the number of wanted rows");
  }
  void drop_graphs() {
    for (Graph& graph : graphs_) detail::ignore_cuda(cudaGraphExecDestroy(graph.exec));
    graphs_.clear();
  }
  /// The batch's sequences are somewhere between their tokens: no longer usable. The pass has no results.
  void interrupt(DeviceHybridCache<P>& cache) {
    interrupted_ = true;
    for (size row = 0; row < rows_; ++row) {
      work_.host_status[row] = static_cast<unsigned>(RowStatus::interrupted);
      if (work_.host_slots[row] != pad_slot)
        cache.invalidate(static_cast<size>(work_.host_slots[row]), RowStatus::interrupted);
    }
  }
  template <class T>
  void copy(T* to, const T* from, size count, cudaMemcpyKind kind) {
    if (count == 0) return;
    detail::check_cuda("DeviceDecoder", "cudaMemcpyAsync",
                       cudaMemcpyAsync(to, from, count * sizeof(T), kind, exec_.stream));
  }
  void clear(const DeviceBuffer<unsigned>& words) {
    detail::check_cuda("DeviceDecoder", "cudaMemsetAsync",
                       cudaMemsetAsync(words.data(), 0, words.bytes(), exec_.stream));
  }
  void wait() {
    const detail::BesideCaptures beside;
    detail::check_cuda("DeviceDecoder", "cudaStreamSynchronize", cudaStreamSynchronize(exec_.stream));
  }
  std::vector<float> fetch_logits(size first, size count) {
    std::vector<float> values(count * geometry_.vocab, std::numeric_limits<float>::quiet_NaN());
    if (interrupted_) return values;
    copy(values.data(), static_cast<const float*>(work_.logits.data()) + first * geometry_.vocab, values.size(),
         cudaMemcpyDeviceToHost);
    wait();
    return values;
  }

  void load_rows(const DecoderBatch& batch);
  void replay(DeviceHybridCache<P>& cache);
  cudaGraphExec_t capture(DeviceHybridCache<P>& cache);
  template <class Observer>
  void run(DeviceHybridCache<P>& cache, Observer& observe);

  gpu exec_;
  const K3DeviceModel& model_;
  [[no_unique_address]] G geometry_;
  Ablation ablation_;
  size max_rows_, max_logit_rows_, capacity_;
  bool running_ = false, interrupted_ = false;
  size rows_ = 0;
  std::vector<size> logit_rows_;
  std::vector<detail::LayerShape> shapes_;
  DeviceWorkspace<P> work_;
  DeviceHybridCache<P>* pending_ = nullptr;
  std::vector<Graph> graphs_;
};

template <precision P, decoder_geometry G>
const K3DeviceModel& DeviceDecoder<P, G>::checked(const K3DeviceModel& model, G geometry, size max_rows,
                                                  size max_logit_rows, const Ablation& ablation) {
  constexpr const char* operation = "DeviceDecoder";
  detail::require(runtime_geometry(geometry) == decoder_geometry_from(model.config()), operation, "geometry",
                  "not the model's", "decoder_geometry_from(model.config())");
  detail::require(max_rows > 0 && max_rows < (size{1} << 31), operation, "max_rows", max_rows,
                  "between 1 and 2^31 - 1");
  detail::require(max_logit_rows > 0 && max_logit_rows <= max_rows, operation, "max_logit_rows", max_logit_rows,
                  "between 1 and max_rows");
  check(ablation, model.config(), operation);
  detail::require(ablation.o_proj_tp == 1, operation, "ablation.o_proj_tp", ablation.o_proj_tp, "1 on a device");
  return model;
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::finish() {
  if (!pending_) return;
  DeviceHybridCache<P>& cache = *std::exchange(pending_, nullptr);
  try {
    wait();
  } catch (...) {
    interrupt(cache);
    throw;
  }
  const auto mark = [&](size row, unsigned word) {
    const id slot = work_.host_slots[row];
    if (slot != pad_slot && word != 0) cache.invalidate(static_cast<size>(slot), static_cast<RowStatus>(word));
  };
  // The first fault found names the row: NaN router logits end as NaN logits too.
  for (size i = 0; i < logit_rows_.size(); ++i) mark(logit_rows_[i], work_.host_logit_status[i]);
  for (size row = rows_; row-- > 0;) mark(row, work_.host_status[row]);
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::load_rows(const DecoderBatch& batch) {
  interrupted_ = false;
  rows_ = batch.tokens.extent(0);
  logit_rows_.assign(batch.logit_rows.data, batch.logit_rows.data + batch.logit_rows.extent(0));
  for (size row = 0; row < rows_; ++row) {
    const bool padding = batch.slots(row) == pad_slot;
    work_.host_tokens[row] = padding ? 0 : batch.tokens(row);
    work_.host_slots[row] = batch.slots(row);
    work_.host_positions[row] = padding ? 0 : batch.positions(row);
  }
}

template <precision P, decoder_geometry G>
void DeviceDecoder<P, G>::replay(DeviceHybridCache<P>& cache) {
  // Graphs of another cache are of no use to this one, and that cache may be gone.
  if (!graphs_.empty() && graphs_.front().cache != cache.identity()) drop_graphs();
  cudaGraphExec_t graph = nullptr;
  for (const Graph& known : graphs_)
    if (known.rows == rows_) graph = known.exec;
  if (!graph) {
    graph = capture(cache);
    graphs_.push_back({rows_, cache.identity(), graph});
  }
  detail::check_cuda("DeviceDecoder", "cudaGraphLaunch", cudaGraphLaunch(graph, exec_.stream));
}

template <precision P, decoder_geometry G>
cudaGraphExec_t DeviceDecoder<P, G>::capture(DeviceHybridCache<P>& cache) {
  constexpr const char* operation = "DeviceDecoder";
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t executable = nullptr;
  detail::check_cuda(operation, "cudaStreamBeginCapture",
                     cudaStreamBeginCapture(exec_.stream, cudaStreamCaptureModeThreadLocal));
  try {
    NoObserver observe;
    run(cache, observe);
  } catch (...) {
    // The error that counts is the first one, which is on its way.
    detail::ignore_cuda(cudaStreamEndCapture(exec_.stream, &captured));
    if (captured) detail::ignore_cuda(cudaGraphDestroy(captured));
    throw;
  }
  detail::check_cuda(operation, "cudaStreamEndCapture", cudaStreamEndCapture(exec_.stream, &captured));
  const detail::BesideCaptures beside;
  const cudaError_t code = cudaGraphInstantiate(&executable, captured, 0);
  detail::ignore_cuda(cudaGraphDestroy(captured));
  detail::check_cuda(operation, "cudaGraphInstantiate", code);
  return executable;
}

template <precision P, decoder_geometry G>
template <class Observer>
void DeviceDecoder<P, G>::run(DeviceHybridCache<P>& cache, Observer& observe) {
  copy(work_.tokens.data(), work_.host_tokens.data(), rows_, cudaMemcpyHostToDevice);
  copy(work_.slots.data(), work_.host_slots.data(), rows_, cudaMemcpyHostToDevice);
  copy(work_.positions.data(), work_.host_positions.data(), rows_, cudaMemcpyHostToDevice);
  clear(work_.status);
  clear(work_.logit_status);
  const DeviceDecoderWeights& weights = model_.weights();
  DevicePass<P, G, Observer> pass(exec_, geometry_, rows_, work_, observe, ablation_, &model(), model_.expert_cache());
  pass.embed(weights.embed_tokens);
  for (const DeviceLayerWeights& layer : weights.layers)
    if (ablation_.skip_layer != layer.spec.index) pass.layer(cache.layer(layer.spec.index), layer);
  pass.head(weights, logit_rows_);
  copy(work_.host_status.data(), work_.status.data(), rows_, cudaMemcpyDeviceToHost);
  copy(work_.host_logit_status.data(), work_.logit_status.data(), logit_rows_.size(), cudaMemcpyDeviceToHost);
  copy(work_.host_argmax.data(), work_.argmax.data(), logit_rows_.size(), cudaMemcpyDeviceToHost);
}

}  // namespace k3
