// SPDX-License-Identifier: Apache-2.0
// A matrix to MXFP4 and back, and a product straight from the packed form.
#include <cmath>
#include <cstdio>
#include <vector>

#include <k3/ops/dequantize_mxfp4.hpp>
#include <k3/ops/linear.hpp>
#include <k3/ops/quantize_mxfp4.hpp>

int main() {
  constexpr std::size_t rows = 4, columns = 64;
  std::vector<float> matrix(rows * columns), x(columns);
  for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = 3 * std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < columns; ++i) x[i] = std::cos(static_cast<float>(i));

  // example-begin mxfp4_round_trip
  std::vector<std::uint8_t> packed(rows * columns / 2), scale(rows * columns / 32);
  k3::quantize_mxfp4(k3::host{}, k3::view(matrix, rows, columns), k3::view(packed, rows, columns / 2),
                     k3::view(scale, rows, columns / 32));
  const k3::Mxfp4Matrix<> weight{k3::view(packed, rows, columns / 2), k3::view(scale, rows, columns / 32)};

  std::vector<float> back(rows * columns);
  k3::dequantize_mxfp4(k3::host{}, weight, k3::view(back, rows, columns));

  std::vector<float> from_packed(rows), from_dense(rows);
  k3::linear(k3::host{}, k3::view(x, 1, columns), weight, k3::view(from_packed, 1, rows));
  k3::linear(k3::host{}, k3::view(x, 1, columns), k3::view(back, rows, columns), k3::view(from_dense, 1, rows));
  // example-end mxfp4_round_trip

  std::printf("%zu floats in %zu bytes; scale 2^%d; first values:", matrix.size(), packed.size() + scale.size(),
              scale[0] - 127);
  for (std::size_t i = 0; i < 5; ++i)
    std::printf(" %.3f->%g", static_cast<double>(matrix[i]), static_cast<double>(back[i]));
  std::printf("\n");

  // Quantising what came back gives the same bytes, no error passes the rule's bound, both products agree bit for bit.
  std::vector<std::uint8_t> again(packed.size()), again_scale(scale.size());
  k3::quantize_mxfp4(k3::host{}, k3::view(back, rows, columns), k3::view(again, rows, columns / 2),
                     k3::view(again_scale, rows, columns / 32));
  double worst = 0;  // as a share of the bound
  for (std::size_t group = 0; group < matrix.size(); group += 32) {
    double largest = 0;
    for (std::size_t i = group; i < group + 32; ++i)
      largest = std::fmax(largest, std::abs(static_cast<double>(matrix[i])));
    const double step = std::exp2(std::floor(std::log2(largest)) - 2);  // the scale that the rule asks for
    for (std::size_t i = group; i < group + 32; ++i) {
      const double value = matrix[i], error = std::abs(value - static_cast<double>(back[i]));
      const bool ends = std::abs(value) > 6 * step;  // beyond the largest code
      worst = std::fmax(worst, error / (ends ? std::abs(value) / 4 : std::fmax(std::abs(value) / 5, step / 4)));
    }
  }
  const bool stable = again == packed && again_scale == scale, same = from_packed == from_dense;
  std::printf("error at most %.2f of the bound; stable: %s; product from the packed form: %s\n", worst,
              stable ? "yes" : "NO", same ? "the same bits" : "DIFFERENT");
  return worst <= 1 && stable && same ? 0 : 1;
}
