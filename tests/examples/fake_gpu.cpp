// SPDX-License-Identifier: Apache-2.0
// A stand-in for the CUDA backend that computes on the host: with it k3 can be tested where there is no GPU.
// K3_FAKE_GPU makes it bad: `none` is there, `small` (nothing is left for experts), `unlocked` (no page-locked memory),
// `slow` (an upload takes ten seconds).

#include <chrono>
#include <cstdlib>
#include <thread>

#include "../../examples/cuda_backend.hpp"

namespace {

bool is(const std::string& fault) {
  const char* const value = std::getenv("K3_FAKE_GPU");
  return value && value == fault;
}

}  // namespace

bool cuda_backend_built() { return true; }

std::string gpu_problem() { return is("none") ? "the fake GPU is not there" : ""; }

std::uint64_t gpu_expert_floor(const k3::K3CpuModel& model) { return 10000 * model.config.moe.top_k; }

std::shared_ptr<std::byte> gpu_host_memory(std::size_t bytes) {
  if (is("unlocked")) return nullptr;
  return {new std::byte[bytes], [](const std::byte* memory) { delete[] memory; }};
}

std::unique_ptr<Engine> make_cuda_engine(const k3::K3CpuModel& model, const EngineOptions& options,
                                         const MoveProgress& progress) {
  for (std::size_t step = 0; step <= 1000; ++step) {
    progress(step << 20, std::size_t{1000} << 20);
    if (is("slow")) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const std::uint64_t left = is("small") ? 512 : std::uint64_t{1} << 40;
  const std::uint64_t memory =
      options.gpu_memory == EngineOptions::automatic ? left : options.gpu_memory.value_or(left);
  k3::detail::require(memory >= gpu_expert_floor(model), "ExpertCache", "memory", memory, "the floor");
  EngineOptions host = options;
  host.backend = "host";
  return make_engine(model, host, progress);
}
