// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/view.hpp>

namespace k3 {

/// Columns that share one E8M0 scale byte.
inline constexpr size mxfp4_group = 32;

/// Value of a 4-bit E2M1 code (bit 3 the sign, bits 0-2 one of 0, 0.5, 1, 1.5, 2, 3, 4, 6). Upper bits are ignored.
K3_HOST_DEVICE constexpr float e2m1_value(std::uint8_t code) {
  const std::uint32_t magnitude = code & 7u;
  // 1..7 but 0.5 are normal in E2M1: exponent (code >> 1), one mantissa bit. 0 and 0.5 are its zero and subnormal.
  const std::uint32_t bits = magnitude == 0   ? 0u
                             : magnitude == 1 ? 0x3f000000u
                                              : ((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22;
  return __builtin_bit_cast(float, bits | (code & 8u) << 28);
}

/// The nearest E2M1 code: ties to the even code, saturating at 6; NaN becomes 6 with its sign.
K3_HOST_DEVICE constexpr std::uint8_t e2m1_encode(float value) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const auto sign = static_cast<std::uint8_t>(bits >> 28 & 8u);
  const float a = value < 0 ? -value : value;
  const std::uint8_t magnitude = a <= 0.25f   ? 0
                                 : a < 0.75f  ? 1
                                 : a <= 1.25f ? 2
                                 : a < 1.75f  ? 3
                                 : a <= 2.5f  ? 4
                                 : a < 3.5f   ? 5
                                 : a <= 5.0f  ? 6
                                              : 7;
  return static_cast<std::uint8_t>(sign | magnitude);
}

/// Value of an E8M0 scale byte: 2^(byte - 127). 0 is 2^-127 (a subnormal float), 255 is NaN.
K3_HOST_DEVICE constexpr float e8m0_value(std::uint8_t byte) {
  const std::uint32_t bits = byte == 0     ? 0x00400000u
                             : byte == 255 ? 0x7fc00000u
                                           : static_cast<std::uint32_t>(byte) << 23;
  return __builtin_bit_cast(float, bits);
}

inline constexpr std::uint8_t e8m0_nan = 255;

/// An MXFP4 matrix [rows, columns] as stored: `packed` [rows, columns/2], the lower nibble the lower (even) column, and
/// `scale` [rows, columns/32], one E8M0 byte per 32 columns of a row. Element = e2m1 * 2^(scale - 127).
template <MemorySpace Space = MemorySpace::host>
struct Mxfp4Matrix {
  View<const std::uint8_t, 2, Space> packed;
  View<const std::uint8_t, 2, Space> scale;

  K3_HOST_DEVICE constexpr size rows() const { return packed.extents[0]; }
  K3_HOST_DEVICE constexpr size columns() const { return packed.extents[1] * 2; }
};

namespace detail {

/// Throws invalid_argument unless `matrix` is a well-formed [rows, columns] MXFP4 matrix.
template <MemorySpace Space>
void require_shape(const char* operation, const char* argument, const Mxfp4Matrix<Space>& matrix, size rows,
                   size columns) {
  require(
      columns % mxfp4_group == 0, operation, argument, [&] { return std::to_string(columns) + " columns wide"; },
      "a multiple of 32 columns");
  const std::string name = argument;
  require_shape(operation, (name + ".packed").c_str(), matrix.packed, rows, columns / 2);
  require_shape(operation, (name + ".scale").c_str(), matrix.scale, rows, columns / mxfp4_group);
}

}  // namespace detail
}  // namespace k3
