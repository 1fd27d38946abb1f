// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include <k3/io/checkpoint_layout.hpp>
#include <k3/ops/quantize_mxfp4.hpp>

namespace k3::detail {

/// A well-mixed 64-bit number for a counter.
inline std::uint64_t mixed_counter(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

/// How a tensor's values are spread: centre + spread * n, n of mean 0 and deviation 1.
struct RandomSpread {
  float centre = 0, spread = 1;
};

inline RandomSpread random_spread(const PlannedTensor& tensor) {
  const std::string& name = tensor.name;
  const float fan_in = static_cast<float>(tensor.shape.back());
  if (name.ends_with("A_log")) return {1.4f, 0.6f};
  if (name.ends_with("dt_bias")) return {0, 0.5f};
  if (name.ends_with("e_score_correction_bias")) return {0, 0.01f};
  if (name.find("norm") != name.npos) return {1, 0.1f};
  if (name.ends_with("embed_tokens.weight")) return {0, 1};
  return {0, 1 / std::sqrt(fan_in)};
}

/// The random bytes of one tensor, any part of it at a time: a function of seed, name and position alone, the same on
/// every machine.
class RandomTensor {
 public:
  RandomTensor(const PlannedTensor& tensor, const K3Config& config, std::uint64_t seed)
      : tensor_(tensor), spread_(random_spread(tensor)), key_(seed) {
    // An MXFP4 pair is one matrix: both tensors draw the same numbers.
    packed_ = tensor.name.ends_with("weight_packed");
    scale_ = tensor.name.ends_with("weight_scale");
    const size stem = tensor.name.rfind('.');
    for (const char c : packed_ || scale_ ? tensor.name.substr(0, stem) : tensor.name)
      key_ = mixed_counter(key_ ^ static_cast<unsigned char>(c));
    live_ = tensor.name.ends_with("A_log") ? config.kda.heads : ~size{0};
  }

  /// Bytes [begin, begin + count) of the tensor; `begin` is a multiple of `step`, and so is `count` unless they end
  /// there.
  void fill(std::uint64_t begin, std::byte* out, size count) const {
    if (packed_ || scale_)
      fill_mxfp4(begin, out, count);
    else if (tensor_.dtype == DType::f32)
      fill_numbers<float>(begin / 4, out, count / 4);
    else
      fill_numbers<bf16>(begin / 2, out, count / 2);
  }

  /// What `fill` counts in, in bytes: a row of MXFP4, otherwise 16.
  size step() const { return packed_ || scale_ ? tensor_.shape[1] : 16; }

 private:
  /// Larger matrices get random codes at once; quantising would take longer than writing.
  static constexpr size most_quantized = size{1} << 20;

  // The sum of two bytes has mean 255 and deviation 104.5; a counter gives four of them.
  static float unit(std::uint64_t sum) { return static_cast<float>(static_cast<int>(sum) - 255) * (1.0f / 104.5f); }
  static std::uint64_t sums(std::uint64_t bits) {
    constexpr std::uint64_t low = 0x00ff00ff00ff00ffull;
    return (bits & low) + (bits >> 8 & low);  // each in 16 bits of its own
  }

  template <class T>
  void fill_numbers(std::uint64_t first, std::byte* out, size count) const {
    T values[511];  // of every sum
    for (size i = 0; i < 511; ++i) values[i] = T(spread_.centre + spread_.spread * unit(i));
    for (size i = 0; i < count; i += 4) {
      const std::uint64_t four_sums = sums(mixed_counter(key_ ^ ((first + i) >> 2)));
      T four[4];
      for (size j = 0; j < 4; ++j) four[j] = values[four_sums >> 16 * j & 0xffff];
      if (first + i + 4 > live_)
        for (size j = 0; j < 4; ++j)
          if (first + i + j >= live_) four[j] = T(0.0f);
      __builtin_memcpy(out + i * sizeof(T), four, smaller<size>(4, count - i) * sizeof(T));
    }
  }

  void fill_mxfp4(std::uint64_t begin, std::byte* out, size count) const {
    const size row_bytes = tensor_.shape[1], columns = row_bytes * (packed_ ? 2 : mxfp4_group);
    if (tensor_.shape[0] * columns > most_quantized) return fill_codes(begin, out, count, columns);
    std::vector<float> row(columns);
    std::vector<std::uint8_t> codes(columns / 2), scales(columns / mxfp4_group);
    const float spread = 1 / std::sqrt(static_cast<float>(columns));
    for (size at = 0; at < count; at += row_bytes) {
      const std::uint64_t first = (begin + at) / row_bytes * columns;
      for (size i = 0; i < columns; ++i)  // a row has a multiple of 32
        row[i] = spread * unit(sums(mixed_counter(key_ ^ ((first + i) >> 2))) >> 16 * (i & 3) & 0xffff);
      quantize_mxfp4_row(row.data(), codes.data(), scales.data(), columns);
      __builtin_memcpy(out + at, packed_ ? codes.data() : scales.data(), row_bytes);
    }
  }
  // Codes of equal probability have a deviation of 2.93, with these scales of 3.66; what is wanted is 1 /
  // sqrt(columns).
  void fill_codes(std::uint64_t begin, std::byte* out, size count, size columns) const {
    const int scale = 127 - static_cast<int>(std::lround(std::log2(3.66 * std::sqrt(static_cast<double>(columns)))));
    constexpr std::uint64_t ones = 0x0101010101010101ull;
    for (size i = 0; i < count; i += 8) {
      std::uint64_t bits = mixed_counter(key_ ^ ((begin + i) >> 3));
      if (scale_) {
        // Of each byte's last two bits: 0 and 1 leave the scale, 2 is one more and 3 one less.
        const std::uint64_t high = bits >> 1 & ones, both = bits & high;
        bits = ones * static_cast<std::uint64_t>(scale) + high - 2 * both;
      }
      __builtin_memcpy(out + i, &bits, smaller<size>(8, count - i));
    }
  }

  const PlannedTensor& tensor_;
  RandomSpread spread_;
  std::uint64_t key_;
  bool packed_ = false, scale_ = false;
  size live_ = 0;
};

}  // namespace k3::detail
