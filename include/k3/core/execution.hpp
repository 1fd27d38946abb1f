// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <type_traits>

#include <k3/core/isa.hpp>
#include <k3/core/types.hpp>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace k3 {

/// Run on the host. `threads` 0 means all that OpenMP offers (1 in a build without it). Results never depend on it.
/// Where other programs use the processors too, run with OMP_WAIT_POLICY=passive: docs/host.md.
struct host {
  int threads = 0;
  Isa isa = best_isa();
};

/// Run on a CUDA stream; defined by <k3/k3.cuh>.
struct gpu;

template <class Exec>
concept execution = std::same_as<Exec, host> || std::same_as<Exec, gpu>;

namespace detail {

inline int thread_count(const host& exec) noexcept {
#if defined(_OPENMP)
  return exec.threads > 0 ? exec.threads : omp_get_max_threads();
#else
  static_cast<void>(exec);
  return 1;
#endif
}

/// Below this many bytes of memory traffic a loop stays on one thread. Waking threads takes a few microseconds where
/// processors are idle, a fifth of 128 KB's time, and milliseconds where other programs have them. Whoever asks for a
/// number of threads is taken to have them; otherwise a loop must be worth some 50 us.
inline size parallel_threshold_bytes(const host& exec) noexcept {
  return exec.threads > 0 ? size{1} << 17 : size{1} << 20;
}

/// body(first, last) over a partition of [0, count) into chunks of whole `grain`s, by several threads where `bytes`,
/// the whole loop's memory traffic, is worth it. The body must not throw and gives the same result for any partition.
template <class Body>
void parallel_chunks(const host& exec, size count, size grain, size bytes, Body&& body) {
  const size threads = static_cast<size>(thread_count(exec));
  const size grains = (count + grain - 1) / grain;
  if (threads <= 1 || grains <= 1 || bytes < parallel_threshold_bytes(exec)) {
    if (count > 0) body(size{0}, count);
    return;
  }
  const size chunks = smaller(threads, grains);
  const auto chunk_begin = [&](size chunk) { return smaller(count, grains * chunk / chunks * grain); };
  K3_PRAGMA_OMP(omp parallel for num_threads(static_cast<int>(chunks)) schedule(static, 1))
  for (size chunk = 0; chunk < chunks; ++chunk) body(chunk_begin(chunk), chunk_begin(chunk + 1));
}

}  // namespace detail
}  // namespace k3
