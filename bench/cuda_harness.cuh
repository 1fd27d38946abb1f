// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <k3/cuda/buffer.cuh>
#include <k3/kernels/common.cuh>

#include "cuda_results.hpp"

// What the device benchmarks share: random data, the machine's ceilings measured in the same run, times from replays of
// a graph, and rows of results, printed and merged into one JSON file.
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
  for (; i < count; i += step) sum += kernel::load_streaming(from + i).x;
  if (sum == 0x12345678u) *sink = sum;
}

/// Copies `count` pieces of 16 bytes, each thread `Pieces` at a time.
template <int Pieces>
__global__ void __launch_bounds__(512) copy_all(const uint4* from, size count, uint4* to) {
  const size step = size{gridDim.x} * blockDim.x;
  size i = blockIdx.x * size{blockDim.x} + threadIdx.x;
  for (; i + (Pieces - 1) * step < count; i += Pieces * step) {
    uint4 v[Pieces];
#pragma unroll
    for (int j = 0; j < Pieces; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < Pieces; ++j) __stcs(to + i + j * step, v[j]);
  }
  for (; i < count; i += step) to[i] = from[i];
}

/// 64 well mixed bits from a counter, the same on every machine.
__host__ __device__ inline std::uint64_t mixed_bits(std::uint64_t z) {
  z = (z + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
/// Evenly spread in offset +- range.
__host__ __device__ inline float uniform(std::uint64_t seed, size i, float range, float offset) {
  return offset + range * (static_cast<float>(mixed_bits((seed << 40) + i) >> 40) / 8388608.0f - 1);
}
template <class T>
__global__ void uniform_kernel(T* to, size count, std::uint64_t seed, float range, float offset) {
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < count; i += size{gridDim.x} * blockDim.x)
    to[i] = static_cast<T>(uniform(seed, i, range, offset));
}
/// Random bytes from `first` on, as many different ones as `mask` (2^n - 1) lets through; in words of 8 bytes.
static __global__ void bytes_kernel(std::uint64_t* to, size words, std::uint64_t seed, std::uint64_t mask,
                                    std::uint64_t first) {
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < words; i += size{gridDim.x} * blockDim.x)
    to[i] = (mixed_bits((seed << 40) + i) & mask * 0x0101010101010101ull) + first * 0x0101010101010101ull;
}
template <class T>
void fill_uniform(T* to, size count, std::uint64_t seed, float range, float offset = 0, cudaStream_t stream = nullptr) {
  if (count > 0) uniform_kernel<<<detail::grid_size(count, 4096), 256, 0, stream>>>(to, count, seed, range, offset);
  detail::check_launch("fill_uniform");
}
/// `bytes` is a multiple of 8.
inline void fill_bytes(void* to, size bytes, std::uint64_t seed, unsigned char mask = 255, unsigned char first = 0,
                       cudaStream_t stream = nullptr) {
  bytes_kernel<<<detail::grid_size(bytes / 8, 1024), 256, 0, stream>>>(static_cast<std::uint64_t*>(to), bytes / 8, seed,
                                                                       mask, first);
  detail::check_launch("fill_bytes");
}

struct Timing {
  double median_us, low_us, high_us;  // the 10th and 90th percentile
};

struct NothingBefore {
  void operator()() const {}
};

/// Microseconds of one of the `launches` that an executable graph makes; `before` is put on the stream in front of
/// each replay and is not timed.
template <class Before = NothingBefore>
Timing measure_graph(cudaStream_t stream, cudaGraphExec_t graph, size launches, int replays, Before&& before = {}) {
  cudaEvent_t start, stop;
  check_cuda(cudaEventCreate(&start));
  check_cuda(cudaEventCreate(&stop));
  std::vector<double> times;
  for (int i = 0; i < replays + 3; ++i) {
    before();
    check_cuda(cudaEventRecord(start, stream));
    check_cuda(cudaGraphLaunch(graph, stream));
    check_cuda(cudaEventRecord(stop, stream));
    check_cuda(cudaStreamSynchronize(stream));
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, start, stop));
    if (i >= 3) times.push_back(1e3 * milliseconds / static_cast<double>(launches));
  }
  std::sort(times.begin(), times.end());
  check_cuda(cudaEventDestroy(start));
  check_cuda(cudaEventDestroy(stop));
  const auto at = [&](double share) { return times[static_cast<size>(share * static_cast<double>(times.size() - 1))]; };
  return {at(0.5), at(0.1), at(0.9)};
}

/// What `work` puts on the stream, captured.
template <class Work>
cudaGraph_t capture(cudaStream_t stream, Work&& work) {
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  work();
  check_cuda(cudaStreamEndCapture(stream, &graph));
  return graph;
}

/// Microseconds of one of the `launches` that `work` puts on the stream, from replays of a graph.
template <class Work, class Before = NothingBefore>
Timing measure(cudaStream_t stream, size launches, int replays, Work&& work, Before&& before = {}) {
  cudaGraph_t graph = capture(stream, work);
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph, 0));
  const Timing result = measure_graph(stream, executable, launches, replays, before);
  check_cuda(cudaGraphExecDestroy(executable));
  check_cuda(cudaGraphDestroy(graph));
  return result;
}

/// Takes a few tenths of a second, and 8 GB that it gives back.
inline Ceilings measured_ceilings() {
  constexpr size bytes = size{8} << 30;
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const DeviceBuffer<unsigned char> memory(bytes, false);
  const DeviceBuffer<unsigned> sink(1);
  fill_bytes(memory.data(), bytes, 1);
  check_cuda(cudaDeviceSynchronize());
  const auto words = reinterpret_cast<const uint4*>(memory.data());
  const unsigned sms = static_cast<unsigned>(detail::multiprocessors());
  Ceilings result;
  const auto rate = [&](auto&& work) {
    return static_cast<double>(bytes) / measure(stream, 1, 9, work).median_us * 1e-3;
  };
  const auto to = reinterpret_cast<uint4*>(memory.data() + bytes / 2);
  for (const unsigned blocks : {4 * sms, 8 * sms, 32 * sms})
    for (const unsigned threads : {256u, 512u}) {
      const auto read = [&] { read_all<<<blocks, threads, 0, stream>>>(words, bytes / 16, sink.data()); };
      const auto copy = [&] { copy_all<4><<<blocks, threads, 0, stream>>>(words, bytes / 32, to); };
      result.read = std::max(result.read, rate(read));
      result.copy = std::max(result.copy, rate(copy));
    }
  // One piece a thread, and the driver's own copy.
  const auto once = [&] {
    copy_all<1><<<static_cast<unsigned>(bytes / 32 / 512), 512, 0, stream>>>(words, bytes / 32, to);
  };
  const auto driver = [&] { check_cuda(cudaMemcpyAsync(to, words, bytes / 2, cudaMemcpyDeviceToDevice, stream)); };
  result.copy = std::max({result.copy, rate(once), rate(driver)});
  check_cuda(cudaStreamDestroy(stream));
  return result;
}

/// Takes a program's options and results: `--quick` for fewer batches and replays, `--json FILE` to merge the rows into
/// that file. Rows are printed as they come; the file is written at the end, and not where the program fails.
/// Measures the ceilings first, in memory that it gives back.
class Report {
 public:
  Report(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      if (argument == "--quick")
        quick_ = true;
      else if (argument == "--json" && i + 1 < argc)
        file_ = argv[++i];
      else
        extra_.push_back(argument);
    }
    ceilings_ = measured_ceilings();
    std::printf("read ceiling %.0f GB/s, copy %.0f GB/s\n%-34s %5s %8s %11s %21s %12s %8s %7s\n", ceilings_.read,
                ceilings_.copy, "operation", "batch", "context", "us", "10 %..90 %", "MB", "GB/s", "%");
  }
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;
  ~Report() noexcept(false) {
    if (file_.empty() || std::uncaught_exceptions() > exceptions_) return;
    ResultsFile file(file_);
    file.raise(ceilings_);
    for (const Row& row : rows_) file.put(row);
    cudaDeviceProp device{};
    check_cuda(cudaGetDeviceProperties(&device, 0));
    file.write(device.name);
  }

  bool quick() const { return quick_; }
  int replays(int full) const { return quick_ ? std::min(full, 9) : full; }
  std::vector<size> batches() const {
    return quick_ ? std::vector<size>{1, 8, 32, 128} : std::vector<size>{1, 2, 4, 8, 16, 32, 64, 128};
  }
  /// Arguments that are the program's own.
  const std::vector<std::string>& extra() const { return extra_; }
  /// GB/s of a plain read, in this run.
  double ceiling() const { return ceilings_.read; }

  void add(const std::string& op, size batch, size context, const Timing& time, double bytes) {
    const Row row{op, batch, context, time.median_us, time.high_us - time.low_us, bytes};
    rows_.push_back(row);
    std::printf("%-34s %5zu %8s %11.2f %10.2f..%9.2f %12.3f %8.0f %6.1f%%\n", op.c_str(), batch,
                context ? std::to_string(context).c_str() : "", time.median_us, time.low_us, time.high_us, bytes * 1e-6,
                bytes / time.median_us * 1e-3, 100 * limit_us(row, ceilings_.read) / time.median_us);
    std::fflush(stdout);
  }

 private:
  bool quick_ = false;
  int exceptions_ = std::uncaught_exceptions();
  std::string file_;
  std::vector<std::string> extra_;
  Ceilings ceilings_;
  std::vector<Row> rows_;
};

/// The program's exit status; errors go to standard error.
template <class Program>
int run_main(Program&& program) {
  try {
    program();
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

}  // namespace k3::bench
