// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

#include <k3/core/error.hpp>

namespace k3 {

/// What the MLA operations read of a geometry. A head's query and key have a `nope` part of their own and a part of
/// `qk_rope_head_dim` whose key is shared by all heads (and, in these models, never rotated).
template <class G>
concept mla_geometry = requires(G g) {
  { g.heads } -> std::convertible_to<size>;
  { g.qk_nope_head_dim } -> std::convertible_to<size>;
  { g.qk_rope_head_dim } -> std::convertible_to<size>;
  { g.v_head_dim } -> std::convertible_to<size>;
  { g.kv_lora_rank } -> std::convertible_to<size>;
};

/// Run-time geometry of a gated multi-head latent attention layer. Source: the config keys of the same names.
struct MlaConfig {
  size heads = 0;
  size qk_nope_head_dim = 0;
  size qk_rope_head_dim = 0;
  size v_head_dim = 0;
  size q_lora_rank = 0;  ///< 0: one q_proj, no low-rank query
  size kv_lora_rank = 0;
  bool mla_use_nope = true;
  bool mla_use_output_gate = true;
  float norm_eps = 1e-6f;  ///< of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says

  /// The released model: 96 heads, 128 + 64, values 128, ranks 1536 and 512.
  static constexpr MlaConfig production() { return {96, 128, 64, 128, 1536, 512, true, true, 1e-6f}; }
  /// The 0.40B sibling.
  static constexpr MlaConfig twin_0_40b() { return {8, 64, 32, 64, 256, 128, true, true, 1e-6f}; }

  friend bool operator==(const MlaConfig&, const MlaConfig&) = default;
};

/// Width of one head's query and key: nope + rope.
template <mla_geometry G>
K3_HOST_DEVICE constexpr size mla_qk_head_dim(G g) {
  return g.qk_nope_head_dim + g.qk_rope_head_dim;
}
/// Width of the query of all heads.
template <mla_geometry G>
K3_HOST_DEVICE constexpr size mla_q_width(G g) {
  return g.heads * mla_qk_head_dim(g);
}
/// Width of the values (and of gate and output) of all heads.
template <mla_geometry G>
K3_HOST_DEVICE constexpr size mla_v_width(G g) {
  return g.heads * g.v_head_dim;
}
/// Rows of kv_b_proj: per head its nope key rows, then its value rows.
template <mla_geometry G>
K3_HOST_DEVICE constexpr size mla_kv_b_rows(G g) {
  return g.heads * (g.qk_nope_head_dim + g.v_head_dim);
}
/// Width of a cached position: the normed latent, then the raw shared key part.
template <mla_geometry G>
K3_HOST_DEVICE constexpr size mla_cache_width(G g) {
  return g.kv_lora_rank + g.qk_rope_head_dim;
}

namespace detail {

/// Throws invalid_argument unless 0 <= eps < 1.
inline void require_norm_eps(const char* operation, const char* argument, double eps) {
  require(eps >= 0 && eps < 1, operation, argument, eps, "at least 0 and below 1");
}

}  // namespace detail

/// Throws invalid_argument where a size is zero (rope may be), a product overflows, or norm_eps is not in [0, 1).
template <mla_geometry G>
void check(G g, const char* operation) {
  detail::require(g.heads > 0, operation, "geometry.heads", g.heads, "at least 1");
  detail::require(g.qk_nope_head_dim > 0, operation, "geometry.qk_nope_head_dim", g.qk_nope_head_dim, "at least 1");
  detail::require(g.v_head_dim > 0, operation, "geometry.v_head_dim", g.v_head_dim, "at least 1");
  detail::require(g.kv_lora_rank > 0, operation, "geometry.kv_lora_rank", g.kv_lora_rank, "at least 1");
  const size limit = size{1} << 31;
  const size widest = detail::larger(detail::larger(g.qk_nope_head_dim, g.qk_rope_head_dim),
                                     detail::larger(g.v_head_dim, g.kv_lora_rank));
  detail::require(widest < limit, operation, "geometry's widest part", widest, "below 2^31");
  detail::checked_product(operation, "the query's width", g.heads, mla_qk_head_dim(g));
  detail::checked_product(
      operation, "kv_b_proj",
      detail::checked_product(operation, "kv_b_proj's rows", g.heads, g.qk_nope_head_dim + g.v_head_dim),
      g.kv_lora_rank);
  if constexpr (requires { g.norm_eps; }) detail::require_norm_eps(operation, "geometry.norm_eps", g.norm_eps);
}

/// The run-time twin of any MLA geometry that has all of MlaConfig's fields.
template <mla_geometry G>
constexpr MlaConfig mla_config(G g) {
  return {g.heads,        g.qk_nope_head_dim, g.qk_rope_head_dim,    g.v_head_dim, g.q_lora_rank,
          g.kv_lora_rank, g.mla_use_nope,     g.mla_use_output_gate, g.norm_eps};
}

}  // namespace k3
