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
  size width_ = 0, max_rows_ = 0;
  DeviceBuffer<Activation> values_;
};

namespace detail {

template <precision P, class X>
DeviceView<typename P::activation, 2> gated_half(const gpu& exec, const GluConfig& glu, const X& x,
                                                 const AnyMatrix<MemorySpace::device>& gate_proj,
                                                 const AnyMatrix<MemorySpace::device>& up_proj,
                                                 const AnyMatrix<MemorySpace::device>& down_proj,
                                                 DeviceMlpWorkspace<P>& workspace, size out_columns) {
  const size rows = x.extent(0), hidden = x.extent(1), width = gate_proj.extent(0);
  require_caps("dense_mlp", glu);
  require_shape("dense_mlp", "x", x, rows, hidden);
  require_device_weight("dense_mlp", "gate_proj", gate_proj, width, hidden);
  require_device_weight("dense_mlp", "up_proj", up_proj, width, hidden);
  require_device_weight("dense_mlp", "down_proj", down_proj, out_columns, width);
  require_rows("dense_mlp", workspace, rows);
  require(width <= workspace.width(), "dense_mlp", "workspace.width", workspace.width(), "at least gate_proj's rows");
  const auto activated = workspace.activated(rows, width);
  const Projection one = gated_projection(glu, gate_proj, up_proj, activated);
  run_projections(exec, "dense_mlp", read_only(x), &one, 1);
  return activated;
}

}  // namespace detail

/// A gated MLP without bias on the device: out = down_proj . glu(gate_proj . x, up_proj . x), in two launches. The
/// outputs of the linears and of the activation are rounded to the precision's activation type. Shapes: x [R, hidden],
/// gate_proj and up_proj [width, hidden] (of one type), down_proj [n, width], out [R, n]; out may be x. Throws
/// invalid_argument on shapes that do not fit, a workspace that is too small and unusable caps, before anything is
/// launched. Accuracy: as the host's with the same rounding points. Cost: every weight read once for up to 128 rows.
template <precision P, device_tensor<2> X, writable_device_tensor<2> Out>
  requires std::same_as<typename X::value_type, typename P::activation>
void dense_mlp(const gpu& exec, const GluConfig& glu, const X& x, const AnyMatrix<MemorySpace::device>& gate_proj,
               const AnyMatrix<MemorySpace::device>& up_proj, const AnyMatrix<MemorySpace::device>& down_proj,
               DeviceMlpWorkspace<P>& workspace, const Out& out) {
  detail::require_shape("dense_mlp", "out", out, x.extent(0), out.extent(1));
  linear(exec, detail::gated_half(exec, glu, x, gate_proj, up_proj, down_proj, workspace, out.extent(1)), down_proj,
         out);
}

/// The gated MLP of a layer, its output added to the residual stream as linear_add does. Shapes: stream [R, n]. Errors
/// as there.
template <precision P, device_tensor<2> X, writable_device_tensor<2> Stream>
  requires std::same_as<typename X::value_type, typename P::activation>
void dense_mlp_add(const gpu& exec, const GluConfig& glu, const X& x, const AnyMatrix<MemorySpace::device>& gate_proj,
                   const AnyMatrix<MemorySpace::device>& up_proj, const AnyMatrix<MemorySpace::device>& down_proj,
                   DeviceMlpWorkspace<P>& workspace, const Stream& stream,
                   const LinearAddOptions<typename Stream::value_type>& options = {}) {
  detail::require_shape("dense_mlp", "stream", stream, x.extent(0), stream.extent(1));
  linear_add(exec, detail::gated_half(exec, glu, x, gate_proj, up_proj, down_proj, workspace, stream.extent(1)),
             down_proj, stream, options);
}

}  // namespace k3
