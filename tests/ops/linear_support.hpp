// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the tests of matrix products share.

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include <k3/ops/dequantize_mxfp4.hpp>
#include <k3/ops/linear.hpp>

#include "support/catch.hpp"

namespace k3::test {

using sizes = std::initializer_list<size>;

inline std::vector<Isa> vector_isas() {
  std::vector<Isa> result;
  for (const Isa isa : {Isa::avx2, Isa::avx512})
    if (isa <= best_isa()) result.push_back(isa);
  return result;
}
inline std::vector<Isa> all_isas() {
  std::vector<Isa> result = vector_isas();
  result.push_back(Isa::plain);
  return result;
}

template <class T>
std::vector<T> random_values(size count, unsigned seed, bool positive = false) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (T& value : values) {
    const double drawn = normal(engine);
    value = static_cast<T>(positive ? std::fabs(drawn) : drawn);
  }
  return values;
}

/// A random MXFP4 matrix whose scales stay near 1.
struct Mxfp4Data {
  size rows, columns;
  std::vector<std::uint8_t> packed, scale;
  Mxfp4Data(size n, size k, unsigned seed) : rows(n), columns(k), packed(n * k / 2), scale(n * k / 32) {
    std::mt19937 engine(seed);
    for (auto& byte : packed) byte = static_cast<std::uint8_t>(engine());
    for (auto& byte : scale) byte = static_cast<std::uint8_t>(120 + engine() % 12);
  }
  Mxfp4Matrix<> matrix() const {
    return {view(packed.data(), rows, columns / 2), view(scale.data(), rows, columns / 32)};
  }
  double value(size n, size k) const {
    static constexpr double table[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const unsigned byte = packed[(n * columns + k) / 2], code = k % 2 ? byte >> 4 : byte & 15u;
    return (code & 8u ? -1 : 1) * table[code & 7u] * std::ldexp(1.0, scale[(n * columns + k) / 32] - 127);
  }
};

/// Largest |difference| over sum |x||w| and over the largest result, against sums in double of the same inputs.
struct Worst {
  double to_terms = 0, to_largest = 0, got = 0, expected = 0;
  size b = 0, n = 0;
};

template <class X, class W, class Out>
Worst worst_error(const std::vector<X>& x, W weight, const std::vector<Out>& out, size batch, size rows, size columns) {
  Worst worst;
  double largest = 0, difference_max = 0;
  for (size b = 0; b < batch; ++b)
    for (size n = 0; n < rows; ++n) {
      double sum = 0, terms = 0;
      for (size k = 0; k < columns; ++k) {
        const double product = static_cast<double>(x[b * columns + k]) * weight(n, k);
        sum += product;
        terms += std::fabs(product);
      }
      const double got = static_cast<double>(out[b * rows + n]), difference = std::fabs(got - sum);
      largest = (std::max)(largest, std::fabs(sum));
      difference_max = (std::max)(difference_max, difference);
      if (!(difference <= worst.to_terms * terms)) worst = {difference / (terms > 0 ? terms : 1), 0, got, sum, b, n};
    }
  worst.to_largest = largest > 0 ? difference_max / largest : difference_max;
  return worst;
}

inline void check_worst(const Worst& worst, double bound_terms, double bound_largest) {
  INFO("worst element [" << worst.b << ", " << worst.n << "]: " << worst.got << " for " << worst.expected << ", "
                         << worst.to_terms << " of the terms' sum (bound " << bound_terms << "), " << worst.to_largest
                         << " of the largest result (bound " << bound_largest << ")");
  CHECK(worst.to_terms <= bound_terms);
  CHECK(worst.to_largest <= bound_largest);
}

template <class T>
void check_same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  REQUIRE(a.size() == b.size());
  size first = 0;
  while (first < a.size() && std::memcmp(&a[first], &b[first], sizeof(T)) == 0) ++first;
  if (first < a.size())
    FAIL_CHECK("element " << first << ": " << static_cast<double>(a[first]) << " and "
                          << static_cast<double>(b[first]));
}

template <class Out, class X, class Weight>
std::vector<Out> product(const host& exec, const std::vector<X>& x, const Weight& weight, size batch, size rows) {
  std::vector<Out> out(batch * rows, static_cast<Out>(7.0f));
  linear(exec, view(x.data(), batch, x.size() / batch), weight, view(out, batch, rows));
  return out;
}

template <class Out, class X, class Weight>
std::vector<Out> transposed(const host& exec, const std::vector<X>& x, const Weight& weight, size batch, size columns) {
  std::vector<Out> out(batch * columns, static_cast<Out>(7.0f));
  linear_transposed(exec, view(x.data(), batch, x.size() / batch), weight, view(out, batch, columns));
  return out;
}

inline const std::vector<size> odd_columns = {1, 2, 31, 32, 63, 64, 65, 96, 127, 129, 640, 1024 + 33, 4096 + 64 + 7};

}  // namespace k3::test
