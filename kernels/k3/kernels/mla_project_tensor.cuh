// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/grid_order.cuh>
#include <k3/kernels/mla_hopper.cuh>
#include <k3/kernels/mla_project.cuh>

// mla_absorb and mla_expand in bf16 on the tensor cores. Tokens are on the 16-row side of a 16 x 8 x 16 product and
// outputs on the other. Weights go from memory to registers directly: which of the 32 summed numbers of two products
// stands where is free as long as both operands agree, so lane l holds the 16 bytes from number 8 (l % 4) on.
// Every output is the same chain of products whatever the number of rows.
namespace k3::kernel {

/// Eight neighbours as four words, zeros from `count` on. `Vector`: on a multiple of 16 bytes. `Once`: read once.
template <bool Vector, bool Once>
__device__ __forceinline__ void load_eight(unsigned (&to)[4], const bf16* from, unsigned count) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (Vector && count >= 8) {
    if constexpr (Once)
      v = load_streaming(from);
    else
      v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    return;
  }
#pragma unroll
  for (unsigned i = 0; i < 4; ++i)
    to[i] = (2 * i < count ? from[2 * i].bits : 0u) |
            (2 * i + 1 < count ? static_cast<unsigned>(from[2 * i + 1].bits) << 16 : 0u);
}
/// What is left of `all` from `at` on.
__device__ __forceinline__ unsigned rest_of(unsigned all, unsigned at) { return at < all ? all - at : 0; }

inline constexpr unsigned mla_absorb_threads = 64, mla_absorb_warp_columns = 64, mla_absorb_depth = 128;

/// q_latent = W_UK^T q: a warp does 64 latent columns of a head, eight products of 8 columns wide that are 8 apart, and
/// keeps its weights in registers. Grid: heads, columns, rows.
template <bool Vector>
__global__ void __launch_bounds__(mla_absorb_threads) mla_absorb_tensor(MlaProjectArguments<bf16, bf16> a) {
  const unsigned head = blockIdx.x, lane = threadIdx.x % 32, t = lane % 4, n = lane / 4;
  const unsigned first_column = (blockIdx.y * (mla_absorb_threads / 32) + threadIdx.x / 32) * mla_absorb_warp_columns;
  // Columns of a product are 8 apart, in the order in which a lane's two lie in different halves of 128 bytes.
  const unsigned column = first_column + 8 * (n / 2 + n % 2 * 4), columns = rest_of(a.latent, column);
  const bf16* const weight = a.kv_b + static_cast<size>(head) * (a.nope + a.v) * a.latent + column;
  unsigned b[4][2][8][2];  // [32 numbers, product, 8 columns, pair]
  const auto load_weights = [&](unsigned depth) {
#pragma unroll
    for (unsigned g = 0; g < 4; ++g) {
      unsigned row[8][4];
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) {
        const unsigned k = depth + g * 32 + 8 * t + i;
        load_eight<Vector, true>(row[i], weight + static_cast<size>(k) * a.latent, k < a.nope ? columns : 0);
      }
#pragma unroll
      for (unsigned i = 0; i < 4; ++i)
#pragma unroll
        for (unsigned j = 0; j < 8; ++j)
          b[g][i / 2][j][i % 2] = __byte_perm(row[2 * i][j / 2], row[2 * i + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
    }
  };
  load_weights(0);
  wait_for_earlier();
  let_later_start();
  const size q_head = static_cast<size>(head) * (a.nope + a.rope);
  // The rest of the heads' queries as they are, a share to each block.
  const bool pieces = a.q_vector && a.latent_vector && a.nope % 8 == 0 && a.latent % 8 == 0;
  const auto copy_rest = [&](size first) {
    const unsigned width = pieces ? a.rope / 8 : a.rope, every = gridDim.y * mla_absorb_threads;
    for (unsigned i = blockIdx.y * mla_absorb_threads + threadIdx.x; i < 16 * width; i += every) {
      const size row = first + i / width;
      const unsigned at = i % width * (pieces ? 8 : 1);
      if (row >= a.rows) return;
      const bf16* const from = a.q + row * a.q_stride + q_head + a.nope + at;
      bf16* const to = a.q_latent + row * a.q_latent_row + head * a.q_latent_head + a.latent + at;
      if (pieces)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      else
        *to = *from;
    }
  };
  for (size first = blockIdx.z * size{16}; first < a.rows; first += gridDim.z * size{16}) {
    float c[8][4] = {};
    for (unsigned depth = 0; depth < a.nope; depth += mla_absorb_depth) {
      if (a.nope > mla_absorb_depth) load_weights(depth);
      unsigned x[4][2][4];
#pragma unroll
      for (unsigned g = 0; g < 4; ++g)
#pragma unroll
        for (unsigned r = 0; r < 2; ++r) {
          const unsigned k = depth + g * 32 + 8 * t;
          const size row = first + n + 8 * r;
          const bf16* const from = a.q + row * a.q_stride + q_head + k;
          const unsigned count = row < a.rows ? rest_of(a.nope, k) : 0;
          if (a.q_vector)
            load_eight<true, false>(x[g][r], from, count);
          else
            load_eight<false, false>(x[g][r], from, count);
        }
      if (depth == 0) copy_rest(first);
#pragma unroll
      for (unsigned g = 0; g < 4; ++g)
        if (depth + g * 32 < a.nope)
#pragma unroll
          for (unsigned s = 0; s < 2; ++s)
#pragma unroll
            for (unsigned j = 0; j < 8; ++j)
              multiply_add(c[j], x[g][0][2 * s], x[g][1][2 * s], x[g][0][2 * s + 1], x[g][1][2 * s + 1], b[g][s][j][0],
                           b[g][s][j][1]);
    }
#pragma unroll
    for (unsigned r = 0; r < 2; ++r)
#pragma unroll
      for (unsigned e = 0; e < 2; ++e) {
        const size row = first + n + 8 * r;
        const unsigned at = first_column + 8 * (t + 4 * e);
        if (row >= a.rows || at >= a.latent) continue;
        bf16* const to = a.q_latent + row * a.q_latent_row + head * a.q_latent_head + at;
        unsigned two[4];
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) two[i] = bf16_pair(c[2 * i][2 * r + e], c[2 * i + 1][2 * r + e]);
        if (a.latent_vector && at + 8 <= a.latent) {
          *reinterpret_cast<uint4*>(to) = make_uint4(two[0], two[1], two[2], two[3]);
        } else {
#pragma unroll
          for (unsigned i = 0; i < 8; ++i)
            if (at + i < a.latent) to[i] = bf16::from_bits(static_cast<unsigned short>(two[i / 2] >> i % 2 * 16));
        }
      }
  }
}

/// A pair of floats as two bf16 pairs whose sums they are, to 16 bits.
__device__ __forceinline__ void split_pair(float x, float y, unsigned& high, unsigned& low) {
  high = bf16_pair(x, y);
  const float p = x - low_of(high), q = y - high_of(high);
  low = bf16_pair(p == p ? p : 0.0f, q == q ? q : 0.0f);  // infinities have no rest
}
/// Eight neighbouring floats, zeros from `count` on.
__device__ __forceinline__ void load_eight_floats(float (&to)[8], const float* from, unsigned count, bool vector) {
  if (vector && count >= 8) {
    const float4 p = *reinterpret_cast<const float4*>(from), q = *reinterpret_cast<const float4*>(from + 4);
    to[0] = p.x, to[1] = p.y, to[2] = p.z, to[3] = p.w, to[4] = q.x, to[5] = q.y, to[6] = q.z, to[7] = q.w;
    return;
  }
#pragma unroll
  for (unsigned i = 0; i < 8; ++i) to[i] = i < count ? from[i] : 0.0f;
}

/// out = W_UV o_latent, gated: a warp does 16 rows and `Tiles` * 8 outputs of a head, means as sums of two bf16 in
/// shared memory. `Tiles` 1: four warps, 32 outputs of 16 rows; 4: eight warps, 128 outputs of 32 rows. Grid: heads,
/// outputs, rows.
template <bool Vector, int Tiles>
__global__ void __launch_bounds__(Tiles == 1 ? 128 : 256, Tiles == 1 ? 3 : 2)
    mla_expand_tensor(MlaProjectArguments<bf16, bf16> a) {
  constexpr unsigned threads = Tiles == 1 ? 128 : 256, step = Tiles == 1 ? 16 : 32;  // rows
  constexpr unsigned piece = Tiles == 1 ? 512 : 256, depth = Tiles == 1 ? 16 : 2;    // columns there, in registers / 32
  // In the banks neighbouring rows are 64 bytes apart.
  constexpr unsigned stride = piece + 32;
  __shared__ uint4 means[2][step * stride / 8];
  const unsigned head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4, n = lane / 4;
  const unsigned first_output = blockIdx.y * (Tiles * 32) + warp % 4 * (Tiles * 8);
  const bf16* const weight = a.kv_b + (static_cast<size>(head) * (a.nope + a.v) + a.nope) * a.latent;
  unsigned b[depth][Tiles][4];
  const auto load_weights = [&](unsigned column) {
#pragma unroll
    for (unsigned d = 0; d < depth; ++d)
#pragma unroll
      for (unsigned j = 0; j < Tiles; ++j) {
        const unsigned output = first_output + 8 * j + n, at = column + d * 32 + 8 * t;
        load_eight<Vector, Tiles == 1>(b[d][j], weight + static_cast<size>(output) * a.latent + at,
                                       output < a.v ? rest_of(a.latent, at) : 0);
      }
  };
  load_weights(0);
  wait_for_earlier();
  let_later_start();
  for (size first = blockIdx.z * size{step}; first < a.rows; first += gridDim.z * size{step}) {
    float high[Tiles][4] = {}, low[Tiles][4] = {};
    for (unsigned start = 0; start < a.latent; start += piece) {
      __syncthreads();  // nobody reads the piece before
      const unsigned rows = static_cast<unsigned>(detail::smaller(size{step}, a.rows - first));
#pragma unroll 4
      for (unsigned i = threadIdx.x; i < rows * (piece / 8); i += threads) {
        const unsigned row = i / (piece / 8), at = i % (piece / 8) * 8;
        float eight[8];
        load_eight_floats(eight, a.o_latent + (first + row) * a.o_row + head * a.o_head + start + at,
                          rest_of(a.latent, start + at), a.latent_vector);
        unsigned x[4], y[4];
#pragma unroll
        for (unsigned e = 0; e < 4; ++e) split_pair(eight[2 * e], eight[2 * e + 1], x[e], y[e]);
        means[0][(row * stride + at) / 8] = make_uint4(x[0], x[1], x[2], x[3]);
        means[1][(row * stride + at) / 8] = make_uint4(y[0], y[1], y[2], y[3]);
      }
      __syncthreads();
      for (unsigned column = start; column < detail::smaller(start + piece, a.latent); column += depth * 32) {
        if (a.latent > depth * 32 && (column > 0 || first != blockIdx.z * size{step})) load_weights(column);
#pragma unroll
        for (unsigned d = 0; d < depth; ++d) {
          if (column + d * 32 >= a.latent) break;
          unsigned x[2][4] = {}, y[2][4] = {};
#pragma unroll
          for (unsigned r = 0; r < 2; ++r) {
            const unsigned row = warp / 4 * 16 + n + 8 * r, at = (row * stride + column - start + d * 32) / 8 + t;
            if (row >= rows) continue;
            const uint4 p = means[0][at], q = means[1][at];
            x[r][0] = p.x, x[r][1] = p.y, x[r][2] = p.z, x[r][3] = p.w;
            y[r][0] = q.x, y[r][1] = q.y, y[r][2] = q.z, y[r][3] = q.w;
          }
#pragma unroll
          for (unsigned s = 0; s < 2; ++s)
#pragma unroll
            for (unsigned j = 0; j < Tiles; ++j) {
              const unsigned b0 = b[d][j][2 * s], b1 = b[d][j][2 * s + 1];
              multiply_add(high[j], x[0][2 * s], x[1][2 * s], x[0][2 * s + 1], x[1][2 * s + 1], b0, b1);
              multiply_add(low[j], y[0][2 * s], y[1][2 * s], y[0][2 * s + 1], y[1][2 * s + 1], b0, b1);
            }
        }
      }
    }
#pragma unroll
    for (unsigned j = 0; j < Tiles; ++j)
#pragma unroll
      for (unsigned e = 0; e < 4; ++e) {
        const size row = first + warp / 4 * 16 + n + e / 2 * 8;
        const unsigned output = first_output + 8 * j + 2 * t + e % 2;
        if (row >= a.rows || output >= a.v) continue;
        const size at = static_cast<size>(head) * a.v + output;
        bf16 value(high[j][e] + low[j][e]);
        if (a.live && !a.live[row])
          value = bf16(0.0f);
        else if (a.gate)
          value = bf16(static_cast<float>(value) * sigmoid(static_cast<float>(a.gate[row * a.gate_stride + at])));
        a.out[row * a.out_stride + at] = value;
      }
  }
}

}  // namespace k3::kernel
