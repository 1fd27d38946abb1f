// SPDX-License-Identifier: Apache-2.0
// k3 generate: continues a text or ids, or answers a conversation.

#include <k3/io/chat.hpp>

#include "printer.hpp"
#include "text_input.hpp"
#include "tool.hpp"

namespace {

struct Arguments {
  std::string model, max_new_text = "256";
  std::optional<std::string> prompt, prompt_file, ids, messages, eos;
  bool chat = false, markup = false, no_think = false, json = false;
  EngineOptions engine;
  ExpertMemory memory;
};

/// What to decode, and whether the output is a reply in the chat format.
struct Prompt {
  std::vector<k3::id> ids;
  bool reply = false, thinking = true;
};

void check_usage(const Arguments& a) {
  const bool text = a.prompt || a.prompt_file;
  if (a.prompt.has_value() + a.prompt_file.has_value() + a.ids.has_value() + a.messages.has_value() != 1)
    throw UsageError("generate: give a prompt with one of --prompt, --prompt-file, --ids and --messages");
  if ((a.chat || a.markup) && !text) throw UsageError("generate: --chat and --markup need --prompt or --prompt-file");
  if (a.chat && a.markup) throw UsageError("generate: --markup and --chat exclude each other");
  if (a.no_think && !a.chat) throw UsageError("generate: --no-think needs --chat");
  if (a.ids) parse_ids("--ids", *a.ids);
  if (a.eos && *a.eos != "none") parse_ids("--eos", *a.eos);
  check_engine(a.engine);
}

/// What the prompt is made of, as given; files are read, with their mistakes, before the model is opened.
std::string given_text(const Arguments& a) {
  if (a.ids) return *a.ids;
  if (a.messages) return read_input(*a.messages, std::uint64_t{256} << 20);
  const std::string text = a.prompt ? *a.prompt : read_text(*a.prompt_file);
  if (a.prompt) require_utf8("--prompt", text);
  if (text.empty()) throw UsageError(std::string(a.prompt ? "--prompt" : "--prompt-file") + ": the prompt is empty");
  return text;
}

const k3::Tokenizer& tokenizer_for(const Arguments& a, const std::optional<k3::Tokenizer>& tokenizer) {
  if (!tokenizer)
    throw UsageError(std::string(a.messages ? "--messages"
                                 : a.prompt ? "--prompt"
                                            : "--prompt-file") +
                     ": " + a.model + " has no tokenizer (tiktoken.model); use --ids");
  if ((a.messages || a.chat || a.markup) && !k3::can_chat(*tokenizer))
    throw k3::format_error(a.model + "/tokenizer_config.json", "",
                           "names no <|open|>, <|close|>, <|sep|> and <|end_of_msg|>: no chat format that k3 knows");
  return *tokenizer;
}

Prompt make_prompt(const Arguments& a, const std::string& text, const std::optional<k3::Tokenizer>& tokenizer) {
  if (a.ids) return {parse_ids("--ids", text)};
  const k3::Tokenizer& known = tokenizer_for(a, tokenizer);
  if (a.messages) {
    const k3::ChatRequest request = k3::chat_from_json(text, input_name(*a.messages));
    return {k3::encode_chat(known, request.messages, request.options), true, request.options.thinking};
  }
  if (a.chat)
    return {k3::encode_chat(known, {{k3::ChatRole::user, text}}, {.thinking = !a.no_think}), true, !a.no_think};
  return {known.encode(text, a.markup ? k3::Specials::markup : k3::Specials::plain)};
}

int run(const Arguments& a) {
  const std::size_t max_new = parse_number("--max-new", a.max_new_text, 0x7fffffff);
  check_usage(a);
  check_memory(a.memory, a.engine);
  catch_interrupt();
  const std::string text = given_text(a);
  OpenModel open = open_model(a.model, a.memory, a.engine);
  const Prompt prompt = make_prompt(a, text, open.tokenizer);
  stop_if_interrupted();
  if (a.ids) check_ids("--ids", prompt.ids, open.model.config);
  const std::size_t limit = open.model.config.max_position_embeddings;
  if (prompt.ids.size() > limit || max_new > limit - prompt.ids.size())
    throw UsageError("prompt + max-new is " + std::to_string(prompt.ids.size()) + " + " + std::to_string(max_new) +
                     " tokens, above max_position_embeddings, " + std::to_string(limit));
  warn_of_length(open, prompt.ids.size() + max_new);
  std::vector<k3::id> eos = stop_tokens(a.eos, open.model.config, open.tokenizer);
  if (prompt.reply && !a.eos) eos.push_back(*open.tokenizer->special_id(k3::detail::chat_end));
  print_layer_map(open.model);
  start_engine(open, a.memory, a.engine, prompt.ids.size() + max_new, prompt.ids.size());
  Statistics statistics;
  statistics.opening = open.seconds;
  statistics.experts = open.experts;
  const OutputForm form = output_form(a.json);
  if (prompt.reply) {
    ReplyPrinter printer(form);
    k3::ChatParser parser(*open.tokenizer, prompt.thinking);
    decode_tokens(
        open, prompt.ids, max_new, eos, [&](k3::id token) { printer.show(push_token(parser, *open.tokenizer, token)); },
        statistics);
    printer.show(parser.finish());
    printer.finish();
  } else {
    TextPrinter printer(form, open.tokenizer, eos);
    decode_tokens(open, prompt.ids, max_new, eos, [&](k3::id token) { printer.show(token); }, statistics);
    printer.finish();
  }
  if (a.json) print_json_line(statistics_json(statistics));
  print_statistics(statistics);
  return interrupted() ? interrupted_status : 0;
}

}  // namespace

Command describe_generate(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("generate", "Continues a text or ids, or answers a conversation");
  const auto a = std::make_shared<Arguments>();
  command->add_option("MODEL_DIR", a->model, "folder with config.json and the safetensors files")->required();
  command->add_option("--prompt", a->prompt, "text to continue (needs the checkpoint's tokenizer)");
  command
      ->add_option("--prompt-file", a->prompt_file,
                   "the same from a file, or with - from standard input: UTF-8, 16 MB at most")
      ->type_name("FILE");
  command->add_option("--ids", a->ids, "token ids to continue, separated by commas")->type_name("1,2,3");
  command
      ->add_option("--messages", a->messages,
                   "file with a conversation as JSON (docs/chat.md) to answer, or - for standard input")
      ->type_name("FILE");
  command->add_flag("--chat", a->chat, "the prompt is a user's message, to be answered");
  command->add_flag("--markup", a->markup,
                    "<|open|>, <|close|>, <|sep|> and <|end_of_msg|> in the prompt are control tokens");
  command->add_flag("--no-think", a->no_think, "with --chat: answer without thinking");
  command->add_option("--max-new", a->max_new_text, "new tokens at most")->type_name("N")->capture_default_str();
  command
      ->add_option("--eos", a->eos, "end tokens, separated by commas, instead of the checkpoint's; none: no end token")
      ->type_name("5,6|none");
  describe_engine(*command, a->engine);
  describe_memory(*command, a->memory);
  command->add_flag("--json", a->json, "print a JSON object a line: pieces as they come, then the statistics");
  return [a] { return run(*a); };
}
