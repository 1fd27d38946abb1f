// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/linear_kernels.hpp>

#if K3_X86_64

#include <immintrin.h>

// Without the unrolling the sums of a tile would not stay in registers. nvcc hands the pragma on but does not know it.
#if defined(__CUDACC__)
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif

namespace k3::detail {

K3_TARGET_AVX2 inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
K3_TARGET_AVX2 inline __m256 load8(const bf16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/// Columns [k, k + 8) of a weight row as floats. `table` is set at the first columns of a scale group.
template <class T>
K3_TARGET_AVX2 inline __m256 load_weights8(const T* row, size k, bool, __m256&) {
  return load8(row + k);
}
/// Eight codes of a 32-bit word go to eight lanes: shifted down, bits 0-2 choose the magnitude; shifted up, bit 3 is
/// the sign. The permuted table holds the magnitudes times the scale: the same float product as one per element.
K3_TARGET_AVX2 inline __m256 load_weights8(const Mxfp4Row& row, size k, bool first_of_group, __m256& table) {
  const __m256i down = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i up = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
  if (first_of_group)
    table = _mm256_mul_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6),
                          _mm256_set1_ps(e8m0_table.value[row.scale[k / mxfp4_group]]));
  int word;
  __builtin_memcpy(&word, row.packed + k / 2, sizeof word);
  const __m256i codes = _mm256_set1_epi32(word);
  const __m256 magnitude = _mm256_permutevar8x32_ps(table, _mm256_srlv_epi32(codes, down));
  const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_sllv_epi32(codes, up)), _mm256_set1_ps(-0.0f));
  return _mm256_or_ps(magnitude, sign);
}

/// The last steps of the tree over the lanes: 4 apart, 2 apart, neighbours.
K3_TARGET_AVX2 inline float sum8(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/// The transposed product's last columns, one by one: what a vector lane does.
template <size XRows, class W, size Block>
K3_TARGET_AVX2 void axpy_columns(const float* const (&x)[XRows], const W* w, size stride, size rows, size columns,
                                 float (&out)[XRows][Block]) {
  for (size j = 0; j < XRows; ++j)
    for (size k = 0; k < columns; ++k) {
      float sum = 0;
      for (size n = 0; n < rows; ++n) sum = __builtin_fmaf(x[j][n], static_cast<float>(w[n * stride + k]), sum);
      out[j][k] = sum;
    }
}

/// Kernels for AVX2 with FMA: 8 of the 16 registers hold sums.
struct Avx2 {
  static constexpr size width = 8;
  template <size XRows>
  static constexpr size registers = XRows == 1   ? 8
                                    : XRows == 2 ? 4
                                                 : 1;
  template <size XRows>
  static constexpr size rows = XRows == 4 ? 2 : 1;
  template <size XRows>
  static constexpr size axpy_registers = 8 / XRows;
  /// Weight rows that multiply_expanded takes at once: 12 registers hold sums of 4 rows of x.
  static constexpr size expanded_rows = 3;

  /// lanes[r][j][lane..] += w[r] * x[j] over the columns [first, last) of these lanes.
  template <size XRows, size WRows, size Ahead, class Row>
  K3_TARGET_AVX2 static void accumulate(const Row* w, const float* const (&x)[XRows], size first, size last, size lane,
                                        float (&lanes)[WRows][XRows][dot_lanes]) {
    constexpr size regs = registers<XRows>;
    __m256 sum[WRows][XRows][regs];
#pragma GCC unroll 16
    for (size r = 0; r < WRows; ++r)
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
        for (size g = 0; g < regs; ++g) sum[r][j][g] = _mm256_load_ps(lanes[r][j] + lane + width * g);
    for (size k = first + lane; k < last; k += dot_lanes) {
      if (lane == 0)
#pragma GCC unroll 16
        for (size r = 0; r < WRows; ++r) prefetch_weights(w[r], k + Ahead);
      __m256 table[WRows];
#pragma GCC unroll 16
      for (size g = 0; g < regs; ++g) {
        __m256 w_value[WRows];
#pragma GCC unroll 16
        for (size r = 0; r < WRows; ++r) w_value[r] = load_weights8(w[r], k + width * g, g % 4 == 0, table[r]);
#pragma GCC unroll 16
        for (size j = 0; j < XRows; ++j) {
          const __m256 x_value = load8(x[j] + k + width * g);
#pragma GCC unroll 16
          for (size r = 0; r < WRows; ++r) sum[r][j][g] = _mm256_fmadd_ps(w_value[r], x_value, sum[r][j][g]);
        }
      }
    }
#pragma GCC unroll 16
    for (size r = 0; r < WRows; ++r)
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
        for (size g = 0; g < regs; ++g) _mm256_store_ps(lanes[r][j] + lane + width * g, sum[r][j][g]);
  }

  /// Columns [first, first + columns), a multiple of 64, of some weight rows: to[lanes / 8][columns / 64][WRows][8].
  template <size WRows, class Row>
  K3_TARGET_AVX2 static void expand(const Row (&w)[WRows], size first, size columns, float* to) {
    for (size r = 0; r < WRows; ++r)
      for (size k = 0; k < columns; k += dot_lanes) {
        prefetch_weights(w[r], first + k + columns);
        __m256 table;
#pragma GCC unroll 16
        for (size g = 0; g < dot_lanes / width; ++g)
          _mm256_store_ps(to + ((g * columns + k) / dot_lanes * WRows + r) * width,
                          load_weights8(w[r], first + k + width * g, g % 4 == 0, table));
      }
  }

  /// lanes[r][j][0..8) += w[step][r] * x[step][j], element by element.
  template <size XRows, size WRows, size Stride>
  K3_TARGET_AVX2 static void multiply_expanded(const float* w, const float* x, size steps,
                                               float (*lanes)[Stride][dot_lanes], size lane) {
    __m256 sum[WRows][XRows];
#pragma GCC unroll 16
    for (size r = 0; r < WRows; ++r)
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j) sum[r][j] = _mm256_load_ps(lanes[r][j] + lane);
    for (size step = 0; step < steps; ++step, w += WRows * width, x += XRows * width) {
      __m256 w_value[WRows];
#pragma GCC unroll 16
      for (size r = 0; r < WRows; ++r) w_value[r] = load8(w + width * r);
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j) {
        const __m256 x_value = load8(x + width * j);
#pragma GCC unroll 16
        for (size r = 0; r < WRows; ++r) sum[r][j] = _mm256_fmadd_ps(w_value[r], x_value, sum[r][j]);
      }
    }
#pragma GCC unroll 16
    for (size r = 0; r < WRows; ++r)
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j) _mm256_store_ps(lanes[r][j] + lane, sum[r][j]);
  }

  /// Adds lanes 32 apart, 16 apart, 8 apart, ..., neighbours.
  K3_TARGET_AVX2 static float lane_sum(const float (&lanes)[dot_lanes]) {
    __m256 sum[4];
#pragma GCC unroll 4
    for (size g = 0; g < 4; ++g)
      sum[g] = _mm256_add_ps(_mm256_load_ps(lanes + 8 * g), _mm256_load_ps(lanes + 8 * g + 32));
    return sum8(_mm256_add_ps(_mm256_add_ps(sum[0], sum[2]), _mm256_add_ps(sum[1], sum[3])));
  }

  /// sum[j][k] = sum over n, in order, of x[j][n] w[n][k], for 8 Registers columns.
  template <size Registers, size XRows, class W, size Block>
  K3_TARGET_AVX2 static void axpy(const float* const (&x)[XRows], const W* w, size stride, size rows_count,
                                  float (&out)[XRows][Block]) {
    __m256 sum[XRows][Registers];
#pragma GCC unroll 16
    for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
      for (size g = 0; g < Registers; ++g) sum[j][g] = _mm256_setzero_ps();
    for (size n = 0; n < rows_count; ++n, w += stride) {
      prefetch_bytes(w, 8 * stride * sizeof(W), Registers * width * sizeof(W));
      __m256 factor[XRows];
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j) factor[j] = _mm256_set1_ps(x[j][n]);
#pragma GCC unroll 16
      for (size g = 0; g < Registers; ++g) {
        const __m256 w_value = load8(w + width * g);
#pragma GCC unroll 16
        for (size j = 0; j < XRows; ++j) sum[j][g] = _mm256_fmadd_ps(factor[j], w_value, sum[j][g]);
      }
    }
#pragma GCC unroll 16
    for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
      for (size g = 0; g < Registers; ++g) _mm256_store_ps(out[j] + width * g, sum[j][g]);
  }

  template <size XRows, class W, size Block>
  static void axpy_tail(const float* const (&x)[XRows], const W* w, size stride, size rows_count, size columns,
                        float (&out)[XRows][Block]) {
    axpy_columns(x, w, stride, rows_count, columns, out);
  }
};

}  // namespace k3::detail

#if defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif
#endif
