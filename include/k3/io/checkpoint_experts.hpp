// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include <k3/io/checkpoint_tensors.hpp>

namespace k3::detail {

/// A routed expert as a checkpoint has it: MXFP4 pairs (`weight_packed`, `weight_scale`) or plain matrices (`weight`).
struct BoundExpert {
  ExpertWeights weights{};          // types and extents; no addresses
  const TensorInfo* data[3] = {};   // of w1, w3, w2
  const TensorInfo* scale[3] = {};  // null for plain matrices

  const AnyMatrix<>& matrix(size i) const { return i == 0 ? weights.w1 : i == 1 ? weights.w3 : weights.w2; }
};

inline AnyMatrix<>& matrix_of(ExpertWeights& weights, size i) {
  return i == 0 ? weights.w1 : i == 1 ? weights.w3 : weights.w2;
}

/// Finds the experts of layers by name, and checks types and shapes.
class ExpertBinder {
 public:
  explicit ExpertBinder(CheckpointTensors& tensors) : tensors_(tensors) {}

  std::vector<BoundExpert> bind(size layer, const LatentMoeConfig& g) {
    const size width = moe_expert_width(g);
    std::vector<BoundExpert> experts;
    // Room for as many as there can be: the count comes from config.json and is not proved yet.
    experts.reserve(smaller(g.n_routed, tensors_.files().tensors().size()));
    for (size e = 0; e < g.n_routed; ++e) {
      const std::string prefix = expert_prefix(layer, e);
      BoundExpert& expert = experts.emplace_back();
      bind(prefix + "w1", g.expert_hidden, width, expert, 0);
      bind(prefix + "w3", g.expert_hidden, width, expert, 1);
      bind(prefix + "w2", width, g.expert_hidden, expert, 2);
    }
    return experts;
  }

 private:
  void bind(const std::string& name, size rows, size columns, BoundExpert& expert, size i) {
    AnyMatrix<>& matrix = matrix_of(expert.weights, i);
    const TensorInfo* const packed = tensors_.find(name + ".weight_packed");
    const TensorInfo* const scale = tensors_.find(name + ".weight_scale");
    if (!packed && !scale) {
      expert.data[i] = &tensors_.describe(name + ".weight", matrix, {rows, columns}, WeightRole::plain);
      return;
    }
    if (!packed) tensors_.fail(*scale, "has no " + name + ".weight_packed beside it");
    if (!scale) tensors_.fail(*packed, "has no " + name + ".weight_scale beside it");
    if (columns % mxfp4_group != 0)
      tensors_.fail(*packed, "is MXFP4 with " + std::to_string(columns) + " columns, expected a multiple of 32");
    require_bytes(*packed, rows, columns / 2, packed->dtype == DType::u8, "U8");
    require_bytes(*scale, rows, columns / mxfp4_group, scale->dtype == DType::u8 || scale->dtype == DType::f8_e8m0,
                  "U8 or F8_E8M0");
    expert.data[i] = packed;
    expert.scale[i] = scale;
    matrix.type = ElementType::mxfp4;
    matrix.extents[0] = rows;
    matrix.extents[1] = columns;
  }

  void require_bytes(const TensorInfo& tensor, size rows, size columns, bool right_type, const char* types) {
    if (!right_type) tensors_.fail(tensor, "has type " + std::string(dtype_name(tensor.dtype)) + ", expected " + types);
    const size expected[] = {rows, columns};
    if (!std::equal(tensor.shape.begin(), tensor.shape.end(), expected, expected + 2))
      tensors_.fail(tensor, "has shape " + shape_text(tensor.shape) + ", expected " + shape_text(expected));
  }

  CheckpointTensors& tensors_;
};

/// Throws format_error where bytes [begin, end) of a tensor's file, which lie at `first` and are scales, have the code
/// for NaN.
inline void check_scales(const Safetensors& files, const TensorInfo& tensor, const std::byte* first,
                         std::uint64_t begin, std::uint64_t end) {
  const void* const found = std::memchr(first, e8m0_nan, static_cast<size>(end - begin));
  if (!found) return;
  throw format_error(files.path(tensor), printable(tensor.name), "scale byte 255 (NaN)",
                     begin + static_cast<std::uint64_t>(static_cast<const std::byte*>(found) - first));
}

/// The routed experts of one layer in a checkpoint's file maps. An expert's bytes are first touched when it is asked
/// for, and its scale bytes are then checked for the NaN code. Safe to use from several threads.
class CheckpointExperts final : public ExpertSource {
 public:
  CheckpointExperts(CheckpointTensors& tensors, k3::size layer, const LatentMoeConfig& g)
      : storage_(tensors.storage()) {
    experts_ = ExpertBinder(tensors).bind(layer, g);
    for (BoundExpert& expert : experts_)
      for (k3::size i = 0; i < 3; ++i) {
        AnyMatrix<>& matrix = matrix_of(expert.weights, i);
        tensors.place(*expert.data[i], matrix);
        if (expert.scale[i])
          matrix.scale = reinterpret_cast<const std::uint8_t*>(tensors.files().data(*expert.scale[i]));
      }
    checked_ = std::make_unique<std::atomic<bool>[]>(experts_.size());
  }

  k3::size size() const override { return experts_.size(); }

  ExpertWeights operator[](k3::size expert) const override {
    if (!checked_[expert].load(std::memory_order_acquire)) {
      for (const TensorInfo* scale : experts_[expert].scale)
        if (scale) check_scales(*storage_->files, *scale, storage_->files->data(*scale), scale->begin, scale->end);
      checked_[expert].store(true, std::memory_order_release);
    }
    return experts_[expert].weights;
  }

 private:
  std::shared_ptr<const CheckpointStorage> storage_;
  std::vector<BoundExpert> experts_;
  std::unique_ptr<std::atomic<bool>[]> checked_;
};

}  // namespace k3::detail
