// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cub/block/block_reduce.cuh>

#include <k3/formula/router.hpp>
#include <k3/kernels/common.cuh>
#include <k3/kernels/grid_order.cuh>

// The choice of experts, one block a row. A candidate is a 64-bit key: the selection score, mapped to an unsigned
// number of the same order, above the complement of the expert's index, so that the larger key is chosen first, ties to
// the lower index.
namespace k3::kernel {

inline constexpr unsigned router_threads = 256, router_warps = router_threads / 32;
inline constexpr unsigned router_most_chosen = 32;                    ///< of the tournament
inline constexpr unsigned router_most_experts = router_threads * 16;  ///< of the tournament

struct RouterArguments {
  const float* logits = nullptr;  ///< [rows, experts]
  size logits_stride = 0;
  ScalarVector bias{};
  unsigned rows = 0, experts = 0, k = 0;
  bool divide = false;
  float scale = 1;
  id* ids = nullptr;  ///< [rows, k]
  size ids_stride = 0;
  float* weights = nullptr;  ///< [rows, k]
  size weights_stride = 0;
  const id* slots = nullptr;   ///< [rows] or null
  unsigned* status = nullptr;  ///< [rows] or null
  unsigned nan_status = 0;     ///< what a row with a NaN is marked with
  bool early = false;          ///< no need to wait for the kernel before this one: what is read here is older
};

__device__ __forceinline__ unsigned router_expert(unsigned long long key) { return ~static_cast<unsigned>(key); }

/// The largest key of a warp, in every lane.
__device__ __forceinline__ unsigned long long warp_best(unsigned long long key) {
  const unsigned high = static_cast<unsigned>(key >> 32);
  const unsigned best = __reduce_max_sync(full_warp, high);
  const unsigned low = __reduce_max_sync(full_warp, high == best ? static_cast<unsigned>(key) : 0u);
  return static_cast<unsigned long long>(best) << 32 | low;
}

/// What a row that is not routed holds; all threads of the block.
__device__ __forceinline__ void leave_unrouted(const RouterArguments& a, size row) {
  for (unsigned j = threadIdx.x; j < a.k; j += blockDim.x) {
    a.ids[row * a.ids_stride + j] = static_cast<id>(j);
    a.weights[row * a.weights_stride + j] = 0.0f;
  }
}

/// For up to 32 of up to 4096 experts. Every warp holds its share of the keys in registers and takes out its k largest,
/// one by one; then one warp merges the eight sorted lists. 2 k steps of about 100 cycles, whatever the number of
/// experts. 16 of 896: 5.5 to 5.8 us for 1 to 128 rows; with cub::BlockRadixSort in its place 6.2 to 6.5 at its best.
template <unsigned Items>
__global__ void __launch_bounds__(router_threads) sigmoid_topk_tournament(const __grid_constant__ RouterArguments a) {
  __shared__ unsigned long long sorted[router_warps][router_most_chosen];
  __shared__ float chosen[router_most_chosen];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (!a.early) wait_for_earlier();
  for (size row = blockIdx.x; row < a.rows; row += gridDim.x) {
    if (a.slots != nullptr && a.slots[row] < 0) {
      leave_unrouted(a, row);
      continue;
    }
    const float* logits = a.logits + row * a.logits_stride;
    unsigned long long key[Items];
    bool nan = false;
#pragma unroll
    for (unsigned i = 0; i < Items; ++i) {
      const unsigned e = i * router_threads + threadIdx.x;
      key[i] = 0;
      if (e < a.experts) {
        const float score = selection_score(logits[e], a.bias[e]);
        nan = nan || score != score;
        key[i] = order_key(score, e);
      }
    }
    if (__syncthreads_or(nan)) {  // also: the row before is done with the shared memory
      leave_unrouted(a, row);
      if (threadIdx.x == 0 && a.status != nullptr) a.status[row] = a.nan_status;
      continue;
    }
    for (unsigned j = 0; j < a.k; ++j) {
      unsigned long long best = 0;
#pragma unroll
      for (unsigned i = 0; i < Items; ++i) best = detail::larger(best, key[i]);
      best = warp_best(best);
#pragma unroll
      for (unsigned i = 0; i < Items; ++i) key[i] = key[i] == best ? 0 : key[i];
      if (lane == 0) sorted[warp][j] = best;
    }
    __syncthreads();
    if (warp == 0) {
      unsigned next = 0;
      unsigned long long mine = 0;
      for (unsigned j = 0; j < a.k; ++j) {
        const unsigned long long head = lane < router_warps && next < a.k ? sorted[lane][next] : 0;
        const unsigned long long best = warp_best(head);
        if (head == best) ++next;  // keys differ, and where there is no key left there is nothing to advance to
        if (lane == j) mine = best;
      }
      const unsigned expert = router_expert(mine);
      const float p = lane < a.k ? sigmoid(logits[expert]) : 0.0f;
      if (lane < a.k) chosen[lane] = p;
      __syncwarp();
      float sum = 0;
      for (unsigned j = 0; j < a.k; ++j) sum += chosen[j];
      if (lane < a.k) {
        a.ids[row * a.ids_stride + lane] = static_cast<id>(expert);
        a.weights[row * a.weights_stride + lane] = routing_weight(p, sum, a.divide, a.scale);
      }
    }
  }
  if (a.early) wait_for_earlier();
  let_later_start();
}

/// For any number of experts and of chosen ones: each choice is the largest key below the one before.
template <unsigned Threads>
__global__ void __launch_bounds__(Threads) sigmoid_topk_any(const __grid_constant__ RouterArguments a) {
  using Reduce = cub::BlockReduce<unsigned long long, Threads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ unsigned long long shared_best;
  wait_for_earlier();
  let_later_start();
  for (size row = blockIdx.x; row < a.rows; row += gridDim.x) {
    if (a.slots != nullptr && a.slots[row] < 0) {
      leave_unrouted(a, row);
      continue;
    }
    const float* logits = a.logits + row * a.logits_stride;
    id* const ids = a.ids + row * a.ids_stride;
    float* const weights = a.weights + row * a.weights_stride;
    bool nan = false;
    for (unsigned e = threadIdx.x; e < a.experts; e += Threads) {
      const float score = selection_score(logits[e], a.bias[e]);
      nan = nan || score != score;
    }
    if (__syncthreads_or(nan)) {
      leave_unrouted(a, row);
      if (threadIdx.x == 0 && a.status != nullptr) a.status[row] = a.nan_status;
      continue;
    }
    unsigned long long before = ~0ull;
    float sum = 0;
    for (unsigned j = 0; j < a.k; ++j) {
      unsigned long long best = 0;
      for (unsigned e = threadIdx.x; e < a.experts; e += Threads) {
        const unsigned long long key = order_key(selection_score(logits[e], a.bias[e]), e);
        if (key < before && key > best) best = key;
      }
      best = Reduce(storage).Reduce(best, LargerKey{});
      if (threadIdx.x == 0) shared_best = best;
      __syncthreads();
      before = shared_best;
      __syncthreads();  // the next round writes it and the reduction's memory again
      const unsigned expert = router_expert(before);
      const float p = sigmoid(logits[expert]);
      sum += p;
      if (threadIdx.x == 0) {
        ids[j] = static_cast<id>(expert);
        weights[j] = p;
      }
    }
    if (threadIdx.x == 0)
      for (unsigned j = 0; j < a.k; ++j) weights[j] = routing_weight(weights[j], sum, a.divide, a.scale);
  }
}

}  // namespace k3::kernel
