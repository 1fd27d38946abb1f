// SPDX-License-Identifier: Apache-2.0
// Bytes to whole characters.
#include "io/tokenizer_support.hpp"

using namespace k3::test;

// Text as it arrives
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
