// SPDX-License-Identifier: Apache-2.0
// The dense products of a layer on the GPU at the released geometry, bf16: microseconds of a graph replay, GB/s and
// percent of the read ceiling measured in the same run. Weights are random and taken in turn from more memory than the
// L2 cache holds.

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <k3/cuda/argmax.cuh>
#include <k3/cuda/attnres_norm.cuh>
#include <k3/cuda/dense_mlp.cuh>
#include <k3/cuda/rms_norm.cuh>

#include "cuda_harness.cuh"

namespace {

using namespace k3;
using namespace k3::bench;

constexpr size pool_bytes = size{6} << 30;  // the largest operand, lm_head, is 2.3 GB

/// bf16 of either sign with magnitudes in [1/64, 1/32).
__global__ void fill(std::uint64_t* words, size count) {
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < count; i += size{gridDim.x} * blockDim.x) {
    std::uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    words[i] = ((z ^ (z >> 31)) & 0x807f807f807f807full) | 0x3c803c803c803c80ull;
  }
}

class Bench {
 public:
  Bench() : pool_(pool_bytes / 2, false), sink_(1), scratch_(size{128} << 20, false) {
    detail::check_cuda("bench", "cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    fill<<<4096, 256, 0, stream_>>>(reinterpret_cast<std::uint64_t*>(pool_.data()), pool_bytes / 8);
    fill<<<4096, 256, 0, stream_>>>(reinterpret_cast<std::uint64_t*>(scratch_.data()), scratch_.bytes() / 8);
    detail::check_launch("bench");
    detail::check_cuda("bench", "cudaStreamSynchronize", cudaStreamSynchronize(stream_));
    const auto words = reinterpret_cast<const uint4*>(pool_.data());
    const double us = time(1, [&](const gpu& exec) {
      read_all<<<static_cast<unsigned>(detail::multiprocessors()) * 4, 512, 0, exec.stream>>>(words, pool_bytes / 16,
                                                                                              sink_.data());
    });
    ceiling_ = static_cast<double>(pool_bytes) / us;  // bytes per microsecond
    std::printf("read ceiling %.0f GB/s\n", ceiling_ * 1e-3);
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
  template <class T>
  T* part(size bytes_from) {
    return reinterpret_cast<T*>(scratch_.data() + bytes_from / 2);
  }

  /// Median microseconds of one of `inside` calls within a graph.
  template <class Work>
  double time(int inside, Work&& work) {
    const auto calls = [&] {
      for (int i = 0; i < inside; ++i) work(gpu{stream_});
    };
    return measure(stream_, static_cast<size>(inside), 9, calls).median_us;
  }

  void report(const std::string& name, size batch, double us, double bytes) const {
    std::printf("%-34s B=%-4zu %9.2f us %8.0f GB/s %6.1f %%\n", name.c_str(), batch, us, bytes / us * 1e-3,
                100 * bytes / us / ceiling_);
  }

 private:
  DeviceBuffer<bf16> pool_;
  DeviceBuffer<unsigned> sink_;
  DeviceBuffer<bf16> scratch_;
  cudaStream_t stream_ = nullptr;
  size next_ = 0;
  double ceiling_ = 1;
};

/// As many calls that one graph rotates through at least 500 MB of weights.
int calls_for(double bytes) { return std::clamp(static_cast<int>(5e8 / bytes) + 1, 4, 64); }

double run_linear(Bench& bench, const char* name, size n, size k, size batch, bool float_out = false) {
  const double bytes = 2.0 * static_cast<double>(n * k);
  const double us = bench.time(calls_for(bytes), [&](const gpu& exec) {
    if (float_out)
      linear(exec, bench.rows(0, batch, k), bench.weight(n, k), bench.rows<float>(1, batch, n));
    else
      linear(exec, bench.rows(0, batch, k), bench.weight(n, k), bench.rows(1, batch, n));
  });
  bench.report(name, batch, us, bytes);
  return us;
}

double run_add(Bench& bench, const char* name, size n, size k, size batch) {
  const double bytes = 2.0 * static_cast<double>(n * k);
  const double us = bench.time(calls_for(bytes), [&](const gpu& exec) {
    linear_add(exec, bench.rows(0, batch, k), bench.weight(n, k), bench.rows(1, batch, n));
  });
  bench.report(name, batch, us, bytes);
  return us;
}

/// Several matrices of one x in one launch: rows of each, and which are gated or give floats.
struct Part {
  size rows;
  bool gated = false, float_out = false;
};

double run_projections(Bench& bench, const char* name, std::initializer_list<Part> parts, size k, size batch) {
  double bytes = 0;
  for (const Part& p : parts) bytes += 2.0 * static_cast<double>(p.rows * k) * (p.gated ? 2 : 1);
  const double us = bench.time(calls_for(bytes), [&](const gpu& exec) {
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
  bench.report(name, batch, us, bytes);
  return us;
}

void run_batch(Bench& b, size batch) {
  const double kda = run_projections(b, "KDA q k v g f_a b 49376x7168",
                                     {{12288}, {12288}, {12288}, {12288}, {128}, {96}}, 7168, batch) +
                     run_linear(b, "KDA f_b 12288x128", 12288, 128, batch) +
                     run_add(b, "o_proj + residual 7168x12288", 7168, 12288, batch);
  b.report("= KDA projections", batch, kda, 2.0 * (49376.0 * 7168 + 12288.0 * 128 + 7168.0 * 12288));
  const double mla = run_projections(b, "MLA q_a kv_a g 14400x7168", {{1536}, {576}, {12288}}, 7168, batch) +
                     run_linear(b, "MLA q_b 18432x1536", 18432, 1536, batch) +
                     run_add(b, "o_proj + residual 7168x12288", 7168, 12288, batch);
  b.report("= MLA projections", batch, mla, 2.0 * (14400.0 * 7168 + 18432.0 * 1536 + 7168.0 * 12288));
  const double moe = run_projections(b, "MoE router down gate|up 16768x7168",
                                     {{896, false, true}, {3584}, {6144, true}}, 7168, batch) +
                     run_linear(b, "MoE shared down 7168x6144", 7168, 6144, batch) +
                     run_add(b, "MoE latent up + residual 7168x3584", 7168, 3584, batch);
  b.report("= MoE dense part", batch, moe, 2.0 * (16768.0 * 7168 + 7168.0 * 6144 + 7168.0 * 3584));
  const double mlp = run_projections(b, "MLP gate|up 67584x7168", {{33792, true}}, 7168, batch) +
                     run_add(b, "MLP down + residual 7168x33792", 7168, 33792, batch);
  b.report("= dense MLP", batch, mlp, 2.0 * 3 * 33792.0 * 7168);
  run_linear(b, "lm_head 163840x7168", 163840, 7168, batch, true);
  // Alone, for comparison with other libraries' tables.
  run_linear(b, "router 896x7168", 896, 7168, batch, true);
  run_linear(b, "q_a|kv_a 2112x7168", 2112, 7168, batch);
  run_linear(b, "latent down 3584x7168", 3584, 7168, batch);
}

void run_rows(Bench& b, size batch) {
  const size hidden = 7168;
  const auto vector = [&](size at) { return device_view(static_cast<const bf16*>(b.part<bf16>(at)), hidden); };
  size set = 0;
  const double bytes = static_cast<double>(batch * hidden) * 2 * 10 + 3.0 * 2 * static_cast<double>(hidden);
  const double mix = b.time(32, [&](const gpu& exec) {
    // Sources from the pool, another set each time.
    const auto sources = b.weight(9 * batch, hidden);
    const auto* data = static_cast<const bf16*>(sources.data);
    set = (set + 1) % 64;
    attnres_norm(exec, device_view(data, size{8}, batch, hidden), device_view(data + 8 * batch * hidden, batch, hidden),
                 vector(set << 16), vector((64 + set) << 16), 1e-5f, vector((128 + set) << 16), 1e-5f,
                 b.rows(6, batch, hidden));
  });
  b.report("AttnRes mix + RMSNorm, 9 sources", batch, mix, bytes);
  const double norm = b.time(32, [&](const gpu& exec) {
    rms_norm(exec, b.rows(0, batch, 3584), device_view(b.part<bf16>(size{100} << 16), size{3584}), 1e-6f,
             b.rows(1, batch, 3584));
  });
  b.report("RMSNorm 3584", batch, norm, static_cast<double>(batch) * 3584 * 4);
  const DeviceBuffer<id> ids(batch);
  DeviceArgmaxWorkspace workspace(batch);
  const auto* logits = static_cast<const float*>(b.weight(batch * 2, 163840).data);
  const double choice = b.time(
      32, [&](const gpu& exec) { argmax(exec, device_view(logits, batch, size{163840}), workspace, ids.view(batch)); });
  b.report("arg-max 163840 (L2)", batch, choice, static_cast<double>(batch) * 163840 * 4);
}

}  // namespace

int main() try {
  Bench bench;
  for (const size batch : {size{1}, size{8}, size{32}, size{128}}) {
    run_batch(bench, batch);
    run_rows(bench, batch);
    std::printf("\n");
  }
} catch (const error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
