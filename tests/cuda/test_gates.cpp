// SPDX-License-Identifier: Apache-2.0
// Acceptance gates C1 to C6 on the device, each also with the fault it must notice.

#include <k3/model/synthetic.hpp>

#include "cuda/decoder_device.hpp"
#include "cuda/device_test.hpp"
#include "cuda/moe_device.hpp"
#include "cuda/row_ops_device.hpp"
#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

struct Case {
  std::string name;
  const K3CpuModel* model;
  std::vector<id> prompt;
};

std::vector<Case> cases() {
  static const K3CpuModel tiny = synthetic_tiny(), small = synthetic_small();
  std::vector<Case> all = {{"synthetic_small", &small, {3, 14, 1, 5, 9, 2}}};
  if (small_only()) return all;
  all.push_back({"synthetic_tiny", &tiny, {1, 5, 2, 7, 3}});
  for (const char* name : fixture_names) all.push_back({name, &fixture(name).model, fixture(name).ids(2)});
  return all;
}

std::unique_ptr<DeviceRunner> runner_for(const Case& c, const Ablation& ablation = {}) {
  RunnerOptions options;
  options.ablation = ablation;
  return make_device_runner(*c.model, options);
}

std::vector<id> longer(const Case& c) {
  std::vector<id> tokens = c.prompt;
  tokens.push_back(4);
  return tokens;
}

/// A decoder that has taken the tokens; the last one's logits are there.
std::unique_ptr<DeviceRunner> after(const Case& c, const std::vector<id>& tokens, const Ablation& ablation = {}) {
  auto runner = runner_for(c, ablation);
  feed(*runner, 0, tokens, 0, tokens.size(), true);
  return runner;
}

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

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (size i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(static_cast<double>(a[i] - b[i])));
  return largest;
}

}  // namespace

TEST_CASE("device C1: greedy tokens of the references, and two faults that change them") {
  for (const char* name : fixture_names) {
    if (small_only() && std::string(name) != "k3-tiny-5l") continue;
    const Fixture& f = fixture(name);
    const size prompts = small_only() ? 1 : 3, count = small_only() ? 2 : 16;
    size moved_by_mix = 0, moved_by_expert = 0;
    for (size prompt = 0; prompt < prompts; ++prompt) {
      std::vector<id> expected = f.generated(prompt);
      expected.resize(count);
      const auto run = [&](const Ablation& ablation) {
        RunnerOptions options;
        options.ablation = ablation;
        return greedy(*make_device_runner(f.model, options), f.ids(prompt), count).tokens;
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

TEST_CASE("device C4: after a copy and one step all caches are a cold prefill's, and misplaced entries are noticed") {
  for (const Case& c : cases()) {
    INFO(c.name);
    const std::vector<unsigned char> cold = after(c, longer(c))->to_bytes(0);
    auto stepped = runner_for(c);
    stepped->from_bytes(0, after(c, c.prompt)->to_bytes(0));
    feed(*stepped, 0, longer(c), c.prompt.size(), 1, true);
    CHECK(stepped->position(0) == longer(c).size());
    CHECK(stepped->to_bytes(0) == cold);

    const std::vector<float> expected = next_logits(c, cold, 2);
    const size window = c.model->config.kda.conv_kernel - 1;
    const auto misplaced = changed(cold, [&](LayerSnapshot<Fp32>& layer) {
      for (size i = 0; i < layer.conv.size(); i += window) std::swap(layer.conv[i], layer.conv[i + window - 1]);
    });
    CHECK(misplaced != cold);
    CHECK(largest_difference(next_logits(c, misplaced, 2), expected) > 1e-4);
    const size width = mla_cache_width(c.model->config.mla);
    const auto swapped = changed(cold, [&](LayerSnapshot<Fp32>& layer) {
      for (size i = 0; i < width && !layer.latents.empty(); ++i)
        std::swap(layer.latents[i], layer.latents[layer.latents.size() - width + i]);
    });
    // Attention without positions does not see a swap in its result; its bytes do.
    CHECK(swapped != cold);
  }
}

TEST_CASE("device C5: without the residual mixture the first token moves, and so it does with zero scores") {
  for (const char* name : {"k3-tiny-5l", "k3-tiny-13l"}) {
    if (small_only() && std::string(name) != "k3-tiny-5l") continue;
    const Fixture& f = fixture(name);
    const Case c{name, &f.model, f.ids(2)};
    const auto mixed = after(c, c.prompt);
    Ablation none;
    none.attnres_mix = 0.0f;
    INFO(name);
    CHECK(mixed->argmax(0) == f.generated(2)[0]);
    CHECK(after(c, c.prompt, none)->argmax(0) != mixed->argmax(0));
    K3CpuModel flat = f.model;
    const std::vector<float> zeros(f.model.config.hidden_size, 0.0f);
    for (LayerWeights& layer : flat.weights.layers) layer.self_attention_res_proj = layer.mlp_res_proj = view(zeros);
    flat.weights.output_attn_res_proj = view(zeros);
    CHECK(largest_difference(after({name, &flat, c.prompt}, c.prompt)->logits(), mixed->logits()) > 1e-2);
  }
}

namespace {

std::vector<unsigned char> bytes_of(const std::vector<float>& values) {
  std::vector<unsigned char> bytes(values.size() * sizeof(float));
  __builtin_memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// Two experts whose up weights differ in one element; the first one's output goes elsewhere.
MoeInputs<float> two_experts() {
  MoeInputs<float> in;
  in.g = {4, 4, 4, 2, 1, 0, {}, true, true, 1.0f};
  in.rows = 1, in.type = ElementType::f32;
  in.latent = {1, 0, 0, 0};
  const std::vector<float> identity{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  std::vector<float> doubled = identity, turned = identity;
  doubled[0] = 2;
  std::swap(turned[0], turned[4]);
  in.experts.resize(2);
  for (size e = 0; e < 2; ++e) {
    in.experts[e].data[0] = bytes_of(identity);
    in.experts[e].data[1] = bytes_of(e == 1 ? doubled : identity);
    in.experts[e].data[2] = bytes_of(e == 0 ? turned : identity);
  }
  return in;
}

}  // namespace

TEST_CASE("device C6: logits 0 and 4 choose expert 1, whose output is known, and a forced expert is noticed") {
  const std::vector<double> want{1.9999804, 0, 0, 0};
  const auto output = [](std::vector<float> logits) {
    const RouterOutputs routed = sigmoid_topk_on_device({1, 2, 1, true, 1.0f, std::move(logits), {0, 0}, {}});
    MoeInputs<float> in = two_experts();
    in.ids = routed.ids, in.weights = routed.weights;
    // The projections are the identity: what is left of the layer is the norm.
    const std::vector<float> mixed = mix_experts_on_device(in).out;
    RowCall call;
    call.is_bf16 = call.bf16_weight = false;
    return std::pair(routed, device_rms_norm(call, 1, 4, mixed, {1, 1, 1, 1}, 1e-5f));
  };
  const auto [routed, out] = output({0, 4});
  CHECK(routed.ids == std::vector<id>{1});
  check(compare(routed.weights, std::vector<double>{0.9820138}, 1e-6));
  check(compare(out, want, 0, 1e-6));
  const auto [forced, elsewhere] = output({8, 0});
  CHECK(forced.ids == std::vector<id>{0});
  CHECK(std::abs(static_cast<double>(elsewhere[0]) - want[0]) > 1);

  for (const Case& c : cases()) {
    const std::vector<float> logits = after(c, c.prompt)->logits();
    double largest = 0;
    for (size expert = 0; expert < (small_only() ? 1 : 2); ++expert) {
      Ablation one;
      one.force_expert = expert;
      largest = std::max(largest, largest_difference(after(c, c.prompt, one)->logits(), logits));
    }
    INFO(c.name << ": forcing expert 0 or 1 moves a logit by " << largest);
    CHECK(largest > 1e-4);
  }
}
