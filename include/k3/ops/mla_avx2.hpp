// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/linear_avx512.hpp>

// The two products of attention over a block of cached positions for a few heads. Both versions give the same bits: a
// score adds element i in lane i % 16 and then the lanes as a tree; a value adds its positions one after the other.

#if K3_X86_64

#if defined(__CUDACC__)  // which hands `#pragma GCC unroll` on but does not know it
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif

namespace k3::detail {

/// Elements [first, last) and zeros up to 16.
template <class T>
const T* mla_padded(const T* from, size first, size last, T (&to)[16]) {
  for (size i = 0; i < 16; ++i) to[i] = first + i < last ? from[first + i] : T{};
  return to;
}

/// The columns [first, last) of the value product that fill no register, one by one: what a vector lane does.
template <size Heads, class T>
K3_TARGET_AVX2 void mla_value_columns(const float* const (&weights)[Heads], const float (&rescale)[Heads],
                                      const T* const* rows, size count, size first, size last,
                                      float* const (&out)[Heads]) {
  for (size h = 0; h < Heads; ++h) {
    if (h > 0 && out[h] == out[h - 1]) return;  // a repeated head must not be rescaled twice
    for (size c = first; c < last; ++c) {
      float sum = rescale[h] == 0 ? 0 : out[h][c] * rescale[h];
      for (size j = 0; j < count; ++j) sum = __builtin_fmaf(weights[h][j], static_cast<float>(rows[j][c]), sum);
      out[h][c] = sum;
    }
  }
}

struct MlaAvx2 {
  static constexpr size score_heads = 2, score_rows = 2;  // 2 x 2 sums of two registers
  static constexpr size value_heads = 4, value_columns = 16;

  template <class Q, class T>
  K3_TARGET_AVX2 static void add(const Q* const (&q)[2], const T* const (&rows)[2], size k, __m256 (&sum)[2][2][2]) {
#pragma GCC unroll 2
    for (size g = 0; g < 2; ++g) {
      const __m256 row[2] = {load8(rows[0] + k + 8 * g), load8(rows[1] + k + 8 * g)};
#pragma GCC unroll 2
      for (size h = 0; h < 2; ++h) {
        const __m256 query = load8(q[h] + k + 8 * g);
#pragma GCC unroll 2
        for (size j = 0; j < 2; ++j) sum[h][j][g] = _mm256_fmadd_ps(query, row[j], sum[h][j][g]);
      }
    }
  }

  /// out[h][j] = q[h] . rows[j]
  template <class Q, class T>
  K3_TARGET_AVX2 static void scores(const Q* const (&q)[2], const T* const (&rows)[2], size width, float (&out)[2][2]) {
    __m256 sum[2][2][2];
#pragma GCC unroll 8
    for (size i = 0; i < 8; ++i) sum[i / 4][i / 2 % 2][i % 2] = _mm256_setzero_ps();
    const size whole = width / 16 * 16;
    for (size k = 0; k < whole; k += 16) add(q, rows, k, sum);
    if (whole < width) {
      Q q_tail[2][16];
      T row_tail[2][16];
      const Q* const q_rows[2] = {mla_padded(q[0], whole, width, q_tail[0]), mla_padded(q[1], whole, width, q_tail[1])};
      const T* const tails[2] = {mla_padded(rows[0], whole, width, row_tail[0]),
                                 mla_padded(rows[1], whole, width, row_tail[1])};
      add(q_rows, tails, 0, sum);
    }
#pragma GCC unroll 4
    for (size i = 0; i < 4; ++i) out[i / 2][i % 2] = sum8(_mm256_add_ps(sum[i / 2][i % 2][0], sum[i / 2][i % 2][1]));
  }

  /// out[h][c] = out[h][c] * rescale[h] + sum over j of weights[h][j] * rows[j][c] for c = first, .., last - 1.
  template <class T>
  K3_TARGET_AVX2 static void values(const float* const (&weights)[4], const float (&rescale)[4], const T* const* rows,
                                    size count, size first, size last, float* const (&out)[4]) {
    if (last - first < value_columns) return mla_value_columns(weights, rescale, rows, count, first, last, out);
    __m256 sum[4][2];
#pragma GCC unroll 4
    for (size h = 0; h < 4; ++h)
#pragma GCC unroll 2
      for (size g = 0; g < 2; ++g)
        sum[h][g] = rescale[h] == 0
                        ? _mm256_setzero_ps()
                        : _mm256_mul_ps(_mm256_loadu_ps(out[h] + first + 8 * g), _mm256_set1_ps(rescale[h]));
    for (size j = 0; j < count; ++j) {
      const __m256 row[2] = {load8(rows[j] + first), load8(rows[j] + first + 8)};
#pragma GCC unroll 4
      for (size h = 0; h < 4; ++h) {
        const __m256 weight = _mm256_set1_ps(weights[h][j]);
#pragma GCC unroll 2
        for (size g = 0; g < 2; ++g) sum[h][g] = _mm256_fmadd_ps(weight, row[g], sum[h][g]);
      }
    }
#pragma GCC unroll 4
    for (size h = 0; h < 4; ++h)
#pragma GCC unroll 2
      for (size g = 0; g < 2; ++g) _mm256_storeu_ps(out[h] + first + 8 * g, sum[h][g]);
  }
};

}  // namespace k3::detail

#if defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif
#endif
