// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tokenizer of the released size in which the words of the chat format have their released ids.

#include <string>
#include <utility>
#include <vector>

#include <k3/io/tokenizer.hpp>

namespace k3::test {

/// The 16 named ids of the released vocabulary, counted from `first`.
inline std::vector<SpecialToken> released_specials(id first) {
  const std::pair<int, const char*> names[] = {{0, "[BOS]"},
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

/// Ranks 0 to 255 are the single bytes in the released order, some words stand where they do in the released file, and
/// every other rank is a byte string that no text contains.
inline const Tokenizer& released_tokenizer() {
  static const Tokenizer tokenizer = [] {
    std::vector<std::string> tokens;
    const auto bytes = [&](int first, int last) {
      for (int byte = first; byte <= last; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
    };
    bytes(0x21, 0x7E), bytes(0xA1, 0xAC), bytes(0xAE, 0xFF), bytes(0x00, 0x20), bytes(0x7F, 0xA0), bytes(0xAD, 0xAD);
    while (tokens.size() < 163584) tokens.push_back("\xFF" + std::to_string(tokens.size()));
    const std::pair<std::size_t, const char*> words[] = {
        {414, " \""},         {554, " are"},     {878, "=\""},  {2243, "世界"},   {2482, "user"},
        {2695, " world"},     {2778, "message"}, {3900, "You"}, {4454, "open"},   {6244, " role"},
        {12092, "response"},  {14062, "system"}, {18699, "Hi"}, {19180, "Hello"}, {39964, "think"},
        {69702, "assistant"}, {93330, " terse"}};
    for (const auto& [rank, word] : words) tokens[rank] = word;
    return Tokenizer(tokens, released_specials(163584));
  }();
  return tokenizer;
}

}  // namespace k3::test
