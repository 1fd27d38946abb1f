// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <k3/model/ablation.hpp>
#include <k3/ops/linear.hpp>

namespace k3 {

/// o_proj of a mixer, out = x W^T. With `ablation.o_proj_tp` 2 it is computed as two ranks would: each sees half of x's
/// columns, the rounded halves are added. Shapes: x [R, width], weight [hidden, width], out [R, hidden].
template <class X, class Out>
void output_projection(const host& exec, const Ablation& ablation, const X& x, const AnyMatrix<>& weight,
                       const Out& out) {
  if (ablation.o_proj_tp == 1) return linear(exec, x, weight, out);
  using T = typename Out::value_type;
  using Acc = accumulator_t<T>;
  const size rows = x.extent(0), width = x.extent(1), hidden = out.extent(1);
  detail::require(width % 2 == 0, "output_projection", "o_proj's columns", width, "an even number");
  std::vector<Acc> sum(rows * hidden, Acc(0));
  // A rank's half of the columns is the whole matrix times x with the other half zero. This path may allocate: it is a
  // test's.
  for (size rank = 0; rank < 2; ++rank) {
    if (ablation.drop_o_proj_rank == rank) continue;
    std::vector<typename X::value_type> masked(rows * width);
    std::vector<T> part(rows * hidden);
    for (size row = 0; row < rows; ++row)
      for (size i = 0; i < width / 2; ++i)
        masked[row * width + rank * (width / 2) + i] = x(row, rank * (width / 2) + i);
    linear(exec, view(masked, rows, width), weight, view(part, rows, hidden));
    for (size i = 0; i < sum.size(); ++i) sum[i] += static_cast<Acc>(part[i]);
  }
  for (size row = 0; row < rows; ++row)
    for (size i = 0; i < hidden; ++i) out(row, i) = static_cast<T>(sum[row * hidden + i]);
}

}  // namespace k3
