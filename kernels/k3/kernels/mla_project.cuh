// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <type_traits>

#include <k3/formula/activation.hpp>
#include <k3/formula/rms_norm.hpp>
#include <k3/kernels/grid_order.cuh>
#include <k3/kernels/mla_cache.cuh>

// What surrounds MLA's attention: new cache rows, queries moved into the latent space, values moved out of it.
namespace k3::kernel {

template <class X, class T>
struct MlaAppendArguments {
  MlaRows rows{};
  MlaCache<T> cache{};
  const X* kv_a = nullptr;  ///< [rows, latent + rope]
  size kv_a_stride = 0;
  ScalarVector norm{};
  unsigned latent = 0, width = 0;
  float eps = 0;
};

/// A block a row. May begin before the kernel in front of it ends.
template <class X, class T>
__global__ void __launch_bounds__(128) mla_append(MlaAppendArguments<X, T> a) {
  __shared__ float scratch[128 / 32 + 1];
  wait_for_earlier();
  let_later_start();
  for (size row = blockIdx.x; row < a.rows.count; row += gridDim.x) {
    const MlaRow r = a.rows.find(row, a.cache);
    T* const to = r.live ? a.cache.row(r.slot, r.length - 1) : nullptr;
    if (to == nullptr) {
      if (threadIdx.x == 0 && (r.bad || r.live)) a.rows.report(row);
      continue;
    }
    const X* const from = a.kv_a + row * a.kv_a_stride;
    float squares = 0;
    for (unsigned i = threadIdx.x; i < a.latent; i += 128) {
      const float x = static_cast<float>(from[i]);
      squares = __fmaf_rn(x, x, squares);
    }
    const float scale = rms_scale(block_sum<128>(squares, scratch), a.latent, a.eps);
    for (unsigned i = threadIdx.x; i < a.width; i += 128) {
      const float x = static_cast<float>(from[i]);
      to[i] = static_cast<T>(i < a.latent ? x * scale * a.norm[i] : x);
    }
  }
}

/// Eight neighbouring weights as stored: loaded first, all that are wanted, and taken apart later.
template <class W>
struct MlaEight {
  uint4 part[sizeof(W) / 2];

  /// Zeros from `count` on. `Vector`: all eight are there, on a multiple of 16 bytes.
  template <bool Vector>
  __device__ __forceinline__ void load(const W* from, unsigned count) {
    if constexpr (Vector) {
#pragma unroll
      for (unsigned i = 0; i < sizeof(W) / 2; ++i) part[i] = load_streaming(from + i * (16 / sizeof(W)));
    } else {
      W value[8];
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) value[i] = i < count ? from[i] : static_cast<W>(0.0f);
      static_assert(sizeof(value) == sizeof(part));
      memcpy(part, value, sizeof(part));
    }
  }
  __device__ __forceinline__ void get(float (&to)[8]) const {
    unsigned word[sizeof(W) * 2];
    memcpy(word, part, sizeof(part));
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) {
      if constexpr (sizeof(W) == 4)
        to[i] = __uint_as_float(word[i]);
      else
        to[i] = i % 2 == 0 ? low_of(word[i / 2]) : high_of(word[i / 2]);
    }
  }
};

template <class T, class W>
struct MlaProjectArguments {
  const W* kv_b = nullptr;  ///< [heads * (nope + v), latent], dense
  size rows = 0;
  unsigned heads = 0, nope = 0, rope = 0, v = 0, latent = 0;
  bool vector = false;   ///< kv_b's rows can be read 16 bytes at a time
  const T* q = nullptr;  ///< absorb: [rows, heads * (nope + rope)]
  size q_stride = 0;
  T* q_latent = nullptr;  ///< [rows, heads, latent + rope]
  size q_latent_row = 0, q_latent_head = 0;
  const float* o_latent = nullptr;  ///< expand: [rows, heads, latent]
  size o_row = 0, o_head = 0;
  const unsigned char* live = nullptr;  ///< [rows] or null: rows that are not give zeros
  const T* gate = nullptr;              ///< [rows, heads * v] or null
  size gate_stride = 0;
  T* out = nullptr;  ///< [rows, heads * v]
  size out_stride = 0;
  bool q_vector = false, latent_vector = false;  ///< so can q's heads, and q_latent's or o_latent's
};

inline constexpr unsigned mla_absorb_columns = 256, mla_absorb_piece = 256;

/// q_latent = W_UK^T q for a head, 256 latent columns and `Rows` rows: a warp takes every eighth row of W_UK, and the
/// eight sums are added in their order.
template <int Rows, class T, class W>
__global__ void __launch_bounds__(mla_threads, 2) mla_absorb(MlaProjectArguments<T, W> a) {
  __shared__ float q[Rows][mla_absorb_piece];
  __shared__ float4 sums[mla_warps][mla_absorb_columns / 4];
  const unsigned head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned first_column = blockIdx.y * mla_absorb_columns, column = first_column + lane * 8;
  const W* const weight = a.kv_b + static_cast<size>(head) * (a.nope + a.v) * a.latent + column;
  for (size first = blockIdx.z * size{Rows}; first < a.rows; first += gridDim.z * size{Rows}) {
    float sum[Rows][8] = {};
    for (unsigned n = 0; n < a.nope; n += mla_absorb_piece) {
      const unsigned count = detail::smaller(mla_absorb_piece, a.nope - n);
      __syncthreads();
      for (unsigned i = threadIdx.x; i < Rows * count; i += mla_threads) {
        const size row = first + i / count;
        q[i / count][i % count] =
            row < a.rows ? static_cast<float>(
                               a.q[row * a.q_stride + static_cast<size>(head) * (a.nope + a.rope) + n + i % count])
                         : 0.0f;
      }
      __syncthreads();
      const auto accumulate = [&](auto vector) {
        constexpr unsigned depth = 16 / sizeof(W);  // rows of W_UK in flight
        for (unsigned start = warp; start < count; start += depth * mla_warps) {
          MlaEight<W> eight[depth];
#pragma unroll
          for (unsigned d = 0; d < depth; ++d) {
            const unsigned i = start + d * mla_warps;
            if (i < count)
              eight[d].template load<decltype(vector)::value>(weight + static_cast<size>(n + i) * a.latent,
                                                              a.latent - column);
          }
#pragma unroll
          for (unsigned d = 0; d < depth; ++d) {
            const unsigned i = start + d * mla_warps;
            if (i >= count) break;
            float w[8];
            eight[d].get(w);
#pragma unroll
            for (int r = 0; r < Rows; ++r)
#pragma unroll
              for (int e = 0; e < 8; ++e) sum[r][e] = __fmaf_rn(q[r][i], w[e], sum[r][e]);
          }
        }
      };
      if (column < a.latent) {
        if (a.vector)
          accumulate(std::true_type{});
        else
          accumulate(std::false_type{});
      }
    }
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const size row = first + r;
      if (row >= a.rows) break;
      T* const to = a.q_latent + row * a.q_latent_row + head * a.q_latent_head;
      __syncthreads();
      sums[warp][lane * 2] = make_float4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
      sums[warp][lane * 2 + 1] = make_float4(sum[r][4], sum[r][5], sum[r][6], sum[r][7]);
      __syncthreads();
      float total = 0;
#pragma unroll
      for (unsigned w = 0; w < mla_warps; ++w) total += reinterpret_cast<const float*>(sums[w])[threadIdx.x];
      if (first_column + threadIdx.x < a.latent) to[first_column + threadIdx.x] = static_cast<T>(total);
      if (blockIdx.y == 0)
        for (unsigned i = threadIdx.x; i < a.rope; i += mla_threads)
          to[a.latent + i] = a.q[row * a.q_stride + static_cast<size>(head) * (a.nope + a.rope) + a.nope + i];
    }
  }
}

inline constexpr unsigned mla_expand_outputs = 4;  ///< of a warp
inline constexpr unsigned mla_expand_piece = 512;  ///< latent columns in shared memory

/// out = W_UV o_latent, gated, for a head, 32 of its outputs and `Rows` rows: a warp computes four outputs, its lanes
/// share the latent columns.
template <int Rows, class T, class W>
__global__ void __launch_bounds__(mla_threads, 2) mla_expand(MlaProjectArguments<T, W> a) {
  __shared__ float4 o[Rows][mla_expand_piece / 4];
  const unsigned head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned first_output = (blockIdx.y * mla_warps + warp) * mla_expand_outputs;
  const W* weight[mla_expand_outputs];
#pragma unroll
  for (unsigned j = 0; j < mla_expand_outputs; ++j)
    weight[j] =
        a.kv_b +
        (static_cast<size>(head) * (a.nope + a.v) + a.nope + detail::smaller(first_output + j, a.v - 1)) * a.latent;
  for (size first = blockIdx.z * size{Rows}; first < a.rows; first += gridDim.z * size{Rows}) {
    float sum[mla_expand_outputs][Rows] = {};
    for (unsigned c = 0; c < a.latent; c += mla_expand_piece) {
      const unsigned count = detail::smaller(mla_expand_piece, a.latent - c);
      __syncthreads();
      for (unsigned i = threadIdx.x; i < Rows * mla_expand_piece; i += mla_threads) {
        const unsigned r = i / mla_expand_piece, at = i % mla_expand_piece;
        const bool there = first + r < a.rows && at < count;
        reinterpret_cast<float*>(o[r])[at] =
            there ? a.o_latent[(first + r) * a.o_row + head * a.o_head + c + at] : 0.0f;
      }
      __syncthreads();
      const auto accumulate = [&](auto vector) {
#pragma unroll 2
        for (unsigned at = lane * 8; at < count; at += 256) {
          MlaEight<W> eight[mla_expand_outputs];
#pragma unroll
          for (unsigned j = 0; j < mla_expand_outputs; ++j)
            eight[j].template load<decltype(vector)::value>(weight[j] + c + at, count - at);
#pragma unroll
          for (int r = 0; r < Rows; ++r) {
            const float4 x = o[r][at / 4], y = o[r][at / 4 + 1];
            const float value[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
            for (unsigned j = 0; j < mla_expand_outputs; ++j) {
              float w[8];
              eight[j].get(w);
#pragma unroll
              for (int e = 0; e < 8; ++e) sum[j][r] = __fmaf_rn(w[e], value[e], sum[j][r]);
            }
          }
        }
      };
      if (a.vector)
        accumulate(std::true_type{});
      else
        accumulate(std::false_type{});
    }
#pragma unroll
    for (unsigned j = 0; j < mla_expand_outputs; ++j)
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const float total = warp_sum(sum[j][r]);
        const size row = first + r;
        if (lane != (j * Rows + r) % 32 || row >= a.rows || first_output + j >= a.v) continue;
        const size at = static_cast<size>(head) * a.v + first_output + j;
        T value = static_cast<T>(total);
        if (a.live && !a.live[row])
          value = static_cast<T>(0.0f);
        else if (a.gate)
          value =
              static_cast<T>(static_cast<float>(value) * sigmoid(static_cast<float>(a.gate[row * a.gate_stride + at])));
        a.out[row * a.out_stride + at] = value;
      }
  }
}

}  // namespace k3::kernel
