// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/mla.hpp>
#include <k3/kernels/common.cuh>

// What the MLA kernels share: rows of a batch, the paged latent cache, and how a row's context is cut.
//
// The positions of a row are cut into tiles of 64 and its tiles into at most 64 splits of equal size, by the row's own
// length alone. A split has a softmax of its own; splits are joined in their order by mla_join. Who computes which
// split, and whether the joining happens in the same block or in another kernel, changes no bit.
// mla_attend_wide and mla_attend_few cut rows in their own way: mla_wide_runs.cuh.
namespace k3::kernel {

inline constexpr unsigned mla_tile = 64;         ///< positions
inline constexpr unsigned mla_most_splits = 64;  ///< of a row
inline constexpr unsigned mla_threads = 256, mla_warps = mla_threads / 32;

/// Tiles of one split of a row of this length.
__host__ __device__ constexpr unsigned mla_split_tiles(unsigned length) {
  return ((length + mla_tile - 1) / mla_tile + mla_most_splits - 1) / mla_most_splits;
}
/// Splits of a row of this length, at least 1.
__host__ __device__ constexpr unsigned mla_splits(unsigned length) {
  const unsigned tiles = (length + mla_tile - 1) / mla_tile, each = mla_split_tiles(length);
  return (tiles + each - 1) / each;
}

/// The latent cache [pages, page_size, kv_lora + rope] behind its block table.
template <class T>
struct MlaCache {
  T* pages = nullptr;
  size page_stride = 0, row_stride = 0;
  const id* table = nullptr;  ///< [slots, blocks]
  size table_stride = 0, slots = 0, page_count = 0, capacity = 0;
  unsigned page_size = 1;

  /// Null where the table names a page that is none.
  __device__ __forceinline__ T* row(size slot, unsigned position) const {
    const unsigned block = position / page_size;
    const id page = table[slot * table_stride + block];
    if (page < 0 || static_cast<size>(page) >= page_count) return nullptr;
    return pages + static_cast<size>(page) * page_stride + static_cast<size>(position - block * page_size) * row_stride;
  }
};

/// A row of the batch as the kernels see it: `live` rows have a slot and a position inside the cache.
struct MlaRow {
  bool live = false, bad = false;
  size slot = 0;
  unsigned length = 0;
};

struct MlaRows {
  const id* slots = nullptr;
  const size* positions = nullptr;
  unsigned* status = nullptr;  ///< or null
  size count = 0;
  unsigned bad_slot = 0;

  template <class T>
  __device__ __forceinline__ MlaRow find(size row, const MlaCache<T>& cache) const {
    MlaRow result;
    const id slot = slots[row];
    const size position = positions[row];
    if (slot == pad_slot) return result;
    result.slot = static_cast<size>(slot);
    result.bad = slot < 0 || result.slot >= cache.slots || position >= cache.capacity;
    result.live = !result.bad;
    if (result.live) result.length = static_cast<unsigned>(position) + 1;
    return result;
  }
  __device__ __forceinline__ void report(size row) const {
    if (status) status[row] = bad_slot;
  }
};

/// Softmax statistics with scores in units of ln 2; a sum below 0 marks a split whose pages are not all there.
struct MlaStats {
  float max, sum;
};

/// softmax_rescale for scores in units of ln 2.
__device__ __forceinline__ float mla_rescale(float old_max, float new_max) {
  return old_max == SoftmaxState<float>::no_max ? 0.0f : exp2f(old_max - new_max);
}

/// Factors of what is there and of what is joined to it.
struct MlaJoin {
  float old_factor, new_factor;

  __device__ __forceinline__ MlaJoin(MlaStats& all, const MlaStats& split) {
    const float joint = split.max > all.max ? split.max : all.max;
    old_factor = mla_rescale(all.max, joint);
    new_factor = mla_rescale(split.max, joint);
    all.sum = (*this)(all.sum, split.sum);
    all.max = joint;
  }
  /// The one rounding sequence by which sums and values are joined, wherever it is done.
  __device__ __forceinline__ float operator()(float all, float split) const {
    return join(all, old_factor, split, new_factor);
  }
  static __device__ __forceinline__ float join(float all, float old_factor, float split, float new_factor) {
    return __fmaf_rn(all, old_factor, __fmul_rn(split, new_factor));
  }
};

template <class T>
struct MlaAttendArguments {
  MlaRows rows{};
  MlaCache<const T> cache{};
  const T* q = nullptr;  ///< [rows, heads, width]
  size q_row = 0, q_head = 0;
  float* out = nullptr;  ///< [rows, heads, latent]
  size out_row = 0, out_head = 0;
  float* part = nullptr;          ///< [rows, heads, splits, latent], not divided by the sums
  MlaStats* stats = nullptr;      ///< [rows, heads, splits]
  unsigned char* live = nullptr;  ///< [rows]: whether the row has a result
  unsigned heads = 0, latent = 0, width = 0;
  unsigned splits = 0;                    ///< of a row as long as the cache
  unsigned stages = 1;                    ///< tiles in shared memory, 1 or 2
  float scale = 0;                        ///< of a score, in units of ln 2
  bool whole = false;                     ///< a block takes all splits of its row
  bool vector = false, q_vector = false;  ///< rows of the cache, of q, can be read 16 bytes at a time

  __device__ __forceinline__ size split_at(size row, unsigned head, unsigned split) const {
    return (row * heads + head) * splits + split;
  }
};

/// A thread for each element of a row's result: joins the splits in order.
template <class T>
__global__ void __launch_bounds__(128) mla_combine(MlaAttendArguments<T> a) {
  const size row = blockIdx.z;
  const unsigned head = blockIdx.y, c = blockIdx.x * 128 + threadIdx.x;
  const MlaRow r = a.rows.find(row, a.cache);
  const unsigned splits = r.live ? mla_splits(r.length) : 0;
  const MlaStats* const stats = a.stats + a.split_at(row, head, 0);
  const float* const part = a.part + a.split_at(row, head, 0) * a.latent + (c < a.latent ? c : 0);
  MlaStats all{SoftmaxState<float>::no_max, 0};
  float value = 0;
  bool whole = r.live;
#pragma unroll 8
  for (unsigned s = 0; s < splits; ++s) {
    const MlaStats one = stats[s];
    const float element = part[static_cast<size>(s) * a.latent];
    whole = whole && !(one.sum < 0);
    const MlaJoin join(all, one);
    value = join(value, element);
  }
  if (c < a.latent) a.out[row * a.out_row + head * a.out_head + c] = whole ? value / all.sum : 0.0f;
  if (head == 0 && c == 0) {
    a.live[row] = whole;
    if (r.bad || (r.live && !whole)) a.rows.report(row);
  }
}

}  // namespace k3::kernel
