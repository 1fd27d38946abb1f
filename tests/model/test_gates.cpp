// SPDX-License-Identifier: Apache-2.0
// Acceptance gates C1 to C7 on whole models, each also with the fault it must notice. (C5's and C6's formulas:
// tests/ops.)

#include <k3/model/synthetic.hpp>

#include "support/differences.hpp"
#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

struct Case {
  std::string name;
  const K3CpuModel* model;
  std::vector<id> prompt;
};

const std::vector<Case>& cases() {
  static const K3CpuModel tiny = synthetic_tiny(), small = synthetic_small();
  static const std::vector<Case> all = {
      {"synthetic_tiny", &tiny, {1, 5, 2, 7, 3}},
      {"synthetic_small", &small, {3, 14, 1, 5, 9, 2}},
      {"k3-tiny-5l", &fixture("k3-tiny-5l").model, fixture("k3-tiny-5l").ids(2)},
      {"k3-tiny-13l", &fixture("k3-tiny-13l").model, fixture("k3-tiny-13l").ids(2)},
      {"kimi-linear-5l", &fixture("kimi-linear-5l").model, fixture("kimi-linear-5l").ids(2)}};
  return all;
}

const host one_thread{1};

Decoder<Fp32> decoder_for(const Case& c, const Ablation& ablation = {}) {
  return Decoder<Fp32>(one_thread, *c.model, 8, 1, ablation);
}

void take(Decoder<Fp32>& decoder, HybridCache<Fp32>& cache, id token) {
  const id slot = 0;
  const size position = cache.position(0), row = 0;
  decoder.forward(cache, {view(&token, 1), view(&slot, 1), view(&position, 1), view(&row, 1)});
}

HybridCache<Fp32> after(Decoder<Fp32>& decoder, const std::vector<id>& prompt) {
  HybridCache<Fp32> cache = decoder.make_cache(1, 64);
  prefill(decoder, cache, 0, view(prompt));
  return cache;
}

std::vector<id> greedy(const Case& c, const Ablation& ablation = {}) {
  return greedy_decode<Fp32>(one_thread, *c.model, c.prompt, {12}, ablation).tokens;
}

/// Tokens that follow from a cache, the next one being `token`.
std::vector<id> continued(Decoder<Fp32>& decoder, HybridCache<Fp32> cache, id token) {
  return greedy_decode(decoder, cache, 0, view(&token, 1), {8}).tokens;
}

/// The logits of one more token after the cache's sequence.
std::vector<double> next_logits(Decoder<Fp32>& decoder, HybridCache<Fp32> cache, id token) {
  take(decoder, cache, token);
  return elements(decoder.logits());
}

}  // namespace

TEST_CASE("C1: greedy tokens of the references, and two faults that change them") {
  for (const char* name : fixture_names) {
    const Fixture& f = fixture(name);
    size moved_by_mix = 0, moved_by_expert = 0;
    for (size prompt = 0; prompt < 3; ++prompt) {
      const std::vector<id> expected = f.generated(prompt);
      const auto run = [&](const Ablation& ablation) {
        return greedy_decode<Fp32>(one_thread, f.model, f.ids(prompt), {expected.size()}, ablation).tokens;
      };
      INFO(name << " prompt " << prompt);
      CHECK(run({}) == expected);
      Ablation no_mix, forced;
      no_mix.attnres_mix = 0.0f;
      forced.force_expert = 0;
      moved_by_mix += run(no_mix) != expected;
      moved_by_expert += run(forced) != expected;
    }
    INFO(name << ": prompts moved by attnres_mix = 0: " << moved_by_mix
              << ", by force_expert = 0: " << moved_by_expert);
    CHECK(moved_by_expert == 3);
    CHECK(moved_by_mix == (f.model.config.attn_res_block_size > 0 ? 3 : 0));
  }
}

TEST_CASE("C2: prefill N and decode 1 is prefill N+1, and a skipped layer is noticed") {
  for (const Case& c : cases()) {
    INFO(c.name);
    Decoder<Fp32> decoder = decoder_for(c);
    std::vector<id> longer = c.prompt;
    longer.push_back(4);
    HybridCache<Fp32> whole = after(decoder, longer);
    const std::vector<double> expected = elements(decoder.logits());
    const HybridCache<Fp32> prefix = after(decoder, c.prompt);
    check(same_bits(next_logits(decoder, prefix, 4), expected));
    Ablation skip;
    skip.skip_layer = 0;
    Decoder<Fp32> faulty = decoder_for(c, skip);
    CHECK(largest_difference(next_logits(faulty, prefix, 4), expected) > 1e-4);
  }
}

TEST_CASE("C3: a restored prefix continues like a cold run, and trashed state does not") {
  for (const Case& c : cases()) {
    INFO(c.name);
    Decoder<Fp32> decoder = decoder_for(c);
    const HybridCache<Fp32> prefix = after(decoder, c.prompt);
    const std::vector<unsigned char> bytes = prefix.to_bytes(0);
    HybridCache<Fp32> restored = decoder.make_cache(2, 64);  // another slot count, another slot
    restored.from_bytes(1, bytes);
    CHECK(restored.position(1) == c.prompt.size());
    const id token = 1, slot = 1;
    const size position = restored.position(1), row = 0;
    std::vector<double> cold = next_logits(decoder, prefix, token);
    decoder.forward(restored, {view(&token, 1), view(&slot, 1), view(&position, 1), view(&row, 1)});
    check(same_bits(elements(decoder.logits()), cold));
    CHECK(continued(decoder, prefix, 1) == continued(decoder, after(decoder, c.prompt), 1));

    HybridCache<Fp32> trashed = prefix;
    for (size layer = 0; layer < trashed.layers(); ++layer)
      if (auto* kda = trashed.kda_mut(layer))
        for (size i = 0; i < kda->conv(0).elements(); ++i) kda->conv(0).data[i] = 7.0f;
    CHECK(largest_difference(next_logits(decoder, trashed, 1), cold) > 1e-4);
    HybridCache<Fp32> rows = prefix;
    for (size layer = 0; layer < rows.layers(); ++layer)
      if (auto* mla = rows.mla_mut(layer))
        for (size p = 0; p < c.prompt.size(); ++p)
          for (size i = 0; i < mla->width(); ++i) mla->row(0, p)[i] = i % 2 ? 7.0f : -7.0f;
    CHECK(largest_difference(next_logits(decoder, rows, 1), cold) > 1e-4);
  }
}

TEST_CASE("C4: after a copy and one step all caches are those of a cold prefill, and misplaced entries are noticed") {
  for (const Case& c : cases()) {
    INFO(c.name);
    Decoder<Fp32> decoder = decoder_for(c);
    std::vector<id> longer = c.prompt;
    longer.push_back(4);
    const HybridCache<Fp32> cold = after(decoder, longer);
    HybridCache<Fp32> stepped = after(decoder, c.prompt);
    take(decoder, stepped, 4);
    CHECK(stepped.position(0) == longer.size());
    CHECK(stepped.to_bytes(0) == cold.to_bytes(0));

    const std::vector<double> expected = next_logits(decoder, cold, 2);
    HybridCache<Fp32> misplaced = cold;
    for (size layer = 0; layer < misplaced.layers(); ++layer)
      if (auto* kda = misplaced.kda_mut(layer)) {
        const auto window = kda->conv(0);  // [channels, kernel-1]
        for (size channel = 0; channel < window.extent(0); ++channel)
          std::swap(window(channel, 0), window(channel, window.extent(1) - 1));
      }
    CHECK(misplaced.to_bytes(0) != cold.to_bytes(0));
    CHECK(largest_difference(next_logits(decoder, misplaced, 2), expected) > 1e-4);
    HybridCache<Fp32> swapped = cold;
    for (size layer = 0; layer < swapped.layers(); ++layer)
      if (auto* mla = swapped.mla_mut(layer))
        for (size i = 0; i < mla->width(); ++i) std::swap(mla->row(0, 0)[i], mla->row(0, longer.size() - 1)[i]);
    // Attention without positions does not see a swap in its result; its bytes do.
    CHECK(swapped.to_bytes(0) != cold.to_bytes(0));
  }
}

TEST_CASE("C5: without the residual mixture the first token moves, and so it does with zero scores") {
  for (const char* name : {"k3-tiny-5l", "k3-tiny-13l"}) {
    const Fixture& f = fixture(name);
    const Case c{name, &f.model, f.ids(2)};
    Decoder<Fp32> decoder = decoder_for(c);
    after(decoder, c.prompt);
    const std::vector<double> expected = elements(decoder.logits());
    Ablation none;
    none.attnres_mix = 0.0f;
    Decoder<Fp32> unmixed = decoder_for(c, none);
    after(unmixed, c.prompt);
    INFO(name);
    CHECK(unmixed.argmax(0) != decoder.argmax(0));
    K3CpuModel flat = f.model;
    const std::vector<float> zeros(f.model.config.hidden_size, 0.0f);
    for (LayerWeights& layer : flat.weights.layers) layer.self_attention_res_proj = layer.mlp_res_proj = view(zeros);
    flat.weights.output_attn_res_proj = view(zeros);
    Decoder<Fp32> uniform(one_thread, flat, 8, 1);
    after(uniform, c.prompt);
    CHECK(largest_difference(elements(uniform.logits()), expected) > 1e-2);
  }
}

TEST_CASE("C6: forcing an expert changes the logits of every model") {
  for (const Case& c : cases()) {
    Decoder<Fp32> decoder = decoder_for(c);
    after(decoder, c.prompt);
    double largest = 0;
    for (size expert = 0; expert < 2; ++expert) {
      Ablation forced;
      forced.force_expert = expert;
      Decoder<Fp32> other = decoder_for(c, forced);
      after(other, c.prompt);
      largest = std::max(largest, largest_difference(elements(other.logits()), elements(decoder.logits())));
    }
    INFO(c.name << ": forcing expert 0 or 1 moves a logit by " << largest);
    CHECK(largest > 1e-4);
  }
}

TEST_CASE("C7: o_proj in two column halves gives the same tokens, half of it does not") {
  static const K3CpuModel wide = synthetic_prod_width_dummy();
  std::vector<Case> all = cases();
  all.push_back({"synthetic_prod_width_dummy", &wide, {200, 3, 77}});
  for (const Case& c : all) {
    Ablation halves, dropped;
    halves.o_proj_tp = dropped.o_proj_tp = 2;
    dropped.drop_o_proj_rank = 1;
    INFO(c.name);
    CHECK(greedy(c, halves) == greedy(c));
    Decoder<Fp32> whole = decoder_for(c), half = decoder_for(c, dropped), both = decoder_for(c, halves);
    after(whole, c.prompt);
    after(half, c.prompt);
    after(both, c.prompt);
    check(compare(elements(both.logits()), elements(whole.logits()), 1e-4, 0, true));
    CHECK(largest_difference(elements(half.logits()), elements(whole.logits())) > 1e-3);
  }
}
