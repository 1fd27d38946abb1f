// SPDX-License-Identifier: Apache-2.0
// The same hostile content for every file that holds JSON, and links that lead nowhere: one error that names the file,
// no crash, no long wait. What is particular to one kind of file is tested with that kind.
#include <filesystem>
#include <functional>

#include <k3/io/chat.hpp>
#include <k3/io/tokenizer.hpp>

#include "io/checkpoint_support.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// A file of JSON: what good content begins and ends with, so that `begin + value + end` has any value at a place where
/// all of them pass over or take apart values, and how it is read.
struct Reader {
  std::string file, begin, end;
  std::function<void(const std::string& path, const std::string& content)> read;
};

/// Reads a folder that is sound but for the file.
void read_tokenizer(const std::string& path, const std::string&) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  std::filesystem::copy_file(austen_path("tiktoken.model"), folder + "/tiktoken.model",
                             std::filesystem::copy_options::overwrite_existing);
  Tokenizer::from_directory(folder);
}
void read_folder(const std::string& path, const std::string&) {
  open_safetensors_set(std::filesystem::path(path).parent_path().string());
}

const std::vector<Reader>& readers() {
  static const std::vector<Reader> all = {
      {"config.json", "{\"x\":", "}", [](const std::string& path, const std::string&) { read_json_file(path); }},
      {"tokenizer_config.json", "{\"added_tokens_decoder\":{},\"x\":", "}", read_tokenizer},
      {"model.safetensors.index.json", "{\"x\":", ",\"weight_map\":{\"t\":\"f.safetensors\"}}", read_folder},
      {"model.safetensors", "{\"__metadata__\":", "}",
       [](const std::string& path, const std::string& content) {
         write_file(path, file_content(content, 0));
         open_safetensors(path);
       }},
      {"chat.json", "{\"messages\":[],\"tools\":", "}", [](const std::string& path, const std::string& content) {
         encode_chat(Tokenizer::from_directory(austen_path()), chat_segments(chat_from_json(content, path).messages));
       }}};
  return all;
}

/// Content that every reader refuses, with its path, an error of less than 1000 bytes, and no markup in it.
void check_refused_by(const Reader& reader, const std::string& content) {
  CAPTURE(reader.file, content.substr(0, 100));
  const ScratchFolder folder;
  write_file(folder / reader.file, content);
  const auto problem = thrown<format_error>([&] { reader.read(folder / reader.file, content); });
  INFO(problem.what());
  CHECK(problem.path() == folder / reader.file);
  const std::string what = problem.what();
  CHECK(what.size() < 1000);
  for (const char c : what) CHECK(static_cast<unsigned char>(c) >= 0x20);
}
void check_refused_everywhere(const std::string& value) {
  for (const Reader& reader : readers()) check_refused_by(reader, reader.begin + value + reader.end);
}

std::string repeated(const std::string& text, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) result += text;
  return result;
}

}  // namespace

TEST_CASE("hostile files: nesting as deep as the file is long", "[hostile]") {
  for (const int depth : {100, 100'000, 2'000'000}) {
    check_refused_everywhere(repeated("[", depth));
    check_refused_everywhere(repeated("[", depth) + repeated("]", depth));
    check_refused_everywhere(repeated("{\"a\":", depth) + "1" + repeated("}", depth));
    check_refused_everywhere(repeated("[{\"a\":", depth / 2));
  }
  for (const Reader& reader : readers()) check_refused_by(reader, repeated("[", 1'000'000));
  const std::string deep = repeated("[", 100'000);
  check_refused_by(readers()[4], R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\"a\":)" +
                                     deep + "\"}}]}]");
}

TEST_CASE("hostile files: numbers that JSON has not", "[hostile]") {
  for (const char* number :
       {"NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x10", "01", "1.", ".5", "+1", "1e", "--1"})
    check_refused_everywhere(number);
}

TEST_CASE("hostile files: whole numbers beyond 64 bits", "[hostile]") {
  const ScratchFolder folder;
  for (const char* number : {"9223372036854775808", "18446744073709551615", "18446744073709551616",
                             "-9223372036854775808", "-9223372036854775809", "99999999999999999999999999"}) {
    CAPTURE(number);
    nlohmann::json config = MutableCheckpoint("k3-tiny-5l").config;
    nlohmann::json& text = config.contains("text_config") ? config["text_config"] : config;
    text["hidden_size"] = "@";
    std::string content = config.dump();
    content.replace(content.find("\"@\""), 3, number);
    write_file(folder / "config.json", content);
    const auto size_problem = thrown<format_error>([&] { read_config(folder.path); });
    CHECK(size_problem.tensor() == "hidden_size");
    const std::string n = number;
    for (const std::string& header :
         {entry("t", "U8", "[" + n + "]", "[0,1]"), entry("t", "U8", "[1]", "[0," + n + "]"),
          entry("t", "U8", "[1]", "[" + n + ",1]"), entry("t", "U8", "[" + n + ",0]", "[0,1]")}) {
      write_file(folder / "x.safetensors", file_content("{" + header + "}", 1));
      CHECK(thrown<format_error>([&] { open_safetensors(folder / "x.safetensors"); }).tensor() == "t");
    }
    const auto index = thrown<format_error>([&] {
      chat_from_json("[{\"role\":\"tool\",\"content\":\"\",\"name\":\"f\",\"index\":" + n + "}]", "chat.json");
    });
    CHECK(contains(index.what(), "[0].index: is not a whole number from 0 to 2^31 - 1"));
    check_refused_by(readers()[1], "{\"added_tokens_decoder\":{\"" + n + "\":{\"content\":\"[X]\"}}}");
  }
}

TEST_CASE("hostile files: a key twice", "[hostile]") {
  for (const Reader& reader : readers()) {
    if (reader.file != "model.safetensors.index.json") {  // which passes over what it does not know
      check_refused_by(reader, reader.begin + R"({"a":"1","a":"2"})" + reader.end);
      check_refused_by(reader, reader.begin + R"({"a":"1","\u0061":"2"})" + reader.end);
    }
  }
  check_refused_by(readers()[4], R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":)"
                                 R"("{\"a\":1,\"a\":2}"}}]}])");
}

TEST_CASE("hostile files: names that are no UTF-8", "[hostile]") {
  for (const char* bytes :
       {"\xff", "\x80", "\xc0\x80", "\xc3", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"})
    for (const Reader& reader : readers()) {
      check_refused_by(reader, reader.begin + "{\"" + bytes + "\":\"1\"}" + reader.end);
      check_refused_by(reader, reader.begin + "{\"a\":\"" + bytes + "\"}" + reader.end);
      check_refused_by(reader, std::string("{\"") + bytes + "\":1}");
    }
  // Halves of surrogate pairs, escaped; control characters, not escaped.
  for (const char* escaped : {"\\ud800", "\\udc00", "\\ud800\\u0041", "\n", "\x01"})
    check_refused_everywhere(std::string("{\"a") + escaped + "\":\"1\"}");
  const ScratchFolder folder;
  for (const char* bytes : {"\xff", "\xed\xa0\x80"}) {
    write_file(folder / "x.safetensors", file_content("{" + entry(bytes, "U8", "[1]", "[0,1]") + "}", 1));
    CHECK(contains(thrown<format_error>([&] { open_safetensors(folder / "x.safetensors"); }).what(), "invalid JSON"));
    check_refused_by(readers()[2], std::string("{\"weight_map\":{\"") + bytes + "\":\"f.safetensors\"}}");
    check_refused_by(readers()[2], std::string("{\"weight_map\":{\"t\":\"") + bytes + "\"}}");
  }
}

TEST_CASE("hostile files: links", "[hostile]") {
  const MutableCheckpoint checkpoint("k3-tiny-5l");
  const ScratchFolder folder, elsewhere;
  checkpoint.write(folder);
  std::vector<std::string> names = folder.names();
  // Links to files elsewhere are fine: download caches are made of them.
  for (const std::string& name : names) {
    std::filesystem::rename(folder / name, elsewhere / name);
    std::filesystem::create_symlink(elsewhere / name, folder / name);
  }
  CHECK_NOTHROW(from_pretrained(folder.path));
  for (const std::string& name : names) {
    CAPTURE(name);
    for (const std::string& target : {name, std::string("."), std::string("absent"), std::string("/dev/zero")}) {
      CAPTURE(target);
      std::filesystem::remove(folder / name);
      std::filesystem::create_symlink(target, folder / name);
      const auto problem = thrown<format_error>([&] { from_pretrained(folder.path); });
      INFO(problem.what());
      CHECK(contains(problem.what(), name));
    }
    std::filesystem::remove(folder / name);
    std::filesystem::create_symlink(elsewhere / name, folder / name);
  }
  // Two that point at each other, and a folder in itself.
  std::filesystem::create_symlink("b", folder / "a");
  std::filesystem::create_symlink("a", folder / "b");
  CHECK_THROWS_AS(from_pretrained(folder / "a"), format_error);
  std::filesystem::create_symlink(".", folder / "self");
  CHECK_NOTHROW(from_pretrained(folder / "self/self/self"));
}

TEST_CASE("hostile files: text for messages", "[hostile]") {
  using k3::detail::printable;
  CHECK(printable("") == "");
  CHECK(printable("caf\xc3\xa9 \xe4\xb8\x96 \xf0\x9f\x8e\x89") == "caf\xc3\xa9 \xe4\xb8\x96 \xf0\x9f\x8e\x89");
  CHECK(printable(std::string("\0\t\x7f", 3)) == "\\x00\\x09\\x7f");
  CHECK(printable("\xff\xe4\xb8") == "\\xff\\xe4\\xb8");  // not UTF-8, and cut off
  CHECK(printable(std::string(200, 'a')) == std::string(200, 'a'));
  CHECK(printable("abcd", 3) == "abc...");
  CHECK(printable("ab\xc3\xa9", 3) == "ab...");
  CHECK(printable("ab\n", 5) == "ab...");
  for (int byte = 0; byte < 256; ++byte)
    for (int next = 0; next < 256; ++next) {
      const std::string text = printable(std::string{static_cast<char>(byte), static_cast<char>(next)});
      if (detail::valid_prefix(text) != text.size() ||
          text.find_first_of(std::string("\0\x1b\r\n\x7f", 5)) != text.npos)
        FAIL(byte << ", " << next);
    }
}
