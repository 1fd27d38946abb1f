// SPDX-License-Identifier: Apache-2.0
// A whole decoder on a GPU: as tiny_decoder.cpp, but for the execution object and for where the weights are.
#include <cstdio>

#include <k3/k3.cuh>

#include "tiny_model.hpp"

namespace {

// example-begin tiny_decoder_cuda
template <k3::precision P, class G>
auto decode(const k3::gpu& exec, const k3::K3DeviceModel& model, G geometry) {
  const std::vector<k3::id> prompt{1, 2, 3};
  k3::DeviceDecoder<P, G> decoder(exec, model, geometry, 64, prompt.size(), 1);  // positions; rows a pass, with logits
  k3::DeviceHybridCache<P> cache = decoder.make_cache(1, 64);                    // sequences, positions of each
  return k3::greedy_decode(decoder, cache, 0, k3::view(prompt), {.max_new = 12, .keep_logits = true});
}
// example-end tiny_decoder_cuda

int run() {
  // example-begin cuda_setup
  const k3::DeviceStream stream;  // of its own, so that steps are captured and replayed
  const k3::gpu exec{stream};
  const k3::K3CpuModel model = make_model();
  const k3::K3DeviceModel moved(model);  // the weights are on the device now
  const auto fixed = decode<k3::Fp32>(exec, moved, Geometry{});
  // example-end cuda_setup
  const auto read = decode<k3::Fp32>(exec, moved, k3::decoder_geometry_from(model.config));
  const auto exact = k3::greedy_decode<k3::Fp64>(k3::host{}, model, {1, 2, 3}, {.max_new = 12, .keep_logits = true});

  std::printf("tokens:");
  for (const k3::id token : fixed.tokens) std::printf(" %d", token);
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < exact.logits.size(); ++i)
    for (std::size_t j = 0; j < exact.logits[i].size(); ++j) {
      worst = std::fmax(worst, std::abs(static_cast<double>(fixed.logits[i][j]) - exact.logits[i][j]));
      largest = std::fmax(largest, std::abs(exact.logits[i][j]));
    }
  const bool same = fixed.tokens == read.tokens && fixed.logits == read.logits;
  const bool close = fixed.tokens == exact.tokens && worst < 1e-4 * largest;
  std::printf("\nfixed and run-time geometry: %s logits; GPU in float against host in double: %s\n",
              same ? "the same" : "DIFFERENT", close ? "same tokens, logits within 1e-4" : "WRONG");
  return same && close ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const k3::cuda_error& problem) {
    std::printf("%s\n", problem.what());
    return 1;
  }
}
