// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/architecture.cuh>

// Matrix products of a warpgroup, of sm_90a: their order, and the registers of those who wait for them. The products
// themselves: linear_hopper.cuh and mla_hopper.cuh.
namespace k3::kernel {

/// Whether this compilation's target has them. Elsewhere the kernels that use them are empty.
inline constexpr bool on_hopper = architecture::warpgroup_products;

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Returns when at most `Left` groups are on their way.
template <int Left>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

/// Registers of each thread of a warpgroup from here on.
template <unsigned Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <unsigned Count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

}  // namespace k3::kernel
