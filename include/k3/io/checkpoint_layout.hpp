// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <k3/core/mxfp4.hpp>
#include <k3/geometry/k3_graph.hpp>
#include <k3/io/tensor_table.hpp>
#include <k3/model/weights.hpp>

namespace k3 {

/// In which of its forms a checkpoint is stored.
struct CheckpointForm {
  bool wrapped = true;    ///< names begin with `language_model.`, and the config's text settings are nested
  bool mxfp4 = true;      ///< routed experts are MXFP4 pairs, otherwise BF16
  size a_log_length = 0;  ///< entries of A_log, zeros after the heads; 0: one a head
};

/// A tensor that a checkpoint should have.
struct PlannedTensor {
  static constexpr size no_layer = ~size{0};

  std::string name;
  DType dtype = DType::bf16;
  std::vector<size> shape;
  size layer = no_layer;
  bool expert = false;  ///< of a routed expert

  std::uint64_t bytes() const {
    std::uint64_t result = dtype_bytes(dtype);
    for (const size extent : shape) result *= extent;
    return result;
  }
};

namespace detail {

/// Convolutions, decay parameters, KDA's output norm and the router's bias are stored in F32, all else in BF16.
inline DType released_dtype(const std::string& name) {
  for (const char* end : {"conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias"})
    if (name.ends_with(end)) return DType::f32;
  return DType::bf16;
}

inline std::vector<size> stored_shape(const size* shape, size rank, WeightRole role, const CheckpointForm& form) {
  if (role == WeightRole::conv) return {shape[0], 1, shape[1]};
  if (role == WeightRole::row) return {1, shape[0]};
  if (role == WeightRole::a_log) return {larger(shape[0], form.a_log_length)};
  return {shape, shape + rank};
}

template <class F>
void for_each_planned_expert(const K3Config& config, const CheckpointForm& form, const std::string& wrapper, size layer,
                             F&& f) {
  const size width = moe_expert_width(config.moe), inner = config.moe.expert_hidden;
  for (size expert = 0; expert < config.moe.n_routed; ++expert) {
    const std::string prefix = wrapper + expert_prefix(layer, expert);
    const auto matrix = [&](const char* name, size rows, size columns) {
      if (!form.mxfp4) return f(PlannedTensor{prefix + name + ".weight", DType::bf16, {rows, columns}, layer, true});
      f(PlannedTensor{prefix + name + ".weight_packed", DType::u8, {rows, columns / 2}, layer, true});
      f(PlannedTensor{prefix + name + ".weight_scale", DType::u8, {rows, columns / mxfp4_group}, layer, true});
    };
    matrix("w1", inner, width);
    matrix("w2", width, inner);
    matrix("w3", inner, width);
  }
}

}  // namespace detail

/// Calls f(PlannedTensor) for every text tensor that a checkpoint of this config has in the released layout: those of
/// no layer first, then layer by layer. 497,052 for Kimi K3. Source: the released checkpoint's headers.
template <class F>
void for_each_planned_tensor(const K3Config& config, const CheckpointForm& form, F&& f) {
  const std::string wrapper = form.wrapped ? "language_model." : "";
  size current = PlannedTensor::no_layer;
  const auto plan = [&]<size Rank>(const std::string& name, AnyView<Rank>&, const size(&shape)[Rank], WeightRole role) {
    f(PlannedTensor{wrapper + name, detail::released_dtype(name), detail::stored_shape(shape, Rank, role, form),
                    current, false});
  };
  DecoderWeights weights;
  for_each_model_weight(config, weights, plan);
  for (const K3LayerSpec& spec : K3Graph::from_config(config).layers) {
    LayerWeights layer;
    current = spec.index;
    for_each_layer_weight(config, spec, layer, plan);
    if (spec.mlp == MlpKind::LatentMoe) detail::for_each_planned_expert(config, form, wrapper, spec.index, f);
  }
}

/// The order of tensors in a released file: the widest types first, then by name as text. So an expert's six tensors
/// lie side by side, a layer's experts are one block, and expert 10 comes before expert 2.
inline bool released_order(const PlannedTensor& a, const PlannedTensor& b) {
  const size x = dtype_bytes(a.dtype), y = dtype_bytes(b.dtype);
  return x != y ? x > y : a.name < b.name;
}

/// The tensors file by file: one file a layer, then one of what belongs to no layer, each in released_order. With
/// `shards` > 0 that many files of about equal size instead (no more than there are tensors).
inline std::vector<std::vector<PlannedTensor>> released_shards(const K3Config& config, const CheckpointForm& form,
                                                               size shards = 0) {
  std::vector<std::vector<PlannedTensor>> files(config.mixers.size() + 1);
  for_each_planned_tensor(config, form, [&](PlannedTensor&& tensor) {
    const size file = tensor.layer == PlannedTensor::no_layer ? files.size() - 1 : tensor.layer;
    files[file].push_back(std::move(tensor));
  });
  for (auto& file : files) std::sort(file.begin(), file.end(), released_order);
  if (shards == 0) return files;
  std::uint64_t total = 0, before = 0;
  size left = 0;
  for (const auto& file : files)
    for (const PlannedTensor& tensor : file) total += tensor.bytes(), ++left;
  shards = detail::smaller(shards, left);
  std::vector<std::vector<PlannedTensor>> even(1);
  for (auto& file : files)
    for (PlannedTensor& tensor : file) {
      // A new file at its share of the bytes, or where each of the tensors left must begin one.
      const bool due = before >= total / shards * even.size() || left <= shards - even.size();
      if (!even.back().empty() && even.size() < shards && due) even.emplace_back();
      before += tensor.bytes();
      --left;
      even.back().push_back(std::move(tensor));
    }
  for (auto& file : even) std::sort(file.begin(), file.end(), released_order);
  return even;
}

/// Tensors and bytes of each type: what a checkpoint has, or should have.
struct TensorCensus {
  std::uint64_t tensors[detail::dtype_count] = {}, bytes[detail::dtype_count] = {};

  void add(DType dtype, std::uint64_t count) {
    ++tensors[static_cast<size>(dtype)];
    bytes[static_cast<size>(dtype)] += count;
  }
  std::uint64_t total_tensors() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t count : tensors) sum += count;
    return sum;
  }
  std::uint64_t total_bytes() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t count : bytes) sum += count;
    return sum;
  }
  friend bool operator==(const TensorCensus&, const TensorCensus&) = default;
};

/// The census that a checkpoint of this config should have; vision tensors are not in it.
inline TensorCensus planned_census(const K3Config& config, const CheckpointForm& form) {
  TensorCensus census;
  for_each_planned_tensor(config, form, [&](const PlannedTensor& tensor) { census.add(tensor.dtype, tensor.bytes()); });
  return census;
}

}  // namespace k3
