// SPDX-License-Identifier: Apache-2.0
// The routed experts on the device at the released model's geometry in bf16: 896 MXFP4 experts, 16 chosen at random for
// each of 1 to 128 tokens, from replays of a graph whose launches each have their own routing, so that nothing is found
// in the L2. Bytes: the weights of the distinct experts of a launch, once. The last row of the last timed launch is
// computed again in double. And the choice of experts alone.

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

/// Where the random codes of matrix w1, w3 or w2 of an expert come from.
RandomMxfp4 source(size expert, size matrix) { return {2 * (3 * expert + matrix)}; }

/// Makes the experts in the released layout.
ExpertTable make_table(unsigned char* memory) {
  std::vector<DeviceExpertWeights> all(experts);
  for (size e = 0; e < experts; ++e) {
    AnyMatrix<MemorySpace::device>* matrices[3] = {&all[e].w1, &all[e].w3, &all[e].w2};
    for (size m = 0; m < 3; ++m) {
      unsigned char* const at = memory + e * expert_bytes + m * (codes + scales);
      fill_mxfp4(at, at + codes, width * hidden, source(e, m).seed);
      *matrices[m] = Mxfp4Matrix<MemorySpace::device>{
          device_view(static_cast<const unsigned char*>(at), m == 2 ? width : hidden, (m == 2 ? hidden : width) / 2),
          device_view(static_cast<const unsigned char*>(at) + codes, m == 2 ? width : hidden,
                      (m == 2 ? hidden : width) / 32)};
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
    fill_uniform(latent.data(), latent.count(), 10000, 1);
    fill_uniform(weights.data(), weights.count(), 10001, 1);
    fill_uniform(logits.data(), logits.count(), 10002, 1);
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

/// 64 channels of the last row of the last launch, whose experts are the last of `ids`.
void compare(Report& report, const char* name, const Memory& m, const std::vector<id>& ids, size rows) {
  const size row = launches * rows - 1;
  const std::vector<double> x = device_row(m.latent.data() + row * width, width);
  const std::vector<double> weights = device_row(m.weights.data() + row * top_k, top_k);
  const std::vector<size> channels = sampled(width);
  std::vector<double> want(channels.size(), 0.0);
  for (size j = 0; j < top_k; ++j) {
    const size expert = static_cast<size>(ids[row * top_k + j]);
    const RandomMxfp4 matrices[3] = {source(expert, 0), source(expert, 1), source(expert, 2)};
    const std::vector<double> y = random_expert(geometry, matrices, x, channels);
    for (size c = 0; c < want.size(); ++c) want[c] += weights[j] * y[c];
  }
  report.compare(name, device_row(m.out.data() + row * width, width, channels), want, 1e-2);
}

void run(int argc, char** argv) {
  Report report(argc, argv);
  const DeviceStream stream;
  const gpu exec{stream};
  const Memory m;
  ExpertTable table = make_table(m.experts_memory.data());
  MoeDeviceWorkspace<Bf16> workspace(geometry, most_rows);
  const auto time_experts = [&](const char* name, List list) {
    for (const size rows : report.batches()) {
      double hit = 0;
      const std::vector<id> chosen = random_ids(rows, hit);
      const DeviceBuffer<id> ids(chosen);
      const Timing t = measure(stream, launches, report.replays(20), [&] {
        for (size l = 0; l < launches; ++l)
          mix_routed_experts(exec, geometry, device_view(m.latent.data() + l * rows * width, rows, width),
                             device_view(ids.data() + l * rows * top_k, rows, top_k),
                             device_view(m.weights.data() + l * rows * top_k, rows, top_k), table, workspace,
                             device_view(m.out.data() + l * rows * width, rows, width));
      });
      report.add(name, rows, 0, t, hit * static_cast<double>(expert_bytes), list);
      compare(report, name, m, chosen, rows);
    }
  };
  time_experts("moe_experts, released layout", List::none);
  repack(exec, table);
  time_experts("moe_experts", List::results);
  for (const size rows : report.batches()) {
    const DeviceBuffer<id> chosen(rows * top_k);
    const Timing t = measure(stream, launches, report.replays(20), [&] {
      for (size l = 0; l < launches; ++l)
        sigmoid_topk(exec, device_view(m.logits.data() + l * rows * experts, rows, experts),
                     device_view(m.bias.data(), experts), top_k, true, 1.0f, device_view(chosen.data(), rows, top_k),
                     device_view(m.weights.data(), rows, top_k));
    });
    report.add("router_topk", rows, 0, t, static_cast<double>(rows * experts * sizeof(float)), List::none);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] { run(argc, argv); });
}
