// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the programs' command lines share: numbers, ids, the choice of a backend, exit status.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <k3/io/checkpoint.hpp>
#include <k3/io/tokenizer.hpp>
#include <k3/version.hpp>

#include "cuda_backend.hpp"

/// A mistake in the call, as opposed to one in a file: exit status 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A decimal number of nothing but digits, at most `most`. The command line's own conversion takes signs and octal, and
/// wraps.
inline std::uint64_t parse_number(const std::string& option, const std::string& text, std::uint64_t most) {
  std::uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, problem] = std::from_chars(text.data(), end, value);
  if (text.empty() || problem != std::errc() || stopped != end || value > most)
    throw UsageError(option + ": \"" + text + "\" is not a number from 0 to " + std::to_string(most));
  return value;
}

inline std::vector<k3::id> parse_ids(const std::string& option, const std::string& text) {
  std::vector<k3::id> ids;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t comma = std::min(text.find(',', at), text.size());
    ids.push_back(static_cast<k3::id>(parse_number(option, text.substr(at, comma - at), 0x7fffffff)));
    at = comma + 1;
  }
  return ids;
}

/// Throws where one of an option's ids is no token of the model.
inline void check_ids(const std::string& option, const std::vector<k3::id>& ids, const k3::K3Config& config) {
  for (const k3::id token : ids)
    if (static_cast<std::size_t>(token) >= config.vocab_size)
      throw UsageError(option + ": " + std::to_string(token) + " is outside the vocabulary of " +
                       std::to_string(config.vocab_size));
}

/// The options that choose how a model is run.
inline void describe_engine(CLI::App& app, EngineOptions& options) {
  app.add_option("--backend", options.backend, "host or cuda")
      ->check(CLI::IsMember({"host", "cuda"}))
      ->capture_default_str();
  // As text: the command line's own conversion takes octal and hexadecimal.
  const auto set_threads = [&options](const std::string& text) {
    try {
      options.threads = static_cast<int>(parse_number("--threads", text, 4096));
    } catch (const UsageError& problem) {
      throw CLI::ValidationError(problem.what());
    }
  };
  app.add_option_function<std::string>("--threads", set_threads, "threads; 0: all cores")
      ->type_name("N")
      ->default_str("0");
  app.add_option("--precision", options.precision, "fp32, fp64 or bf16: activations and caches")
      ->check(CLI::IsMember({"fp32", "fp64", "bf16"}))
      ->capture_default_str();
}

inline void check_engine(const EngineOptions& options) {
  k3::environment();  // its mistakes too come before anything is opened
  if (options.backend != "cuda") return;
  if (!cuda_backend_built()) throw UsageError("--backend cuda: this program was built without CUDA");
  if (options.threads != 0) throw UsageError("--backend cuda takes no --threads");
  if (options.precision == "fp64") throw UsageError("--backend cuda takes --precision fp32 or bf16");
  const std::string problem = gpu_problem();
  if (!problem.empty()) throw k3::error("--backend cuda: " + problem + "; --backend host needs none");
}

inline void require_output() {
  if (!std::cout) throw k3::error("standard output cannot be written");
}

/// The checkpoint's tokenizer, where it has one.
inline std::optional<k3::Tokenizer> find_tokenizer(const std::string& model) {
  if (!std::filesystem::is_directory(model)) throw k3::format_error(model, "", "is not a folder that can be read");
  if (!k3::detail::exists(model + "/tiktoken.model")) return std::nullopt;
  return k3::Tokenizer::from_directory(model);
}

/// Throws where the tokenizer has ids that the model has not.
inline void check_vocabulary(const std::string& folder, const std::optional<k3::Tokenizer>& tokenizer,
                             const k3::K3Config& config) {
  if (!tokenizer || tokenizer->vocab_size() <= config.vocab_size) return;
  throw k3::format_error(folder, "tiktoken.model",
                         "has " + std::to_string(tokenizer->vocab_size()) +
                             " ids, more than the model's vocabulary of " + std::to_string(config.vocab_size));
}

/// The bytes of a token; a model may have ids beyond its tokenizer's, which stand for no text.
inline std::string_view token_text(const k3::Tokenizer& tokenizer, k3::id token) {
  const bool known = token >= 0 && static_cast<std::size_t>(token) < tokenizer.vocab_size();
  return known ? tokenizer.token_bytes(token) : "\xEF\xBF\xBD";
}

/// The end tokens: those of the option --eos (`none`: no end token), or those of the checkpoint's files and [EOS].
inline std::vector<k3::id> stop_tokens(const std::optional<std::string>& option, const k3::K3Config& config,
                                       const std::optional<k3::Tokenizer>& tokenizer) {
  if (option == "none") return {};
  if (option) {
    const std::vector<k3::id> ids = parse_ids("--eos", *option);
    check_ids("--eos", ids, config);
    return ids;
  }
  std::vector<k3::id> ids = config.eos_token_ids;
  if (tokenizer)
    if (const std::optional<k3::id> end = tokenizer->special_id("[EOS]")) ids.push_back(*end);
  return ids;
}

/// One letter pair a layer: K KDA or M MLA, d dense or e experts.
inline std::string layer_map(const k3::K3Graph& graph) {
  std::string map;
  for (const k3::K3LayerSpec& layer : graph.layers)
    map += std::string(map.empty() ? "" : " ") + (layer.mixer == k3::MixerKind::Kda ? "K" : "M") +
           (layer.mlp == k3::MlpKind::Dense ? "d" : "e");
  return map;
}

inline void print_layer_map(const k3::K3CpuModel& model) {
  std::fprintf(stderr, "%zu layers: %zu KDA, %zu MLA; hidden %zu, vocabulary %zu\n", model.graph.layers.size(),
               model.graph.kda_count(), model.graph.mla_count(), model.config.hidden_size, model.config.vocab_size);
  std::fprintf(stderr, "layer map (K KDA, M MLA; d dense, e experts): %s\n", layer_map(model.graph).c_str());
  for (const std::string& key : model.config.unread_keys)
    std::fprintf(stderr, "config.json: %s is a key that was not read\n", key.c_str());
}

/// Opens /dev/null, the wrong way round, in place of standard streams that are closed: a file opened later would get
/// their numbers. Reading or writing them then fails as it would have.
inline void fill_standard_streams() {
  for (int stream = 0; stream < 3; ++stream)
    if (::fcntl(stream, F_GETFD) < 0) static_cast<void>(::open("/dev/null", stream == 0 ? O_WRONLY : O_RDONLY));
}

/// Starts the program again with OMP_WAIT_POLICY=passive where the environment says nothing of it: OpenMP reads it
/// before main. Threads that wait actively for each other stand still where other programs have the processors.
inline void wait_passively(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") || ::setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
  ::execv("/proc/self/exe", argv);  // returns only where that is not possible, and then nothing is lost but speed
}

/// Runs a program: parse, then `run`, which returns the exit status. 2 for a mistake in the call, 1 for anything else,
/// either with one line on standard error.
template <class Run>
int run_program(CLI::App& app, int argc, char** argv, const std::string& name, Run&& run) {
  const auto complain = [&](const char* what, int status) {
    std::cerr << name << ": " << what << (status == 2 ? " (--help explains)\n" : "\n");
    return status;
  };
  fill_standard_streams();
  wait_passively(argv);
  app.set_version_flag("--version", name + " " + k3::version_string);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help() << std::flush;
    return std::cout ? 0 : complain("standard output cannot be written", 1);
  } catch (const CLI::CallForVersion& problem) {
    std::cout << problem.what() << std::endl;
    return std::cout ? 0 : complain("standard output cannot be written", 1);
  } catch (const CLI::ParseError& problem) {
    const bool no_subcommand = app.get_require_subcommand_min() > 0 && app.get_subcommands().empty();
    if (no_subcommand && !app.remaining().empty())
      return complain(("\"" + k3::detail::printable(app.remaining()[0]) + "\" is no subcommand").c_str(), 2);
    return complain(problem.what(), 2);
  }
  try {
    return run();
  } catch (const UsageError& problem) {
    return complain(problem.what(), 2);
  } catch (const std::bad_alloc&) {
    return complain("there is not enough memory", 1);
  } catch (const std::exception& problem) {
    return complain(problem.what(), 1);
  }
}
