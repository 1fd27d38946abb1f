// SPDX-License-Identifier: Apache-2.0
// One operation on a GPU: the host's call with another execution object and views of device memory.
#include <cstdio>

#include <k3/cuda/buffer.cuh>
#include <k3/cuda/rms_norm.cuh>

int main() {
  try {
    // example-begin rms_norm_cuda
    const std::vector<float> x{1, 2, 3, 4}, weight{1, 1, 1, 1};
    const k3::DeviceBuffer<float> there(x), weights(weight), out(4);  // owns device memory; copies and waits
    cudaStream_t stream = nullptr;                                    // or one of your own
    k3::rms_norm(k3::gpu{stream}, there.view(1, 4), weights.view(4), 1e-5f, out.view(1, 4));  // returns at once
    for (const float value : out.to_vector()) std::printf("%.4f ", static_cast<double>(value));
    // example-end rms_norm_cuda
    const std::vector<float> want{0.3651f, 0.7303f, 1.0954f, 1.4606f}, got = out.to_vector();
    std::printf("\n");
    for (std::size_t i = 0; i < want.size(); ++i)
      if (!(std::abs(got[i] - want[i]) < 1e-4f)) return 1;
    return 0;
  } catch (const k3::cuda_error& problem) {
    std::printf("%s\n", problem.what());
    return 1;
  }
}
