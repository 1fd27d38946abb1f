// SPDX-License-Identifier: Apache-2.0
// Checkpoints of random weights: the released layout to the byte, and every member of the family made, opened and
// decoded.

#include <k3/io/checkpoint.hpp>
#include <k3/io/checkpoint_writer.hpp>
#include <k3/model/greedy_decode.hpp>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"

namespace {

using k3::test::ScratchFolder;

/// Bytes of the safetensors file that holds these tensors.
std::uint64_t file_bytes(const std::vector<k3::PlannedTensor>& file) {
  std::size_t header = 2;
  std::uint64_t at = 0;
  for (const k3::PlannedTensor& tensor : file) {
    std::string shape;
    for (const k3::size extent : tensor.shape) shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    header += k3::test::entry(tensor.name, std::string(k3::dtype_name(tensor.dtype)), "[" + shape + "]",
                              "[" + std::to_string(at) + "," + std::to_string(at + tensor.bytes()) + "]")
                  .size();
    at += tensor.bytes();
  }
  header += file.size() - 1;
  return 8 + (header + 7) / 8 * 8 + at;
}

/// A member of the family at a size that a test decodes.
k3::RandomCheckpoint small(const std::string& name) {
  const k3::FamilyMember member = k3::family_member(name);
  k3::RandomCheckpoint what{member.config, member.form};
  k3::K3Config& config = what.config;
  config.mixers = k3::detail::family_mixers(5);
  config.vocab_size = 600;
  config.hidden_size = config.moe.hidden = 64;
  config.intermediate_size = 96;
  config.moe.n_routed = 6;
  config.moe.top_k = 3;
  config.moe.expert_hidden = 32;
  if (config.moe.latent > 0) config.moe.latent = 32;
  config.kda.heads = config.mla.heads = 3;
  if (config.attn_res_block_size > 0) config.attn_res_block_size = 2;
  return what;
}

std::vector<k3::id> decode(const std::string& folder) {
  const k3::K3CpuModel model = k3::from_pretrained(folder);
  return k3::greedy_decode(k3::host{}, model, {1, 2, 3}, {.max_new = 8}).tokens;
}

}  // namespace

TEST_CASE("layout: Kimi K3's published files to the byte", "[io][writer]") {
  const k3::FamilyMember k3_model = k3::family_member("kimi-k3");
  const auto files = k3::released_shards(k3_model.config, k3_model.form);
  REQUIRE(files.size() == 94);
  CHECK(file_bytes(files[0]) == 2341216112);
  CHECK(file_bytes(files[1]) == 16990911504);
  CHECK(file_bytes(files[10]) == 16990916912);  // and all KDA layers of two digits
  CHECK(file_bytes(files[90]) == 16990916912);
  const k3::TensorCensus census = k3::planned_census(k3_model.config, k3_model.form);
  const auto of = [](k3::DType type) { return static_cast<std::size_t>(type); };
  CHECK(census.total_tensors() + 168 == 497220);  // 165 + 3 vision tensors
  CHECK(census.tensors[of(k3::DType::u8)] == 494592);
  CHECK(census.tensors[of(k3::DType::bf16)] + 168 == 2122);
  CHECK(census.tensors[of(k3::DType::f32)] == 506);
  CHECK(census.total_bytes() == 1559965606912);
  CHECK(census.total_bytes() + 2 * (401214464 + 46144512) == 1560860324864);
}

TEST_CASE("layout: experts are adjacent, in one block, and not by number", "[io][writer]") {
  const k3::FamilyMember member = k3::family_member("kimi-k3");
  const auto files = k3::released_shards(member.config, member.form);
  std::vector<std::string> order;
  bool began = false, ended = false;
  for (const k3::PlannedTensor& tensor : files[3]) {
    if (tensor.expert) CHECK_FALSE(ended);
    began = began || tensor.expert;
    ended = began && !tensor.expert;
    if (!tensor.expert) continue;
    const std::size_t at = tensor.name.find("experts.") + 8;
    const std::string expert = tensor.name.substr(at, tensor.name.find('.', at) - at);
    if (order.empty() || order.back() != expert) order.push_back(expert);
  }
  CHECK(order.size() == 896);  // so none comes in two stretches
  CHECK(order[1] == "1");
  CHECK(order[2] == "10");
  CHECK(order[3] == "100");
}

TEST_CASE("writer: every member of the family is made, opened and decoded", "[io][writer]") {
  for (const std::string name :
       {"kimi-k3", "kimi-k3-0.40b", "kimi-k3-0.40b-mxfp4", "kimi-k3-tiny-random", "kimi-linear-48b", "tiny"}) {
    INFO(name);
    const k3::RandomCheckpoint what = small(name);
    const ScratchFolder folder, again;
    REQUIRE(k3::write_random_checkpoint(folder.path, what));
    const k3::K3CpuModel model = k3::from_pretrained(folder.path);
    // The config that was read is the one that was written; the end token comes from the vocabulary.
    k3::K3Config read = model.config;
    CHECK(read.eos_token_ids == std::vector<k3::id>{600 - 256 + 2});
    read.eos_token_ids.clear();
    CHECK(k3::config_to_json(read, what.form) == k3::config_to_json(what.config, what.form));
    CHECK(k3::decoder_geometry_from(read) == k3::decoder_geometry_from(what.config));
    const auto tokens = decode(folder.path);
    CHECK(tokens.size() == 8);
    const k3::Tokenizer tokenizer = k3::Tokenizer::from_directory(folder.path);
    CHECK(tokenizer.vocab_size() == 600);
    CHECK(tokenizer.special_id("<|end_of_msg|>") == 346);
    // The same again, and in other files, with other weights.
    k3::RandomCheckpoint other = what;
    other.shards = 3;
    REQUIRE(k3::write_random_checkpoint(again.path, other));
    CHECK(decode(again.path) == tokens);
    CHECK(k3::open_safetensors_set(again.path).files().size() == 3);
    const ScratchFolder third;
    other.seed = 2;
    REQUIRE(k3::write_random_checkpoint(third.path, other));
    CHECK(decode(third.path) != tokens);
  }
}

TEST_CASE("writer: weights are of sensible size and the files what they should be", "[io][writer]") {
  const ScratchFolder folder;
  k3::RandomCheckpoint what = small("kimi-k3");
  REQUIRE(k3::write_random_checkpoint(folder.path, what));
  const k3::Safetensors set = k3::open_safetensors_set(folder.path);
  CHECK(set.files().size() == 6);
  k3::TensorCensus census;
  for (const k3::TensorInfo& tensor : set.tensors()) census.add(tensor.dtype, tensor.bytes());
  CHECK(census == k3::planned_census(what.config, what.form));
  const k3::TensorInfo& a_log = set.at("language_model.model.layers.0.self_attn.A_log");
  CHECK(a_log.elements() == 128);
  const auto values = set.view<float, 1>(a_log);
  CHECK(values(2) > 0);
  CHECK(values(3) == 0);
  const auto gate = set.view<k3::bf16, 2>(set.at("language_model.model.layers.0.mlp.gate_proj.weight"));
  double sum = 0, squares = 0;
  for (std::size_t row = 0; row < 96; ++row)
    for (std::size_t column = 0; column < 64; ++column) {
      const double value = static_cast<double>(static_cast<float>(gate(row, column)));
      sum += value, squares += value * value;
    }
  CHECK(std::abs(sum / 6144) < 0.005);
  CHECK(std::abs(std::sqrt(squares / 6144) - 0.125) < 0.005);
}

TEST_CASE("writer: codes at random where a matrix is large", "[io][writer]") {
  const k3::K3Config config = k3::family_member("kimi-k3").config;
  const k3::PlannedTensor packed{"m.experts.0.w1.weight_packed", k3::DType::u8, {3072, 1792}, 1, true};
  const k3::PlannedTensor scale{"m.experts.0.w1.weight_scale", k3::DType::u8, {3072, 112}, 1, true};
  std::vector<std::byte> codes(1792 * 4), scales(112 * 4), part(1792);
  k3::detail::RandomTensor(packed, config, 1).fill(0, codes.data(), codes.size());
  k3::detail::RandomTensor(scale, config, 1).fill(0, scales.data(), scales.size());
  k3::detail::RandomTensor(packed, config, 1).fill(1792 * 2, part.data(), part.size());
  CHECK(std::equal(part.begin(), part.end(), codes.begin() + 1792 * 2));
  double squares = 0;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const int byte = std::to_integer<int>(codes[i]), exponent = std::to_integer<int>(scales[i / 16]) - 127;
    for (const int code : {byte & 15, byte >> 4})
      squares +=
          std::pow(std::ldexp(static_cast<double>(k3::e2m1_value(static_cast<std::uint8_t>(code))), exponent), 2);
  }
  const double deviation = std::sqrt(squares / static_cast<double>(2 * codes.size())), wanted = 1 / std::sqrt(3584.0);
  CAPTURE(deviation, wanted);
  CHECK(deviation > wanted / 1.6);
  CHECK(deviation < wanted * 1.6);
}

TEST_CASE("writer: nothing is overwritten, nothing half-written stays", "[io][writer]") {
  const ScratchFolder folder;
  const k3::RandomCheckpoint what = small("tiny");
  k3::test::write_file(folder / "mine", "x");
  CHECK(k3::test::contains(
      k3::test::thrown<k3::format_error>([&] { k3::write_random_checkpoint(folder.path, what); }).what(),
      "not an empty folder"));
  CHECK(k3::test::contains(
      k3::test::thrown<k3::format_error>([&] { k3::write_random_checkpoint(folder / "mine", what); }).what(),
      "not an empty folder"));
  CHECK(folder.names().size() == 1);
  const std::string stopped = folder / "stopped";
  CHECK_FALSE(
      k3::write_random_checkpoint(stopped, what, [](std::uint64_t done, std::uint64_t of) { return done < of / 2; }));
  CHECK(std::filesystem::is_empty(stopped));
  k3::RandomCheckpoint huge = {k3::family_member("kimi-k3").config, k3::family_member("kimi-k3").form};
  huge.config.mixers = k3::detail::family_mixers(10000);
  huge.config.moe.n_routed = 2;
  huge.config.intermediate_size = 1 << 30;
  huge.config.first_k_dense_replace = 10000;
  CHECK(k3::test::contains(
      k3::test::thrown<k3::format_error>([&] { k3::write_random_checkpoint(folder / "huge", huge); }).what(), "free"));
  k3::RandomCheckpoint odd = what;
  odd.config.moe.expert_hidden = 40;
  CHECK_THROWS_AS(k3::write_random_checkpoint(folder / "odd", odd), k3::invalid_argument);
  k3::RandomCheckpoint narrow = what;
  narrow.config.vocab_size = 511;
  CHECK_THROWS_AS(k3::write_random_checkpoint(folder / "narrow", narrow), k3::invalid_argument);
  // Numbers that would first fill the memory: what cannot be read again is not begun.
  k3::RandomCheckpoint many = what;
  many.config.moe.n_routed = 0x7fffffff;
  CHECK(k3::test::contains(
      k3::test::thrown<k3::invalid_argument>([&] { k3::write_random_checkpoint(folder / "many", many); }).what(),
      "expected at most 1048576"));
  for (const k3::size vocabulary : {k3::size{0x7fffffff}, k3::size{17100000}}) {
    k3::RandomCheckpoint wide = what;
    wide.config.vocab_size = vocabulary;
    CHECK_THROWS_AS(k3::write_random_checkpoint(folder / "wide", wide), k3::invalid_argument);
  }
  CHECK_THROWS_AS(k3::family_member("kimi-k4"), k3::invalid_argument);
}
