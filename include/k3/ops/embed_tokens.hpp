// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/ops/require_weight.hpp>

namespace k3 {

/// Looks tokens up: out row r = table row ids[r], unscaled, rounded once where `out` is narrower than the table.
/// Shapes: ids [R], table [V, hidden] (F64, F32 or BF16), out [R, hidden].
/// Throws invalid_argument on shapes that do not fit, overlapping memory and an id outside [0, V), naming row and id,
/// before anything is written. Cost: R * hidden elements read and written. Source: `embed_tokens.weight`.
template <host_tensor<1> Ids, class Table, writable_host_tensor<2> Out>
  requires(std::same_as<typename Ids::value_type, id> && real<typename Out::value_type>)
void embed_tokens(const host& exec, const Ids& ids, const Table& table, const Out& out) {
  const size rows = ids.extent(0), vocab = table.extent(0), hidden = out.extent(1);
  detail::require_shape("embed_tokens", "ids", ids, rows);
  detail::require_weight("embed_tokens", "table", table, vocab, hidden);
  detail::require_shape("embed_tokens", "out", out, rows, hidden);
  detail::require_disjoint("embed_tokens", "out", out, "ids", ids, "table", table);
  if constexpr (!host_tensor<Table, 2>)
    detail::require(table.type != ElementType::mxfp4, "embed_tokens", "table", "MXFP4", "F64, F32 or BF16");
  for (size row = 0; row < rows; ++row)
    if (ids(row) < 0 || static_cast<size>(ids(row)) >= vocab)
      throw invalid_argument("embed_tokens", "the id of row " + std::to_string(row), std::to_string(ids(row)),
                             "at least 0 and below " + std::to_string(vocab));
  detail::with_typed(table, [&](const auto& typed) {
    using Entry = typename std::remove_cvref_t<decltype(typed)>::value_type;
    using Value = typename Out::value_type;
    detail::parallel_chunks(exec, rows, 1, rows * hidden * (sizeof(Entry) + sizeof(Value)), [&](size first, size last) {
      for (size row = first; row < last; ++row)
        for (size i = 0; i < hidden; ++i)
          out(row, i) = static_cast<Value>(static_cast<accumulator_t<Entry>>(typed(static_cast<size>(ids(row)), i)));
    });
  });
}

}  // namespace k3
