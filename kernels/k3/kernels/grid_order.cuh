// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/architecture.cuh>

// A kernel that k3::detail::launch starts may begin while the kernel before it on the stream still runs. Until
// wait_for_earlier it may only read what no pending kernel writes (weights, its own arguments) and write nothing but
// shared memory; every thread that reads or writes anything else calls it first, and no block ends without.
namespace k3::kernel {

/// Returns when every kernel before this one on the stream is complete and what it wrote can be read.
__device__ __forceinline__ void wait_for_earlier() {
  if constexpr (architecture::overlapping_launches) asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// Lets the next kernel on the stream begin, once every block has called this or ended. After wait_for_earlier, what
/// the next kernel reads before its own wait need only be older than this kernel. Before it, the next one begins
/// sooner, and must know that no kernel of the stream writes what it reads early: short kernels in front of products do
/// so, since these have weights to fetch.
__device__ __forceinline__ void let_later_start() {
  if constexpr (architecture::overlapping_launches) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace k3::kernel
