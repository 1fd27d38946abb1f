// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <k3/core/error.hpp>

namespace k3::detail {

/// Throws cuda_error, naming the operation and the call, unless `code` is cudaSuccess.
inline void check_cuda(const char* operation, const char* call, cudaError_t code) {
  if (code != cudaSuccess) throw cuda_error(operation, call, static_cast<int>(code), cudaGetErrorString(code));
}

/// To be called right after a launch: throws what the launch itself was refused for. Waits for nothing.
inline void check_launch(const char* operation) { check_cuda(operation, "kernel launch", cudaGetLastError()); }

}  // namespace k3::detail
