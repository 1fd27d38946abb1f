// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the tokenizer's tests share.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include <k3/io/tokenizer.hpp>

#include "support/catch.hpp"
#include "support/data.hpp"

namespace k3::test {

using k3::Specials;
using k3::Tokenizer;
using Ids = std::vector<k3::id>;
using Pieces = std::vector<std::string>;
using Bytes = std::string;

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

inline const Tokenizer& austen() {
  static const Tokenizer tokenizer = Tokenizer::from_directory(k3::test::austen_path());
  return tokenizer;
}

inline Pieces split(const std::string& text) {
  Pieces pieces;
  k3::PreSplitter().split(text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

inline std::string joined(const Pieces& pieces) {
  std::string text;
  for (const std::string& piece : pieces) text += piece;
  return text;
}

inline std::vector<std::size_t> lengths(const std::string& text) {
  std::vector<std::size_t> all;
  for (const std::string& piece : split(text)) all.push_back(piece.size());
  return all;
}

inline std::string repeat(const std::string& text, std::size_t times) {
  std::string all;
  for (; times > 0; --times) all += text;
  return all;
}

inline std::string utf8(char32_t c) {
  const auto byte = [](char32_t value) { return static_cast<char>(static_cast<unsigned char>(value)); };
  if (c < 0x80) return {byte(c)};
  if (c < 0x800) return {byte(0xC0 | c >> 6), byte(0x80 | (c & 63))};
  if (c < 0x10000) return {byte(0xE0 | c >> 12), byte(0x80 | (c >> 6 & 63)), byte(0x80 | (c & 63))};
  return {byte(0xF0 | c >> 18), byte(0x80 | (c >> 12 & 63)), byte(0x80 | (c >> 6 & 63)), byte(0x80 | (c & 63))};
}

/// A vocabulary of the 256 single bytes and "<|", with the four control strings and one more name.
inline Tokenizer small_tokenizer() {
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

}  // namespace k3::test
