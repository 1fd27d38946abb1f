// SPDX-License-Identifier: Apache-2.0
// The reference checkpoints: tokens exactly, logits and inner values within their tolerance.

#include <map>

#include "model/more_geometries.hpp"
#include "support/fixture.hpp"
#include "support/fixture_geometry.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// Decodes every prompt of a fixture and compares tokens and every row of logits. Returns the worst logit error.
template <class P, class MakeDecoder>
double check_prompts(const Fixture& fixture, MakeDecoder&& make) {
  double worst = 0;
  for (size prompt = 0; prompt < fixture.expected["prompts"].size(); ++prompt) {
    const std::vector<id> ids = fixture.ids(prompt), generated = fixture.generated(prompt);
    auto decoder = make();
    auto cache = decoder.make_cache(1, ids.size() + generated.size() + 1);
    // One token more than the reference has, for the last row of its logits.
    const auto result = greedy_decode(decoder, cache, 0, view(ids), {generated.size() + 1, {}, true});
    INFO(fixture.name << " prompt " << prompt << " " << P::name);
    CHECK(std::vector<id>(result.tokens.begin(), result.tokens.end() - 1) == generated);
    for (size row = 0; row < result.logits.size(); ++row) {
      INFO("row " << row);
      const Comparison c = compare(result.logits[row], fixture.logits(prompt, row), reference_tolerance<P>(), 0, true);
      check(c);
      worst = std::max(worst, c.worst);
    }
  }
  return worst;
}

/// Collects what an observer sees, one tensor a name, rows of later passes appended.
struct Collector {
  std::map<std::string, std::vector<double>>& seen;
  template <class V>
  void operator()(const char* part, size layer, const V& values) const {
    const std::string name = std::string(part) == "embed" || std::string(part) == "final_hidden" ||
                                     std::string(part) == "output_attn_res_probs"
                                 ? part
                                 : "layer" + std::to_string(layer) + "." + part;
    for (const double value : elements(values)) seen[name].push_back(value);
  }
};

/// Runs the third prompt, `rows` tokens a pass, and compares every inner value that the reference has.
template <class P, class G>
size check_inner_values(const Fixture& fixture, G geometry, size rows) {
  const std::vector<id> ids = fixture.ids(2);
  const size count = ids.size(), layers = fixture.model.graph.layers.size();
  Decoder<P, G> decoder(host{1}, fixture.model, geometry, rows, rows);
  HybridCache<P> cache = decoder.make_cache(1, count);
  std::map<std::string, std::vector<double>> seen;
  std::vector<id> slots(rows, 0);
  std::vector<size> positions(rows), wanted(rows);
  for (size done = 0; done < count;) {
    const size now = std::min(rows, count - done);
    for (size row = 0; row < now; ++row) {
      positions[row] = done + row;
      wanted[row] = row;
    }
    const HostView<const id, 1> tokens = view(ids).slice(0, done, now);
    decoder.forward(cache, {tokens, view(slots.data(), now), view(positions.data(), now), view(wanted.data(), now)},
                    Collector{seen});
    for (const double value : elements(decoder.logits())) seen["logits"].push_back(value);
    done += now;
  }
  // The final mixture is seen under the number of layers; the reference calls it output_mixed.
  seen["output_mixed"] = seen["layer" + std::to_string(layers) + ".mixed"];
  for (size layer = 0; layer < layers; ++layer) {
    const std::string prefix = "layer" + std::to_string(layer) + ".";
    if (const auto* kda = cache.kda(layer)) {
      seen[prefix + "kda_state"] = elements(kda->recurrent(0));
      seen[prefix + "conv_state"] = elements(kda->conv(0));
    } else {
      const auto* mla = cache.mla(layer);
      const size lora = fixture.model.config.mla.kv_lora_rank;
      for (size position = 0; position < count; ++position)
        for (size i = 0; i < mla->width(); ++i)
          seen[prefix + (i < lora ? "mla_latent" : "mla_k_rope")].push_back(
              static_cast<double>(mla->row(0, position)[i]));
    }
  }
  size compared = 0;
  for (const TensorInfo& tensor : fixture.inner->tensors()) {
    const std::string name(tensor.name);
    if (name == "prompt_ids") continue;
    INFO(fixture.name << " " << P::name << " " << rows << " rows a pass: " << name);
    REQUIRE(seen.count(name) == 1);
    check(compare(seen[name], fixture.values(name), reference_tolerance<P>(), 0, true));
    ++compared;
  }
  return compared;
}

template <class G>
void check_all_inner_values(const Fixture& f, G geometry) {
  for (const size rows : {size{1}, size{7}, size{32}}) {
    CHECK(check_inner_values<Fp32>(f, geometry, rows) > 25);
    CHECK(check_inner_values<Fp64>(f, geometry, rows) > 25);
  }
}

}  // namespace

TEST_CASE("reference checkpoints: tokens and logits with run-time geometry") {
  const std::string name =
      GENERATE(from_range(std::vector<std::string>(std::begin(fixture_names), std::end(fixture_names))));
  const Fixture& f = fixture(name);
  const double fp32 = check_prompts<Fp32>(f, [&] { return Decoder<Fp32>(host{1}, f.model); });
  const double fp64 = check_prompts<Fp64>(f, [&] { return Decoder<Fp64>(host{1}, f.model); });
  // The tolerances above are the reference's; these are what this library reaches, with a little room.
  INFO(name << ": worst logit error of the row's largest, fp32 " << fp32 << ", fp64 " << fp64);
  CHECK(fp32 <= 4e-5);
  CHECK(fp64 <= 2e-7);
}

TEST_CASE("reference checkpoints: compile-time geometry gives the same bits as run-time geometry") {
  const auto compare_static = [](const Fixture& f, auto geometry) {
    using Static = decltype(geometry);
    check_prompts<Fp32>(f, [&] { return Decoder<Fp32, Static>(host{1}, f.model, geometry, 32, 1); });
    check_prompts<Fp64>(f, [&] { return Decoder<Fp64, Static>(host{1}, f.model, geometry, 32, 1); });
    const std::vector<id> ids = f.ids(2);
    Decoder<Fp32> run_time(host{1}, f.model);
    Decoder<Fp32, Static> fixed(host{1}, f.model, geometry, 32, 1);
    auto cache_a = run_time.make_cache(1, ids.size());
    auto cache_b = fixed.make_cache(1, ids.size());
    prefill(run_time, cache_a, 0, view(ids));
    prefill(fixed, cache_b, 0, view(ids));
    check(same_bits(elements(run_time.logits()), elements(fixed.logits())));
    CHECK(cache_a.to_bytes(0) == cache_b.to_bytes(0));
  };
  compare_static(fixture("k3-tiny-5l"), tiny_5l::Decoder{});
  compare_static(fixture("k3-tiny-13l"), tiny_13l::Decoder{});
  compare_static(fixture("kimi-linear-5l"), kimi_linear_5l::Decoder{});
}

TEST_CASE("reference checkpoints: inner values") {
  const std::string name =
      GENERATE(from_range(std::vector<std::string>(std::begin(fixture_names), std::end(fixture_names))));
  const Fixture& f = fixture(name);
  check_all_inner_values(f, decoder_geometry_from(f.model.config));
}

TEST_CASE("reference checkpoints: inner values with compile-time geometry") {
  check_all_inner_values(fixture("k3-tiny-5l"), tiny_5l::Decoder{});
  check_all_inner_values(fixture("k3-tiny-13l"), tiny_13l::Decoder{});
  check_all_inner_values(fixture("kimi-linear-5l"), kimi_linear_5l::Decoder{});
}
