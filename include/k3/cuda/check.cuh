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

/// CUDA's sentence for a code; where no GPU can be used at all, what is missing and what to do.
inline const char* cuda_description(cudaError_t code) {
  switch (code) {
    case cudaErrorNoDevice:
      return "no NVIDIA GPU can be seen here: see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES lets it "
             "through, or use k3::host, which needs none";
    case cudaErrorInsufficientDriver:
      return "there is no NVIDIA driver here, or it is older than the CUDA version of this program: install one at "
             "least as new (nvidia-smi shows the version that a driver supports), or use k3::host, which needs none";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return "this program has no code that the GPU and its driver can run: compile it with nvcc -gencode for the "
             "GPU's compute capability, 8.0 or newer";
    default: return cudaGetErrorString(code);
  }
}

/// Throws cuda_error, naming the operation and the call, unless `code` is cudaSuccess. The runtime's own memory of the
/// error is cleared: it has been reported.
inline void check_cuda(const char* operation, const char* call, cudaError_t code) {
  if (code == cudaSuccess) return;
  ignore_cuda(code);
  throw cuda_error(operation, call, static_cast<int>(code), cuda_description(code));
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
