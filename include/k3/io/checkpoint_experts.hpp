// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include <k3/io/checkpoint_tensors.hpp>

namespace k3::detail {

/// The routed experts of one layer in a checkpoint's file maps: MXFP4 pairs (`weight_packed`, `weight_scale`) or plain
/// matrices (`weight`). Binding looks at names, types and shapes; an expert's bytes are first touched when it is asked
/// for, and its scale bytes are then checked for the NaN code. Safe to use from several threads.
class CheckpointExperts final : public ExpertSource {
 public:
  CheckpointExperts(CheckpointTensors& tensors, k3::size layer, const LatentMoeConfig& g)
      : storage_(tensors.storage()) {
    const k3::size width = moe_expert_width(g);
    // Room for as many as there can be: the count comes from config.json and is not proved yet.
    experts_.reserve(smaller(g.n_routed, tensors.files().tensors().size()));
    for (k3::size e = 0; e < g.n_routed; ++e) {
      const std::string prefix = expert_prefix(layer, e);
      Expert expert;
      bind(tensors, prefix + "w1", g.expert_hidden, width, expert.weights.w1, expert.scales[0]);
      bind(tensors, prefix + "w3", g.expert_hidden, width, expert.weights.w3, expert.scales[1]);
      bind(tensors, prefix + "w2", width, g.expert_hidden, expert.weights.w2, expert.scales[2]);
      experts_.push_back(expert);
    }
    checked_ = std::make_unique<std::atomic<bool>[]>(experts_.size());
  }

  k3::size size() const override { return experts_.size(); }

  ExpertWeights operator[](k3::size expert) const override {
    if (!checked_[expert].load(std::memory_order_acquire)) {
      for (const TensorInfo* scale : experts_[expert].scales)
        if (scale) check_scales(*scale);
      checked_[expert].store(true, std::memory_order_release);
    }
    return experts_[expert].weights;
  }

 private:
  struct Expert {
    ExpertWeights weights{};
    const TensorInfo* scales[3] = {};  // of w1, w3, w2; null for plain matrices
  };

  static void bind(CheckpointTensors& tensors, const std::string& name, k3::size rows, k3::size columns,
                   AnyMatrix<>& matrix, const TensorInfo*& scale) {
    const TensorInfo* const packed = tensors.find(name + ".weight_packed");
    scale = tensors.find(name + ".weight_scale");
    if (!packed && !scale) return tensors.bind(name + ".weight", matrix, {rows, columns}, WeightRole::plain);
    if (!packed) tensors.fail(*scale, "has no " + name + ".weight_packed beside it");
    if (!scale) tensors.fail(*packed, "has no " + name + ".weight_scale beside it");
    if (columns % mxfp4_group != 0)
      tensors.fail(*packed, "is MXFP4 with " + std::to_string(columns) + " columns, expected a multiple of 32");
    require_bytes(tensors, *packed, rows, columns / 2, packed->dtype == DType::u8, "U8");
    require_bytes(tensors, *scale, rows, columns / mxfp4_group,
                  scale->dtype == DType::u8 || scale->dtype == DType::f8_e8m0, "U8 or F8_E8M0");
    matrix.data = tensors.files().data(*packed);
    matrix.scale = reinterpret_cast<const std::uint8_t*>(tensors.files().data(*scale));
    matrix.type = ElementType::mxfp4;
    matrix.extents[0] = rows;
    matrix.extents[1] = columns;
  }

  static void require_bytes(CheckpointTensors& tensors, const TensorInfo& tensor, k3::size rows, k3::size columns,
                            bool right_type, const char* types) {
    if (!right_type) tensors.fail(tensor, "has type " + std::string(dtype_name(tensor.dtype)) + ", expected " + types);
    const k3::size expected[] = {rows, columns};
    if (!std::equal(tensor.shape.begin(), tensor.shape.end(), expected, expected + 2))
      tensors.fail(tensor, "has shape " + shape_text(tensor.shape) + ", expected " + shape_text(expected));
  }

  void check_scales(const TensorInfo& tensor) const {
    const std::byte* const first = storage_->files->data(tensor);
    const void* const found = std::memchr(first, e8m0_nan, tensor.bytes());
    if (!found) return;
    throw format_error(storage_->files->path(tensor), printable(tensor.name), "scale byte 255 (NaN)",
                       tensor.begin + static_cast<std::uint64_t>(static_cast<const std::byte*>(found) - first));
  }

  std::shared_ptr<const CheckpointStorage> storage_;
  std::vector<Expert> experts_;
  mutable std::unique_ptr<std::atomic<bool>[]> checked_;
};

}  // namespace k3::detail
