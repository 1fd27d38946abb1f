// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <k3/core/any_view.hpp>
#include <k3/cuda/buffer.cuh>
#include <k3/geometry/latent_moe_config.hpp>
#include <k3/kernels/expert_packing.cuh>
#include <k3/ops/require_weight.hpp>

namespace k3 {

/// One routed expert in device memory: w1 (gate) and w3 (up) [expert_hidden, width], w2 (down) [width, expert_hidden].
/// All three absent: this device does not have the expert. Source: `block_sparse_moe.experts.E.*`.
struct DeviceExpertWeights {
  AnyMatrix<MemorySpace::device> w1, w3, w2;
};

/// How MXFP4 experts lie in their memory: as released, or with the same bits in the order that the kernels read
/// (kernels/expert_packing.cuh; see repack_experts).
enum class ExpertLayout : std::uint8_t { released, packed };

/// Whether experts of these sizes have a packed layout: both matrices' rows are whole pieces of 512 columns, and a slab
/// of 8 rows fits into a block's shared memory.
constexpr bool experts_packable(size expert_hidden, size width) {
  const size columns = expert_hidden > width ? expert_hidden : width;
  return expert_hidden % kernel::piece_columns == 0 && width % kernel::piece_columns == 0 &&
         kernel::slab_rows * columns * 17 / 32 <= 48 * 1024;
}

namespace detail {

inline bool expert_absent(const DeviceExpertWeights& w) { return !w.w1 && !w.w3 && !w.w2; }
inline kernel::ExpertPointers expert_pointers(const DeviceExpertWeights& w) {
  return {w.w1.data, w.w3.data, w.w2.data, w.w1.scale, w.w3.scale, w.w2.scale};
}
/// Whether it is MXFP4 of these sizes with codes and scales on multiples of 16 bytes.
inline bool repackable_expert(const DeviceExpertWeights& w, size expert_hidden, size width) {
  const auto aligned = [](const void* p) { return p != nullptr && reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  const auto fits = [&](const AnyMatrix<MemorySpace::device>& m, size rows, size columns) {
    return m.type == ElementType::mxfp4 && m.extent(0) == rows && m.extent(1) == columns && aligned(m.data) &&
           aligned(m.scale);
  };
  return fits(w.w1, expert_hidden, width) && fits(w.w3, expert_hidden, width) && fits(w.w2, width, expert_hidden);
}

}  // namespace detail

/// A new entry of a table: expert `expert` lies there, or, with no weights, nowhere any more.
struct ExpertEntry {
  size expert = 0;
  DeviceExpertWeights weights;
};

/// What the expert kernels read weights by: for each expert where its matrices and scales lie. Experts may lie anywhere
/// and are not owned; they are all of one type, MXFP4, bf16 or float. Built once (it allocates and waits), with all
/// experts as released, or empty, for experts that come and go.
class ExpertTable {
 public:
  ExpertTable() = default;

  /// Throws invalid_argument where the number of experts, a shape or a type does not fit.
  template <latent_moe_geometry G>
  ExpertTable(G geometry, const std::vector<DeviceExpertWeights>& experts)
      : expert_hidden_(geometry.expert_hidden), width_(moe_expert_width(geometry)) {
    constexpr const char* operation = "ExpertTable";
    check(geometry, operation);
    detail::require(experts.size() == geometry.n_routed, operation, "experts.size()", experts.size(),
                    size{geometry.n_routed});
    std::vector<kernel::ExpertPointers> pointers(experts.size());
    for (size e = 0; e < experts.size(); ++e) {
      const DeviceExpertWeights& w = experts[e];
      if (detail::expert_absent(w)) continue;
      require_matrix(e, "w1", w.w1, expert_hidden_, width_);
      require_matrix(e, "w3", w.w3, expert_hidden_, width_);
      require_matrix(e, "w2", w.w2, width_, expert_hidden_);
      pointers[e] = detail::expert_pointers(w);
    }
    aligned_ = aligned_ && (type_ != ElementType::bf16 || (expert_hidden_ % 8 == 0 && width_ % 8 == 0));
    pointers_ = DeviceBuffer<kernel::ExpertPointers>(pointers);
  }

  /// A table of MXFP4 experts, all absent: rows that choose one fail (RowStatus::bad_expert) until `set` brings it.
  /// Throws invalid_argument where the sizes have no such layout.
  template <latent_moe_geometry G>
  ExpertTable(G geometry, ExpertLayout layout)
      : expert_hidden_(geometry.expert_hidden),
        width_(moe_expert_width(geometry)),
        type_(ElementType::mxfp4),
        layout_(layout) {
    constexpr const char* operation = "ExpertTable";
    check(geometry, operation);
    const bool fits = layout == ExpertLayout::packed ? experts_packable(expert_hidden_, width_)
                                                     : expert_hidden_ % mxfp4_group == 0 && width_ % mxfp4_group == 0;
    detail::require(fits, operation, "layout", "not for these sizes", "a layout that the sizes have");
    pointers_ = DeviceBuffer<kernel::ExpertPointers>(geometry.n_routed);
  }

  /// Replaces entries of a table of MXFP4 experts, in the order of the stream: kernels before it see the old entries,
  /// kernels after it the new ones. The memory holds the expert in the table's layout (repack_experts) when the next
  /// mix_routed_experts runs, with codes and scales on multiples of 16 bytes. No two entries of a call name the same
  /// expert. Throws invalid_argument for an expert that the table does not count, weights that do not fit, a table of
  /// another type. Cost: one small launch for every 64 entries; no allocation, no wait, and the entries are copied
  /// before it returns.
  void set(const gpu& exec, const ExpertEntry* entries, size count) {
    constexpr const char* operation = "ExpertTable::set";
    detail::require(type_ == ElementType::mxfp4, operation, "table", "of another type", "a table of MXFP4 experts");
    for (size i = 0; i < count; ++i) require_entry(entries[i]);
    for (size from = 0; from < count; from += kernel::expert_list_most) {
      kernel::ExpertEntries list{};
      list.list.count = static_cast<unsigned>(detail::smaller(count - from, size{kernel::expert_list_most}));
      for (unsigned i = 0; i < list.list.count; ++i) {
        list.list.of[i] = detail::expert_pointers(entries[from + i].weights);
        list.expert[i] = static_cast<unsigned>(entries[from + i].expert);
      }
      kernel::set_experts<<<1, kernel::expert_list_most, 0, exec.stream>>>(list, pointers_.data());
      detail::check_launch(operation);
    }
  }
  void set(const gpu& exec, const ExpertEntry& entry) { set(exec, &entry, 1); }

  size experts() const { return pointers_.count(); }
  size expert_hidden() const { return expert_hidden_; }
  size width() const { return width_; }
  /// Of every expert; `none` where all are absent and no type was named.
  ElementType type() const { return type_; }
  /// Whether all rows lie on multiples of 16 bytes, which is faster and gives the same bits.
  bool aligned() const { return aligned_; }
  ExpertLayout layout() const { return layout_; }
  const kernel::ExpertPointers* data() const { return pointers_.data(); }

 private:
  friend bool repack_experts(const gpu& exec, ExpertTable& table, ExpertLayout layout);

  void require_entry(const ExpertEntry& entry) const {
    constexpr const char* operation = "ExpertTable::set";
    detail::require(entry.expert < experts(), operation, "expert", entry.expert, "one that the table counts");
    detail::require(
        detail::expert_absent(entry.weights) || detail::repackable_expert(entry.weights, expert_hidden_, width_),
        operation, "weights", "unusable", "MXFP4 of the table's sizes on multiples of 16 bytes");
  }

  void require_matrix(size e, const char* name, const AnyMatrix<MemorySpace::device>& w, size rows, size columns) {
    const auto argument = [&] { return "experts[" + std::to_string(e) + "]." + name; };
    const bool usable = w.type == ElementType::mxfp4 || w.type == ElementType::bf16 || w.type == ElementType::f32;
    if (!usable || w.extent(0) != rows || w.extent(1) != columns || w.data == nullptr)
      detail::require_weight("ExpertTable", argument().c_str(), w, rows, columns);
    if (!usable || w.data == nullptr ||
        (w.type == ElementType::mxfp4 && (w.scale == nullptr || columns % mxfp4_group != 0)))
      throw invalid_argument("ExpertTable", argument(), "unusable", "MXFP4 of a multiple of 32 columns, BF16 or F32");
    if (type_ == ElementType::none) type_ = w.type;
    if (w.type != type_) throw invalid_argument("ExpertTable", argument(), "of another type", "the type of all others");
    aligned_ = aligned_ && reinterpret_cast<std::uintptr_t>(w.data) % 16 == 0;
    scales_aligned_ = scales_aligned_ && reinterpret_cast<std::uintptr_t>(w.scale) % 16 == 0;
  }

  size expert_hidden_ = 0, width_ = 0;
  ElementType type_ = ElementType::none;
  ExpertLayout layout_ = ExpertLayout::released;
  bool aligned_ = true, scales_aligned_ = true;
  DeviceBuffer<kernel::ExpertPointers> pointers_;
};

}  // namespace k3
