// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/geometry/decoder_geometry.hpp>

/// The geometries of k3-tiny-13l and of examples/data/austen at compile time, as support/fixture_geometry.hpp has those
/// of the other checkpoints.
namespace k3::test {

namespace tiny_13l {
struct Kda {
  static constexpr size heads = 3, head_dim = 16, conv_kernel = 4;
  static constexpr std::optional<float> gate_lower_bound = -5.0f;
  static constexpr bool use_full_rank_gate = true;
};
struct Mla {
  static constexpr size heads = 3, qk_nope_head_dim = 16, qk_rope_head_dim = 8, v_head_dim = 24;
  static constexpr size q_lora_rank = 40, kv_lora_rank = 32;
  static constexpr bool mla_use_nope = true, mla_use_output_gate = true;
  static constexpr float norm_eps = 1e-6f;
};
struct LatentMoe {
  static constexpr size hidden = 96, latent = 64, expert_hidden = 32, n_routed = 16, top_k = 4, n_shared = 1;
  static constexpr GluConfig activation{};
  static constexpr bool use_norm = true, renormalize = true;
  static constexpr float routed_scaling_factor = 1.0f;
};
struct Decoder {
  static constexpr size hidden = 96, vocab = 256, dense_intermediate = 80, attn_res_block_size = 3;
  static constexpr float rms_norm_eps = 1e-5f;
  static constexpr GluConfig activation{};
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace tiny_13l

namespace austen_9l {
struct Kda {
  static constexpr size heads = 5, head_dim = 32, conv_kernel = 4;
  static constexpr std::optional<float> gate_lower_bound = -5.0f;
  static constexpr bool use_full_rank_gate = true;
};
struct Mla {
  static constexpr size heads = 5, qk_nope_head_dim = 32, qk_rope_head_dim = 16, v_head_dim = 32;
  static constexpr size q_lora_rank = 64, kv_lora_rank = 64;
  static constexpr bool mla_use_nope = true, mla_use_output_gate = true;
  static constexpr float norm_eps = 1e-6f;
};
struct LatentMoe {
  static constexpr size hidden = 160, latent = 96, expert_hidden = 96, n_routed = 24, top_k = 4, n_shared = 1;
  static constexpr GluConfig activation{};
  static constexpr bool use_norm = true, renormalize = true;
  static constexpr float routed_scaling_factor = 1.0f;
};
struct Decoder {
  static constexpr size hidden = 160, vocab = 2048, dense_intermediate = 288, attn_res_block_size = 3;
  static constexpr float rms_norm_eps = 1e-5f;
  static constexpr GluConfig activation{};
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace austen_9l

}  // namespace k3::test
