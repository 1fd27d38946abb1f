// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/statvfs.h>

#include <filesystem>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include <k3/core/execution.hpp>
#include <k3/io/checkpoint_fill.hpp>
#include <k3/io/config_writer.hpp>
#include <k3/io/safetensors_set.hpp>
#include <k3/io/safetensors_writer.hpp>
#include <k3/io/tokenizer.hpp>
#include <k3/io/tokenizer_writer.hpp>

namespace k3 {

/// What write_random_checkpoint writes.
struct RandomCheckpoint {
  K3Config config;
  CheckpointForm form{};
  std::uint64_t seed = 1;
  size shards = 0;                 ///< files; 0: the released split, one a layer and one for the rest
  bool vision = false;             ///< two more files of stand-ins for the vision tower and its projector
  bool hollow = false;             ///< files of the right length without data, which read as zeros and take no room
  std::string tokenizer_folder{};  ///< where tiktoken.model and tokenizer_config.json come from; empty: made up
};

/// Called while a checkpoint is written, with the bytes made so far; the last block of a file may still be on its way.
/// Returning false ends the writing.
using WriteProgress = std::function<bool(std::uint64_t bytes, std::uint64_t of)>;

namespace detail {

/// Stand-ins for the released model's 3 tensors of the projector and 165 of the vision tower, with their bytes.
inline std::vector<std::vector<PlannedTensor>> vision_shards() {
  std::vector<std::vector<PlannedTensor>> files(2);
  for (const size elements : {size{4608}, size{4608}, size{46144512 - 2 * 4608}})
    files[0].push_back({"mm_projector.stand_in." + std::to_string(files[0].size()), DType::bf16, {elements}});
  constexpr size even = 401214464 / 165;
  for (size i = 0; i < 165; ++i)
    files[1].push_back(
        {"vision_tower.stand_in." + std::to_string(i), DType::bf16, {i < 164 ? even : 401214464 - 164 * even}});
  return files;
}

inline void write_text_file(const std::string& path, const std::string& text) {
  PartFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

/// Throws unless the folder is new or empty and its disk has room for `bytes`. Makes the folder.
inline void prepare_folder(const std::string& folder, std::uint64_t bytes) {
  std::error_code problem;
  if (exists(folder)) {
    if (!std::filesystem::is_directory(folder, problem) || !std::filesystem::is_empty(folder, problem) || problem)
      throw format_error(folder, "", "exists and is not an empty folder; nothing is ever overwritten");
  } else if (!std::filesystem::create_directories(folder, problem) || problem) {
    throw format_error(folder, "", "the folder cannot be made: " + problem.message());
  }
  struct statvfs disk{};
  if (::statvfs(folder.c_str(), &disk) != 0) throw format_error(folder, "", "its disk cannot be examined");
  const std::uint64_t free = std::uint64_t{disk.f_bavail} * disk.f_frsize;
  if (bytes > free)
    throw format_error(
        folder, "",
        "needs " + std::to_string(bytes) + " bytes, but its disk has only " + std::to_string(free) + " free");
}

/// Both tokenizer files, and the ids at which the model's messages end.
struct TokenizerFiles {
  std::string model, config;
  std::vector<id> ends;
};

inline TokenizerFiles tokenizer_files(const RandomCheckpoint& what) {
  TokenizerFiles files;
  if (what.tokenizer_folder.empty()) {
    require(what.config.vocab_size >= 512, "write_random_checkpoint", "vocab_size", what.config.vocab_size,
            "at least 512: 256 bytes and 256 reserved ids");
    const size ranks = what.config.vocab_size - reserved_ids;
    files.model = tiktoken_text(made_up_vocabulary(ranks));
    files.config = tokenizer_config_text(kimi_k3_specials(static_cast<id>(ranks)));
    files.ends = {static_cast<id>(ranks + 2)};
    return files;
  }
  const Tokenizer tokenizer = Tokenizer::from_directory(what.tokenizer_folder);
  require(tokenizer.vocab_size() <= what.config.vocab_size, "write_random_checkpoint", "the tokenizer's ids",
          tokenizer.vocab_size(), "at most vocab_size");
  files.model = read_small_file(what.tokenizer_folder + "/tiktoken.model", std::uint64_t{256} << 20);
  files.config = read_small_file(what.tokenizer_folder + "/tokenizer_config.json", std::uint64_t{16} << 20);
  for (const char* name : {"<|end_of_msg|>", "[EOS]"})
    if (const std::optional<id> end = tokenizer.special_id(name); end && files.ends.empty()) files.ends = {*end};
  return files;
}

inline void check_random(const RandomCheckpoint& what) {
  check(what.config, "write_random_checkpoint");
  // The released model has half a million; all are planned in memory before the first is written.
  const size layers = what.config.mixers.size() - what.config.first_k_dense_replace;
  const size experts = layers * what.config.moe.n_routed, most = size{1} << 20;
  require(experts <= most, "write_random_checkpoint", "the number of experts of all layers", experts,
          "at most " + std::to_string(most));
  const bool groups =
      what.config.moe.expert_hidden % mxfp4_group == 0 && moe_expert_width(what.config.moe) % mxfp4_group == 0;
  const bool any = what.config.first_k_dense_replace < what.config.mixers.size();
  require(!what.form.mxfp4 || !any || groups, "write_random_checkpoint", "an expert's width", "not a multiple of 32",
          "multiples of 32, as MXFP4 needs");
}

/// Writes one block while the next one is filled.
class WriteBehind {
 public:
  explicit WriteBehind(SafetensorsSetWriter& writer) : writer_(writer) {}

  /// At least `bytes` that nothing is being written from.
  std::byte* block(size bytes) {
    std::vector<std::byte>& block = blocks_[next_];
    if (block.size() < bytes) block.resize(bytes);
    return block.data();
  }
  /// Begins to write the next bytes of tensor `name`, which stays, from the block. Throws what the one before threw.
  void write(const std::string& name, size bytes) {
    finish();
    const std::byte* const from = blocks_[next_].data();
    next_ = 1 - next_;
    writing_ = std::async([this, &name, from, bytes] { writer_.write(name, from, bytes); });
  }
  void finish() {
    if (writing_.valid()) writing_.get();
  }

 private:
  SafetensorsSetWriter& writer_;
  std::vector<std::byte> blocks_[2];
  size next_ = 0;
  std::future<void> writing_;  // goes first: waits
};

/// One tensor, in blocks of about 8 MB that several threads fill.
template <class Written>
void write_random_tensor(WriteBehind& behind, const RandomCheckpoint& what, const PlannedTensor& tensor,
                         Written&& written) {
  const RandomTensor values(tensor, what.config, what.seed);
  const std::uint64_t bytes = tensor.bytes();
  const size step = values.step(), most = larger((size{8} << 20) / step, size{1}) * step;
  for (std::uint64_t at = 0; at < bytes;) {
    const size count = static_cast<size>(smaller<std::uint64_t>(most, bytes - at));
    std::byte* const block = behind.block(count);
    parallel_chunks(host{}, (count + step - 1) / step, 1, count * 16, [&](size first, size last) {
      const size begin = first * step, end = smaller(last * step, count);
      values.fill(at + begin, block + begin, end - begin);
    });
    behind.write(tensor.name, count);
    at += count;
    written(count);
  }
}

}  // namespace detail

/// Writes a checkpoint of random weights in the released layout: the files that released_shards says, without metadata,
/// the index, config.json, generation_config.json and both tokenizer files. Weights have the deviation 1 /
/// sqrt(inputs), norms lie around 1; MXFP4 experts are quantised, or above 2^20 weights a matrix random codes. The same
/// call writes the same bytes everywhere. Holds no tensor: twice 8 MB at a time. Files get their names when all are
/// whole. Returns false, with nothing left behind, where `progress` did. Throws format_error where the folder is
/// neither new nor empty, the disk has not the room, or a write fails, and invalid_argument for a config that cannot be
/// a checkpoint. Cost: about 0.9 GB/s on two cores and 2 GB/s on sixteen, or what the disk takes.
inline bool write_random_checkpoint(const std::string& folder, const RandomCheckpoint& what,
                                    const WriteProgress& progress = {}) {
  detail::check_random(what);
  const detail::TokenizerFiles tokenizer = detail::tokenizer_files(what);
  std::vector<std::vector<PlannedTensor>> files = released_shards(what.config, what.form, what.shards);
  if (what.vision)
    for (auto& file : detail::vision_shards()) files.push_back(std::move(file));
  SafetensorsOptions options;
  options.metadata.clear();
  options.hollow = what.hollow;
  SafetensorsSetWriter writer(folder, ~std::uint64_t{0}, options);
  std::uint64_t total = 0, headers = tokenizer.model.size() + tokenizer.config.size() + 65536, done = 0;
  for (const auto& file : files) {
    writer.next_shard();
    for (const PlannedTensor& tensor : file) {
      writer.declare(tensor.name, tensor.dtype, tensor.shape);
      total += tensor.bytes();
      headers += 2 * tensor.name.size() + 160;
    }
  }
  detail::prepare_folder(folder, (what.hollow ? 0 : total) + headers);
  detail::WriteBehind behind(writer);
  bool wanted = true;
  for (const auto& file : files)
    for (const PlannedTensor& tensor : file) {
      if (what.hollow) continue;
      detail::write_random_tensor(behind, what, tensor, [&](size count) {
        done += count;
        wanted = wanted && (!progress || progress(done, total));
      });
      if (!wanted) return false;
    }
  behind.finish();
  writer.finish();
  K3Config config = what.config;
  config.eos_token_ids = tokenizer.ends;
  nlohmann::ordered_json generation = {{"max_length", config.max_position_embeddings}};
  if (!tokenizer.ends.empty()) generation["eos_token_id"] = tokenizer.ends[0];
  detail::write_text_file(folder + "/tiktoken.model", tokenizer.model);
  detail::write_text_file(folder + "/tokenizer_config.json", tokenizer.config);
  detail::write_text_file(folder + "/generation_config.json", generation.dump(2) + "\n");
  detail::write_text_file(folder + "/config.json", config_to_json(config, what.form).dump(2) + "\n");
  return true;
}

}  // namespace k3
