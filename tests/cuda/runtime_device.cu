// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime_device.hpp"

#include <k3/geometry/presets.hpp>

#include "cuda/every_operation.cuh"
#include "cuda/hold.cuh"
#include "support/thrown_by.hpp"

namespace k3::test {

namespace {

/// Everything at the smallest geometry, three rows.
class Bench {
 public:
  const RandomModel model{three_layers(runtime_geometry(tiny::Decoder{})), 2};
  EveryOperation all{model, 3, 40, 1};
  const Stream stream;
  std::vector<std::string> faults;

  /// f(call) of every operation; what it throws is a fault.
  template <class F>
  std::vector<std::string> each(F&& f) {
    faults.clear();
    for (const EveryOperation::Call& call : all.calls) {
      try {
        f(call);
      } catch (const std::exception& e) {
        fault(call, e.what());
      }
      detail::check_cuda("test", "synchronise", cudaDeviceSynchronize());
    }
    return faults;
  }
  void fault(const EveryOperation::Call& call, const std::string& what) { faults.push_back(call.name + ": " + what); }

  void nothing_left(const EveryOperation::Call& call) {
    const cudaError_t code = cudaGetLastError();
    if (code != cudaSuccess) fault(call, std::string("left behind: ") + cudaGetErrorString(code));
  }
  void run_alone(const EveryOperation::Call& call) {
    all.restore(stream);
    call.run(gpu{stream}, all.rows());
    stream.wait();
  }
  /// Nodes of what `work` puts on the stream.
  template <class Work>
  size nodes_of(Work&& work) {
    size_t nodes = 0;
    const cudaGraph_t graph = captured(stream, work);
    detail::check_cuda("test", "nodes", cudaGraphGetNodes(graph, nullptr, &nodes));
    detail::check_cuda("test", "destroy", cudaGraphDestroy(graph));
    return nodes;
  }
};

/// Made once: it takes many allocations, which are slow under the sanitizers.
Bench& bench_of_all() {
  static Bench bench;
  return bench;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && __builtin_memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

std::vector<std::string> operations() {
  std::vector<std::string> names;
  for (const EveryOperation::Call& call : bench_of_all().all.calls) names.push_back(call.name);
  return names;
}

std::vector<std::string> faults_of_empty_calls() {
  Bench& bench = bench_of_all();
  return bench.each([&](const EveryOperation::Call& call) {
    const size nodes = bench.nodes_of([&] { call.run(gpu{bench.stream}, 0); });
    if (nodes != 0) bench.fault(call, "no rows, but " + std::to_string(nodes) + " nodes");
    bench.nothing_left(call);
  });
}

std::vector<std::string> faults_of_capture() {
  Bench& bench = bench_of_all();
  return bench.each([&](const EveryOperation::Call& call) {
    bench.run_alone(call);
    const std::vector<float> want = call.result();
    const auto run = [&] { call.run(gpu{bench.stream}, bench.all.rows()); };
    const size nodes = bench.nodes_of(run);
    const bool parts = call.name == "dense_mlp" || call.name == "dense_mlp_add" || call.name == "mix_routed_experts" ||
                       call.name == "launch_k3_latent_moe_experts" || call.name == "mla_attend" ||
                       call.name == "mla_decode_token";
    if (nodes == 0 || (nodes > 1 && !parts)) bench.fault(call, std::to_string(nodes) + " kernels");
    bench.all.spoil();
    if (same(call.result(), want)) bench.fault(call, "the result is still there");
    replay(bench.stream, 3, run, [&] { bench.all.restore(bench.stream); });
    if (!same(call.result(), want)) bench.fault(call, "another result of a replayed graph");
  });
}

std::vector<std::string> faults_of_abandoned_captures() {
  Bench& bench = bench_of_all();
  return bench.each([&](const EveryOperation::Call& call) {
    bench.run_alone(call);
    const std::vector<float> want = call.result();
    try {
      const auto run_and_throw = [&] {
        call.run(gpu{bench.stream}, bench.all.rows());
        throw std::runtime_error("enough");
      };
      replay(bench.stream, 1, run_and_throw, [] {});
    } catch (const std::exception& e) {
      if (std::string(e.what()) != "enough") bench.fault(call, e.what());
    }
    bench.nothing_left(call);
    if (bench.stream.capturing()) bench.fault(call, "still capturing");
    bench.run_alone(call);
    if (!same(call.result(), want)) bench.fault(call, "another result after an abandoned capture");
  });
}

std::vector<std::string> faults_of_order(bool timed) {
  Bench& bench = bench_of_all();
  PinnedBuffer<unsigned> over(1);
  return bench.each([&](const EveryOperation::Call& call) {
    bench.run_alone(call);
    const std::vector<float> want = call.result();
    bench.all.spoil();
    bool waited = false;
    beside_a_capture([&] {
      hold(bench.stream, 5, over.data());
      bench.all.restore(bench.stream);
      call.run(gpu{bench.stream}, bench.all.rows());
      waited = static_cast<volatile unsigned&>(over[0]) != 0;
    });
    if (timed && waited) bench.fault(call, "waited");
    bench.stream.wait();
    if (!same(call.result(), want)) bench.fault(call, "another result behind other work");
    // The check itself: operands that stay spoilt must show.
    bench.all.spoil();
    call.run(gpu{bench.stream}, bench.all.rows());
    bench.stream.wait();
    if (same(call.result(), want)) bench.fault(call, "spoilt operands were not noticed");
  });
}

std::vector<std::string> faults_of_errors() {
  try {
    const PinnedBuffer<unsigned char> too_large(size{1} << 50);
    return {"PinnedBuffer: no error"};
  } catch (const cuda_error&) {
    if (cudaGetLastError() != cudaSuccess) return {"PinnedBuffer: left behind"};
  }
  Bench& bench = bench_of_all();
  return bench.each([&](const EveryOperation::Call& call) {
    bench.run_alone(call);
    const std::vector<float> want = call.result();
    cudaGraph_t graph = nullptr;
    detail::check_cuda("test", "begin", cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeRelaxed));
    detail::ignore_cuda(cudaStreamSynchronize(bench.stream));  // not allowed: the capture is invalid from here on
    try {
      call.run(gpu{bench.stream}, bench.all.rows());
      bench.fault(call, "no error");
    } catch (const cuda_error& e) {
      if (e.code() != static_cast<int>(cudaErrorStreamCaptureInvalidated)) bench.fault(call, e.what());
    }
    bench.nothing_left(call);
    detail::ignore_cuda(cudaStreamEndCapture(bench.stream, &graph));
    bench.run_alone(call);
    if (!same(call.result(), want)) bench.fault(call, "another result after an error");
  });
}

namespace {

/// A decoder with two sequences.
struct Sequences {
  const Stream stream{};
  K3DeviceModel model;
  DeviceDecoder<Bf16> decoder;
  DeviceHybridCache<Bf16> cache;

  explicit Sequences(const K3CpuModel& on_host)
      : model(on_host), decoder(gpu{stream}, model, 16, 4, 1), cache(decoder.make_cache(2, 16)) {}

  /// A pass of `tokens` of one slot, the logits of the last one wanted or none.
  void take(id slot, const std::vector<id>& tokens, bool wanted) {
    const std::vector<id> slots(tokens.size(), slot);
    std::vector<size> positions;
    for (size i = 0; i < tokens.size(); ++i) positions.push_back(cache.position(static_cast<size>(slot)) + i);
    const size last = tokens.size() - 1;
    decoder.forward(cache, {view(tokens), view(slots), view(std::as_const(positions)), view(&last, wanted ? 1 : 0)});
  }
  std::vector<unsigned char> bytes(size slot) {
    decoder.finish();
    return cache.to_bytes(slot);
  }
  std::vector<float> step(id slot, id token) {
    take(slot, {token}, true);
    return decoder.logits();
  }
};

}  // namespace

std::vector<std::string> faults_of_pass_nodes(const K3CpuModel& model) {
  std::vector<std::string> faults;
  const auto expect = [&](size got, size want, const char* what) {
    if (got != want) faults.push_back(std::to_string(got) + " " + what + ", not " + std::to_string(want));
  };
  Sequences direct(model), held(model);
  // The logits of one of two rows: a pass that the decoder does not capture itself.
  const std::vector<id> tokens{3, 14};
  direct.take(0, tokens, true);
  const cudaGraph_t graph = captured(held.stream, [&] { held.take(0, tokens, true); });
  size_t count = 0;
  detail::check_cuda("test", "nodes", cudaGraphGetNodes(graph, nullptr, &count));
  std::vector<cudaGraphNode_t> nodes(count);
  detail::check_cuda("test", "nodes", cudaGraphGetNodes(graph, nodes.data(), &count));
  size kernels = 0, in = 0, out = 0, cleared = 0;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    detail::check_cuda("test", "type", cudaGraphNodeGetType(node, &type));
    cudaMemcpy3DParms copy{};
    if (type == cudaGraphNodeTypeMemcpy) detail::check_cuda("test", "copy", cudaGraphMemcpyNodeGetParams(node, &copy));
    kernels += type == cudaGraphNodeTypeKernel;
    cleared += type == cudaGraphNodeTypeMemset;
    in += type == cudaGraphNodeTypeMemcpy && copy.kind == cudaMemcpyHostToDevice;
    out += type == cudaGraphNodeTypeMemcpy && copy.kind == cudaMemcpyDeviceToHost;
  }
  expect(in, 3, "copies to the device");           // ids, slots, positions
  expect(out, 3, "copies from the device");        // what became of the rows, and of the logits; the arg-max
  expect(cleared, 2, "pieces of memory cleared");  // the words of both
  expect(kernels, count - 8, "kernels");
  if (kernels < 5 * model.graph.layers.size()) faults.push_back("only " + std::to_string(kernels) + " kernels");
  cudaGraphExec_t exec = nullptr;
  detail::check_cuda("test", "instantiate", cudaGraphInstantiate(&exec, graph, 0));
  detail::check_cuda("test", "launch", cudaGraphLaunch(exec, held.stream));
  if (!same(held.decoder.logits(), direct.decoder.logits())) faults.push_back("other logits");
  if (held.bytes(0) != direct.bytes(0)) faults.push_back("another cache");
  detail::check_cuda("test", "destroy", cudaGraphExecDestroy(exec));
  detail::check_cuda("test", "destroy", cudaGraphDestroy(graph));
  return faults;
}

std::vector<std::string> faults_of_broken_pass(const K3CpuModel& model, bool step) {
  std::vector<std::string> faults;
  const auto expect = [&](bool right, const std::string& what) {
    if (!right) faults.push_back(what);
  };
  Sequences sound(model), broken(model);
  for (Sequences* one : {&sound, &broken}) one->take(1, {5, 6}, false), one->take(0, {3, 14, 1}, false);
  const std::vector<unsigned char> other = broken.bytes(1);
  // A weight of the last layer that does not fit is noticed when the layers before it are on the stream.
  auto& norm = const_cast<DeviceDecoderWeights&>(broken.model.weights()).layers.back().post_attention_layernorm;
  ++norm.extents[0];
  try {
    broken.take(0, {7}, step);
    expect(false, "no error");
  } catch (const invalid_argument& e) {
    expect(e.operation() == "attnres_norm" || e.operation() == "rms_norm", e.what());
  } catch (const std::exception& e) {
    expect(false, std::string("not the first error: ") + e.what());
  }
  --norm.extents[0];
  expect(cudaGetLastError() == cudaSuccess, "an error is left behind");
  expect(!broken.stream.capturing(), "the stream is still being captured");
  expect(broken.cache.status(0) == RowStatus::interrupted, "the sequence is not interrupted");
  expect(broken.cache.status(1) == RowStatus::ok && broken.bytes(1) == other, "another sequence has changed");
  try {
    broken.take(0, {7}, step);
    expect(false, "an interrupted sequence goes on");
  } catch (const invalid_argument&) {
  }
  for (Sequences* one : {&sound, &broken}) {
    one->decoder.finish();
    one->cache.reset(0);
    one->take(0, {3, 14, 1}, false);
  }
  for (const id token : {7, 8})
    expect(same(broken.step(0, token), sound.step(0, token)), "another result after a reset");
  expect(same(broken.step(1, 7), sound.step(1, 7)), "another result of another sequence");
  return faults;
}

std::vector<std::string> faults_of_moved_from(const K3CpuModel& on_host) {
  std::vector<std::string> faults;
  const auto expect = [&](bool right, const std::string& what) {
    if (!right) faults.push_back(what);
  };
  const auto refused = [&](const std::string& by, auto&& work) {
    const std::string thrown = thrown_by(work);
    expect(thrown == by, thrown + ", not " + by);
  };
  const auto empty = [&](size count, const char* what) { expect(count == 0, what); };

  DeviceStream first, second(std::move(first));
  refused("DeviceStream/the stream", [&] { gpu{first}; });
  refused("DeviceStream/the stream", [&] { first.finish(); });
  first.finish_quietly();
  second.finish();
  first = std::move(second);
  first.finish();
  refused("DeviceStream/the stream", [&] { second.finish(); });

  DeviceEvent event, later(std::move(event));
  try {
    event.record(first);
    expect(false, "an event that was moved from is recorded");
  } catch (const cuda_error&) {
  }
  later.record(first);
  later.wait();

  const KdaConfig kda = on_host.config.kda;
  const MlaConfig mla = on_host.config.mla;
  const LatentMoeConfig moe = on_host.config.moe;
  DeviceBuffer<int> buffer(5), kept_buffer(std::move(buffer));
  empty(buffer.count() + buffer.to_vector().size(), "DeviceBuffer");
  expect(buffer.data() == nullptr && kept_buffer.to_vector() == std::vector<int>(5), "DeviceBuffer's memory");
  KdaDeviceState<float, bf16> state(kda, 2), kept_state(std::move(state));
  refused("KdaDeviceState/slot", [&] { state.reset(0, first); });
  kept_state.reset(1, first);
  MlaDeviceKv<bf16> kv(mla, 2, 8), kept_kv(std::move(kv));
  refused("MlaDeviceKv/slot", [&] { kv.reset(0); });
  kept_kv.reset(1);
  ExpertTable table(moe, std::vector<DeviceExpertWeights>(moe.n_routed)), kept_table(std::move(table));
  empty(table.experts(), "ExpertTable");
  DeviceArgmaxWorkspace argmax_work(3), kept_argmax(std::move(argmax_work));
  empty(argmax_work.max_rows(), "DeviceArgmaxWorkspace");
  DeviceMlpWorkspace<Bf16> mlp_work(16, 3), kept_mlp(std::move(mlp_work));
  empty(mlp_work.max_rows(), "DeviceMlpWorkspace");
  MoeDeviceWorkspace<Bf16> moe_work(moe, 3), kept_moe(std::move(moe_work));
  empty(moe_work.max_rows(), "MoeDeviceWorkspace");
  MlaDeviceWorkspace<Bf16> mla_work(mla, 3, 16), kept_mla(std::move(mla_work));
  empty(mla_work.max_rows(), "MlaDeviceWorkspace");

  // A cache: the graph that was captured for it goes on with the one it went to.
  Sequences still(on_host), moving(on_host);
  for (Sequences* one : {&still, &moving}) one->take(0, {3, 14}, false), one->step(0, 1);
  moving.decoder.finish();
  DeviceHybridCache<Bf16> kept(std::move(moving.cache));
  const id token = 5, slot = 0;
  const size position = 3, row = 0;
  const DecoderBatch batch{view(&token, 1), view(&slot, 1), view(&position, 1), view(&row, 1)};
  refused("Decoder::forward/the cache's layers", [&] { moving.decoder.forward(moving.cache, batch); });
  refused("HybridCache/slot", [&] { moving.cache.reset(0); });
  moving.decoder.forward(kept, batch);
  const std::vector<float> want = still.step(0, token);
  expect(same(moving.decoder.logits(), want), "other logits with a cache that was moved");
  moving.decoder.finish();
  // A model: decoders that were made before must not go on without its layers.
  kept.reset(0);
  const K3DeviceModel model(std::move(moving.model));
  const size start = 0;
  const DecoderBatch begin{view(&token, 1), view(&slot, 1), view(&start, 1), view(&row, 1)};
  refused("DeviceDecoder::forward/the model", [&] { moving.decoder.forward(kept, begin); });
  DeviceDecoder<Bf16> decoder(gpu{moving.stream}, model, 16, 4, 1);
  decoder.forward(kept, begin);
  still.decoder.finish();
  still.cache.reset(0);
  expect(same(decoder.logits(), still.step(0, token)), "other logits of a model that was moved");
  expect(cudaGetLastError() == cudaSuccess, "an error is left behind");
  return faults;
}

}  // namespace k3::test
