// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <k3/cuda/execution.cuh>

namespace k3::detail {

/// Whether kernels may begin before the one in front of them ends: from compute capability 9.0 on.
inline bool overlapping_launches() {
  static const bool able = [] {
    int device = 0, major = 0;
    check_cuda("launch", "cudaGetDevice", cudaGetDevice(&device));
    check_cuda("launch", "cudaDeviceGetAttribute",
               cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
  }();
  return able;
}

/// Launches clusters of `cluster` neighbouring blocks; otherwise as `launch`.
template <class... Parameters>
void launch_clusters(cudaStream_t stream, unsigned cluster, dim3 grid, dim3 block, size shared,
                     void (*kernel)(Parameters...), const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (overlapping_launches()) {
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
  check_cuda("launch", "cudaLaunchKernelExC",
             cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers));
}

/// Launches a kernel that may begin while the one before it on the stream still runs. Only for kernels that keep the
/// rules of kernels/grid_order.cuh: every thread calls wait_for_earlier before it reads what an earlier kernel wrote
/// and before it writes. Where the earlier kernel does not call let_later_start, or the device is older than compute
/// capability 9.0, the launch is an ordinary one. Throws cuda_error where it is refused.
template <class... Parameters>
void launch(cudaStream_t stream, dim3 grid, dim3 block, size shared, void (*kernel)(Parameters...),
            const std::type_identity_t<Parameters>&... arguments) {
  launch_clusters(stream, 1, grid, block, shared, kernel, arguments...);
}

}  // namespace k3::detail
