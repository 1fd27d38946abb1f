// SPDX-License-Identifier: Apache-2.0
// A model's output: below 0x10 a reserved id, every other byte a token of its own; the first byte says whether it
// thinks.

#include <k3/io/chat.hpp>
#include <k3/io/tokenizer_writer.hpp>

#include "fuzz.hpp"

void run_one(std::string_view input) {
  static const k3::Tokenizer tokenizer(k3::made_up_vocabulary(256), k3::kimi_k3_specials(256));
  if (input.empty()) return;
  std::vector<k3::id> ids;
  for (const char c : input.substr(1)) {
    const auto byte = static_cast<unsigned char>(c);
    ids.push_back(byte < 0x10 ? 256 + byte : tokenizer.encode({&c, 1})[0]);
  }
  k3::ChatParser parser(tokenizer, input[0] % 2 == 0);
  std::string all, parts;
  const auto take = [&](const std::vector<k3::ChatPiece>& pieces) {
    for (const k3::ChatPiece& piece : pieces) {
      require_property(k3::detail::valid_prefix(piece.text) == piece.text.size(), "pieces are UTF-8");
      all += piece.text;
      if (piece.part != k3::ChatPart::tag) parts += piece.text;
    }
  };
  for (const k3::id token : ids) take(parser.push(token));
  take(parser.finish());
  require_property(all == k3::to_text(tokenizer.decode(ids)), "no text is lost");
  const k3::ChatReply& reply = parser.reply();
  std::size_t bytes = reply.reasoning.size() + reply.response.size() + reply.other.size();
  for (const k3::ToolCall& call : reply.calls)
    for (const k3::ToolArgument& argument : call.arguments) bytes += argument.value.size();
  require_property(bytes == parts.size(), "the reply holds all that is no markup");
  // What completes the message is understood by a parser that goes on.
  k3::ChatParser again = parser;
  for (const k3::id token : k3::encode_chat(tokenizer, parser.closing())) again.push(token);
  require_property(again.reply().finished, "a closed message is finished");
  require_property(again.reply().response == reply.response && again.reply().other == reply.other,
                   "closing adds no text");
  k3::encode_chat(tokenizer, {k3::message_of(reply)});
}
