// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/expert_table.cuh>

namespace k3 {

/// Rewrites the memory of a table's experts in another layout, in place (it must be writable): the same bits in the
/// order in which the kernels read them fastest. Lossless: back to `released` gives every byte back. Results of
/// mix_routed_experts are the same bits in either layout. False, and nothing is done, where there is no packed layout:
/// weights that are not MXFP4, codes or scales not on multiples of 16 bytes, other sizes (experts_packable). Returns at
/// once; ordered on the stream; no other table must name the same memory. Cost: reads and writes every byte once, at
/// 3.3 TB/s of the two together on an H200.
inline bool repack_experts(const gpu& exec, ExpertTable& table, ExpertLayout layout = ExpertLayout::packed) {
  constexpr const char* operation = "repack_experts";
  if (table.layout_ == layout) return true;
  if (table.type() != ElementType::mxfp4 || !table.aligned() || !table.scales_aligned_ ||
      !experts_packable(table.expert_hidden(), table.width()))
    return false;
  detail::require(table.experts() < 65536, operation, "table.experts()", table.experts(), "fewer than 65536");
  const unsigned hidden = static_cast<unsigned>(table.expert_hidden()), width = static_cast<unsigned>(table.width());
  const auto function = layout == ExpertLayout::packed ? kernel::repack_table<true> : kernel::repack_table<false>;
  function<<<dim3((2 * hidden + width) / kernel::slab_rows, static_cast<unsigned>(table.experts())), 256,
             kernel::repack_shared(hidden, width), exec.stream>>>(table.data(), hidden, width);
  detail::check_launch(operation);
  table.layout_ = layout;
  return true;
}

/// The same for single experts, which no table needs to name (yet): from the layout that their memory has into the
/// other one, `layout`. All have the same sizes; absent ones are passed over. For an expert that has just been
/// uploaded: repack, then `ExpertTable::set`. Returns at once, ordered on the stream, without allocating; one launch
/// for every 64 experts. False, and nothing is done, where they have no packed layout.
inline bool repack_experts(const gpu& exec, const DeviceExpertWeights* experts, size count,
                           ExpertLayout layout = ExpertLayout::packed) {
  size hidden = 0, width = 0;
  kernel::ExpertList list{};
  const auto launch = [&] {
    if (list.count == 0) return;
    const unsigned rows = static_cast<unsigned>(hidden), columns = static_cast<unsigned>(width);
    const auto function = layout == ExpertLayout::packed ? kernel::repack_listed<true> : kernel::repack_listed<false>;
    function<<<dim3((2 * rows + columns) / kernel::slab_rows, list.count), 256, kernel::repack_shared(rows, columns),
               exec.stream>>>(list, rows, columns);
    detail::check_launch("repack_experts");
    list.count = 0;
  };
  for (size i = 0; i < count; ++i) {
    if (detail::expert_absent(experts[i])) continue;
    if (hidden == 0) hidden = experts[i].w1.extent(0), width = experts[i].w1.extent(1);
    if (!detail::repackable_expert(experts[i], hidden, width) || !experts_packable(hidden, width)) return false;
  }
  for (size i = 0; i < count; ++i) {
    if (detail::expert_absent(experts[i])) continue;
    list.of[list.count++] = detail::expert_pointers(experts[i]);
    if (list.count == kernel::expert_list_most) launch();
  }
  launch();
  return true;
}

}  // namespace k3
