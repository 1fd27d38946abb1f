// SPDX-License-Identifier: Apache-2.0
// One forward pass over many rows: the same bits as alone, whatever shares the batch, and faults that stay where they
// are.

#include <limits>
#include <stdexcept>

#include <k3/model/synthetic.hpp>

#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// A batch that owns its arrays.
struct OwnedBatch {
  std::vector<id> tokens, slots;
  std::vector<size> positions, wanted;

  void add(id token, id slot, size position, bool logits) {
    if (logits) wanted.push_back(tokens.size());
    tokens.push_back(token);
    slots.push_back(slot);
    positions.push_back(position);
  }
  /// The next `count` tokens of a sequence; logits of the last.
  void add_tokens(const std::vector<id>& sequence, size first, size count, id slot) {
    for (size i = first; i < first + count; ++i) add(sequence[i], slot, i, i + 1 == first + count);
  }
  DecoderBatch batch() const { return {view(tokens), view(slots), view(positions), view(wanted)}; }
};

const K3CpuModel& small() {
  static const K3CpuModel model = synthetic_small();
  return model;
}

template <class P>
std::vector<double> prefilled_logits(const K3CpuModel& model, const std::vector<id>& ids, size rows, const host& exec,
                                     std::vector<unsigned char>* bytes = nullptr) {
  Decoder<P> decoder(exec, model, rows, 1);
  HybridCache<P> cache = decoder.make_cache(1, ids.size());
  prefill(decoder, cache, 0, view(ids));
  if (bytes) *bytes = cache.to_bytes(0);
  return elements(decoder.logits());
}

/// The cheapest way to a model whose weights may be changed: its floats are this test's own.
void set_weight(const AnyMatrix<>& weight, size row, size column, float value) {
  const_cast<float*>(static_cast<const float*>(weight.data))[row * weight.extents[1] + column] = value;
}

}  // namespace

TEMPLATE_TEST_CASE("token by token, in pieces or at once: the same bits in logits and cache", "", Fp32, Fp64, Bf16) {
  for (const char* name : fixture_names) {
    const Fixture& f = fixture(name);
    std::vector<unsigned char> bytes, again;
    const auto one = prefilled_logits<TestType>(f.model, f.ids(2), 1, host{1}, &bytes);
    for (const size rows : {size{2}, size{5}, size{23}, size{32}}) {
      INFO(name << " " << TestType::name << ", " << rows << " rows a pass");
      check(same_bits(prefilled_logits<TestType>(f.model, f.ids(2), rows, host{1}, &again), one));
      CHECK(again == bytes);
    }
  }
}

TEST_CASE("any number of threads gives the same bits, and so do both kinds of vector code") {
  for (const char* name : fixture_names) {
    const Fixture& f = fixture(name);
    const auto one = prefilled_logits<Fp32>(f.model, f.ids(2), 8, host{1});
    for (const int threads : {2, 3, 5}) {
      INFO(name << ", " << threads << " threads");
      check(same_bits(prefilled_logits<Fp32>(f.model, f.ids(2), 8, host{threads}), one));
    }
    if (best_isa() == Isa::avx512) {
      INFO(name << ": avx2 against avx512");
      check(same_bits(prefilled_logits<Fp32>(f.model, f.ids(2), 8, host{1, Isa::avx2}), one));
    }
    INFO(name << ": plain code");
    check(compare(prefilled_logits<Fp32>(f.model, f.ids(2), 8, host{1, Isa::plain}), one, 1e-4, 0, true));
  }
}

TEST_CASE("cases 10, 46 and 50: sequences of a batch are computed as if alone, padding touches nothing") {
  const Fixture& f = fixture("k3-tiny-5l");
  const std::vector<std::vector<id>> sequences = {f.ids(2), f.ids(1), f.ids(0)};
  Decoder<Fp32> decoder(host{1}, f.model, 32, 4);
  HybridCache<Fp32> together = decoder.make_cache(8, 32);
  const std::vector<size> slots = {3, 7, 0};
  const std::vector<unsigned char> idle = together.to_bytes(5);

  OwnedBatch first;  // 7 tokens of sequence 0, none of 1, one of 2, between padding rows with absurd contents
  first.add(-5, pad_slot, 999, true);
  first.add_tokens(sequences[0], 0, 7, 3);
  first.add(1 << 30, pad_slot, 0, false);
  first.add_tokens(sequences[2], 0, 1, 0);
  decoder.forward(together, first.batch());
  const std::vector<double> of_padding = elements(decoder.logits()[0]), after_seven = elements(decoder.logits()[1]);
  for (const double logit : of_padding) CHECK(logit == 0.0);
  CHECK(decoder.status(0) == RowStatus::padding);
  CHECK_THROWS_AS(decoder.argmax(0), invalid_argument);
  CHECK(decoder.status(1) == RowStatus::ok);
  OwnedBatch second;  // the rest of sequence 0 beside all of 1
  second.add_tokens(sequences[0], 7, sequences[0].size() - 7, 3);
  second.add_tokens(sequences[1], 0, sequences[1].size(), 7);
  decoder.forward(together, second.batch());
  const std::vector<double> logits[2] = {elements(decoder.logits()[0]), elements(decoder.logits()[1])};

  for (size i = 0; i < sequences.size(); ++i) {
    std::vector<unsigned char> alone;
    const auto expected = prefilled_logits<Fp32>(f.model, sequences[i], 32, host{1}, &alone);
    INFO("sequence " << i);
    if (i < 2) check(same_bits(logits[i], expected));
    CHECK(together.to_bytes(slots[i]) == alone);
  }
  check(same_bits(
      after_seven,
      prefilled_logits<Fp32>(f.model, std::vector<id>(sequences[0].begin(), sequences[0].begin() + 7), 7, host{1})));
  CHECK(together.to_bytes(5) == idle);

  // Alternately, one token each (case 46).
  HybridCache<Fp32> alternating = decoder.make_cache(2, 32);
  for (size i = 0; i < sequences[1].size(); ++i)
    for (id slot = 0; slot < 2; ++slot) {
      OwnedBatch step;
      step.add(sequences[static_cast<size>(slot)][i], slot, i, false);
      decoder.forward(alternating, step.batch());
    }
  std::vector<unsigned char> alone;
  prefilled_logits<Fp32>(f.model, sequences[1], 32, host{1}, &alone);
  CHECK(alternating.to_bytes(1) == alone);
  const std::vector<id> beginning(sequences[0].begin(),
                                  sequences[0].begin() + static_cast<std::ptrdiff_t>(sequences[1].size()));
  prefilled_logits<Fp32>(f.model, beginning, 32, host{1}, &alone);
  CHECK(alternating.to_bytes(0) == alone);
}

TEST_CASE("cases 70 and 72: a batch that cannot be taken changes nothing and names what is wrong") {
  Decoder<Fp32> decoder(host{1}, small(), 4, 2);
  HybridCache<Fp32> cache = decoder.make_cache(2, 8);
  OwnedBatch start;
  start.add_tokens({1, 2, 3}, 0, 3, 1);
  decoder.forward(cache, start.batch());
  const std::vector<unsigned char> before[2] = {cache.to_bytes(0), cache.to_bytes(1)};
  const auto refused = [&](const OwnedBatch& wrong, const std::string& argument) {
    try {
      decoder.forward(cache, wrong.batch());
      FAIL("accepted: " << argument);
    } catch (const invalid_argument& problem) {
      INFO(problem.what());
      CHECK(problem.argument().find(argument) != std::string::npos);
    }
    CHECK(cache.to_bytes(0) == before[0]);
    CHECK(cache.to_bytes(1) == before[1]);
  };
  const auto rows = [](std::initializer_list<std::array<int, 3>> list) {
    OwnedBatch made;
    for (const auto& row : list) made.add(row[0], row[1], static_cast<size>(row[2]), false);
    return made;
  };
  refused(rows({}), "tokens");
  refused(rows({{1, 0, 0}, {1, 0, 1}, {1, 0, 2}, {1, 0, 3}, {1, 0, 4}}), "tokens");
  refused(rows({{-1, 0, 0}}), "tokens[0]");
  refused(rows({{1, 0, 0}, {16, 0, 1}}), "tokens[1]");
  refused(rows({{1, 2, 0}}), "slots[0]");
  refused(rows({{1, -2, 0}}), "slots[0]");
  refused(rows({{1, 1, 2}}), "positions[0]");
  refused(rows({{1, 1, 4}}), "positions[0]");
  refused(rows({{1, 0, 0}, {1, 0, 2}}), "positions[1]");
  refused(rows({{1, 0, 0}, {1, 1, 3}, {1, 0, 1}}), "slots[2]");
  OwnedBatch wanted = rows({{1, 0, 0}});
  wanted.wanted = {1};
  refused(wanted, "logit_rows[0]");
  wanted = rows({{1, 0, 0}, {2, 0, 1}});
  wanted.wanted = {1, 0};
  refused(wanted, "logit_rows[1]");
  wanted.wanted = {0, 1, 1};
  refused(wanted, "logit_rows");
  OwnedBatch lengths = rows({{1, 0, 0}});
  lengths.slots.push_back(0);
  refused(lengths, "slots");
  // Views that have no memory, or none of their own for every row.
  const OwnedBatch whole = rows({{1, 0, 0}, {2, 0, 1}});
  const auto refused_view = [&](auto&& damage, const char* argument) {
    DecoderBatch wrong = whole.batch();
    damage(wrong);
    CHECK_THROWS_AS(decoder.forward(cache, wrong), invalid_argument);
    INFO(argument);
    CHECK(cache.to_bytes(0) == before[0]);
  };
  refused_view([](DecoderBatch& b) { b.tokens.data = nullptr; }, "tokens");
  refused_view([](DecoderBatch& b) { b.slots.data = nullptr; }, "slots");
  refused_view([](DecoderBatch& b) { b.positions.data = nullptr; }, "positions");
  refused_view([](DecoderBatch& b) { b.logit_rows = {nullptr, {1}, {1}}; }, "logit_rows");
  refused_view([&](DecoderBatch& b) { b.logit_rows = {whole.positions.data(), {1}, {2}}; }, "logit_rows");

  // Up to the capacity of 8 and not one further.
  OwnedBatch fill;
  fill.add_tokens({0, 0, 0, 4, 5, 6, 7}, 3, 4, 1);
  decoder.forward(cache, fill.batch());
  OwnedBatch last;
  last.add(1, 1, 7, true);
  decoder.forward(cache, last.batch());
  OwnedBatch full;
  full.add(1, 1, 8, true);
  CHECK_THROWS_AS(decoder.forward(cache, full.batch()), invalid_argument);
  CHECK(cache.position(1) == 8);
}

TEST_CASE("a cache of another geometry is refused, and the index of a logit row is checked") {
  const Fixture& f = fixture("k3-tiny-5l");
  const Fixture& other = fixture("kimi-linear-5l");  // as many layers, of other kinds and sizes
  Decoder<Fp32> decoder(host{1}, f.model, 4, 2);
  Decoder<Fp32> foreign(host{1}, other.model);
  HybridCache<Fp32> cache = foreign.make_cache(1, 8);
  const std::vector<unsigned char> before = cache.to_bytes(0);
  OwnedBatch batch;
  batch.add(1, 0, 0, true);
  try {
    decoder.forward(cache, batch.batch());
    FAIL("accepted");
  } catch (const invalid_argument& problem) {
    INFO(problem.what());
    CHECK(problem.argument() == "the cache");
  }
  CHECK(cache.status(0) == RowStatus::ok);
  CHECK(cache.to_bytes(0) == before);
  K3Config narrow = small().config;  // the same kinds of layers, one head less
  narrow.kda.heads = 1;
  const K3CpuModel one_head = synthetic_model(narrow, 0.5f);
  HybridCache<Fp32> fewer_heads = Decoder<Fp32>(host{1}, one_head).make_cache(1, 8);
  Decoder<Fp32> two_heads(host{1}, small());
  CHECK_THROWS_AS(two_heads.forward(fewer_heads, batch.batch()), invalid_argument);

  HybridCache<Fp32> own = decoder.make_cache(1, 8);
  decoder.forward(own, batch.batch());
  CHECK_THROWS_AS(decoder.status(1), invalid_argument);
  CHECK_THROWS_AS(decoder.logits_row(1), invalid_argument);
  CHECK_THROWS_AS(decoder.argmax(1), invalid_argument);
}

TEST_CASE("cases 15 and 68: NaN stays in its sequence, is reported when the token is asked for, and marks the slot") {
  K3CpuModel model = synthetic_small();
  for (size column = 0; column < 8; ++column)
    set_weight(model.weights.embed_tokens, 9, column, std::numeric_limits<float>::quiet_NaN());
  Decoder<Fp32> decoder(host{1}, model, 8, 2);
  HybridCache<Fp32> cache = decoder.make_cache(2, 16);
  OwnedBatch mixed;
  mixed.add_tokens({1, 9}, 0, 2, 0);
  mixed.add_tokens({4, 2, 3}, 0, 3, 1);
  decoder.forward(cache, mixed.batch());
  CHECK(decoder.status(0) == RowStatus::nan_router_logits);
  CHECK_THROWS_AS(decoder.argmax(0), invalid_argument);
  CHECK(decoder.status(1) == RowStatus::ok);
  std::vector<unsigned char> alone;
  check(same_bits(elements(decoder.logits()[1]), prefilled_logits<Fp32>(model, {4, 2, 3}, 8, host{1}, &alone)));
  CHECK(cache.to_bytes(1) == alone);
  CHECK(cache.status(0) == RowStatus::nan_router_logits);
  OwnedBatch next;
  next.add(1, 0, 2, true);
  CHECK_THROWS_AS(decoder.forward(cache, next.batch()), invalid_argument);
  CHECK_THROWS_AS(cache.snapshot(0), invalid_argument);
  cache.reset(0);
  OwnedBatch fresh;
  fresh.add_tokens({4, 2, 3}, 0, 3, 0);
  decoder.forward(cache, fresh.batch());
  CHECK(cache.to_bytes(0) == alone);

  K3CpuModel bad_head = synthetic_small();
  set_weight(bad_head.weights.lm_head, 3, 0, std::numeric_limits<float>::quiet_NaN());
  CHECK_THROWS_AS(greedy_decode<Fp32>(host{1}, bad_head, {1, 2}, {3}), invalid_argument);
}

TEST_CASE("an expert that cannot be read ends the step and leaves its sequences unusable") {
  struct Failing final : ExpertSource {
    std::shared_ptr<const ExpertSource> inner;
    explicit Failing(std::shared_ptr<const ExpertSource> source) : inner(std::move(source)) {}
    k3::size size() const override { return inner->size(); }
    ExpertWeights operator[](k3::size expert) const override {
      if (expert > 0) throw format_error("a.safetensors", "expert", "scale byte 255 (NaN)", 7);
      return (*inner)[expert];
    }
  };
  K3CpuModel model = synthetic_small();
  model.weights.layers[5].experts = std::make_shared<Failing>(model.weights.layers[5].experts);
  Decoder<Fp32> decoder(host{1}, model, 8, 1);
  HybridCache<Fp32> cache = decoder.make_cache(2, 16);
  const std::vector<unsigned char> idle = cache.to_bytes(1);
  OwnedBatch batch;
  batch.add_tokens({1, 2, 3}, 0, 3, 0);
  CHECK_THROWS_AS(decoder.forward(cache, batch.batch()), format_error);
  CHECK(cache.status(0) == RowStatus::interrupted);
  CHECK_THROWS_AS(decoder.forward(cache, batch.batch()), invalid_argument);
  CHECK(cache.to_bytes(1) == idle);
}

TEST_CASE("a pass that an exception ended leaves no results, and rollback makes its sequence usable again") {
  Decoder<Fp32> decoder(host{1}, small(), 4, 1);
  HybridCache<Fp32> cache = decoder.make_cache(1, 8);
  const auto step = [&](id token, const char* stop_at) {
    OwnedBatch batch;
    batch.add(token, 0, cache.position(0), true);
    decoder.forward(cache, batch.batch(), [&](const char* name, size, const auto&) {
      if (std::string(name) == stop_at) throw std::runtime_error("stop");
    });
  };
  for (const char* part : {"embed", "attn_out", "router_logits", "residual", "final_hidden"}) {
    INFO(part);
    cache.reset(0);
    step(1, "");
    const RollbackPoint<Fp32> point = cache.rollback_point(0);
    CHECK_THROWS_AS(step(2, part), std::runtime_error);
    CHECK(decoder.status(0) == RowStatus::interrupted);
    CHECK_THROWS_AS(decoder.argmax(0), invalid_argument);
    for (const float logit : decoder.logits_row(0)) REQUIRE(logit != logit);
    CHECK(cache.status(0) == RowStatus::interrupted);
    CHECK_THROWS_AS(step(3, ""), invalid_argument);
    cache.rollback(point);
    step(3, "");
    check(same_bits(elements(decoder.logits()), prefilled_logits<Fp32>(small(), {1, 3}, 4, host{1})));
  }
}

TEST_CASE("an observer cannot start a pass of its own decoder") {
  Decoder<Fp32> decoder(host{1}, small(), 4, 1);
  HybridCache<Fp32> cache = decoder.make_cache(2, 8);
  OwnedBatch batch, inner;
  batch.add_tokens({1, 2}, 0, 2, 0);
  inner.add(2, 1, 0, true);
  size refused = 0;
  decoder.forward(cache, batch.batch(), [&](const char*, size, const auto&) {
    try {
      decoder.forward(cache, inner.batch());
    } catch (const invalid_argument&) {
      ++refused;
    }
  });
  CHECK(refused > 10);
  CHECK(cache.position(1) == 0);
  check(same_bits(elements(decoder.logits()), prefilled_logits<Fp32>(small(), {1, 2}, 4, host{1})));
  decoder.forward(cache, inner.batch());  // and afterwards it runs again
  CHECK(cache.position(1) == 1);
}

TEST_CASE("a decoder and a cache that were moved from take nothing") {
  Decoder<Fp32> decoder(host{1}, small(), 4, 1);
  HybridCache<Fp32> cache = decoder.make_cache(1, 8);
  Decoder<Fp32> taken(std::move(decoder));
  OwnedBatch padding;
  padding.add(0, pad_slot, 0, true);
  CHECK_THROWS_AS(decoder.forward(cache, padding.batch()), invalid_argument);
  HybridCache<Fp32> kept(std::move(cache));
  CHECK_THROWS_AS(decoder.forward(cache, padding.batch()), invalid_argument);
  CHECK_THROWS_AS(cache.reset(0), invalid_argument);
  taken.forward(kept, padding.batch());
  CHECK(taken.status(0) == RowStatus::padding);
}
