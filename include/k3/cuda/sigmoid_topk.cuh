// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>
#include <k3/core/overlap.hpp>
#include <k3/cuda/launch.cuh>
#include <k3/kernels/router.cuh>
#include <k3/ops/require_weight.hpp>
#include <k3/ops/row_status.hpp>

namespace k3 {

/// Chooses k experts for every row and weighs them, as the host's `sigmoid_topk` does and in the same order: the k
/// largest sigmoid(logit) + bias, ties to the lower index; weights p / (sum + 1e-20) * scale. Shapes: logits [R, E]
/// float, bias [E] float or bf16, ids and weights [R, k]. `slots` [R], if given: rows with pad_slot are not looked at.
/// A row with a NaN (logit or bias) gets RowStatus::nan_router_logits in `status` [R], if given. Either kind of row has
/// ids 0..k-1 and weights 0; the other rows' bits do not change. `logits_older`: the operation launched before this one
/// neither writes what is given here nor lets others begin before it knows all earlier ones complete, as the linear
/// ones of kernels/linear_stream.cuh do; the choice is then made while it runs. Throws invalid_argument on shapes that
/// do not fit, overlapping memory, k outside 1..E and an infinite scale, before anything is launched. Accuracy: weights
/// <= 1e-6 relative to double. Cost: for k <= 32 and E <= 4096 2 k warp reductions a row, a few microseconds for any R
/// below the number of multiprocessors times eight; otherwise k passes over the logits.
template <device_tensor<2> Logits, writable_device_tensor<2> Ids, writable_device_tensor<2> Weights>
  requires(std::same_as<typename Logits::value_type, float> && std::same_as<typename Ids::value_type, id> &&
           std::same_as<typename Weights::value_type, float>)
void sigmoid_topk(const gpu& exec, const Logits& logits, const AnyVector<MemorySpace::device>& bias, size k,
                  bool renormalize, float scale, const Ids& ids, const Weights& weights,
                  DeviceView<const id, 1> slots = {}, DeviceView<unsigned, 1> status = {}, bool logits_older = false) {
  constexpr const char* operation = "sigmoid_topk";
  const size rows = logits.extent(0), experts = logits.extent(1), limit = size{1} << 31;
  detail::require(experts > 0 && experts < limit, operation, "the number of experts", experts,
                  "between 1 and 2^31 - 1");
  detail::require(rows < limit, operation, "rows", rows, "below 2^31");
  detail::require_shape(operation, "logits", logits, rows, experts);
  detail::require_weight(operation, "bias", bias, experts);
  detail::require(bias.type == ElementType::f32 || bias.type == ElementType::bf16, operation, "bias", "of another type",
                  "F32 or BF16 on the device");
  detail::require(k > 0 && k <= experts, operation, "k", k, "between 1 and the number of experts");
  detail::require(scale - scale == 0.0f, operation, "scale", scale, "finite");
  detail::require_shape(operation, "ids", ids, rows, k);
  detail::require_shape(operation, "weights", weights, rows, k);
  if (slots.data != nullptr) detail::require_shape(operation, "slots", slots, rows);
  detail::require_disjoint(operation, "ids", ids, "logits", logits, "bias", bias, "slots", slots, "weights", weights);
  detail::require_disjoint(operation, "weights", weights, "logits", logits, "bias", bias, "slots", slots);
  if (status.data != nullptr) {
    detail::require_shape(operation, "status", status, rows);
    detail::require_disjoint(operation, "status", status, "logits", logits, "bias", bias, "slots", slots, "ids", ids,
                             "weights", weights);
  }
  if (rows == 0) return;

  kernel::RouterArguments a{};
  a.logits = logits.data, a.logits_stride = logits.strides[0];
  a.bias = {bias.data, bias.type == ElementType::bf16};
  a.rows = static_cast<unsigned>(rows), a.experts = static_cast<unsigned>(experts), a.k = static_cast<unsigned>(k);
  a.divide = renormalize && k > 1, a.scale = scale;
  a.ids = ids.data, a.ids_stride = ids.strides[0];
  a.weights = weights.data, a.weights_stride = weights.strides[0];
  a.slots = slots.data, a.status = status.data;
  a.nan_status = static_cast<unsigned>(RowStatus::nan_router_logits);
  const bool tournament = k <= kernel::router_most_chosen && experts <= kernel::router_most_experts;
  const auto function = !tournament                             ? kernel::sigmoid_topk_any<kernel::router_threads>
                        : experts <= 4 * kernel::router_threads ? kernel::sigmoid_topk_tournament<4>
                                                                : kernel::sigmoid_topk_tournament<16>;
  a.early = logits_older;
  detail::launch(operation, exec.stream, dim3(detail::grid_size(rows, 1)), dim3(kernel::router_threads), 0, function,
                 a);
}

/// As above for a bias whose type is known.
template <device_tensor<2> Logits, device_tensor<1> Bias, writable_device_tensor<2> Ids,
          writable_device_tensor<2> Weights>
void sigmoid_topk(const gpu& exec, const Logits& logits, const Bias& bias, size k, bool renormalize, float scale,
                  const Ids& ids, const Weights& weights, DeviceView<const id, 1> slots = {},
                  DeviceView<unsigned, 1> status = {}) {
  sigmoid_topk(exec, logits, AnyVector<MemorySpace::device>(bias), k, renormalize, scale, ids, weights, slots, status);
}

}  // namespace k3
