// SPDX-License-Identifier: Apache-2.0
// A hundred and twenty-eight sequences on the device, each with its own length and slot, against each one alone.

#include "cuda/decoder_device.hpp"
#include "cuda/small_model.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// Sequences of 1 to 29 tokens, scattered over more slots than there are sequences, and the steps that follow.
struct Plan {
  size sequences, slots, longest, steps;
  size vocab;

  size length(size s) const { return 1 + (11 * s + 3) % longest; }
  id slot(size s) const { return static_cast<id>((53 * s + 17) % slots); }
  id token(size s, size position) const {
    return static_cast<id>((7 * s * s + 13 * position + position * position * s + 3) % vocab);
  }
  std::vector<id> tokens(size s) const {
    std::vector<id> all;
    for (size i = 0; i < length(s) + steps; ++i) all.push_back(token(s, i));
    return all;
  }
};

/// Rows of a pass and what they say.
struct Rows {
  std::vector<id> tokens, slots;
  std::vector<size> positions, wanted;

  size count() const { return tokens.size(); }
  void add(const Plan& plan, size s, size position) {
    tokens.push_back(plan.token(s, position)), slots.push_back(plan.slot(s)), positions.push_back(position);
  }
  void add_padding() { tokens.push_back(-77), slots.push_back(pad_slot), positions.push_back(9999); }
  void want_all() {
    for (size row = 0; row < count(); ++row) wanted.push_back(row);
  }
  DecoderBatch batch() const { return {view(tokens), view(slots), view(positions), view(wanted)}; }
};

/// All prompts, `most` rows a pass whichever sequence is cut by that, with padding between some of the sequences.
void take_prompts(DeviceRunner& runner, const Plan& plan, size most) {
  Rows rows;
  const auto pass_from = [&](size count) {
    if (rows.count() < count) return;
    runner.forward(rows.batch());
    rows = {};
  };
  for (size s = 0; s < plan.sequences; ++s) {
    for (size i = 0; i < plan.length(s); ++i) {
      rows.add(plan, s, i);
      pass_from(most);
    }
    if (s % 3 == 0) rows.add_padding();
    pass_from(most);
  }
  pass_from(1);
}

/// The logits of each sequence alone in slot 0, step by step, and its cache afterwards.
struct Alone {
  std::vector<std::vector<float>> logits;
  std::vector<unsigned char> bytes;
};
Alone alone(DeviceRunner& runner, const Plan& plan, size s) {
  Alone result;
  const std::vector<id> tokens = plan.tokens(s);
  runner.reset(0);
  feed(runner, 0, tokens, 0, plan.length(s), false);
  for (size step = 0; step < plan.steps; ++step) {
    feed(runner, 0, tokens, plan.length(s) + step, 1, true);
    result.logits.push_back(runner.logits());
  }
  result.bytes = runner.to_bytes(0);
  return result;
}

using Logits = std::vector<std::vector<float>>;  // by sequence

/// One more token of every `stride`-th sequence: in another order every time, every fifth row padding.
void take_step(DeviceRunner& runner, const Plan& plan, size step, size stride, Logits& logits) {
  Rows rows;
  std::vector<size> sequence;
  for (size i = 0; i < plan.sequences; i += stride) {
    const size s = (37 * i + 5 * step * stride) % plan.sequences;
    rows.add(plan, s, runner.position(static_cast<size>(plan.slot(s))));
    sequence.push_back(s);
    if (rows.count() % 5 != 4) continue;
    rows.add_padding();
    sequence.push_back(plan.sequences);
  }
  rows.want_all();
  runner.forward(rows.batch());
  const std::vector<float> all = runner.logits();
  logits.assign(plan.sequences, {});
  for (size row = 0; row < rows.count(); ++row) {
    const auto at = all.begin() + static_cast<std::ptrdiff_t>(row * plan.vocab);
    const std::vector<float> values(at, at + static_cast<std::ptrdiff_t>(plan.vocab));
    const bool padding = sequence[row] == plan.sequences;
    if (runner.status(row) != (padding ? RowStatus::padding : RowStatus::ok)) FAIL_CHECK("the status of row " << row);
    if (!padding)
      logits[sequence[row]] = values;
    else if (values != std::vector<float>(plan.vocab, 0.0f))
      FAIL_CHECK("a padding row's logits are not zero");
  }
}

/// Logits of a sequence's steps in double on the host.
std::vector<std::vector<double>> on_host(const K3CpuModel& model, const Plan& plan, size s) {
  Decoder<Fp64> decoder(host{1}, model, 32, 32);
  HybridCache<Fp64> cache = decoder.make_cache(1, 64);
  const std::vector<id> tokens = plan.tokens(s);
  prefill(decoder, cache, 0, view(tokens.data(), plan.length(s)));
  std::vector<std::vector<double>> logits;
  for (size step = 0; step < plan.steps; ++step) {
    prefill(decoder, cache, 0, view(tokens.data() + plan.length(s) + step, size{1}));
    logits.push_back(elements(decoder.logits()));
  }
  return logits;
}

void check_batch(const K3CpuModel& model, bool half) {
  const size vocab = model.config.vocab_size;
  const Plan plan = small_only() ? Plan{5, 7, 5, 2, vocab} : Plan{128, 131, 29, 5, vocab};
  RunnerOptions options;
  options.half = half, options.capacity = plan.longest + plan.steps + 1;
  auto single = make_device_runner(model, options);
  std::vector<Alone> expected;
  for (size s = 0; s < plan.sequences; ++s) expected.push_back(alone(*single, plan, s));

  options.slots = plan.slots, options.max_rows = options.max_logit_rows = plan.sequences * 5 / 4 + 1;
  auto together = make_device_runner(model, options);
  take_prompts(*together, plan, options.max_rows);
  CHECK(together->captured_steps() == 0);
  std::vector<Logits> got(plan.steps);
  for (size step = 0; step < plan.steps; ++step) take_step(*together, plan, step, 1, got[step]);
  CHECK(together->captured_steps() == 1);  // all steps but the first were replayed
  for (size s = 0; s < plan.sequences; ++s) {
    INFO("sequence " << s << " of " << plan.length(s) << " tokens in slot " << plan.slot(s));
    for (size step = 0; step < plan.steps; ++step) check(same_bits(got[step][s], expected[s].logits[step]));
    CHECK((together->to_bytes(static_cast<size>(plan.slot(s))) == expected[s].bytes));
  }
  if (half) return;
  for (const size s : {size{0}, plan.sequences / 3, plan.sequences / 2, plan.sequences - 1}) {
    const auto want = on_host(model, plan, s);
    INFO("sequence " << s << " against the host in double");
    for (size step = 0; step < plan.steps; ++step) check(compare(got[step][s], want[step], 1e-4, 0, true));
  }
}

}  // namespace

TEST_CASE("device decoder: 128 sequences of different lengths in different slots have the bits that each has alone") {
  for (const Subject& subject : subjects(0))
    for (const bool half : all_or_few<bool>({false, true}, {true})) {
      INFO(subject.name << (half ? ", bf16" : ", float"));
      check_batch(*subject.model, half);
    }
}

TEST_CASE("device decoder: steps of some of the sequences between those of all, each size captured once") {
  const Subject subject = subjects(0).front();
  const size vocab = subject.model->config.vocab_size;
  const Plan plan = small_only() ? Plan{4, 5, 3, 3, vocab} : Plan{128, 129, 13, 4, vocab};
  RunnerOptions captured;
  captured.half = true, captured.slots = plan.slots, captured.capacity = 32;
  captured.max_rows = captured.max_logit_rows = plan.sequences * 5 / 4 + 1;
  RunnerOptions direct = captured;
  direct.graphs = false;
  auto a = make_device_runner(*subject.model, captured), b = make_device_runner(*subject.model, direct);
  for (DeviceRunner* runner : {a.get(), b.get()}) take_prompts(*runner, plan, plan.sequences);
  for (size step = 0; step < plan.steps; ++step) {
    Logits x, y;
    take_step(*a, plan, step, 1 + step % 2, x);
    take_step(*b, plan, step, 1 + step % 2, y);
    INFO("step " << step);
    for (size s = 0; s < plan.sequences; ++s) check(same_bits(x[s], y[s]));
  }
  CHECK(a->captured_steps() == 2);
  CHECK(b->captured_steps() == 0);
}
