// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/expert_table.cuh>
#include <k3/kernels/expert_packing.cuh>

namespace k3 {

/// Whether experts of these sizes have a packed layout: both matrices' rows are whole pieces of 256 columns, and a slab
/// of 8 rows fits into a block's shared memory.
constexpr bool experts_packable(size expert_hidden, size width) {
  const size columns = expert_hidden > width ? expert_hidden : width;
  return expert_hidden % kernel::piece_columns == 0 && width % kernel::piece_columns == 0 &&
         kernel::slab_rows * columns * 17 / 32 <= 48 * 1024;
}

/// Rewrites the memory of a table's experts in another layout, in place (it must be writable): the same bits in the
/// order in which the kernels read them fastest. Lossless: back to `released` gives every byte back. Results of
/// mix_routed_experts are the same bits in either layout. False, and nothing is done, where there is no packed layout:
/// weights that are not MXFP4, codes or scales not on multiples of 16 bytes, other sizes (experts_packable). Returns at
/// once; ordered on the stream; no other table must name the same memory. Cost: reads and writes every byte once, at
/// 3.6 TB/s of the two together on an H200.
inline bool repack_experts(const gpu& exec, ExpertTable& table, ExpertLayout layout = ExpertLayout::packed) {
  constexpr const char* operation = "repack_experts";
  if (table.layout_ == layout) return true;
  if (table.type() != ElementType::mxfp4 || !table.aligned() || !table.scales_aligned_ ||
      !experts_packable(table.expert_hidden(), table.width()))
    return false;
  detail::require(table.experts() < 65536, operation, "table.experts()", table.experts(), "fewer than 65536");
  const unsigned hidden = static_cast<unsigned>(table.expert_hidden()), width = static_cast<unsigned>(table.width());
  const dim3 grid((2 * hidden + width) / kernel::slab_rows, static_cast<unsigned>(table.experts()));
  const unsigned shared = kernel::slab_rows * detail::larger(hidden, width) / 32 * 17;
  if (layout == ExpertLayout::packed)
    kernel::repack_slabs<true><<<grid, 256, shared, exec.stream>>>(table.pointers_.data(), hidden, width);
  else
    kernel::repack_slabs<false><<<grid, 256, shared, exec.stream>>>(table.pointers_.data(), hidden, width);
  detail::check_launch(operation);
  table.layout_ = layout;
  return true;
}

}  // namespace k3
