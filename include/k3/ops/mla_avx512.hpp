// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/mla_avx2.hpp>

#if K3_X86_64

#if defined(__CUDACC__)  // which hands `#pragma GCC unroll` on but does not know it
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif

namespace k3::detail {

/// As MlaAvx2, with 16 of the 32 registers for sums.
struct MlaAvx512 {
  static constexpr size score_heads = 4, score_rows = 4;
  static constexpr size value_heads = 4, value_columns = 64;

  template <class Q, class T>
  K3_TARGET_AVX512 static void add(const Q* const (&q)[4], const T* const (&rows)[4], size k, __m512 (&sum)[4][4]) {
    __m512 row[4];
#pragma GCC unroll 4
    for (size j = 0; j < 4; ++j) row[j] = load16(rows[j] + k);
#pragma GCC unroll 4
    for (size h = 0; h < 4; ++h) {
      const __m512 query = load16(q[h] + k);
#pragma GCC unroll 4
      for (size j = 0; j < 4; ++j) sum[h][j] = _mm512_fmadd_ps(query, row[j], sum[h][j]);
    }
  }

  template <class Q, class T>
  K3_TARGET_AVX512 static void scores(const Q* const (&q)[4], const T* const (&rows)[4], size width,
                                      float (&out)[4][4]) {
    __m512 sum[4][4];
#pragma GCC unroll 16
    for (size i = 0; i < 16; ++i) sum[i / 4][i % 4] = _mm512_setzero_ps();
    const size whole = width / 16 * 16;
    for (size k = 0; k < whole; k += 16) add(q, rows, k, sum);
    if (whole < width) {
      Q q_tail[4][16];
      T row_tail[4][16];
      const Q* q_tails[4];
      const T* row_tails[4];
      for (size i = 0; i < 4; ++i) {
        q_tails[i] = mla_padded(q[i], whole, width, q_tail[i]);
        row_tails[i] = mla_padded(rows[i], whole, width, row_tail[i]);
      }
      add<Q, T>(q_tails, row_tails, 0, sum);
    }
#pragma GCC unroll 16
    for (size i = 0; i < 16; ++i) {
      // The maskz form of a cast too: g++ 12 warns of uninitialised values in the other.
      const __m256 low = _mm512_maskz_extractf32x8_ps(0xff, sum[i / 4][i % 4], 0);
      out[i / 4][i % 4] = sum8(_mm256_add_ps(low, _mm512_maskz_extractf32x8_ps(0xff, sum[i / 4][i % 4], 1)));
    }
  }

  template <class T>
  K3_TARGET_AVX512 static void values(const float* const (&weights)[4], const float (&rescale)[4], const T* const* rows,
                                      size count, size first, size last, float* const (&out)[4]) {
    if (last - first < value_columns) return mla_value_columns(weights, rescale, rows, count, first, last, out);
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (size h = 0; h < 4; ++h)
#pragma GCC unroll 4
      for (size g = 0; g < 4; ++g)
        sum[h][g] = rescale[h] == 0
                        ? _mm512_setzero_ps()
                        : _mm512_mul_ps(_mm512_loadu_ps(out[h] + first + 16 * g), _mm512_set1_ps(rescale[h]));
    for (size j = 0; j < count; ++j) {
      __m512 row[4];
#pragma GCC unroll 4
      for (size g = 0; g < 4; ++g) row[g] = load16(rows[j] + first + 16 * g);
#pragma GCC unroll 4
      for (size h = 0; h < 4; ++h) {
        const __m512 weight = _mm512_set1_ps(weights[h][j]);
#pragma GCC unroll 4
        for (size g = 0; g < 4; ++g) sum[h][g] = _mm512_fmadd_ps(weight, row[g], sum[h][g]);
      }
    }
#pragma GCC unroll 4
    for (size h = 0; h < 4; ++h)
#pragma GCC unroll 4
      for (size g = 0; g < 4; ++g) _mm512_storeu_ps(out[h] + first + 16 * g, sum[h][g]);
  }
};

}  // namespace k3::detail

#if defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif
#endif
