// SPDX-License-Identifier: Apache-2.0
#pragma once
// A tokenizer of the released size in which the words of the chat format have their released ids.

#include <string>
#include <utility>
#include <vector>

#include <k3/io/tokenizer.hpp>
#include <k3/io/tokenizer_writer.hpp>

namespace k3::test {

/// Ranks 0 to 255 are the single bytes in the released order, some words stand where they do in the released file, and
/// every other rank is a byte string that no text contains.
inline const Tokenizer& released_tokenizer() {
  static const Tokenizer tokenizer = [] {
    std::vector<std::string> tokens = made_up_vocabulary(256);
    while (tokens.size() < 163584) tokens.push_back("\xFF" + std::to_string(tokens.size()));
    const std::pair<std::size_t, const char*> words[] = {
        {414, " \""},         {554, " are"},     {878, "=\""},  {2243, "世界"},   {2482, "user"},
        {2695, " world"},     {2778, "message"}, {3900, "You"}, {4454, "open"},   {6244, " role"},
        {12092, "response"},  {14062, "system"}, {18699, "Hi"}, {19180, "Hello"}, {39964, "think"},
        {69702, "assistant"}, {93330, " terse"}};
    for (const auto& [rank, word] : words) tokens[rank] = word;
    return Tokenizer(tokens, kimi_k3_specials(163584));
  }();
  return tokenizer;
}

}  // namespace k3::test
