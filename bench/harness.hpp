// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <k3/core/execution.hpp>

#if K3_X86_64
#include <immintrin.h>
#endif

// Timing of host operations: median and spread over repetitions, buffers that rotate through more memory than the
// caches hold, a read ceiling measured in the same run, and a table or one JSON object on standard output.
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

/// Prints results as they come, as a table, or all together as one JSON object where argv has --json.
class Report {
 public:
  Report(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) json_ = json_ || std::strcmp(argv[i], "--json") == 0;
    if (!json_)
      std::printf("%-22s %-20s %-7s %3s %11s %21s %8s %8s %7s\n", "operation", "shape", "isa", "thr", "us (median)",
                  "10 %..90 %", "GB/s", "Gw/s", "% read");
  }

  void ceiling(int threads, double bytes_per_second) {
    ceilings_.emplace_back(threads, bytes_per_second);
    if (!json_)
      std::printf("read ceiling, %d thread%s: %.1f GB/s\n", threads, threads == 1 ? "" : "s", bytes_per_second * 1e-9);
  }

  void add(const Result& r) {
    results_.push_back(r);
    if (json_) return;
    std::printf("%-22s %-20s %-7s %3d %11.1f %10.1f..%9.1f %8.2f %8.2f %6.1f%%\n", r.operation.c_str(), r.shape.c_str(),
                r.isa.c_str(), r.threads, r.time.median_us, r.time.low_us, r.time.high_us, r.gigabytes(),
                r.gigaweights(), r.percent());
    std::fflush(stdout);
  }

  ~Report() {
    if (!json_) return;
    std::printf("{\"read_ceiling\": [");
    for (std::size_t i = 0; i < ceilings_.size(); ++i)
      std::printf("%s{\"threads\": %d, \"gb_per_s\": %.3f}", i ? ", " : "", ceilings_[i].first,
                  ceilings_[i].second * 1e-9);
    std::printf("], \"results\": [");
    for (std::size_t i = 0; i < results_.size(); ++i) {
      const Result& r = results_[i];
      std::printf(
          "%s\n{\"operation\": \"%s\", \"shape\": \"%s\", \"isa\": \"%s\", \"threads\": %d, \"median_us\": %.3f, "
          "\"p10_us\": %.3f, \"p90_us\": %.3f, \"repetitions\": %d, \"gb_per_s\": %.3f, \"gweights_per_s\": %.3f, "
          "\"percent_of_read\": %.2f}",
          i ? "," : "", r.operation.c_str(), r.shape.c_str(), r.isa.c_str(), r.threads, r.time.median_us, r.time.low_us,
          r.time.high_us, r.time.repetitions, r.gigabytes(), r.gigaweights(), r.percent());
    }
    std::printf("]}\n");
  }

 private:
  bool json_ = false;
  std::vector<std::pair<int, double>> ceilings_;
  std::vector<Result> results_;
};

}  // namespace k3::bench
