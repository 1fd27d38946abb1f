// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/linear_avx2.hpp>

#if K3_X86_64

#if defined(__CUDACC__)
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif

namespace k3::detail {

// The maskz forms with a full mask are the plain instructions; g++ 12 warns of uninitialised values in the others.
inline constexpr unsigned short all16 = 0xffff;

K3_TARGET_AVX512 inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
K3_TARGET_AVX512 inline __m512 load16(const bf16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(all16, _mm512_maskz_cvtepu16_epi32(all16, bits), 16));
}

/// Columns [k, k + 16 Registers) of a weight row as floats.
template <size Registers, class T>
K3_TARGET_AVX512 inline void load_weights(const T* row, size k, __m512 (&w)[Registers]) {
#pragma GCC unroll 16
  for (size g = 0; g < Registers; ++g) w[g] = load16(row + k + 16 * g);
}
/// Eight codes of a 32-bit word go to eight lanes, each shifted down to bits 0-3, the only ones a permute reads. The
/// permuted table holds the 16 values times the group's scale: the same float product as a product per element.
template <size Registers>
K3_TARGET_AVX512 inline void load_weights(const Mxfp4Row& row, size k, __m512 (&w)[Registers]) {
  const __m512 values = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  __m512i codes;
  const std::uint8_t* from = row.packed + k / 2;
  static_assert(Registers == 4 || Registers == 1);
  if constexpr (Registers == 4)
    codes = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  else
    codes = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  __m512 scaled = values;
#pragma GCC unroll 16
  for (size g = 0; g < Registers; ++g) {
    if (g % 2 == 0)
      scaled = _mm512_mul_ps(values, _mm512_set1_ps(e8m0_table.value[row.scale[(k + 16 * g) / mxfp4_group]]));
    const __m512i from_word = _mm512_add_epi32(word, _mm512_set1_epi32(static_cast<int>(2 * g)));
    const __m512i spread = _mm512_maskz_permutexvar_epi32(all16, from_word, codes);
    w[g] = _mm512_maskz_permutexvar_ps(all16, _mm512_maskz_srlv_epi32(all16, spread, shifts), scaled);
  }
}

/// Kernels for AVX-512: 16 of the 32 registers hold sums.
struct Avx512 {
  static constexpr size width = 16;
  template <size XRows>
  static constexpr size registers = XRows == 4 ? 1 : 4;
  template <size XRows>
  static constexpr size rows = XRows;
  template <size XRows>
  static constexpr size axpy_registers = 16 / XRows;
  /// Weight rows that multiply_expanded takes at once: 24 registers hold sums of 4 rows of x.
  static constexpr size expanded_rows = 6;

  /// lanes[r][j][lane..] += w[r] * x[j] over the columns [first, last) of these lanes.
  template <size XRows, size WRows, size Ahead, class Row>
  K3_TARGET_AVX512 static void accumulate(const Row* w, const float* const (&x)[XRows], size first, size last,
                                          size lane, float (&lanes)[WRows][XRows][dot_lanes]) {
    constexpr size regs = registers<XRows>;
    __m512 sum[WRows][XRows][regs];
#pragma GCC unroll 16
    for (size r = 0; r < WRows; ++r)
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
        for (size g = 0; g < regs; ++g) sum[r][j][g] = _mm512_load_ps(lanes[r][j] + lane + width * g);
    for (size k = first + lane; k < last; k += dot_lanes) {
      if (lane == 0)
#pragma GCC unroll 16
        for (size r = 0; r < WRows; ++r) prefetch_weights(w[r], k + Ahead);
      __m512 x_value[XRows][regs];
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
        for (size g = 0; g < regs; ++g) x_value[j][g] = load16(x[j] + k + width * g);
#pragma GCC unroll 16
      for (size r = 0; r < WRows; ++r) {
        __m512 w_value[regs];
        load_weights<regs>(w[r], k, w_value);
#pragma GCC unroll 16
        for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
          for (size g = 0; g < regs; ++g) sum[r][j][g] = _mm512_fmadd_ps(w_value[g], x_value[j][g], sum[r][j][g]);
      }
    }
#pragma GCC unroll 16
    for (size r = 0; r < WRows; ++r)
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
        for (size g = 0; g < regs; ++g) _mm512_store_ps(lanes[r][j] + lane + width * g, sum[r][j][g]);
  }

  /// Columns [first, first + columns), a multiple of 64, of some weight rows: to[lanes / 16][columns / 64][WRows][16].
  template <size WRows, class Row>
  K3_TARGET_AVX512 static void expand(const Row (&w)[WRows], size first, size columns, float* to) {
    for (size r = 0; r < WRows; ++r)
      for (size k = 0; k < columns; k += dot_lanes) {
        __m512 w_value[4];
        prefetch_weights(w[r], first + k + columns);
        load_weights<4>(w[r], first + k, w_value);
#pragma GCC unroll 16
        for (size g = 0; g < 4; ++g)
          _mm512_store_ps(to + ((g * columns + k) / dot_lanes * WRows + r) * width, w_value[g]);
      }
  }

  /// lanes[r][j][0..16) += w[step][r] * x[step][j], element by element.
  template <size XRows, size WRows, size Stride>
  K3_TARGET_AVX512 static void multiply_expanded(const float* w, const float* x, size steps,
                                                 float (*lanes)[Stride][dot_lanes], size lane) {
    __m512 sum[WRows][XRows];
#pragma GCC unroll 16
    for (size r = 0; r < WRows; ++r)
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j) sum[r][j] = _mm512_load_ps(lanes[r][j] + lane);
    for (size step = 0; step < steps; ++step, w += WRows * width, x += XRows * width) {
      __m512 x_value[XRows];
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j) x_value[j] = load16(x + width * j);
#pragma GCC unroll 16
      for (size r = 0; r < WRows; ++r) {
        const __m512 w_value = load16(w + width * r);
#pragma GCC unroll 16
        for (size j = 0; j < XRows; ++j) sum[r][j] = _mm512_fmadd_ps(w_value, x_value[j], sum[r][j]);
      }
    }
#pragma GCC unroll 16
    for (size r = 0; r < WRows; ++r)
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j) _mm512_store_ps(lanes[r][j] + lane, sum[r][j]);
  }

  K3_TARGET_AVX512 static float lane_sum(const float (&lanes)[dot_lanes]) {
    const __m512 even = _mm512_add_ps(_mm512_load_ps(lanes), _mm512_load_ps(lanes + 32));
    const __m512 odd = _mm512_add_ps(_mm512_load_ps(lanes + 16), _mm512_load_ps(lanes + 48));
    const __m512 sum = _mm512_add_ps(even, odd);
    return sum8(_mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, sum, 0), _mm512_maskz_extractf32x8_ps(0xff, sum, 1)));
  }

  /// sum[j][k] = sum over n, in order, of x[j][n] w[n][k], for 16 Registers columns.
  template <size Registers, size XRows, class W, size Block>
  K3_TARGET_AVX512 static void axpy(const float* const (&x)[XRows], const W* w, size stride, size rows_count,
                                    float (&out)[XRows][Block]) {
    __m512 sum[XRows][Registers];
#pragma GCC unroll 16
    for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
      for (size g = 0; g < Registers; ++g) sum[j][g] = _mm512_setzero_ps();
    for (size n = 0; n < rows_count; ++n, w += stride) {
      prefetch_bytes(w, 8 * stride * sizeof(W), Registers * width * sizeof(W));
      __m512 factor[XRows];
#pragma GCC unroll 16
      for (size j = 0; j < XRows; ++j) factor[j] = _mm512_set1_ps(x[j][n]);
#pragma GCC unroll 16
      for (size g = 0; g < Registers; ++g) {
        const __m512 w_value = load16(w + width * g);
#pragma GCC unroll 16
        for (size j = 0; j < XRows; ++j) sum[j][g] = _mm512_fmadd_ps(factor[j], w_value, sum[j][g]);
      }
    }
#pragma GCC unroll 16
    for (size j = 0; j < XRows; ++j)
#pragma GCC unroll 16
      for (size g = 0; g < Registers; ++g) _mm512_store_ps(out[j] + width * g, sum[j][g]);
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
