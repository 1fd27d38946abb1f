// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/config.hpp>

namespace k3 {

/// Which version of the host's vector code runs. `plain` is the readable reference, compiled for the build's own
/// target; `avx2` (with FMA) and `avx512` give each other's bits, since all of them add in the same 64 lanes.
enum class Isa { plain, avx2, avx512 };

/// The fastest version this processor can run. Asked once, then remembered.
inline Isa best_isa() noexcept {
#if K3_X86_64
  static const Isa best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
      return Isa::avx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? Isa::avx2 : Isa::plain;
  }();
  return best;
#else
  return Isa::plain;
#endif
}

}  // namespace k3
