// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/buffer.cuh>
#include <k3/cuda/linear.cuh>

namespace k3 {

/// Device scratch memory of a gated MLP for up to `max_rows` rows: one [max_rows, width] activation.
template <precision P>
class DeviceMlpWorkspace {
 public:
  using Activation = typename P::activation;

  DeviceMlpWorkspace() = default;
  DeviceMlpWorkspace(size width, size max_rows)
      : width_(width),
        max_rows_(max_rows),
        values_(detail::checked_product("DeviceMlpWorkspace", "width * max_rows", width, max_rows)) {}

  size width() const { return width_; }
  size max_rows() const { return max_rows_; }
  size bytes() const { return values_.bytes(); }
  /// The activation's output, dense [rows, width].
  DeviceView<Activation, 2> activated(size rows, size width) { return values_.view(rows, width); }

 private:
  detail::OwnedSize width_, max_rows_;
  DeviceBuffer<Activation> values_;
};

namespace detail {

/// All checks of a gated MLP whose result goes to `out`; gives the memory of the activation.
template <precision P, class X, class Out>
DeviceView<typename P::activation, 2> check_dense_mlp(const GluConfig& glu, const X& x,
                                                      const AnyMatrix<MemorySpace::device>& gate_proj,
                                                      const AnyMatrix<MemorySpace::device>& up_proj,
                                                      const AnyMatrix<MemorySpace::device>& down_proj,
                                                      DeviceMlpWorkspace<P>& workspace, const char* name,
                                                      const Out& out) {
  const size rows = x.extent(0), hidden = x.extent(1), width = gate_proj.extent(0);
  require_caps("dense_mlp", glu);
  require_shape("dense_mlp", name, out, rows, out.extent(1));
  require_shape("dense_mlp", "x", x, rows, hidden);
  require_device_weight("dense_mlp", "gate_proj", gate_proj, width, hidden);
  require_device_weight("dense_mlp", "up_proj", up_proj, width, hidden);
  require_device_weight("dense_mlp", "down_proj", down_proj, out.extent(1), width);
  require_rows("dense_mlp", workspace, rows);
  require(width <= workspace.width(), "dense_mlp", "workspace.width", workspace.width(), "at least gate_proj's rows");
  const auto activated = workspace.activated(rows, width);
  require_same_or_disjoint("dense_mlp", name, out, "x", x);
  require_disjoint("dense_mlp", name, out, "gate_proj", gate_proj, "up_proj", up_proj, "down_proj", down_proj,
                   "workspace", activated);
  return activated;
}

}  // namespace detail

/// A gated MLP without bias on the device: out = down_proj . glu(gate_proj . x, up_proj . x), in two launches. The
/// outputs of the linears and of the activation are rounded to the precision's activation type. Shapes: x [R, hidden],
/// gate_proj and up_proj [width, hidden] (of one type), down_proj [n, width], out [R, n]; out may be x. Throws
/// invalid_argument on shapes that do not fit, memory that overlaps in another way, a workspace that is too small and
/// unusable caps, before anything is launched. Accuracy: bf16 within 1e-3 (relative L2) of the
/// host's with the same rounding points (measured 0 at small shapes). Cost: every weight read once for up to 128 rows.
template <precision P, device_tensor<2> X, writable_device_tensor<2> Out>
  requires std::same_as<typename X::value_type, typename P::activation>
void dense_mlp(const gpu& exec, const GluConfig& glu, const X& x, const AnyMatrix<MemorySpace::device>& gate_proj,
               const AnyMatrix<MemorySpace::device>& up_proj, const AnyMatrix<MemorySpace::device>& down_proj,
               DeviceMlpWorkspace<P>& workspace, const Out& out) {
  const auto activated = detail::check_dense_mlp(glu, x, gate_proj, up_proj, down_proj, workspace, "out", out);
  const Projection gated = gated_projection(glu, gate_proj, up_proj, activated), last = projection(down_proj, out);
  detail::run_projections(exec, "dense_mlp", detail::read_only(x), &gated, 1);
  detail::run_projections(exec, "dense_mlp", detail::read_only(activated), &last, 1);
}

/// The gated MLP of a layer, its output added to the residual stream as linear_add does. Shapes: stream [R, n]. Errors
/// as there and above.
template <precision P, device_tensor<2> X, writable_device_tensor<2> Stream>
  requires std::same_as<typename X::value_type, typename P::activation>
void dense_mlp_add(const gpu& exec, const GluConfig& glu, const X& x, const AnyMatrix<MemorySpace::device>& gate_proj,
                   const AnyMatrix<MemorySpace::device>& up_proj, const AnyMatrix<MemorySpace::device>& down_proj,
                   DeviceMlpWorkspace<P>& workspace, const Stream& stream,
                   const LinearAddOptions<typename Stream::value_type>& options = {}) {
  const auto activated = detail::check_dense_mlp(glu, x, gate_proj, up_proj, down_proj, workspace, "stream", stream);
  const kernel::LinearAdd add = detail::linear_addition("dense_mlp", activated, down_proj, stream, options);
  const auto require_apart = [&](const char* name, const auto& written) {
    detail::require_disjoint("dense_mlp", name, written, "x", x, "gate_proj", gate_proj, "up_proj", up_proj);
  };
  require_apart("part", options.part);
  require_apart("snapshot", options.snapshot);
  const Projection gated = gated_projection(glu, gate_proj, up_proj, activated), last = projection(down_proj, stream);
  detail::run_projections(exec, "dense_mlp", detail::read_only(x), &gated, 1);
  detail::run_projections(exec, "dense_mlp", detail::read_only(activated), &last, 1, &add);
}

}  // namespace k3
