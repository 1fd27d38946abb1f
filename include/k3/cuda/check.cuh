// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <k3/core/error.hpp>

namespace k3::detail {

/// Drops an error that nobody can be told of (in a destructor, or behind another error), so that no later launch is
/// blamed for it. An error that ended the context stays all the same.
inline void ignore_cuda(cudaError_t code) {
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());
}

/// Throws cuda_error, naming the operation and the call, unless `code` is cudaSuccess. The runtime's own memory of the
/// error is cleared: it has been reported.
inline void check_cuda(const char* operation, const char* call, cudaError_t code) {
  if (code == cudaSuccess) return;
  ignore_cuda(code);
  throw cuda_error(operation, call, static_cast<int>(code), cudaGetErrorString(code));
}

/// To be called right after a launch: throws what the launch itself was refused for. Waits for nothing.
inline void check_launch(const char* operation) { check_cuda(operation, "kernel launch", cudaGetLastError()); }

/// While it lives, this thread may wait for its stream and allocate although another stream is being captured.
class BesideCaptures {
 public:
  BesideCaptures() { exchange(); }
  ~BesideCaptures() { exchange(); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  void exchange() { ignore_cuda(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace k3::detail
