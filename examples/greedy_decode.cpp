// SPDX-License-Identifier: Apache-2.0
// Opens a checkpoint in the released layout and decodes greedily: text or token ids in, text or ids (or JSON) out.

#include <sys/resource.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <optional>

#include <CLI/CLI.hpp>

#include <k3/io/checkpoint.hpp>
#include <k3/io/tokenizer.hpp>
#include <k3/io/utf8_stream.hpp>
#include <k3/model/greedy_decode.hpp>

#include "cuda_backend.hpp"
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
  std::string backend = "host";
  std::string precision = "fp32";
  int threads = 0;
  bool json = false, logits = false;
};

/// A mistake in the call, as opposed to one in a file: exit status 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A decimal number of nothing but digits, at most `most`. The command line's own conversion takes signs and octal, and wraps.
std::uint64_t parse_number(const std::string& option, const std::string& text, std::uint64_t most) {
  std::uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, problem] = std::from_chars(text.data(), end, value);
  if (text.empty() || problem != std::errc() || stopped != end || value > most)
    throw UsageError(option + ": \"" + text + "\" is not a number from 0 to " + std::to_string(most));
  return value;
}

std::vector<k3::id> parse_ids(const std::string& option, const std::string& text) {
  std::vector<k3::id> ids;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    ids.push_back(static_cast<k3::id>(parse_number(option, text.substr(at, comma - at), 0x7fffffff)));
    at = comma + 1;
  }
  return ids;
}

void check_usage(const Arguments& arguments) {
  if (arguments.prompt.has_value() == arguments.ids.has_value())
    throw UsageError("give a prompt with either --prompt or --ids");
  if (arguments.logits && !arguments.json) throw UsageError("--logits needs --json");
  if (arguments.backend == "cuda") {
    if (!cuda_backend_built()) throw UsageError("--backend cuda: this program was built without CUDA");
    if (arguments.threads != 0) throw UsageError("--backend cuda takes no --threads");
    if (arguments.precision == "fp64") throw UsageError("--backend cuda takes --precision fp32 or bf16");
  }
}

std::optional<k3::Tokenizer> find_tokenizer(const std::string& model) {
  if (!std::filesystem::is_directory(model)) throw k3::format_error(model, "", "is not a folder that can be read");
  if (!k3::detail::exists(model + "/tiktoken.model")) return std::nullopt;
  return k3::Tokenizer::from_directory(model);
}

std::vector<k3::id> stop_tokens(const Arguments& arguments, const k3::K3Config& config,
                                const std::optional<k3::Tokenizer>& tokenizer) {
  if (arguments.eos == "none") return {};
  if (arguments.eos) {
    const std::vector<k3::id> ids = parse_ids("--eos", *arguments.eos);
    for (const k3::id token : ids)
      if (static_cast<std::size_t>(token) >= config.vocab_size)
        throw UsageError("--eos: " + std::to_string(token) + " is outside the vocabulary of " +
                         std::to_string(config.vocab_size));
    return ids;
  }
  std::vector<k3::id> ids = config.eos_token_ids;
  if (tokenizer)
    if (const std::optional<k3::id> end = tokenizer->special_id("[EOS]")) ids.push_back(*end);
  return ids;
}

std::vector<k3::id> prompt_tokens(const Arguments& arguments, const std::optional<k3::Tokenizer>& tokenizer) {
  if (arguments.ids) return parse_ids("--ids", *arguments.ids);
  if (!tokenizer) throw UsageError("--prompt: " + arguments.model + " has no tokenizer (tiktoken.model); use --ids");
  if (arguments.prompt->empty()) throw UsageError("--prompt: the prompt is empty");
  return tokenizer->encode(*arguments.prompt);
}

void print_layer_map(const k3::K3CpuModel& model) {
  std::string map;
  for (const k3::K3LayerSpec& layer : model.graph.layers)
    map += std::string(layer.mixer == k3::MixerKind::Kda ? "K" : "M") +
           (layer.mlp == k3::MlpKind::Dense ? "d" : "e") + " ";
  std::fprintf(stderr, "%zu layers: %zu KDA, %zu MLA; hidden %zu, vocabulary %zu\n", model.graph.layers.size(),
               model.graph.kda_count(), model.graph.mla_count(), model.config.hidden_size, model.config.vocab_size);
  std::fprintf(stderr, "layer map (K KDA, M MLA; d dense, e experts): %s\n", map.c_str());
}

void require_output() {
  if (!std::cout) throw k3::error("standard output cannot be written");
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
      std::cout << stream_.push(tokenizer_->token_bytes(token)) << std::flush;
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

template <class Number>
void print_number(Number value) {
  // Nine digits tell every float from its neighbours; what JSON cannot write does not get here (NaN ends the run).
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
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

template <class Result>
void print_json(const std::vector<k3::id>& prompt, const Result& result, bool with_logits) {
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

/// Decodes with `decode(on_token)` and prints tokens, JSON and summary.
template <class Decode>
void decode_and_print(const Arguments& arguments, const std::vector<k3::id>& prompt, const std::vector<k3::id>& eos,
                      const std::optional<k3::Tokenizer>& tokenizer, Decode&& decode) {
  TokenPrinter print(tokenizer, eos, arguments.json);
  const Clock::time_point start = Clock::now();
  Clock::time_point first = start;
  bool any = false;
  const auto result = decode([&](k3::id token) {
    if (!std::exchange(any, true)) first = Clock::now();
    print(token);
  });
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  print.finish();
  if (arguments.json) print_json(prompt, result, arguments.logits);
  print_summary(prompt.size(), result.tokens.size(), seconds(first - start), seconds(Clock::now() - first),
                k3::text(result.stop));
}

template <class P>
void decode(const Arguments& arguments, const k3::K3CpuModel& model, const std::vector<k3::id>& prompt,
            const std::vector<k3::id>& eos, const std::optional<k3::Tokenizer>& tokenizer) {
  const k3::host exec{arguments.threads};
  k3::Decoder<P> decoder(exec, model, std::min<std::size_t>(32, prompt.size()), 1, k3::Ablation::from_env());
  k3::HybridCache<P> cache = decoder.make_cache(1, prompt.size() + arguments.max_new);
  decode_and_print(arguments, prompt, eos, tokenizer, [&](auto on_token) {
    return k3::greedy_decode(decoder, cache, 0, k3::view(prompt), {arguments.max_new, eos, arguments.logits}, on_token);
  });
}

void run(const Arguments& arguments) {
  check_usage(arguments);
  const std::optional<k3::Tokenizer> tokenizer = find_tokenizer(arguments.model);
  const std::vector<k3::id> prompt = prompt_tokens(arguments, tokenizer);
  Progress progress("opening");
  const k3::K3CpuModel model = k3::from_pretrained(arguments.model, std::ref(progress));
  if (tokenizer && tokenizer->vocab_size() > model.config.vocab_size)
    throw k3::format_error(arguments.model, "tiktoken.model", "has " + std::to_string(tokenizer->vocab_size()) +
                           " ids, more than the model's vocabulary of " + std::to_string(model.config.vocab_size));
  const std::vector<k3::id> eos = stop_tokens(arguments, model.config, tokenizer);
  const std::size_t limit = model.config.max_position_embeddings;
  if (prompt.size() > limit || arguments.max_new > limit - prompt.size())
    throw UsageError("prompt + max-new is " + std::to_string(prompt.size()) + " + " +
                     std::to_string(arguments.max_new) + " tokens, above max_position_embeddings, " +
                     std::to_string(limit));
  print_layer_map(model);
  if (arguments.backend == "cuda") {
    Progress upload("to the GPU, MB");
    const auto megabytes = [&](std::size_t done, std::size_t total) { upload(done >> 20, total >> 20); };
    decode_and_print(arguments, prompt, eos, tokenizer, [&](auto on_token) {
      return decode_on_cuda(model, prompt, {arguments.max_new, eos, arguments.logits}, arguments.precision == "bf16",
                            on_token, megabytes);
    });
  } else if (arguments.precision == "fp64") decode<k3::Fp64>(arguments, model, prompt, eos, tokenizer);
  else if (arguments.precision == "bf16") decode<k3::Bf16>(arguments, model, prompt, eos, tokenizer);
  else decode<k3::Fp32>(arguments, model, prompt, eos, tokenizer);
}

void describe(CLI::App& app, Arguments& arguments) {
  app.add_option("MODEL_DIR", arguments.model, "folder with config.json and the safetensors files")->required();
  app.add_option("--prompt", arguments.prompt, "text to continue (needs the checkpoint's tokenizer)");
  app.add_option("--ids", arguments.ids, "token ids to continue, separated by commas");
  app.add_option("--max-new", arguments.max_new_text, "new tokens at most; 0 gives none")->required();
  app.add_option("--eos", arguments.eos,
                 "end tokens, separated by commas, instead of the checkpoint's (config.json, generation_config.json and "
                 "the tokenizer's [EOS]); none: no end token");
  app.add_option("--backend", arguments.backend, "host or cuda")->check(CLI::IsMember({"host", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", arguments.threads, "threads; 0: all cores")->check(CLI::Range(0, 4096))
      ->capture_default_str();
  app.add_option("--precision", arguments.precision, "fp32, fp64 or bf16: activations and caches")
      ->check(CLI::IsMember({"fp32", "fp64", "bf16"}))->capture_default_str();
  app.add_flag("--json", arguments.json, "print one JSON object: prompt, tokens, stop (max_new or eos), logits if asked for");
  app.add_flag("--logits", arguments.logits, "with --json: the row of logits that each new token was chosen from");
  app.footer("The text (ids where the checkpoint has no tokenizer) goes to standard output as it is decoded, everything "
             "else to standard error.\nExit status: 0; 2 for a mistake in the call; 1 for anything else.\n"
             "Environment: K3_ATTNRES_MIX=0..1 and K3_FORCE_EXPERT=ID put deliberate faults in, for tests; K3_CUDA_KDA=0 and "
             "K3_CUDA_MLA=0 run that mixer on the host.");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Greedy decoding of a Kimi K3 checkpoint"};
  Arguments arguments;
  describe(app, arguments);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help() << std::flush;
    if (std::cout) return 0;
    std::cerr << "greedy_decode: standard output cannot be written\n";
    return 1;
  } catch (const CLI::ParseError& problem) {
    std::cerr << "greedy_decode: " << problem.what() << " (--help explains)\n";
    return 2;
  }
  try {
    arguments.max_new = parse_number("--max-new", arguments.max_new_text, 0x7fffffff);
    run(arguments);
    return 0;
  } catch (const UsageError& problem) {
    std::cerr << "greedy_decode: " << problem.what() << " (--help explains)\n";
    return 2;
  } catch (const std::exception& problem) {
    std::cerr << "greedy_decode: " << problem.what() << "\n";
    return 1;
  }
}
