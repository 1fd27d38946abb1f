// SPDX-License-Identifier: Apache-2.0

#include "cuda_backend.hpp"

bool cuda_backend_built() { return false; }

std::string gpu_problem() { return "this program was built without CUDA"; }

std::uint64_t gpu_expert_floor(const k3::K3CpuModel&) { return 0; }

std::shared_ptr<std::byte> gpu_host_memory(std::size_t) { return nullptr; }

std::unique_ptr<Engine> make_cuda_engine(const k3::K3CpuModel&, const EngineOptions&, const MoveProgress&) {
  throw k3::invalid_argument("make_engine", "backend", "cuda", "host: this program was built without CUDA");
}
