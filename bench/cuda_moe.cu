// SPDX-License-Identifier: Apache-2.0
// The routed experts on the device at the released model's geometry in bf16: 896 MXFP4 experts, 16 chosen at random for
// each of 1, 8, 32 and 128 tokens, from replays of a graph whose launches each have their own routing, so that nothing
// is found in the L2. Bytes: the weights of the distinct experts of a launch, once. And the choice of experts alone.

#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <k3/cuda/mix_routed_experts.cuh>
#include <k3/cuda/repack_experts.cuh>
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

struct Memory {
  DeviceBuffer<unsigned char> experts_memory{experts * expert_bytes, false};
  DeviceBuffer<bf16> latent{launches * most_rows * width}, out{launches * most_rows * width};
  DeviceBuffer<float> weights{launches * most_rows * top_k}, logits{launches * most_rows * experts}, bias{experts};

  Memory() {
    fill_experts<<<4096, 256>>>(experts_memory.data(), experts_memory.count());
    fill<<<1024, 256>>>(latent.data(), latent.count());
    fill<<<1024, 256>>>(weights.data(), weights.count());
    fill<<<1024, 256>>>(logits.data(), logits.count());
    detail::check_launch("fill");
    check_cuda(cudaDeviceSynchronize());
  }
};

/// Repacks the experts, and says how fast that is.
void repack(const gpu& exec, ExpertTable& table) {
  cudaEvent_t start, stop;
  check_cuda(cudaEventCreate(&start));
  check_cuda(cudaEventCreate(&stop));
  check_cuda(cudaEventRecord(start, exec.stream));
  repack_experts(exec, table);
  check_cuda(cudaEventRecord(stop, exec.stream));
  check_cuda(cudaStreamSynchronize(exec.stream));
  float milliseconds = 0;
  check_cuda(cudaEventElapsedTime(&milliseconds, start, stop));
  std::printf("repacking %zu experts: %.2f ms, %.0f GB/s read and written\n", experts, milliseconds,
              2e-6 * static_cast<double>(experts * expert_bytes) / milliseconds);
  check_cuda(cudaEventDestroy(start));
  check_cuda(cudaEventDestroy(stop));
}

void run(int argc, char** argv) {
  Report report(argc, argv);
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const gpu exec{stream};
  const Memory m;
  ExpertTable table = make_table(m.experts_memory.data());
  MoeDeviceWorkspace<Bf16> workspace(geometry, most_rows);
  const auto time_experts = [&](const char* name) {
    for (const size rows : report.batches()) {
      double hit = 0;
      const DeviceBuffer<id> ids(random_ids(rows, hit));
      const Timing t = measure(stream, launches, report.replays(20), [&] {
        for (size l = 0; l < launches; ++l)
          mix_routed_experts(exec, geometry, device_view(m.latent.data() + l * rows * width, rows, width),
                             device_view(ids.data() + l * rows * top_k, rows, top_k),
                             device_view(m.weights.data() + l * rows * top_k, rows, top_k), table, workspace,
                             device_view(m.out.data() + l * rows * width, rows, width));
      });
      report.add(name, rows, 0, t, hit * static_cast<double>(expert_bytes));
    }
  };
  time_experts("moe_experts_released");
  repack(exec, table);
  time_experts("moe_experts");
  for (const size rows : report.batches()) {
    const DeviceBuffer<id> chosen(rows * top_k);
    const Timing t = measure(stream, launches, report.replays(20), [&] {
      for (size l = 0; l < launches; ++l)
        sigmoid_topk(exec, device_view(m.logits.data() + l * rows * experts, rows, experts),
                     device_view(m.bias.data(), experts), top_k, true, 1.0f, device_view(chosen.data(), rows, top_k),
                     device_view(m.weights.data(), rows, top_k));
    });
    report.add("router_topk", rows, 0, t, static_cast<double>(rows * experts * sizeof(float)));
  }
  check_cuda(cudaStreamDestroy(stream));
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] { run(argc, argv); });
}
