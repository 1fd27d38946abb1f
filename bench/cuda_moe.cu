// SPDX-License-Identifier: Apache-2.0
// The routed experts on the device at the released model's geometry in bf16: 896 MXFP4 experts, 16 chosen at random for
// each of 1, 8, 32 and 128 tokens, from replays of a graph whose launches each have their own routing, so that nothing
// is found in the L2. Bytes: the weights of the distinct experts of a launch, once. And the choice of experts alone.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <k3/cuda/mix_routed_experts.cuh>
#include <k3/cuda/sigmoid_topk.cuh>

#include "cuda_harness.cuh"

namespace {

using namespace k3;
using namespace k3::bench;

constexpr LatentMoeConfig geometry = LatentMoeConfig::production();
constexpr size width = geometry.latent, hidden = geometry.expert_hidden, experts = geometry.n_routed,
               top_k = geometry.top_k;
constexpr size codes = width * hidden / 2, scales = width * hidden / 32, expert_bytes = 3 * (codes + scales);
constexpr size launches = 8, most_rows = 128;

__device__ unsigned scrambled(size i) {
  unsigned bits = static_cast<unsigned>(i ^ i >> 32) * 2654435761u;
  bits = (bits ^ (bits >> 15)) * 2246822519u;
  return bits ^ (bits >> 13);
}

/// Random codes; scale bytes of 116 to 119, so that products stay near 1.
__global__ void fill_experts(unsigned char* to, size count) {
  const size step = size{gridDim.x} * blockDim.x;
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < count; i += step) {
    const size at = i % (codes + scales);
    to[i] = static_cast<unsigned char>(at < codes ? scrambled(i) >> 8 : 116 + (scrambled(i) >> 8 & 3));
  }
}

template <class T>
__global__ void fill(T* to, size count) {
  const size step = size{gridDim.x} * blockDim.x;
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < count; i += step)
    to[i] = static_cast<T>(static_cast<float>(scrambled(i) >> 8) / 8388608.0f - 1);
}

ExpertTable make_table(const unsigned char* memory) {
  std::vector<DeviceExpertWeights> all(experts);
  for (size e = 0; e < experts; ++e) {
    AnyMatrix<MemorySpace::device>* matrices[3] = {&all[e].w1, &all[e].w3, &all[e].w2};
    for (size m = 0; m < 3; ++m) {
      const unsigned char* const at = memory + e * expert_bytes + m * (codes + scales);
      *matrices[m] = Mxfp4Matrix<MemorySpace::device>{
          device_view(at, m == 2 ? width : hidden, (m == 2 ? hidden : width) / 2),
          device_view(at + codes, m == 2 ? width : hidden, (m == 2 ? hidden : width) / 32)};
    }
  }
  return ExpertTable(geometry, all);
}

/// Distinct experts for every row, and how many a launch hits, on average.
std::vector<id> random_ids(size rows, double& hit) {
  std::mt19937 random(static_cast<unsigned>(rows));
  std::vector<id> ids;
  hit = 0;
  for (size launch = 0; launch < launches; ++launch) {
    std::set<id> of_launch;
    for (size row = 0; row < rows; ++row)
      for (std::set<id> chosen; chosen.size() < top_k;) {
        const id e = static_cast<id>(random() % experts);
        if (!chosen.insert(e).second) continue;
        ids.push_back(e);
        of_launch.insert(e);
      }
    hit += static_cast<double>(of_launch.size()) / launches;
  }
  return ids;
}

void run() {
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const gpu exec{stream};
  const DeviceBuffer<unsigned char> memory(experts * expert_bytes, false);
  fill_experts<<<4096, 256>>>(memory.data(), memory.count());
  DeviceBuffer<bf16> latent(launches * most_rows * width), out(launches * most_rows * width);
  DeviceBuffer<float> weights(launches * most_rows * top_k), logits(launches * most_rows * experts), bias(experts);
  fill<<<1024, 256>>>(latent.data(), latent.count());
  fill<<<1024, 256>>>(weights.data(), weights.count());
  fill<<<1024, 256>>>(logits.data(), logits.count());
  detail::check_launch("fill");
  const ExpertTable table = make_table(memory.data());
  MoeDeviceWorkspace<Bf16> workspace(geometry, most_rows);
  DeviceBuffer<unsigned> sink(1);
  check_cuda(cudaDeviceSynchronize());

  const size ceiling_bytes = size{2} << 30;
  const Timing read = measure(stream, 1, 20, [&] {
    read_all<<<4096, 256, 0, stream>>>(reinterpret_cast<const uint4*>(memory.data()), ceiling_bytes / 16, sink.data());
  });
  const double ceiling = static_cast<double>(ceiling_bytes) / read.median_us * 1e-3;
  std::printf("read ceiling %.0f GB/s\n%-16s %5s %8s %10s %10s %10s %8s %6s\n", ceiling, "operation", "batch",
              "experts", "us", "p10", "p90", "GB/s", "%");
  for (const size rows : {size{1}, size{8}, size{32}, size{128}}) {
    double hit = 0;
    const std::vector<id> host_ids = random_ids(rows, hit);
    const DeviceBuffer<id> ids(host_ids);
    const Timing t = measure(stream, launches, 20, [&] {
      for (size l = 0; l < launches; ++l)
        mix_routed_experts(exec, geometry, device_view(latent.data() + l * rows * width, rows, width),
                           device_view(ids.data() + l * rows * top_k, rows, top_k),
                           device_view(weights.data() + l * rows * top_k, rows, top_k), table, workspace,
                           device_view(out.data() + l * rows * width, rows, width));
    });
    const double rate = hit * static_cast<double>(expert_bytes) / t.median_us * 1e-3;
    std::printf("%-16s %5zu %8.1f %10.2f %10.2f %10.2f %8.0f %6.1f\n", "experts", rows, hit, t.median_us, t.low_us,
                t.high_us, rate, 100 * rate / ceiling);
    DeviceBuffer<id> chosen(rows * top_k);
    const Timing r = measure(stream, launches, 20, [&] {
      for (size l = 0; l < launches; ++l)
        sigmoid_topk(exec, device_view(logits.data() + l * rows * experts, rows, experts),
                     device_view(bias.data(), experts), top_k, true, 1.0f, device_view(chosen.data(), rows, top_k),
                     device_view(weights.data(), rows, top_k));
    });
    std::printf("%-16s %5zu %8s %10.2f %10.2f %10.2f\n", "router top-k", rows, "", r.median_us, r.low_us, r.high_us);
  }
  check_cuda(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  try {
    run();
  } catch (const k3::error& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
  return 0;
}
