// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime_device.hpp"

#include <k3/geometry/presets.hpp>

#include "cuda/every_operation.cuh"
#include "cuda/hold.cuh"

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
  size captured(Work&& work) {
    cudaGraph_t graph = nullptr;
    size_t nodes = 0;
    detail::check_cuda("test", "begin", cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    try {
      work();
    } catch (...) {
      detail::ignore_cuda(cudaStreamEndCapture(stream, &graph));
      throw;
    }
    detail::check_cuda("test", "end", cudaStreamEndCapture(stream, &graph));
    detail::check_cuda("test", "nodes", cudaGraphGetNodes(graph, nullptr, &nodes));
    detail::check_cuda("test", "destroy", cudaGraphDestroy(graph));
    return nodes;
  }
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && __builtin_memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

std::vector<std::string> operations() {
  Bench bench;
  std::vector<std::string> names;
  for (const EveryOperation::Call& call : bench.all.calls) names.push_back(call.name);
  return names;
}

std::vector<std::string> faults_of_empty_calls() {
  Bench bench;
  return bench.each([&](const EveryOperation::Call& call) {
    const size nodes = bench.captured([&] { call.run(gpu{bench.stream}, 0); });
    if (nodes != 0) bench.fault(call, "no rows, but " + std::to_string(nodes) + " nodes");
    bench.nothing_left(call);
  });
}

std::vector<std::string> faults_of_capture() {
  Bench bench;
  return bench.each([&](const EveryOperation::Call& call) {
    bench.run_alone(call);
    if (bench.captured([&] { call.run(gpu{bench.stream}, bench.all.rows()); }) == 0)
      bench.fault(call, "nothing on the stream");
  });
}

std::vector<std::string> faults_of_order(bool timed) {
  Bench bench;
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
  Bench bench;
  try {
    const PinnedBuffer<unsigned char> too_large(size{1} << 50);
    bench.faults.push_back("PinnedBuffer: no error");
  } catch (const cuda_error&) {
    if (cudaGetLastError() != cudaSuccess) bench.faults.push_back("PinnedBuffer: left behind");
  }
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

}  // namespace k3::test
