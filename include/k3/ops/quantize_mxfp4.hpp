// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include <k3/core/bf16.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/mxfp4.hpp>
#include <k3/core/overlap.hpp>

namespace k3 {
namespace detail {

/// The scale byte of a group whose largest magnitude is `largest`: floor(log2(largest)) - 2 + 127, within 0..254.
inline std::uint8_t mxfp4_scale_byte(double largest) {
  if (largest == 0) return 0;
  const int exponent = std::ilogb(largest) - 2 + 127;
  return static_cast<std::uint8_t>(smaller(larger(exponent, 0), 254));
}

/// The nearest code of a double. All limits between codes are floats, so a value that is none only needs its side of
/// one: it goes to float towards zero and is marked as inexact.
inline std::uint8_t e2m1_encode_double(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (back == value) return e2m1_encode(nearest);
  std::uint32_t bits = __builtin_bit_cast(std::uint32_t, nearest);
  if (std::fabs(back) > std::fabs(value)) --bits;
  return e2m1_encode(__builtin_bit_cast(float, bits | 1u));
}

template <class T>
void quantize_mxfp4_row(const T* x, std::uint8_t* packed, std::uint8_t* scale, size columns) {
  for (size group = 0; group < columns / mxfp4_group; ++group) {
    const T* from = x + group * mxfp4_group;
    double largest = 0;
    for (size i = 0; i < mxfp4_group; ++i) largest = larger(largest, std::fabs(static_cast<double>(from[i])));
    const std::uint8_t byte = mxfp4_scale_byte(largest);
    const double inverse = std::ldexp(1.0, 127 - byte);
    scale[group] = byte;
    for (size i = 0; i < mxfp4_group; i += 2) {
      const std::uint8_t low = e2m1_encode_double(static_cast<double>(from[i]) * inverse);
      const std::uint8_t high = e2m1_encode_double(static_cast<double>(from[i + 1]) * inverse);
      packed[(group * mxfp4_group + i) / 2] = static_cast<std::uint8_t>(low | high << 4);
    }
  }
}

}  // namespace detail

/// Stores a matrix as MXFP4 by the rule of the OCP microscaling specification.
/// Per 32 columns of a row: scale byte s = floor(log2(max |x|)) - 2 + 127, within 0..254; code = nearest E2M1 of
/// x / 2^(s - 127), ties to the even code, 6 at most. A group of zeros gets s = 0, as does any group below 2^-124.
/// Shapes: x [N, K], packed [N, K/2], scale [N, K/32]; K a multiple of 32. Source: `*_packed`, `*_scale` tensors.
/// Accuracy: |error| <= max(|x| / 5, 2^(s - 127) / 4) up to |x| = 6 * 2^(s - 127); < |x| / 4 above, where codes end.
/// Throws invalid_argument, before anything is written, on other shapes, overlapping memory and where x is NaN or
/// infinite.
template <host_tensor<2> X, writable_host_tensor<2> Packed, writable_host_tensor<2> Scale>
  requires(real<typename X::value_type> && std::same_as<typename Packed::value_type, std::uint8_t> &&
           std::same_as<typename Scale::value_type, std::uint8_t>)
void quantize_mxfp4(const host& exec, const X& x, const Packed& packed, const Scale& scale) {
  const size rows = x.extents[0], columns = x.extents[1];
  detail::require_shape("quantize_mxfp4", "x", x, rows, columns);
  detail::require_shape("quantize_mxfp4", "the result", Mxfp4Matrix<>{packed, scale}, rows, columns);
  detail::require_disjoint("quantize_mxfp4", "packed", packed, "x", x, "scale", scale);
  detail::require_disjoint("quantize_mxfp4", "scale", scale, "x", x);
  for (size row = 0; row < rows; ++row)
    for (size column = 0; column < columns; ++column) {
      const auto value = static_cast<double>(x(row, column));
      if (!std::isfinite(value))
        throw invalid_argument("quantize_mxfp4", "x[" + std::to_string(row) + ", " + std::to_string(column) + "]",
                               std::to_string(value), "a finite value");
    }
  detail::parallel_chunks(exec, rows, 1, rows * columns * sizeof(x.data[0]), [&](size first, size last) {
    for (size row = first; row < last; ++row)
      detail::quantize_mxfp4_row(&x(row, 0), &packed(row, 0), &scale(row, 0), columns);
  });
}

}  // namespace k3
