// SPDX-License-Identifier: Apache-2.0
// K3_CUDA_KDA=0 and K3_CUDA_MLA=0: that mixer's layers run on the host, in every step, and no step is captured.

#include <cstdlib>

#include "cuda/decoder_device.hpp"
#include "cuda/small_model.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// The environment with a variable set, read as a process that begins with it does.
Environment environment_with(const char* name) {
  ::setenv(name, "0", 1);
  const Environment result = k3::detail::parse_environment();
  ::unsetenv(name);
  return result;
}

/// Which layers' memory on the host one token changes.
std::vector<size> layers_changed_by(DeviceRunner& runner, const std::vector<id>& tokens, size position) {
  const auto before = runner.host_memory(0);
  feed(runner, 0, tokens, position, 1, true);
  const auto after = runner.host_memory(0);
  std::vector<size> changed;
  for (size layer = 0; layer < before.size(); ++layer)
    if (after[layer] != before[layer]) changed.push_back(layer);
  return changed;
}

std::vector<size> layers_of(const K3Graph& graph, bool kda, bool mla) {
  std::vector<size> layers;
  for (const K3LayerSpec& layer : graph.layers)
    if (layer.mixer == MixerKind::Kda ? kda : mla) layers.push_back(layer.index);
  return layers;
}

}  // namespace

TEST_CASE("device decoder: a mixer that is switched off runs on the host, in each step, uncaptured, for equal tokens") {
  const Environment no_kda = environment_with("K3_CUDA_KDA"), no_mla = environment_with("K3_CUDA_MLA");
  const size count = small_only() ? 3 : 8;
  for (const Subject& subject : subjects(1))
    for (const bool kda : {false, true})
      for (const bool mla : {false, true}) {
        if (small_only() && kda && mla) continue;
        RunnerOptions options;
        if (kda) options.kda_on_host = !no_kda.cuda_kda;
        if (mla) options.mla_on_host = !no_mla.cuda_mla;
        options.without_kda = kda, options.without_mla = mla;
        INFO(subject.name << (kda ? ", KDA on the host" : "") << (mla ? ", MLA on the host" : ""));
        CHECK(options.kda_on_host == kda);
        CHECK(options.mla_on_host == mla);
        const std::vector<size> expected = layers_of(subject.model->graph, kda, mla);
        CHECK(expected.empty() == (!kda && !mla));
        auto runner = make_device_runner(*subject.model, options);
        std::vector<id> tokens = subject.prompt;
        feed(*runner, 0, tokens, 0, tokens.size(), true);
        size host_layers = 0;
        for (size i = 0; i + 1 < count; ++i) {
          CHECK(runner->argmax(0) == subject.generated[i]);
          check(compare(runner->logits(), subject.logits[i], 1e-4, 0, true));
          tokens.push_back(subject.generated[i]);
          const std::vector<size> changed = layers_changed_by(*runner, tokens, tokens.size() - 1);
          CHECK(changed == expected);
          host_layers += changed.size();
        }
        CHECK(runner->argmax(0) == subject.generated[count - 1]);
        CHECK(host_layers == (count - 1) * expected.size());
        CHECK(runner->captured_steps() == (kda || mla ? 0u : 1u));
      }
}

TEST_CASE("device decoder: without a mixer's weights on the device, that mixer cannot run there") {
  // What the case above rests on: a device mixer would have been noticed.
  const Subject subject = subjects(1).front();
  for (const bool kda : {true, false}) {
    RunnerOptions options;
    (kda ? options.without_kda : options.without_mla) = true;
    auto runner = make_device_runner(*subject.model, options);
    CHECK_THROWS_AS(feed(*runner, 0, subject.prompt, 0, 1, true), invalid_argument);
  }
}
