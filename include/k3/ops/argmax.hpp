// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <k3/core/bf16.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/ops/row_status.hpp>

namespace k3 {

namespace detail {

/// The index of the largest of `count` values, the lowest where several are; -1 where one of them is NaN.
template <class T>
id argmax_row(const T* values, size count) {
  using Acc = accumulator_t<T>;
  bool any_nan = false;
  size at = 0;
  Acc best = static_cast<Acc>(values[0]);
  for (size i = 0; i < count; ++i) {
    const Acc value = static_cast<Acc>(values[i]);
    any_nan = any_nan || value != value;
    if (value > best) {
      best = value;
      at = i;
    }
  }
  return any_nan ? id{-1} : static_cast<id>(at);
}

/// argmax without its checks and without its exception: a row with NaN gets id -1 and, where `status` has memory, is
/// marked there (others are left as they are).
template <class Logits, class Ids>
void argmax_rows(const host& exec, const Logits& logits, const Ids& ids, HostView<RowStatus, 1> status) {
  const size rows = logits.extent(0), count = logits.extent(1);
  parallel_chunks(exec, rows, 1, rows * count * sizeof(typename Logits::value_type), [&](size first, size last) {
    for (size row = first; row < last; ++row) {
      ids(row) = argmax_row(&logits(row, 0), count);
      if (ids(row) < 0 && status.data) status(row) = RowStatus::nan_logits;
    }
  });
}

}  // namespace detail

/// Greedy choice: ids[r] = index of the largest logit of row r, ties to the lower index.
/// Shapes: logits [R, V], ids [R]. Throws invalid_argument on shapes that do not fit, V 0 and overlapping memory
/// before anything is written; on NaN anywhere in a row after all rows are done, naming the first such row, whose id is
/// -1 (no token is chosen). Cost: one read of the logits.
template <host_tensor<2> Logits, writable_host_tensor<1> Ids>
  requires(real<typename Logits::value_type> && std::same_as<typename Ids::value_type, id>)
void argmax(const host& exec, const Logits& logits, const Ids& ids) {
  const size rows = logits.extent(0), count = logits.extent(1);
  detail::require(count > 0 && count < (size{1} << 31), "argmax", "the number of logits", count,
                  "between 1 and 2^31 - 1");
  detail::require_shape("argmax", "logits", logits, rows, count);
  detail::require_shape("argmax", "ids", ids, rows);
  detail::require_disjoint("argmax", "ids", ids, "logits", logits);
  detail::argmax_rows(exec, logits, ids, {});
  for (size row = 0; row < rows; ++row)
    if (ids(row) < 0) throw invalid_argument("argmax", "logits of row " + std::to_string(row), "NaN", "numbers");
}

}  // namespace k3
