// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/rms_norm.cuh>
#include <k3/ops/row_status.hpp>

namespace k3 {

/// Looks tokens up on the device: out row r = table row ids[r], rounded once where `out` is narrower than the table.
/// Shapes: ids [R] in device memory, table [V, hidden] (F32 or BF16), out [R, hidden], slots and status [R] if wanted.
/// A row of pad_slot gives zeros whatever its id. An id outside [0, V) gives a row of zeros and RowStatus::bad_id in
/// its status word (written, never cleared). Throws invalid_argument on shapes that do not fit, overlapping memory
/// and other table types. Cost: R * hidden elements read and written.
template <device_tensor<1> Ids, writable_device_tensor<2> Out>
  requires std::same_as<typename Ids::value_type, id>
void embed_tokens(const gpu& exec, const Ids& ids, const AnyMatrix<MemorySpace::device>& table, const Out& out,
                  DeviceView<const id, 1> slots = {}, DeviceView<unsigned, 1> status = {}) {
  const size rows = ids.extent(0), vocab = table.extent(0), hidden = out.extent(1);
  detail::require_shape("embed_tokens", "ids", ids, rows);
  detail::require_shape("embed_tokens", "table", table, {vocab, hidden});
  detail::require(table.type != ElementType::mxfp4, "embed_tokens", "table", "MXFP4", "F32 or BF16");
  detail::require(hidden < size{1} << 31, "embed_tokens", "out's width", hidden, "below 2^31");
  detail::require_shape("embed_tokens", "out", out, rows, hidden);
  if (slots.data != nullptr) detail::require_shape("embed_tokens", "slots", slots, rows);
  detail::require_disjoint("embed_tokens", "out", out, "ids", ids, "table", table, "slots", slots);
  if (status.data != nullptr) {
    detail::require_shape("embed_tokens", "status", status, rows);
    detail::require_disjoint("embed_tokens", "status", status, "ids", ids, "table", table, "slots", slots, "out", out);
  }
  detail::with_device_weight("embed_tokens", "table", table, [&](const auto& typed) {
    if (rows == 0 || hidden == 0) return;
    constexpr unsigned threads = 256;
    using Entry = std::remove_const_t<typename std::remove_cvref_t<decltype(typed)>::value_type>;
    const kernel::EmbedArguments<Entry, typename Out::value_type> a{
        ids.data,
        slots.data,
        typed.data,
        out.data,
        status.data,
        out.strides[0],
        rows,
        vocab,
        static_cast<unsigned>(hidden),
        static_cast<unsigned>((hidden + 8 * threads - 1) / (8 * threads)),
        static_cast<unsigned>(RowStatus::bad_id),
        detail::rows_aligned(typed) && detail::rows_aligned(out)};
    detail::launch("embed_tokens", exec.stream, dim3(detail::grid_size(rows * a.parts, 1)), dim3(threads), 0,
                   kernel::embed_tokens<threads, Entry, typename Out::value_type>, a);
  });
}

}  // namespace k3
