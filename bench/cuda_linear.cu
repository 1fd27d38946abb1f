// SPDX-License-Identifier: Apache-2.0
// The dense products of a layer on the GPU at the released geometry, bf16: the launches of a layer as the decoder makes
// them, their sums, and single matrices. Weights are random and taken in turn from more memory than the L2 cache holds.

#include <algorithm>
#include <string>
#include <vector>

#include <k3/cuda/dense_mlp.cuh>

#include "cuda_harness.cuh"

namespace {

using namespace k3;
using namespace k3::bench;

class Bench {
 public:
  explicit Bench(Report& report) : report_(report), pool_(size{3} << 30, false), scratch_(size{128} << 20, false) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    fill_uniform(pool_.data(), pool_.count(), 1, 0.03f, 0, stream_);
    fill_uniform(scratch_.data(), scratch_.count(), 2, 1.0f, 0, stream_);
    check_cuda(cudaStreamSynchronize(stream_));
  }
  ~Bench() { static_cast<void>(cudaStreamDestroy(stream_)); }

  /// The next matrix of the pool, wrapping round at its end.
  AnyMatrix<MemorySpace::device> weight(size rows, size columns) {
    const size count = (rows * columns + 127) / 128 * 128;
    if (next_ + count > pool_.count()) next_ = 0;
    next_ += count;
    return device_view(static_cast<const bf16*>(pool_.data() + next_ - count), rows, columns);
  }
  /// Rows of activations or outputs: 16 MB apart, random numbers at first.
  template <class T = bf16>
  DeviceView<T, 2> rows(size which, size count, size columns) {
    return device_view(reinterpret_cast<T*>(scratch_.data() + which * (size{8} << 20)), count, columns);
  }
  /// One of the calls in a graph that rotates through at least 400 MB of weights.
  template <class Work>
  void time(const std::string& name, size batch, double bytes, Work&& work) {
    const int calls = std::clamp(static_cast<int>(4e8 / bytes) + 1, 4, 64);
    const Timing t = measure(stream_, static_cast<size>(calls), report_.replays(21), [&] {
      for (int i = 0; i < calls; ++i) work(gpu{stream_});
    });
    report_.add(name, batch, 0, t, bytes);
    sum_.median_us += t.median_us, sum_.low_us += t.low_us, sum_.high_us += t.high_us, bytes_ += bytes;
  }
  /// Some tenths of a second of work: the first tenth after a pause is slower by up to 10 %.
  void warm_up() {
    for (int i = 0; i < 600; ++i)
      linear(gpu{stream_}, rows(0, 1, 7168), weight(163840, 7168), rows<float>(1, 1, 163840));
    check_cuda(cudaStreamSynchronize(stream_));
  }

  /// What was timed since the last sum, under the name of a row of the results.
  void sum(const char* name, size batch) {
    if (name != nullptr) report_.add(name, batch, 0, sum_, bytes_);
    sum_ = {}, bytes_ = 0;
  }

 private:
  Report& report_;
  DeviceBuffer<bf16> pool_;
  DeviceBuffer<bf16> scratch_;
  cudaStream_t stream_ = nullptr;
  size next_ = 0;
  Timing sum_{};
  double bytes_ = 0;
};

double bytes_of(size n, size k) { return 2.0 * static_cast<double>(n * k); }

void run_linear(Bench& bench, const char* name, size n, size k, size batch, bool float_out = false) {
  bench.time(name, batch, bytes_of(n, k), [&](const gpu& exec) {
    if (float_out)
      linear(exec, bench.rows(0, batch, k), bench.weight(n, k), bench.rows<float>(1, batch, n));
    else
      linear(exec, bench.rows(0, batch, k), bench.weight(n, k), bench.rows(1, batch, n));
  });
}

void run_add(Bench& bench, const char* name, size n, size k, size batch) {
  bench.time(name, batch, bytes_of(n, k), [&](const gpu& exec) {
    linear_add(exec, bench.rows(0, batch, k), bench.weight(n, k), bench.rows(1, batch, n));
  });
}

/// Several matrices of one x in one launch: rows of each, and which are gated or give floats.
struct Part {
  size rows;
  bool gated = false, float_out = false;
};

void run_projections(Bench& bench, const char* name, std::initializer_list<Part> parts, size k, size batch) {
  double bytes = 0;
  for (const Part& p : parts) bytes += bytes_of(p.rows, k) * (p.gated ? 2 : 1);
  bench.time(name, batch, bytes, [&](const gpu& exec) {
    std::vector<Projection> list;
    size which = 1;
    for (const Part& p : parts) {
      const auto w = bench.weight(p.rows, k);
      if (p.gated)
        list.push_back(gated_projection(GluConfig{}, w, bench.weight(p.rows, k), bench.rows(which, batch, p.rows)));
      else if (p.float_out)
        list.push_back(projection(w, bench.rows<float>(which, batch, p.rows)));
      else
        list.push_back(projection(w, bench.rows(which, batch, p.rows)));
      ++which;
    }
    detail::run_projections(exec, "projections", detail::read_only(bench.rows(0, batch, k)), list.data(), list.size());
  });
}

void run_batch(Bench& b, size batch) {
  run_projections(b, "KDA q k v g f_a b 49376x7168", {{12288}, {12288}, {12288}, {12288}, {128}, {96}}, 7168, batch);
  run_linear(b, "KDA f_b 12288x128", 12288, 128, batch);
  run_add(b, "o_proj + residual 7168x12288", 7168, 12288, batch);
  b.sum("dense_kda", batch);
  run_projections(b, "MLA q_a kv_a g 14400x7168", {{1536}, {576}, {12288}}, 7168, batch);
  run_linear(b, "MLA q_b 18432x1536", 18432, 1536, batch);
  run_add(b, "o_proj + residual 7168x12288", 7168, 12288, batch);
  b.sum("dense_mla", batch);
  run_projections(b, "MoE router down gate|up 16768x7168", {{896, false, true}, {3584}, {6144, true}}, 7168, batch);
  run_linear(b, "MoE shared down 7168x6144", 7168, 6144, batch);
  run_add(b, "MoE latent up + residual 7168x3584", 7168, 3584, batch);
  b.sum("dense_moe", batch);
  run_projections(b, "MLP gate|up 67584x7168", {{33792, true}}, 7168, batch);
  run_add(b, "MLP down + residual 7168x33792", 7168, 33792, batch);
  b.sum("dense MLP", batch);
  run_linear(b, "lm_head", 163840, 7168, batch, true);
  // Alone, for comparison with other libraries' tables.
  run_projections(b, "KDA q k v g 49152x7168", {{12288}, {12288}, {12288}, {12288}}, 7168, batch);
  run_linear(b, "output gate 12288x7168", 12288, 7168, batch);
  run_linear(b, "latent down 3584x7168", 3584, 7168, batch);
  run_linear(b, "q_a|kv_a 2112x7168", 2112, 7168, batch);
  run_linear(b, "router 896x7168", 896, 7168, batch, true);
  b.sum(nullptr, batch);
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    Report report(argc, argv);
    Bench bench(report);
    bench.warm_up();
    for (const size batch : report.batches()) run_batch(bench, batch);
  });
}
