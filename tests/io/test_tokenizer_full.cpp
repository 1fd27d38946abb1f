// SPDX-License-Identifier: Apache-2.0
// A vocabulary of the released size: written, read back, and no text that takes more than linear time.

#include <chrono>
#include <map>
#include <random>

#include <k3/io/tokenizer.hpp>
#include <k3/io/tokenizer_writer.hpp>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"

namespace {

const k3::Tokenizer& full_tokenizer() {
  static const k3::Tokenizer tokenizer = [] {
    const k3::test::ScratchFolder folder;
    k3::test::write_file(folder / "tiktoken.model", k3::tiktoken_text(k3::made_up_vocabulary(163584)));
    k3::test::write_file(folder / "tokenizer_config.json", k3::tokenizer_config_text(k3::kimi_k3_specials(163584)));
    return k3::Tokenizer::from_directory(folder.path);
  }();
  return tokenizer;
}

double seconds(const std::string& text) {
  double best = 1e9;
  for (int run = 0; run < 3; ++run) {
    const auto start = std::chrono::steady_clock::now();
    const std::size_t tokens = full_tokenizer().encode(text).size();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    CHECK(tokens > 0);
    best = std::min(best, time.count());
  }
  return best;
}

}  // namespace

TEST_CASE("a made-up vocabulary of the released size", "[io][tokenizer]") {
  const k3::Tokenizer& tokenizer = full_tokenizer();
  CHECK(tokenizer.rank_count() == 163584);
  CHECK(tokenizer.vocab_size() == 163840);
  CHECK(tokenizer.special_id("<|end_of_msg|>") == 163586);
  CHECK(tokenizer.token_bytes(0) == "!");
  CHECK(tokenizer.token_bytes(198) == "\n");
  CHECK(tokenizer.token_bytes(220) == " ");
  CHECK(tokenizer.token_bytes(256) == " e");
  CHECK(tokenizer.encode("the rat").size() < 7);
  for (const std::string text : {"the rat sat on the mat", "Ünïcödé 中文 🎉\r\n\t  12345", "\xFF\x80 <|open|>"})
    for (const k3::Specials mode : {k3::Specials::plain, k3::Specials::markup, k3::Specials::named})
      CHECK(tokenizer.decode(tokenizer.encode(text, mode)) == text);
  CHECK_THROWS_AS(k3::made_up_vocabulary(255), k3::invalid_argument);
  CHECK(k3::made_up_vocabulary(256).size() == 256);
}

TEST_CASE("base64 in both directions", "[io][tokenizer]") {
  for (const std::string text : {"f", "fo", "foo", "foob", "fooba", "foobar"}) {
    std::string back;
    CHECK(k3::detail::decode_base64(k3::detail::encode_base64(text), back));
    CHECK(back == text);
  }
  CHECK(k3::detail::encode_base64("fooba") == "Zm9vYmE=");
  CHECK(k3::detail::encode_base64("f") == "Zg==");
}

TEST_CASE("long pieces are merged by rank whatever the ranks", "[io][tokenizer]") {
  // Shuffled, so that pairs of letters have ranks of all sizes.
  std::vector<std::string> tokens = k3::made_up_vocabulary(163584);
  std::mt19937 random(9);
  for (std::size_t i = tokens.size() - 1; i > 256; --i) std::swap(tokens[i], tokens[256 + random() % (i - 255)]);
  const k3::Tokenizer tokenizer(tokens, {});
  std::map<std::string, std::size_t> ranks;
  for (std::size_t rank = 0; rank < tokenizer.rank_count(); ++rank)
    ranks.emplace(tokenizer.token_bytes(static_cast<k3::id>(rank)), rank);
  for (int round = 0; round < 30; ++round) {
    std::string text;
    for (std::size_t length = 49 + random() % 150; text.size() < length;)
      text += static_cast<char>('a' + random() % (round % 2 ? 26 : 3));
    // The naive way: look at all pairs, join the one of the lowest rank, begin again.
    std::vector<std::string> parts;
    for (const char c : text) parts.emplace_back(1, c);
    for (;;) {
      std::size_t best = tokenizer.rank_count(), at = 0;
      for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto found = ranks.find(parts[i] + parts[i + 1]);
        if (found != ranks.end() && found->second < best) best = found->second, at = i;
      }
      if (best == tokenizer.rank_count()) break;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
    std::vector<k3::id> expected;
    for (const std::string& part : parts) expected.push_back(static_cast<k3::id>(ranks.at(part)));
    INFO(text);
    CHECK(tokenizer.encode(text) == expected);
  }
}

TEST_CASE("encoding takes linear time on any text", "[io][tokenizer]") {
  std::mt19937 random(3);
  const auto text = [&](int kind, std::size_t bytes) {
    std::string result;
    while (result.size() < bytes) {
      if (kind == 0) result += 'a';
      if (kind == 1) result += static_cast<char>('a' + random() % 26);
      if (kind == 2) result += ' ';
      if (kind == 3) result += "\xCC\x81";
      if (kind == 4) result += static_cast<char>(random() & 255u);
    }
    return result;
  };
  for (int kind = 0; kind < 5; ++kind) {
    const double small = seconds(text(kind, 100'000)), large = seconds(text(kind, 800'000));
    CAPTURE(kind, small, large);
    CHECK(large < 24 * small);  // 8 times the bytes; quadratic time would be 64 times
  }
}
