// SPDX-License-Identifier: Apache-2.0
#pragma once
// The subcommands of k3, and what they share.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../command_line.hpp"

/// Exit status after Ctrl-C.
inline constexpr int interrupted_status = 130;

/// From now on the first Ctrl-C only sets a flag; the second ends the process at once.
void catch_interrupt();
bool interrupted();
/// Thrown to leave a command after Ctrl-C: what is half done is undone, nothing is said, the status is 130.
struct Interrupted {};
void stop_if_interrupted();

/// Adds a subcommand to `app`. What it returns runs it, once the command line has been parsed, and gives the exit
/// status.
using Command = std::function<int()>;
Command describe_inspect(CLI::App& app);
Command describe_generate(CLI::App& app);
Command describe_chat(CLI::App& app);
Command describe_make_checkpoint(CLI::App& app);

/// Seconds since it was made, or since `restart`.
class Stopwatch {
 public:
  void restart() { start_ = Clock::now(); }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

/// What is told at the end of a run.
struct Statistics {
  std::size_t prompt_tokens = 0, new_tokens = 0, replies = 0;  ///< replies: of at least one token
  double opening = 0, first_token = 0,
         decoding = 0;  ///< seconds: opening files; prompt to first token; the tokens after
  std::shared_ptr<const k3::StreamedExperts> experts{};  ///< where they are streamed
  std::optional<ExpertUse> gpu{};                        ///< on a GPU
  const char* stop = "input";  ///< eos, max_new, interrupted; of a conversation context, input or interrupted
};

/// Where routed experts are kept: bytes such as 8G, or `auto`. On the host nothing means the file maps, beside a GPU a
/// window for reads; on a GPU nothing means auto.
struct ExpertMemory {
  std::string host, gpu;
};
void describe_memory(CLI::App& app, ExpertMemory& memory);
/// Throws UsageError for what is not a number of bytes, and for an option that does not fit the backend.
void check_memory(const ExpertMemory& memory, const EngineOptions& engine);
/// k3::stream_pretrained with the memory that the options say; what it refuses is said in their words.
k3::StreamedModel stream_experts(const std::string& folder, const std::shared_ptr<const k3::Safetensors>& files,
                                 const ExpertMemory& memory, const EngineOptions& engine,
                                 const k3::LoadProgress& progress);
/// make_engine in the same way.
std::unique_ptr<Engine> make_engine_for(const k3::K3CpuModel& model, const ExpertMemory& memory, EngineOptions options,
                                        const MoveProgress& progress);
/// Bytes as the options take them, such as 58K, rounded up.
std::string option_bytes(std::uint64_t bytes);

/// Bytes that this process has read from storage so far: nothing for what was in the system's file cache.
std::uint64_t bytes_read();
/// One line on standard error.
void print_statistics(const Statistics& statistics);
/// The same as JSON members.
std::string statistics_json(const Statistics& statistics);

/// A model that is open and ready, with its tokenizer.
struct OpenModel {
  std::optional<k3::Tokenizer> tokenizer;
  k3::K3CpuModel model;
  std::shared_ptr<const k3::StreamedExperts> experts;
  std::shared_ptr<const k3::Safetensors> files;
  std::unique_ptr<Engine> engine;
  double seconds = 0;  ///< that opening took
};

/// Opens the files of a checkpoint; `start_engine` then makes what runs it.
OpenModel open_model(const std::string& folder, const ExpertMemory& memory, const EngineOptions& engine);
void start_engine(OpenModel& open, const ExpertMemory& memory, EngineOptions options, std::size_t capacity,
                  std::size_t prompt);

/// Says, once on standard error, that `tokens` in a row are more than the tokenizer's files say the model is for.
void warn_of_length(const OpenModel& open, std::size_t tokens);

/// Takes all of `prompt` but the last few tokens into the sequence, with a progress bar, and removes them from it.
/// Stops early, leaving the rest, after Ctrl-C.
void prefill_with_progress(Engine& engine, std::vector<k3::id>& prompt);

/// Decodes until an end token, `max_new` tokens or Ctrl-C, and fills in the statistics.
std::vector<k3::id> decode_tokens(const OpenModel& open, std::vector<k3::id> prompt, std::size_t max_new,
                                  const std::vector<k3::id>& eos, const std::function<void(k3::id)>& on_token,
                                  Statistics& statistics);
