// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <k3/io/tokenizer_files.hpp>

namespace k3 {

/// The 16 named ids of Kimi K3's reserved block, which begins at `first`.
inline std::vector<SpecialToken> kimi_k3_specials(id first) {
  constexpr std::pair<int, const char*> names[] = {{0, "[BOS]"},
                                                   {1, "[EOS]"},
                                                   {2, "<|end_of_msg|>"},
                                                   {3, "<|open|>"},
                                                   {4, "<|close|>"},
                                                   {5, "<|sep|>"},
                                                   {6, "[start_header_id]"},
                                                   {7, "[end_header_id]"},
                                                   {9, "[EOT]"},
                                                   {18, "<|media_begin|>"},
                                                   {19, "<|media_content|>"},
                                                   {20, "<|media_end|>"},
                                                   {21, "<|media_pad|>"},
                                                   {65, "<osagent_mode>"},
                                                   {254, "[UNK]"},
                                                   {255, "[PAD]"}};
  std::vector<SpecialToken> specials;
  for (const auto& [offset, name] : names) specials.push_back({first + offset, name, offset < 3 || offset > 5});
  return specials;
}

/// Byte strings for a made-up vocabulary of `count` ranks: the 256 single bytes in the released order, then words of
/// two letters, of three and so on, each also with a space before it. Every word's beginnings are tokens too, so
/// merging reaches it. Throws invalid_argument for fewer than 256 and for more than 2^23, whose file of 142 MB is well
/// within what is read.
inline std::vector<std::string> made_up_vocabulary(size count) {
  detail::require(count >= 256 && count <= size{1} << 23, "made_up_vocabulary", "count", count,
                  "from the 256 single bytes to 2^23");
  std::vector<std::string> tokens;
  tokens.reserve(count);
  const auto bytes = [&](int first, int last) {
    for (int byte = first; byte <= last; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  };
  bytes(0x21, 0x7E), bytes(0xA1, 0xAC), bytes(0xAE, 0xFF), bytes(0x00, 0x20), bytes(0x7F, 0xA0), bytes(0xAD, 0xAD);
  constexpr std::string_view letters = "etaoinshrdlucmfwypvbgkjqxz";
  std::vector<std::string> last = {" "};
  for (const char letter : letters) last.emplace_back(1, letter);
  while (tokens.size() < count) {
    std::vector<std::string> next;
    for (const std::string& word : last)
      for (const char letter : letters) {
        if (tokens.size() == count) return tokens;
        tokens.push_back(word + letter);
        next.push_back(tokens.back());
      }
    last = std::move(next);
  }
  return tokens;
}

namespace detail {

inline std::string encode_base64(std::string_view bytes) {
  constexpr std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string result;
  for (size at = 0; at < bytes.size(); at += 3) {
    const size count = smaller<size>(3, bytes.size() - at);
    std::uint32_t word = 0;
    for (size i = 0; i < 3; ++i) word = word << 8 | (i < count ? static_cast<unsigned char>(bytes[at + i]) : 0u);
    for (size i = 0; i < 4; ++i) result += i <= count ? alphabet[word >> (18 - 6 * i) & 63u] : '=';
  }
  return result;
}

}  // namespace detail

/// The text of a tiktoken.model file with these byte strings as its ranks.
inline std::string tiktoken_text(const std::vector<std::string>& tokens) {
  std::string text;
  for (size rank = 0; rank < tokens.size(); ++rank)
    text += detail::encode_base64(tokens[rank]) + " " + std::to_string(rank) + "\n";
  return text;
}

/// The text of a tokenizer_config.json file that names these ids.
inline std::string tokenizer_config_text(const std::vector<SpecialToken>& specials) {
  nlohmann::ordered_json table = nlohmann::ordered_json::object();
  for (const SpecialToken& special : specials)
    table[std::to_string(special.token)] = {{"content", special.name}, {"special", special.special}};
  return nlohmann::ordered_json{{"added_tokens_decoder", std::move(table)}}.dump(2) + "\n";
}

}  // namespace k3
