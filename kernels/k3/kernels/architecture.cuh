// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the target of this compilation has, asked with `if constexpr`: no other file asks for the target. All false
// where the host is compiled. A kernel whose target lacks what it is built on compiles all the same, and is not
// launched: k3::detail::target() tells the host what the kernels were compiled for.
namespace k3::kernel::architecture {

/// The target's compute capability, 900 for 9.0; 0 on the host.
#if defined(__CUDA_ARCH__)
inline constexpr int capability = __CUDA_ARCH__;
#else
inline constexpr int capability = 0;
#endif

/// Kernels that begin before the one in front of them ends.
inline constexpr bool overlapping_launches = capability >= 900;
/// Copies into shared memory that complete on barriers which count bytes.
inline constexpr bool bulk_copies = capability >= 900;
/// Neighbouring blocks that reach each other's shared memory.
inline constexpr bool clusters = capability >= 900;

/// Matrix products of a warpgroup, and registers given from one warpgroup to another: sm_90a only, no later target.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool warpgroup_products = true;
#else
inline constexpr bool warpgroup_products = false;
#endif

/// All of these as a number of threads, 32 where there is none: what `target_probe` allows.
inline constexpr unsigned probe_threads = 32 * (1 + (overlapping_launches ? 1 : 0) + (bulk_copies ? 2 : 0) +
                                                (clusters ? 4 : 0) + (warpgroup_products ? 8 : 0));

}  // namespace k3::kernel::architecture

namespace k3::kernel {

/// Never launched: the host reads off its attributes what the program was compiled for. A template, as what is defined
/// in headers must be.
template <class = void>
__global__ void __launch_bounds__(architecture::probe_threads) target_probe() {}

}  // namespace k3::kernel
