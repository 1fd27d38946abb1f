// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"
#include "support/data.hpp"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include <k3/io/tokenizer.hpp>

namespace {

using k3::Specials;
using k3::Tokenizer;
using Ids = std::vector<k3::id>;
using Pieces = std::vector<std::string>;
using Bytes = std::string;

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

const Tokenizer& austen() {
  static const Tokenizer tokenizer = Tokenizer::from_directory(k3::test::austen_path());
  return tokenizer;
}

Pieces split(const std::string& text) {
  Pieces pieces;
  k3::PreSplitter().split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

std::string joined(const Pieces& pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += piece;
  return text;
}

std::vector<std::size_t> lengths(const std::string& text) {
  std::vector<std::size_t> all;
  for (const std::string& piece : split(text)) all.push_back(piece.size());
  return all;
}

std::string repeat(const std::string& text, std::size_t times) {
  std::string all;
  for (; times > 0; --times) all += text;
  return all;
}

std::string utf8(char32_t c) {
  const auto byte = [](char32_t value) { return static_cast<char>(static_cast<unsigned char>(value)); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xC0 | c >> 6), byte(0x80 | (c & 63))};
  if (c < 0x10000) return {byte(0xE0 | c >> 12), byte(0x80 | (c >> 6 & 63)), byte(0x80 | (c & 63))};
  return {byte(0xF0 | c >> 18), byte(0x80 | (c >> 12 & 63)), byte(0x80 | (c >> 6 & 63)), byte(0x80 | (c & 63))};
}

/// A vocabulary of the 256 single bytes and "<|", with the four control strings and one more name.
Tokenizer small_tokenizer() {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  tokens.push_back("<|");
  return Tokenizer(tokens, {{257, "[BOS]"},
                            {258, "<|open|>", false},
                            {259, "<|close|>", false},
                            {260, "<|sep|>", false},
                            {261, "<|end_of_msg|>"},
                            {262, "<|open|>ing"}});
}

}  // namespace

// Vectors
// -----------------------------------------------------------------------------------------------------------------------

TEST_CASE("the trained vocabulary gives the expected ids", "[io][tokenizer]") {
  const auto expected = nlohmann::json::parse(contents(k3::test::austen_path("expected.json")));
  SECTION("texts") {
    REQUIRE(expected["tokenizer"].size() == 35);
    for (const auto& vector : expected["tokenizer"]) {
      const std::string text = vector["text"];
      CAPTURE(text);
      CHECK(austen().encode(text) == vector["ids"].get<Ids>());
      CHECK(austen().decode(vector["ids"].get<Ids>()) == text);
    }
  }
  SECTION("prompts and what follows them") {
    for (const auto& prompt : expected["prompts"]) {
      const std::string text = prompt["text"];
      CAPTURE(text);
      CHECK(austen().encode(text) == prompt["ids"].get<Ids>());
      CHECK(austen().decode(prompt["generated"].get<Ids>()) == prompt["generated_text"].get<std::string>());
    }
  }
  SECTION("a chapter") {
    const std::string text = contents(k3::test::austen_path("heldout.txt"));
    const Ids ids = austen().encode(text);
    const auto first = expected["heldout"]["first_ids"].get<Ids>(), last = expected["heldout"]["last_ids"].get<Ids>();
    REQUIRE(ids.size() == expected["heldout"]["tokens"].get<std::size_t>());
    CHECK(Ids(ids.begin(), ids.begin() + 32) == first);
    CHECK(Ids(ids.end() - 32, ids.end()) == last);
    CHECK(austen().decode(ids) == text);
  }
}

TEST_CASE("ranks by hand", "[io][tokenizer]") {
  const Tokenizer pairs(Pieces{"a", "b", "ab", "ba"}, {});
  CHECK(pairs.encode("aba") == Ids{2, 0});
  const Tokenizer more(Pieces{"a", "b", "ab", "bc", "abc", "c"}, {});
  CHECK(more.encode("abc") == Ids{4});
  CHECK(more.encode("bcab") == Ids{3, 2});
  const Tokenizer spaces(Pieces{" ", "  "}, {});
  CHECK(spaces.encode("  ") == Ids{1});
  CHECK_THROWS_AS(pairs.encode("abc"), k3::invalid_argument);
}

// Special ids
// -------------------------------------------------------------------------------------------------------------------

TEST_CASE("markup mode resolves the four control strings", "[io][tokenizer]") {
  const k3::id sep = austen().special_id("<|sep|>").value();
  CHECK(sep == 1797);
  for (const std::string before : {"role=\"user\"", "x", "\"", "<|sep|>", ""}) {
    CAPTURE(before);
    const Ids ids = austen().encode(before + "<|sep|>", Specials::markup);
    Ids expected = austen().encode(before == "<|sep|>" ? "" : before);
    if (before == "<|sep|>") expected.push_back(sep);
    expected.push_back(sep);
    CHECK(ids == expected);
  }
  CHECK(austen().encode("<|open|><|close|><|end_of_msg|>", Specials::markup) == Ids{1795, 1796, 1794});

  const Tokenizer small = small_tokenizer();
  CHECK(small.encode("a<|open|>b<|x<|sep|>", Specials::markup) == Ids{'a', 258, 'b', 256, 'x', 260});
  CHECK(small.encode("<|<|open|>", Specials::markup) == Ids{256, 258});
  CHECK(small.encode("[BOS]", Specials::markup) == Ids{'[', 'B', 'O', 'S', ']'});
  // The longest name wins where several begin; markup mode does not know the longer one.
  CHECK(small.encode("<|open|>ing", Specials::named) == Ids{262});
  CHECK(small.encode("<|open|>ing", Specials::markup) == Ids{258, 'i', 'n', 'g'});
  CHECK(small.encode("[BOS]<|open|>in", Specials::named) == Ids{257, 258, 'i', 'n'});
  // An unnamed id has no text that stands for it.
  CHECK(small.encode("<|reserved_token_300|>", Specials::named) == small.encode("<|reserved_token_300|>"));
  CHECK_THROWS_AS(Tokenizer(Pieces{"a"}, {}).encode("a", Specials::markup), k3::invalid_argument);
}

TEST_CASE("plain mode gives no special id", "[io][tokenizer]") {
  std::string all;
  for (k3::id special = 1792; special < 2048; ++special) {
    const std::string text = "a " + std::string(austen().token_bytes(special)) + "b";
    const Ids ids = austen().encode(text);
    CAPTURE(text);
    for (const k3::id token : ids) REQUIRE(token < 1792);
    REQUIRE(austen().decode(ids) == text);
    all += text;
  }
  CHECK(austen().decode(austen().encode(all)) == all);
  CHECK(austen().decode(austen().encode(all, Specials::markup)) == all);
  CHECK(austen().decode(austen().encode(all, Specials::named)) == all);
}

TEST_CASE("the reserved block", "[io][tokenizer]") {
  CHECK(austen().vocab_size() == 2048);
  CHECK(austen().rank_count() == 1792);
  CHECK(austen().special_id("[BOS]") == 1792);
  CHECK(austen().special_id("[EOS]") == 1793);
  CHECK(austen().special_id("[PAD]") == 2047);
  CHECK(austen().special_id("<|reserved_token_1800|>") == 1800);
  CHECK(!austen().special_id("<|reserved_token_1792|>"));
  CHECK(!austen().special_id("hello"));
  CHECK(!austen().is_reserved(1791));
  CHECK(austen().is_reserved(1792));
  CHECK(austen().is_reserved(2047));
  CHECK(!austen().is_reserved(2048));
  CHECK(!austen().is_reserved(-1));
  for (k3::id special = 1792; special < 2048; ++special) {
    CHECK(austen().special_id(austen().token_bytes(special)) == special);
  }
  CHECK(austen().decode(Ids{1792, 39, 1800, 1794}) == "[BOS]H<|reserved_token_1800|><|end_of_msg|>");
  CHECK(austen().decode(Ids{1792, 39, 1800, 1795, 1794}, k3::SpecialText::skip) == "H<|open|>");
  for (const k3::id outside : {-1, 2048, -2147483647, 2147483647}) {
    CAPTURE(outside);
    CHECK_THROWS_AS(austen().token_bytes(outside), k3::invalid_argument);
    CHECK_THROWS_AS(austen().decode(Ids{0, outside}), k3::invalid_argument);
  }
}

TEST_CASE("a vocabulary in memory is checked", "[io][tokenizer]") {
  const Pieces ab{"a", "b"};
  CHECK_THROWS_AS(Tokenizer(Pieces{"a", "b", "a"}, {}), k3::invalid_argument);
  CHECK_THROWS_AS(Tokenizer(Pieces{"a", ""}, {}), k3::invalid_argument);
  CHECK_THROWS_AS(Tokenizer(ab, {{1, "x"}}), k3::invalid_argument);
  CHECK_THROWS_AS(Tokenizer(ab, {{258, "x"}}), k3::invalid_argument);
  CHECK_THROWS_AS(Tokenizer(ab, {{-1, "x"}}), k3::invalid_argument);
  CHECK_THROWS_AS(Tokenizer(ab, {{2, ""}}), k3::invalid_argument);
  CHECK_THROWS_AS(Tokenizer(ab, {{2, "x"}, {3, "x"}}), k3::invalid_argument);
  CHECK_THROWS_AS(Tokenizer(ab, {{2, "x"}, {2, "y"}}), k3::invalid_argument);
  CHECK_THROWS_AS(Tokenizer(ab, {{2, "<|reserved_token_3|>"}}), k3::invalid_argument);
  CHECK(Tokenizer(ab, {{2, "x"}, {257, "y"}}).vocab_size() == 258);
}

// Pieces
// ------------------------------------------------------------------------------------------------------------------------

TEST_CASE("the rules, one by one", "[io][pre_split]") {
  const auto check = [](const Pieces& expected) {
    const std::string text = joined(expected);
    CAPTURE(text);
    CHECK(split(text) == expected);
  };
  SECTION("1: a run of Han") {
    check({"你好世界"});
    check({"a", "你好", "b"});
    check({"日本語々〇⺀", "テキスト"});
    check({" ", "你好"});
    check({"，", "世界", "！Hello"});
    check({"12〇", "你"});  // a Han numeral after digits is a number first
  }
  SECTION("2: words ending in lower case") {
    check({"It", " is", " a", " truth"});
    check({"camel", "Case", "HTMLpage"});
    check({"(hello", "\tworld"});
    check({"\n", "hello"});
    check({"cafe\u0301", " ǅa", " ªº"});
    check({"a", "-b", "--", "c"});
    check({"한국어", " 문장"});
  }
  SECTION("3: words in upper case") {
    check({"ABC", " DEF", "-GHI"});
    check({"ABCdef"});
    check({"Ж", " Ж", "1"});
  }
  SECTION("contractions") {
    for (const std::string tail :
         {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'rE", "'Ve", "'M", "'Ll", "'D", "'ſ"}) {
      check({"he" + tail, "x"});
      check({"HE" + tail, "x"});
    }
    check({"he", "'x"});
    check({"he", "’s"});
    check({"o", "'clock"});
    check({"'s"});  // no word before: a word with a leading character
    check({"1", "'s"});
    check({"it's", "'s"});
  }
  SECTION("4: up to three digits") {
    check({"123", "456", "7"});
    check({" ", "12", " ", "3"});
    check({"½²Ⅷ", "٣٤٥", "٦"});
    check({"a", "1", "b"});
  }
  SECTION("5: punctuation") {
    check({" //", " comment"});
    check({"...!!", " \"\n\r\n", " x"});
    check({"!", " ", " ?"});
    check({"🎉🎊"});
    check({"!", "\t", "!"});
    check({"/path", "/", "1"});
  }
  SECTION("6: line ends") {
    check({"a", "\n\n", "b"});
    check({"a", " \t\r\n \n", " ", " b"});
    check({"\r\n\r\n"});
  }
  SECTION("7 and 8: white space") {
    check({"a", "  ", " b"});
    check({"a", "   "});
    check({"a", " ", "1"});
    check({"a", "  ", " ", "1"});
    check({"a", "\u3000", "\u3000b"});
    check({"a", "\u00A0\u2003", "\u0085b"});
  }
}

TEST_CASE("white space is Unicode White_Space, for all characters", "[io][pre_split]") {
  const k3::PreSplitter splitter;
  std::vector<std::uint32_t> spaces;
  for (std::uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::size_t pieces = 0;  // white space takes the space in, nothing else does
    splitter.split(utf8(c) + " ", [&](std::string_view) { ++pieces; });
    if (pieces == 1) spaces.push_back(c);
  }
  CHECK(spaces == std::vector<std::uint32_t>{0x09,   0x0B,   0x0C,   0x20,   0x85,   0xA0,   0x1680, 0x2000,
                                             0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008,
                                             0x2009, 0x200A, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000});
}

TEST_CASE("runs are cut after 25,000 characters", "[io][pre_split]") {
  using Lengths = std::vector<std::size_t>;
  for (const std::string letter : {"a", "A", "é", "你", "テ", "!", "🎉", "\n", "\u0301"}) {
    CAPTURE(letter);
    const std::size_t bytes = letter.size() * 25'000;
    CHECK(lengths(repeat(letter, 24'999)) == Lengths{bytes - letter.size()});
    CHECK(lengths(repeat(letter, 25'000)) == Lengths{bytes});
    CHECK(lengths(repeat(letter, 25'001)) == Lengths{bytes, letter.size()});
    CHECK(lengths(repeat(letter, 50'001)) == Lengths{bytes, bytes, letter.size()});
  }
  CHECK(lengths(std::string(25'000, ' ') + "x") == Lengths{24'999, 2});
  CHECK(lengths(std::string(25'001, ' ') + "x") == Lengths{25'000, 2});
  CHECK(lengths(std::string(25'000, 'a') + std::string(25'000, ' ') + "b") == Lengths{25'000, 24'999, 2});
  // The largest match: a space, 25,000 marks, 25,000 line ends.
  CHECK(lengths(" " + std::string(25'000, '!') + std::string(25'000, '\n')) == Lengths{50'001});
  // U+001C counts as white space here, though to the rules it is a mark that takes the space before it.
  CHECK(lengths(repeat("\x1C ", 12'500) + "\x1C").back() == 1);
  CHECK(lengths(repeat("\x1C ", 12'499) + "\x1C").back() == 2);
}

TEST_CASE("text is cut every 400,000 characters", "[io][pre_split]") {
  const auto last = [](const std::string& text) {
    const Pieces pieces = split(text);
    CHECK(joined(pieces) == text);
    return Pieces(pieces.end() - 2, pieces.end());
  };
  for (const std::string filler : {"a ", "é ", "你 "}) {
    CAPTURE(filler);
    const std::string almost = repeat(filler, 199'998);
    CHECK(last(almost + "ab c") == Pieces{" ab", " c"});
    CHECK(last(almost + "abcd").back() == " abcd");
    CHECK(last(almost + "abcde") == Pieces{" abcd", "e"});
    const std::string twice = almost + "abcd" + repeat(filler, 199'998) + "abcd";
    CHECK(last(twice + "e") == Pieces{" abcd", "e"});
  }
  // A run begins anew at the cut: 20,000 before it and 25,000 behind it stay whole.
  const std::string text = repeat("a ", 190'000) + std::string(45'000, 'b');
  CHECK(last(text) == Pieces{" " + std::string(20'000, 'b'), std::string(25'000, 'b')});
}

TEST_CASE("no text is slow or too large for the rules", "[io][pre_split]") {
  // A process may have set Oniguruma's limits as low as it likes.
  onig_set_retry_limit_in_match(10);
  onig_set_retry_limit_in_search(10);
  onig_set_match_stack_limit_size(10);
  for (const std::string unit :
       {"A", "\u0301", "!\n", " \t", "你a", "Aあ", "'s", " \r\n", "ǅ", "1a", "\u00A0", "ーA\u0301"}) {
    const std::string text = repeat(unit, 300'000 / unit.size());
    CAPTURE(unit);
    CHECK(joined(split(text)) == text);
    CHECK(joined(split(text + "x")) == text + "x");
  }
  onig_set_retry_limit_in_match(10'000'000);
  onig_set_retry_limit_in_search(0);
  onig_set_match_stack_limit_size(0);
}

// Round trips
// -------------------------------------------------------------------------------------------------------------------

TEST_CASE("every byte string comes back", "[io][tokenizer]") {
  std::mt19937 random(11);
  const Pieces alphabet{"a", "b",        "A",    " ",    "\n",           "'s",      "1",       "你",
                        "🎉", "\xF0\x9F", "\x80", "\xFF", "\xED\xA0\x80", "<|sep|>", "\xC0\x80"};
  for (int round = 0; round < 400; ++round) {
    std::string bytes, mixed;
    for (std::size_t n = random() % 200; n > 0; --n) bytes += static_cast<char>(random() % 256);
    for (std::size_t n = random() % 100; n > 0; --n) mixed += alphabet[random() % alphabet.size()];
    for (const std::string& text : {bytes, mixed}) {
      CAPTURE(round, text);
      const Ids ids = austen().encode(text);
      REQUIRE(austen().decode(ids) == text);
      for (const k3::id token : ids) REQUIRE(token < 1792);
      REQUIRE(austen().decode(austen().encode(text, Specials::markup)) == text);
    }
  }
  const std::string broken(60'000, '\xFF');
  CHECK(austen().decode(austen().encode(broken)) == broken);
  CHECK(split("a\xF0\x9F!\xFF\xFE"
              "b") == Pieces{"a", "\xF0\x9F", "!", "\xFF\xFE", "b"});
  std::string all;
  for (std::uint32_t c = 0; c < 0x110000; ++c) {
    if (c < 0xD800 || c >= 0xE000) all += utf8(c);
  }
  CHECK((austen().decode(austen().encode(all)) == all));
}

TEST_CASE("one tokenizer serves many threads", "[io][tokenizer]") {
  const std::string text = contents(k3::test::austen_path("heldout.txt"));
  const Ids expected = austen().encode(text);
  std::vector<int> equal(4, 0);
  std::vector<std::thread> threads;
  for (int& result : equal) {
    threads.emplace_back([&result, &text, &expected] {
      for (int round = 0; round < 20; ++round) result += austen().encode(text) == expected;
      result += small_tokenizer().encode("<|a") == Ids{256, 'a'};
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(equal == std::vector<int>(4, 21));
}

// Files
// -------------------------------------------------------------------------------------------------------------------------

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
  std::swap(lines[3], lines[257]);  // any order
  CHECK(load(file_of(lines)).encode("abcdab") == Ids{258, 256});
  std::string open = file_of(lines);
  open.pop_back();  // no line end at the end
  CHECK(load(open).vocab_size() == 515);
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
}

// Text as it arrives
// ------------------------------------------------------------------------------------------------------------

TEST_CASE("a character that comes in parts waits for its end", "[io][utf8_stream]") {
  const std::string text = "a🎉é你b";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    k3::Utf8Stream stream;
    const std::string first = stream.push(text.substr(0, cut)), second = stream.push(text.substr(cut));
    CAPTURE(cut, first, second);
    CHECK(first + second == text);
    CHECK(k3::detail::valid_prefix(first) == first.size());
    CHECK(stream.pending() == 0);
    CHECK(stream.flush().empty());
  }
  k3::Utf8Stream stream;
  CHECK(stream.push("\xF0") == "");
  CHECK(stream.push("\x9F") == "");
  CHECK(stream.push("") == "");
  CHECK(stream.push("\x8E") == "");
  CHECK(stream.pending() == 3);
  CHECK(stream.push("\x89!") == "🎉!");
  CHECK(stream.push("\xF0\x9F") == "");
  CHECK(stream.flush() == "\uFFFD");
  CHECK(stream.pending() == 0);
  CHECK(stream.push("x") == "x");

  // The party popper is four single-byte tokens of this vocabulary.
  const Ids ids = austen().encode(" 🎉.");
  REQUIRE(ids.size() == 6);
  Pieces shown;
  for (const k3::id token : ids) shown.push_back(stream.push(austen().token_bytes(token)));
  CHECK(shown == Pieces{" ", "", "", "", "🎉", "."});
}

TEST_CASE("bytes of no character become U+FFFD", "[io][utf8_stream]") {
  const std::string r = "\uFFFD";
  const std::vector<std::pair<Bytes, std::string>> cases = {
      {"a\x80z", "a" + r + "z"},
      {"\xFF\xFE", r + r},
      {"\xC0\x80", r + r},                  // overlong
      {"\xE0\x80\x80", r + r + r},          // overlong
      {"\xED\xA0\x80", r + r + r},          // a surrogate
      {"\xF4\x90\x80\x80", r + r + r + r},  // above U+10FFFF
      {"\xF5\x80", r + r},
      {"\xE4\xBD!", r + "!"},  // one for the start of a sequence
      {"\xF0\x9F\x8E\xE4\xBD\xA0", r + "你"},
      {"\xF0\x9F\xF0\x9F\x8E\x89", r + "🎉"},
      {"\xE4\xBD", r},
      {"\xC3", r},
  };
  for (const auto& [bytes, text] : cases) {
    CAPTURE(text);
    CHECK(k3::to_text(bytes) == text);
    k3::Utf8Stream stream;
    std::string shown;
    for (const char byte : bytes) shown += stream.push({&byte, 1});
    CHECK(shown + stream.flush() == text);
  }
}

TEST_CASE("the steps through UTF-8 agree with the definition", "[io][utf8_stream]") {
  using k3::detail::Utf8Kind;
  for (std::uint32_t c = 0; c < 0x110000; ++c) {
    const auto step = k3::detail::utf8_step(utf8(c) + "x");
    const bool surrogate = c >= 0xD800 && c < 0xE000;
    if ((step.kind == Utf8Kind::valid) == surrogate ||
        (!surrogate && (step.code != c || step.length != utf8(c).size()))) {
      CAPTURE(c, step.length);
      FAIL("a wrong step");
    }
  }
  // No two-byte string outside U+0080 to U+07FF is a character.
  int characters = 0;
  for (int first = 0x80; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) {
      const std::string bytes{static_cast<char>(first), static_cast<char>(second)};
      const auto step = k3::detail::utf8_step(bytes);
      characters += step.kind == Utf8Kind::valid && step.length == 2;
    }
  }
  CHECK(characters == 0x800 - 0x80);
}
