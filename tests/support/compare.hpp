// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.hpp"

namespace k3::test {

/// The worst element of a comparison and whether all stay within the bound; NaN agrees with NaN only.
struct Comparison {
  bool within = true;
  double worst = 0;
  std::string text;
};

/// |got - want| <= absolute + relative * scale(i), with scale(i) = |want[i]| or, `of_largest`, the largest |want|.
template <class Got, class Want>
Comparison compare(const Got& got, const Want& want, double relative, double absolute = 0, bool of_largest = false) {
  Comparison result;
  std::ostringstream text;
  text.precision(9);
  if (got.size() != want.size()) {
    text << "got " << got.size() << " elements, want " << want.size();
    return {false, std::numeric_limits<double>::infinity(), text.str()};
  }
  double largest = 0;
  for (std::size_t i = 0; i < want.size(); ++i)
    if (std::isfinite(static_cast<double>(want[i])))
      largest = std::max(largest, std::abs(static_cast<double>(want[i])));
  std::size_t at = 0;
  double worst_ratio = -1;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double g = static_cast<double>(got[i]), w = static_cast<double>(want[i]);
    if (g == w || (std::isnan(g) && std::isnan(w))) continue;
    const double scale = of_largest ? largest : std::abs(w);
    const double bound = absolute + relative * scale;
    double difference = std::abs(g - w);
    if (!std::isfinite(difference)) difference = std::numeric_limits<double>::infinity();
    const double ratio = bound > 0 ? difference / bound : std::numeric_limits<double>::infinity();
    if (!(difference <= bound)) result.within = false;
    if (ratio > worst_ratio) {
      worst_ratio = ratio;
      at = i;
      result.worst = scale > 0 ? difference / scale : difference;
    }
  }
  if (worst_ratio < 0)
    text << "all " << want.size() << " elements equal";
  else
    text << "worst of " << want.size() << " elements is [" << at << "]: got " << static_cast<double>(got[at])
         << ", want " << static_cast<double>(want[at]) << ", relative " << result.worst
         << (of_largest ? " of the largest" : "") << ", bound " << relative << " relative + " << absolute
         << " absolute";
  result.text = text.str();
  return result;
}

/// Equality of bits, element by element (so -0 is not 0 and NaN payloads count).
template <class Got, class Want>
Comparison same_bits(const Got& got, const Want& want) {
  using T = std::decay_t<decltype(got[0])>;
  std::ostringstream text;
  if (got.size() != want.size()) return {false, 1, "different lengths"};
  for (std::size_t i = 0; i < got.size(); ++i) {
    unsigned char a[sizeof(T)], b[sizeof(T)];
    const T x = got[i], y = want[i];
    __builtin_memcpy(a, &x, sizeof(T));
    __builtin_memcpy(b, &y, sizeof(T));
    if (__builtin_memcmp(a, b, sizeof(T)) != 0) {
      text.precision(17);
      text << "first difference of " << got.size() << " elements at [" << i << "]: got " << static_cast<double>(x)
           << ", want " << static_cast<double>(y);
      return {false, 1, text.str()};
    }
  }
  return {true, 0, "all bits equal"};
}

/// Deterministic normal numbers: the same on every platform's mt19937 (Box-Muller on its own bits).
inline std::vector<double> random_normal(std::size_t count, std::uint32_t seed, double scale = 1.0) {
  std::mt19937 bits(seed);
  const auto uniform = [&] { return (static_cast<double>(bits()) + 0.5) / 4294967296.0; };
  std::vector<double> values(count);
  for (double& value : values)
    value = scale * std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform());
  return values;
}

/// A vector in another element type, each element rounded once.
template <class To, class From>
std::vector<To> converted(const From& values) {
  std::vector<To> result;
  result.reserve(values.size());
  for (const auto& value : values) {
    if constexpr (std::is_arithmetic_v<To>)
      result.push_back(static_cast<To>(static_cast<double>(value)));
    else
      result.push_back(To(static_cast<double>(value)));
  }
  return result;
}

/// Fails the test with the comparison's text where it is not within its bound.
inline void check(const Comparison& comparison) {
  INFO(comparison.text);
  CHECK(comparison.within);
}

}  // namespace k3::test
