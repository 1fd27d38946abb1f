// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/architecture.cuh>
#include <k3/kernels/grid_order.cuh>

// What moves by itself: prefetches, bulk copies into shared memory, values sent to other blocks of a cluster, and the
// barriers in shared memory that count the bytes which arrive. From compute capability 9.0 on; elsewhere the functions
// compile and trap, and launches ask what a kernel was compiled for before they choose one that calls them.
namespace k3::kernel::async {

/// Fetches the cache line at `address` into the L2 cache. It stays coherent there: allowed before wait_for_earlier,
/// whoever writes the line.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}
/// The address in the shared memory of block `rank` of the cluster of what lies at `at` in this block's.
__device__ __forceinline__ unsigned address_at_rank(const void* at, unsigned rank) {
  unsigned address = 0;
  if constexpr (architecture::clusters)
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(rank));
  return address;
}

/// As `prefetch`, for a range on multiples of 16 bytes.
__device__ __forceinline__ void prefetch_bulk(const void* from, unsigned bytes) {
  if constexpr (architecture::bulk_copies)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
  else
    __trap();
}

// A barrier: prepared once by one thread; each round one thread says how many bytes are expected, and who waits for
// round 0, 1, 2... gives 0, 1, 0... as its phase.
__device__ __forceinline__ void prepare(unsigned long long* barrier) {
  if constexpr (architecture::bulk_copies) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  } else {
    __trap();
  }
}
__device__ __forceinline__ void expect(unsigned long long* barrier, unsigned bytes) {
  if constexpr (architecture::bulk_copies)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
  else
    __trap();
}
__device__ __forceinline__ void wait(unsigned long long* barrier, unsigned phase) {
  if constexpr (architecture::bulk_copies) {
    unsigned done = 0;
    while (!done)
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done)
                   : "r"(shared_address(barrier)), "r"(phase)
                   : "memory");
  } else {
    __trap();
  }
}

/// Copies memory that is read once and written soon. Kept in the L2 cache until then, its lines take the writes that
/// would otherwise interrupt the reads: 4.20 instead of 4.04 TB/s where all of it comes and goes.
__device__ __forceinline__ void load_to_update(void* to, const void* from, unsigned bytes,
                                               unsigned long long* barrier) {
  if constexpr (architecture::bulk_copies) {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
  } else {
    __trap();
  }
}
/// This thread's accesses of shared memory come before the copies into it behind the next barrier of the warp or block.
/// Nothing where there are no such copies.
__device__ __forceinline__ void before_load() {
  if constexpr (architecture::bulk_copies) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
  if constexpr (architecture::clusters) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
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
/// *at = value in the shared memory of block `rank` of the cluster, whose `barrier` counts 4 bytes for it: one trip,
/// where a store and a barrier of the cluster are three.
__device__ __forceinline__ void send(float* at, unsigned rank, float value, unsigned long long* barrier) {
  if constexpr (architecture::clusters)
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address_at_rank(at, rank)),
        "r"(__float_as_uint(value)), "r"(address_at_rank(barrier, rank))
        : "memory");
  else
    __trap();
}

}  // namespace k3::kernel::async
