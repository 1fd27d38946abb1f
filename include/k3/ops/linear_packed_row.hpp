// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <k3/ops/linear_avx2.hpp>

#if defined(__CUDACC__)
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif

// One row of x with an MXFP4 weight, for AVX2: byte shuffles look up 32 codes at once, which leaves the weights in an
// order of their own; x is brought into that order once for all rows of the weight. Sums are those of the other
// products, bit by bit: column k is added to sum k % 64, in order, then the same tree.
namespace k3::detail {

#if K3_X86_64

/// Every code under every scale byte, [lower bytes of the 16 codes | upper bytes]: all these products are bf16 numbers.
struct ScaledCodeTable {
  alignas(32) std::uint8_t value[256][32];
  constexpr ScaledCodeTable() : value{} {
    for (unsigned byte = 0; byte < 256; ++byte)
      for (unsigned code = 0; code < 8; ++code) {
        const unsigned bits = magnitude_bits(static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(byte));
        value[byte][code] = value[byte][code + 8] = static_cast<std::uint8_t>(bits & 255u);
        value[byte][code + 16] = static_cast<std::uint8_t>(bits >> 8);
        value[byte][code + 24] = static_cast<std::uint8_t>(bits >> 8 | 128u);
      }
  }

 private:
  static constexpr unsigned magnitude_bits(std::uint8_t code, std::uint8_t byte) {
    if (byte == e8m0_nan) return 0x7fc0u;
    const double product = static_cast<double>(e2m1_value(code)) * static_cast<double>(e8m0_value(byte));
    return product < 0x1p128 ? __builtin_bit_cast(std::uint32_t, static_cast<float>(product)) >> 16 : 0x7f80u;
  }
};
inline constexpr ScaledCodeTable scaled_code_table;

/// Which of 64 columns stands at place `place` of the kernel's order: registers by upper half of a group, parity and
/// every second of its columns; four lanes of the first group, four of the second.
constexpr size packed_column(size place) {
  const size half = place / 32, parity = place / 16 % 2, second = place / 8 % 2, group = place / 4 % 2;
  return 32 * group + 16 * half + 4 * (place % 4) + 2 * second + parity;
}

struct PackedOrder {
  std::uint8_t column[dot_lanes];
  constexpr PackedOrder() : column{} {
    for (size place = 0; place < dot_lanes; ++place) column[place] = static_cast<std::uint8_t>(packed_column(place));
  }
};
inline constexpr PackedOrder packed_order;

/// A row of x in the kernel's order, zeros beyond the last column. In memory that the calling thread keeps.
template <class T>
const float* reordered_row(const T* x, size columns) {
  thread_local std::vector<float> memory;
  const size padded = (columns + dot_lanes - 1) / dot_lanes * dot_lanes;
  if (memory.size() < padded) memory.resize(padded);
  for (size k = 0; k < padded; k += dot_lanes) {
    PaddedTail<const T*> tail;
    const T* const from = columns - k < dot_lanes ? tail.fill(x, k, columns) : x + k;
    for (size place = 0; place < dot_lanes; ++place)
      memory[k + place] = static_cast<float>(from[packed_order.column[place]]);
  }
  return memory.data();
}

K3_TARGET_AVX2 inline __m256i load_halves(const std::uint8_t* first, const std::uint8_t* second) {
  const __m128i low = _mm_load_si128(reinterpret_cast<const __m128i*>(first));
  const __m128i high = _mm_load_si128(reinterpret_cast<const __m128i*>(second));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

/// sum += w . x over 64 columns: 32 bytes of codes and two scale bytes, 64 reordered elements of x.
K3_TARGET_AVX2 inline void add_packed(const std::uint8_t* packed, const std::uint8_t* scale, const float* x,
                                      __m256 (&sum)[8]) {
  const std::uint8_t* const first_table = scaled_code_table.value[scale[0]];
  const std::uint8_t* const second_table = scaled_code_table.value[scale[1]];
  const __m256i lower = load_halves(first_table, second_table);
  const __m256i upper = load_halves(first_table + 16, second_table + 16);
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(packed));
  const __m256i nibble = _mm256_set1_epi8(15), upper_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i code[2] = {_mm256_and_si256(codes, nibble), _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble)};
#pragma GCC unroll 2
  for (size parity = 0; parity < 2; ++parity) {
    const __m256i low = _mm256_shuffle_epi8(lower, code[parity]), high = _mm256_shuffle_epi8(upper, code[parity]);
    const __m256i pairs[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
#pragma GCC unroll 2
    for (size half = 0; half < 2; ++half) {
      const size g = 4 * half + 2 * parity;
      const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs[half], 16));
      const __m256 second = _mm256_castsi256_ps(_mm256_and_si256(pairs[half], upper_half));
      sum[g] = _mm256_fmadd_ps(first, load8(x + 8 * g), sum[g]);
      sum[g + 1] = _mm256_fmadd_ps(second, load8(x + 8 * g + 8), sum[g + 1]);
    }
  }
}

/// Adds columns 32 apart, 16 apart, 8, 4 and 2 apart, neighbours.
K3_TARGET_AVX2 inline float packed_sum(const __m256 (&sum)[8]) {
  __m128 part[4];
#pragma GCC unroll 4
  for (size g = 0; g < 4; ++g) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(sum[g]), _mm256_extractf128_ps(sum[g], 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(sum[g + 4]), _mm256_extractf128_ps(sum[g + 4], 1));
    const __m128 four = _mm_add_ps(a, b), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    part[g] = _mm_add_ss(two, _mm_movehdup_ps(two));
  }
  return _mm_cvtss_f32(_mm_add_ss(_mm_add_ss(part[0], part[1]), _mm_add_ss(part[2], part[3])));
}

/// w . x for one row of the weight and the reordered row of x.
K3_TARGET_AVX2 inline float packed_dot(const Mxfp4Row& w, const float* x, size columns) {
  __m256 sum[8];
#pragma GCC unroll 8
  for (size g = 0; g < 8; ++g) sum[g] = _mm256_setzero_ps();
  const size whole = columns / dot_lanes * dot_lanes;
  for (size k = 0; k < whole; k += dot_lanes) {
    prefetch_weights(w, k + read_ahead<Mxfp4Row>);
    add_packed(w.packed + k / 2, w.scale + k / mxfp4_group, x + k, sum);
  }
  if (whole < columns) {
    PaddedTail<Mxfp4Row> tail;
    const Mxfp4Row padded = tail.fill(w, whole, columns);
    add_packed(padded.packed, padded.scale, x + whole, sum);
  }
  return packed_sum(sum);
}

/// out[0, :] = x W^T for one row of x; `bytes` are the memory traffic.
template <class T, class Out>
void linear_packed_row(const host& exec, const View<const T, 2>& x, const Mxfp4Matrix<>& weight, const Out& out,
                       size bytes) {
  const size columns = x.extents[1];
  const float* const row = reordered_row(x.data, columns);
  parallel_chunks(exec, out.extents[1], tile_rows, bytes, [&](size first, size last) {
    for (size n = first; n < last; ++n)
      out(0, n) = static_cast<typename Out::value_type>(packed_dot(weight_row(weight, n), row, columns));
  });
}

#endif

}  // namespace k3::detail

#if defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif
