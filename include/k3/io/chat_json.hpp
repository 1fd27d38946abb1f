// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <k3/io/chat_format.hpp>
#include <k3/io/config_reader.hpp>
#include <k3/io/tokenizer_files.hpp>

namespace k3 {

/// A conversation as a file holds it.
struct ChatRequest {
  std::vector<ChatMessage> messages;
  ChatOptions options{};
};

namespace detail {

/// An object of chat JSON: every key must be asked for, every error says where.
class ChatObject {
 public:
  ChatObject(const nlohmann::json& object, std::string path, std::string place)
      : object_(object), path_(std::move(path)), place_(std::move(place)) {
    if (!object_.is_object()) fail("", "is " + kind(object_) + ", expected an object");
  }

  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    const std::string dot = place_.empty() || key.empty() ? "" : ".";
    throw format_error(path_, place_ + dot + printable(key), what);
  }
  static std::string kind(const nlohmann::json& value) {
    return value.is_null() ? "null" : std::string("a value of type ") + value.type_name();
  }

  void only(std::initializer_list<const char*> keys) const {
    for (const auto& item : object_.items()) {
      bool known = false;
      for (const char* key : keys) known = known || item.key() == key;
      if (!known) fail(item.key(), "is not a key that may stand here");
    }
  }
  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }
  const nlohmann::json& at(const char* key) const {
    if (!has(key)) fail(key, "is missing");
    return object_.at(key);
  }
  std::string string(const char* key) const {
    if (!at(key).is_string()) fail(key, "is " + kind(at(key)) + ", expected a string");
    return at(key).get<std::string>();
  }
  std::string string_or_empty(const char* key) const { return has(key) ? string(key) : ""; }
  const nlohmann::json& list(const char* key) const {
    if (!at(key).is_array()) fail(key, "is " + kind(at(key)) + ", expected a list");
    return at(key);
  }
  size count(const char* key) const {
    if (!is_whole(at(key)) || at(key).get<std::uint64_t>() >= (std::uint64_t{1} << 31))
      fail(key, "is not a whole number from 0 to 2^31 - 1");
    return static_cast<size>(at(key).get<std::uint64_t>());
  }
  bool flag(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!at(key).is_boolean()) fail(key, "is " + kind(at(key)) + ", expected true or false");
    return at(key).get<bool>();
  }
  ChatObject inner(const nlohmann::json& value, const std::string& place) const {
    return {value, path_, place_.empty() || place[0] == '[' ? place_ + place : place_ + "." + place};
  }

 private:
  const nlohmann::json& object_;
  std::string path_, place_;
};

/// The arguments of a call: an object, or a string that holds one.
inline std::vector<ToolArgument> chat_arguments(const ChatObject& function) {
  nlohmann::json arguments = function.has("arguments") ? function.at("arguments") : nlohmann::json::object();
  if (arguments.is_string()) {
    const std::string text = arguments.get<std::string>();
    try {
      arguments = parse_json("arguments", text, [](int, const std::string&, size) {});
    } catch (const format_error& problem) {
      function.fail("arguments", std::string("is not valid JSON: ") + problem.what());
    }
  }
  if (!arguments.is_object()) function.fail("arguments", "is " + ChatObject::kind(arguments) + ", expected an object");
  std::vector<ToolArgument> result;
  for (const auto& item : arguments.items()) {
    const nlohmann::json& value = item.value();
    const char* const type = value.is_number() ? "number" : value.type_name();
    result.push_back({item.key(), type, value.is_string() ? value.get<std::string>() : value.dump()});
  }
  return result;
}

/// The calls of a conversation so far, by their ids.
using ChatCallIds = std::unordered_map<std::string, ToolCall>;

inline std::vector<ToolCall> chat_calls(const ChatObject& message, ChatCallIds& known) {
  std::vector<ToolCall> calls;
  const nlohmann::json& list = message.list("tool_calls");
  for (size i = 0; i < list.size(); ++i) {
    const ChatObject call = message.inner(list[i], "tool_calls[" + std::to_string(i) + "]");
    call.only({"id", "type", "function"});
    if (call.has("type") && call.string("type") != "function") call.fail("type", "is not \"function\"");
    const ChatObject function = call.inner(call.at("function"), "function");
    function.only({"name", "arguments"});
    calls.push_back({function.string("name"), i, chat_arguments(function)});
    if (call.has("id")) known[call.string("id")] = {calls.back().tool, i, {}};
  }
  return calls;
}

/// Which call a tool's message answers: by the id of an earlier call, or by name and index.
inline void chat_result_of(const ChatObject& object, const ChatCallIds& known, ChatMessage& message) {
  if (!object.has("tool_call_id")) {
    message.tool = object.string("name");
    message.index = object.has("index") ? object.count("index") : 0;
    return;
  }
  const std::string wanted = object.string("tool_call_id");
  const auto call = known.find(wanted);
  if (call == known.end()) object.fail("tool_call_id", "names no earlier call: " + printable(wanted));
  message.tool = call->second.tool;
  message.index = call->second.index;
}

inline ChatMessage chat_message(const ChatObject& object, ChatCallIds& known) {
  ChatMessage message;
  const std::string role = object.string("role");
  if (role == "assistant") {
    object.only({"role", "content", "reasoning_content", "tool_calls"});
    message.role = ChatRole::assistant;
    message.reasoning = object.string_or_empty("reasoning_content");
    if (object.has("tool_calls")) message.calls = chat_calls(object, known);
    // A reply may consist of calls alone.
    message.content = message.calls.empty() ? object.string("content") : object.string_or_empty("content");
    return message;
  }
  message.content = object.string("content");
  if (role == "tool") {
    object.only({"role", "content", "name", "index", "tool_call_id"});
    message.role = ChatRole::tool;
    chat_result_of(object, known, message);
    return message;
  }
  object.only({"role", "content"});
  if (role != "user" && role != "system")
    object.fail("role", "is \"" + printable(role) + "\", expected system, user, assistant or tool");
  message.role = role == "user" ? ChatRole::user : ChatRole::system;
  return message;
}

inline std::vector<ChatMessage> chat_messages(const ChatObject& holder, const nlohmann::json& list,
                                              const std::string& place) {
  std::vector<ChatMessage> messages;
  ChatCallIds known;
  for (size i = 0; i < list.size(); ++i)
    messages.push_back(chat_message(holder.inner(list[i], place + "[" + std::to_string(i) + "]"), known));
  return messages;
}

}  // namespace detail

/// A conversation from JSON: a list of messages, or an object with `messages` and any of `tools` (a list), `thinking`
/// (true or false), `thinking_effort`, `tool_choice`, `response_format` (bodies of their system messages).
/// A message has `role` (system, user, assistant, tool) and `content`, a string; an assistant's also
/// `reasoning_content` and `tool_calls` ([{id, type, function: {name, arguments}}]); a tool's `tool_call_id`, or `name`
/// and `index`. Throws format_error, naming `path` and the place in it, for bad syntax (with the byte), a key that is
/// missing, unknown or comes twice, a value of another type, nesting deeper than 64, and an id that no earlier call
/// has.
inline ChatRequest chat_from_json(std::string_view text, const std::string& path) {
  const nlohmann::json json = detail::parse_json(path, text, [](int, const std::string&, size) {});
  ChatRequest request;
  if (json.is_array()) {
    const nlohmann::json nothing = nlohmann::json::object();
    request.messages = detail::chat_messages(detail::ChatObject(nothing, path, ""), json, "");
    return request;
  }
  const detail::ChatObject object(json, path, "");
  object.only({"messages", "tools", "thinking", "thinking_effort", "tool_choice", "response_format"});
  request.messages = detail::chat_messages(object, object.list("messages"), "messages");
  if (object.has("tools")) request.options.tools = object.list("tools");
  request.options.thinking = object.flag("thinking", true);
  if (object.has("thinking_effort")) request.options.thinking_effort = object.string("thinking_effort");
  if (object.has("tool_choice")) request.options.tool_choice = object.string("tool_choice");
  if (object.has("response_format")) request.options.response_format = object.string("response_format");
  return request;
}

}  // namespace k3
