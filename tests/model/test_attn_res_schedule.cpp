// SPDX-License-Identifier: Apache-2.0
// Which vectors Attention Residuals mix in a pass of 93 layers in blocks of 12, and that they stay what they were.

#include <k3/model/synthetic.hpp>
#include <k3/ops/attnres_softmax_mix.hpp>

#include "support/compare.hpp"
#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

K3CpuModel deep_model() {
  K3Config config = synthetic_tiny().config;
  config.mixers.clear();
  for (size layer = 0; layer < 93; ++layer)
    config.mixers.push_back(layer % 4 == 3 || layer == 92 ? MixerKind::Mla : MixerKind::Kda);
  config.attn_res_block_size = 12;
  config.first_k_dense_replace = 1;
  return synthetic_model(config, 0.2f);
}

/// Keeps the vectors that should be stored, and computes every mixture once more from them.
struct Mixtures {
  const K3CpuModel& model;
  size rows, hidden;
  std::vector<std::vector<float>> stored{};
  std::vector<float> stream{};
  size probs_columns = 0;
  std::vector<size> sources{};  // of each mixture
  std::string part_of{};

  const LayerWeights& layer(size index) const { return model.weights.layers[index]; }

  template <class V>
  static std::vector<float> copy_of(const V& values) {
    std::vector<float> result;
    for (size row = 0; row < values.extent(0); ++row)
      for (size i = 0; i < values.extent(1); ++i) result.push_back(static_cast<float>(values(row, i)));
    return result;
  }

  void add(const std::vector<float>& values, bool empty) {
    for (size i = 0; i < stream.size(); ++i) stream[i] = empty ? values[i] : stream[i] + values[i];
  }

  template <class Norm, class Proj>
  void check_mixture(const std::vector<float>& seen, const Norm& norm, const Proj& proj) {
    std::vector<float> all, out(stream.size());
    for (const auto& one : stored) all.insert(all.end(), one.begin(), one.end());
    attnres_softmax_mix(host{1}, view(std::as_const(all), stored.size(), rows, hidden),
                        view(std::as_const(stream), rows, hidden), norm, proj, model.config.rms_norm_eps,
                        view(out, rows, hidden));
    check(same_bits(seen, out));
    CHECK(probs_columns == stored.size() + 1);
    sources.push_back(probs_columns);
  }

  template <class V>
  void operator()(const char* name, size index, const V& values) {
    const std::string what = name;
    if (what == "embed") stream = copy_of(values);
    if (what.ends_with("_probs")) probs_columns = values.extent(1), part_of = what;
    if (what == "mixed") {
      CAPTURE(index, part_of);
      if (index == 93)
        check_mixture(copy_of(values), model.weights.output_attn_res_norm, model.weights.output_attn_res_proj);
      else if (part_of == "attn_res_probs")
        check_mixture(copy_of(values), layer(index).self_attention_res_norm, layer(index).self_attention_res_proj);
      else
        check_mixture(copy_of(values), layer(index).mlp_res_norm, layer(index).mlp_res_proj);
    }
    if (what == "attn_out") {
      const bool stores = index % 12 == 0;
      if (stores) stored.push_back(stream);  // what entered the layer, unmixed
      add(copy_of(values), stores);
    }
    if (what == "ffn_out") add(copy_of(values), false);
    if (what == "residual") check(same_bits(copy_of(values), stream));
  }
};

}  // namespace

TEST_CASE("cases 37 and 39: 8 stored vectors stay what they were until the last of 186 mixtures") {
  const K3CpuModel model = deep_model();
  const size rows = 2;
  Decoder<Fp32> decoder(host{1}, model, rows, rows);
  HybridCache<Fp32> cache = decoder.make_cache(1, 4);
  const std::vector<id> tokens{3, 5}, slots{0, 0};
  const std::vector<size> positions{0, 1}, wanted{0, 1};
  Mixtures seen{model, rows, model.config.hidden_size};
  decoder.forward(cache, {view(tokens), view(slots), view(positions), view(wanted)}, seen);
  CHECK(seen.stored.size() == 8);
  // The one before layer 0's attention has a single source: it is no mixture, and gives the stream itself.
  REQUIRE(seen.sources.size() == 187);
  CHECK(seen.sources.front() == 1);
  const auto before_attention = [&](size layer) { return seen.sources[2 * layer]; };
  const auto before_mlp = [&](size layer) { return seen.sources[2 * layer + 1]; };
  const size expected[][3] = {{0, 1, 2}, {1, 2, 2}, {11, 2, 2}, {12, 2, 3}, {13, 3, 3}, {84, 8, 9}, {92, 9, 9}};
  for (const auto& [layer, attention, mlp] : expected) {
    CAPTURE(layer);
    CHECK(before_attention(layer) == attention);
    CHECK(before_mlp(layer) == mlp);
  }
  CHECK(seen.sources.back() == 9);
}
