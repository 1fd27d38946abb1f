// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/common.cuh>

// What the expert kernels use of sm_90: launches that overlap the kernel before, barriers in shared memory that count
// bytes, and bulk copies that complete on them.
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

__device__ __forceinline__ unsigned expert_shared(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

/// A barrier in shared memory. Its n-th use is phase n; waiting takes the parity of that number.
struct ExpertBarrier {
  unsigned long long state;

  __device__ __forceinline__ void init(unsigned arrivals) {
    if constexpr (expert_async)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(expert_shared(this)), "r"(arrivals) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    if constexpr (expert_async)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(expert_shared(this)) : "memory");
  }
  /// Arrives, and lets the phase end only when that many bytes have come too.
  __device__ __forceinline__ void arrive_expecting(unsigned bytes) {
    if constexpr (expert_async)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(expert_shared(this)), "r"(bytes)
                   : "memory");
  }
  __device__ __forceinline__ void wait(unsigned parity) {
    if constexpr (expert_async)
      asm volatile(
          "{.reg .pred done;\n"
          "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
          "@!done bra again;}\n" ::"r"(expert_shared(this)),
          "r"(parity)
          : "memory");
  }
};

/// Makes barriers that this thread has initialised known to the copies.
__device__ __forceinline__ void expert_barriers_ready() {
  if constexpr (expert_async) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// `bytes` from global to shared memory, all multiples of 16; they count at the barrier.
__device__ __forceinline__ void expert_copy(void* to, const void* from, unsigned bytes, ExpertBarrier& barrier) {
  if constexpr (expert_async)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     expert_shared(to)),
                 "l"(from), "r"(bytes), "r"(expert_shared(&barrier))
                 : "memory");
}

/// Adds 1 to a counter once this thread's stores, and those it knows of, are visible to who reads it with acquire.
__device__ __forceinline__ void expert_release(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
/// Returns when the counter has reached `target`.
__device__ __forceinline__ void expert_acquire(const unsigned* counter, unsigned target) {
  unsigned value;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  while (value < target);
}

}  // namespace k3::kernel
