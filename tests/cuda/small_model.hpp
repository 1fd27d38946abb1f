// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/model/synthetic.hpp>

#include "cuda/device_test.hpp"
#include "support/fixture.hpp"

namespace k3::test {

/// Two layers, KDA with a dense MLP and MLA with experts, and a snapshot before each: every kernel of a decoder in few
/// launches, for the sanitizers. `moe` has a hidden size of 8.
inline K3CpuModel make_small_model(const LatentMoeConfig& moe = {8, 8, 8, 4, 2, 1, {}, true, true, 1.0f},
                                   size vocab = 16) {
  K3Config c =
      k3::detail::twin_pattern(8, vocab, 16, {2, 4, 4, -5.0f, true}, {2, 4, 2, 4, 8, 4, true, true, 1e-6f}, moe);
  c.mixers = {MixerKind::Kda, MixerKind::Mla};
  c.attn_res_block_size = 1;
  return synthetic_model(c, 0.5f);
}
inline const K3CpuModel& small_model() {
  static const K3CpuModel model = make_small_model();
  return model;
}

/// A model and a prompt for it with its next tokens and the logits that they were chosen from, in double.
struct Subject {
  std::string name;
  const K3CpuModel* model;
  std::vector<id> prompt, generated;
  std::vector<std::vector<double>> logits;  ///< one row per generated token
};

/// The references' prompts of the given number (0 to 2); where only small shapes are wanted, the small model on the
/// host in their place.
inline std::vector<Subject> subjects(size prompt) {
  std::vector<Subject> all;
  if (small_only()) {
    const std::vector<id> ids = {3, 14, 1, 5};
    const auto run = greedy_decode<Fp64>(host{1}, small_model(), ids, {6, {}, true});
    all.push_back({"the small model", &small_model(), ids, run.tokens, {}});
    for (const auto& row : run.logits) all.back().logits.emplace_back(row.begin(), row.end());
    return all;
  }
  for (const char* name : fixture_names) {
    const Fixture& f = fixture(name);
    all.push_back({name, &f.model, f.ids(prompt), f.generated(prompt), {}});
    for (size row = 0; row < all.back().generated.size(); ++row) all.back().logits.push_back(f.logits(prompt, row));
  }
  return all;
}

/// The first `count` elements.
template <class T>
std::vector<T> first_of(const std::vector<T>& values, size count) {
  return {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace k3::test
