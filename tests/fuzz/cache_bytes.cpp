// SPDX-License-Identifier: Apache-2.0
// A cache's bytes; the first one chooses the precision and is put right.

#include <k3/geometry/presets.hpp>
#include <k3/model/hybrid_cache.hpp>

#include "fuzz.hpp"

namespace {

template <class P>
void read(const std::vector<unsigned char>& bytes) {
  try {
    const k3::CacheSnapshot<P> snapshot = k3::CacheSnapshot<P>::from_bytes(bytes.data(), bytes.size());
    require_property(snapshot.to_bytes() == bytes, "what is accepted is written back the same");
    k3::K3Graph graph;
    graph.layers = {{0, k3::MixerKind::Kda, k3::MlpKind::Dense}, {1, k3::MixerKind::Mla, k3::MlpKind::Dense}};
    k3::HybridCache<P> cache(graph, k3::kda_config(k3::tiny::Kda{}), k3::mla_config(k3::tiny::Mla{}), 1, 8);
    cache.restore(0, snapshot);
    require_property(cache.to_bytes(0) == bytes, "what is restored is written back the same");
  } catch (const k3::format_error&) {
  } catch (const k3::invalid_argument&) {  // of another geometry
  }
}

}  // namespace

void run_one(std::string_view input) {
  if (input.empty()) return;
  std::vector<unsigned char> bytes(input.begin(), input.end());
  const unsigned char choice = bytes[0];
  bytes[0] = 'K';
  if (choice % 3 == 0) read<k3::Fp32>(bytes);
  if (choice % 3 == 1) read<k3::Bf16>(bytes);
  if (choice % 3 == 2) read<k3::Fp64>(bytes);
}
