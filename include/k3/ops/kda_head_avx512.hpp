// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/kda_head_avx2.hpp>

#if K3_X86_64

#if defined(__CUDACC__)
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif

namespace k3::detail {

/// A head's arithmetic for AVX-512, with the bits of KdaAvx2. The maskz forms with a full mask are the plain
/// instructions; g++ 12 warns of uninitialised values in the others.
struct KdaAvx512 {
  using Acc = float;
  static constexpr __mmask16 all = 0xffff;

  /// The first `count` lanes.
  static __mmask16 lanes(size count) { return static_cast<__mmask16>((1u << smaller(count, size{16})) - 1u); }

  K3_TARGET_AVX512 static __m512 bound16(__m512 x) {
    using C = ExpConstants;
    // The bound comes first: min and max return their second operand, x, where it is NaN.
    x = _mm512_maskz_max_ps(all, _mm512_set1_ps(C::low), x);
    return _mm512_maskz_min_ps(all, _mm512_set1_ps(C::high), x);
  }

  K3_TARGET_AVX512 static __m512 exponential16(__m512 x) {
    using C = ExpConstants;
    x = bound16(x);
    const __m512 n = _mm512_maskz_roundscale_ps(all, _mm512_mul_ps(x, _mm512_set1_ps(C::log2_e)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(C::ln2_high), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(C::ln2_low), r);
    __m512 p = _mm512_set1_ps(C::c[0]);
#pragma GCC unroll 5
    for (int i = 1; i < 6; ++i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(C::c[i]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
    return _mm512_maskz_scalef_ps(all, p, n);
  }

  K3_TARGET_AVX512 static void exponential(const float* x, float* y, size count) {
    for (size i = 0; i < count; i += 16) {
      const __mmask16 mask = lanes(count - i);
      _mm512_mask_storeu_ps(y + i, mask, exponential16(_mm512_maskz_loadu_ps(mask, x + i)));
    }
  }

  /// As formula/activation.hpp: the sigmoid from e^-|x|, and 0 where it underflows.
  K3_TARGET_AVX512 static void silu(float* y, size count) {
    const __m512 one = _mm512_set1_ps(1), zero = _mm512_setzero_ps();
    for (size i = 0; i < count; i += 16) {
      const __mmask16 mask = lanes(count - i);
      const __m512 x = _mm512_maskz_loadu_ps(mask, y + i);
      const __m512 e = exponential16(_mm512_maskz_or_ps(all, x, _mm512_set1_ps(-0.0f)));
      const __m512 top = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), one, e);
      const __m512 s = _mm512_div_ps(top, _mm512_add_ps(one, e));
      const __mmask16 not_zero = _mm512_cmp_ps_mask(s, zero, _CMP_NEQ_UQ);
      _mm512_mask_storeu_ps(y + i, mask, _mm512_maskz_mul_ps(not_zero, x, s));
    }
  }

  /// Sum of squares in 16 lanes, added 8 apart, 4 apart, 2 apart, neighbours.
  K3_TARGET_AVX512 static float squares(const float* x, size count) {
    __m512 sum = _mm512_setzero_ps();
    for (size i = 0; i < count; i += 16) {
      const __m512 value = _mm512_maskz_loadu_ps(lanes(count - i), x + i);
      sum = _mm512_fmadd_ps(value, value, sum);
    }
    return KdaAvx2::sum_of(
        _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, sum, 0), _mm512_maskz_extractf32x8_ps(0xff, sum, 1)));
  }

  K3_TARGET_AVX512 static void scale(float* x, float factor, size count) {
    for (size i = 0; i < count; i += 16) {
      const __mmask16 mask = lanes(count - i);
      _mm512_mask_storeu_ps(x + i, mask, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), _mm512_set1_ps(factor)));
    }
  }

  template <bool Masked>
  K3_TARGET_AVX512 static __m512 load(const float* from, __mmask16 mask) {
    if constexpr (Masked)
      return _mm512_maskz_loadu_ps(mask, from);
    else
      return _mm512_loadu_ps(from);
  }
  template <bool Masked>
  K3_TARGET_AVX512 static void store(float* to, __mmask16 mask, __m512 value) {
    if constexpr (Masked)
      _mm512_mask_storeu_ps(to, mask, value);
    else
      _mm512_storeu_ps(to, value);
  }

  /// Columns [first, first + 16 Registers) of one token; of the last register only the lanes of `mask` exist.
  template <size Registers, bool Masked>
  K3_TARGET_AVX512 static void columns(float* state, const KdaHeadStep<float>& t, size first, __mmask16 mask,
                                       const float* next) {
    const size n = t.head_dim;
    __m512 sum[Registers], delta[Registers];
#pragma GCC unroll 8
    for (size g = 0; g < Registers; ++g) sum[g] = _mm512_setzero_ps();
    for (size k = 0; k < n; ++k) {
      const __m512 decay = _mm512_set1_ps(t.decay[k]), key = _mm512_set1_ps(t.key[k]);
      const float* row = state + k * n + first;
#pragma GCC unroll 8
      for (size g = 0; g < Registers; ++g)
        sum[g] = _mm512_fmadd_ps(_mm512_mul_ps(decay, load<Masked>(row + 16 * g, mask)), key, sum[g]);
    }
#pragma GCC unroll 8
    for (size g = 0; g < Registers; ++g) {
      float* value = t.value + first + 16 * g;
      delta[g] = _mm512_mul_ps(_mm512_set1_ps(t.beta), _mm512_sub_ps(load<Masked>(value, mask), sum[g]));
      store<Masked>(value, mask, delta[g]);
      sum[g] = _mm512_setzero_ps();
    }
    for (size k = 0; k < n; ++k) {
      const __m512 decay = _mm512_set1_ps(t.decay[k]), key = _mm512_set1_ps(t.key[k]),
                   query = _mm512_set1_ps(t.query[k]);
      float* row = state + k * n + first;
#pragma GCC unroll 8
      for (size g = 0; g < Registers; ++g) {
        _mm_prefetch(reinterpret_cast<const char*>(next + k * n + first + 16 * g), _MM_HINT_T1);
        const __m512 s = _mm512_fmadd_ps(key, delta[g], _mm512_mul_ps(decay, load<Masked>(row + 16 * g, mask)));
        store<Masked>(row + 16 * g, mask, s);
        sum[g] = _mm512_fmadd_ps(s, query, sum[g]);
      }
    }
#pragma GCC unroll 8
    for (size g = 0; g < Registers; ++g) store<Masked>(t.out + first + 16 * g, mask, sum[g]);
  }

  /// As KdaAvx2::step.
  K3_TARGET_AVX512 static void step(float* state, const KdaHeadStep<float>& t, const float* next) {
    const size n = t.head_dim;
    size v = 0;
    for (; v + 128 <= n; v += 128) columns<8, false>(state, t, v, all, next);
    for (; v + 64 <= n; v += 64) columns<4, false>(state, t, v, all, next);
    for (; v + 16 <= n; v += 16) columns<1, false>(state, t, v, all, next);
    if (v < n) columns<1, true>(state, t, v, lanes(n - v), next);
  }
};

}  // namespace k3::detail

#if defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif

#endif
