// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include <k3/model/greedy_decode.hpp>

/// Whether this program has the CUDA backend: cuda_backend.cu is in it, or no_cuda_backend.cpp.
bool cuda_backend_built();

/// Moves the model to the GPU and decodes greedily there, in float or bf16. `progress` is told bytes moved and bytes in all.
k3::GreedyResult<float> decode_on_cuda(const k3::K3CpuModel& model, const std::vector<k3::id>& prompt,
                                       const k3::GreedyOptions& options, bool half,
                                       const std::function<void(k3::id)>& on_token,
                                       const std::function<void(std::size_t, std::size_t)>& progress);
