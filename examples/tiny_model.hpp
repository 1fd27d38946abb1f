// SPDX-License-Identifier: Apache-2.0
// What the two tiny decoders decode with: every part of the released graph, small enough for a unit test, its sizes
// known to the compiler, and made-up weights.
#pragma once

#include <k3/geometry/presets.hpp>
#include <k3/model/synthetic.hpp>

using Geometry = k3::tiny::Decoder;

/// Four layers: K K K M, the first one dense, the others with experts; a snapshot of the stream every two layers.
inline k3::K3CpuModel make_model() {
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
  return k3::synthetic_model(config, 2.0f);
}
