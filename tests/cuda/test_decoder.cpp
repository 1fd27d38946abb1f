// SPDX-License-Identifier: Apache-2.0
// The whole decoder on the device: the references' tokens, the host's results, and what a step must not depend on.

#include <algorithm>
#include <limits>

#include "cuda/decoder_device.hpp"
#include "cuda/layer_values.hpp"
#include "cuda/model_device.hpp"
#include "cuda/small_model.hpp"
#include "support/thrown_by.hpp"

using namespace k3;
using namespace k3::test;

TEST_CASE("device decoder: tokens and logits of the references in float, at every size of pass") {
  for (const size prompt : all_or_few<size>({0, 1, 2}, {0}))
    for (const Subject& subject : subjects(prompt)) {
      const size count = small_only() ? 2 : subject.generated.size();
      std::vector<std::vector<float>> first;
      for (const size rows : all_or_few<size>({1, 7, 32}, {1, 3})) {
        auto runner = make_device_runner(*subject.model, {});
        const Run run = greedy(*runner, subject.prompt, count, rows);
        INFO(subject.name << " prompt " << prompt << ", " << rows << " rows a pass");
        CHECK(run.tokens == first_of(subject.generated, count));
        for (size row = 0; row < count; ++row) check(compare(run.logits[row], subject.logits[row], 1e-4, 0, true));
        if (rows == 1) first = run.logits;
        for (size row = 0; row < count; ++row) check(same_bits(run.logits[row], first[row]));
      }
    }
}

TEST_CASE("device decoder: captured steps give the bits of direct ones, and every run the same") {
  const Subject subject = subjects(2).front();
  const size count = small_only() ? 2 : 8;
  for (const bool half : all_or_few<bool>({false, true}, {true})) {
    RunnerOptions captured, direct, legacy;
    captured.half = direct.half = legacy.half = half;
    direct.graphs = false, legacy.legacy = true;
    auto a = make_device_runner(*subject.model, captured), b = make_device_runner(*subject.model, direct),
         c = make_device_runner(*subject.model, captured), d = make_device_runner(*subject.model, legacy);
    const Run x = greedy(*a, subject.prompt, count), y = greedy(*b, subject.prompt, count),
              z = greedy(*c, subject.prompt, count), w = greedy(*d, subject.prompt, count);
    for (size row = 0; row < count; ++row) {
      check(same_bits(x.logits[row], y.logits[row]));
      check(same_bits(x.logits[row], z.logits[row]));
      check(same_bits(x.logits[row], w.logits[row]));
    }
    CHECK((a->to_bytes(0) == b->to_bytes(0)));
    CHECK(a->captured_steps() == 1);
    CHECK(b->captured_steps() == 0);
    CHECK(d->captured_steps() == 0);
  }
}

namespace {

/// What the host's observer sees as "ffn_out" of layer 1 for a prompt, and the logits of its last token.
template <class P>
std::pair<std::vector<double>, std::vector<double>> experts_on_host(const K3CpuModel& model,
                                                                    const std::vector<id>& ids) {
  const TokenRows rows(ids, 0, ids.size());
  Decoder<P> decoder(host{1}, model, ids.size(), ids.size());
  HybridCache<P> cache = decoder.make_cache(1, ids.size());
  std::vector<double> out;
  decoder.forward(cache, rows.batch(), [&](const char* part, size layer, const auto& values) {
    if (layer == 1 && std::string(part) == "ffn_out") out = elements(values);
  });
  const auto logits = decoder.logits_row(ids.size() - 1);
  return {out, std::vector<double>(logits.begin(), logits.end())};
}

}  // namespace

TEST_CASE("device decoder: experts without latent space, norm or shared experts, in whatever company") {
  const std::vector<id> ids = {3, 14, 1, 5};
  for (const LatentMoeConfig& moe : {LatentMoeConfig{8, 0, 8, 4, 2, 0, {}, false, true, 1.0f},
                                     LatentMoeConfig{8, 8, 8, 4, 2, 0, {}, true, true, 1.0f},
                                     LatentMoeConfig{8, 8, 8, 4, 2, 1, {}, false, true, 1.0f}}) {
    const K3CpuModel model = make_small_model(moe);
    const auto [want, want_logits] = experts_on_host<Fp64>(model, ids);
    const auto [half_want, half_logits] = experts_on_host<Bf16>(model, ids);
    for (const bool half : all_or_few<bool>({false, true}, {true})) {
      CAPTURE(moe.latent, moe.n_shared, moe.use_norm, half);
      RunnerOptions options;
      options.half = half;
      auto whole = make_device_runner(model, options), captured = make_device_runner(model, options);
      std::vector<float> seen;
      const TokenRows rows(ids, 0, ids.size());
      options.max_logit_rows = ids.size();
      auto all = make_device_runner(model, options);
      all->forward(rows.batch(), [&](const std::string& part, size layer, std::vector<float>& values) {
        if (layer == 1 && part == "ffn_out") seen = values;
      });
      const std::vector<float> logits = all->logits_row(ids.size() - 1);
      if (half) {
        INFO("relative L2 " << relative_l2(seen, half_want) << ", logits " << relative_l2(logits, half_logits));
        CHECK(relative_l2(seen, half_want) <= 5e-3);
        CHECK(relative_l2(logits, half_logits) <= 5e-3);
      } else {
        check(compare(seen, want, 1e-5, 0, true));
        check(compare(logits, want_logits, 1e-5, 0, true));
      }
      // Streamed, one row a pass, or captured: the same bits.
      options.max_logit_rows = 1;
      options.expert_memory = 3 * 768;  // three of the four experts
      auto streamed = make_device_runner(model, options);
      feed(*whole, 0, ids, 0, ids.size(), true);
      for (DeviceRunner* one : {captured.get(), streamed.get()})
        for (size i = 0; i < ids.size(); ++i) feed(*one, 0, ids, i, 1, true);
      check(same_bits(whole->logits(), logits));
      check(same_bits(captured->logits(), logits));
      CHECK(captured->captured_steps() == 1);
      check(same_bits(streamed->logits(), logits));
      CHECK(streamed->cache().slots == 3);
    }
  }
}

TEST_CASE("device decoder: a sequence has the same bits alone and in any batch; padding touches nothing") {
  const Subject subject = subjects(2).back();
  const std::vector<id>& ids = subject.prompt;
  const size vocab = subject.model->config.vocab_size, tokens_each = small_only() ? 2 : 6;
  for (const bool half : all_or_few<bool>({false, true}, {true})) {
    RunnerOptions options;
    options.half = half;
    auto alone = make_device_runner(*subject.model, options);
    std::vector<std::vector<float>> expected;
    for (size i = 0; i < tokens_each; ++i) {
      feed(*alone, 0, ids, i, 1, true);
      expected.push_back(alone->logits());
    }
    for (const size batch : all_or_few<size>({2, 9, 40}, {9})) {
      options.slots = batch + 1, options.max_rows = options.max_logit_rows = batch + 1, options.capacity = 8;
      auto together = make_device_runner(*subject.model, options);
      const std::vector<unsigned char> idle = together->to_bytes(batch);
      for (size i = 0; i < tokens_each; ++i) {
        std::vector<id> tokens, slots;
        std::vector<size> positions, wanted;
        for (size s = 0; s < batch; ++s) {
          tokens.push_back(s == batch / 2 ? ids[i] : static_cast<id>((7 * s + 3 * i) % vocab));
          slots.push_back(static_cast<id>(s));
          positions.push_back(i);
          wanted.push_back(s);
        }
        tokens.push_back(-77), slots.push_back(pad_slot), positions.push_back(99), wanted.push_back(batch);
        together->forward({view(tokens), view(slots), view(positions), view(wanted)});
        const std::vector<float> logits = together->logits();
        const auto at = logits.begin() + static_cast<std::ptrdiff_t>(batch / 2 * vocab);
        INFO("batch of " << batch << ", token " << i << (half ? ", bf16" : ", float"));
        check(same_bits(std::vector<float>(at, at + static_cast<std::ptrdiff_t>(vocab)), expected[i]));
      }
      CHECK((together->to_bytes(batch) == idle));
    }
  }
}

TEST_CASE("device caches: bytes go to the device and back unchanged and open on either side") {
  const size steps = small_only() ? 1 : 3;
  for (const Subject& subject : subjects(2)) {
    const std::vector<id>&ids = subject.prompt, &generated = subject.generated;
    Decoder<Fp32> decoder(host{1}, *subject.model, 32, 1);
    HybridCache<Fp32> cache = decoder.make_cache(1, 64);
    prefill(decoder, cache, 0, view(ids));
    RunnerOptions options;
    options.slots = 2;
    auto runner = make_device_runner(*subject.model, options);
    runner->from_bytes(0, cache.to_bytes(0));
    INFO(subject.name);
    CHECK((runner->to_bytes(0) == cache.to_bytes(0)));
    CHECK(runner->position(0) == ids.size());
    // The host's prefix continued on the device, then back on the host.
    std::vector<id> sequence = ids;
    for (size i = 0; i < steps; ++i) {
      sequence.push_back(generated[i]);
      feed(*runner, 0, sequence, sequence.size() - 1, 1, true);
      CHECK(runner->argmax(0) == generated[i + 1]);
    }
    cache.from_bytes(0, runner->to_bytes(0));
    const auto rest = greedy_decode(decoder, cache, 0, view(&generated[steps], 1), {2});
    CHECK(rest.tokens == std::vector<id>{generated[steps + 1], generated[steps + 2]});
    std::vector<unsigned char> cut = cache.to_bytes(0);
    cut.pop_back();
    CHECK_THROWS_AS(runner->from_bytes(0, cut), format_error);
    CHECK(runner->position(0) == ids.size() + steps);
    runner->mark();
    const std::vector<unsigned char> marked = runner->to_bytes(0);
    sequence.push_back(generated[steps]);
    feed(*runner, 0, sequence, sequence.size() - 1, 1, true);
    const std::vector<float> once = runner->logits();
    runner->back_to_mark();
    CHECK((runner->to_bytes(0) == marked));
    feed(*runner, 0, sequence, sequence.size() - 1, 1, true);
    check(same_bits(runner->logits(), once));
    const std::vector<unsigned char> now = runner->to_bytes(0);
    runner->spoil_mark();
    CHECK_THROWS_AS(runner->back_to_mark(), invalid_argument);
    CHECK((runner->to_bytes(0) == now));
  }
}

TEST_CASE("device decoder: NaN stays in its sequence and marks it when the tokens are fetched") {
  K3CpuModel model = small_only() ? make_small_model() : synthetic_small();
  float* embedding = const_cast<float*>(static_cast<const float*>(model.weights.embed_tokens.data));
  for (size i = 0; i < 8; ++i) embedding[9 * 8 + i] = std::numeric_limits<float>::quiet_NaN();
  RunnerOptions options;
  options.slots = 2, options.max_logit_rows = 2;
  auto runner = make_device_runner(model, options);
  const std::vector<id> tokens = {1, 9, 4, 2, 3}, slots = {0, 0, 1, 1, 1};
  const std::vector<size> positions = {0, 1, 0, 1, 2}, wanted = {1, 4};
  runner->forward({view(tokens), view(slots), view(positions), view(wanted)});
  CHECK(runner->status(0) == RowStatus::nan_router_logits);
  CHECK_THROWS_AS(runner->argmax(0), invalid_argument);
  CHECK(runner->status(1) == RowStatus::ok);
  const std::vector<float> both = runner->logits();
  CHECK(runner->slot_status(0) == RowStatus::nan_router_logits);
  options.slots = options.max_logit_rows = 1;
  auto alone = make_device_runner(model, options);
  feed(*alone, 0, {4, 2, 3}, 0, 3, true);
  check(same_bits(std::vector<float>(both.begin() + 16, both.end()), alone->logits()));
  const std::vector<id> one = {1}, slot = {0};
  const std::vector<size> position = {2};
  CHECK_THROWS_AS(runner->forward({view(one), view(slot), view(position), {}}), invalid_argument);
  runner->reset(0);
  feed(*runner, 0, {4, 2, 3}, 0, 3, true);
  check(same_bits(runner->logits(), alone->logits()));

  // Nobody asks between two passes: the second is refused all the same, and no token comes of it.
  runner->reset(0);
  feed(*runner, 0, {1, 9}, 0, 2, false);
  CHECK_THROWS_AS(feed(*runner, 0, {1, 9, 3}, 2, 1, true), invalid_argument);
  CHECK(runner->slot_status(0) == RowStatus::nan_router_logits);
  CHECK(runner->position(0) == 2);
}

TEST_CASE("device decoder: padding rows have zero logits, rows that were not wanted have none") {
  const Subject subject = subjects(0).front();
  for (const bool half : all_or_few<bool>({false, true}, {true}))
    for (const bool graphs : {true, false}) {
      RunnerOptions options;
      options.half = half, options.graphs = graphs, options.max_logit_rows = 2;
      auto runner = make_device_runner(*subject.model, options);
      const std::vector<id> tokens = {-5, 7}, slots = {pad_slot, 0};
      const std::vector<size> positions = {99, 0}, wanted = {0, 1};
      runner->forward({view(tokens), view(slots), view(positions), view(wanted)});
      const std::vector<float> padding = runner->logits_row(0), row = runner->logits_row(1);
      for (const float logit : padding) CHECK(logit == 0.0f);
      CHECK(runner->status(0) == RowStatus::padding);
      CHECK_THROWS_AS(runner->argmax(0), invalid_argument);
      CHECK(runner->status(1) == RowStatus::ok);
      CHECK(std::any_of(row.begin(), row.end(), [](float logit) { return logit != 0.0f; }));
      CHECK_THROWS_AS(runner->logits_row(2), invalid_argument);
      CHECK_THROWS_AS(runner->status(2), invalid_argument);
      CHECK_THROWS_AS(runner->argmax(2), invalid_argument);
    }
}

TEST_CASE("device decoder: another cache takes the place of one that is gone") {
  const Subject subject = subjects(2).front();
  const size count = small_only() ? 2 : 4;
  auto runner = make_device_runner(*subject.model, {});
  const Run first = greedy(*runner, subject.prompt, count);
  for (int again = 0; again < (small_only() ? 1 : 3); ++again) {
    runner->new_cache();
    const Run next = greedy(*runner, subject.prompt, count);
    for (size row = 0; row < count; ++row) check(same_bits(next.logits[row], first.logits[row]));
  }
}

TEST_CASE("device model: what does not fit is refused with what is needed and there, before anything is moved") {
  K3CpuModel huge = synthetic_tiny();
  // A vocabulary of 2^31 rows is only claimed: nothing of it is read.
  huge.config.vocab_size = (size{1} << 31) - 1;
  huge.weights.embed_tokens.extents[0] = huge.weights.lm_head.extents[0] = huge.config.vocab_size;
  size needed = 0;
  huge.config.intermediate_size = (size{1} << 31) - 1;
  for (LayerWeights& layer : huge.weights.layers) {
    if (layer.spec.mlp != MlpKind::Dense) continue;
    layer.mlp.gate_proj.extents[0] = layer.mlp.up_proj.extents[0] = layer.mlp.down_proj.extents[1] =
        huge.config.intermediate_size;
  }
  const std::string refusal = refuse_too_large(huge, needed);
  INFO(refusal);
  CHECK(needed > size{150} << 30);
  CHECK(refusal.find("need " + std::to_string(needed) + " bytes") != std::string::npos);
  CHECK(refusal.find(" of " + std::to_string(total_bytes()) + " are free") != std::string::npos);
  CHECK(left_behind().empty());
}

namespace {

/// Experts that only say how large they are.
struct LargeExperts final : ExpertSource {
  std::shared_ptr<const ExpertSource> inner;
  k3::size rows;
  LargeExperts(std::shared_ptr<const ExpertSource> i, k3::size r) : inner(std::move(i)), rows(r) {}
  k3::size size() const override { return inner->size(); }
  ExpertWeights operator[](k3::size expert) const override {
    ExpertWeights claimed = (*inner)[expert];
    claimed.w1.extents[0] = rows;
    return claimed;
  }
};

void claim_experts(K3CpuModel& model, size rows) {
  for (LayerWeights& layer : model.weights.layers)
    if (layer.experts) layer.experts = std::make_shared<LargeExperts>(layer.experts, rows);
}

}  // namespace

TEST_CASE("device model: a plan that does not fit 64 bits is refused, not taken modulo 2^64") {
  constexpr size one = 1;
  const auto refused = [](size embedding, size head, size experts) {
    K3CpuModel model = make_small_model();  // one layer has experts, four
    if (embedding > 0) model.weights.embed_tokens.extents[0] = embedding;
    if (head > 0) model.weights.lm_head.extents[0] = head;
    if (experts > 0) claim_experts(model, experts);
    return thrown_by([&] { planned(model); });
  };
  // A row has 32 bytes.
  const std::string too_large = "K3DeviceModel/the weights' size";
  CHECK(refused(0, 0, 0) == "nothing thrown");
  CHECK(refused(one << 58, 0, 0) == "nothing thrown");
  CHECK(refused(one << 59, 0, 0) == too_large);          // its bytes
  CHECK(refused(one << 61, 0, 0) == too_large);          // its elements
  CHECK(refused((one << 59) - 1, 0, 0) == too_large);    // rounded up
  CHECK(refused(one << 58, one << 58, 0) == too_large);  // a sum of weights
  CHECK(refused(0, 0, one << 56) == "nothing thrown");
  CHECK(refused(0, 0, one << 57) == too_large);          // four of them
  CHECK(refused(one << 58, 0, one << 56) == too_large);  // experts and the rest
}

TEST_CASE("device model: experts that do not fit behind the rest are refused with what is needed and there") {
  K3CpuModel model = small_only() ? make_small_model() : synthetic_small();
  claim_experts(model, size{1} << 40);
  size needed = 0;
  const std::string refusal = refuse_too_large_experts(model, needed);
  INFO(refusal);
  CHECK(needed > size{1} << 40);
  CHECK(refusal.find("need " + std::to_string(needed) + " bytes, ") != std::string::npos);
  CHECK(refusal.find(" are free") != std::string::npos);
  CHECK(left_behind().empty());
}
