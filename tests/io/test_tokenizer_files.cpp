// SPDX-License-Identifier: Apache-2.0
// tiktoken.model and tokenizer_config.json: good ones are taken, bad ones refused with their place.
#include "io/tokenizer_support.hpp"

using namespace k3::test;

namespace {

/// A folder with the two files, gone at the end of the test.
class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() / ("k3-tokenizer-" + std::to_string(std::random_device()()))) {
    std::filesystem::create_directory(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_.string(); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
  }

 private:
  std::filesystem::path path_;
};

std::string base64(const std::string& bytes) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t word = 0;
    for (std::size_t k = i; k < i + 3; ++k)
      word = word << 8 | (k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0u);
    for (std::size_t k = 0; k < 4; ++k) out += i + k > bytes.size() ? '=' : digits[word >> (18 - 6 * k) & 63];
  }
  return out;
}

struct Line {
  std::string token, rank;
};

/// The 256 single bytes and "ab", "abc", "abcd".
std::vector<Line> good_lines() {
  std::vector<Line> lines;
  for (int byte = 0; byte < 256; ++byte)
    lines.push_back({base64(std::string(1, static_cast<char>(byte))), std::to_string(byte)});
  lines.push_back({base64("ab"), "256"});
  lines.push_back({base64("abc"), "257"});
  lines.push_back({base64("abcd"), "258"});
  return lines;
}

std::string file_of(const std::vector<Line>& lines) {
  std::string text;
  for (const Line& line : lines) text += line.token + " " + line.rank + "\n";
  return text;
}

const std::string good_config =
    R"({"added_tokens_decoder": {"259": {"content": "[BOS]"}, "514": {"content": "[PAD]", "special": false}}})";

/// The error that the two files give: its offset and what it says.
std::pair<std::uint64_t, std::string> refusal(const std::string& model, const std::string& config,
                                              const std::string& culprit) {
  const Folder folder;
  folder.write("tiktoken.model", model);
  folder.write("tokenizer_config.json", config);
  try {
    Tokenizer::from_directory(folder.path());
  } catch (const k3::format_error& refused) {
    CHECK(refused.path() == folder.path() + "/" + culprit);
    return {refused.offset(), refused.what()};
  }
  FAIL("was accepted");
  return {};
}

void check_model(const std::string& model, std::uint64_t offset, const std::string& says) {
  const auto [at, what] = refusal(model, good_config, "tiktoken.model");
  INFO(what);
  CHECK(at == offset);
  CHECK(what.find(says) != std::string::npos);
}

void check_config(const std::string& config, std::uint64_t offset, const std::string& says) {
  const auto [at, what] = refusal(file_of(good_lines()), config, "tokenizer_config.json");
  INFO(what);
  CHECK(at == offset);
  CHECK(what.find(says) != std::string::npos);
}

}  // namespace

TEST_CASE("good vocabulary files are taken", "[io][tokenizer]") {
  const Folder folder;
  folder.write("tokenizer_config.json", good_config);
  std::vector<Line> lines = good_lines();
  const auto load = [&](const std::string& model) {
    folder.write("tiktoken.model", model);
    return Tokenizer::from_directory(folder.path());
  };
  const Tokenizer tokenizer = load(file_of(lines));
  CHECK(tokenizer.vocab_size() == 515);
  CHECK(tokenizer.encode("abcdab") == Ids{258, 256});
  CHECK(tokenizer.special_id("[PAD]") == 514);
  CHECK(tokenizer.decode(Ids{259, 260, 514}, k3::SpecialText::skip) == "[PAD]");
  Tokenizer from = tokenizer;
  const Tokenizer taken = std::move(from);  // which leaves `from` as it was
  for (const Tokenizer* one : {&std::as_const(from), &taken}) {
    CHECK(one->encode("abcdab") == Ids{258, 256});
    CHECK(one->token_bytes(3) == tokenizer.token_bytes(3));
  }
  std::swap(lines[3], lines[257]);  // any order
  CHECK(load(file_of(lines)).encode("abcdab") == Ids{258, 256});
  std::string open = file_of(lines);
  open.pop_back();  // no line end at the end
  CHECK(load(open).vocab_size() == 515);
}

TEST_CASE("the limit of a tokenizer's model is read", "[io][tokenizer]") {
  const Folder folder;
  folder.write("tiktoken.model", file_of(good_lines()));
  const auto config = [](const std::string& limit) {
    return R"({"model_max_length": )" + limit + R"(, "added_tokens_decoder": {"259": {"content": "[BOS]"}}})";
  };
  const auto limit_of = [&](const std::string& text) {
    folder.write("tokenizer_config.json", text);
    return Tokenizer::from_directory(folder.path()).model_max_length();
  };
  CHECK(limit_of(config("1048576")) == 1048576);
  CHECK(limit_of(config("1")) == 1);
  CHECK(limit_of(config("2147483647")) == 2147483647);
  // What some write where there is none.
  for (const char* none : {"null", "2147483648", "1000000000000000019884624838656", "1e30", "18446744073709551615"})
    CHECK(limit_of(config(none)) == std::nullopt);
  CHECK(limit_of(good_config) == std::nullopt);
  CHECK(limit_of(R"({"added_tokens_decoder": {"259": {"content": "[BOS]", "model_max_length": 7}}})") == std::nullopt);
  const Tokenizer copy = Tokenizer::from_directory(folder.path());
  CHECK(copy.model_max_length() == std::nullopt);
  for (const char* bad : {"0", "-1", "1.5", "4096.0", "\"4096\"", "true", "[]", "{}", "-1e30"})
    check_config(config(bad), 19, "model_max_length: is neither a whole number from 1 on nor null");
}

TEST_CASE("bad ranks are refused with their place", "[io][tokenizer]") {
  std::vector<Line> lines = good_lines();
  const std::string good = file_of(lines);
  const std::size_t last = good.rfind('\n', good.size() - 2) + 1;  // where the last line begins
  const std::size_t rank = good.rfind(' ') + 1;                    // and its rank
  const auto with = [&](const std::string& token, const std::string& number) {
    lines.back() = {token, number};
    return file_of(lines);
  };
  SECTION("cut off") {
    check_model(good.substr(0, good.size() - 2), rank, "rank 25 twice");
    check_model(good.substr(0, rank), rank, "bad rank");
    check_model(good.substr(0, rank - 1), last, "not \"base64 rank\"");
    check_model("", 0, "single byte 0");
  }
  SECTION("base64") {
    check_model(with("YWJjZA=", "258"), last, "bad base64");
    check_model(with("YWJj*A==", "258"), last, "bad base64");
    check_model(with("YW=jZA==", "258"), last, "bad base64");
    check_model(with("YWJjZB==", "258"), last, "bad base64");  // bits beyond the last byte
    check_model(with("====", "258"), last, "bad base64");
    check_model(with("", "258"), last, "bad base64");
  }
  SECTION("ranks") {
    check_model(with(base64("abcd"), "257"), rank, "rank 257 twice");
    check_model(with(base64("abcd"), "259"), rank, "rank 259 in a file of 259 lines");
    for (const std::string number :
         {"", "-1", "+258", "0258", "258 ", " 258", "258\r", "2x8", "99999999999999999999"}) {
      CAPTURE(number);
      check_model(with(base64("abcd"), number), rank, "bad rank");
    }
  }
  SECTION("tokens") {
    check_model(with(base64("ab"), "258"), last, "same bytes as rank 256");
    lines = good_lines();
    lines[65].token = base64("xyz");
    const std::string missing = file_of(lines);
    check_model(missing, missing.size(), "single byte 65");
    check_model(good + "\n", good.size(), "not \"base64 rank\"");
  }
  SECTION("no file") {
    const Folder folder;
    CHECK_THROWS_AS(Tokenizer::from_directory(folder.path()), k3::format_error);
    CHECK_THROWS_AS(Tokenizer::from_directory(folder.path() + "/none"), k3::format_error);
    folder.write("tiktoken.model", good);
    CHECK_THROWS_AS(Tokenizer::from_directory(folder.path()), k3::format_error);
    std::filesystem::create_directory(folder.path() + "/tokenizer_config.json");
    CHECK_THROWS_AS(Tokenizer::from_directory(folder.path()), k3::format_error);
  }
}

TEST_CASE("bad names are refused with their place", "[io][tokenizer]") {
  const auto config = [](const std::string& entries) { return R"({"added_tokens_decoder": {)" + entries + "}}"; };
  const std::string first = R"("260": {"content": "[X]"}, )";
  // Offsets are those behind the key.
  const std::uint64_t key = 31, second = 31 + first.size();
  check_config(config(R"("258": {"content": "[X]"})"), key, "256 ids from 259");
  check_config(config(R"("515": {"content": "[X]"})"), key, "256 ids from 259");
  check_config(config(first + R"("-11": {"content": "[Y]"})"), second, "256 ids from 259");
  check_config(config(first + R"("abc": {"content": "[Y]"})"), second, "256 ids from 259");
  check_config(config(first + R"("261": {"content": "[X]"})"), second, "\"[X]\" twice");
  check_config(config(first + R"("260": {"content": "[Y]"})"), second, "key twice");
  check_config(config(first + R"("261": {"content": ""})"), second, "1 to 1024");
  check_config(config(first + R"("261": {"content": ")" + std::string(1025, 'x') + "\"}"), second, "1 to 1024");
  check_config(config(first + R"("261": {"content": 1})"), second, "no text");
  check_config(config(first + R"("261": {})"), second, "no text");
  check_config(config(first + R"("261": "[Y]")"), second, "no text");
  check_config(config(first + R"("261": {"content": "[Y]", "special": 1})"), second, "neither true nor false");
  check_config(config(first + R"("261": {"content": "<|reserved_token_262|>"})"), second, "name of another id");
  check_config("{}", 0, "added_tokens_decoder");
  check_config("[]", 0, "added_tokens_decoder");
  check_config(R"({"added_tokens_decoder": []})", 0, "added_tokens_decoder");
  check_config("", 0, "parse error");
  check_config("{\"a\": 1,}", 9, "parse error");
  check_config("{\"a\": \"\xFF\"}", 8, "parse error");
  check_config(std::string(100, '['), 66, "nested");
  check_config(good_config + "x", good_config.size() + 1, "parse error");
  check_config(good_config + std::string("\0x", 2), good_config.size(), "a NUL byte");
}
