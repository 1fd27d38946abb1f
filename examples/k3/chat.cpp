// SPDX-License-Identifier: Apache-2.0
// k3 chat: a conversation, a line of standard input a turn.

#include <unistd.h>

#include <cerrno>

#include <k3/io/chat.hpp>

#include "printer.hpp"
#include "text_input.hpp"
#include "tool.hpp"

namespace {

struct Arguments {
  std::string model, max_new_text = "4096", context_text = "8192";
  std::optional<std::string> system, system_file, prompt_file;
  bool no_think = false, json = false;
  EngineOptions engine;
  ExpertMemory memory;
};

/// Lines of standard input. Unlike std::getline it ends at Ctrl-C.
class LineReader {
 public:
  /// The next line without its end; nothing at the end of input or after Ctrl-C.
  std::optional<std::string> next() {
    for (;;) {
      const std::size_t end = held_.find('\n', searched_);
      if (end != held_.npos) return take(end, 1);
      searched_ = held_.size();
      if (held_.size() > longest_text) throw k3::error("a line of more than 16 MB on standard input");
      char part[65536];
      const ssize_t count = ended_ ? 0 : ::read(STDIN_FILENO, part, sizeof part);
      if (count < 0 && errno == EINTR && !interrupted()) continue;
      if (count < 0 && errno != EINTR) throw k3::error("standard input cannot be read");
      if (interrupted()) return std::nullopt;
      if (count > 0) {
        held_.append(part, static_cast<std::size_t>(count));
        continue;
      }
      ended_ = true;
      if (held_.empty()) return std::nullopt;
      return take(held_.size(), 0);
    }
  }

 private:
  std::string take(std::size_t length, std::size_t end) {
    std::string line = held_.substr(0, length);
    held_.erase(0, length + end);
    searched_ = 0;
    require_utf8("line " + std::to_string(++lines_) + " of standard input", line);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    return line;
  }

  std::string held_;
  std::size_t searched_ = 0, lines_ = 0;
  bool ended_ = false;
};

/// The conversation so far lies in the engine's caches, but for the last ids, which the next turn brings along.
class Conversation {
 public:
  Conversation(const Arguments& a, const std::optional<std::string>& system, OpenModel& open, std::size_t max_new)
      : open_(open),
        tokenizer_(*open.tokenizer),
        thinking_(!a.no_think),
        json_(a.json),
        max_new_(max_new),
        printer_(output_form(a.json)) {
    eos_ = stop_tokens(std::nullopt, open.model.config, open.tokenizer);
    eos_.push_back(*tokenizer_.special_id(k3::detail::chat_end));
    statistics_.opening = open.seconds;
    statistics_.experts = open.experts;
    if (system) waiting_ = k3::encode_chat(tokenizer_, {{k3::ChatRole::system, *system}}, {.generation_prompt = false});
  }

  /// Takes a turn and prints the reply; false where the context has no room for it.
  bool turn(const std::string& text) {
    std::vector<k3::id> prompt = waiting_;
    const std::vector<k3::id> turn = k3::encode_chat(tokenizer_, {{k3::ChatRole::user, text}}, {.thinking = thinking_});
    prompt.insert(prompt.end(), turn.begin(), turn.end());
    const std::size_t room = open_.engine->capacity() - open_.engine->position();
    if (prompt.size() >= room) {
      statistics_.stop = "context";
      return false;
    }
    const std::size_t most = std::min(max_new_, room - prompt.size());
    k3::ChatParser parser(tokenizer_, thinking_);
    const std::vector<k3::id> tokens = decode_tokens(
        open_, std::move(prompt), most, eos_,
        [&](k3::id token) { printer_.show(push_token(parser, tokenizer_, token)); }, statistics_);
    printer_.show(parser.finish());
    printer_.finish();
    if (most < max_new_ && std::string(statistics_.stop) == "max_new") statistics_.stop = "context";
    if (json_) print_json_line("\"turn\":" + std::to_string(++turns_) + ",\"stop\":\"" + statistics_.stop + "\"");
    statistics_.stop = interrupted() ? "interrupted" : "input";
    // The last token has not been fed back; a reply that was cut short is closed.
    waiting_.clear();
    if (!tokens.empty()) waiting_.push_back(tokens.back());
    const std::vector<k3::id> closing = k3::encode_chat(tokenizer_, parser.closing());
    waiting_.insert(waiting_.end(), closing.begin(), closing.end());
    return true;
  }

  const Statistics& statistics() {
    if (interrupted()) statistics_.stop = "interrupted";
    return statistics_;
  }

 private:
  OpenModel& open_;
  const k3::Tokenizer& tokenizer_;
  bool thinking_, json_;
  std::size_t max_new_, turns_ = 0;
  std::vector<k3::id> eos_, waiting_;
  ReplyPrinter printer_;
  Statistics statistics_;
};

/// The texts of the call; files are read, with their mistakes, before the model is opened.
struct Texts {
  std::optional<std::string> system, turn;
};

Texts given_texts(const Arguments& a) {
  Texts texts{a.system, {}};
  if (a.system && a.system_file) throw UsageError("--system and --system-file exclude each other");
  if (a.system_file == "-" && a.prompt_file == "-")
    throw UsageError("--system-file and --prompt-file: only one of them can be standard input");
  if (a.system) require_utf8("--system", *a.system);
  if (a.system_file) texts.system = read_text(*a.system_file);
  if (a.prompt_file) texts.turn = read_text(*a.prompt_file);
  if (texts.turn && texts.turn->empty()) throw UsageError("--prompt-file: the prompt is empty");
  return texts;
}

int run(const Arguments& a) {
  const std::size_t max_new = parse_number("--max-new", a.max_new_text, 0x7fffffff);
  if (max_new == 0) throw UsageError("--max-new: a reply needs at least one token");
  std::size_t context = parse_number("--context", a.context_text, 0x7fffffff);
  if (context == 0) throw UsageError("--context: a conversation needs at least one position");
  check_engine(a.engine);
  check_memory(a.memory, a.engine);
  catch_interrupt();
  const Texts texts = given_texts(a);
  OpenModel open = open_model(a.model, a.memory, a.engine);
  if (!open.tokenizer || !k3::can_chat(*open.tokenizer))
    throw k3::format_error(a.model, "", "has no tokenizer that names <|open|>, <|close|>, <|sep|> and <|end_of_msg|>");
  const bool limited = context >= open.model.config.max_position_embeddings;
  if (limited) context = open.model.config.max_position_embeddings;
  warn_of_length(open, context);
  print_layer_map(open.model);
  start_engine(open, a.memory, a.engine, context, 32);
  Conversation conversation(a, texts.system, open, max_new);
  const bool prompted = isatty(STDIN_FILENO) && !a.json;
  LineReader lines;
  bool room = !texts.turn || conversation.turn(*texts.turn);
  while (room && !interrupted()) {
    if (prompted) std::cout << "> " << std::flush;
    const std::optional<std::string> line = lines.next();
    if (!line) break;
    if (!line->empty()) room = conversation.turn(*line);
  }
  if (prompted) std::cout << std::endl;
  if (a.json) print_json_line(statistics_json(conversation.statistics()));
  print_statistics(conversation.statistics());
  if (!room && limited)
    throw k3::error("the context of " + std::to_string(context) +
                    " tokens is full, all the positions that the model has");
  if (!room) throw k3::error("the context of " + std::to_string(context) + " tokens is full (--context sets it)");
  return interrupted() ? interrupted_status : 0;
}

}  // namespace

Command describe_chat(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("chat", "A conversation: each line of standard input is a turn");
  const auto a = std::make_shared<Arguments>();
  command->add_option("MODEL_DIR", a->model, "folder with config.json, the safetensors files and the tokenizer")
      ->required();
  command->add_option("--system", a->system, "a system message to begin with");
  command->add_option("--system-file", a->system_file, "the same from a file, or with - from standard input")
      ->type_name("FILE");
  command
      ->add_option("--prompt-file", a->prompt_file,
                   "the first turn, of any number of lines, from a file, or with - all of standard input")
      ->type_name("FILE");
  command->add_flag("--no-think", a->no_think, "answer without thinking");
  command->add_option("--max-new", a->max_new_text, "tokens of a reply at most")->type_name("N")->capture_default_str();
  command->add_option("--context", a->context_text, "tokens of the whole conversation at most")
      ->type_name("N")
      ->capture_default_str();
  describe_engine(*command, a->engine);
  describe_memory(*command, a->memory);
  command->add_flag("--json", a->json, "print a JSON object a line: pieces as they come, then the statistics");
  return [a] { return run(*a); };
}
