// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the tests of opening a checkpoint share.

#include <cmath>
#include <limits>
#include <thread>

#include <k3/io/checkpoint.hpp>
#include <k3/model/greedy_decode.hpp>

#include "support/catch.hpp"
#include "support/data.hpp"
#include "support/mutable_checkpoint.hpp"

namespace k3::test {

inline const std::string P = "language_model.model.";

inline nlohmann::json prompt_of(const std::string& fixture) {
  return nlohmann::json::parse(test::read_file(test::data_path(fixture) + "/expected.json"))["prompts"][1];
}

/// The model must give the reference tokens of the fixture that it was made from.
inline void check_decodes(const K3CpuModel& model, const std::string& fixture) {
  check(model);
  const nlohmann::json prompt = prompt_of(fixture);
  CHECK(greedy_decode<Fp32>(host{}, model, prompt["ids"].get<std::vector<id>>(), {16}).tokens ==
        prompt["generated"].get<std::vector<id>>());
}

inline K3CpuModel reopened(const MutableCheckpoint& checkpoint, CheckpointFiles files = CheckpointFiles::indexed) {
  const ScratchFolder folder;
  checkpoint.write(folder, files);
  return from_pretrained(folder.path);  // the maps outlive the files' names
}

inline void check_refused(const MutableCheckpoint& checkpoint, const std::string& tensor, const std::string& part) {
  const ScratchFolder folder;
  checkpoint.write(folder);
  const format_error problem = thrown<format_error>([&] { from_pretrained(folder.path); });
  INFO(problem.what());
  CHECK(problem.path().starts_with(folder.path));
  CHECK(problem.tensor() == tensor);
  CHECK(contains(problem.what(), part));
}

inline const detail::CheckpointStorage& storage_of(const K3CpuModel& model) {
  return *static_cast<const detail::CheckpointStorage*>(model.storage.get());
}

/// f(name without prefix, address, type) for every weight of a model, experts too.
template <class F>
void for_each_weight(const K3CpuModel& model, F&& f) {
  DecoderWeights weights = model.weights;
  const auto one = [&](const std::string& name, const auto& weight, const auto&, WeightRole) {
    f(name, weight.data, weight.type);
  };
  for_each_model_weight(model.config, weights, one);
  for (LayerWeights& layer : weights.layers) {
    for_each_layer_weight(model.config, layer.spec, layer, one);
    for (size e = 0; layer.experts && e < layer.experts->size(); ++e) {
      const ExpertWeights expert = (*layer.experts)[e];
      const std::string prefix = expert_prefix(layer.spec.index, e);
      const std::pair<const char*, AnyMatrix<>> parts[] = {{"w1", expert.w1}, {"w3", expert.w3}, {"w2", expert.w2}};
      for (const auto& [name, matrix] : parts) {
        const bool packed = matrix.type == ElementType::mxfp4;
        f(prefix + name + (packed ? ".weight_packed" : ".weight"), matrix.data, matrix.type);
        if (packed) f(prefix + name + ".weight_scale", matrix.scale, matrix.type);
      }
    }
  }
}

inline std::string without_wrapper(const std::string& name) {
  return name.starts_with("language_model.") ? name.substr(15) : name;
}

/// `values` as the bytes of another type, rounded.
template <class T>
std::string bytes_of(const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  for (size i = 0; i < values.size(); ++i) {
    const T value = static_cast<T>(values[i]);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

inline std::vector<float> values_of(const StoredTensor& tensor) {
  std::vector<float> values;
  const size width = tensor.dtype == "F32" ? 4 : 2;
  for (size i = 0; i < tensor.bytes.size(); i += width) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, tensor.bytes.data() + i, width);
    if (width == 2) bits <<= 16;
    values.push_back(__builtin_bit_cast(float, bits));
  }
  return values;
}

/// A file of these tensors whose data are a hole of zeros: it takes no room on disk.
inline void write_hollow(const ScratchFolder& folder, const MutableCheckpoint& checkpoint) {
  test::write_file(folder / "config.json", checkpoint.config.dump());
  nlohmann::ordered_json header;
  std::uint64_t end = 0;
  for (const StoredTensor& tensor : checkpoint.tensors) {
    std::uint64_t bytes = tensor.dtype == "F32" ? 4 : tensor.dtype == "BF16" ? 2 : 1;
    for (const size extent : tensor.shape) bytes *= extent;
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  test::write_file(folder / "model.safetensors", test::length_bytes(text.size()) + text);
  std::filesystem::resize_file(folder / "model.safetensors", 8 + text.size() + end);
}

/// Bytes of a file's map that are in this process's memory.
inline size resident_bytes(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  size total = 0;
  while (std::getline(maps, line)) {
    const bool begins = line.find('-') < line.find(' ') && line.find(':') > line.find(' ');
    if (begins) inside = line.ends_with(path);
    if (inside && line.starts_with("Rss:")) total += 1024 * std::stoull(line.substr(4));
  }
  return total;
}

/// Writes packed experts as plain F32 matrices of the same values.
inline void unpack_experts(MutableCheckpoint& checkpoint) {
  std::vector<StoredTensor> tensors;
  for (const StoredTensor& packed : checkpoint.tensors) {
    if (packed.name.ends_with(".weight_scale")) continue;
    tensors.push_back(packed);
    if (!packed.name.ends_with(".weight_packed")) continue;
    const std::string name = packed.name.substr(0, packed.name.size() - 7);
    const StoredTensor& scale = checkpoint.at(name + "_scale");
    std::vector<float> values;
    for (size i = 0; i < 2 * packed.bytes.size(); ++i) {
      const auto byte = static_cast<unsigned char>(packed.bytes[i / 2]);
      const auto code = static_cast<std::uint8_t>(i % 2 == 0 ? byte & 15 : byte >> 4);
      values.push_back(e2m1_value(code) * e8m0_value(static_cast<std::uint8_t>(scale.bytes[i / 32])));
    }
    tensors.back() = {name, "F32", {packed.shape[0], 2 * packed.shape[1]}, bytes_of<float>(values), packed.shard};
  }
  checkpoint.tensors = tensors;
}

}  // namespace k3::test
