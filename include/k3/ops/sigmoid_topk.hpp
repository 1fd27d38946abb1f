// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/formula/router.hpp>
#include <k3/ops/require_weight.hpp>
#include <k3/ops/row_status.hpp>

namespace k3 {

namespace detail {

/// What a row that is not routed holds: experts 0..k-1 with no weight.
template <class Acc>
void fill_unrouted(id* ids, Acc* weights, size k) {
  for (size j = 0; j < k; ++j) {
    ids[j] = static_cast<id>(j);
    weights[j] = Acc(0);
  }
}

/// Routes one row; false where a logit is NaN. The output row is the list of the best so far, with scores in `weights`.
template <class Acc, class Bias>
bool route_row(const Acc* logits, const Bias* bias, size experts, size k, bool divide, Acc scale, id* ids,
               Acc* weights) {
  size count = 0;
  for (size e = 0; e < experts; ++e) {
    if (logits[e] != logits[e]) return false;
    const Acc score = selection_score(logits[e], static_cast<Acc>(bias[e]));
    const id expert = static_cast<id>(e);
    if (count == k && !ranks_before(score, expert, weights[k - 1], ids[k - 1])) continue;
    size at = count < k ? count++ : k - 1;
    for (; at > 0 && ranks_before(score, expert, weights[at - 1], ids[at - 1]); --at) {
      weights[at] = weights[at - 1];
      ids[at] = ids[at - 1];
    }
    weights[at] = score;
    ids[at] = expert;
  }
  Acc sum(0);
  for (size j = 0; j < k; ++j) {
    weights[j] = sigmoid(logits[ids[j]]);
    sum += weights[j];
  }
  for (size j = 0; j < k; ++j) weights[j] = routing_weight(weights[j], sum, divide, scale);
  return true;
}

/// sigmoid_topk without its checks and without its exception: where `status` has memory, a row with NaN logits is
/// marked there (others are left as they are).
template <class Logits, class Bias, class Ids, class Weights>
void route_rows(const host& exec, const Logits& logits, const Bias& bias, size k, bool renormalize,
                typename Logits::value_type scale, const Ids& ids, const Weights& weights,
                HostView<RowStatus, 1> status) {
  const size rows = logits.extent(0), experts = logits.extent(1);
  with_typed(bias, [&](const auto& b) {
    parallel_chunks(exec, rows, 1, rows * experts * 32, [&](size first, size last) {
      for (size row = first; row < last; ++row) {
        if (route_row(&logits(row, 0), b.data, experts, k, renormalize && k > 1, scale, &ids(row, 0), &weights(row, 0)))
          continue;
        fill_unrouted(&ids(row, 0), &weights(row, 0), k);
        if (status.data) status(row) = RowStatus::nan_router_logits;
      }
    });
  });
}

/// Throws invalid_argument where a selection bias is NaN.
template <class Bias>
void require_no_nan_bias(const char* operation, const char* argument, const Bias& bias) {
  with_typed(bias, [&](const auto& b) {
    for (size e = 0; e < b.extent(0); ++e)
      if (b(e) != b(e))
        throw invalid_argument(operation, std::string(argument) + "[" + std::to_string(e) + "]", "NaN", "a number");
  });
}

[[noreturn]] inline void throw_nan_row(const char* operation, const char* argument, size row) {
  throw invalid_argument(operation, std::string(argument) + " of row " + std::to_string(row), "NaN", "numbers");
}

}  // namespace detail

/// Chooses k experts for every row and weighs them. p = sigmoid(logit); chosen are the k largest p + bias (ties to the
/// lower index), `ids` in descending order of that score; weights = p / (sum of the chosen p + 1e-20), undivided where
/// `renormalize` is off or k is 1, times `scale`.
/// Shapes: logits [R, E] (float or double, unrounded), bias [E], ids [R, k], weights [R, k].
/// Throws invalid_argument on shapes that do not fit, overlapping memory, k outside 1..E, a NaN bias or an infinite
/// scale, before anything is written; on NaN logits after all rows are done, naming the first such row, which has ids
/// 0..k-1 and weights 0. Accuracy: weights <= 1e-6 relative to double for float and k <= 64, where both choose the same
/// experts. Cost: E sigmoids and about E + k^2 comparisons a row. Source: `block_sparse_moe.gate`.
template <host_tensor<2> Logits, class Bias, writable_host_tensor<2> Ids, writable_host_tensor<2> Weights>
  requires(std::same_as<typename Logits::value_type, accumulator_t<typename Logits::value_type>> &&
           std::same_as<typename Weights::value_type, typename Logits::value_type> &&
           std::same_as<typename Ids::value_type, id>)
void sigmoid_topk(const host& exec, const Logits& logits, const Bias& bias, size k, bool renormalize, float scale,
                  const Ids& ids, const Weights& weights) {
  const size rows = logits.extent(0), experts = logits.extent(1);
  detail::require(experts > 0 && experts < (size{1} << 31), "sigmoid_topk", "the number of experts", experts,
                  "between 1 and 2^31 - 1");
  detail::require_shape("sigmoid_topk", "logits", logits, rows, experts);
  detail::require_weight("sigmoid_topk", "bias", bias, experts);
  detail::require(k > 0 && k <= experts, "sigmoid_topk", "k", k, "between 1 and the number of experts");
  detail::require(scale - scale == 0.0f, "sigmoid_topk", "scale", scale, "finite");
  detail::require_shape("sigmoid_topk", "ids", ids, rows, k);
  detail::require_shape("sigmoid_topk", "weights", weights, rows, k);
  detail::require_disjoint("sigmoid_topk", "ids", ids, "logits", logits, "bias", bias, "weights", weights);
  detail::require_disjoint("sigmoid_topk", "weights", weights, "logits", logits, "bias", bias);
  detail::require_no_nan_bias("sigmoid_topk", "bias", bias);
  detail::route_rows(exec, logits, bias, k, renormalize, static_cast<typename Logits::value_type>(scale), ids, weights,
                     {});
  for (size row = 0; row < rows; ++row)
    for (size e = 0; e < experts; ++e)
      if (logits(row, e) != logits(row, e)) detail::throw_nan_row("sigmoid_topk", "logits", row);
}

}  // namespace k3
