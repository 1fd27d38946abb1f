// SPDX-License-Identifier: Apache-2.0
// Kimi K3 at its true size: 96 files, 497,220 tensors, 1.56 TB, as hollow files that take no room.

#include <sys/mman.h>

#include <memory>

#include <k3/io/checkpoint.hpp>
#include <k3/io/checkpoint_writer.hpp>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"

namespace {

using k3::test::contains;
using k3::test::ScratchFolder;
using k3::test::thrown;

struct FullModel {
  ScratchFolder folder;

  explicit FullModel(const std::filesystem::path& parent) : folder(parent) {
    const k3::FamilyMember member = k3::family_member("kimi-k3");
    k3::RandomCheckpoint what{member.config, member.form};
    what.vision = true;
    what.hollow = true;
    k3::write_random_checkpoint(folder.path, what);
  }
  std::string shard(int number) const {
    const std::string digits = std::to_string(number);
    return folder / ("model-" + std::string(5 - digits.size(), '0') + digits + "-of-00096.safetensors");
  }
};

/// In the folder for temporary files or, where that file system has no hollow files of 17 GB (FAT), in memory; null and
/// what the systems said where neither has.
std::unique_ptr<const FullModel> made(std::string& said) {
  using Parents = std::initializer_list<std::filesystem::path>;
  for (const auto& parent : Parents{std::filesystem::temp_directory_path(), "/dev/shm"}) try {
      if (std::filesystem::is_directory(parent)) return std::make_unique<const FullModel>(parent);
    } catch (const k3::format_error& problem) {
      said += std::string("\n") + problem.what();
    }
  return nullptr;
}

/// Made once. A test fails where it cannot be made.
const FullModel& full() {
  static std::string said;
  static const std::unique_ptr<const FullModel> model = made(said);
  if (!model)
    FAIL("no hollow files of 17 GB can be made: let TMPDIR be a folder of a file system that has them" << said);
  return *model;
}

/// Whether the page of this address is in the system's file cache.
bool resident(const std::byte* address) {
  const auto page = reinterpret_cast<std::uintptr_t>(address) / 4096 * 4096;
  unsigned char flag = 0;
  REQUIRE(::mincore(reinterpret_cast<void*>(page), 1, &flag) == 0);
  return (flag & 1) != 0;
}

}  // namespace

TEST_CASE("full scale: the published numbers", "[io][full]") {
  CHECK(std::filesystem::file_size(full().shard(1)) == 2341216112);
  CHECK(std::filesystem::file_size(full().shard(2)) == 16990911504);
  CHECK(std::filesystem::file_size(full().shard(50)) == 16990916912);
  const k3::Safetensors set = k3::open_safetensors_set(full().folder.path);
  CHECK(set.files().size() == 96);
  CHECK(set.tensors().size() == 497220);
  CHECK(set.total_bytes() == 1560860324864);
  // Opening reads headers and nothing else.
  const std::byte* const begin = set.files()[1].data();
  CHECK(begin[8] == std::byte{'{'});
  CHECK(resident(begin));
  std::size_t touched = 0;
  for (const k3::MappedFile& file : set.files())
    for (std::size_t part = 1; part < 16; ++part) touched += resident(file.data() + file.bytes() / 16 * part);
  CHECK(touched == 0);
}

TEST_CASE("full scale: the whole model opens and no expert is read", "[io][full]") {
  const auto set = std::make_shared<const k3::Safetensors>(k3::open_safetensors_set(full().folder.path));
  const k3::K3CpuModel model = k3::from_pretrained(full().folder.path, set);
  CHECK(model.weights.layers.size() == 93);
  CHECK(model.weights.layers[92].experts->size() == 896);
  CHECK(model.config.eos_token_ids == std::vector<k3::id>{163586});
  std::size_t touched = 0;
  for (const k3::TensorInfo& tensor : set->tensors())
    if (contains(std::string(tensor.name), "experts.895.w2.weight_packed"))
      touched += resident(set->data(tensor) + tensor.bytes() / 2);
  CHECK(touched == 0);
}

TEST_CASE("full scale: a partial download is found by size", "[io][full]") {
  const std::string last = full().shard(93), whole = last + ".whole";
  const std::uintmax_t bytes = std::filesystem::file_size(last);
  std::filesystem::resize_file(last, bytes - 1);
  const auto cut = thrown<k3::format_error>([] { k3::open_safetensors_set(full().folder.path); });
  CHECK(cut.path() == last);
  CHECK(contains(cut.what(), "end beyond the file"));
  std::filesystem::resize_file(last, bytes);
  std::filesystem::rename(last, whole);
  const auto absent = thrown<k3::format_error>([] { k3::open_safetensors_set(full().folder.path); });
  CHECK(absent.path() == last);
  CHECK(contains(absent.what(), "there is no such file"));
  std::filesystem::rename(whole, last);
  CHECK(k3::open_safetensors_set(full().folder.path).tensors().size() == 497220);
}
