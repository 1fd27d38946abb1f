// SPDX-License-Identifier: Apache-2.0
// The host's headers in a CUDA translation unit: they compile there, and a formula runs on both sides.
#include <cstdio>

#include <k3/k3.hpp>

__global__ void situ_glu_rows(const float* gate, const float* up, float* out, k3::size count) {
  const k3::size i = blockIdx.x * k3::size{blockDim.x} + threadIdx.x;
  if (i < count) out[i] = k3::bf16(k3::situ_glu(gate[i], up[i], 4.0f, 25.0f));
}

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device; on the host: %g\n", static_cast<double>(k3::situ_glu(1.0f, 2.0f, 4.0f, 25.0f)));
    return 0;
  }
  float* values = nullptr;
  if (cudaMallocManaged(&values, 3 * sizeof(float)) != cudaSuccess) return 1;
  values[0] = 1.0f;
  values[1] = 2.0f;
  situ_glu_rows<<<1, 1>>>(values, values + 1, values + 2, 1);
  if (cudaDeviceSynchronize() != cudaSuccess) return 1;
  const float difference = values[2] - k3::bf16(k3::situ_glu(1.0f, 2.0f, 4.0f, 25.0f));
  std::printf("device: %g, difference to the host %g\n", static_cast<double>(values[2]),
              static_cast<double>(difference));
  return difference < 1e-2f && difference > -1e-2f ? 0 : 1;
}
