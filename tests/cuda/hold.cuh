// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/graph.cuh"

namespace k3::test {

static __global__ void hold_stream(unsigned long long nanoseconds, volatile unsigned* over) {
  unsigned long long first, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - first < nanoseconds);
  *over = 1;
  __threadfence_system();
}

/// Keeps a stream busy for about `milliseconds`; then *over becomes 1.
inline void hold(cudaStream_t stream, unsigned milliseconds, unsigned* over) {
  *over = 0;
  hold_stream<<<1, 1, 0, stream>>>(1000000ull * milliseconds, over);
  detail::check_launch("hold");
}

/// work() while another stream is being captured. Throws where that capture does not survive.
template <class Work>
void beside_a_capture(Work&& work) {
  const Stream other;
  detail::check_cuda("test", "destroy", cudaGraphDestroy(captured(other, work)));
}

}  // namespace k3::test
