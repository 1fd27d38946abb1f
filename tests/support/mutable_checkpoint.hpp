// SPDX-License-Identifier: Apache-2.0
#pragma once
// A checkpoint in memory, read and written without the library's own reader and writer, so that a test can change
// anything.

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "io/safetensors_support.hpp"
#include "support/data.hpp"

namespace k3::test {

/// Writes a file anew. Some file systems wait for the disk where an existing one is cut off and written again.
inline void replace_file(const std::string& path, const std::string& content) {
  std::filesystem::remove(path);
  write_file(path, content);
}

struct StoredTensor {
  std::string name, dtype;
  std::vector<std::size_t> shape;
  std::string bytes;
  std::size_t shard = 0;
};

/// How the files of a checkpoint are laid out.
enum class CheckpointFiles {
  indexed,  ///< shards and an index
  bare,     ///< shards, no index
  single    ///< model.safetensors
};

class MutableCheckpoint {
 public:
  nlohmann::json config;
  std::optional<nlohmann::json> generation;
  std::vector<StoredTensor> tensors;
  std::size_t extra_spaces = 0;  ///< behind each header: 1 moves every tensor to an odd address

  MutableCheckpoint() = default;
  /// The checkpoint `name` of tests/data.
  explicit MutableCheckpoint(const std::string& name) {
    const std::string folder = data_path(name);
    config = nlohmann::json::parse(read_file(folder + "/config.json"));
    const auto index = nlohmann::json::parse(read_file(folder + "/model.safetensors.index.json"));
    std::map<std::string, std::size_t> shards;
    for (const auto& [tensor, shard] : index.at("weight_map").items()) shards.emplace(shard.get<std::string>(), 0);
    std::size_t number = 0;
    for (const auto& [shard, unused] : shards) read_shard(read_file(folder + "/" + shard), number++);
  }

  /// The text settings, wrapped or bare.
  nlohmann::json& text() { return config.contains("text_config") ? config["text_config"] : config; }

  StoredTensor& at(const std::string& name) {
    for (StoredTensor& tensor : tensors)
      if (tensor.name == name) return tensor;
    FAIL("the checkpoint has no tensor " << name);
    std::abort();
  }
  void remove(const std::string& name) {
    const StoredTensor* const tensor = &at(name);
    tensors.erase(tensors.begin() + (tensor - tensors.data()));
  }
  void rename(const std::function<std::string(const std::string&)>& to) {
    for (StoredTensor& tensor : tensors) tensor.name = to(tensor.name);
  }

  std::size_t shard_count() const {
    std::size_t count = 0;
    for (const StoredTensor& tensor : tensors) count = std::max(count, tensor.shard + 1);
    return count;
  }
  std::string shard_name(std::size_t shard) const {
    return "model-0000" + std::to_string(shard + 1) + "-of-0000" + std::to_string(shard_count()) + ".safetensors";
  }

  /// The header of a shard (or, `all`, of all tensors in one file) as a tree.
  nlohmann::ordered_json header(std::size_t shard, bool all = false) const {
    nlohmann::ordered_json result = {{"__metadata__", {{"format", "pt"}}}};
    std::size_t begin = 0;
    for (const StoredTensor& tensor : tensors) {
      if (!all && tensor.shard != shard) continue;
      const std::size_t end = begin + tensor.bytes.size();
      result[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
      begin = end;
    }
    return result;
  }
  std::string header_text(std::size_t shard, bool all = false) const {
    std::string text = header(shard, all).dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text + std::string(extra_spaces, ' ');
  }
  std::string shard_content(std::size_t shard, const std::string& header, bool all = false) const {
    std::string content = length_bytes(header.size()) + header;
    for (const StoredTensor& tensor : tensors)
      if (all || tensor.shard == shard) content += tensor.bytes;
    return content;
  }
  std::string shard_content(std::size_t shard) const { return shard_content(shard, header_text(shard)); }

  nlohmann::json index() const {
    nlohmann::json map = nlohmann::json::object();
    std::size_t total = 0;
    for (const StoredTensor& tensor : tensors) {
      map[tensor.name] = shard_name(tensor.shard);
      total += tensor.bytes.size();
    }
    return {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  }

  void write(const ScratchFolder& folder, CheckpointFiles files = CheckpointFiles::indexed) const {
    write_file(folder / "config.json", config.dump(1));
    if (generation) write_file(folder / "generation_config.json", generation->dump());
    if (files == CheckpointFiles::single)
      return write_file(folder / "model.safetensors", shard_content(0, header_text(0, true), true));
    for (std::size_t shard = 0; shard < shard_count(); ++shard)
      write_file(folder / shard_name(shard), shard_content(shard));
    if (files == CheckpointFiles::indexed) write_file(folder / "model.safetensors.index.json", index().dump(1));
  }

 private:
  void read_shard(const std::string& content, std::size_t shard) {
    std::uint64_t length = 0;
    std::memcpy(&length, content.data(), sizeof length);
    const auto header = nlohmann::ordered_json::parse(content.substr(8, length));
    std::map<std::size_t, StoredTensor> by_place;
    for (const auto& [name, fields] : header.items()) {
      if (name == "__metadata__") continue;
      const auto begin = fields.at("data_offsets").at(0).get<std::size_t>();
      const auto end = fields.at("data_offsets").at(1).get<std::size_t>();
      by_place[begin] = {name, fields.at("dtype").get<std::string>(),
                         fields.at("shape").get<std::vector<std::size_t>>(),
                         content.substr(8 + length + begin, end - begin), shard};
    }
    for (auto& [begin, tensor] : by_place) tensors.push_back(std::move(tensor));
  }
};

/// The kind of a tensor: its name with every number replaced by N.
inline std::string tensor_kind(const std::string& name) {
  std::string kind;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const bool number = name[i] >= '0' && name[i] <= '9' && i > 0 && (name[i - 1] == '.' || kind.back() == 'N');
    if (!number)
      kind += name[i];
    else if (kind.back() != 'N')
      kind += 'N';
  }
  return kind;
}

}  // namespace k3::test
