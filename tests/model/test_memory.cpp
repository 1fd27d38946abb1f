// SPDX-License-Identifier: Apache-2.0
// The memory of a decode: the pages of the weights that it touches, its caches, and a few megabytes. Measured in child
// processes, since a process's peak never falls.

#include <cstdio>
#include <fstream>

#include <sys/wait.h>
#include <unistd.h>

#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool sanitized = true;
#elif defined(__has_feature)
constexpr bool sanitized = __has_feature(address_sanitizer);
#else
constexpr bool sanitized = false;
#endif

constexpr size megabyte = 1 << 20;

/// What docs/performance.md allows beside weights and caches.
constexpr size allowed = 6 * megabyte;

/// A line of /proc/self/status, in bytes.
size status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key + ":")) return 1024 * std::stoull(line.substr(key.size() + 1));
  return 0;
}

/// Bytes of the maps of weights that are in this process's memory.
size touched_weights() {
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  size total = 0;
  for (std::string line; std::getline(maps, line);) {
    const bool begins = line.find('-') < line.find(' ') && line.find(':') > line.find(' ');
    if (begins) inside = line.ends_with(".safetensors");
    if (inside && line.starts_with("Rss:")) total += 1024 * std::stoull(line.substr(4));
  }
  return total;
}

template <precision P>
size cache_bytes(const HybridCache<P>& cache, const K3Config& config) {
  size total = 0;
  for (size index = 0; index < cache.layers(); ++index) {
    if (const auto* mla = cache.mla(index)) total += mla->bytes();
    if (cache.kda(index))
      total += cache.slots() * (kda_state_elements(config.kda) * sizeof(typename P::state) +
                                kda_conv_elements(config.kda) * sizeof(typename P::activation));
  }
  return total;
}

struct Measured {
  size peak = 0, weights = 0, caches = 0;  // above the start; bytes
  size rest() const { return peak - weights - caches; }
};

/// Opens a checkpoint and decodes `tokens` tokens, with `waste` bytes for nothing.
template <precision P>
Measured decode(const std::string& folder, size prompt, size tokens, int threads, size waste) {
  const size before = status_bytes("VmRSS");
  const K3CpuModel model = from_pretrained(folder);
  Decoder<P> decoder(host{threads}, model, 32, 1);
  HybridCache<P> cache = decoder.make_cache(1, prompt + tokens);
  const std::vector<unsigned char> wasted(waste, 1);
  std::vector<id> ids(prompt);
  for (size i = 0; i < prompt; ++i) ids[i] = static_cast<id>(i * 7 % model.config.vocab_size);
  greedy_decode(decoder, cache, 0, view(ids), {tokens});
  return {status_bytes("VmHWM") - before, touched_weights(), cache_bytes(cache, model.config)};
}

/// The same in a child process.
template <precision P>
Measured measured(const std::string& folder, size prompt, size tokens, int threads, size waste = 0) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    Measured result;
    try {
      result = decode<P>(folder, prompt, tokens, threads, waste);
    } catch (const std::exception& problem) {
      std::fprintf(stderr, "%s\n", problem.what());
    }
    const bool told = ::write(ends[1], &result, sizeof result) == static_cast<ssize_t>(sizeof result);
    ::_exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  Measured result;
  const bool told = ::read(ends[0], &result, sizeof result) == static_cast<ssize_t>(sizeof result);
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  REQUIRE((told && WIFEXITED(status) && WEXITSTATUS(status) == 0));
  REQUIRE(result.weights > 0);
  return result;
}

std::string text(const char* what, const Measured& m) {
  const auto mb = [](size bytes) { return std::to_string(static_cast<double>(bytes) / megabyte) + " MB"; };
  return std::string(what) + ": peak " + mb(m.peak) + ", of it weights " + mb(m.weights) + ", caches " + mb(m.caches) +
         ", the rest " + mb(m.rest()) + ", allowed " + mb(allowed);
}

}  // namespace

TEST_CASE("the memory of a decode is weights touched, caches and a few megabytes", "[memory]") {
  if (sanitized) {
    std::puts("note: model/memory: the peak of a decode is not measured, since a sanitizer keeps memory of its own");
    return;
  }
  const std::string austen = austen_path();
  const auto check_decode = [&](const char* what, const Measured& m) {
    INFO(text(what, m));
    CHECK(m.peak > m.weights + m.caches / 2);
    CHECK(m.peak < m.weights + m.caches + allowed);
  };
  check_decode("fp32", measured<Fp32>(austen, 40, 100, 1));
  check_decode("bf16", measured<Bf16>(austen, 40, 100, 1));
  check_decode("fp64", measured<Fp64>(austen, 40, 100, 1));
  check_decode("two threads", measured<Fp32>(austen, 40, 100, 2));
  check_decode("1000 tokens", measured<Fp32>(austen, 900, 100, 1));
  check_decode("another model", measured<Fp32>(data_path("k3-tiny-13l"), 40, 100, 1));

  const Measured wasteful = measured<Fp32>(austen, 40, 100, 1, 2 * allowed);
  INFO(text("with memory for nothing", wasteful));
  CHECK_FALSE(wasteful.peak < wasteful.weights + wasteful.caches + allowed);
}
