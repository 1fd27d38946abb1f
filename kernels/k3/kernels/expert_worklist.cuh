// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cub/block/block_scan.cuh>

#include <k3/kernels/common.cuh>
#include <k3/kernels/grid_order.cuh>

// From the chosen experts of every row to a list of work, on the device: choices (row * k + rank) grouped by expert,
// and items of up to 8 or 32 choices of one expert. And the sum at the end, which undoes the grouping.
namespace k3::kernel {

inline constexpr unsigned worklist_threads = 1024;
inline constexpr unsigned worklist_shared_experts = 8192;  ///< counted in shared memory; more are in global memory
inline constexpr unsigned item_choices = 32;               ///< most choices of an item

/// Where an expert's matrices lie: codes (or plain elements) of w1, w3 and w2, and E8M0 scales. Null: no such expert.
struct ExpertPointers {
  const void *w1, *w3, *w2;
  const std::uint8_t *scale1, *scale3, *scale2;
};

/// Choices [first, first + count) in order of expert. An expert with many has several items, one behind the other.
struct alignas(16) ExpertItem {
  ExpertPointers weights;
  unsigned expert, first, count;
  unsigned head, items;  ///< the expert's first item, and how many it has
};

/// What a row's sum is: of its experts, 0 (padding), or NaN (a row that failed, here or before).
enum RowKind : unsigned char { row_routed, row_zero, row_failed };

/// The order of a row's elements in the copy that the matrix kernels read.
enum class RowOrder : unsigned char {
  natural,
  /// A lane's 16 bytes of E2M1 codes are 32 columns, and the four lanes that share a row of the tensor cores' tile have
  /// 128. Of those, the copy holds for each of the four words of codes the eight columns of lane 0, of lane 1, ...; and
  /// in each eight the pairs (0, 4), (1, 5), (2, 6), (3, 7), which is how two codes are taken from a word with one
  /// mask.
  e2m1
};

/// Place of column k in a row of that order.
__device__ __forceinline__ unsigned row_place(RowOrder order, unsigned k) {
  if (order == RowOrder::natural) return k;
  return (k & ~127u) + (k >> 3 & 3) * 32 + (k >> 5 & 3) * 8 + (k & 3) * 2 + (k >> 2 & 1);
}

struct WorklistArguments {
  const id* ids = nullptr;  ///< [rows, k]
  size ids_stride = 0;
  unsigned rows = 0, k = 0, experts = 0;
  unsigned most = item_choices;           ///< choices of an item
  const ExpertPointers* table = nullptr;  ///< [experts]
  const id* slots = nullptr;              ///< [rows] or null
  unsigned* status = nullptr;             ///< [rows] or null
  unsigned bad_expert = 0;                ///< what a row with an id that is no expert's is marked with
  unsigned char* kinds = nullptr;         ///< [rows]
  unsigned* counts = nullptr;             ///< [experts] where they are more than worklist_shared_experts
  ExpertItem* items = nullptr;            ///< [rows * k]
  unsigned* item_count = nullptr;
  unsigned* order = nullptr;  ///< [rows * k]: choice by place
  bool reports = true;        ///< whether kinds and status are written

  __device__ __forceinline__ id chosen(unsigned choice) const {
    const unsigned row = choice / k;
    return ids[row * ids_stride + (choice - row * k)];
  }
  __device__ __forceinline__ bool exists(id e) const {
    return e >= 0 && static_cast<unsigned>(e) < experts && table[e].w1 != nullptr;
  }
  __device__ __forceinline__ RowKind kind_before(unsigned row) const {
    return slots != nullptr && slots[row] < 0      ? row_zero
           : status != nullptr && status[row] != 0 ? row_failed
                                                   : row_routed;
  }
  /// The items of an expert whose choices begin at `first`.
  __device__ __forceinline__ void put_items(unsigned expert, unsigned first, unsigned count, unsigned head) const {
    const unsigned parts = (count + most - 1) / most;
    for (unsigned i = 0; i < parts; ++i)
      items[head + i] = {table[expert], expert, first + i * most, detail::smaller(most, count - i * most), head, parts};
  }
};

/// Up to 32 choices: one warp, a choice in each lane, experts in order of appearance.
__device__ inline void build_small_worklist(const WorklistArguments& a) {
  const unsigned lane = threadIdx.x, choices = a.rows * a.k;
  const bool mine = lane < choices;
  const unsigned row = mine ? lane / a.k : 0;
  const id e = mine ? a.chosen(lane) : -1;
  RowKind kind = mine ? a.kind_before(row) : row_zero;
  const unsigned wrong = __ballot_sync(full_warp, mine && !a.exists(e));
  if (mine) {
    const unsigned of_row = (a.k < 32 ? (1u << a.k) - 1 : full_warp) << (row * a.k);
    if (kind == row_routed && (wrong & of_row) != 0) {
      kind = row_failed;
      if (a.status != nullptr && a.reports) a.status[row] = a.bad_expert;
    }
    if (a.reports) a.kinds[row] = kind;
  }
  const bool routed = mine && kind == row_routed;
  const unsigned same = __match_any_sync(full_warp, routed ? static_cast<unsigned>(e) : ~0u);
  const unsigned rank = __popc(same & ((1u << lane) - 1)), count = __popc(same);
  // items and choices of the experts that appear before
  const unsigned own = routed && rank == 0 ? (count + a.most - 1) / a.most << 16 | count : 0;
  unsigned sum = own;
#pragma unroll
  for (unsigned offset = 1; offset < 32; offset *= 2) {
    const unsigned below = __shfl_up_sync(full_warp, sum, offset);
    if (lane >= offset) sum += below;
  }
  const unsigned first = __shfl_sync(full_warp, sum - own, __ffs(same) - 1) & 0xffff;
  if (own != 0) a.put_items(static_cast<unsigned>(e), first, count, (sum - own) >> 16);
  if (routed) a.order[first + rank] = lane;
  if (lane == 31) *a.item_count = sum >> 16;
}

/// One block. Counts with integer atomics, whose result has no order; places are given out by one warp in order of
/// choice, experts in order of number.
__device__ inline void build_worklist(const WorklistArguments& a) {
  using Scan = cub::BlockScan<unsigned long long, worklist_threads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage scan;
  __shared__ unsigned shared_counts[worklist_shared_experts];
  unsigned* const counts = a.experts <= worklist_shared_experts ? shared_counts : a.counts;
  const unsigned choices = a.rows * a.k;
  for (unsigned e = threadIdx.x; e < a.experts; e += worklist_threads) counts[e] = 0;
  for (unsigned row = threadIdx.x; row < a.rows; row += worklist_threads) a.kinds[row] = a.kind_before(row);
  __syncthreads();
  for (unsigned c = threadIdx.x; c < choices; c += worklist_threads) {
    const unsigned row = c / a.k;
    if (a.kinds[row] != row_routed || a.exists(a.chosen(c))) continue;
    a.kinds[row] = row_failed;
    if (a.status != nullptr) a.status[row] = a.bad_expert;
  }
  __syncthreads();
  // ~0: a choice that nothing is computed for
  const auto expert_of = [&](unsigned c) {
    return a.kinds[c / a.k] == row_routed ? static_cast<unsigned>(a.chosen(c)) : ~0u;
  };
  for (unsigned c = threadIdx.x; c < choices; c += worklist_threads) {
    const unsigned e = expert_of(c);
    if (e != ~0u) atomicAdd(counts + e, 1u);
  }
  __syncthreads();
  unsigned long long before = 0;  // items of earlier experts above their choices
  for (unsigned from = 0; from < a.experts; from += worklist_threads) {
    const unsigned e = from + threadIdx.x;
    const unsigned count = e < a.experts ? counts[e] : 0;
    unsigned long long at = static_cast<unsigned long long>((count + a.most - 1) / a.most) << 32 | count, all;
    Scan(scan).ExclusiveSum(at, at, all);
    at += before;
    before += all;
    if (count > 0) a.put_items(e, static_cast<unsigned>(at), count, static_cast<unsigned>(at >> 32));
    if (e < a.experts) counts[e] = static_cast<unsigned>(at);
    __syncthreads();
  }
  if (threadIdx.x == 0) *a.item_count = static_cast<unsigned>(before >> 32);
  if (threadIdx.x >= 32) return;
  for (unsigned from = 0; from < choices; from += 32) {
    const unsigned c = from + threadIdx.x;
    const unsigned e = c < choices ? expert_of(c) : ~0u;
    const unsigned same = __match_any_sync(full_warp, e);
    const unsigned earlier = __popc(same & ((1u << threadIdx.x) - 1));
    if (e != ~0u) a.order[counts[e] + earlier] = c;
    __syncwarp();
    if (e != ~0u && earlier == 0) counts[e] += __popc(same);
    __syncwarp();
  }
}

/// A row in the order in which the matrix kernels read it, 0 beyond its width, by some threads.
template <class X>
__device__ __forceinline__ void stage_row(X* to, const X* from, unsigned width, unsigned padded, RowOrder order,
                                          unsigned thread, unsigned threads) {
  for (unsigned k = thread; k < padded; k += threads) to[row_place(order, k)] = k < width ? from[k] : X(0.0f);
}

/// The list of work (first block), and x in the order in which the matrix kernels read it (the other blocks).
template <class X>
__global__ void __launch_bounds__(worklist_threads)
    prepare_experts(const __grid_constant__ WorklistArguments a, const X* x, size x_stride, unsigned width,
                    RowOrder order, X* staged, size staged_stride) {
  wait_for_earlier();
  let_later_start();
  if (blockIdx.x == 0) {
    if (a.rows * a.k > 32) return build_worklist(a);
    if (threadIdx.x < 32) build_small_worklist(a);
    return;
  }
  const unsigned padded = static_cast<unsigned>(staged_stride);
  for (size row = blockIdx.x - 1; row < a.rows; row += gridDim.x - 1) {
    if (a.slots != nullptr && a.slots[row] < 0) continue;  // nobody reads the copy of a row that is skipped
    stage_row(staged + row * staged_stride, x + row * x_stride, width, padded, order, threadIdx.x, worklist_threads);
  }
}

/// out = sum_j weights[j] * y[row, j], in float in order of rank, rounded once. Sets `counters` to 0 for the next call.
template <class X>
__global__ void __launch_bounds__(256)
    combine_experts(const X* y, const float* weights, size weights_stride, const unsigned char* kinds, unsigned rows,
                    unsigned k, unsigned width, X* out, size out_stride, unsigned* counters, unsigned counter_count) {
  wait_for_earlier();
  let_later_start();
  const unsigned column = blockIdx.x * 256 + threadIdx.x;
  for (unsigned i = blockIdx.y * gridDim.x * 256 + column; i < counter_count; i += gridDim.y * gridDim.x * 256)
    counters[i] = 0;
  if (column >= width) return;
  for (size row = blockIdx.y; row < rows; row += gridDim.y) {
    float sum = 0;
    const unsigned char kind = kinds[row];
    if (kind == row_routed) {
      const X* const own = y + row * k * width + column;
      const float* const weight = weights + row * weights_stride;
#pragma unroll 16
      for (unsigned j = 0; j < k; ++j) sum = fmaf(weight[j], float(own[static_cast<size>(j) * width]), sum);
    } else if (kind == row_failed) {
      sum = __int_as_float(0x7fc00000);
    }
    out[row * out_stride + column] = X(sum);
  }
}

}  // namespace k3::kernel
