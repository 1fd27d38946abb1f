// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <k3/core/precision.hpp>
#include <k3/ops/linear.hpp>
#include <k3/ops/require_weight.hpp>
#include <k3/ops/situ_glu.hpp>

namespace k3 {

/// The matrices of a gated MLP, [width, hidden] twice and [hidden, width].
/// Source: `mlp.*` of a dense layer, `block_sparse_moe.shared_experts.*`.
template <MemorySpace Space>
struct BasicMlpWeights {
  AnyMatrix<Space> gate_proj, up_proj, down_proj;

  /// Whether any of the three is there.
  explicit operator bool() const { return gate_proj || up_proj || down_proj; }
};
using MlpWeights = BasicMlpWeights<MemorySpace::host>;

/// Scratch memory of a gated MLP for up to `max_rows` rows: two [max_rows, width] activations.
template <precision P>
class MlpWorkspace {
 public:
  MlpWorkspace() = default;
  MlpWorkspace(size width, size max_rows)
      : width_(width),
        max_rows_(max_rows),
        values_(detail::checked_length<typename P::activation>(
            "MlpWorkspace", detail::checked_product("MlpWorkspace", "width", 2, width), max_rows)) {}

  size width() const { return width_; }
  size max_rows() const { return max_rows_; }
  size bytes() const { return values_.size() * sizeof(typename P::activation); }

  /// Dense [rows, width] views of the two halves.
  auto gate(size rows, size width) { return view(values_.data(), rows, width); }
  auto up(size rows, size width) { return view(values_.data() + width_ * max_rows_, rows, width); }

 private:
  detail::OwnedSize width_, max_rows_;
  std::vector<typename P::activation> values_;
};

namespace detail {

template <class P>
void require_rows(const char* operation, const P& workspace, size rows) {
  require(rows <= workspace.max_rows(), operation, "workspace.max_rows", workspace.max_rows(),
          [&] { return "at least " + std::to_string(rows) + " rows"; });
}

}  // namespace detail

/// A gated MLP without bias: out = down_proj . glu(gate_proj . x, up_proj . x), `glu` SiTU or SiLU. The outputs of the
/// linears and of the activation are rounded to the precision's activation type.
/// Shapes: x [R, hidden], gate_proj and up_proj [width, hidden], down_proj [n, width], out [R, n]; out may be x.
/// Throws invalid_argument on shapes that do not fit, memory that overlaps in another way, a workspace that is too
/// small and unusable caps, before anything is written. Accuracy: <= 6e-7 of the largest element relative to double for
/// float. Cost: 6 * R * hidden * width FLOPs, every weight read once for up to 32 rows.
template <precision P, host_tensor<2> X, linear_weight Gate, linear_weight Up, linear_weight Down,
          writable_host_tensor<2> Out>
  requires std::same_as<typename X::value_type, typename P::activation>
void dense_mlp(const host& exec, const GluConfig& glu, const X& x, const Gate& gate_proj, const Up& up_proj,
               const Down& down_proj, MlpWorkspace<P>& workspace, const Out& out) {
  const size rows = x.extent(0), hidden = x.extent(1), width = detail::weight_rows(gate_proj);
  detail::require_caps("dense_mlp", glu);
  detail::require_shape("dense_mlp", "x", x, rows, hidden);
  detail::require_weight("dense_mlp", "gate_proj", gate_proj, width, hidden);
  detail::require_weight("dense_mlp", "up_proj", up_proj, width, hidden);
  detail::require_weight("dense_mlp", "down_proj", down_proj, out.extent(1), width);
  detail::require_rows("dense_mlp", workspace, rows);
  detail::require(width <= workspace.width(), "dense_mlp", "workspace.width", workspace.width(),
                  "at least gate_proj's rows");
  detail::require_shape("dense_mlp", "out", out, rows, out.extent(1));
  detail::require_same_or_disjoint("dense_mlp", "out", out, "x", x);
  detail::require_disjoint("dense_mlp", "out", out, "gate_proj", gate_proj, "up_proj", up_proj, "down_proj", down_proj);
  const auto gate = workspace.gate(rows, width), up = workspace.up(rows, width);
  linear(exec, x, gate_proj, gate);
  linear(exec, x, up_proj, up);
  situ_glu_vec(exec, glu, gate, up, gate);
  linear(exec, gate, down_proj, out);
}

}  // namespace k3
