// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <k3/kernels/architecture.cuh>
#include <k3/kernels/grid_order.cuh>

// What moves by itself: prefetches, bulk and tensor copies into shared memory, values sent to other blocks of a
// cluster, and the barriers in shared memory that count the bytes which arrive. From compute capability 9.0 on;
// elsewhere the functions compile and trap, and launches ask what a kernel was compiled for before they choose one that
// calls them.
namespace k3::kernel::async {

/// Fetches the cache line at `address` into the L2 cache. It stays coherent there: allowed before wait_for_earlier,
/// whoever writes the line.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
/// As `prefetch`, for a range on multiples of 16 bytes.
__device__ __forceinline__ void prefetch_bulk(const void* from, unsigned bytes) {
  if constexpr (architecture::bulk_copies)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  else
    __trap();
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  if constexpr (architecture::bulk_copies)
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
  else
    __trap();
}

__device__ __forceinline__ unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

/// A barrier in shared memory. Its phases are 0, 1, 0...: one ends when all have arrived and the bytes that were
/// announced are there.
struct Barrier {
  unsigned long long word;
};

/// By one thread; init_fence afterwards.
__device__ __forceinline__ void init(unsigned barrier, unsigned arrivals) {
  if constexpr (architecture::bulk_copies)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
  else
    __trap();
}
/// Makes initialised barriers visible to the cluster and to copies.
__device__ __forceinline__ void init_fence() {
  if constexpr (architecture::bulk_copies)
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  else
    __trap();
}
__device__ __forceinline__ void arrive(unsigned barrier) {
  if constexpr (architecture::bulk_copies)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  else
    __trap();
}
/// Arrives, and lets the phase end only after `bytes` have been copied.
__device__ __forceinline__ void arrive_expecting(unsigned barrier, unsigned bytes) {
  if constexpr (architecture::bulk_copies)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  else
    __trap();
}
/// Returns when the phase of this parity is over.
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  if constexpr (architecture::bulk_copies)
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
  else
    __trap();
}
__device__ __forceinline__ void init(Barrier& b, unsigned arrivals) { init(shared_address(&b), arrivals); }
__device__ __forceinline__ void arrive(Barrier& b) { arrive(shared_address(&b)); }
__device__ __forceinline__ void arrive_expecting(Barrier& b, unsigned bytes) {
  arrive_expecting(shared_address(&b), bytes);
}
__device__ __forceinline__ void wait(Barrier& b, unsigned parity) { wait(shared_address(&b), parity); }

/// True in one lane of the warp, which all call: the compiler then knows that one copies, and makes no loop of it.
__device__ __forceinline__ bool elected() {
  unsigned elected = 0;
  if constexpr (architecture::bulk_copies)
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

/// How the L2 cache keeps lines that are read once; that are read again, or written soon.
__device__ __forceinline__ unsigned long long policy_first() {
  unsigned long long policy = 0;
  if constexpr (architecture::bulk_copies) asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ unsigned long long policy_last() {
  unsigned long long policy = 0;
  if constexpr (architecture::bulk_copies) asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  return policy;
}

/// Copies a multiple of 16 bytes, from and to such addresses; the barrier counts them.
__device__ __forceinline__ void copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  if constexpr (architecture::bulk_copies)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
  else
    __trap();
}
__device__ __forceinline__ void copy(unsigned to, const void* from, unsigned bytes, unsigned barrier,
                                     unsigned long long policy) {
  if constexpr (architecture::bulk_copies)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
  else
    __trap();
}
/// A box of a tensor to shared memory at `to`. What lies outside the tensor becomes zeros, and is counted too.
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap* map, unsigned x, unsigned y, Barrier& b,
                                         unsigned long long policy) {
  if constexpr (architecture::bulk_copies)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(shared_address(&b)), "l"(policy)
        : "memory");
  else
    __trap();
}
__device__ __forceinline__ void copy_box(unsigned to, const CUtensorMap* map, int x, int y, int z, Barrier& b) {
  if constexpr (architecture::bulk_copies)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&b))
        : "memory");
  else
    __trap();
}
/// This thread's ordinary accesses of shared memory come before copies, and before matrix products that read it there,
/// behind the next barrier. Nothing where there are neither.
__device__ __forceinline__ void fence() {
  if constexpr (architecture::bulk_copies) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
  if constexpr (architecture::clusters) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// All threads of the cluster; shared memory written before can be read by any of them afterwards.
__device__ __forceinline__ void cluster_arrive() {
  if constexpr (architecture::clusters)
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  else
    __trap();
}
__device__ __forceinline__ void cluster_wait() {
  if constexpr (architecture::clusters)
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    __trap();
}
__device__ __forceinline__ void cluster_sync() { cluster_arrive(), cluster_wait(); }

/// The address in the shared memory of block `rank` of the cluster of what lies at `at` in this block's.
__device__ __forceinline__ unsigned address_at_rank(const void* at, unsigned rank) {
  unsigned address = 0;
  if constexpr (architecture::clusters)
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(rank));
  return address;
}
/// Reads there.
__device__ __forceinline__ float4 load_at(unsigned address) {
  float4 v = {};
  if constexpr (architecture::clusters)
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address));
  else
    __trap();
  return v;
}
/// *at = value in the shared memory of block `rank` of the cluster, whose barrier counts 4 bytes for it: one trip,
/// where a store and a barrier of the cluster are three.
__device__ __forceinline__ void send(float* at, unsigned rank, float value, Barrier& b) {
  if constexpr (architecture::clusters)
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address_at_rank(at, rank)),
        "r"(__float_as_uint(value)), "r"(address_at_rank(&b, rank))
        : "memory");
  else
    __trap();
}

}  // namespace k3::kernel::async
