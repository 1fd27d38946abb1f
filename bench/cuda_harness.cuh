// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include <k3/cuda/execution.cuh>
#include <k3/kernels/common.cuh>

// What the device benchmarks share: the read that sets the ceiling, and times from replays of a graph.
namespace k3::bench {

inline void check_cuda(cudaError_t code) { detail::check_cuda("bench", "CUDA", code); }

/// Reads `count` pieces of 16 bytes once; `sink` keeps the compiler from leaving that out.
static __global__ void __launch_bounds__(512) read_all(const uint4* from, size count, unsigned* sink) {
  unsigned sum = 0;
  const size step = size{gridDim.x} * blockDim.x;
  size i = blockIdx.x * size{blockDim.x} + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = kernel::load_streaming(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;
}

struct Timing {
  double median_us, low_us, high_us;
};

/// Microseconds of one of the `launches` that `work` puts on the stream, from replays of a graph.
template <class Work>
Timing measure(cudaStream_t stream, size launches, int replays, Work&& work) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  work();
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  check_cuda(cudaEventCreate(&start));
  check_cuda(cudaEventCreate(&stop));
  std::vector<double> times;
  for (int i = 0; i < replays + 3; ++i) {
    check_cuda(cudaEventRecord(start, stream));
    check_cuda(cudaGraphLaunch(exec, stream));
    check_cuda(cudaEventRecord(stop, stream));
    check_cuda(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, start, stop));
    if (i >= 3) times.push_back(1e3 * milliseconds / static_cast<double>(launches));
  }
  std::sort(times.begin(), times.end());
  check_cuda(cudaEventDestroy(start));
  check_cuda(cudaEventDestroy(stop));
  check_cuda(cudaGraphExecDestroy(exec));
  check_cuda(cudaGraphDestroy(graph));
  const auto at = [&](double share) { return times[static_cast<size>(share * static_cast<double>(times.size() - 1))]; };
  return {at(0.5), at(0.1), at(0.9)};
}

}  // namespace k3::bench
