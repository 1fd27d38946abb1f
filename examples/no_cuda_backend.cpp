// SPDX-License-Identifier: Apache-2.0
// Takes the place of cuda_backend.cu in a build without CUDA.

#include "cuda_backend.hpp"

bool cuda_backend_built() { return false; }

k3::GreedyResult<float> decode_on_cuda(const k3::K3CpuModel&, const std::vector<k3::id>&, const k3::GreedyOptions&, bool,
                                       const std::function<void(k3::id)>&,
                                       const std::function<void(std::size_t, std::size_t)>&) {
  throw k3::error("this program was built without CUDA");
}
