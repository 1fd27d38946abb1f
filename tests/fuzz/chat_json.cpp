// SPDX-License-Identifier: Apache-2.0
// A conversation as JSON.

#include <k3/io/chat.hpp>
#include <k3/io/tokenizer_writer.hpp>

#include "fuzz.hpp"

void run_one(std::string_view input) {
  static const k3::Tokenizer tokenizer(k3::made_up_vocabulary(256), k3::kimi_k3_specials(256));
  try {
    const k3::ChatRequest request = k3::chat_from_json(input, "chat.json");
    const std::vector<k3::ChatSegment> segments = k3::chat_segments(request.messages, request.options);
    std::string text;
    for (const k3::ChatSegment& segment : segments) text += segment.text;
    require_property(tokenizer.decode(k3::encode_chat(tokenizer, segments)) == text, "ids decode to the segments");
  } catch (const k3::format_error&) {
  }
}
