// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <k3/core/any_view.hpp>
#include <k3/cuda/buffer.cuh>
#include <k3/geometry/latent_moe_config.hpp>
#include <k3/kernels/expert_worklist.cuh>
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

/// What the expert kernels read weights by: for each expert where its matrices and scales lie. Experts may lie anywhere
/// and are not owned; they are all of one type, MXFP4, bf16 or float, and as released when the table is made. Built
/// once, at load (it allocates and waits).
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
      if (!w.w1 && !w.w3 && !w.w2) continue;
      require_matrix(e, "w1", w.w1, expert_hidden_, width_);
      require_matrix(e, "w3", w.w3, expert_hidden_, width_);
      require_matrix(e, "w2", w.w2, width_, expert_hidden_);
      pointers[e] = {w.w1.data, w.w3.data, w.w2.data, w.w1.scale, w.w3.scale, w.w2.scale, 0};
    }
    aligned_ = aligned_ && (type_ != ElementType::bf16 || (expert_hidden_ % 8 == 0 && width_ % 8 == 0));
    pointers_ = DeviceBuffer<kernel::ExpertPointers>(pointers);
  }

  size experts() const { return pointers_.count(); }
  size expert_hidden() const { return expert_hidden_; }
  size width() const { return width_; }
  /// Of every expert; `none` where all are absent.
  ElementType type() const { return type_; }
  /// Whether all rows lie on multiples of 16 bytes, which is faster and gives the same bits.
  bool aligned() const { return aligned_; }
  ExpertLayout layout() const { return layout_; }
  const kernel::ExpertPointers* data() const { return pointers_.data(); }

 private:
  friend bool repack_experts(const gpu& exec, ExpertTable& table, ExpertLayout layout);

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
