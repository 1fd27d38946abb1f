// SPDX-License-Identifier: Apache-2.0
// The tokenizer's modes: expected ids, ranks by hand, markup, plain text, the reserved block, threads.
#include "io/tokenizer_support.hpp"

using namespace k3::test;

// Vectors
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

// Round trips
TEST_CASE("every byte string comes back", "[io][tokenizer]") {
  std::mt19937 random(11);
  const Pieces alphabet{"a",  "b",        "A",    " ",    "\n",           "'s",      "1",       "你",
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
