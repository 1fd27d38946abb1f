// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/architecture.cuh>
#include <k3/kernels/common.cuh>

// What the expert kernels use of sm_90: launches that overlap the kernel before, bulk copies into shared memory; and
// counters between blocks.
namespace k3::kernel {

/// Whether this compilation's target has them. Elsewhere these functions are empty, and so is the kernel built on them.
inline constexpr bool expert_async = architecture::overlapping_launches;

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

__device__ __forceinline__ unsigned expert_shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}
// A barrier in shared memory, by its address: one thread prepares it, and says for each round how many bytes come; the
// rounds' phases are 0, 1, 0...
__device__ __forceinline__ void expert_prepare(unsigned barrier) {
  if constexpr (expert_async)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void expert_expect(unsigned barrier, unsigned bytes) {
  if constexpr (expert_async)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void expert_await(unsigned barrier, unsigned phase) {
  if constexpr (expert_async) {
    unsigned done = 0;
    while (done == 0)
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(barrier), "r"(phase)
                   : "memory");
  }
}
/// True in one lane of the warp, which all call: the compiler then knows that one copies, and makes no loop of it.
__device__ __forceinline__ bool expert_elected() {
  unsigned elected = 0;
  if constexpr (expert_async)
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}
/// Copies a multiple of 16 bytes, from and to such addresses.
__device__ __forceinline__ void expert_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  if constexpr (expert_async)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ uint4 expert_shared_piece(unsigned at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ unsigned expert_shared_word(unsigned at) {
  unsigned v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

}  // namespace k3::kernel
