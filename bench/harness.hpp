// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <k3/core/execution.hpp>

#if K3_X86_64
#include <immintrin.h>
#endif

// Timing of host operations: median and spread over repetitions, buffers that rotate through more memory than the
// caches hold, a read ceiling measured in the same run, and results printed and merged into one JSON file.
namespace k3::bench {

struct Timing {
  double median_us = 0, low_us = 0, high_us = 0;  // the 10th and 90th percentile
  int repetitions = 0;
};

/// Runs body(repetition) once unmeasured, then until `seconds` or `most` repetitions are over, at least 5 times.
template <class Body>
Timing measure(double seconds, int most, Body&& body) {
  using clock = std::chrono::steady_clock;
  body(0);
  std::vector<double> times;
  const auto begin = clock::now();
  do {
    const auto start = clock::now();
    body(static_cast<int>(times.size()) + 1);
    times.push_back(std::chrono::duration<double, std::micro>(clock::now() - start).count());
  } while (times.size() < 5 || (static_cast<int>(times.size()) < most &&
                                std::chrono::duration<double>(clock::now() - begin).count() < seconds));
  std::sort(times.begin(), times.end());
  const auto at = [&](double share) {
    return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
  };
  return {at(0.5), at(0.1), at(0.9), static_cast<int>(times.size())};
}

/// A large block of random bytes from which repetitions take their operands in turn, so that each finds its own in no
/// cache. Seen as bf16 or float its elements are of either sign with magnitudes in [0.5, 1).
class RotatingPool {
 public:
  explicit RotatingPool(std::size_t bytes)
      : bytes_(bytes), memory_(static_cast<std::uint64_t*>(std::aligned_alloc(4096, bytes))) {
    std::uint64_t state = 0x9e3779b97f4a7c15u;
    for (std::size_t i = 0; i < bytes / 8; ++i) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      memory_[i] = (state & 0x807f807f807f807fu) | 0x3f003f003f003f00u;
    }
  }
  ~RotatingPool() { std::free(memory_); }
  RotatingPool(const RotatingPool&) = delete;
  RotatingPool& operator=(const RotatingPool&) = delete;

  std::size_t bytes() const { return bytes_; }
  const void* data() const { return memory_; }

  /// The next `bytes` of the block, wrapping round at its end.
  template <class T>
  const T* next(std::size_t bytes) {
    bytes = (bytes + 4095) / 4096 * 4096;
    if (offset_ + bytes > bytes_) offset_ = 0;
    const T* result = reinterpret_cast<const T*>(reinterpret_cast<const char*>(memory_) + offset_);
    offset_ += bytes;
    return result;
  }

 private:
  std::size_t bytes_, offset_ = 0;
  std::uint64_t* memory_;
};

#if K3_X86_64
K3_TARGET_AVX2 inline std::uint64_t sum_words_avx2(const std::uint64_t* words, std::size_t count) {
  __m256i sum[4] = {};
  const __m256i* from = reinterpret_cast<const __m256i*>(words);
  for (std::size_t i = 0; i + 16 <= count; i += 16, from += 4)
    for (int j = 0; j < 4; ++j) sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256(from + j));
  std::uint64_t part[16], total = 0;
  std::memcpy(part, sum, sizeof part);
  for (std::uint64_t p : part) total += p;
  return total;
}
#endif

inline std::uint64_t sum_words(const std::uint64_t* words, std::size_t count) {
#if K3_X86_64
  if (best_isa() != Isa::plain) return sum_words_avx2(words, count);
#endif
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < count; ++i) total += words[i];
  return total;
}

/// Bytes per second with which `threads` read the whole pool once: the best of 5 passes.
inline double read_ceiling(const RotatingPool& pool, int threads) {
  const auto* words = static_cast<const std::uint64_t*>(pool.data());
  volatile std::uint64_t sink = 0;
  double best = 0;
  for (int pass = 0; pass < 5; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    detail::parallel_chunks(host{.threads = threads}, pool.bytes() / 8, 512, pool.bytes(), [&](size first, size last) {
      const std::uint64_t total = sum_words(words + first, last - first);
      if (total == 1) sink = total;  // keeps the loads alive
    });
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = (std::max)(best, static_cast<double>(pool.bytes()) / time.count());
  }
  return best;
}

/// One line of the results. `bytes` and `weights` are what one repetition reads; 0 weights are not printed.
struct Result {
  std::string operation, shape, isa;
  int threads;
  Timing time;
  double bytes, weights, ceiling;  // ceiling in bytes per second

  double gigabytes() const { return bytes / time.median_us * 1e-3; }
  double gigaweights() const { return weights / time.median_us * 1e-3; }
  double percent() const { return 100 * gigabytes() * 1e9 / ceiling; }
};

inline const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "plain"; }

/// The processor's name as Linux tells it.
inline std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  return "unknown";
}

/// Takes a program's options, `--quick` for shorter measurements and `--json FILE`, prints results as they come and,
/// with the latter, merges them at the end into a file of one row a line: operations that this run did not measure
/// stay. Every row has the ceiling that its own program measured.
class Report {
 public:
  Report(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      if (std::strcmp(argv[i], "--quick") == 0) {
        quick_ = true;
      } else if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
        file_ = argv[++i];
      } else {
        std::fprintf(stderr, "usage: %s [--quick] [--json FILE]\n", argv[0]);
        std::exit(2);
      }
    }
    std::printf("%-22s %-20s %-7s %3s %11s %21s %8s %8s %7s\n", "operation", "shape", "isa", "thr", "us (median)",
                "10 %..90 %", "GB/s", "Gw/s", "% read");
  }
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;
  ~Report() {
    if (!file_.empty()) merge();
  }

  bool quick() const { return quick_; }
  double seconds(double full) const { return quick_ ? full / 8 : full; }
  /// 1, 2, 4... and all of them.
  static std::vector<int> thread_counts() {
    const int most = detail::thread_count(host{});
    std::vector<int> counts;
    for (int threads = 1; threads < most; threads *= 2) counts.push_back(threads);
    counts.push_back(most);
    return counts;
  }
  /// The vector versions worth timing: all of one thread and of all threads, in between the best.
  static std::vector<Isa> isas(int threads, Isa least) {
    const bool all = threads == 1 || threads == detail::thread_count(host{});
    std::vector<Isa> result;
    for (const Isa isa : {Isa::avx512, Isa::avx2, Isa::plain})
      if (isa <= best_isa() && isa >= least && (all || result.empty())) result.push_back(isa);
    return result;
  }

  void print_ceiling(int threads, double bytes_per_second) const {
    std::printf("read ceiling, %d thread%s: %.1f GB/s\n", threads, threads == 1 ? "" : "s", bytes_per_second * 1e-9);
  }

  void add(const Result& r) {
    results_.push_back(r);
    std::printf("%-22s %-20s %-7s %3d %11.1f %10.1f..%9.1f %8.2f %8.2f %6.1f%%\n", r.operation.c_str(), r.shape.c_str(),
                r.isa.c_str(), r.threads, r.time.median_us, r.time.low_us, r.time.high_us, r.gigabytes(),
                r.gigaweights(), r.percent());
    std::fflush(stdout);
  }

 private:
  static std::string line_of(const Result& r) {
    char line[512];
    std::snprintf(line, sizeof line,
                  "{\"operation\": \"%s\", \"shape\": \"%s\", \"isa\": \"%s\", \"threads\": %d, \"us\": %.3f, "
                  "\"us_spread\": %.3f, \"GBps\": %.3f, \"gweights\": %.3f, \"ceiling_GBps\": %.3f, \"percent\": %.2f}",
                  r.operation.c_str(), r.shape.c_str(), r.isa.c_str(), r.threads, r.time.median_us,
                  r.time.high_us - r.time.low_us, r.gigabytes(), r.gigaweights(), r.ceiling * 1e-9, r.percent());
    return line;
  }

  /// The lines of operations that this run did not measure, then its own.
  std::vector<std::string> merged_lines() const {
    std::set<std::string> measured;
    for (const Result& r : results_) measured.insert(r.operation);
    std::vector<std::string> lines;
    std::ifstream in(file_);
    for (std::string line; std::getline(in, line);) {
      char operation[64] = "";
      if (std::sscanf(line.c_str(), "{\"operation\": \"%63[^\"]\"", operation) != 1 || measured.count(operation))
        continue;
      if (line.back() == ',') line.pop_back();
      lines.push_back(line);
    }
    for (const Result& r : results_) lines.push_back(line_of(r));
    return lines;
  }

  /// The largest ceiling of any row, by number of threads: each program measures its own.
  static std::map<int, double> ceilings_of(const std::vector<std::string>& lines) {
    std::map<int, double> result;
    for (const std::string& line : lines) {
      const auto number = [&](const char* key) {
        const auto at = line.find(key);
        return at == std::string::npos ? 0.0 : std::atof(line.c_str() + at + std::strlen(key));
      };
      double& ceiling = result[static_cast<int>(number("\"threads\": "))];
      ceiling = (std::max)(ceiling, number("\"ceiling_GBps\": "));
    }
    return result;
  }

  void merge() const {
    const std::vector<std::string> lines = merged_lines();
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    std::FILE* out = std::fopen(file_.c_str(), "w");
    if (!out) {
      std::fprintf(stderr, "cannot write %s\n", file_.c_str());
      return;
    }
    std::fprintf(out, "{\"cpu\": \"%s\", \"date\": \"%s\", \"read_ceilings\": [", cpu_name().c_str(), date);
    const char* separator = "";
    for (const auto& [threads, gigabytes] : ceilings_of(lines)) {
      std::fprintf(out, "%s{\"threads\": %d, \"GBps\": %.3f}", separator, threads, gigabytes);
      separator = ", ";
    }
    std::fprintf(out, "], \"rows\": [");
    for (std::size_t i = 0; i < lines.size(); ++i) std::fprintf(out, "%s\n%s", i ? "," : "", lines[i].c_str());
    std::fprintf(out, "\n]}\n");
    std::fclose(out);
  }

  bool quick_ = false;
  std::string file_;
  std::vector<Result> results_;
};

}  // namespace k3::bench
