// SPDX-License-Identifier: Apache-2.0
// Acceptance gates C1 to C4 on the device, each also with the fault it must notice.

#include "cuda/decoder_device.hpp"
#include "cuda/gates.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// The logits of one more token after a cache's bytes.
std::vector<float> next_logits(const Case& c, const std::vector<unsigned char>& bytes, id token,
                               const Ablation& ablation = {}) {
  auto runner = runner_for(c, ablation);
  runner->from_bytes(0, bytes);
  const id slot = 0;
  const size position = runner->position(0), row = 0;
  runner->forward({view(&token, 1), view(&slot, 1), view(&position, 1), view(&row, 1)});
  return runner->logits();
}

/// The bytes of a cache after `change` has been at each of its layers.
template <class Change>
std::vector<unsigned char> changed(const std::vector<unsigned char>& bytes, Change&& change) {
  CacheSnapshot<Fp32> snapshot = CacheSnapshot<Fp32>::from_bytes(bytes.data(), bytes.size());
  for (LayerSnapshot<Fp32>& layer : snapshot.layers) change(layer);
  return snapshot.to_bytes();
}

}  // namespace

namespace {

/// C1 where only few launches are wanted: the small model, whose logits the faults change.
void check_small_c1(const Ablation& no_mix, const Ablation& forced) {
  const Subject subject = subjects(0).front();
  const auto run = [&](const Ablation& ablation, size count) {
    RunnerOptions options;
    options.ablation = ablation;
    return greedy(*make_device_runner(*subject.model, options), subject.prompt, count);
  };
  const Run whole = run({}, 2);
  CHECK(whole.tokens == first_of(subject.generated, 2));
  for (const Ablation& fault : {no_mix, forced})
    CHECK(largest_difference(run(fault, 1).logits[0], whole.logits[0]) > 1e-4);
}

}  // namespace

TEST_CASE("device C1: greedy tokens of the references, and two faults that change them") {
  Ablation no_mix, forced;
  no_mix.attnres_mix = 0.0f;
  forced.force_expert = 0;
  if (small_only()) return check_small_c1(no_mix, forced);
  for (const char* name : fixture_names) {
    const Fixture& f = fixture(name);
    const size prompts = 3, count = 16;
    size moved_by_mix = 0, moved_by_expert = 0;
    for (size prompt = 0; prompt < prompts; ++prompt) {
      const std::vector<id> expected = f.generated(prompt);
      const auto run = [&](const Ablation& ablation) {
        RunnerOptions options;
        options.ablation = ablation;
        return greedy(*make_device_runner(f.model, options), f.ids(prompt), count).tokens;
      };
      INFO(name << " prompt " << prompt);
      CHECK(run({}) == expected);
      moved_by_mix += run(no_mix) != expected;
      moved_by_expert += run(forced) != expected;
    }
    INFO(name << ": prompts moved by attnres_mix = 0: " << moved_by_mix
              << ", by force_expert = 0: " << moved_by_expert);
    CHECK(moved_by_expert == prompts);
    CHECK(moved_by_mix == (f.model.config.attn_res_block_size > 0 ? prompts : 0));
  }
}

TEST_CASE("device C2: prefill N and decode 1 is prefill N+1, and a skipped layer is noticed") {
  for (const Case& c : cases()) {
    INFO(c.name);
    const std::vector<float> expected = after(c, longer(c))->logits();
    const std::vector<unsigned char> prefix = after(c, c.prompt)->to_bytes(0);
    check(same_bits(next_logits(c, prefix, 4), expected));
    Decoder<Fp64> decoder(host{1}, *c.model, 32, 1);
    HybridCache<Fp64> cache = decoder.make_cache(1, 64);
    const std::vector<id> tokens = longer(c);
    prefill(decoder, cache, 0, view(tokens));
    check(compare(expected, elements(decoder.logits()), 1e-4, 0, true));
    Ablation skip;
    skip.skip_layer = 0;
    CHECK(largest_difference(next_logits(c, prefix, 4, skip), expected) > 1e-4);
  }
}

TEST_CASE("device C3: a restored prefix continues like a cold run, and trashed state does not") {
  for (const Case& c : cases()) {
    INFO(c.name);
    const auto cold = after(c, c.prompt);
    const std::vector<unsigned char> prefix = cold->to_bytes(0);
    RunnerOptions options;
    options.slots = 2;  // another slot count, another slot
    auto restored = make_device_runner(*c.model, options);
    restored->from_bytes(1, prefix);
    CHECK(restored->position(1) == c.prompt.size());
    const size steps = small_only() ? 1 : 8;
    std::vector<id> sequence = c.prompt;
    sequence.push_back(1);
    std::vector<float> first;
    for (size i = 0; i < steps; ++i) {
      feed(*cold, 0, sequence, sequence.size() - 1, 1, true);
      feed(*restored, 1, sequence, sequence.size() - 1, 1, true);
      check(same_bits(restored->logits(), cold->logits()));
      if (i == 0) first = cold->logits();
      sequence.push_back(cold->argmax(0));
    }
    const auto trashed = changed(prefix, [](LayerSnapshot<Fp32>& layer) {
      for (float& value : layer.conv) value = 7.0f;
    });
    CHECK(largest_difference(next_logits(c, trashed, 1), first) > 1e-4);
    const auto rows = changed(prefix, [](LayerSnapshot<Fp32>& layer) {
      for (size i = 0; i < layer.latents.size(); ++i) layer.latents[i] = i % 2 ? 7.0f : -7.0f;
    });
    CHECK(largest_difference(next_logits(c, rows, 1), first) > 1e-4);
    const auto cleared = changed(prefix, [](LayerSnapshot<Fp32>& layer) {
      for (float& value : layer.recurrent) value = 0.0f;
    });
    CHECK(largest_difference(next_logits(c, cleared, 1), first) > 1e-4);
  }
}

namespace {

/// Every cache value of a sequence, layer by layer.
std::vector<float> cache_values(const std::vector<unsigned char>& bytes) {
  std::vector<float> values;
  changed(bytes, [&](const LayerSnapshot<Fp32>& layer) {
    for (const auto* part : {&layer.recurrent, &layer.conv, &layer.latents})
      values.insert(values.end(), part->begin(), part->end());
  });
  return values;
}

/// The oldest and the newest sample of every convolution window change places.
std::vector<unsigned char> misplaced_sample(const Case& c, const std::vector<unsigned char>& bytes) {
  const size window = c.model->config.kda.conv_kernel - 1;
  return changed(bytes, [&](LayerSnapshot<Fp32>& layer) {
    for (size i = 0; i < layer.conv.size(); i += window) std::swap(layer.conv[i], layer.conv[i + window - 1]);
  });
}
/// The first and the last row of every latent cache change places.
std::vector<unsigned char> swapped_row(const Case& c, const std::vector<unsigned char>& bytes) {
  const size width = mla_cache_width(c.model->config.mla);
  return changed(bytes, [&](LayerSnapshot<Fp32>& layer) {
    for (size i = 0; i < width && !layer.latents.empty(); ++i)
      std::swap(layer.latents[i], layer.latents[layer.latents.size() - width + i]);
  });
}

}  // namespace

TEST_CASE("device C4: after a copy and one step all caches are a cold prefill's, and misplaced entries are noticed") {
  for (const Case& c : cases()) {
    INFO(c.name);
    const std::vector<unsigned char> cold = after(c, longer(c))->to_bytes(0);
    const std::vector<unsigned char> prefix = after(c, c.prompt)->to_bytes(0);
    const auto stepped = [&](const std::vector<unsigned char>& bytes) {
      auto runner = runner_for(c);
      runner->from_bytes(0, bytes);
      feed(*runner, 0, longer(c), c.prompt.size(), 1, true);
      CHECK(runner->position(0) == longer(c).size());
      return runner->to_bytes(0);
    };
    CHECK((stepped(prefix) == cold));
    // With an entry misplaced in the copy, the same step leaves other caches.
    for (const auto& faulty : {misplaced_sample(c, prefix), swapped_row(c, prefix)}) {
      CHECK((faulty != prefix));
      CHECK(largest_difference(cache_values(stepped(faulty)), cache_values(cold)) > 1e-5);
    }
    const auto misplaced = misplaced_sample(c, cold);
    CHECK(largest_difference(next_logits(c, misplaced, 2), next_logits(c, cold, 2)) > 1e-4);
  }
}
