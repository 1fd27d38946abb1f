// SPDX-License-Identifier: Apache-2.0

#include <k3/model/synthetic.hpp>

#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

const K3CpuModel& model() {
  static const K3CpuModel small = synthetic_small();
  return small;
}

}  // namespace

TEST_CASE("case 69: max_new is the number of new tokens") {
  const Fixture& f = fixture("k3-tiny-5l");
  const std::vector<id> ids = f.ids(1), generated = f.generated(1);
  for (size count = 0; count < 5; ++count) {
    const auto result = greedy_decode<Fp32>(host{1}, f.model, ids, {count});
    CHECK(result.tokens == std::vector<id>(generated.begin(), generated.begin() + static_cast<std::ptrdiff_t>(count)));
    CHECK(result.stop == StopReason::max_new);
    CHECK(result.logits.empty());
  }
}

TEST_CASE("case 71: the first end token met ends the text and is its last token") {
  const Fixture& f = fixture("k3-tiny-5l");
  // A prompt whose third new token is not among the first two.
  size prompt = 0;
  while (f.generated(prompt)[2] == f.generated(prompt)[0] || f.generated(prompt)[2] == f.generated(prompt)[1]) ++prompt;
  const std::vector<id> ids = f.ids(prompt), generated = f.generated(prompt);
  const auto result = greedy_decode<Fp32>(host{1}, f.model, ids, {10, {95, generated[2]}, true});
  CHECK(result.tokens == std::vector<id>(generated.begin(), generated.begin() + 3));
  CHECK(result.stop == StopReason::eos);
  CHECK(result.logits.size() == 3);
  // The same through a caller's own decoder and cache; the last token is not fed back.
  Decoder<Fp32> decoder(host{1}, f.model, 3, 1);
  HybridCache<Fp32> cache = decoder.make_cache(1, 64);
  std::vector<id> seen;
  const auto again =
      greedy_decode(decoder, cache, 0, view(ids), {10, {generated[2]}}, [&](id token) { seen.push_back(token); });
  CHECK(again.tokens == result.tokens);
  CHECK(seen == result.tokens);
  CHECK(cache.position(0) == ids.size() + 2);
  // The first generated token as an end token, at max_new 1 too: it stopped because of it.
  CHECK(greedy_decode<Fp32>(host{1}, f.model, ids, {1, {generated[0]}}).stop == StopReason::eos);
}

TEST_CASE("case 70: prompt and new tokens must fit the cache") {
  Decoder<Fp32> decoder(host{1}, model(), 4, 1);
  HybridCache<Fp32> cache = decoder.make_cache(1, 8);
  const std::vector<unsigned char> before = cache.to_bytes(0);
  const std::vector<id> nine(9, 1), eight(8, 1), seven(7, 1);
  CHECK_THROWS_AS(greedy_decode(decoder, cache, 0, view(nine), {0}), invalid_argument);
  CHECK_THROWS_AS(greedy_decode(decoder, cache, 0, view(eight), {1}), invalid_argument);
  CHECK_THROWS_AS(greedy_decode(decoder, cache, 0, view(seven), {~size{0}}), invalid_argument);
  CHECK(cache.to_bytes(0) == before);
  CHECK(greedy_decode(decoder, cache, 0, view(seven), {1}).tokens.size() == 1);
  CHECK(cache.position(0) == 7);
}

TEST_CASE("case 72: prompts that are empty or leave the vocabulary are refused before anything changes") {
  Decoder<Fp32> decoder(host{1}, model(), 4, 1);
  HybridCache<Fp32> cache = decoder.make_cache(1, 8);
  const std::vector<unsigned char> before = cache.to_bytes(0);
  for (const std::vector<id>& wrong : {std::vector<id>{}, {-1}, {1, 16}, {1, 2, 3, 4, 5, -7}}) {
    try {
      greedy_decode(decoder, cache, 0, view(wrong), {1});
      FAIL("accepted");
    } catch (const invalid_argument& problem) {
      INFO(problem.what());
      CHECK(problem.operation() == "greedy_decode");
      CHECK(problem.argument().find("prompt") != std::string::npos);
    }
  }
  const HostView<const id, 1> nowhere{nullptr, {3}, {1}};
  CHECK_THROWS_AS(greedy_decode(decoder, cache, 0, nowhere, {1}), invalid_argument);
  CHECK_THROWS_AS(prefill(decoder, cache, 0, nowhere), invalid_argument);
  CHECK(cache.to_bytes(0) == before);
  const std::vector<id> one = {1};
  CHECK_THROWS_AS(greedy_decode(decoder, cache, 1, view(one), {1}), invalid_argument);  // there is no slot 1
}

TEST_CASE("greedy decoding continues a sequence that is already there") {
  const Fixture& f = fixture("kimi-linear-5l");
  const std::vector<id> ids = f.ids(2), generated = f.generated(2);
  Decoder<Fp32> decoder(host{1}, f.model, 8, 1);
  HybridCache<Fp32> cache = decoder.make_cache(1, 64);
  const HostView<const id, 1> prompt = view(ids);
  prefill(decoder, cache, 0, prompt.slice(0, 0, 10));
  const auto first = greedy_decode(decoder, cache, 0, prompt.slice(0, 10, ids.size() - 10), {5});
  CHECK(first.tokens == std::vector<id>(generated.begin(), generated.begin() + 5));
  // The fifth token was chosen, not taken: it is the next prompt.
  const auto second = greedy_decode(decoder, cache, 0, view(&first.tokens.back(), 1), {11});
  CHECK(second.tokens == std::vector<id>(generated.begin() + 5, generated.end()));
}

TEST_CASE("synthetic models are the same each time, and their tokens stay in the vocabulary") {
  for (const K3CpuModel& one : {synthetic_tiny(), synthetic_small()}) {
    const auto a = greedy_decode<Fp32>(host{1}, one, {1, 2}, {20}), b = greedy_decode<Fp32>(host{1}, one, {1, 2}, {20});
    CHECK(a.tokens == b.tokens);
    CHECK(a.tokens.size() == 20);
    for (const id token : a.tokens) CHECK((token >= 0 && static_cast<size>(token) < one.config.vocab_size));
  }
}
