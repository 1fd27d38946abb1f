// SPDX-License-Identifier: Apache-2.0
// Conversations from JSON: what is read, and that everything else is refused with its place.

#include <k3/io/chat.hpp>

#include "io/safetensors_support.hpp"
#include "support/catch.hpp"

namespace {

std::string rendered(const k3::ChatRequest& request) {
  std::string text;
  for (const k3::ChatSegment& segment : k3::chat_segments(request.messages, request.options)) text += segment.text;
  return text;
}

std::string problem(const std::string& json) {
  return k3::test::thrown<k3::format_error>([&] { k3::chat_from_json(json, "chat.json"); }).what();
}

}  // namespace

TEST_CASE("chat json: a list of messages", "[io][chat]") {
  const auto request =
      k3::chat_from_json(R"([{"role":"system","content":"Be brief."},{"role":"user","content":"Hi é"}])", "f");
  REQUIRE(request.messages.size() == 2);
  CHECK(request.messages[0].role == k3::ChatRole::system);
  CHECK(request.messages[1].content == "Hi é");
  CHECK(request.options.thinking);
  CHECK(request.options.tools.is_null());
  CHECK(k3::chat_from_json("[]", "f").messages.empty());
}

TEST_CASE("chat json: calls and their results", "[io][chat]") {
  const auto request =
      k3::chat_from_json(R"({"thinking": false, "tools": [{"name": "add"}], "thinking_effort": "E", "messages": [
    {"role": "assistant", "content": null, "reasoning_content": "R", "tool_calls": [
      {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"b\": [1, 2], \"a\": \"x\\\"\"}"}},
      {"id": "c2", "function": {"name": "now"}},
      {"function": {"name": "g", "arguments": {"n": 1.5, "t": true, "z": null}}}]},
    {"role": "tool", "tool_call_id": "c2", "content": "12:00"},
    {"role": "tool", "name": "add", "index": 4, "content": "3"}]})",
                         "f");
  CHECK_FALSE(request.options.thinking);
  const std::vector<k3::ToolCall> expected = {
      {"add", 0, {{"a", "string", "x\""}, {"b", "array", "[1,2]"}}},
      {"now", 1, {}},
      {"g", 2, {{"n", "number", "1.5"}, {"t", "boolean", "true"}, {"z", "null", "null"}}}};
  CHECK(request.messages[0].calls == expected);
  CHECK(request.messages[1].tool == "now");
  CHECK(request.messages[1].index == 1);
  CHECK(request.messages[2].index == 4);
  CHECK(k3::test::contains(rendered(request),
                           "<|open|>think<|sep|>R<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
                           "<|open|>tools<|sep|><|open|>call tool=\"add\" index=\"0\"<|sep|>"));
}

TEST_CASE("chat json: nothing hides behind a NUL byte, and no message is longer than a line", "[io][chat]") {
  CHECK(k3::test::contains(problem(std::string("[]\0[3]", 6)), "a NUL byte (at byte 2)"));
  const std::string arguments =
      R"([{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":"{}\u0000x"}}]}])";
  CHECK(k3::test::contains(problem(arguments), "a NUL byte"));
  for (const char* beginning : {"[{\"role\":\"", "{\"", "[\""})
    CHECK(problem(beginning + std::string(1000000, 'b')).size() < 1000);
  CHECK(problem("[{\"role\":\"user\",\"" + std::string(1000000, 'b') + "\":1}]").size() < 1000);
}

TEST_CASE("chat json: everything else is refused with its place", "[io][chat]") {
  const std::pair<const char*, const char*> cases[] = {
      {"", "chat.json: "},
      {"[", "(at byte 1)"},
      {"{}", "chat.json: messages: is missing"},
      {"3", "is a value of type number, expected an object"},
      {"{\"messages\":3}", "messages: is a value of type number, expected a list"},
      {"{\"messages\":[],\"model\":1}", "model: is not a key that may stand here"},
      {"{\"messages\":[],\"messages\":[]}", "key twice"},
      {"{\"messages\":[],\"thinking\":1}", "thinking: is a value of type number, expected true or false"},
      {"{\"messages\":[],\"tools\":{}}", "tools: is a value of type object, expected a list"},
      {"[1]", "[0]: is a value of type number, expected an object"},
      {"[{}]", "[0].role: is missing"},
      {"[{\"role\":\"user\"}]", "[0].content: is missing"},
      {"[{\"role\":\"user\",\"content\":[]}]", "[0].content: is a value of type array, expected a string"},
      {"[{\"role\":\"User\",\"content\":\"\"}]", "[0].role: is \"User\", expected system, user, assistant or tool"},
      {"[{\"role\":\"user\",\"content\":\"\",\"name\":\"x\"}]", "[0].name: is not a key"},
      {"[{\"role\":\"assistant\"}]", "[0].content: is missing"},
      {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{}]}]}",
       "messages[0].tool_calls[0].function: is missing"},
      {"[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":1}}]}]",
       "[0].tool_calls[0].function.name: is a value of type number"},
      {"[{\"role\":\"assistant\",\"tool_calls\":[{\"type\":\"x\",\"function\":{}}]}]", "type: is not \"function\""},
      {"[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{\"}}]}]",
       "arguments: is not valid JSON"},
      {"[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"3\"}}]}]",
       "arguments: is a value of type number"},
      {"[{\"role\":\"tool\",\"content\":\"\"}]", "[0].name: is missing"},
      {"[{\"role\":\"tool\",\"content\":\"\",\"tool_call_id\":\"c\"}]", "[0].tool_call_id: names no earlier call: c"},
      {"[{\"role\":\"tool\",\"content\":\"\",\"name\":\"f\",\"index\":-1}]", "[0].index: is not a whole number"},
      {"[{\"role\":\"user\",\"content\":\"\xFF\"}]", "UTF-8"},
      {"[] x", "(at byte"},
  };
  for (const auto& [json, expected] : cases) {
    INFO(json);
    INFO(problem(json));
    CHECK(k3::test::contains(problem(json), "chat.json: "));
    CHECK(k3::test::contains(problem(json), expected));
  }
  CHECK(k3::test::contains(problem(std::string(100000, '[')), "nested too deeply"));
}
