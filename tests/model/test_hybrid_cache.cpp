// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <limits>

#include <k3/model/synthetic.hpp>

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

const K3CpuModel& model() {
  static const K3CpuModel small = synthetic_small();
  return small;
}
const std::vector<id> prompt = {3, 14, 1, 5, 9, 2, 6};

template <class P = Fp32>
HybridCache<P> filled(size slots = 1, size capacity = 16) {
  Decoder<P> decoder(host{1}, model(), 8, 1);
  HybridCache<P> cache = decoder.make_cache(slots, capacity);
  for (size slot = 0; slot < slots; ++slot) prefill(decoder, cache, slot, view(prompt));
  return cache;
}

std::vector<double> step(HybridCache<Fp32>& cache, size slot, id token) {
  Decoder<Fp32> decoder(host{1}, model(), 8, 1);
  const id slot_id = static_cast<id>(slot);
  const size position = cache.position(slot), row = 0;
  decoder.forward(cache, {view(&token, 1), view(&slot_id, 1), view(&position, 1), view(&row, 1)});
  return elements(decoder.logits());
}

}  // namespace

TEST_CASE("HybridCache: the kinds of its layers follow the graph") {
  const HybridCache<Fp32> cache =
      HybridCache<Fp32>::from_graph(model().graph, model().config.kda, model().config.mla, 2, 16);
  CHECK(cache.layers() == 8);
  for (size layer = 0; layer < 8; ++layer) {
    CHECK((cache.kda(layer) != nullptr) == (layer % 4 != 3));
    CHECK((cache.mla(layer) != nullptr) == (layer % 4 == 3));
  }
  CHECK(cache.kda(8) == nullptr);
  CHECK(cache.mla(8) == nullptr);
  CHECK_THROWS_AS(HybridCache<Fp32>(model().graph, model().config.kda, model().config.mla, 0, 16), invalid_argument);
  CHECK_THROWS_AS(HybridCache<Fp32>(model().graph, model().config.kda, model().config.mla, 1, 0), invalid_argument);
  CHECK_THROWS_AS(HybridCache<Fp32>(model().graph, model().config.kda, model().config.mla, ~size{0} / 4, 16),
                  invalid_argument);
  CHECK_THROWS_AS(cache.position(2), invalid_argument);
}

TEST_CASE("HybridCache: bytes_needed is what the layers hold") {
  const K3Config& config = model().config;
  const HybridCache<Fp32> cache(model().graph, config.kda, config.mla, 3, 16);
  std::uint64_t held = 0;
  for (size layer = 0; layer < cache.layers(); ++layer) {
    if (const auto* mla = cache.mla(layer)) held += mla->bytes();
    if (const auto* kda = cache.kda(layer)) held += 3 * 4 * (kda->recurrent(0).elements() + kda->conv(0).elements());
  }
  const auto needed = [&](size slots, size capacity) {
    return HybridCache<Fp32>::bytes_needed(model().graph, config.kda, config.mla, slots, capacity);
  };
  CHECK(held == needed(3, 16));
  CHECK_THROWS_AS(needed(1, size{1} << 60), invalid_argument);
  CHECK_THROWS_AS(needed(~size{0}, 1), invalid_argument);
  CHECK_THROWS_AS(needed(size{1} << 40, size{1} << 30), invalid_argument);
  KdaConfig wide = config.kda;
  wide.heads = size{1} << 50, wide.head_dim = 128;  // 2^64 elements of state
  CHECK_THROWS_AS(HybridCache<Fp32>::bytes_needed(model().graph, wide, config.mla, 1, 1), invalid_argument);
}

TEST_CASE("HybridCache: where there is not enough memory it says how much is needed") {
  if (sanitized) {
    std::puts("note: model/hybrid_cache: no cache beyond all memory is tried: a sanitizer would end the program");
    return;
  }
  // 2^31 - 1 positions of 4096 slots: 211 TB a layer, more than a process can address.
  const size slots = 4096, capacity = (size{1} << 31) - 1;
  const K3Config& config = model().config;
  const std::uint64_t needed = HybridCache<Fp32>::bytes_needed(model().graph, config.kda, config.mla, slots, capacity);
  bool thrown = false;
  try {
    const HybridCache<Fp32> cache(model().graph, config.kda, config.mla, slots, capacity);
  } catch (const out_of_memory& problem) {
    thrown = true;
    CHECK(problem.needed() == needed);
    CHECK(std::string(problem.what()).find(std::to_string(needed) + " bytes") != std::string::npos);
  }
  CHECK(thrown);
}

TEMPLATE_TEST_CASE("cache bytes: round trip in every precision", "", Fp32, Fp64, Bf16) {
  const HybridCache<TestType> cache = filled<TestType>();
  const std::vector<unsigned char> bytes = cache.to_bytes(0);
  Decoder<TestType> decoder(host{1}, model());
  HybridCache<TestType> other = decoder.make_cache(3, 7);  // just the positions that the sequence has
  other.from_bytes(2, bytes);
  CHECK(other.position(2) == prompt.size());
  CHECK(other.to_bytes(2) == bytes);
  HybridCache<TestType> too_short = decoder.make_cache(1, 6);
  CHECK_THROWS_AS(too_short.from_bytes(0, bytes), invalid_argument);
  CHECK(too_short.position(0) == 0);
}

TEST_CASE("cache bytes: cut anywhere, lengthened or changed in the header, they are refused and nothing changes") {
  HybridCache<Fp32> cache = filled();
  const std::vector<unsigned char> bytes = cache.to_bytes(0), before = bytes;
  HybridCache<Fp32> target = filled();
  for (size count = 0; count < bytes.size(); ++count) {
    const std::vector<unsigned char> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
    CHECK_THROWS_AS(target.from_bytes(0, cut), format_error);
  }
  std::vector<unsigned char> longer = bytes;
  longer.push_back(0);
  CHECK_THROWS_AS(target.from_bytes(0, longer), format_error);
  // Every byte of the header, the first tag and the first count, with every value that differs: an error of the
  // library, always.
  size refused = 0, accepted = 0;
  for (size at = 0; at < 8 + 4 + 4 + 8 + 8 + 1 + 8; ++at)
    for (int value = 0; value < 256; value += 5) {
      std::vector<unsigned char> changed = bytes;
      if (changed[at] == value) continue;
      changed[at] = static_cast<unsigned char>(value);
      try {
        target.from_bytes(0, changed);
        ++accepted;
      } catch (const error&) {
        ++refused;
      }
    }
  INFO(refused << " refused, " << accepted << " accepted");
  CHECK(accepted == 0);
  CHECK(target.to_bytes(0) == before);
}

TEST_CASE("cache bytes: other precisions and geometries are refused") {
  HybridCache<Fp32> cache = filled();
  CHECK_THROWS_AS(cache.from_bytes(0, filled<Fp64>().to_bytes(0)), format_error);
  CHECK_THROWS_AS(cache.from_bytes(0, filled<Bf16>().to_bytes(0)), format_error);
  const K3CpuModel tiny = synthetic_tiny();
  Decoder<Fp32> decoder(host{1}, tiny);
  HybridCache<Fp32> other = decoder.make_cache(1, 16);
  const std::vector<unsigned char> before = other.to_bytes(0);
  CHECK_THROWS_AS(other.from_bytes(0, cache.to_bytes(0)), invalid_argument);
  CHECK(other.to_bytes(0) == before);
  const Fixture& five = fixture("k3-tiny-5l");
  Decoder<Fp32> fewer(host{1}, five.model);
  HybridCache<Fp32> five_layers = fewer.make_cache(1, 16);
  CHECK_THROWS_AS(five_layers.from_bytes(0, cache.to_bytes(0)), invalid_argument);
}

TEST_CASE("case 49: a copied cache and its original go their own ways") {
  HybridCache<Fp32> original = filled();
  const std::vector<unsigned char> before = original.to_bytes(0);
  HybridCache<Fp32> copy = original, untouched = original;
  for (id token = 0; token < 5; ++token) step(copy, 0, token);
  CHECK(original.to_bytes(0) == before);
  check(same_bits(step(original, 0, 7), step(untouched, 0, 7)));
}

TEST_CASE("case 47: a slot that is reset behaves like a fresh one, whatever was in it") {
  HybridCache<Fp32> used = filled(2);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (size layer = 0; layer < used.layers(); ++layer) {
    if (auto* kda = used.kda_mut(layer)) {
      for (size i = 0; i < kda->recurrent(1).elements(); ++i) kda->recurrent(1).data[i] = nan;
      for (size i = 0; i < kda->conv(1).elements(); ++i) kda->conv(1).data[i] = nan;
    } else {
      auto* mla = used.mla_mut(layer);
      for (size position = 0; position < used.capacity(); ++position)
        for (size i = 0; i < mla->width(); ++i) mla->row(1, position)[i] = nan;
    }
  }
  const std::vector<unsigned char> neighbour = used.to_bytes(0);
  used.reset(1);
  Decoder<Fp32> decoder(host{1}, model(), 8, 1);
  prefill(decoder, used, 1, view(prompt));
  const std::vector<double> again = elements(decoder.logits());
  HybridCache<Fp32> fresh = decoder.make_cache(1, 16);
  prefill(decoder, fresh, 0, view(prompt));
  check(same_bits(again, elements(decoder.logits())));
  CHECK(used.to_bytes(1) == fresh.to_bytes(0));
  CHECK(used.to_bytes(0) == neighbour);
}

TEST_CASE("case 48: a sequence continues from where it stands, or from a saved state of exactly the wanted position") {
  HybridCache<Fp32> cache = filled();
  const RollbackPoint<Fp32> point = cache.rollback_point(0);
  const std::vector<unsigned char> at_point = cache.to_bytes(0);
  const std::vector<double> first = step(cache, 0, 4);
  step(cache, 0, 8);
  CHECK(cache.position(0) == prompt.size() + 2);
  Decoder<Fp32> decoder(host{1}, model());
  const id token = 1, slot = 0;
  const std::vector<unsigned char> before = cache.to_bytes(0);
  for (const size wrong : {prompt.size(), prompt.size() + 1, prompt.size() + 3, size{0}})
    CHECK_THROWS_AS(decoder.forward(cache, {view(&token, 1), view(&slot, 1), view(&wrong, 1), {}}), invalid_argument);
  CHECK(cache.to_bytes(0) == before);
  cache.rollback(point);
  CHECK(cache.position(0) == prompt.size());
  CHECK(cache.to_bytes(0) == at_point);
  check(same_bits(step(cache, 0, 4), first));
}

TEST_CASE("rollback: only to a point of the slot's own past") {
  HybridCache<Fp32> cache = filled(2);
  const RollbackPoint<Fp32> early = cache.rollback_point(0);
  step(cache, 0, 4);
  const RollbackPoint<Fp32> late = cache.rollback_point(0);
  cache.rollback(early);
  CHECK_THROWS_AS(cache.rollback(late), invalid_argument);  // the rows after `early` may be others by now
  RollbackPoint<Fp32> elsewhere = early;
  elsewhere.slot = 7;
  CHECK_THROWS_AS(cache.rollback(elsewhere), invalid_argument);
  RollbackPoint<Fp32> damaged = early;
  damaged.kda_layers.pop_back();
  CHECK_THROWS_AS(cache.rollback(damaged), invalid_argument);
  cache.reset(0);
  CHECK_THROWS_AS(cache.rollback(early), invalid_argument);
}

TEST_CASE("rollback: a point of tokens that were taken back stays refused, those before them stay good") {
  HybridCache<Fp32> cache = filled(1, 32);
  const auto point_after = [&](id token) {
    step(cache, 0, token);
    return cache.rollback_point(0);
  };
  const RollbackPoint<Fp32> first = point_after(1), second = point_after(2);
  const RollbackPoint<Fp32> third = point_after(3), fourth = point_after(4);
  cache.rollback(second);
  const std::vector<unsigned char> at_second = cache.to_bytes(0);
  const RollbackPoint<Fp32> other_third = point_after(7), other_fourth = point_after(8);
  step(cache, 0, 5);
  for (const RollbackPoint<Fp32>* gone : {&third, &fourth}) CHECK_THROWS_AS(cache.rollback(*gone), invalid_argument);
  cache.rollback(other_fourth);
  cache.rollback(other_third);
  CHECK_THROWS_AS(cache.rollback(other_fourth), invalid_argument);
  step(cache, 0, 9);
  CHECK_THROWS_AS(cache.rollback(other_fourth), invalid_argument);
  cache.rollback(other_third);
  cache.rollback(second);
  CHECK(cache.to_bytes(0) == at_second);
  step(cache, 0, 3);
  for (const RollbackPoint<Fp32>* gone : {&third, &other_third}) {
    step(cache, 0, 3);
    CHECK_THROWS_AS(cache.rollback(*gone), invalid_argument);
  }
  cache.rollback(first);
  cache.rollback(first);
  HybridCache<Fp32> fresh = filled(1, 32);
  step(fresh, 0, 1);
  check(same_bits(step(cache, 0, 2), step(fresh, 0, 2)));
}

TEST_CASE("rollback: points belong to one cache, and copies share only the past that they have in common") {
  HybridCache<Fp32> one = filled(2), two = filled(2);
  const RollbackPoint<Fp32> before = one.rollback_point(0);
  CHECK_THROWS_AS(two.rollback(before), invalid_argument);
  RollbackPoint<Fp32> neighbour = before;
  neighbour.slot = 1;
  CHECK_THROWS_AS(one.rollback(neighbour), invalid_argument);
  HybridCache<Fp32> copy = one;
  step(one, 0, 3);
  const RollbackPoint<Fp32> of_original = one.rollback_point(0);
  step(copy, 0, 4);
  const RollbackPoint<Fp32> of_copy = copy.rollback_point(0);
  step(copy, 0, 5);
  step(one, 0, 5);
  CHECK_THROWS_AS(copy.rollback(of_original), invalid_argument);
  CHECK_THROWS_AS(one.rollback(of_copy), invalid_argument);
  copy.rollback(of_copy);
  copy.rollback(before);
  one.rollback(before);
  CHECK(one.to_bytes(0) == copy.to_bytes(0));
}
