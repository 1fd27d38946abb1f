// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <k3/core/error.hpp>
#include <k3/io/tokenizer.hpp>

namespace k3 {

/// A piece of a prompt that is encoded by itself, so that no merge reaches into its neighbours. `control`: `text` is
/// the name of a control string and becomes its id; otherwise it is only text, whatever it spells.
struct ChatSegment {
  std::string text;
  bool control = false;

  friend bool operator==(const ChatSegment&, const ChatSegment&) = default;
};

/// One argument of a tool call. `value` is what stands between the tags: a string raw, any other type as JSON.
struct ToolArgument {
  std::string key, type = "string", value;

  friend bool operator==(const ToolArgument&, const ToolArgument&) = default;
};

/// A call of a tool in an assistant's message; `index` counts the calls of that message.
struct ToolCall {
  std::string tool;
  size index = 0;
  std::vector<ToolArgument> arguments;

  friend bool operator==(const ToolCall&, const ToolCall&) = default;
};

enum class ChatRole : unsigned char { system, user, assistant, tool };

/// The word for a role in the attribute `role`.
constexpr const char* text(ChatRole role) {
  constexpr const char* names[] = {"system", "user", "assistant", "tool"};
  return names[static_cast<size>(role)];
}

/// A message of a conversation.
struct ChatMessage {
  ChatRole role = ChatRole::user;
  std::string content;
  std::string reasoning{};        ///< assistant: what its think block held; the model expects it back
  std::vector<ToolCall> calls{};  ///< assistant
  std::string tool{};             ///< tool: whose result `content` is
  size index = 0;                 ///< tool: of which call
};

/// What stands around the conversation. The bodies of the last three are written as given: the released wording is no
/// part of this library.
struct ChatOptions {
  bool thinking = true;           ///< replies begin with a think block
  bool generation_prompt = true;  ///< end with the opening of a reply
  nlohmann::json tools{};         ///< declared tools; null: no declaration
  std::optional<std::string> thinking_effort{}, tool_choice{}, response_format{};
};

namespace detail {

inline constexpr const char* chat_open = "<|open|>";
inline constexpr const char* chat_close = "<|close|>";
inline constexpr const char* chat_sep = "<|sep|>";
inline constexpr const char* chat_end = "<|end_of_msg|>";

/// An attribute's value between its quotation marks: first & then " are replaced.
inline std::string escape_attribute(std::string_view value) {
  std::string result;
  for (const char c : value) {
    if (c == '&')
      result += "&amp;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

/// The reverse of escape_attribute; anything else that looks like an entity stays as it is.
inline std::string unescape_attribute(std::string_view value) {
  std::string result;
  while (!value.empty()) {
    const bool amp = value.starts_with("&amp;"), quote = value.starts_with("&quot;");
    result += amp ? '&' : quote ? '"' : value[0];
    value.remove_prefix(amp ? 5 : quote ? 6 : 1);
  }
  return result;
}

/// Puts segments in a row.
class ChatWriter {
 public:
  using Attributes = std::vector<std::pair<std::string, std::string>>;

  void open(const std::string& name, const Attributes& attributes = {}) {
    segments.push_back({chat_open, true});
    plain(name);
    for (const auto& [key, value] : attributes) {
      plain(" " + key);
      plain("=\"");
      plain(escape_attribute(value));
      plain("\"");
    }
    segments.push_back({chat_sep, true});
  }
  void close(const std::string& name) {
    segments.push_back({chat_close, true});
    plain(name);
    segments.push_back({chat_sep, true});
  }
  void plain(const std::string& text) {
    if (!text.empty()) segments.push_back({text, false});
  }
  void end_message() {
    close("message");
    segments.push_back({chat_end, true});
  }
  void block(const std::string& name, const std::string& body) {
    open(name);
    plain(body);
    close(name);
  }
  void system(const std::string& type, const std::string& body) {
    open("message", {{"role", "system"}, {"type", type}});
    plain(body);
    end_message();
  }
  void message(const ChatMessage& message, bool thinking) {
    Attributes attributes = {{"role", text(message.role)}};
    if (message.role == ChatRole::tool) {
      attributes.emplace_back("tool", message.tool);
      attributes.emplace_back("index", std::to_string(message.index));
    }
    open("message", attributes);
    if (message.role == ChatRole::assistant)
      reply(message, thinking);
    else
      plain(message.content);
    end_message();
  }

  std::vector<ChatSegment> segments;

 private:
  void reply(const ChatMessage& message, bool thinking) {
    if (thinking || !message.reasoning.empty()) block("think", message.reasoning);
    block("response", message.content);
    if (message.calls.empty()) return;
    open("tools");
    for (const ToolCall& call : message.calls) {
      open("call", {{"tool", call.tool}, {"index", std::to_string(call.index)}});
      for (const ToolArgument& argument : call.arguments) {
        open("argument", {{"key", argument.key}, {"type", argument.type}});
        plain(argument.value);
        close("argument");
      }
      close("call");
    }
    close("tools");
  }
};

}  // namespace detail

/// A conversation in the chat format. A message is
///     <|open|>message role="user"<|sep|>text<|close|>message<|sep|><|end_of_msg|>
/// and an assistant's text is a think block (in thinking mode always, even empty), a response block and, with calls, a
/// tools block. Order: tool declaration, thinking effort, messages, tool choice, response format, opening of a reply.
/// Nothing comes before the first message. Source: the released checkpoint's chat format.
inline std::vector<ChatSegment> chat_segments(const std::vector<ChatMessage>& messages,
                                              const ChatOptions& options = {}) {
  detail::ChatWriter out;
  if (!options.tools.is_null()) {
    const std::string json = options.tools.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    out.system("tool-declare", "```json\n" + json + "\n```");
  }
  if (options.thinking_effort) out.system("thinking-effort", *options.thinking_effort);
  for (const ChatMessage& message : messages) out.message(message, options.thinking);
  if (options.tool_choice) out.system("tool-choice", *options.tool_choice);
  if (options.response_format) out.system("response-format", *options.response_format);
  if (options.generation_prompt) {
    out.open("message", {{"role", text(ChatRole::assistant)}});
    out.open(options.thinking ? "think" : "response");
  }
  return std::move(out.segments);
}

/// The ids of segments, each encoded by itself; text never becomes a reserved id. Throws invalid_argument where the
/// vocabulary lacks a control string, and for what Tokenizer::encode refuses.
inline std::vector<id> encode_chat(const Tokenizer& tokenizer, std::span<const ChatSegment> segments) {
  std::vector<id> ids;
  for (const ChatSegment& segment : segments) {
    if (segment.control) {
      const std::optional<id> control = tokenizer.special_id(segment.text);
      detail::require(control.has_value(), "encode_chat", "control string", '"' + segment.text + "\" without an id",
                      "a vocabulary that names all four control strings");
      ids.push_back(*control);
    } else {
      const std::vector<id> part = tokenizer.encode(segment.text, Specials::plain);
      ids.insert(ids.end(), part.begin(), part.end());
    }
  }
  return ids;
}

/// The ids of a whole conversation.
inline std::vector<id> encode_chat(const Tokenizer& tokenizer, const std::vector<ChatMessage>& messages,
                                   const ChatOptions& options = {}) {
  return encode_chat(tokenizer, chat_segments(messages, options));
}

/// Whether a vocabulary names the four control strings, without which there is no chat.
inline bool can_chat(const Tokenizer& tokenizer) {
  for (const char* control : {detail::chat_open, detail::chat_close, detail::chat_sep, detail::chat_end})
    if (!tokenizer.special_id(control)) return false;
  return true;
}

}  // namespace k3
