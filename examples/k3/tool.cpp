// SPDX-License-Identifier: Apache-2.0

#include "tool.hpp"

#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <fstream>

#include <k3/io/weight_reader.hpp>

#include "../progress.hpp"

namespace {

volatile std::sig_atomic_t interrupt_flag = 0;

void on_interrupt(int) { interrupt_flag = 1; }

}  // namespace

void catch_interrupt() {
  struct sigaction action{};
  action.sa_handler = on_interrupt;
  // Reading from a terminal must end, and a second Ctrl-C must not be caught.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}

bool interrupted() { return interrupt_flag != 0; }
void stop_if_interrupted() {
  if (interrupted()) throw Interrupted{};
}

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
  // The first token of a reply is not among those that `decoding` is the time of.
  return s.new_tokens > s.replies && s.decoding > 0 ? static_cast<double>(s.new_tokens - s.replies) / s.decoding : 0;
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
  const auto megabytes = [](std::uint64_t bytes) { return static_cast<double>(bytes) / 1e6; };
  if (s.gpu && s.gpu->slots == 0) std::fprintf(stderr, "experts: all on the GPU\n");
  if (s.gpu && s.gpu->slots > 0)
    std::fprintf(stderr,
                 "experts on the GPU: %zu slots, %.1f MB; %.1f MB copied there, hit rate %.1f %% of %llu uses\n",
                 s.gpu->slots, megabytes(s.gpu->memory), megabytes(s.gpu->bytes_copied), 100 * s.gpu->hit_rate(),
                 static_cast<unsigned long long>(s.gpu->hits + s.gpu->misses));
  if (!s.experts) return;
  const k3::StreamingStatistics streamed = s.experts->statistics();
  std::fprintf(stderr, "experts%s: %zu slots, %.1f MB; %.1f MB read from the files, hit rate %.1f %% of %llu uses\n",
               s.gpu ? " on the host" : "", s.experts->slots(), megabytes(s.experts->memory()),
               megabytes(streamed.bytes_read), 100 * streamed.hit_rate(),
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
  if (s.gpu) {
    std::snprintf(text, sizeof text,
                  ",\"gpu_expert_slots\":%zu,\"gpu_expert_bytes_copied\":%llu,\"gpu_expert_hit_rate\":%.4f",
                  s.gpu->slots, static_cast<unsigned long long>(s.gpu->bytes_copied), s.gpu->hit_rate());
    json += text;
  }
  return json;
}

OpenModel open_model(const std::string& folder, const ExpertMemory& memory, const EngineOptions& engine) {
  k3::catch_lost_pages();
  check_memory(memory, engine);  // mistakes in the call come before anything is opened
  OpenModel open;
  const Stopwatch watch;
  open.tokenizer = find_tokenizer(folder);
  stop_if_interrupted();
  Progress bar("opening");
  const k3::LoadProgress progress = [&](std::size_t done, std::size_t total) {
    stop_if_interrupted();
    bar(done, total);
  };
  open.files = std::make_shared<const k3::Safetensors>(k3::open_safetensors_set(folder));
  stop_if_interrupted();
  if (memory.host.empty() && engine.backend != "cuda") {
    open.model = k3::from_pretrained(folder, open.files, progress);
  } else {
    k3::StreamedModel streamed = stream_experts(folder, open.files, memory, engine, progress);
    open.model = std::move(streamed.model);
    open.experts = std::move(streamed.experts);
  }
  check_vocabulary(folder, open.tokenizer, open.model.config);
  open.seconds = watch.seconds();
  return open;
}

void start_engine(OpenModel& open, const ExpertMemory& memory, EngineOptions options, std::size_t capacity,
                  std::size_t prompt) {
  const Stopwatch watch;
  Progress upload("to the GPU, MB");
  options.capacity = capacity;
  options.rows = std::clamp<std::size_t>(prompt, 1, 32);
  options.read = k3::WeightReader(open.files);
  stop_if_interrupted();
  open.engine = make_engine_for(open.model, memory, options, [&](std::size_t done, std::size_t total) {
    stop_if_interrupted();
    upload(done >> 20, total >> 20);
  });
  open.files->require_whole();  // what was copied to a GPU is what was opened
  open.seconds += watch.seconds();
}

void warn_of_length(const OpenModel& open, std::size_t tokens) {
  const auto limit = open.tokenizer ? open.tokenizer->model_max_length() : std::nullopt;
  if (limit && tokens > *limit)
    std::fprintf(stderr, "k3: up to %zu tokens, above model_max_length of tokenizer_config.json, %zu\n", tokens,
                 *limit);
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

std::vector<k3::id> decode_tokens(const OpenModel& open, std::vector<k3::id> prompt, std::size_t max_new,
                                  const std::vector<k3::id>& eos, const std::function<void(k3::id)>& on_token,
                                  Statistics& statistics) {
  Engine& engine = *open.engine;
  const auto on_gpu = engine.experts();
  const bool reads = !on_gpu || on_gpu->slots > 0;  // a GPU that holds all needs no file any more
  std::vector<k3::id> tokens;
  Stopwatch watch;
  statistics.prompt_tokens += prompt.size();
  statistics.stop = "interrupted";
  prefill_with_progress(engine, prompt);
  if (interrupted()) return tokens;
  double first = 0;
  try {
    const auto result = engine.decode(prompt, {max_new, eos, false}, [&](k3::id token) {
      if (reads) open.files->require_whole();
      if (tokens.empty()) first = watch.seconds();
      tokens.push_back(token);
      on_token(token);
      stop_if_interrupted();
    });
    statistics.stop = k3::text(result.stop);
  } catch (const Interrupted&) {
  }
  statistics.first_token += first;
  statistics.decoding += watch.seconds() - first;
  statistics.new_tokens += tokens.size();
  statistics.replies += !tokens.empty();
  statistics.gpu = engine.experts();
  return tokens;
}
