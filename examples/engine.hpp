// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <k3/model/greedy_decode.hpp>

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
};

/// How to run a model. `precision`: fp32, bf16 or, on the host, fp64.
struct EngineOptions {
  std::string backend = "host", precision = "fp32";
  int threads = 0;
  std::size_t capacity = 1;  ///< positions of the cache
  std::size_t rows = 32;     ///< tokens of a prompt that go through the model together
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
