// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <k3/io/config.hpp>
#include <k3/io/safetensors_set.hpp>
#include <k3/model/weights.hpp>

namespace k3::detail {

/// A copy of a tensor whose place in the file is not aligned for its type.
using AlignedCopy = std::vector<double>;  // for the alignment; the bytes are the tensor's

/// Tensors that belong to the image input, which a text model passes over.
inline bool is_vision_tensor(const TensorInfo& tensor) {
  return tensor.name.starts_with("vision_tower.") || tensor.name.starts_with("mm_projector.");
}

/// What keeps a checkpoint's weights alive: the file maps and the copies.
struct CheckpointStorage {
  std::shared_ptr<const Safetensors> files;
  std::vector<std::unique_ptr<AlignedCopy>> copies;
};

/// The text tensors of a checkpoint by the names without wrapper prefix, and which of them have found their place.
class CheckpointTensors {
 public:
  explicit CheckpointTensors(std::shared_ptr<const Safetensors> files)
      : files_(std::move(files)), storage_(std::make_shared<CheckpointStorage>()), used_(files_->tensors().size()) {
    storage_->files = files_;
    for (const TensorInfo& tensor : files_->tensors()) {
      if (is_vision_tensor(tensor)) continue;
      if (tensor.name.starts_with("language_model.")) prefix_ = "language_model.";
      hints_.has_residual_scores = hints_.has_residual_scores || tensor.name.ends_with("_res_proj.weight");
      hints_.has_latent_projections =
          hints_.has_latent_projections || tensor.name.ends_with(".routed_expert_down_proj.weight");
      hints_.has_packed_experts = hints_.has_packed_experts || tensor.name.ends_with(".weight_packed");
    }
  }

  const Safetensors& files() const { return *files_; }
  std::shared_ptr<const CheckpointStorage> storage() const { return storage_; }
  const CheckpointHints& hints() const { return hints_; }

  /// The length to which A_log may be padded: a KDA head's channels.
  void set_padded_a_log(size length) { padded_a_log_ = length; }

  /// The tensor `name`, marked as used; null where there is none. Some writers leave the prefix away for single tensors
  /// (the head): then that one is meant. Where both exist, the other is found to be unknown.
  const TensorInfo* find(const std::string& name) {
    const TensorInfo* tensor = prefix_.empty() ? nullptr : files_->find(prefix_ + name);
    if (!tensor) tensor = files_->find(name);
    if (tensor) used_[static_cast<size>(tensor - files_->tensors().data())] = true;
    return tensor;
  }
  const TensorInfo& at(const std::string& name) {
    if (const TensorInfo* tensor = find(name)) return *tensor;
    throw format_error(files_->path(), prefix_ + name, "is missing");
  }
  /// Marks a tensor as known without using it.
  void pass_over(const std::string& name) { find(name); }

  [[noreturn]] void fail(const TensorInfo& tensor, const std::string& what) const {
    throw format_error(files_->path(tensor), printable(tensor.name), what, tensor.begin);
  }

  /// Sets `weight` to the tensor `name`, whose shape in the file follows from `shape` and `role`.
  template <size Rank>
  void bind(const std::string& name, AnyView<Rank>& weight, const size (&shape)[Rank], WeightRole role) {
    place(describe(name, weight, shape, role), weight);
  }

  /// As bind, but gives `weight` type and extents only.
  template <size Rank>
  const TensorInfo& describe(const std::string& name, AnyView<Rank>& weight, const size (&shape)[Rank],
                             WeightRole role) {
    const TensorInfo& tensor = at(name);
    if (role == WeightRole::a_log)
      check_a_log(tensor, shape[0]);
    else
      require_shape(tensor, shape, role);
    weight = {};
    weight.type = stored_type(tensor);
    for (size d = 0; d < Rank; ++d) weight.extents[d] = shape[d];
    return tensor;
  }

  /// Gives a described weight its address in the file map; copies the tensor where it does not lie aligned.
  template <size Rank>
  void place(const TensorInfo& tensor, AnyView<Rank>& weight) {
    weight.data = files_->data(tensor);
    if (reinterpret_cast<std::uintptr_t>(weight.data) % dtype_bytes(tensor.dtype) == 0) return;
    auto copy = std::make_unique<AlignedCopy>(tensor.bytes() / sizeof(double) + 1);
    std::memcpy(copy->data(), weight.data, tensor.bytes());
    weight.data = copy->data();
    storage_->copies.push_back(std::move(copy));
  }

  /// Throws for the first text tensor that no part of the model has asked for.
  void require_all_used() const {
    for (size i = 0; i < used_.size(); ++i) {
      const TensorInfo& tensor = files_->tensors()[i];
      if (!used_[i] && !is_vision_tensor(tensor)) fail(tensor, "is not a tensor of this model");
    }
  }

 private:
  ElementType stored_type(const TensorInfo& tensor) const {
    switch (tensor.dtype) {
      case DType::bf16: return ElementType::bf16;
      case DType::f32: return ElementType::f32;
      case DType::f64: return ElementType::f64;
      default: fail(tensor, "has type " + std::string(dtype_name(tensor.dtype)) + ", expected BF16, F32 or F64");
    }
  }

  void require_shape(const TensorInfo& tensor, std::span<const size> shape, WeightRole role) const {
    std::vector<size> in_file(shape.begin(), shape.end());
    if (role == WeightRole::conv) in_file = {shape[0], 1, shape[1]};
    if (role == WeightRole::row && tensor.shape.size() != 1) in_file = {1, shape[0]};
    if (!std::equal(tensor.shape.begin(), tensor.shape.end(), in_file.begin(), in_file.end()))
      fail(tensor, "has shape " + shape_text(tensor.shape) + ", expected " + shape_text(in_file));
  }

  // One entry per head, as [H] or [1, 1, H, 1], or as in the released files one per channel of a head, of which those
  // past the heads must be zero.
  void check_a_log(const TensorInfo& tensor, size heads) const {
    const size count = tensor.elements();
    const bool flat = tensor.shape.size() == 1;
    const bool broadcast = tensor.shape.size() == 4 && tensor.shape[2] == heads;
    const bool padded = count == padded_a_log_ && count > heads;
    if (!(broadcast && count == heads) && !(flat && (count == heads || padded)))
      fail(
          tensor,
          "has shape " + shape_text(tensor.shape) + ", expected [" + std::to_string(heads) + "]" +
              (padded_a_log_ > heads ? ", or [" + std::to_string(padded_a_log_) + "] with zeros after the heads" : ""));
    if (count == heads) return;
    if (tensor.dtype != DType::f32)
      fail(tensor, "is padded and of type " + std::string(dtype_name(tensor.dtype)) + ", expected F32");
    for (size i = heads; i < count; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, files_->data(tensor) + i * sizeof bits, sizeof bits);
      if ((bits & 0x7fffffffu) == 0) continue;
      throw format_error(
          files_->path(tensor), printable(tensor.name),
          "entry " + std::to_string(i) + ", of the padding after " + std::to_string(heads) + " heads, is not zero",
          tensor.begin + i * sizeof bits);
    }
  }

  std::shared_ptr<const Safetensors> files_;
  std::shared_ptr<CheckpointStorage> storage_;
  std::vector<bool> used_;
  std::string prefix_;
  CheckpointHints hints_;
  size padded_a_log_ = 0;
};

}  // namespace k3::detail
