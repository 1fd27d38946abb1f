// SPDX-License-Identifier: Apache-2.0
#include "cuda/target_device.hpp"

#include <k3/cuda/buffer.cuh>
#include <k3/cuda/launch.cuh>

namespace k3::test {

namespace {

__global__ void write_features(unsigned* out) {
  using namespace kernel::architecture;
  out[0] = overlapping_launches, out[1] = bulk_copies, out[2] = clusters, out[3] = warpgroup_products;
}

}  // namespace

std::vector<Feature> features() {
  const DeviceBuffer<unsigned> out(4);
  write_features<<<1, 1>>>(out.data());
  detail::check_launch("test");
  const std::vector<unsigned> compiled = out.to_vector();
  const detail::Target& target = detail::target("test");
  return {{"overlapping_launches", target.overlapping_launches, compiled[0] != 0},
          {"bulk_copies", target.bulk_copies, compiled[1] != 0},
          {"clusters", target.clusters, compiled[2] != 0},
          {"warpgroup_products", target.warpgroup_products, compiled[3] != 0}};
}

int compiled_for() {
  cudaFuncAttributes attributes{};
  detail::check_cuda("test", "cudaFuncGetAttributes", cudaFuncGetAttributes(&attributes, write_features));
  return attributes.ptxVersion;
}

}  // namespace k3::test
