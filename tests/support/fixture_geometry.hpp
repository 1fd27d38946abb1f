// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/geometry/decoder_geometry.hpp>

/// The geometries of the checkpoints in tests/data at compile time, to run them through the same code as the run-time
/// ones.
namespace k3::test {

namespace tiny_5l {
struct Kda {
  static constexpr size heads = 4, head_dim = 16, conv_kernel = 4;
  static constexpr std::optional<float> gate_lower_bound = -5.0f;
  static constexpr bool use_full_rank_gate = true;
};
struct Mla {
  static constexpr size heads = 4, qk_nope_head_dim = 16, qk_rope_head_dim = 8, v_head_dim = 16;
  static constexpr size q_lora_rank = 32, kv_lora_rank = 32;
  static constexpr bool mla_use_nope = true, mla_use_output_gate = true;
  static constexpr float norm_eps = 1e-6f;
};
struct LatentMoe {
  static constexpr size hidden = 64, latent = 32, expert_hidden = 32, n_routed = 8, top_k = 2, n_shared = 2;
  static constexpr GluConfig activation{};
  static constexpr bool use_norm = true, renormalize = true;
  static constexpr float routed_scaling_factor = 1.0f;
};
struct Decoder {
  static constexpr size hidden = 64, vocab = 96, dense_intermediate = 96, attn_res_block_size = 2;
  static constexpr float rms_norm_eps = 1e-5f;
  static constexpr GluConfig activation{};
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace tiny_5l

namespace kimi_linear_5l {
struct Kda {
  static constexpr size heads = 3, head_dim = 24, conv_kernel = 4;
  static constexpr std::optional<float> gate_lower_bound = std::nullopt;
  static constexpr bool use_full_rank_gate = false;
};
struct Mla {
  static constexpr size heads = 3, qk_nope_head_dim = 20, qk_rope_head_dim = 12, v_head_dim = 28;
  static constexpr size q_lora_rank = 0, kv_lora_rank = 40;
  static constexpr bool mla_use_nope = true, mla_use_output_gate = false;
  static constexpr float norm_eps = 1e-6f;
};
struct LatentMoe {
  static constexpr size hidden = 64, latent = 0, expert_hidden = 64, n_routed = 10, top_k = 3, n_shared = 1;
  static constexpr GluConfig activation = GluConfig::silu();
  static constexpr bool use_norm = false, renormalize = true;
  static constexpr float routed_scaling_factor = 2.446f;
};
struct Decoder {
  static constexpr size hidden = 64, vocab = 88, dense_intermediate = 104, attn_res_block_size = 0;
  static constexpr float rms_norm_eps = 1e-5f;
  static constexpr GluConfig activation = GluConfig::silu();
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace kimi_linear_5l

}  // namespace k3::test
