// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <k3/io/chat_format.hpp>
#include <k3/io/utf8_stream.hpp>

namespace k3 {

/// Where a piece of a model's output belongs.
enum class ChatPart : unsigned char {
  think,     ///< the think block
  response,  ///< the response block
  argument,  ///< the value of a tool's argument
  other,     ///< between the blocks, or behind the message
  tag        ///< markup that was understood, spelled out
};

/// A piece of a model's output: whole characters.
struct ChatPiece {
  ChatPart part;
  std::string text;
};

/// What a model's output came to.
struct ChatReply {
  std::string reasoning, response;
  std::vector<ToolCall> calls;
  std::string other;      ///< text outside of all blocks; empty in a well-formed reply
  bool finished = false;  ///< the end-of-message token (or [EOS]) has come
};

/// Takes a model's output token by token and tells thinking, response and tool calls apart:
///     reasoning <|close|>think<|sep|> <|open|>response<|sep|> text <|close|>response<|sep|>
///     [<|open|>tools<|sep|> calls <|close|>tools<|sep|>] <|close|>message<|sep|> <|end_of_msg|>
///
/// Accepts anything. A block that opens closes what may not contain it; a tag that makes no sense where it stands, is
/// cut off or longer than `longest_tag` bytes is text of the block around it. So no text is lost: the pieces of all
/// calls and of `finish` in a row are the decoded output, with bytes that are not UTF-8 mended as by Utf8Stream.
/// Linear time; holds back an unfinished character or tag only. Source: the released checkpoint's chat format.
class ChatParser {
 public:
  static constexpr size longest_tag = 4096;

  /// `thinking`: the prompt ended in an open think block, otherwise in an open response block. Keeps a reference to the
  /// tokenizer. Throws invalid_argument where that lacks a control string.
  ChatParser(const Tokenizer& tokenizer, bool thinking)
      : tokenizer_(tokenizer), open_{Block::message, thinking ? Block::think : Block::response}, answered_(!thinking) {
    const char* const names[] = {detail::chat_open, detail::chat_close, detail::chat_sep, detail::chat_end};
    for (size i = 0; i < 4; ++i) {
      const std::optional<id> token = tokenizer.special_id(names[i]);
      detail::require(token.has_value(), "ChatParser", "tokenizer", std::string("without ") + names[i],
                      "one that names all four control strings");
      controls_[i] = *token;
    }
    if (const std::optional<id> end = tokenizer.special_id("[EOS]")) eos_ = *end;
  }

  /// Takes the next token. Throws invalid_argument for an id outside the vocabulary.
  std::vector<ChatPiece> push(id token) {
    std::vector<ChatPiece> out;
    const std::string_view bytes = tokenizer_.token_bytes(token);
    if (token == controls_[0] || token == controls_[1])
      start_tag(bytes, token == controls_[0], out);
    else if (token == controls_[2])
      end_tag(bytes, out);
    else if (token == controls_[3] || token == eos_)
      end_message(bytes, out);
    else if (in_tag_)
      extend_tag(bytes, out);
    else
      put(stream_.push(bytes), out);
    return out;
  }

  /// What is still held back, as text. To be called when no more tokens come.
  std::vector<ChatPiece> finish() {
    std::vector<ChatPiece> out;
    spill(out);
    return out;
  }

  /// What has come so far.
  const ChatReply& reply() const { return reply_; }

  /// What completes the message where it was cut short: the closing tags of the blocks that are open, an empty response
  /// where none has begun, and the end of the message; none where it is finished. To be encoded behind the output
  /// before the next turn. A well-formed reply that was cut between its tags then has the ids of `message_of` in
  /// `encode_chat`.
  std::vector<ChatSegment> closing() const {
    detail::ChatWriter out;
    if (reply_.finished) return {};
    for (size i = open_.size(); i-- > 1;) out.close(block_names[static_cast<size>(open_[i])]);
    if (open_.empty()) {
      out.segments.push_back({detail::chat_end, true});
    } else {
      // A response behind calls would be no reply that the model knows.
      if (!answered_) out.block("response", "");
      out.end_message();
    }
    return std::move(out.segments);
  }

 private:
  enum class Block : unsigned char { message, think, response, tools, call, argument };
  static constexpr const char* block_names[] = {"message", "think", "response", "tools", "call", "argument"};

  /// An opening tag taken apart: name, then ` key="value"` any number of times.
  struct Tag {
    std::string_view name;
    std::vector<std::pair<std::string_view, std::string>> attributes;

    const std::string* find(std::string_view key) const {
      for (const auto& [name_of, value] : attributes)
        if (name_of == key) return &value;
      return nullptr;
    }
  };

  static std::optional<Tag> read_tag(std::string_view text) {
    Tag tag;
    tag.name = text.substr(0, text.find(' '));
    text.remove_prefix(tag.name.size());
    while (!text.empty()) {
      const size equals = text.find("=\"");
      if (text[0] != ' ' || equals == text.npos || equals < 2) return std::nullopt;
      const std::string_view key = text.substr(1, equals - 1);
      const size end = text.find('"', equals + 2);
      if (end == text.npos || key.find_first_of(" \"") != key.npos || tag.find(key)) return std::nullopt;
      tag.attributes.emplace_back(key, detail::unescape_attribute(text.substr(equals + 2, end - equals - 2)));
      text.remove_prefix(end + 1);
    }
    return tag;
  }

  // The block that text goes to.
  ChatPart part() const {
    if (open_.empty() || reply_.finished) return ChatPart::other;
    switch (open_.back()) {
      case Block::think: return ChatPart::think;
      case Block::response: return ChatPart::response;
      case Block::argument: return ChatPart::argument;
      default: return ChatPart::other;
    }
  }

  void put(std::string text, std::vector<ChatPiece>& out) {
    if (text.empty()) return;
    const ChatPart where = part();
    if (where == ChatPart::think)
      reply_.reasoning += text;
    else if (where == ChatPart::response)
      reply_.response += text;
    else if (where == ChatPart::argument)
      reply_.calls.back().arguments.back().value += text;
    else
      reply_.other += text;
    if (!out.empty() && out.back().part == where)
      out.back().text += text;
    else
      out.push_back({where, std::move(text)});
  }

  // Makes text of whatever is held back.
  void spill(std::vector<ChatPiece>& out) {
    put(stream_.flush(), out);
    if (!std::exchange(in_tag_, false)) return;
    put(to_text(tag_), out);
    tag_.clear();
  }

  void start_tag(std::string_view control, bool opens, std::vector<ChatPiece>& out) {
    spill(out);
    in_tag_ = true;
    opens_ = opens;
    tag_ = control;
    tag_begin_ = control.size();
  }
  void extend_tag(std::string_view bytes, std::vector<ChatPiece>& out) {
    tag_ += bytes;
    if (tag_.size() <= longest_tag) return;
    in_tag_ = false;
    put(stream_.push(tag_), out);  // it may end inside a character
    tag_.clear();
  }
  void end_tag(std::string_view control, std::vector<ChatPiece>& out) {
    if (in_tag_ && !reply_.finished) {
      const std::string_view inner = std::string_view(tag_).substr(tag_begin_);
      if (opens_ ? open_block(inner) : close_block(inner)) {
        in_tag_ = false;
        out.push_back({ChatPart::tag, tag_ + std::string(control)});
        tag_.clear();
        return;
      }
    }
    spill(out);
    put(std::string(control), out);
  }
  void end_message(std::string_view control, std::vector<ChatPiece>& out) {
    spill(out);
    if (reply_.finished) return put(std::string(control), out);
    reply_.finished = true;
    out.push_back({ChatPart::tag, std::string(control)});
  }

  // Closes what is open down to the innermost block of this kind, which stays; false where there is none.
  bool close_to(Block block) {
    size depth = open_.size();
    while (depth > 0 && open_[depth - 1] != block) --depth;
    if (depth > 0) open_.resize(depth);
    return depth > 0;
  }

  bool open_block(std::string_view inner) {
    if (detail::valid_prefix(inner) != inner.size()) return false;
    const std::optional<Tag> tag = read_tag(inner);
    if (!tag) return false;
    const std::string* const first = tag->find(tag->name == "call" ? "tool" : "key");
    if (tag->name == "think" || tag->name == "response" || tag->name == "tools") {
      if (!tag->attributes.empty() || !close_to(Block::message)) return false;
      answered_ = answered_ || tag->name != "think";
      open_.push_back(tag->name == "think" ? Block::think : tag->name == "tools" ? Block::tools : Block::response);
    } else if (tag->name == "call") {
      if (!first || !close_to(Block::tools)) return false;
      reply_.calls.push_back({*first, index_of(*tag), {}});
      open_.push_back(Block::call);
    } else if (tag->name == "argument") {
      if (!first || !close_to(Block::call)) return false;
      const std::string* const type = tag->find("type");
      reply_.calls.back().arguments.push_back({*first, type ? *type : "string", ""});
      open_.push_back(Block::argument);
    } else {
      return false;
    }
    return true;
  }
  bool close_block(std::string_view inner) {
    for (size kind = 0; kind < std::size(block_names); ++kind) {
      if (inner != block_names[kind]) continue;
      if (!close_to(static_cast<Block>(kind))) return false;
      open_.pop_back();
      return true;
    }
    return false;
  }

  // The attribute `index`, or the position of the call where that is no number.
  size index_of(const Tag& tag) const {
    size value = 0;
    const std::string* const text = tag.find("index");
    if (!text) return reply_.calls.size();
    const auto [end, problem] = std::from_chars(text->data(), text->data() + text->size(), value);
    return problem == std::errc() && end == text->data() + text->size() ? value : reply_.calls.size();
  }

  const Tokenizer& tokenizer_;
  id controls_[4] = {}, eos_ = -1;
  std::vector<Block> open_;  // outermost first; at most message, tools, call, argument
  bool answered_;            // a response or a call has begun
  bool in_tag_ = false, opens_ = false;
  std::string tag_;     // from its control string on, as spelled
  size tag_begin_ = 0;  // where its inside begins
  Utf8Stream stream_;
  ChatReply reply_;
};

/// The message that a reply becomes in the conversation's history.
inline ChatMessage message_of(const ChatReply& reply) {
  return {ChatRole::assistant, reply.response, reply.reasoning, reply.calls};
}

}  // namespace k3
