// SPDX-License-Identifier: Apache-2.0
#include <k3/io/safetensors.hpp>
#include <k3/io/safetensors_writer.hpp>

#include <cstring>
#include <numeric>
#include <unordered_map>

#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"
#include "support/data.hpp"

using namespace k3;
using namespace k3::test;

namespace {

struct Sample {
  std::string name;
  DType dtype;
  std::vector<size> shape;
};

// Every type, every rank, empty tensors, names that need escapes.
std::vector<Sample> samples() {
  std::vector<Sample> result;
  for (size type = 0; type < detail::dtype_count; ++type)
    result.push_back({"type." + std::to_string(type), static_cast<DType>(type), {3, 2}});
  std::vector<size> shape;
  for (size rank = 0; rank <= max_tensor_rank; ++rank) {
    result.push_back({"rank." + std::to_string(rank), DType::i16, shape});
    shape.push_back(1 + rank % 3);
  }
  result.push_back({"empty", DType::f32, {4, 0, 5}});
  result.push_back({"empty again", DType::f64, {0}});
  result.push_back({"quote\" back\\slash \n tab\t \xce\xb1\xe2\x82\xac\xf0\x9f\x98\x80", DType::u8, {7}});
  result.push_back({"", DType::u8, {1}});
  return result;
}

size bytes_of(const Sample& sample) {
  return std::accumulate(sample.shape.begin(), sample.shape.end(), dtype_bytes(sample.dtype), std::multiplies<>());
}

void write_samples(const std::string& path, const SafetensorsOptions& options) {
  SafetensorsWriter writer(path, options);
  for (const Sample& sample : samples()) writer.declare(sample.name, sample.dtype, sample.shape);
  unsigned seed = 0;
  for (const Sample& sample : samples()) {
    const std::vector<std::uint8_t> data = pattern(bytes_of(sample), seed++);
    writer.write(sample.name, data.data(), data.size());
  }
  writer.finish();
}

void check_samples(const Safetensors& file) {
  const std::vector<Sample> expected = samples();
  REQUIRE(file.tensors().size() == expected.size());
  std::uint64_t total = 0;
  for (unsigned i = 0; i < expected.size(); ++i) {
    CAPTURE(expected[i].name);
    const TensorInfo& tensor = file.at(expected[i].name);
    CHECK(&tensor == &file.tensors()[i]);
    CHECK(tensor.name == expected[i].name);
    CHECK(tensor.dtype == expected[i].dtype);
    CHECK(std::vector<size>(tensor.shape.begin(), tensor.shape.end()) == expected[i].shape);
    REQUIRE(tensor.bytes() == bytes_of(expected[i]));
    CHECK(tensor.elements() == tensor.bytes() / dtype_bytes(tensor.dtype));
    const std::vector<std::uint8_t> data = pattern(tensor.bytes(), i);
    CHECK((data.empty() || std::memcmp(file.data(tensor), data.data(), data.size()) == 0));
    total += tensor.bytes();
  }
  CHECK(file.total_bytes() == total);
  CHECK(file.find("type") == nullptr);
  CHECK(file.find("type.999") == nullptr);
}

}  // namespace

TEST_CASE("safetensors: what was written is read", "[safetensors]") {
  const test::ScratchFolder folder;
  SafetensorsOptions options;
  SECTION("padded") {}
  SECTION("not padded") { options.pad = false; }
  SECTION("odd addresses") { options.extra_spaces = 1; }
  SECTION("no metadata") { options.metadata.clear(); }
  SECTION("metadata with escapes") { options.metadata = {{"a\"b", "c\\d\n"}, {"", ""}}; }
  write_samples(folder / "x.safetensors", options);
  CHECK(folder.names() == std::vector<std::string>{"x.safetensors"});
  const Safetensors file = open_safetensors(folder / "x.safetensors");
  CHECK(file.path() == folder / "x.safetensors");
  check_samples(file);
  const std::uint64_t data_begin = file.tensors()[0].begin;
  if (options.pad) CHECK(data_begin % 8 == options.extra_spaces);
}

TEST_CASE("safetensors: a file without tensors", "[safetensors]") {
  const test::ScratchFolder folder;
  SafetensorsWriter(folder / "x.safetensors").finish();
  CHECK(open_safetensors(folder / "x.safetensors").tensors().empty());
  test::write_file(folder / "y.safetensors", test::file_content("{}", 0));
  CHECK(open_safetensors(folder / "y.safetensors").find("a") == nullptr);
}

TEST_CASE("safetensors: moving keeps tensors and data where they are", "[safetensors]") {
  const test::ScratchFolder folder;
  write_samples(folder / "x.safetensors", {});
  Safetensors first = open_safetensors(folder / "x.safetensors");
  const TensorInfo* const tensor = first.find("type.3");
  const std::byte* const data = first.data(*tensor);
  const Safetensors second = std::move(first);
  CHECK(second.find("type.3") == tensor);
  CHECK(second.data(*tensor) == data);
  check_samples(second);
  Safetensors third = open_safetensors(folder / "x.safetensors");
  third = open_safetensors(folder / "x.safetensors");
  check_samples(third);
}

TEST_CASE("safetensors: typed views and alignment (case 58)", "[safetensors]") {
  const test::ScratchFolder folder;
  const size extra = GENERATE(size{0}, size{1}, size{2}, size{4});
  CAPTURE(extra);
  const std::vector<float> floats = {1.5f, -2.25f, 3e-39f, 4.0f, 5.0f, -0.0f};
  const std::vector<bf16> halves = {bf16(1.0f), bf16(-3.0f), bf16(0.5f)};
  const std::vector<std::uint8_t> bytes = {0, 127, 255, 1, 2};
  SafetensorsOptions options;
  options.extra_spaces = extra;
  SafetensorsWriter writer(folder / "x.safetensors", options);
  writer.declare("f", DType::f32, {2, 3});
  writer.declare("h", DType::bf16, {3, 1, 1});
  writer.declare("b", DType::f8_e8m0, {5});
  writer.write("f", floats.data(), 24);
  writer.write("h", halves.data(), 6);
  writer.write("b", bytes.data(), 5);
  writer.finish();

  const Safetensors file = open_safetensors(folder / "x.safetensors");
  const TensorInfo &f = file.at("f"), &h = file.at("h"), &b = file.at("b");
  CHECK(file.aligned<float>(f) == (extra % 4 == 0));
  CHECK(file.aligned<bf16>(h) == (extra % 2 == 0));
  CHECK(file.aligned<std::uint8_t>(b));
  std::vector<float> copied(6);
  std::memcpy(copied.data(), file.data(f), 24);
  CHECK(std::memcmp(copied.data(), floats.data(), 24) == 0);
  const auto scale = file.view<std::uint8_t, 1>(b);
  for (size i = 0; i < 5; ++i) CHECK(scale(i) == bytes[i]);
  if (extra % 4 == 0) {
    const auto matrix = file.view<float, 2>(f);
    CHECK(matrix.contiguous());
    for (size i = 0; i < 2; ++i)
      for (size j = 0; j < 3; ++j) CHECK(matrix(i, j) == floats[3 * i + j]);
  } else {
    const auto problem = thrown<format_error>([&] { file.view<float, 2>(f); });
    CHECK(problem.tensor() == "f");
    CHECK(problem.offset() == f.begin);
    CHECK(contains(problem.what(), "not aligned"));
  }
  if (extra % 2 == 0) CHECK(static_cast<float>(file.view<bf16, 3>(h)(1, 0, 0)) == -3.0f);

  CHECK(contains(thrown<format_error>([&] { file.view<double, 2>(f); }).what(), "x.safetensors: f: has dtype F32"));
  CHECK(contains(thrown<format_error>([&] { file.view<float, 1>(f); }).what(), "f: has shape [2, 3], expected 1"));
  CHECK(contains(thrown<format_error>([&] { file.view<float, 1>(b); }).what(), "b: has dtype F8_E8M0"));
  const auto absent = thrown<format_error>([&] { file.at("g"); });
  CHECK(absent.tensor() == "g");
  CHECK(absent.path() == folder / "x.safetensors");
}

TEST_CASE("safetensors: a type holds the C++ types of its layout only", "[safetensors]") {
  CHECK(holds<float>(DType::f32));
  CHECK_FALSE(holds<float>(DType::u32));
  CHECK(holds<bf16>(DType::bf16));
  CHECK_FALSE(holds<bf16>(DType::f16));
  CHECK(holds<std::uint8_t>(DType::f8_e4m3));
  CHECK_FALSE(holds<std::uint8_t>(DType::boolean));
  CHECK_FALSE(holds<char>(DType::u8));
  const std::string names[] = {"BOOL", "U8",  "I8",  "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16",
                               "BF16", "I32", "U32", "F32",     "C64",     "F64",     "I64", "U64"};
  for (size i = 0; i < detail::dtype_count; ++i) CHECK(dtype_name(static_cast<DType>(i)) == names[i]);
}

TEST_CASE("safetensors: the fixture of single operations is read as a JSON tree shows it", "[safetensors]") {
  const std::string path = test::data_path("ops/ops.safetensors");
  const std::string content = test::read_file(path);
  std::uint64_t length = 0;
  std::memcpy(&length, content.data(), 8);
  nlohmann::json tree = nlohmann::json::parse(content.substr(8, length));
  tree.erase("__metadata__");
  const Safetensors file = open_safetensors(path);
  REQUIRE(file.tensors().size() == tree.size());
  REQUIRE(tree.size() > 10);
  for (const auto& [name, fields] : tree.items()) {
    CAPTURE(name);
    const TensorInfo& tensor = file.at(name);
    CHECK(dtype_name(tensor.dtype) == fields["dtype"].get<std::string>());
    CHECK(std::vector<size>(tensor.shape.begin(), tensor.shape.end()) == fields["shape"].get<std::vector<size>>());
    CHECK(tensor.begin == 8 + length + fields["data_offsets"][0].get<size>());
    CHECK(tensor.end == 8 + length + fields["data_offsets"][1].get<size>());
  }
}

TEST_CASE("safetensors: a hundred thousand tensors", "[safetensors]") {
  const test::ScratchFolder folder;
  const size count = 100'000;
  const auto name = [](size i) {
    return "model.layers.7.block_sparse_moe.experts." + std::to_string(i) + ".w1.weight_scale";
  };
  SafetensorsWriter writer(folder / "x.safetensors");
  for (size i = 0; i < count; ++i) writer.declare(name(i), DType::u8, {1, 1 + i % 3});
  const std::uint8_t data[3] = {1, 2, 3};
  for (size i = 0; i < count; ++i) writer.write(name(i), data, 1 + i % 3);
  writer.finish();
  const Safetensors file = open_safetensors(folder / "x.safetensors");
  REQUIRE(file.tensors().size() == count);
  size wrong = 0;
  for (size i = 0; i < count; ++i) {
    const TensorInfo* const tensor = file.find(name(i));
    wrong += tensor != &file.tensors()[i] || tensor->bytes() != 1 + i % 3 || tensor->shape[1] != 1 + i % 3;
  }
  CHECK(wrong == 0);
  CHECK(file.find(name(count)) == nullptr);
}

TEST_CASE("safetensors: names whose hashes are equal are told apart", "[safetensors]") {
  std::unordered_map<std::uint32_t, std::string> seen;  // two of some hundred thousand names share 32 bits
  std::string first, second;
  for (size i = 0; second.empty() && i < 2'000'000; ++i) {
    const std::string name = "name." + std::to_string(i);
    const auto hash = static_cast<std::uint32_t>(std::hash<std::string_view>{}(name));
    const auto [known, added] = seen.try_emplace(hash, name);
    if (!added) first = known->second, second = name;
  }
  REQUIRE(!second.empty());
  detail::TensorTable table;
  CHECK(table.insert(first, 0) == 0);
  CHECK(table.find(second) == detail::TensorTable::absent);
  CHECK(table.insert(second, 0) == 1);
  CHECK(table.find(first) == 0);
  CHECK(table.find(second) == 1);
}

TEST_CASE("mapped_file: what can be mapped and what cannot", "[safetensors]") {
  const test::ScratchFolder folder;
  test::write_file(folder / "empty", "");
  const MappedFile empty(folder / "empty");
  CHECK(empty.bytes() == 0);
  CHECK(empty.still_whole());
  empty.prefetch(0, 100);
  CHECK(MappedFile().still_whole());

  const auto absent = thrown<format_error>([&] { MappedFile(folder / "absent"); });
  CHECK(absent.path() == folder / "absent");
  CHECK(contains(absent.what(), "No such file or directory"));
  CHECK(contains(thrown<format_error>([&] { MappedFile{folder.path}; }).what(), "not a regular file"));
  REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
  CHECK(contains(thrown<format_error>([&] { MappedFile(folder / "fifo"); }).what(), "not a regular file"));

  test::write_file(folder / "x", std::string(10'000, 'x'));
  MappedFile file(folder / "x");
  REQUIRE(file.bytes() == 10'000);
  CHECK(file.path() == folder / "x");
  CHECK(static_cast<char>(file.data()[9'999]) == 'x');
  file.prefetch(5'000, 6'000);
  file.prefetch(9'000, 99'000);
  file.expect_random(1, ~size{0});
  file.prefetch(20'000, 30'000);
  file.prefetch(7, 3);
  CHECK(file.still_whole());
  std::filesystem::resize_file(folder / "x", 9'999);
  CHECK_FALSE(file.still_whole());
  const MappedFile moved = std::move(file);
  CHECK_FALSE(moved.still_whole());
  CHECK(moved.bytes() == 10'000);
}

TEST_CASE("safetensors: a file that shrinks is noticed", "[safetensors]") {
  const test::ScratchFolder folder;
  write_samples(folder / "x.safetensors", {});
  const Safetensors file = open_safetensors(folder / "x.safetensors");
  CHECK(file.still_whole());
  file.prefetch(file.tensors()[0]);
  file.expect_random(file.tensors()[0]);
  std::filesystem::resize_file(folder / "x.safetensors", 100);
  CHECK_FALSE(file.still_whole());
}
