// SPDX-License-Identifier: Apache-2.0

#include "tool.hpp"

#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <fstream>

#include "../progress.hpp"

namespace {

volatile std::sig_atomic_t interrupt_flag = 0;

void on_interrupt(int) { interrupt_flag = 1; }

/// Thrown between two tokens to leave k3::greedy_decode.
struct Interrupted {};

}  // namespace

void catch_interrupt() {
  struct sigaction action{};
  action.sa_handler = on_interrupt;
  // Reading from a terminal must end, and a second Ctrl-C must not be caught.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return interrupt_flag != 0; }

std::uint64_t bytes_read() {
  std::ifstream file("/proc/self/io");
  for (std::string key; file >> key;) {
    std::uint64_t value = 0;
    file >> value;
    if (key == "read_bytes:") return value;
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::uint64_t>(usage.ru_inblock) * 512;
}

namespace {

double tokens_per_second(const Statistics& s) {
  return s.new_tokens > 1 && s.decoding > 0 ? static_cast<double>(s.new_tokens - 1) / s.decoding : 0;
}

double peak_megabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

const char* stop_text(const std::string& stop) {
  if (stop == "eos") return "an end token";
  if (stop == "context") return "the end of the context";
  if (stop == "input") return "the end of the input";
  return stop == "interrupted" ? "Ctrl-C" : "the requested length";
}

}  // namespace

void print_statistics(const Statistics& s) {
  std::fprintf(stderr, "opened in %.2f s; %zu prompt tokens, first token after %.2f s; %zu new tokens", s.opening,
               s.prompt_tokens, s.first_token, s.new_tokens);
  if (tokens_per_second(s) > 0) std::fprintf(stderr, ", %.1f tokens/s", tokens_per_second(s));
  std::fprintf(stderr, "; %.1f MB read, peak memory %.1f MB; stopped at %s\n", static_cast<double>(bytes_read()) / 1e6,
               peak_megabytes(), stop_text(s.stop));
  if (!s.experts) return;
  const k3::StreamingStatistics streamed = s.experts->statistics();
  std::fprintf(stderr, "experts: %zu slots, %.1f MB; %.1f MB read from the files, hit rate %.1f %% of %llu uses\n",
               s.experts->slots(), static_cast<double>(s.experts->memory()) / 1e6,
               static_cast<double>(streamed.bytes_read) / 1e6, 100 * streamed.hit_rate(),
               static_cast<unsigned long long>(streamed.hits + streamed.misses));
}

std::string statistics_json(const Statistics& s) {
  char text[400];
  std::snprintf(text, sizeof text,
                "\"stop\":\"%s\",\"prompt_tokens\":%zu,\"new_tokens\":%zu,\"opening_seconds\":%.3f,"
                "\"first_token_seconds\":%.3f,\"tokens_per_second\":%.2f,\"bytes_read\":%llu",
                s.stop, s.prompt_tokens, s.new_tokens, s.opening, s.first_token, tokens_per_second(s),
                static_cast<unsigned long long>(bytes_read()));
  std::string json = text;
  if (s.experts) {
    const k3::StreamingStatistics streamed = s.experts->statistics();
    std::snprintf(text, sizeof text, ",\"expert_slots\":%zu,\"expert_bytes_read\":%llu,\"expert_hit_rate\":%.4f",
                  s.experts->slots(), static_cast<unsigned long long>(streamed.bytes_read), streamed.hit_rate());
    json += text;
  }
  return json;
}

namespace {

/// A number of bytes, with K, M, G or T for powers of 1024.
std::uint64_t parse_bytes(const std::string& option, std::string text) {
  const std::string units = "KMGT";
  const std::size_t unit = text.empty() ? units.npos : units.find(text.back());
  const unsigned shift = unit == units.npos ? 0 : 10 * (static_cast<unsigned>(unit) + 1);
  try {
    return parse_number(option, unit == units.npos ? text : text.substr(0, text.size() - 1), ~std::uint64_t{0} >> shift)
           << shift;
  } catch (const UsageError&) {
    throw UsageError(option + ": \"" + text + "\" is not a number of bytes, such as 800M or 8G, or auto");
  }
}

std::uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string key, rest; file >> key; std::getline(file, rest)) {
    std::uint64_t kilobytes = 0;
    if (key == "MemAvailable:" && file >> kilobytes) return kilobytes << 10;
  }
  throw k3::error("--host-memory auto: the system does not say how much memory is available (/proc/meminfo)");
}

/// Nine tenths of what is available, less the rest of the model; caches and everybody else get the remaining tenth.
std::uint64_t memory_for_experts(const k3::Safetensors& files) {
  std::uint64_t trunk = 0;
  for (const k3::TensorInfo& tensor : files.tensors())
    if (!k3::detail::is_vision_tensor(tensor) && tensor.name.find(".experts.") == tensor.name.npos)
      trunk += tensor.bytes();
  const std::uint64_t available = available_memory() / 10 * 9;
  return available > trunk ? available - trunk : 0;
}

}  // namespace

void describe_memory(CLI::App& app, ExpertMemory& memory) {
  app.add_option("--host-memory", memory.memory,
                 "read routed experts on demand into this much memory: bytes, such as 800M or 8G, or auto; without it "
                 "the files are mapped");
}

OpenModel open_model(const std::string& folder, const ExpertMemory& memory, const EngineOptions& engine) {
  if (!memory.memory.empty() && engine.backend != "host") throw UsageError("--host-memory: only with --backend host");
  const bool automatic = memory.memory == "auto";
  std::uint64_t bytes = 0;
  if (!memory.memory.empty() && !automatic) bytes = parse_bytes("--host-memory", memory.memory);
  OpenModel open;
  const Stopwatch watch;
  open.tokenizer = find_tokenizer(folder);
  Progress progress("opening");
  if (memory.memory.empty()) {
    open.model = k3::from_pretrained(folder, std::ref(progress));
  } else {
    const auto files = std::make_shared<const k3::Safetensors>(k3::open_safetensors_set(folder));
    if (automatic) bytes = memory_for_experts(*files);
    k3::StreamedModel streamed = k3::stream_pretrained(folder, files, {.memory = bytes}, std::ref(progress));
    open.model = std::move(streamed.model);
    open.experts = std::move(streamed.experts);
  }
  check_vocabulary(folder, open.tokenizer, open.model.config);
  open.seconds = watch.seconds();
  return open;
}

void start_engine(OpenModel& open, EngineOptions options, std::size_t capacity, std::size_t prompt) {
  const Stopwatch watch;
  Progress upload("to the GPU, MB");
  options.capacity = capacity;
  options.rows = std::clamp<std::size_t>(prompt, 1, 32);
  open.engine =
      make_engine(open.model, options, [&](std::size_t done, std::size_t total) { upload(done >> 20, total >> 20); });
  open.seconds += watch.seconds();
}

void prefill_with_progress(Engine& engine, std::vector<k3::id>& prompt) {
  constexpr std::size_t step = 256;  // each part also pays for one row of logits
  if (prompt.size() <= step) return;
  Progress progress("prompt");
  std::size_t done = 0;
  for (; prompt.size() - done > step && !interrupted(); done += step) {
    const auto first = prompt.begin() + static_cast<std::ptrdiff_t>(done);
    engine.prefill({first, first + step});
    progress(done + step, prompt.size());
  }
  prompt.erase(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(done));
}

std::vector<k3::id> decode_tokens(Engine& engine, std::vector<k3::id> prompt, std::size_t max_new,
                                  const std::vector<k3::id>& eos, const std::function<void(k3::id)>& on_token,
                                  Statistics& statistics) {
  std::vector<k3::id> tokens;
  Stopwatch watch;
  statistics.prompt_tokens += prompt.size();
  statistics.stop = "interrupted";
  prefill_with_progress(engine, prompt);
  if (interrupted()) return tokens;
  double first = 0;
  try {
    const auto result = engine.decode(prompt, {max_new, eos, false}, [&](k3::id token) {
      if (tokens.empty()) first = watch.seconds();
      tokens.push_back(token);
      on_token(token);
      if (interrupted()) throw Interrupted{};
    });
    statistics.stop = k3::text(result.stop);
  } catch (const Interrupted&) {
  }
  statistics.first_token += first;
  statistics.decoding += watch.seconds() - first;
  statistics.new_tokens += tokens.size();
  return tokens;
}
