// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/kda_head.hpp>

#if K3_X86_64

#include <immintrin.h>

#if defined(__CUDACC__)
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif

namespace k3::detail {

/// e^x = 2^n e^r, |r| <= ln 2 / 2, by a polynomial of degree 7 in r, within one unit in the last place. Both
/// vector versions evaluate it in this order, so they give the same bits.
struct ExpConstants {
  static constexpr float low = -104.0f, high = 89.0f;  // below and above: 0 and infinity
  static constexpr float log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  static constexpr float c[6] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};

/// A head's arithmetic for AVX2 with FMA: vectors run over the value columns, sums over the keys stay in order.
struct KdaAvx2 {
  using Acc = float;

  /// All bits of the first `count` lanes.
  K3_TARGET_AVX2 static __m256i lanes(size count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(smaller(count, size{8}))),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  K3_TARGET_AVX2 static __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }

  K3_TARGET_AVX2 static __m256 exponential8(__m256 x) {
    using C = ExpConstants;
    // The bound comes first: min and max return their second operand, x, where it is NaN.
    x = _mm256_min_ps(_mm256_set1_ps(C::high), _mm256_max_ps(_mm256_set1_ps(C::low), x));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(C::log2_e)), 8);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(C::ln2_high), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(C::ln2_low), r);
    __m256 p = _mm256_set1_ps(C::c[0]);
#pragma GCC unroll 5
    for (int i = 1; i < 6; ++i) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(C::c[i]));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
    // 2^n in two factors, of which only the second can leave the normal numbers and round.
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return _mm256_mul_ps(_mm256_mul_ps(p, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
  }

  K3_TARGET_AVX2 static void exponential(const float* x, float* y, size count) {
    for (size i = 0; i < count; i += 8) {
      const __m256i mask = lanes(count - i);
      _mm256_maskstore_ps(y + i, mask, exponential8(_mm256_maskload_ps(x + i, mask)));
    }
  }

  /// As formula/activation.hpp: the sigmoid from e^-|x|, and 0 where it underflows.
  K3_TARGET_AVX2 static void silu(float* y, size count) {
    const __m256 one = _mm256_set1_ps(1), zero = _mm256_setzero_ps();
    for (size i = 0; i < count; i += 8) {
      const __m256i mask = lanes(count - i);
      const __m256 x = _mm256_maskload_ps(y + i, mask);
      const __m256 e = exponential8(_mm256_or_ps(x, _mm256_set1_ps(-0.0f)));
      const __m256 top = _mm256_blendv_ps(one, e, _mm256_cmp_ps(x, zero, _CMP_LT_OQ));
      const __m256 s = _mm256_div_ps(top, _mm256_add_ps(one, e));
      const __m256 product = _mm256_mul_ps(x, s);
      _mm256_maskstore_ps(y + i, mask, _mm256_andnot_ps(_mm256_cmp_ps(s, zero, _CMP_EQ_OQ), product));
    }
  }

  /// Sum of squares in 16 lanes, added 8 apart, 4 apart, 2 apart, neighbours.
  K3_TARGET_AVX2 static float squares(const float* x, size count) {
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (size i = 0; i < count; i += 8) {
      const __m256 value = _mm256_maskload_ps(x + i, lanes(count - i));
      sum[i / 8 % 2] = _mm256_fmadd_ps(value, value, sum[i / 8 % 2]);
    }
    return sum_of(_mm256_add_ps(sum[0], sum[1]));
  }
  K3_TARGET_AVX2 static float sum_of(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  K3_TARGET_AVX2 static void scale(float* x, float factor, size count) {
    for (size i = 0; i < count; i += 8) {
      const __m256i mask = lanes(count - i);
      _mm256_maskstore_ps(x + i, mask, _mm256_mul_ps(_mm256_maskload_ps(x + i, mask), _mm256_set1_ps(factor)));
    }
  }

  template <bool Masked>
  K3_TARGET_AVX2 static __m256 load(const float* from, __m256i mask) {
    if constexpr (Masked)
      return _mm256_maskload_ps(from, mask);
    else
      return _mm256_loadu_ps(from);
  }
  template <bool Masked>
  K3_TARGET_AVX2 static void store(float* to, __m256i mask, __m256 value) {
    if constexpr (Masked)
      _mm256_maskstore_ps(to, mask, value);
    else
      _mm256_storeu_ps(to, value);
  }

  /// Columns [first, first + 8 Registers) of one token; of the last register only the lanes of `mask` exist.
  template <size Registers, bool Masked>
  K3_TARGET_AVX2 static void columns(float* state, const KdaHeadStep<float>& t, size first, __m256i mask,
                                     const float* next) {
    const size n = t.head_dim;
    __m256 sum[Registers];
#pragma GCC unroll 8
    for (size g = 0; g < Registers; ++g) sum[g] = _mm256_setzero_ps();
    for (size k = 0; k < n; ++k) {
      const __m256 decay = _mm256_set1_ps(t.decay[k]), key = _mm256_set1_ps(t.key[k]);
      const float* row = state + k * n + first;
#pragma GCC unroll 8
      for (size g = 0; g < Registers; ++g)
        sum[g] = _mm256_fmadd_ps(_mm256_mul_ps(decay, load<Masked>(row + 8 * g, mask)), key, sum[g]);
    }
    const __m256 beta = _mm256_set1_ps(t.beta);
#pragma GCC unroll 8
    for (size g = 0; g < Registers; ++g) {
      float* value = t.value + first + 8 * g;
      store<Masked>(value, mask, _mm256_mul_ps(beta, _mm256_sub_ps(load<Masked>(value, mask), sum[g])));
      sum[g] = _mm256_setzero_ps();
    }
    for (size k = 0; k < n; ++k) {
      const __m256 decay = _mm256_set1_ps(t.decay[k]), key = _mm256_set1_ps(t.key[k]),
                   query = _mm256_set1_ps(t.query[k]);
      float* row = state + k * n + first;
#pragma GCC unroll 8
      for (size g = 0; g < Registers; ++g) {
        if (g % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(next + k * n + first + 8 * g), _MM_HINT_T1);
        const __m256 old = _mm256_mul_ps(decay, load<Masked>(row + 8 * g, mask));
        const __m256 s = _mm256_fmadd_ps(key, load<Masked>(t.value + first + 8 * g, mask), old);
        store<Masked>(row + 8 * g, mask, s);
        sum[g] = _mm256_fmadd_ps(s, query, sum[g]);
      }
    }
#pragma GCC unroll 8
    for (size g = 0; g < Registers; ++g) store<Masked>(t.out + first + 8 * g, mask, sum[g]);
  }

  /// One token. Two sweeps over the state, of which only the second writes; the decayed state is computed in both.
  /// `next` is the state needed after this one: fetched meanwhile.
  K3_TARGET_AVX2 static void step(float* state, const KdaHeadStep<float>& t, const float* next) {
    const size n = t.head_dim;
    size v = 0;
    for (; v + 64 <= n; v += 64) columns<8, false>(state, t, v, __m256i{}, next);
    for (; v + 32 <= n; v += 32) columns<4, false>(state, t, v, __m256i{}, next);
    for (; v + 8 <= n; v += 8) columns<1, false>(state, t, v, __m256i{}, next);
    if (v < n) columns<1, true>(state, t, v, lanes(n - v), next);
  }
};

}  // namespace k3::detail

#if defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif

#endif
