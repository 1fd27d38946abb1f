// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <k3/cuda/buffer.cuh>
#include <k3/cuda/stream.cuh>
#include <k3/kernels/common.cuh>

#include "cuda_check.cuh"
#include "cuda_results.hpp"

// What the device benchmarks share: random data, the machine's ceilings measured in the same run, times from replays of
// a graph, and rows of results, printed and merged into one JSON file.
namespace k3::bench {

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

struct Timing {
  double median_us, low_us, high_us;  // the 10th and 90th percentile
};
inline Timing timing_of(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const auto at = [&](double share) { return us[static_cast<size>(share * static_cast<double>(us.size() - 1))]; };
  return {at(0.5), at(0.1), at(0.9)};
}

/// The middle one, by its median, of several groups of measurements, each behind a pause: what else disturbs the
/// machine during some of them changes neither time nor spread.
template <class Measure>
Timing middle_timing(Measure&& one, size groups = 3) {
  std::vector<Timing> all;
  for (size group = 0; group < groups; ++group) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    all.push_back(one());
  }
  std::sort(all.begin(), all.end(), [](const Timing& a, const Timing& b) { return a.median_us < b.median_us; });
  return all[groups / 2];
}

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
  check_cuda(cudaEventDestroy(start));
  check_cuda(cudaEventDestroy(stop));
  return timing_of(times);
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
  const DeviceStream stream;
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
  return result;
}

/// Takes a program's options and results: `--quick` for fewer batches and replays, `--json FILE` to merge the rows into
/// that file. Rows are printed as they come; the file is written at the end, and not where the program fails.
/// Measures the ceilings first, in memory that it gives back; percentages are of these.
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
    std::printf("read ceiling %.0f GB/s, copy %.0f GB/s\n%-38s %5s %8s %11s %21s %12s %8s %7s\n", ceilings_.read,
                ceilings_.copy, "operation", "batch", "context", "us", "10 %..90 %", "MB", "GB/s", "%");
  }
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;
  ~Report() noexcept(false) {
    if (std::uncaught_exceptions() > exceptions_) return;
    for (const auto& [what, found] : compared_)
      std::printf("%s: %zu results compared with sums in double, relative error up to %.1e (bound %.0e)\n",
                  what.c_str(), found.count, found.worst, found.bound);
    if (file_.empty()) return;
    ResultsFile file(file_);
    for (const Row& row : rows_) file.put(row);
    cudaDeviceProp device{};
    check_cuda(cudaGetDeviceProperties(&device, 0));
    file.write(device.name, ceilings_);
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

  /// Prints a row, and keeps it for the file where it belongs to one of its lists. Context 0 plays no part.
  void add(const std::string& op, size batch, size context, const Timing& time, double bytes,
           List list = List::results) {
    Row row{list, op, batch, context, time.median_us, time.high_us - time.low_us, bytes, 0};
    row.percent = 100 * limit_us(row, ceilings_.read) / time.median_us;
    if (list != List::none) rows_.push_back(row);
    const std::string name = list == List::independent ? op + ", independent" : op;
    std::printf("%-38s %5zu %8s %11.2f %10.2f..%9.2f %12.3f %8.0f %6.1f%%\n", name.c_str(), batch,
                context ? std::to_string(context).c_str() : "", time.median_us, time.low_us, time.high_us, bytes * 1e-6,
                bytes / time.median_us * 1e-3, row.percent);
    std::fflush(stdout);
  }

  /// Ends the program where `got` is further than `bound` from `want` (relative L2).
  void compare(const std::string& what, const std::vector<double>& got, const std::vector<double>& want, double bound) {
    const double error = relative_l2(got, want);
    if (!(error <= bound)) throw invalid_argument("bench", what, std::to_string(error), std::to_string(bound));
    Compared& found = compared_[what];
    found = {found.count + 1, std::max(found.worst, error), bound};
  }

 private:
  struct Compared {
    size count = 0;
    double worst = 0, bound = 0;
  };

  bool quick_ = false;
  int exceptions_ = std::uncaught_exceptions();
  std::string file_;
  std::vector<std::string> extra_;
  Ceilings ceilings_;
  std::vector<Row> rows_;
  std::map<std::string, Compared> compared_;
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
