// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/bf16.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/mxfp4.hpp>
#include <k3/core/overlap.hpp>

namespace k3 {

/// out = the values of an MXFP4 matrix: e2m1(code) * 2^(scale - 127), multiplied in float.
/// Exact in float, double and bf16, except that 2^128 and above is infinity; scale byte 0 gives subnormals, not zeros,
/// and byte 255 gives NaN.
/// Shapes: weight.packed [N, K/2], weight.scale [N, K/32], out [N, K]; K a multiple of 32.
/// Throws invalid_argument on other shapes and overlapping memory. Source: `*_packed`, `*_scale` of a checkpoint.
template <writable_host_tensor<2> Out>
  requires real<typename Out::value_type>
void dequantize_mxfp4(const host& exec, const Mxfp4Matrix<>& weight, const Out& out) {
  const size rows = out.extents[0], columns = out.extents[1];
  detail::require_shape("dequantize_mxfp4", "out", out, rows, columns);
  detail::require_shape("dequantize_mxfp4", "weight", weight, rows, columns);
  detail::require_disjoint("dequantize_mxfp4", "out", out, "weight", weight);
  detail::parallel_chunks(exec, rows, 1, rows * columns * sizeof(out.data[0]), [&](size first, size last) {
    for (size row = first; row < last; ++row)
      for (size k = 0; k < columns; k += 2) {
        using T = typename Out::value_type;
        const std::uint8_t byte = weight.packed(row, k / 2);
        const float scale = e8m0_value(weight.scale(row, k / mxfp4_group));
        out(row, k) = static_cast<T>(e2m1_value(byte) * scale);
        out(row, k + 1) = static_cast<T>(e2m1_value(static_cast<std::uint8_t>(byte >> 4)) * scale);
      }
  });
}

}  // namespace k3
