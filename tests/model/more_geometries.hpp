// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "support/fixture_geometry.hpp"

/// The geometries of k3-tiny-13l and of examples/data/austen at compile time, by what they have other than k3-tiny-5l.
namespace k3::test {

namespace tiny_13l {
struct Kda : tiny_5l::Kda {
  static constexpr size heads = 3;
};
struct Mla : tiny_5l::Mla {
  static constexpr size heads = 3, v_head_dim = 24, q_lora_rank = 40;
};
struct LatentMoe : tiny_5l::LatentMoe {
  static constexpr size hidden = 96, latent = 64, n_routed = 16, top_k = 4, n_shared = 1;
};
struct Decoder : tiny_5l::Decoder {
  static constexpr size hidden = 96, vocab = 256, dense_intermediate = 80, attn_res_block_size = 3;
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace tiny_13l

namespace austen_9l {
struct Kda : tiny_5l::Kda {
  static constexpr size heads = 5, head_dim = 32;
};
struct Mla : tiny_5l::Mla {
  static constexpr size heads = 5, qk_nope_head_dim = 32, qk_rope_head_dim = 16, v_head_dim = 32;
  static constexpr size q_lora_rank = 64, kv_lora_rank = 64;
};
struct LatentMoe : tiny_5l::LatentMoe {
  static constexpr size hidden = 160, latent = 96, expert_hidden = 96, n_routed = 24, top_k = 4, n_shared = 1;
};
struct Decoder : tiny_5l::Decoder {
  static constexpr size hidden = 160, vocab = 2048, dense_intermediate = 288, attn_res_block_size = 3;
  static constexpr Kda kda{};
  static constexpr Mla mla{};
  static constexpr LatentMoe moe{};
};
}  // namespace austen_9l

}  // namespace k3::test
