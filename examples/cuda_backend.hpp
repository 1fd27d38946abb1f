// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine.hpp"

/// Whether this program has the CUDA backend: cuda_backend.cu is in it, or no_cuda_backend.cpp.
bool cuda_backend_built();

/// Why no GPU can be used, in a sentence; empty where one can.
std::string gpu_problem();

/// Least bytes for routed experts on a GPU: those that one token uses in one layer.
std::uint64_t gpu_expert_floor(const k3::K3CpuModel& model);

/// Page-locked memory, which a GPU reads fastest; null where there is none.
std::shared_ptr<std::byte> gpu_host_memory(std::size_t bytes);

/// Moves the model to the GPU and makes an engine there, in float or bf16.
std::unique_ptr<Engine> make_cuda_engine(const k3::K3CpuModel& model, const EngineOptions& options,
                                         const MoveProgress& progress);
