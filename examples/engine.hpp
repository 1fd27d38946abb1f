// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <k3/model/greedy_decode.hpp>

/// Routed experts on a GPU.
struct ExpertUse {
  std::size_t slots = 0;  ///< 0: all are there
  std::uint64_t memory = 0, hits = 0, misses = 0, bytes_copied = 0;

  double hit_rate() const {
    return hits + misses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(hits + misses);
  }
};

/// One sequence of a model on some backend in some precision: what greedy_decode and k3 run.
class Engine {
 public:
  using Result = k3::GreedyResult<double>;

  virtual ~Engine() = default;
  /// Tokens taken so far, and how many there may be.
  virtual std::size_t position() const = 0;
  virtual std::size_t capacity() const = 0;
  /// Takes tokens into the sequence.
  virtual void prefill(const std::vector<k3::id>& ids) = 0;
  /// k3::greedy_decode, continuing the sequence.
  virtual Result decode(const std::vector<k3::id>& prompt, const k3::GreedyOptions& options,
                        const std::function<void(k3::id)>& on_token) = 0;
  /// What was streamed to a GPU; nothing on the host.
  virtual std::optional<ExpertUse> experts() const { return std::nullopt; }
};

/// How to run a model. `precision`: fp32, bf16 or, on the host, fp64.
struct EngineOptions {
  std::string backend = "host", precision = "fp32";
  int threads = 0;
  std::size_t capacity = 1;  ///< positions of the cache
  std::size_t rows = 32;     ///< tokens of a prompt that go through the model together
  /// On a GPU: bytes for routed experts; nothing: all of them, `automatic`: what is free.
  std::optional<std::uint64_t> gpu_memory{};
  static constexpr std::uint64_t automatic = ~std::uint64_t{0};
  /// On a GPU: fetches weights from where the model has them; null: they are copied.
  std::function<void(const void* from, std::size_t bytes, std::byte* to)> read{};
};

/// Told how many bytes have been moved to the device, and how many there are.
using MoveProgress = std::function<void(std::size_t done, std::size_t total)>;

std::unique_ptr<Engine> make_engine(const k3::K3CpuModel& model, const EngineOptions& options,
                                    const MoveProgress& progress);

/// The engine of a decoder and its cache, on any backend.
template <k3::any_decoder Decoder, class Cache>
class EngineOf : public Engine {
 public:
  EngineOf(Decoder& decoder, Cache cache) : decoder_(decoder), cache_(std::move(cache)) {}

  std::size_t position() const override { return cache_.position(0); }
  std::size_t capacity() const override { return cache_.capacity(); }
  void prefill(const std::vector<k3::id>& ids) override { k3::prefill(decoder_, cache_, 0, k3::view(ids)); }
  Result decode(const std::vector<k3::id>& prompt, const k3::GreedyOptions& options,
                const std::function<void(k3::id)>& on_token) override {
    auto got = k3::greedy_decode(decoder_, cache_, 0, k3::view(prompt), options, on_token);
    Result result{std::move(got.tokens), got.stop, {}};
    for (const auto& row : got.logits) result.logits.emplace_back(row.begin(), row.end());
    return result;
  }

 private:
  Decoder& decoder_;
  Cache cache_;
};
