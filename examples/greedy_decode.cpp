// SPDX-License-Identifier: Apache-2.0
// Opens a checkpoint in the released layout and decodes greedily: text or token ids in, text or ids (or JSON) out.

#include <sys/resource.h>

#include <chrono>
#include <cstdio>

#include <k3/io/utf8_stream.hpp>

#include "command_line.hpp"
#include "progress.hpp"

namespace {

using Clock = std::chrono::steady_clock;

struct Arguments {
  std::string model;
  std::optional<std::string> prompt;
  std::optional<std::string> ids;
  std::string max_new_text;
  std::size_t max_new = 0;
  std::optional<std::string> eos;
  EngineOptions engine;
  bool json = false, logits = false;
};

void check_usage(const Arguments& arguments) {
  if (arguments.prompt.has_value() == arguments.ids.has_value())
    throw UsageError("give a prompt with either --prompt or --ids");
  if (arguments.logits && !arguments.json) throw UsageError("--logits needs --json");
  check_engine(arguments.engine);
}

std::vector<k3::id> prompt_tokens(const Arguments& arguments, const std::optional<k3::Tokenizer>& tokenizer) {
  if (arguments.ids) return parse_ids("--ids", *arguments.ids);
  if (!tokenizer) throw UsageError("--prompt: " + arguments.model + " has no tokenizer (tiktoken.model); use --ids");
  if (arguments.prompt->empty()) throw UsageError("--prompt: the prompt is empty");
  return tokenizer->encode(*arguments.prompt);
}

/// Standard output as the tokens come: whole characters of text, or ids where there is no tokenizer.
class TokenPrinter {
 public:
  TokenPrinter(const std::optional<k3::Tokenizer>& tokenizer, const std::vector<k3::id>& eos, bool silent)
      : tokenizer_(tokenizer), eos_(eos), silent_(silent) {}

  void operator()(k3::id token) {
    if (silent_) return;
    if (!tokenizer_) {
      std::cout << (first_ ? "" : " ") << token << std::flush;
    } else if (std::find(eos_.begin(), eos_.end(), token) == eos_.end()) {
      std::cout << stream_.push(token_text(*tokenizer_, token)) << std::flush;
    }
    first_ = false;
    require_output();
  }
  void finish() {
    if (!silent_) std::cout << stream_.flush() << std::endl;
    require_output();
  }

 private:
  const std::optional<k3::Tokenizer>& tokenizer_;
  const std::vector<k3::id>& eos_;
  bool silent_, first_ = true;
  k3::Utf8Stream stream_;
};

void print_number(double value) {
  // Nine digits tell every float from its neighbours; what JSON cannot write does not get here (NaN ends the run).
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  std::cout << (std::string(text).find("inf") == std::string::npos ? text : value < 0 ? "-1e999" : "1e999");
}

template <class Range, class Print>
void print_list(const Range& items, Print print) {
  std::cout << "[";
  bool first = true;
  for (const auto& item : items) {
    if (!std::exchange(first, false)) std::cout << ",";
    print(item);
  }
  std::cout << "]";
}

void print_json(const std::vector<k3::id>& prompt, const Engine::Result& result, bool with_logits) {
  const auto print_id = [](k3::id token) { std::cout << token; };
  std::cout << "{\"prompt\":";
  print_list(prompt, print_id);
  std::cout << ",\"tokens\":";
  print_list(result.tokens, print_id);
  std::cout << ",\"stop\":\"" << k3::text(result.stop) << "\"";
  if (with_logits) {
    std::cout << ",\"logits\":";
    print_list(result.logits, [](const auto& row) { print_list(row, [](auto value) { print_number(value); }); });
  }
  std::cout << "}" << std::endl;
  require_output();
}

void print_summary(std::size_t prompt, std::size_t tokens, double prefill, double decode, const char* stop) {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::fprintf(stderr, "%zu prompt tokens in %.2f s; %zu new tokens", prompt, prefill, tokens);
  if (tokens > 1) std::fprintf(stderr, ", %.1f tokens/s", static_cast<double>(tokens - 1) / decode);
  std::fprintf(stderr, "; peak memory %.1f MB; stopped at %s\n", static_cast<double>(usage.ru_maxrss) / 1024.0,
               std::string(stop) == "eos" ? "an end token" : "the requested length");
}

// A bar is erased when its Progress ends, so each lives no longer than what it shows.
k3::K3CpuModel open_model(const std::string& folder, const std::shared_ptr<const k3::Safetensors>& files) {
  Progress progress("opening");
  return k3::from_pretrained(folder, files, std::ref(progress));
}

std::unique_ptr<Engine> start_engine(const k3::K3CpuModel& model, const EngineOptions& options) {
  Progress upload("to the GPU, MB");
  return make_engine(model, options, [&](std::size_t done, std::size_t total) { upload(done >> 20, total >> 20); });
}

void run(Arguments& arguments) {
  k3::catch_lost_pages();
  arguments.max_new = parse_number("--max-new", arguments.max_new_text, 0x7fffffff);
  check_usage(arguments);
  const std::optional<k3::Tokenizer> tokenizer = find_tokenizer(arguments.model);
  const std::vector<k3::id> prompt = prompt_tokens(arguments, tokenizer);
  const auto files = std::make_shared<const k3::Safetensors>(k3::open_safetensors_set(arguments.model));
  const k3::K3CpuModel model = open_model(arguments.model, files);
  check_vocabulary(arguments.model, tokenizer, model.config);
  if (arguments.ids) check_ids("--ids", prompt, model.config);
  const std::vector<k3::id> eos = stop_tokens(arguments.eos, model.config, tokenizer);
  const std::size_t limit = model.config.max_position_embeddings;
  if (prompt.size() > limit || arguments.max_new > limit - prompt.size())
    throw UsageError("prompt + max-new is " + std::to_string(prompt.size()) + " + " +
                     std::to_string(arguments.max_new) + " tokens, above max_position_embeddings, " +
                     std::to_string(limit));
  print_layer_map(model);
  arguments.engine.capacity = prompt.size() + arguments.max_new;
  arguments.engine.rows = std::min<std::size_t>(32, prompt.size());
  const std::unique_ptr<Engine> engine = start_engine(model, arguments.engine);
  TokenPrinter print(tokenizer, eos, arguments.json);
  const Clock::time_point start = Clock::now();
  Clock::time_point first = start;
  bool any = false;
  const Engine::Result result = engine->decode(prompt, {arguments.max_new, eos, arguments.logits}, [&](k3::id token) {
    if (!std::exchange(any, true)) first = Clock::now();
    files->require_whole();
    print(token);
  });
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  print.finish();
  if (arguments.json) print_json(prompt, result, arguments.logits);
  print_summary(prompt.size(), result.tokens.size(), seconds(first - start), seconds(Clock::now() - first),
                k3::text(result.stop));
}

void describe(CLI::App& app, Arguments& arguments) {
  app.add_option("MODEL_DIR", arguments.model, "folder with config.json and the safetensors files")->required();
  app.add_option("--prompt", arguments.prompt, "text to continue (needs the checkpoint's tokenizer)");
  app.add_option("--ids", arguments.ids, "token ids to continue, separated by commas");
  app.add_option("--max-new", arguments.max_new_text, "new tokens at most; 0 gives none")->required();
  app.add_option(
      "--eos", arguments.eos,
      "end tokens, separated by commas, instead of the checkpoint's (config.json, generation_config.json and "
      "the tokenizer's [EOS]); none: no end token");
  describe_engine(app, arguments.engine);
  app.add_flag("--json", arguments.json,
               "print one JSON object: prompt, tokens, stop (max_new or eos), logits if asked for");
  app.add_flag("--logits", arguments.logits, "with --json: the row of logits that each new token was chosen from");
  app.footer(
      "The text (ids where the checkpoint has no tokenizer) goes to standard output as it is decoded, everything "
      "else to standard error.\nExit status: 0; 2 for a mistake in the call; 1 for anything else.\n"
      "Environment: K3_ATTNRES_MIX=0..1 and K3_FORCE_EXPERT=ID put deliberate faults in, for tests; K3_CUDA_KDA=0 and "
      "K3_CUDA_MLA=0 run that mixer on the host.");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Greedy decoding of a Kimi K3 checkpoint"};
  Arguments arguments;
  describe(app, arguments);
  return run_program(app, argc, argv, "greedy_decode", [&] {
    run(arguments);
    return 0;
  });
}
