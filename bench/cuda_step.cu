// SPDX-License-Identifier: Apache-2.0
// Whole layers and whole decode steps of the released model, cut to seven layers with all their 896 experts, in bf16:
// what the tests run, from replays of a graph, with random weights, states, caches and tokens, and the routing that
// comes of them. With `independent = false`, and what attends by default too. Bytes count the experts really hit. What
// was timed is compared afterwards: with direct calls bit for bit, and the router and experts of a row with sums in
// double. `--trace` prints where the time of a layer goes, kernel by kernel, instead; `--layers` leaves out the steps.

#include <chrono>

#include "cuda_step_check.cuh"
#include "cuda_trace.cuh"

namespace {

using namespace k3;
using namespace k3::bench;

using Geometry = kimi_k3::Decoder;
using Cache = DeviceHybridCache<Bf16>;
constexpr Geometry geometry;
constexpr size most_rows = 128, longest_context = 32768;

/// The model, and a cache whose states and latents are random.
struct Setup {
  DeviceStream stream;
  RandomWeights weights;
  K3DeviceModel model{depth_cut_config(), weights};
  StepBytes bytes;
  Cache cache{stream,    model.host_model().graph, model.config().kda, model.config().mla,
              most_rows, longest_context,          Environment{}};

  Setup() {
    for (size index = 0; index < cache.layers(); ++index)
      if (auto* kv = std::get_if<Cache::Mla>(&cache.layer(index)))
        fill_uniform(kv->view().pages.data, kv->view().pages.elements(), 77, 1.7f, 0, stream);
  }

  /// The states of the first `rows` sequences of a layer as they are at the start of everything timed.
  void restore(size layer, size rows) {
    auto* state = std::get_if<Cache::Kda>(&cache.layer(layer));
    if (!state) return;
    const auto view = state->view();
    fill_uniform(view.recurrent.data, rows * kda_state_elements(geometry.kda), 100 + layer, 0.1f, 0, stream);
    fill_uniform(view.conv.data, rows * kda_conv_elements(geometry.kda), 200 + layer, 1.7f, 0, stream);
  }
};

/// How rows of a list are measured: targets are of the mode in which a row's bits may depend on its batch.
gpu mode(cudaStream_t stream, List list = List::results) { return {stream, list == List::independent}; }

/// One or several layers of a pass, which mix as many snapshots as the last layers of the whole model.
class LayerBench {
 public:
  explicit LayerBench(Setup& setup)
      : setup_(setup),
        work_(geometry, whole_graph(), most_rows, 1, longest_context),
        entered_(most_rows * geometry.hidden, false) {
    work_.observe(geometry.hidden);
  }

  /// Times `repeat` passes over `layers`, as a mean of one layer, then compares with direct calls and sums in double.
  void run(Report& report, const char* op, const std::vector<size>& layers, size repeat, size rows, size context,
           List list = List::results) {
    const gpu exec = mode(setup_.stream, list);
    NoObserver nothing;
    DevicePass<Bf16, Geometry> pass(exec, geometry, rows, work_, nothing, ablation_);
    enter(pass, rows, context, work_.snapshot_count);
    const size launches = layers.size() * repeat;
    const auto work = [&](auto& of) {
      for (size i = 0; i < launches; ++i) layer(of, layers[i % layers.size()]);
    };
    const Timing time = middle_timing([&] {
      return measure(
          setup_.stream, launches, report.replays(9), [&] { work(pass); }, [&] { restore(layers, rows); });
    });
    const std::vector<bf16> replayed = result(rows);

    ExpertCounter counter;
    DevicePass<Bf16, Geometry, ExpertCounter> direct(exec, geometry, rows, work_, counter, ablation_);
    enter(direct, rows, context, work_.snapshot_count);
    restore(layers, rows);
    work(direct);
    const K3LayerSpec& spec = setup_.model.weights().layers[layers[0]].spec;
    report.add(op, rows, spec.mixer == MixerKind::Mla ? context : 0, time,
               setup_.bytes.layer(spec, rows, static_cast<double>(context)) + counter.mean() * StepBytes::expert, list);
    std::printf("  %.1f distinct experts a layer\n", counter.mean());
    if (std::memcmp(result(rows).data(), replayed.data(), replayed.size() * sizeof(bf16)) != 0)
      throw invalid_argument("bench", op, "replays and direct calls differ", "the same bits");
    check_experts(report, work_, layers.back(), rows - 1);
  }

  /// Where the time of one layer goes.
  void trace_layer(size index, size rows, size context) {
    NoObserver nothing;
    DevicePass<Bf16, Geometry> pass(mode(setup_.stream), geometry, rows, work_, nothing, ablation_);
    enter(pass, rows, context, index == 0 ? 0 : work_.snapshot_count);
    const cudaGraph_t graph = capture(setup_.stream, [&] { layer(pass, index); });
    const K3LayerSpec& spec = setup_.model.weights().layers[index].spec;
    trace(graph, std::string(spec.mixer == MixerKind::Mla ? "MLA" : "KDA") +
                     (spec.mlp == MlpKind::Dense ? " + dense layer" : " + MoE layer") + ", batch " +
                     std::to_string(rows) + ", context " + std::to_string(context));
    check_cuda(cudaGraphDestroy(graph));
  }
  void trace_head(size rows) {
    NoObserver nothing;
    DeviceWorkspace<Bf16> work(geometry, setup_.model.host_model().graph, rows, rows, 64);
    fill_uniform(work.stream.data(), work.stream.count(), 5, 1.7f, 0, setup_.stream);
    DevicePass<Bf16, Geometry> pass(mode(setup_.stream), geometry, rows, work, nothing, ablation_);
    std::vector<size> wanted(rows);
    for (size i = 0; i < rows; ++i) wanted[i] = i;
    const cudaGraph_t graph = capture(setup_.stream, [&] { pass.head(setup_.model.weights(), wanted); });
    trace(graph, "head, batch " + std::to_string(rows));
    check_cuda(cudaGraphDestroy(graph));
  }

 private:
  /// Without its combine a layer's experts leave counters that the next replay would wait for.
  void trace(cudaGraph_t graph, const std::string& title) {
    const auto& counters = work_.moe->ready;
    bench::trace(setup_.stream, graph, title, 7,
                 [&] { check_cuda(cudaMemsetAsync(counters.data(), 0, counters.bytes(), setup_.stream)); });
  }
  template <class Pass>
  void layer(Pass& pass, size index) {
    pass.layer(setup_.cache.layer(index), setup_.model.weights().layers[index]);
  }
  /// Rows 0, 1, 2... in their slots; layer 0 as often as there shall be snapshots; the stream that it leaves is kept.
  template <class Pass>
  void enter(Pass& pass, size rows, size context, size snapshots) {
    std::vector<id> slots(rows);
    for (size row = 0; row < rows; ++row) slots[row] = static_cast<id>(row);
    work_.slots.copy_from(slots.data(), 0, rows);
    work_.positions.copy_from(std::vector<size>(rows, context - 1).data(), 0, rows);
    work_.status.copy_from(std::vector<unsigned>(rows, 0).data(), 0, rows);
    setup_.restore(0, rows);
    fill_uniform(work_.stream.data(), rows * geometry.hidden, 5, 1.7f, 0, setup_.stream);
    for (size i = 0; i < snapshots; ++i) layer(pass, 0);
    check_cuda(cudaMemcpyAsync(entered_.data(), work_.stream.data(), rows * geometry.hidden * sizeof(bf16),
                               cudaMemcpyDeviceToDevice, setup_.stream));
    check_cuda(cudaStreamSynchronize(setup_.stream));
  }
  void restore(const std::vector<size>& layers, size rows) {
    for (const size index : layers) setup_.restore(index, rows);
    check_cuda(cudaMemcpyAsync(work_.stream.data(), entered_.data(), rows * geometry.hidden * sizeof(bf16),
                               cudaMemcpyDeviceToDevice, setup_.stream));
  }
  /// The stream, having looked at the rows' statuses.
  std::vector<bf16> result(size rows) {
    check_cuda(cudaStreamSynchronize(setup_.stream));
    std::vector<unsigned> status(rows);
    work_.status.copy_to(status.data(), 0, rows);
    for (const unsigned word : status)
      if (word != 0) throw invalid_argument("bench", "a row", text(static_cast<RowStatus>(word)), "ok");
    std::vector<bf16> values(rows * geometry.hidden);
    work_.stream.copy_to(values.data(), 0, values.size());
    return values;
  }

  Setup& setup_;
  Ablation ablation_;
  DeviceWorkspace<Bf16> work_;
  DeviceBuffer<bf16> entered_;
};

/// Greedy decoding of `rows` sequences by the decoder itself.
class StepBench {
 public:
  StepBench(Setup& setup, List list)
      : setup_(setup),
        list_(list),
        decoder_(mode(setup.stream, list), setup.model, geometry, longest_context, most_rows, most_rows) {
    check_cuda(cudaEventCreate(&start_));
    check_cuda(cudaEventCreate(&stop_));
  }
  ~StepBench() {
    detail::ignore_cuda(cudaEventDestroy(start_));
    detail::ignore_cuda(cudaEventDestroy(stop_));
  }

  void run(Report& report, size rows, size context) {
    const size steps = warm + static_cast<size>(report.replays(12));
    ExpertCounter counter;
    const Decoded direct = decode(rows, context, steps, counter);
    Timing on_device{};
    const Timing whole = middle_timing(
        [&] {
          const Decoded replayed = decode(rows, context, steps, NoObserver{});
          if (replayed.tokens != direct.tokens || replayed.logits.size() != direct.logits.size() ||
              std::memcmp(replayed.logits.data(), direct.logits.data(), direct.logits.size() * sizeof(float)) != 0)
            throw invalid_argument("bench", "step_depth_cut", "replays and direct calls differ", "the same bits");
          on_device = timing_of(replayed.device_us);
          return timing_of(replayed.host_us);
        },
        5);
    const double hit = 6 * counter.mean() * StepBytes::expert;
    const double bytes = setup_.bytes.step(rows, static_cast<double>(context) - 0.5 * static_cast<double>(steps)) + hit;
    report.add("step_depth_cut", rows, context, whole, bytes, list_);
    report.add("  on the device alone, the last group", rows, context, on_device, bytes, List::none);
    std::printf("  %.0f tokens/s, %.1f distinct experts a layer\n", static_cast<double>(rows) / whole.median_us * 1e6,
                counter.mean());
  }

 private:
  static constexpr size warm = 2;
  struct Decoded {
    std::vector<id> tokens;                  // of all steps
    std::vector<float> logits;               // of the last
    std::vector<double> host_us, device_us;  // of those behind the first two
  };

  /// `steps` steps up to position `context`; an observer's are direct calls, all others replays of a graph. A step's
  /// time is from the tokens going in to the next ones being known on the host.
  template <class Observer>
  Decoded decode(size rows, size context, size steps, Observer&& observe) {
    std::vector<id> tokens(rows), slots(rows);
    std::vector<size> positions(rows, context - steps), wanted(rows);
    for (size row = 0; row < rows; ++row) {
      tokens[row] = static_cast<id>(mixed_bits(row) % geometry.vocab);
      slots[row] = static_cast<id>(row);
      wanted[row] = row;
      setup_.cache.reset(row);
      setup_.cache.advance(row, context - steps);
    }
    for (size index = 0; index < setup_.cache.layers(); ++index) setup_.restore(index, rows);
    check_cuda(cudaStreamSynchronize(setup_.stream));
    Decoded result;
    using clock = std::chrono::steady_clock;
    for (size step = 0; step < steps; ++step) {
      const auto begin = clock::now();
      check_cuda(cudaEventRecord(start_, setup_.stream));
      decoder_.forward(
          setup_.cache,
          {view(static_cast<const id*>(tokens.data()), rows), view(static_cast<const id*>(slots.data()), rows),
           view(static_cast<const size*>(positions.data()), rows), view(static_cast<const size*>(wanted.data()), rows)},
          observe);
      check_cuda(cudaEventRecord(stop_, setup_.stream));
      for (size row = 0; row < rows; ++row) tokens[row] = decoder_.argmax(row);
      const double host_us = std::chrono::duration<double, std::micro>(clock::now() - begin).count();
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, start_, stop_));
      if (step >= warm) {
        result.host_us.push_back(host_us);
        result.device_us.push_back(1e3 * static_cast<double>(milliseconds));
      }
      result.tokens.insert(result.tokens.end(), tokens.begin(), tokens.end());
      for (size& position : positions) ++position;
    }
    result.logits = decoder_.logits();
    return result;
  }

  Setup& setup_;
  List list_;
  DeviceDecoder<Bf16, Geometry> decoder_;
  cudaEvent_t start_{}, stop_{};
};

void run(Report& report) {
  bool tracing = false, steps = true;
  for (const std::string& argument : report.extra())
    if (argument == "--trace")
      tracing = true;
    else if (argument == "--layers")
      steps = false;
    else
      throw invalid_argument("cuda_step", "arguments", argument, "--trace, --layers, --quick, --json FILE");
  Setup setup;
  std::printf("%.1f GB of weights made\n", static_cast<double>(setup.model.bytes()) * 1e-9);
  LayerBench layers(setup);
  if (tracing) {
    for (const size rows : report.batches()) {
      layers.trace_layer(1, rows, 4096);
      layers.trace_layer(3, rows, 4096);
      layers.trace_layer(0, rows, 4096);
      layers.trace_head(rows);
    }
    return;
  }
  const std::vector<size> contexts = report.quick() ? std::vector<size>{4096} : std::vector<size>{4096, 1024, 32768};
  for (const size rows : report.batches()) {
    layers.run(report, "layer_kda_moe", {1, 2, 4, 5, 6}, 1, rows, 4096);
    for (const size context : contexts)
      for (const List list : {List::results, List::independent})
        layers.run(report, "layer_mla_moe", {3}, 3, rows, context, list);
  }
  if (!steps) return;
  for (const List list : {List::results, List::independent}) {
    StepBench step(setup, list);
    for (const size rows : report.batches()) step.run(report, rows, 4096);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    Report report(argc, argv);
    run(report);
  });
}
