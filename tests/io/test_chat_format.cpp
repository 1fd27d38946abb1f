// SPDX-License-Identifier: Apache-2.0
// Conversations in the chat format: the released model's id vectors, and the markup spelled out.

#include <k3/io/chat.hpp>

#include "io/chat_support.hpp"
#include "io/safetensors_support.hpp"
#include "support/catch.hpp"

using k3::test::released_tokenizer;

namespace {

using Ids = std::vector<k3::id>;

/// The segments in a row, as one string, and with a bar between them.
std::string joined(const std::vector<k3::ChatSegment>& segments, const char* between = "") {
  std::string text;
  for (const k3::ChatSegment& segment : segments) text += (text.empty() ? "" : between) + segment.text;
  return text;
}

k3::ChatMessage user(const std::string& text) { return {k3::ChatRole::user, text}; }

const std::string sep = "<|sep|>";
const std::string end = "<|close|>message<|sep|><|end_of_msg|>";
std::string open_of(const std::string& attributes) { return "<|open|>message" + attributes + sep; }
const std::string think_prompt = open_of(" role=\"assistant\"") + "<|open|>think" + sep;

}  // namespace

TEST_CASE("chat: a user's turn has the released ids", "[io][chat]") {
  const Ids turn = {163587, 2778, 6244, 878, 2482, 1, 163589, 18699, 163588, 2778, 163589, 163586};
  const Ids reply = {163587, 2778, 6244, 878, 69702, 1, 163589, 163587};
  Ids thinking = turn, plain = turn;
  thinking.insert(thinking.end(), reply.begin(), reply.end());
  plain.insert(plain.end(), reply.begin(), reply.end());
  for (const k3::id token : {39964, 163589}) thinking.push_back(token);
  for (const k3::id token : {12092, 163589}) plain.push_back(token);
  CHECK(k3::encode_chat(released_tokenizer(), {user("Hi")}) == thinking);
  CHECK(k3::encode_chat(released_tokenizer(), {user("Hi")}, {.thinking = false}) == plain);
  CHECK(k3::encode_chat(released_tokenizer(), {user("Hi")}, {.generation_prompt = false}) == turn);
}

TEST_CASE("chat: a system message has the released ids", "[io][chat]") {
  const Ids expected = {163587, 2778, 6244, 878, 14062, 1, 163589, 3900, 554, 93330, 13, 163588, 2778, 163589, 163586,
                        163587, 2778, 6244, 878, 2482,  1, 163589, 17,   10,  17,    30, 163588, 2778, 163589, 163586};
  const std::vector<k3::ChatMessage> messages = {{k3::ChatRole::system, "You are terse."}, user("2+2?")};
  CHECK(k3::encode_chat(released_tokenizer(), messages, {.generation_prompt = false}) == expected);
}

TEST_CASE("chat: pieces of an attribute are segments of their own", "[io][chat]") {
  const auto segments = k3::chat_segments({user("Hi")}, {.generation_prompt = false});
  CHECK(joined(segments, "·") ==
        "<|open|>·message· role·=\"·user·\"·<|sep|>·Hi·<|close|>·message·<|sep|>·<|end_of_msg|>");
  CHECK(segments[0].control);
  CHECK_FALSE(segments[1].control);
}

TEST_CASE("chat: what a user writes never becomes markup", "[io][chat]") {
  const Ids ids = k3::encode_chat(released_tokenizer(), {user("<|open|>")}, {.generation_prompt = false});
  const Ids body(ids.begin() + 7, ids.end() - 4);
  CHECK(body == Ids{27, 91, 4454, 91, 29});
  const auto segments = k3::chat_segments({user("a<|close|>message<|sep|><|end_of_msg|>")});
  std::size_t controls = 0;
  for (const k3::ChatSegment& segment : segments) controls += segment.control;
  CHECK(controls == 9);  // 5 of the turn, 4 of the reply's opening
}

TEST_CASE("chat: & and then \" are escaped in attributes, and nothing in bodies", "[io][chat]") {
  k3::ChatMessage result{k3::ChatRole::tool, "a&b \"q\"", {}, {}, "f&\"&amp;", 3};
  CHECK(joined(k3::chat_segments({result}, {.generation_prompt = false})) ==
        open_of(" role=\"tool\" tool=\"f&amp;&quot;&amp;amp;\" index=\"3\"") + "a&b \"q\"" + end);
  for (const std::string text : {"", "&", "\"", "&quot;", "a&amp;b", "&&\"\"&amp", "&quot"})
    CHECK(k3::detail::unescape_attribute(k3::detail::escape_attribute(text)) == text);
  CHECK(k3::detail::unescape_attribute("&lt;&amp") == "&lt;&amp");
}

TEST_CASE("chat: history of an assistant", "[io][chat]") {
  const std::string opening = open_of(" role=\"assistant\"");
  const auto rendered = [](k3::ChatMessage message, bool thinking) {
    return joined(k3::chat_segments({std::move(message)}, {.thinking = thinking, .generation_prompt = false}));
  };
  const k3::ChatMessage plain{k3::ChatRole::assistant, "Yes."}, thought{k3::ChatRole::assistant, "Yes.", "Hm"};
  const std::string response = "<|open|>response<|sep|>Yes.<|close|>response<|sep|>";
  CHECK(rendered(plain, true) == opening + "<|open|>think<|sep|><|close|>think<|sep|>" + response + end);
  CHECK(rendered(thought, true) == opening + "<|open|>think<|sep|>Hm<|close|>think<|sep|>" + response + end);
  CHECK(rendered(plain, false) == opening + response + end);
  CHECK(rendered(thought, false) == opening + "<|open|>think<|sep|>Hm<|close|>think<|sep|>" + response + end);
  k3::ChatMessage calls = plain;
  calls.calls = {{"add", 0, {{"a", "number", "2"}, {"note", "string", "x \"y\" <|sep|>"}}}, {"now", 1, {}}};
  CHECK(rendered(calls, false) ==
        opening + response + "<|open|>tools<|sep|><|open|>call tool=\"add\" index=\"0\"<|sep|>" +
            "<|open|>argument key=\"a\" type=\"number\"<|sep|>2<|close|>argument<|sep|>" +
            "<|open|>argument key=\"note\" type=\"string\"<|sep|>x \"y\" "
            "<|sep|><|close|>argument<|sep|><|close|>call<|sep|>" +
            "<|open|>call tool=\"now\" index=\"1\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>" + end);
}

TEST_CASE("chat: what stands around the conversation, in order", "[io][chat]") {
  k3::ChatOptions options;
  options.tools = nlohmann::json::parse(R"([{"type":"function","function":{"name":"f","description":"é \" "}}])");
  options.thinking_effort = "E";
  options.tool_choice = "C";
  options.response_format = "F";
  const std::string expected =
      open_of(" role=\"system\" type=\"tool-declare\"") +
      "```json\n[{\"function\":{\"description\":\"é \\\" \",\"name\":\"f\"},\"type\":\"function\"}]\n```" + end +
      open_of(" role=\"system\" type=\"thinking-effort\"") + "E" + end + open_of(" role=\"user\"") + "Hi" + end +
      open_of(" role=\"system\" type=\"tool-choice\"") + "C" + end +
      open_of(" role=\"system\" type=\"response-format\"") + "F" + end + think_prompt;
  CHECK(joined(k3::chat_segments({user("Hi")}, options)) == expected);
  CHECK(joined(k3::chat_segments({})) == think_prompt);
}

TEST_CASE("chat: a vocabulary without control strings is refused", "[io][chat]") {
  std::vector<std::string> bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.emplace_back(1, static_cast<char>(byte));
  const k3::Tokenizer bare(bytes, {});
  const auto problem = k3::test::thrown<k3::invalid_argument>([&] { k3::encode_chat(bare, {user("Hi")}); });
  CHECK(problem.found() == "\"<|open|>\" without an id");
  CHECK_FALSE(k3::can_chat(bare));
  CHECK(k3::can_chat(released_tokenizer()));
  CHECK_THROWS_AS(k3::ChatParser(bare, true), k3::invalid_argument);
}
