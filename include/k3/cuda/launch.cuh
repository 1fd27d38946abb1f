// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <k3/cuda/execution.cuh>
#include <k3/kernels/architecture.cuh>

namespace k3::detail {

/// What the kernels that run on this device were compiled for, by the names of kernels/architecture.cuh. It may be less
/// than the device has: kernels for compute capability 8.0 run on a 9.0 too, compiled from PTX when the program starts,
/// and then neither wait for the kernel before them nor copy in bulk.
struct Target {
  bool overlapping_launches, bulk_copies, clusters, warpgroup_products;
};

/// Of the device that was current at the first call. The files of a program are to be compiled for the same targets.
/// Throws cuda_error, naming the operation, where there are no kernels for the device.
inline const Target& target(const char* operation) {
  static const Target found = [operation] {
    cudaFuncAttributes attributes{};
    check_cuda(operation, "cudaFuncGetAttributes", cudaFuncGetAttributes(&attributes, kernel::target_probe<>));
    const int has = attributes.maxThreadsPerBlock / 32 - 1;
    return Target{(has & 1) != 0, (has & 2) != 0, (has & 4) != 0, (has & 8) != 0};
  }();
  return found;
}

/// Launches clusters of `cluster` neighbouring blocks; otherwise as `launch`.
template <class... Parameters>
void launch_clusters(const char* operation, cudaStream_t stream, unsigned cluster, dim3 grid, dim3 block, size shared,
                     void (*kernel)(Parameters...), const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (target(operation).overlapping_launches) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = attributes, config.numAttrs = count;
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  check_cuda(operation, "cudaLaunchKernelExC",
             cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers));
}

/// Launches a kernel that may begin while the one before it on the stream still runs. Only for kernels that keep the
/// rules of kernels/grid_order.cuh: every thread calls wait_for_earlier before it reads what an earlier kernel wrote
/// and before it writes. Where the earlier kernel does not call let_later_start, or kernels were not compiled for
/// compute capability 9.0 or later, the launch is an ordinary one. Throws
/// cuda_error, naming the operation, where it is refused.
template <class... Parameters>
void launch(const char* operation, cudaStream_t stream, dim3 grid, dim3 block, size shared,
            void (*kernel)(Parameters...), const std::type_identity_t<Parameters>&... arguments) {
  launch_clusters(operation, stream, 1, grid, block, shared, kernel, arguments...);
}

}  // namespace k3::detail
