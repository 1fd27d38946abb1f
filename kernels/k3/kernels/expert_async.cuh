// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/common.cuh>

// What the expert kernels use of sm_90: launches that overlap the kernel before; and counters between blocks.
namespace k3::kernel {

/// Whether this compilation's target has them. Elsewhere these functions are empty, and so is the kernel built on them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool expert_async = true;
#else
inline constexpr bool expert_async = false;
#endif

/// Lets the next kernel's blocks start as this one's leave room.
__device__ __forceinline__ void expert_start_next() {
  if constexpr (expert_async) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/// Returns when the kernel before is done and its stores are visible.
__device__ __forceinline__ void expert_wait_before() {
  if constexpr (expert_async) asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Between this thread's stores, with those it knows of, and its counting them.
__device__ __forceinline__ void expert_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void expert_count(unsigned* counter, unsigned more) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(more) : "memory");
}
/// A counter's value; what happened before it got there, by whoever counts behind a fence, can be read from here on.
__device__ __forceinline__ unsigned expert_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace k3::kernel
