// SPDX-License-Identifier: Apache-2.0
// Damaged checkpoints, systematically: whatever is broken, opening ends with an error that says where.
#include <k3/io/checkpoint.hpp>

#include <set>

#include "support/catch.hpp"
#include "support/mutable_checkpoint.hpp"

using namespace k3;
using k3::test::CheckpointFiles;
using k3::test::contains;
using k3::test::MutableCheckpoint;
using k3::test::ScratchFolder;
using k3::test::StoredTensor;
using k3::test::thrown;

namespace {

constexpr const char* index_name = "model.safetensors.index.json";

bool is_vision(const std::string& name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
}

std::string without_wrapper(const std::string& name) {
  return name.starts_with("language_model.") ? name.substr(15) : name;
}

format_error refusal(const ScratchFolder& folder) {
  const format_error problem = thrown<format_error>([&] { from_pretrained(folder.path); });
  CHECK(problem.path().starts_with(folder.path));
  CHECK(std::string(problem.what()).size() < 1000);
  return problem;
}

/// The folder's error must name this file and this tensor ("" for any).
void check_refused(const ScratchFolder& folder, const std::string& file, const std::string& tensor) {
  const format_error problem = refusal(folder);
  INFO(problem.what());
  CHECK(problem.path() == folder / file);
  if (!tensor.empty()) CHECK(contains(problem.what(), tensor));
}

/// The first tensor of each kind.
std::vector<size> one_of_each_kind(const MutableCheckpoint& checkpoint) {
  std::set<std::string> kinds;
  std::vector<size> result;
  for (size i = 0; i < checkpoint.tensors.size(); ++i)
    if (kinds.insert(test::tensor_kind(checkpoint.tensors[i].name)).second) result.push_back(i);
  return result;
}

}  // namespace

TEST_CASE("bad checkpoint: each tensor removed in turn", "[bad]") {
  const std::string fixture = GENERATE("k3-tiny-5l", "kimi-linear-5l");
  const MutableCheckpoint whole(fixture);
  const ScratchFolder folder;
  whole.write(folder);
  for (size i = 0; i < whole.tensors.size(); ++i) {
    const StoredTensor& tensor = whole.tensors[i];
    CAPTURE(tensor.name);
    MutableCheckpoint checkpoint = whole;
    checkpoint.tensors.erase(checkpoint.tensors.begin() + static_cast<std::ptrdiff_t>(i));
    test::replace_file(folder / whole.shard_name(tensor.shard), checkpoint.shard_content(tensor.shard));
    // Removed from the file, but not from the index.
    if (i % 16 == 0) check_refused(folder, whole.shard_name(tensor.shard), tensor.name);
    test::replace_file(folder / index_name, checkpoint.index().dump());
    if (is_vision(tensor.name)) {
      CHECK_NOTHROW(from_pretrained(folder.path));
    } else {
      const format_error problem = refusal(folder);
      INFO(problem.what());
      CHECK(contains(problem.what(), without_wrapper(tensor.name)));
    }
    // Removed from the index, but not from the file.
    test::replace_file(folder / whole.shard_name(tensor.shard), whole.shard_content(tensor.shard));
    if (i % 16 == 0) check_refused(folder, whole.shard_name(tensor.shard), tensor.name);
    test::replace_file(folder / index_name, whole.index().dump());
  }
  CHECK_NOTHROW(from_pretrained(folder.path));
}

TEST_CASE("bad checkpoint: each shard cut off at every structural boundary", "[bad]") {
  const MutableCheckpoint whole("k3-tiny-5l");
  const ScratchFolder folder;
  whole.write(folder);
  for (size shard = 0; shard < whole.shard_count(); ++shard) {
    const std::string name = whole.shard_name(shard), content = whole.shard_content(shard);
    const size data = 8 + whole.header_text(shard).size();
    std::set<size> cuts = {0, 1, 7, 8, 9, 8 + (data - 8) / 2, data - 1, data, content.size() - 1};
    size end = data;
    for (const StoredTensor& tensor : whole.tensors) {
      if (tensor.shard != shard) continue;
      cuts.insert(end);
      end += tensor.bytes.size();
      cuts.insert(end - 1);
    }
    REQUIRE(end == content.size());
    for (const size cut : cuts) {
      CAPTURE(name, cut);
      test::replace_file(folder / name, content.substr(0, cut));
      check_refused(folder, name, "");
    }
    test::replace_file(folder / name, content + '\0');
    check_refused(folder, name, "");
    test::replace_file(folder / name, content);
  }
  CHECK_NOTHROW(from_pretrained(folder.path));
}

TEST_CASE("bad checkpoint: each field of the headers", "[bad]") {
  const std::string fixture = GENERATE("k3-tiny-5l", "kimi-linear-5l");
  const MutableCheckpoint whole(fixture);
  const ScratchFolder folder;
  whole.write(folder);
  for (const size i : one_of_each_kind(whole)) {
    const StoredTensor& tensor = whole.tensors[i];
    const std::string shard = whole.shard_name(tensor.shard);
    const nlohmann::ordered_json header = whole.header(tensor.shard);
    const auto refused = [&](const nlohmann::ordered_json& changed) {
      CAPTURE(changed[tensor.name].dump());
      test::replace_file(folder / shard, whole.shard_content(tensor.shard, changed.dump()));
      check_refused(folder, shard, "");
    };
    const auto with = [&](const char* field, const nlohmann::ordered_json& value) {
      nlohmann::ordered_json changed = header;
      changed[tensor.name][field] = value;
      return changed;
    };
    CAPTURE(tensor.name);
    for (const char* type : {"F64", "BOOL", "F128", "bf16", ""}) {
      // BOOL has the bytes of U8; the loader sees it.
      refused(with("dtype", type));
    }
    refused(with("dtype", nullptr));
    refused(with("shape", nullptr));
    refused(with("data_offsets", nlohmann::ordered_json::array()));
    for (size d = 0; d < tensor.shape.size(); ++d) {
      std::vector<size> shape = tensor.shape;
      ++shape[d];
      refused(with("shape", shape));
      shape[d] = 0;
      refused(with("shape", shape));
      shape[d] = ~size{0};
      refused(with("shape", shape));
    }
    for (const size side : {0u, 1u}) {
      for (const int by : {1, -1}) {
        auto offsets = header[tensor.name]["data_offsets"].get<std::vector<std::int64_t>>();
        offsets[side] += by;
        refused(with("data_offsets", offsets));
      }
    }
    auto moved = header[tensor.name]["data_offsets"].get<std::vector<size>>();
    for (size& offset : moved) ++offset;  // the right length, one byte on
    refused(with("data_offsets", moved));
    for (const char* field : {"dtype", "shape", "data_offsets"}) {
      nlohmann::ordered_json changed = header;
      changed[tensor.name].erase(field);
      refused(changed);
    }
    test::replace_file(folder / shard, whole.shard_content(tensor.shard));
  }
  CHECK_NOTHROW(from_pretrained(folder.path));
}

TEST_CASE("bad checkpoint: sound files with a tensor of another shape or type", "[bad]") {
  const std::string fixture = GENERATE("k3-tiny-5l", "kimi-linear-5l");
  const MutableCheckpoint whole(fixture);
  const ScratchFolder folder;
  whole.write(folder);
  const std::map<std::string, std::string> same_width = {{"BF16", "F16"}, {"F32", "I32"}, {"U8", "I8"}};
  for (const size i : one_of_each_kind(whole)) {
    const StoredTensor& tensor = whole.tensors[i];
    if (is_vision(tensor.name)) continue;
    CAPTURE(tensor.name);
    MutableCheckpoint checkpoint = whole;
    StoredTensor& changed = checkpoint.tensors[i];
    const auto refused = [&] {
      test::replace_file(folder / whole.shard_name(tensor.shard), checkpoint.shard_content(tensor.shard));
      nlohmann::json index = checkpoint.index();
      test::replace_file(folder / index_name, index.dump());
      CAPTURE(changed.dtype, changed.shape);
      check_refused(folder, whole.shard_name(tensor.shard), tensor.name);
      changed = tensor;
    };
    changed.dtype = same_width.at(tensor.dtype);
    refused();
    for (size d = 0; d < tensor.shape.size(); ++d) {
      for (const size extent : {tensor.shape[d] + 1, size{0}}) {
        // A longer A_log with zeros behind is what the released files have.
        if (tensor.name.ends_with("A_log") && tensor.shape.size() == 1 && extent > 0) continue;
        changed.shape[d] = extent;
        changed.bytes.resize(tensor.bytes.size() / tensor.shape[d] * extent);
        refused();
      }
    }
    changed.shape = {};
    changed.bytes.resize(tensor.dtype == "F32" ? 4 : tensor.dtype == "BF16" ? 2 : 1);
    refused();
    test::replace_file(folder / whole.shard_name(tensor.shard), whole.shard_content(tensor.shard));
  }
}

TEST_CASE("bad checkpoint: shards and index that do not fit (case 55)", "[bad]") {
  const MutableCheckpoint whole("k3-tiny-5l");
  const ScratchFolder folder;
  whole.write(folder);
  const std::string first = whole.shard_name(0), second = whole.shard_name(1);

  for (const std::string& shard : {first, second}) {
    std::filesystem::rename(folder / shard, folder / "away");
    const format_error problem = refusal(folder);
    CHECK(contains(problem.what(), shard));
    CHECK(contains(problem.what(), "there is no such file"));
    std::filesystem::create_directory(folder / shard);
    CHECK(contains(refusal(folder).what(), shard));
    std::filesystem::remove(folder / shard);
    std::filesystem::rename(folder / "away", folder / shard);
  }

  nlohmann::json index = whole.index();
  const std::string moved = whole.tensors.front().name;
  index["weight_map"][moved] = second;
  test::replace_file(folder / index_name, index.dump());
  CHECK(contains(refusal(folder).what(), moved));
  index["weight_map"][moved] = "model-00009-of-00002.safetensors";
  test::replace_file(folder / index_name, index.dump());
  CHECK(contains(refusal(folder).what(), "model-00009-of-00002.safetensors"));
  index["weight_map"][moved] = "../" + first;
  test::replace_file(folder / index_name, index.dump());
  CHECK(contains(refusal(folder).what(), "is not a plain file name"));

  for (const char* broken : {"", "{", "[]", "{}", "{\"weight_map\":{}}", "{\"weight_map\":7}", "null"}) {
    CAPTURE(broken);
    test::replace_file(folder / index_name, broken);
    CHECK(refusal(folder).path() == folder / index_name);
  }
  // Without the index all files of the folder count, and the first one twice is one too many.
  std::filesystem::remove(folder / index_name);
  CHECK_NOTHROW(from_pretrained(folder.path));
  std::filesystem::copy_file(folder / first, folder / "other.safetensors");
  CHECK(contains(refusal(folder).what(), "is already in"));
  std::filesystem::remove(folder / "other.safetensors");
  std::filesystem::remove(folder / second);
  CHECK(contains(refusal(folder).what(), "is missing"));
  std::filesystem::remove(folder / first);
  CHECK(contains(refusal(folder).what(), "holds no safetensors file"));
}

TEST_CASE("bad checkpoint: no folder, no config", "[bad]") {
  const ScratchFolder folder;
  for (const std::string& path : {folder / "absent", std::string(), std::string("/dev/null"), std::string("\n")}) {
    CAPTURE(path);
    CHECK_THROWS_AS(from_pretrained(path), format_error);
  }
  const MutableCheckpoint whole("k3-tiny-5l");
  whole.write(folder);
  std::filesystem::remove(folder / "config.json");
  CHECK(contains(refusal(folder).what(), "/config.json: cannot be opened"));
  test::replace_file(folder / "config.json", "{\"model_type\":\"kimi_k3\"");
  CHECK(contains(refusal(folder).what(), "is not valid JSON"));
}
