// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/decoder_device.hpp"
#include "cuda/small_model.hpp"
#include "support/differences.hpp"

// What the acceptance gates on the device share.
namespace k3::test {

/// A model and a prompt.
struct Case {
  std::string name;
  const K3CpuModel* model;
  std::vector<id> prompt;
};

inline std::vector<Case> cases() {
  static const K3CpuModel tiny = synthetic_tiny(), small = synthetic_small();
  if (small_only()) return {{"the small model", &small_model(), {3, 14, 1, 5}}};
  std::vector<Case> all = {{"synthetic_small", &small, {3, 14, 1, 5, 9, 2}}};
  all.push_back({"synthetic_tiny", &tiny, {1, 5, 2, 7, 3}});
  for (const char* name : fixture_names) all.push_back({name, &fixture(name).model, fixture(name).ids(2)});
  return all;
}

inline std::unique_ptr<DeviceRunner> runner_for(const Case& c, const Ablation& ablation = {}) {
  RunnerOptions options;
  options.ablation = ablation;
  return make_device_runner(*c.model, options);
}

inline std::vector<id> longer(const Case& c) {
  std::vector<id> tokens = c.prompt;
  tokens.push_back(4);
  return tokens;
}

/// A decoder that has taken the tokens; the last one's logits are there.
inline std::unique_ptr<DeviceRunner> after(const Case& c, const std::vector<id>& tokens,
                                           const Ablation& ablation = {}) {
  auto runner = runner_for(c, ablation);
  feed(*runner, 0, tokens, 0, tokens.size(), true);
  return runner;
}

}  // namespace k3::test
