// SPDX-License-Identifier: Apache-2.0
#include <k3/io/safetensors_set.hpp>
#include <k3/io/safetensors_writer.hpp>

#include <cstring>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"
#include "support/data.hpp"

using namespace k3;
using k3::test::contains;
using k3::test::entry;
using k3::test::thrown;

namespace {

constexpr const char* index_name = "model.safetensors.index.json";

// One U8 [1] tensor after the other.
void write_tensors(const std::string& path, const std::vector<std::string>& names) {
  std::string header = "{";
  for (size i = 0; i < names.size(); ++i)
    header +=
        (i ? "," : "") + entry(names[i], "U8", "[1]", "[" + std::to_string(i) + "," + std::to_string(i + 1) + "]");
  test::write_file(path, test::file_content(header + "}", names.size()));
}

format_error refusal(const test::ScratchFolder& folder) {
  return thrown<format_error>([&] { open_safetensors_set(folder.path); });
}

/// A folder with a.safetensors (tensors x, y), b.safetensors (z) and this index must be refused so.
void check_index_refused(const std::string& index, const std::string& file, const std::string& tensor,
                         const std::string& part) {
  CAPTURE(index);
  const test::ScratchFolder folder;
  write_tensors(folder / "a.safetensors", {"x", "y"});
  write_tensors(folder / "b.safetensors", {"z"});
  test::write_file(folder / index_name, index);
  const format_error problem = refusal(folder);
  INFO(problem.what());
  CHECK(problem.path() == folder / file);
  CHECK(problem.tensor() == tensor);
  CHECK(contains(problem.what(), part));
}

std::string index_of(const std::string& map, const std::string& metadata = "{\"total_size\":3}") {
  return "{\"metadata\":" + metadata + ",\"weight_map\":{" + map + "}}";
}

const std::string good_map = R"("x":"a.safetensors","y":"a.safetensors","z":"b.safetensors")";

}  // namespace

TEST_CASE("safetensors_set: the checkpoints of the tests are read as JSON trees show them", "[safetensors]") {
  const std::string folder = GENERATE(test::data_path("k3-tiny-5l"), test::data_path("k3-tiny-13l"),
                                      test::data_path("kimi-linear-5l"), test::austen_path());
  CAPTURE(folder);
  const nlohmann::json index = nlohmann::json::parse(test::read_file(folder + "/" + index_name));
  const Safetensors set = open_safetensors_set(folder);
  CHECK(set.path() == folder);
  CHECK(set.still_whole());
  REQUIRE(set.tensors().size() == index["weight_map"].size());
  CHECK(set.total_bytes() == index["metadata"]["total_size"].get<std::uint64_t>());
  std::set<std::string> shards;
  std::map<std::string, nlohmann::json> headers;
  for (const auto& [name, shard] : index["weight_map"].items()) {
    const std::string file = folder + "/" + shard.get<std::string>();
    if (shards.insert(file).second) {
      const std::string content = test::read_file(file);
      std::uint64_t length = 0;
      std::memcpy(&length, content.data(), 8);
      headers[file] = nlohmann::json::parse(content.substr(8, length));
      headers[file]["data begin"] = 8 + length;
    }
    CAPTURE(name);
    const TensorInfo& tensor = set.at(name);
    const nlohmann::json& fields = headers[file][name];
    CHECK(set.path(tensor) == file);
    CHECK(dtype_name(tensor.dtype) == fields["dtype"].get<std::string>());
    CHECK(std::vector<size>(tensor.shape.begin(), tensor.shape.end()) == fields["shape"].get<std::vector<size>>());
    CHECK(tensor.begin == headers[file]["data begin"].get<size>() + fields["data_offsets"][0].get<size>());
    CHECK(tensor.bytes() == fields["data_offsets"][1].get<size>() - fields["data_offsets"][0].get<size>());
  }
  CHECK(set.files().size() == shards.size());
}

TEST_CASE("safetensors_set: what was written in shards is read", "[safetensors]") {
  const test::ScratchFolder folder;
  SafetensorsSetWriter writer(folder.path, 100);
  const std::vector<std::pair<std::string, size>> tensors = {{"a", 60}, {"b", 40}, {"c", 1}, {"d", 200},
                                                             {"e", 0},  {"f", 7},  {"g", 3}};
  for (const auto& [name, bytes] : tensors) {
    if (name == "g") writer.next_shard();
    writer.declare(name, DType::u8, {bytes});
  }
  for (const auto& [name, bytes] : tensors) {
    const std::vector<char> data(bytes, name[0]);
    writer.write(name, data.data(), bytes / 2);
    writer.write(name, data.data(), bytes - bytes / 2);
  }
  for (const std::string& name : folder.names()) CHECK(name.ends_with(".part"));
  writer.finish();
  for (const std::string& name : folder.names()) CHECK_FALSE(name.ends_with(".part"));
  CHECK(folder.names().size() == 6);

  const Safetensors set = open_safetensors_set(folder.path + "/");
  REQUIRE(set.tensors().size() == tensors.size());
  CHECK(set.total_bytes() == 311);
  const std::map<std::string, std::string> shard = {{"a", "1"}, {"b", "1"}, {"c", "2"}, {"d", "3"},
                                                    {"e", "4"}, {"f", "4"}, {"g", "5"}};
  for (const auto& [name, bytes] : tensors) {
    const TensorInfo& tensor = set.at(name);
    CAPTURE(name, set.path(tensor));
    REQUIRE(tensor.bytes() == bytes);
    for (size i = 0; i < bytes; ++i) REQUIRE(static_cast<char>(set.data(tensor)[i]) == name[0]);
    CHECK(set.path(tensor) == (folder / ("model-0000" + shard.at(name) + "-of-00005.safetensors")));
  }
}

TEST_CASE("safetensors_set: wrong use of the writer of shards leaves nothing", "[safetensors]") {
  const test::ScratchFolder folder;
  const char data[4] = {};
  {
    SafetensorsSetWriter writer(folder.path, 4);
    CHECK(contains(thrown<invalid_argument>([&] { writer.finish(); }).what(), "a set without tensors"));
    for (const char* name : {"a", "b", "c"}) writer.declare(name, DType::u8, {4});
    CHECK(
        contains(thrown<invalid_argument>([&] { writer.declare("b", DType::u8, {4}); }).what(), "b is declared twice"));
    CHECK(contains(thrown<invalid_argument>([&] { writer.write("z", data, 4); }).what(), "z is not declared"));
    writer.write("a", data, 3);
    CHECK(contains(thrown<invalid_argument>([&] { writer.declare("d", DType::u8, {4}); }).what(),
                   "after the first write"));
    CHECK(contains(thrown<invalid_argument>([&] { writer.write("b", data, 4); }).what(), "3 of 4 bytes of a"));
    writer.write("a", data, 1);
    writer.write("b", data, 4);
    CHECK(contains(thrown<invalid_argument>([&] { writer.write("a", data, 1); }).what(), "a is written after"));
    CHECK(contains(thrown<invalid_argument>([&] { writer.finish(); }).what(), "0 of 4 bytes of c"));
  }
  CHECK(folder.names().empty());
  SafetensorsSetWriter nowhere(folder / "absent");
  nowhere.declare("a", DType::u8, {1});
  const auto problem = thrown<format_error>([&] { nowhere.write("a", data, 1); });
  CHECK(problem.path() == folder / "absent/model-00001-of-00001.safetensors");
}

TEST_CASE("safetensors_set: which files of a folder count", "[safetensors]") {
  const test::ScratchFolder folder;
  CHECK(contains(refusal(folder).what(), folder.path + ": the folder holds no safetensors file"));
  test::write_file(folder / "config.json", "{}");
  CHECK(contains(refusal(folder).what(), "holds no safetensors file"));
  CHECK(contains(thrown<format_error>([&] { open_safetensors_set(folder / "absent"); }).what(),
                 "No such file or directory"));
  CHECK(contains(thrown<format_error>([&] { open_safetensors_set(folder / "config.json"); }).what(), "config.json: "));

  write_tensors(folder / "b.safetensors", {"z"});
  write_tensors(folder / "a.safetensors", {"x", "y"});
  {
    const Safetensors bare = open_safetensors_set(folder.path);
    REQUIRE(bare.files().size() == 2);
    CHECK(bare.files()[0].path() == folder / "a.safetensors");
    CHECK(bare.tensors().size() == 3);
    CHECK(bare.path(bare.at("z")) == folder / "b.safetensors");
  }
  write_tensors(folder / "model.safetensors", {"single"});
  CHECK(open_safetensors_set(folder.path).tensors().size() == 1);
  test::write_file(folder / "extra_weights.safetensors", "not even one");
  CHECK(open_safetensors_set(folder.path).tensors().size() == 1);
  test::write_file(folder / index_name, index_of(good_map));
  const Safetensors listed = open_safetensors_set(folder.path);
  CHECK(listed.tensors().size() == 3);
  CHECK(listed.files().size() == 2);
  CHECK(listed.find("single") == nullptr);
}

TEST_CASE("safetensors_set: a tensor in two files of a bare folder", "[safetensors]") {
  const test::ScratchFolder folder;
  write_tensors(folder / "a.safetensors", {"x", "y"});
  write_tensors(folder / "b.safetensors", {"z", "y"});
  const format_error problem = refusal(folder);
  CHECK(problem.path() == folder / "b.safetensors");
  CHECK(problem.tensor() == "y");
  CHECK(contains(problem.what(), "is already in " + (folder / "a.safetensors")));
}

TEST_CASE("safetensors_set: one bad file of several is named", "[safetensors]") {
  const test::ScratchFolder folder;
  write_tensors(folder / "a.safetensors", {"x", "y"});
  write_tensors(folder / "b.safetensors", {"z"});
  test::write_file(folder / index_name, index_of(good_map));
  const std::string whole = test::read_file(folder / "b.safetensors");
  for (size bytes = 0; bytes < whole.size(); ++bytes) {
    test::write_file(folder / "b.safetensors", whole.substr(0, bytes));
    const format_error problem = refusal(folder);
    CHECK(problem.path() == folder / "b.safetensors");
  }
}

TEST_CASE("safetensors_set: an absent shard is noticed first (case 55)", "[safetensors]") {
  const test::ScratchFolder folder;
  test::write_file(folder / "a.safetensors", "garbage that would be an error if it were read");
  test::write_file(folder / index_name, index_of(R"("x":"a.safetensors","y":"model-00002-of-00002.safetensors")"));
  const format_error problem = refusal(folder);
  CHECK(problem.path() == folder / "model-00002-of-00002.safetensors");
  CHECK(contains(problem.what(), "no such file"));
  std::filesystem::create_directory(folder / "model-00002-of-00002.safetensors");
  write_tensors(folder / "a.safetensors", {"x"});
  CHECK(contains(refusal(folder).what(), "model-00002-of-00002.safetensors: is not a regular file"));
}

TEST_CASE("safetensors_set: index and files must agree", "[safetensors]") {
  check_index_refused(index_of(good_map + R"(,"w":"b.safetensors")"), "b.safetensors", "w",
                      "is in the index, but not in this file");
  check_index_refused(index_of(R"("x":"a.safetensors","z":"b.safetensors")"), "a.safetensors", "y",
                      "is in this file, but not in the index");
  check_index_refused(index_of(R"("x":"a.safetensors","y":"b.safetensors","z":"b.safetensors")"), "a.safetensors", "y",
                      "is in this file, but the index places it in ");
  check_index_refused(index_of(good_map, "{\"total_size\":4}"), index_name, "",
                      "total_size is 4, but the tensors have 3 bytes");

  const test::ScratchFolder folder;  // the second copy of x is in no index
  write_tensors(folder / "a.safetensors", {"x", "y"});
  write_tensors(folder / "b.safetensors", {"z", "x"});
  test::write_file(folder / index_name, index_of(good_map, "{}"));
  CHECK(refusal(folder).path() == folder / "b.safetensors");
  CHECK(refusal(folder).tensor() == "x");
  test::write_file(
      folder / "b.safetensors",
      test::file_content("{" + entry("z", "U8", "[1]", "[0,1]") + "," + entry("z", "U8", "[1]", "[1,2]") + "}", 2));
  CHECK(contains(refusal(folder).what(), "b.safetensors: z: comes twice in the header"));
}

TEST_CASE("safetensors_set: what an index must be", "[safetensors]") {
  for (const char* text :
       {"", "{", "[]", "null", "7", "{}", "{\"metadata\":{}}", "{\"weight_map\":{}}", "{\"weight_map\":[]}",
        "{\"weight_map\":null}", "{\"weight_map\":{\"x\":1}}", "{\"weight_map\":{\"x\":null}}",
        "{\"weight_map\":{\"x\":{\"a\":\"b\"}}}", "{\"weight_map\":{\"x\":[\"b\"]}}", "\xff"}) {
    const test::ScratchFolder folder;
    write_tensors(folder / "a.safetensors", {"x"});
    test::write_file(folder / index_name, text);
    CAPTURE(text);
    CHECK(refusal(folder).path() == folder / index_name);
  }
  check_index_refused("{\"weight_map\":{\"x\":1}}", index_name, "x", "expected the name of a file, found the number 1");
  check_index_refused(index_of(good_map) + "x", index_name, "", "invalid JSON");
  check_index_refused(index_of(good_map + R"(,"x":"a.safetensors")"), index_name, "", "the tensor \"x\" comes twice");
  check_index_refused("{\"weight_map\":{" + good_map + "},\"weight_map\":{" + good_map + "}}", index_name, "",
                      "weight_map comes twice");
  check_index_refused("{\"metadata\":{},\"metadata\":{},\"weight_map\":{}}", index_name, "", "metadata comes twice");
  check_index_refused(index_of(good_map, "{\"total_size\":3,\"total_size\":3}"), index_name, "",
                      "total_size comes twice");
  for (const char* value : {"\"3\"", "3.0", "-3", "null", "[3]", "{}", "true", "18446744073709551616"})
    check_index_refused(index_of(good_map, "{\"total_size\":" + std::string(value) + "}"), index_name, "",
                        "expected total_size to be a whole number");
  for (const char* value : {"[]", "null", "3", "\"x\""})
    check_index_refused(index_of(good_map, value), index_name, "", "expected metadata to be an object");
  for (const char* name : {"../a.safetensors", "/etc/passwd", "a/b", "a\\\\b", ".", "..", "", "a\\u0000b"})
    check_index_refused(index_of("\"x\":\"" + std::string(name) + "\""), index_name, "x", "is not a plain file name");
}

TEST_CASE("safetensors_set: names of files that cannot be shown or be there are refused and shown safely",
          "[safetensors]") {
  const auto refused = [](const std::string& name, const std::string& shown) {
    check_index_refused(index_of("\"x\":\"" + name + "\""), index_name, "x",
                        "x: \"" + shown + "\" is not a plain file name");
  };
  refused("\\u001b[31mred.safetensors", "\\x1b[31mred.safetensors");
  refused("a\\nb.safetensors", "a\\x0ab.safetensors");
  refused("a\x7f.safetensors", "a\\x7f.safetensors");
  refused("a\xc2\x9b.safetensors", "a\\x9b.safetensors");
  refused("a\\u202egpj.safetensors", "a\\u202egpj.safetensors");
  refused("a\xf3\xa0\x80\xa0.safetensors", "a\\U000e0020.safetensors");
  refused(std::string(244, 'a') + ".safetensors", std::string(200, 'a') + "...");
  refused(std::string(1'000'000, 'a'), std::string(200, 'a') + "...");
  refused(std::string(199, 'a') + "\xc3\xa9" + std::string(99, 'a'), std::string(199, 'a') + "...");
  // The longest name that there can be, and one that is not English.
  const std::string longest = std::string(243, 'a') + ".safetensors";
  for (const std::string& name : {longest, std::string("m\xc3\xb6"
                                                       "del \xe4\xb8\x96.safetensors")}) {
    const test::ScratchFolder folder;
    write_tensors(folder / name, {"x"});
    test::write_file(folder / index_name, index_of("\"x\":\"" + name + "\"", "{}"));
    CHECK(open_safetensors_set(folder.path).tensors().size() == 1);
  }
  // Without an index the names come from the folder itself.
  const test::ScratchFolder bare;
  write_tensors(bare / "a.safetensors", {"x"});
  CHECK(open_safetensors_set(bare.path).tensors().size() == 1);
  write_tensors(bare / "\x1b[2Jb.safetensors", {"y"});
  const format_error problem = refusal(bare);
  CHECK(problem.path() == bare.path);
  CHECK(contains(problem.what(), "\\x1b[2Jb.safetensors: is not a plain file name"));
}

TEST_CASE("safetensors_set: names of tensors are shown safely", "[safetensors]") {
  const std::string wild = "x\\u001b[2J\\u202e", shown = "x\\x1b[2J\\u202e", map = "\"" + wild + "\":\"a.safetensors\"";
  check_index_refused(index_of(good_map + "," + map), "a.safetensors", shown, "is in the index, but not in this file");
  check_index_refused(index_of(good_map + "," + map + "," + map), index_name, "", "the tensor \"" + shown + "\" comes");
  check_index_refused("{\"weight_map\":{\"" + wild + "\":1}}", index_name, shown, "expected the name of a file");
  const test::ScratchFolder folder;
  test::write_file(folder / "a.safetensors", test::file_content("{" + entry(wild, "U8", "[2]", "[0,1]") + "}", 1));
  CHECK(refusal(folder).tensor() == shown);
  const auto absent = thrown<format_error>([&] {
    test::write_file(folder / "a.safetensors", test::file_content("{" + entry(wild, "U8", "[1]", "[0,1]") + "}", 1));
    open_safetensors_set(folder.path).at(std::string(300, '\n'));
  });
  CHECK(absent.tensor() == [] {
    std::string text;
    for (int i = 0; i < 50; ++i) text += "\\x0a";
    return text + "...";
  }());
  SafetensorsWriter writer(folder / "b.safetensors");
  writer.declare("a", DType::u8, {1});
  writer.declare("b\x1b", DType::u8, {1});
  const char data[2] = {};
  writer.write("a", data, 1);
  writer.write("b\x1b", data, 1);
  CHECK(contains(thrown<invalid_argument>([&] { writer.write("a", data, 1); }).what(), "written again after b\\x1b,"));
}

TEST_CASE("safetensors_set: files of the folder that are no part of it are told", "[safetensors]") {
  const test::ScratchFolder folder;
  write_tensors(folder / "a.safetensors", {"x", "y"});
  write_tensors(folder / "b.safetensors", {"z"});
  CHECK(stray_safetensors(open_safetensors_set(folder.path)).empty());
  test::write_file(folder / index_name, index_of(good_map));
  test::write_file(folder / "config.json", "{}");
  CHECK(stray_safetensors(open_safetensors_set(folder.path)).empty());
  test::write_file(folder / "d.safetensors", "no safetensors file");
  write_tensors(folder / "c.safetensors", {"x"});
  std::filesystem::create_directory(folder / "e.safetensors");
  const std::vector<std::string> strays = {"c.safetensors", "d.safetensors", "e.safetensors"};
  CHECK(stray_safetensors(open_safetensors_set(folder.path)) == strays);
  CHECK(stray_safetensors(open_safetensors_set(folder.path + "/")) == strays);
  std::filesystem::remove(folder / index_name);
  write_tensors(folder / "model.safetensors", {"single"});
  CHECK(stray_safetensors(open_safetensors_set(folder.path)).size() == 5);
}

TEST_CASE("safetensors_set: what an index may hold besides", "[safetensors]") {
  const test::ScratchFolder folder;
  write_tensors(folder / "a.safetensors", {"x", "y"});
  write_tensors(folder / "b.safetensors", {"z"});
  const auto opens = [&](const std::string& index) {
    test::write_file(folder / index_name, index);
    return open_safetensors_set(folder.path).tensors().size() == 3;
  };
  CHECK(opens("{\"weight_map\":{" + good_map + "}}"));
  CHECK(opens("{\"weight_map\":{" + good_map + "},\"metadata\":{\"total_size\":3}}"));
  CHECK(opens(index_of(
      good_map, R"({"total_parameters":7,"a":[1,{"total_size":9,"b":[null,-1,2.5,true]}],"c":{},"total_size":3})")));
  CHECK(opens(R"({"version":1,"more":{"weight_map":{"x":"no"}},"list":[],"weight_map":{)" + good_map + "}}"));
  const std::string deep = std::string(32, '[') + std::string(32, ']');
  CHECK(opens(R"({"deep":)" + deep + R"(,"weight_map":{)" + good_map + "}}"));
  check_index_refused(R"({"deep":)" + std::string(1'000'000, '['), index_name, "", "nested deeper than 32 levels");
  check_index_refused(index_of(good_map, R"({"deep":)" + std::string(33, '[') + std::string(33, ']') + "}"), index_name,
                      "", "nested deeper than 32 levels");
}

TEST_CASE("safetensors_set: an index cut or changed anywhere is refused or harmless", "[safetensors]") {
  const std::string whole = R"({"metadata":{"total_size":3,"n":[1]},"weight_map":{)" + good_map + "}}";
  const test::ScratchFolder folder;
  write_tensors(folder / "a.safetensors", {"x", "y"});
  write_tensors(folder / "b.safetensors", {"z"});
  for (size bytes = 0; bytes < whole.size(); ++bytes) {
    test::write_file(folder / index_name, whole.substr(0, bytes));
    CAPTURE(bytes);
    CHECK_THROWS_AS(open_safetensors_set(folder.path), format_error);
  }
  size outcomes = 0, tried = 0;
  for (size at = 0; at < whole.size(); ++at) {
    for (const char value : std::string("\0\"{}[],:\\ -.9ax\x7f\x80\xff", 18)) {
      std::string changed = whole;
      changed[at] = value;
      test::write_file(folder / index_name, changed);
      ++tried;
      try {
        outcomes += open_safetensors_set(folder.path).tensors().size() == 3;
      } catch (const format_error&) {
        ++outcomes;
      }
    }
  }
  CHECK(outcomes == tried);
}

TEST_CASE("safetensors_set: an index of unbelievable length", "[safetensors]") {
  const test::ScratchFolder folder;
  test::write_file(folder / index_name, "{");
  std::filesystem::resize_file(folder / index_name, max_safetensors_index + 1);  // a sparse file
  CHECK(contains(refusal(folder).what(), "more than the limit of 134217728"));
}
