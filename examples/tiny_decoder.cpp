// SPDX-License-Identifier: Apache-2.0
// A whole decoder small enough for a unit test, its sizes known to the compiler: every part of the released graph,
// made-up weights, greedy decoding. The run-time geometry must give the same bits.
#include <cstdio>

#include <k3/geometry/presets.hpp>
#include <k3/model/greedy_decode.hpp>
#include <k3/model/synthetic.hpp>

namespace {

using Geometry = k3::tiny::Decoder;

/// Four layers: K K K M, the first one dense, the others with experts; a snapshot of the stream every two layers.
k3::K3Config make_config() {
  k3::K3Config config;
  config.hidden_size = Geometry::hidden;
  config.vocab_size = Geometry::vocab;
  config.intermediate_size = Geometry::dense_intermediate;
  config.attn_res_block_size = Geometry::attn_res_block_size;
  config.first_k_dense_replace = 1;
  config.max_position_embeddings = 64;
  config.mixers = {k3::MixerKind::Kda, k3::MixerKind::Kda, k3::MixerKind::Kda, k3::MixerKind::Mla};
  config.kda = k3::kda_config(Geometry::kda);
  config.mla = k3::mla_config(Geometry::mla);
  config.moe = k3::latent_moe_config(Geometry::moe);
  return config;
}

// example-begin tiny_decoder
template <k3::precision P, class G, class Exec>
auto decode(const Exec& exec, const k3::K3CpuModel& model, G geometry) {
  const std::vector<k3::id> prompt{1, 2, 3};
  k3::Decoder<P, G> decoder(exec, model, geometry, prompt.size(), 1);  // rows a pass, rows with logits
  k3::HybridCache<P> cache = decoder.make_cache(1, 64);                // sequences, positions of each
  return k3::greedy_decode(decoder, cache, 0, k3::view(prompt), {.max_new = 12, .keep_logits = true});
}
// example-end tiny_decoder

}  // namespace

int main() {
  const k3::host exec{};
  const k3::K3CpuModel model = k3::synthetic_model(make_config(), 2.0f);
  const auto fixed = decode<k3::Fp32>(exec, model, Geometry{});
  const auto read = decode<k3::Fp32>(exec, model, k3::decoder_geometry_from(model.config));
  const auto exact = decode<k3::Fp64>(exec, model, Geometry{});

  std::printf("tokens:");
  for (const k3::id token : fixed.tokens) std::printf(" %d", token);
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < exact.logits.size(); ++i)
    for (std::size_t j = 0; j < exact.logits[i].size(); ++j) {
      worst = std::fmax(worst, std::abs(static_cast<double>(fixed.logits[i][j]) - exact.logits[i][j]));
      largest = std::fmax(largest, std::abs(exact.logits[i][j]));
    }
  const bool same = fixed.tokens == read.tokens && fixed.logits == read.logits;
  const bool close = fixed.tokens == exact.tokens && worst < 1e-5 * largest;
  std::printf("\nfixed and run-time geometry: %s logits; float against double: %s\n", same ? "the same" : "DIFFERENT",
              close ? "same tokens, logits within 1e-5" : "WRONG");
  return same && close ? 0 : 1;
}
