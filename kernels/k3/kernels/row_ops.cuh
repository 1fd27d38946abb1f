// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/rms_norm.hpp>
#include <k3/kernels/common.cuh>
#include <k3/kernels/grid_order.cuh>

// Operations on rows: RMSNorm and the lookup of embeddings. A thread owns groups of eight neighbouring elements, group
// g belongs to thread g mod (threads of a row): the same for rows that can be read 16 bytes at a time and for those
// that cannot, so that both give the same bits.
namespace k3::kernel {

/// Eight neighbouring elements of a row as stored.
template <class T>
struct Eight {
  float value[8];
  __device__ __forceinline__ float operator[](int i) const { return value[i]; }
  __device__ __forceinline__ void set(int i, float to) { value[i] = to; }
  __device__ __forceinline__ void set_all(const float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = to[i];
  }
};
template <>
struct Eight<bf16> {
  unsigned pair[4];
  __device__ __forceinline__ float operator[](int i) const {
    return i % 2 == 0 ? low_of(pair[i / 2]) : high_of(pair[i / 2]);
  }
  __device__ __forceinline__ void set(int i, float to) {
    const unsigned bits = bf16(to).bits;
    pair[i / 2] = i % 2 == 0 ? (pair[i / 2] & 0xffff0000u) | bits : (pair[i / 2] & 0xffffu) | bits << 16;
  }
  /// Rounded two at a time, which gives what set() gives of any number; a NaN becomes 0x7fff.
  __device__ __forceinline__ void set_all(const float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = bf16_pair(to[2 * i], to[2 * i + 1]);
  }
};

/// Elements p[0] to p[7], zeros from `count` on. `vector`: p lies on a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ Eight<T> read_eight(const T* p, unsigned count, bool vector) {
  Eight<T> result = {};
  if (vector && count >= 8) {
    uint4 part[sizeof(T) / 2];
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 2; ++i) part[i] = reinterpret_cast<const uint4*>(p)[i];
    static_assert(sizeof(part) == sizeof(result));
    memcpy(&result, part, sizeof(result));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (static_cast<unsigned>(i) < count) result.set(i, static_cast<float>(p[i]));
  }
  return result;
}

template <class T>
__device__ __forceinline__ void write_eight(T* p, const Eight<T>& from, unsigned count, bool vector) {
  if (vector && count >= 8) {
    uint4 part[sizeof(T) / 2];
    memcpy(part, &from, sizeof(from));
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 2; ++i) reinterpret_cast<uint4*>(p)[i] = part[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (static_cast<unsigned>(i) < count) p[i] = static_cast<T>(from[i]);
  }
}

template <class X, class W, class Out>
struct RmsNormArguments {
  const X* x;  // [rows, count]
  const W* weight;
  Out* out;
  size x_stride, out_stride, rows;
  unsigned count;
  float eps;
  bool vector;
};

inline constexpr unsigned rms_norm_warp_count = 1024;  ///< up to this width a row has one warp

/// `RowThreads` threads a row, 32 or the whole block; they keep `Kept` groups and read further ones twice. out may be
/// x.
template <int Threads, int RowThreads, int Kept, class X, class W, class Out>
__global__ void __launch_bounds__(Threads) rms_norm(RmsNormArguments<X, W, Out> a) {
  static_assert(RowThreads == 32 || RowThreads == Threads);
  __shared__ float scratch[Threads / 32 + 1];
  const unsigned thread = threadIdx.x % RowThreads;
  Eight<W> weight[Kept];  // no predecessor writes them
#pragma unroll
  for (int j = 0; j < Kept; ++j) {
    const unsigned at = (j * RowThreads + thread) * 8;
    weight[j] = read_eight(a.weight + at, at < a.count ? a.count - at : 0, a.vector);
  }
  let_later_start();
  wait_for_earlier();
  for (size row = blockIdx.x * size{Threads / RowThreads} + threadIdx.x / RowThreads; row < a.rows;
       row += gridDim.x * size{Threads / RowThreads}) {
    const X* const x = a.x + row * a.x_stride;
    Out* const out = a.out + row * a.out_stride;
    Eight<X> kept[Kept];
    float squares = 0;
    const auto add = [&](const Eight<X>& eight) {
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += eight[i] * eight[i];
    };
#pragma unroll
    for (int j = 0; j < Kept; ++j) {
      const unsigned at = (j * RowThreads + thread) * 8;
      kept[j] = read_eight(x + at, at < a.count ? a.count - at : 0, a.vector);
      add(kept[j]);
    }
    for (unsigned at = (Kept * RowThreads + thread) * 8; at < a.count; at += RowThreads * 8)
      add(read_eight(x + at, a.count - at, a.vector));
    if constexpr (RowThreads == 32)
      squares = warp_sum(squares);
    else
      squares = block_sum<Threads>(squares, scratch);
    const float scale = rms_scale(squares, a.count, a.eps);

    const auto write = [&](unsigned at, const Eight<X>& eight, const Eight<W>& factor) {
      float normed[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) normed[i] = eight[i] * scale * factor[i];
      Eight<Out> result;
      result.set_all(normed);
      write_eight(out + at, result, a.count - at, a.vector);
    };
#pragma unroll
    for (int j = 0; j < Kept; ++j) {
      const unsigned at = (j * RowThreads + thread) * 8;
      if (at < a.count) write(at, kept[j], weight[j]);
    }
    for (unsigned at = (Kept * RowThreads + thread) * 8; at < a.count; at += RowThreads * 8)
      write(at, read_eight(x + at, a.count - at, a.vector), read_eight(a.weight + at, a.count - at, a.vector));
  }
}

/// A padding row gives zeros, an id outside the table a row of zeros and `bad_id` in the row's status word.
template <class Entry, class Out>
struct EmbedArguments {
  const id* ids;
  const id* slots;     // [rows], or null
  const Entry* table;  // [vocab, count]
  Out* out;
  unsigned* status;  // [rows], or null
  size out_stride, rows, vocab;
  unsigned count, parts, bad_id;  // blocks of a row
  bool vector;
};

/// `parts` blocks a row, eight elements a thread.
template <int Threads, class Entry, class Out>
__global__ void __launch_bounds__(Threads) embed_tokens(EmbedArguments<Entry, Out> a) {
  let_later_start();
  wait_for_earlier();
  for (size item = blockIdx.x; item < a.rows * a.parts; item += gridDim.x) {
    const size row = item / a.parts;
    const unsigned at = (static_cast<unsigned>(item % a.parts) * Threads + threadIdx.x) * 8;
    const bool padding = a.slots && a.slots[row] == pad_slot;
    const id token = a.ids[row];
    const bool known = !padding && token >= 0 && static_cast<size>(token) < a.vocab;
    if (!known && !padding && at == 0 && a.status) a.status[row] = a.bad_id;
    if (at >= a.count) continue;
    Eight<Out> result = {};
    if (known) {
      const Eight<Entry> eight = read_eight(a.table + static_cast<size>(token) * a.count + at, a.count - at, a.vector);
#pragma unroll
      for (int i = 0; i < 8; ++i) result.set(i, eight[i]);
    }
    write_eight(a.out + row * a.out_stride + at, result, a.count - at, a.vector);
  }
}

}  // namespace k3::kernel
