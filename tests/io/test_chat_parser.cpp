// SPDX-License-Identifier: Apache-2.0
// A model's output taken apart as it comes: well-formed, malformed in many ways, and random.

#include <random>

#include <k3/io/chat.hpp>

#include "io/chat_support.hpp"
#include "support/catch.hpp"

using k3::test::released_tokenizer;

namespace {

const char* name(k3::ChatPart part) {
  constexpr const char* names[] = {"think", "response", "argument", "other", "tag"};
  return names[static_cast<std::size_t>(part)];
}

struct Run {
  std::string pieces;  // part:text, neighbours of one part joined
  std::string all;     // the texts in a row
  k3::ChatReply reply;
  std::string closing;
};

Run parse_ids(const std::vector<k3::id>& ids, bool thinking = true) {
  k3::ChatParser parser(released_tokenizer(), thinking);
  Run run;
  std::string last;
  const auto take = [&](const std::vector<k3::ChatPiece>& pieces) {
    for (const k3::ChatPiece& piece : pieces) {
      if (piece.part == k3::ChatPart::tag || name(piece.part) != last)
        run.pieces += (run.pieces.empty() ? "" : "·") + std::string(name(piece.part)) + ":";
      last = piece.part == k3::ChatPart::tag ? "" : name(piece.part);
      run.pieces += piece.text;
      run.all += piece.text;
    }
  };
  for (const k3::id token : ids) take(parser.push(token));
  take(parser.finish());
  run.reply = parser.reply();
  for (const k3::ChatSegment& segment : parser.closing()) run.closing += segment.text;
  return run;
}

/// Markup resolved, everything else as text.
Run parse(const std::string& output, bool thinking = true) {
  const Run run = parse_ids(released_tokenizer().encode(output, k3::Specials::markup), thinking);
  CHECK(run.all == output);
  return run;
}

const std::string to_response = "<|close|>think<|sep|><|open|>response<|sep|>";
const std::string end = "<|close|>message<|sep|><|end_of_msg|>";

}  // namespace

TEST_CASE("chat parser: thinking and response", "[io][chat]") {
  const Run run = parse("15% of 240 = 36." + to_response + "15% of 240 is 36.<|close|>response<|sep|>" + end);
  CHECK(run.reply.reasoning == "15% of 240 = 36.");
  CHECK(run.reply.response == "15% of 240 is 36.");
  CHECK(run.reply.other.empty());
  CHECK(run.reply.finished);
  CHECK(run.closing.empty());
  CHECK(run.pieces ==
        "think:15% of 240 = 36.·tag:<|close|>think<|sep|>·tag:<|open|>response<|sep|>·response:15% of 240 is 36."
        "·tag:<|close|>response<|sep|>·tag:<|close|>message<|sep|>·tag:<|end_of_msg|>");
  const Run quick = parse("Hello<|close|>response<|sep|>" + end, false);
  CHECK(quick.reply.response == "Hello");
  CHECK(quick.reply.reasoning.empty());
}

TEST_CASE("chat parser: what was rendered is read back", "[io][chat]") {
  k3::ChatMessage message{k3::ChatRole::assistant, "Sí 🎉", "a <|open|> b\n"};
  message.calls = {{"a&\"b", 0, {{"k\"", "string", "x <|close|>argument<|sep|> é"}, {"n", "number", "2.5"}}},
                   {"f", 7, {}}};
  const k3::Tokenizer& tokenizer = released_tokenizer();
  const std::vector<k3::id> ids = k3::encode_chat(tokenizer, {message}, {.generation_prompt = false});
  const auto opening = k3::encode_chat(tokenizer, std::vector<k3::ChatMessage>{});
  REQUIRE(std::equal(opening.begin(), opening.end(), ids.begin()));
  const Run run = parse_ids({ids.begin() + static_cast<std::ptrdiff_t>(opening.size()), ids.end()});
  const k3::ChatMessage back = k3::message_of(run.reply);
  CHECK(back.reasoning == message.reasoning);
  CHECK(back.content == message.content);
  CHECK(back.calls == message.calls);
  CHECK(run.reply.other.empty());
  CHECK(k3::chat_segments({back}) == k3::chat_segments({message}));
}

TEST_CASE("chat parser: malformed output loses nothing", "[io][chat]") {
  // A response without the end of the think block.
  CHECK(parse("a<|open|>response<|sep|>b" + end).reply.response == "b");
  // Tags that make no sense where they are, or anywhere, are text of the block around them.
  for (const std::string odd :
       {"<|sep|>", "<|open|>", "<|open|>foo<|sep|>", "<|close|>foo<|sep|>", "<|close|>response<|sep|>",
        "<|open|>call tool=\"f\"<|sep|>", "<|open|>argument key=\"k\"<|sep|>", "<|open|>think x<|sep|>",
        "<|open|>message role=\"user\"<|sep|>", "<|open|>response<|open|>", "<|close|>", "<|open|><|sep|>",
        "<|open|> think<|sep|>", "<|close|>think <|sep|>", "<|close|>argument<|sep|>"}) {
    INFO(odd);
    const Run run = parse("a" + odd + "b" + to_response + "c" + end);
    CHECK(run.reply.reasoning == "a" + odd + "b");
    CHECK(run.reply.response == "c");
    CHECK(run.reply.finished);
  }
  for (const std::string odd :
       {"<|open|>call<|sep|>", "<|open|>call tool=f<|sep|>", "<|open|>call tool=\"f<|sep|>",
        "<|open|>call tool=\"f\" tool=\"g\"<|sep|>", "<|open|>call tool=\"f\"x<|sep|>", "<|open|>call =\"f\"<|sep|>"}) {
    INFO(odd);
    const Run run = parse("<|close|>think<|sep|><|open|>tools<|sep|>" + odd + "x<|close|>tools<|sep|>" + end);
    CHECK(run.reply.other == odd + "x");
    CHECK(run.reply.calls.empty());
  }
}

TEST_CASE("chat parser: text outside of blocks and behind the message", "[io][chat]") {
  const Run run = parse("a<|close|>think<|sep|>b<|open|>response<|sep|>c<|close|>response<|sep|>d" + end +
                        "e<|end_of_msg|><|sep|>");
  CHECK(run.reply.reasoning == "a");
  CHECK(run.reply.response == "c");
  CHECK(run.reply.other == "bde<|end_of_msg|><|sep|>");
  CHECK(parse("a<|end_of_msg|><|close|>think<|sep|>b").reply.other == "<|close|>think<|sep|>b");
  CHECK(parse("a<|close|>message<|sep|><|open|>response<|sep|>b").reply.other == "<|open|>response<|sep|>b");
}

TEST_CASE("chat parser: an output that ends early", "[io][chat]") {
  CHECK(parse("a").closing == to_response + "<|close|>response<|sep|>" + end);
  CHECK(parse("a", false).closing == "<|close|>response<|sep|>" + end);
  CHECK(parse("a<|close|>think<|sep|>").closing == "<|open|>response<|sep|><|close|>response<|sep|>" + end);
  CHECK(parse("a<|close|>think").closing == to_response + "<|close|>response<|sep|>" + end);
  CHECK(parse("a<|close|>think").reply.reasoning == "a<|close|>think");
  CHECK(parse("<|close|>message<|sep|>").closing == "<|end_of_msg|>");
  CHECK(parse("<|open|>tools<|sep|><|open|>call tool=\"f\"<|sep|><|open|>argument key=\"k\"<|sep|>v").closing ==
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>" + end);
  const Run eos = parse_ids({64, 163585, 65});
  CHECK(eos.reply.finished);
  CHECK(eos.all == "a[EOS]b");
}

TEST_CASE("chat parser: a reply that was cut has the ids of the same conversation encoded anew", "[io][chat]") {
  const k3::Tokenizer& tokenizer = released_tokenizer();
  const k3::ChatMessage question{k3::ChatRole::user, "Hello"}, next{k3::ChatRole::user, "Hi"};
  k3::ChatMessage reply{k3::ChatRole::assistant, "world", "You are"};
  reply.calls = {{"f", 0, {{"k", "string", "v"}, {"n", "number", "2"}}}, {"g", 1, {}}};
  const k3::id opens = *tokenizer.special_id("<|open|>"), closes = *tokenizer.special_id("<|close|>"),
               separates = *tokenizer.special_id("<|sep|>");
  for (const bool thinking : {true, false}) {
    if (!thinking) reply.reasoning.clear();
    const k3::ChatOptions options{.thinking = thinking};
    const std::vector<k3::id> prompt = k3::encode_chat(tokenizer, {question}, options);
    const std::vector<k3::id> turn = k3::encode_chat(tokenizer, {next}, options);
    std::vector<k3::id> whole =
        k3::encode_chat(tokenizer, {question, reply}, {.thinking = thinking, .generation_prompt = false});
    REQUIRE(std::equal(prompt.begin(), prompt.end(), whole.begin()));
    whole.erase(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(prompt.size()));
    std::size_t cuts = 0;
    bool in_tag = false;
    for (std::size_t count = 0; count <= whole.size(); ++count) {
      const k3::id last = count > 0 ? whole[count - 1] : separates;
      in_tag = (in_tag || last == opens || last == closes) && last != separates;
      k3::ChatParser parser(tokenizer, thinking);
      std::vector<k3::id> ids = prompt;
      for (std::size_t i = 0; i < count; ++i) {
        ids.push_back(whole[i]);
        parser.push(whole[i]);
      }
      parser.finish();
      // A history has no half tags, and no block for calls where there are none.
      const std::vector<k3::ChatSegment> closing = parser.closing();
      const bool empty_tools = closing.size() > 1 && closing[1].text == "tools" && parser.reply().calls.empty();
      if (in_tag || empty_tools) continue;
      ++cuts;
      CAPTURE(thinking, count);
      const std::vector<k3::id> rest = k3::encode_chat(tokenizer, closing);
      ids.insert(ids.end(), rest.begin(), rest.end());
      ids.insert(ids.end(), turn.begin(), turn.end());
      CHECK(ids == k3::encode_chat(tokenizer, {question, k3::message_of(parser.reply()), next}, options));
    }
    CHECK(cuts > 15);
  }
}

TEST_CASE("chat parser: characters cut across tokens, and bytes that are none", "[io][chat]") {
  const auto byte = [](int value) { return released_tokenizer().encode(std::string(1, static_cast<char>(value)))[0]; };
  k3::ChatParser parser(released_tokenizer(), true);
  CHECK(parser.push(byte(0xF0)).empty());
  CHECK(parser.push(byte(0x9F)).empty());
  CHECK(parser.push(byte(0x8E)).empty());
  CHECK(parser.push(byte(0x89)).front().text == "🎉");
  CHECK(parse_ids({byte(0xE6), byte(0x97), 163588, 39964, 163589}).pieces ==
        "think:\xEF\xBF\xBD·tag:<|close|>think<|sep|>");
  CHECK(parse_ids({byte(0xE6)}).reply.reasoning == "\xEF\xBF\xBD");
  CHECK(parse_ids({163587, byte(0xE6), 163589}).all == "<|open|>\xEF\xBF\xBD<|sep|>");
  CHECK_THROWS_AS(parser.push(163840), k3::invalid_argument);
  CHECK_THROWS_AS(parser.push(-1), k3::invalid_argument);
}

TEST_CASE("chat parser: a tag that does not end is text before it is long", "[io][chat]") {
  k3::ChatParser parser(released_tokenizer(), true);
  std::string shown;
  CHECK(parser.push(163587).empty());
  for (int i = 0; i < 5000; ++i)
    for (const k3::ChatPiece& piece : parser.push(64)) shown += piece.text;
  CHECK(shown == "<|open|>" + std::string(5000, 'a'));
  CHECK(parser.push(163589).front().part == k3::ChatPart::think);
}

TEST_CASE("chat parser: random outputs come out whole", "[io][chat]") {
  const k3::Tokenizer& tokenizer = released_tokenizer();
  std::vector<k3::id> alphabet = {163584, 163585, 163586, 163587, 163588, 163589, 163700,
                                  64,     220,    236,    231,    2778,   39964,  12092};
  for (const char* word : {"tools", "call tool=\"f\"", "argument key=\"k\"", " type=\"", "call", "argument"})
    for (const k3::id token : tokenizer.encode(word)) alphabet.push_back(token);
  std::mt19937 random(5);
  for (int round = 0; round < 3000; ++round) {
    std::vector<k3::id> ids;
    for (std::size_t count = random() % 60; count > 0; --count) {
      const std::uint32_t choice = random() % 8;
      if (choice < 3) {
        const char* const words[] = {"think",   "response", "tools",   "call tool=\"f\"", "argument key=\"k\"",
                                     "message", "call",     "argument"};
        ids.push_back(random() % 2 ? 163587 : 163588);
        for (const k3::id token : tokenizer.encode(words[random() % 8])) ids.push_back(token);
        if (random() % 6) ids.push_back(163589);
      } else {
        ids.push_back(alphabet[random() % alphabet.size()]);
      }
    }
    const Run run = parse_ids(ids, round % 2 == 0);
    const std::string whole = k3::to_text(tokenizer.decode(ids));
    if (run.all != whole) {
      CAPTURE(round, run.pieces, whole);
      REQUIRE(run.all == whole);
    }
  }
}
