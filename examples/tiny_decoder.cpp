// SPDX-License-Identifier: Apache-2.0
// A whole decoder on the host: greedy decoding, the sizes known to the compiler or read at run time with the same bits.
// tiny_decoder.cu is the same on a GPU.
#include <cstdio>

#include <k3/model/greedy_decode.hpp>

#include "tiny_model.hpp"

namespace {

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
  const k3::K3CpuModel model = make_model();
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
