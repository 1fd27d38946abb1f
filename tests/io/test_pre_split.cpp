// SPDX-License-Identifier: Apache-2.0
// How text is cut into words before ranks are merged.
#include "io/tokenizer_support.hpp"

using namespace k3::test;

// Pieces
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
