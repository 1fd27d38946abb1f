// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/types.hpp>

namespace k3 {

/// bfloat16: the upper half of an IEEE float. Reading is exact; writing rounds to nearest, ties to even, keeps
/// infinities, overflows to infinity and keeps NaN a NaN (quiet, sign and upper payload kept).
struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  K3_HOST_DEVICE explicit constexpr bf16(float value) : bits(encode(value)) {}
  K3_HOST_DEVICE explicit constexpr bf16(double value) : bits(encode(round_to_odd(value))) {}

  K3_HOST_DEVICE constexpr operator float() const {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }

  K3_HOST_DEVICE static constexpr bf16 from_bits(std::uint16_t bits) {
    bf16 result;
    result.bits = bits;
    return result;
  }

 private:
  K3_HOST_DEVICE static constexpr std::uint16_t encode(float value) {
    const std::uint32_t u = __builtin_bit_cast(std::uint32_t, value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
    return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }

  // A double goes through float without rounding twice: an inexact conversion sets the float's last bit.
  K3_HOST_DEVICE static constexpr float round_to_odd(double value) {
    const float nearest = static_cast<float>(value);
    const double back = static_cast<double>(nearest);
    std::uint32_t u = __builtin_bit_cast(std::uint32_t, nearest);
    if (back == value || value != value || (u & 0x7fffffffu) == 0) return nearest;
    if ((u & 0x7fffffffu) == 0x7f800000u) return nearest;
    if ((back < 0 ? -back : back) > (value < 0 ? -value : value)) --u;  // truncate, then mark as inexact
    return __builtin_bit_cast(float, u | 1u);
  }
};

static_assert(sizeof(bf16) == 2);

/// The type in which values of type T are multiplied and added: float for everything but double.
template <class T>
struct accumulator {
  using type = float;
};
template <>
struct accumulator<double> {
  using type = double;
};
template <class T>
using accumulator_t = typename accumulator<T>::type;

/// A number in one of the library's storage types.
template <class T>
inline constexpr bool is_real = false;
template <>
inline constexpr bool is_real<float> = true;
template <>
inline constexpr bool is_real<double> = true;
template <>
inline constexpr bool is_real<bf16> = true;

template <class T>
concept real = is_real<T>;

}  // namespace k3
