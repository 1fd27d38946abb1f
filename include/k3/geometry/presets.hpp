// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/geometry/decoder_geometry.hpp>

/// Compile-time geometries: empty types whose fields are constants, for code that should know its sizes. The run-time
/// twin of each is `runtime_geometry(kimi_k3::Decoder{})`, `kda_config(kimi_k3::Kda{})` and so on.
namespace k3 {

/// Kimi K3 as released: 93 layers, 2.78 T parameters.
namespace kimi_k3 {
struct Kda {
  static constexpr size heads = 96, head_dim = 128, conv_kernel = 4;
  static constexpr std::optional<float> gate_lower_bound = -5.0f;
  static constexpr bool use_full_rank_gate = true;
};
struct Mla {
  static constexpr size heads = 96, qk_nope_head_dim = 128, qk_rope_head_dim = 64, v_head_dim = 128;
  static constexpr size q_lora_rank = 1536, kv_lora_rank = 512;
  static constexpr bool mla_use_nope = true, mla_use_output_gate = true;
  static constexpr float norm_eps = 1e-6f;
};
struct LatentMoe {
  static constexpr size hidden = 7168, latent = 3584, expert_hidden = 3072, n_routed = 896, top_k = 16, n_shared = 2;
  static constexpr GluConfig activation{};
  static constexpr bool use_norm = true, renormalize = true;
  static constexpr float routed_scaling_factor = 1.0f;
};
struct Decoder {
  static constexpr size hidden = 7168, vocab = 163840, dense_intermediate = 33792, attn_res_block_size = 12;
  static constexpr float rms_norm_eps = 1e-5f;
  static constexpr GluConfig activation{};
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace kimi_k3

/// The 0.40B sibling: the same graph with 8 layers and the unbounded gate.
namespace kimi_k3_0_4b {
struct Kda {
  static constexpr size heads = 8, head_dim = 32, conv_kernel = 4;
  static constexpr std::optional<float> gate_lower_bound = std::nullopt;
  static constexpr bool use_full_rank_gate = true;
};
struct Mla {
  static constexpr size heads = 8, qk_nope_head_dim = 64, qk_rope_head_dim = 32, v_head_dim = 64;
  static constexpr size q_lora_rank = 256, kv_lora_rank = 128;
  static constexpr bool mla_use_nope = true, mla_use_output_gate = true;
  static constexpr float norm_eps = 1e-6f;
};
struct LatentMoe {
  static constexpr size hidden = 1024, latent = 512, expert_hidden = 256, n_routed = 8, top_k = 2, n_shared = 1;
  static constexpr GluConfig activation{};
  static constexpr bool use_norm = true, renormalize = true;
  static constexpr float routed_scaling_factor = 1.0f;
};
struct Decoder {
  static constexpr size hidden = 1024, vocab = 163840, dense_intermediate = 2048, attn_res_block_size = 4;
  static constexpr float rms_norm_eps = 1e-5f;
  static constexpr GluConfig activation{};
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace kimi_k3_0_4b

/// Kimi-Linear-48B-A3B: the older release, without Attention Residuals, latent space, query rank and MLA gate.
namespace kimi_linear_48b {
struct Kda {
  static constexpr size heads = 32, head_dim = 128, conv_kernel = 4;
  static constexpr std::optional<float> gate_lower_bound = std::nullopt;
  static constexpr bool use_full_rank_gate = false;
};
struct Mla {
  static constexpr size heads = 32, qk_nope_head_dim = 128, qk_rope_head_dim = 64, v_head_dim = 128;
  static constexpr size q_lora_rank = 0, kv_lora_rank = 512;
  static constexpr bool mla_use_nope = true, mla_use_output_gate = false;
  static constexpr float norm_eps = 1e-6f;
};
struct LatentMoe {
  static constexpr size hidden = 2304, latent = 0, expert_hidden = 1024, n_routed = 256, top_k = 8, n_shared = 1;
  static constexpr GluConfig activation = GluConfig::silu();
  static constexpr bool use_norm = false, renormalize = true;
  static constexpr float routed_scaling_factor = 2.446f;
};
struct Decoder {
  static constexpr size hidden = 2304, vocab = 163840, dense_intermediate = 9216, attn_res_block_size = 0;
  static constexpr float rms_norm_eps = 1e-5f;
  static constexpr GluConfig activation = GluConfig::silu();
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace kimi_linear_48b

/// Small enough for a unit test of a few microseconds; every part of the released graph is in it.
namespace tiny {
struct Kda {
  static constexpr size heads = 2, head_dim = 4, conv_kernel = 4;
  static constexpr std::optional<float> gate_lower_bound = -5.0f;
  static constexpr bool use_full_rank_gate = true;
};
struct Mla {
  static constexpr size heads = 2, qk_nope_head_dim = 4, qk_rope_head_dim = 2, v_head_dim = 4;
  static constexpr size q_lora_rank = 8, kv_lora_rank = 6;
  static constexpr bool mla_use_nope = true, mla_use_output_gate = true;
  static constexpr float norm_eps = 1e-6f;
};
struct LatentMoe {
  static constexpr size hidden = 8, latent = 32, expert_hidden = 32, n_routed = 4, top_k = 2, n_shared = 1;
  static constexpr GluConfig activation{};
  static constexpr bool use_norm = true, renormalize = true;
  static constexpr float routed_scaling_factor = 1.0f;
};
struct Decoder {
  static constexpr size hidden = 8, vocab = 16, dense_intermediate = 16, attn_res_block_size = 2;
  static constexpr float rms_norm_eps = 1e-5f;
  static constexpr GluConfig activation{};
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace tiny

static_assert(decoder_geometry<DecoderGeometry> && decoder_geometry<kimi_k3::Decoder>);
static_assert(kda_config(kimi_k3::Kda{}) == KdaConfig::production());
static_assert(mla_config(kimi_k3::Mla{}) == MlaConfig::production());
static_assert(latent_moe_config(kimi_k3::LatentMoe{}) == LatentMoeConfig::production());
static_assert(kda_config(kimi_k3_0_4b::Kda{}) == KdaConfig::twin_0_40b());
static_assert(mla_config(kimi_k3_0_4b::Mla{}) == MlaConfig::twin_0_40b());
static_assert(latent_moe_config(kimi_k3_0_4b::LatentMoe{}) == LatentMoeConfig::twin_0_40b());

}  // namespace k3
