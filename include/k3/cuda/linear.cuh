// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/projections.cuh>

namespace k3 {

/// out = x W^T, the product of every linear layer, on the device.
/// Shapes: x [R, K] of bf16 or float, weight [N, K] of F32 or BF16, out [R, N] of bf16 or float; rows of x and out may
/// lie apart. R, N or K may be 0. Adds in float; out is rounded once. A row of out does not depend on R or on the other
/// rows. bf16 x and weights go through tensor cores, everything else through float arithmetic. Throws invalid_argument
/// on shapes that do not fit, other weight types, out sharing memory with x or the weight. Accuracy: as the host's
/// float product with the same rounding points (bounds in tests/cuda/test_linear.cpp). Cost: the weight is read once
/// for up to 128 rows.
template <device_tensor<2> X, writable_device_tensor<2> Out>
void linear(const gpu& exec, const X& x, const AnyMatrix<MemorySpace::device>& weight, const Out& out) {
  const Projection one = projection(weight, out);
  detail::run_projections(exec, "linear", detail::read_only(x), &one, 1);
}

/// What linear_add may bring along; views that are wanted, all [R, N].
template <class T>
struct LinearAddOptions {
  bool replace = false;            ///< stream = part: the stream was empty
  DeviceView<const T, 2> other{};  ///< part = round(part + other): the shared experts beside the routed ones
  DeviceView<T, 2> part{};         ///< receives what is added to the stream
  DeviceView<T, 2> snapshot{};     ///< receives the stream as it was before
};

namespace detail {

/// Checks what linear_add may bring along and gives it as kernels take it.
template <class T, class X>
kernel::LinearAdd linear_addition(const char* operation, const X& x, const AnyMatrix<MemorySpace::device>& weight,
                                  const DeviceView<T, 2>& stream, const LinearAddOptions<T>& options) {
  kernel::LinearAdd add;
  add.replace = options.replace;
  const auto take = [&](const char* argument, const auto& view, kernel::LinearRows& to) {
    if (view.data == nullptr) return;
    require_shape(operation, argument, view, stream.extents[0], stream.extents[1]);
    to = {const_cast<T*>(view.data), view.strides[0]};
  };
  take("other", options.other, add.other);
  take("part", options.part, add.part);
  take("snapshot", options.snapshot, add.snapshot);
  require_disjoint(operation, "stream", stream, "x", x, "weight", weight, "other", options.other);
  require_disjoint(operation, "part", options.part, "x", x, "weight", weight, "other", options.other, "stream", stream,
                   "snapshot", options.snapshot);
  require_disjoint(operation, "snapshot", options.snapshot, "x", x, "weight", weight, "other", options.other, "stream",
                   stream);
  return add;
}

}  // namespace detail

/// The linear layer at the end of a sublayer, added to the residual stream: part = round(x W^T), part = round(part +
/// other) where there is an `other`, stream = round(stream + part) or, with `replace`, part. Shapes: x [R, K], weight
/// [N, K], stream [R, N] in the activation type. The bits are those of `linear` and separate additions. Throws
/// invalid_argument on shapes that do not fit and where what is written shares memory with anything else, before
/// anything is launched.
template <device_tensor<2> X, writable_device_tensor<2> Stream>
void linear_add(const gpu& exec, const X& x, const AnyMatrix<MemorySpace::device>& weight, const Stream& stream,
                const LinearAddOptions<typename Stream::value_type>& options = {}) {
  const kernel::LinearAdd add = detail::linear_addition("linear_add", x, weight, stream, options);
  const Projection one = projection(weight, stream);
  detail::run_projections(exec, "linear_add", detail::read_only(x), &one, 1, &add);
}

}  // namespace k3
