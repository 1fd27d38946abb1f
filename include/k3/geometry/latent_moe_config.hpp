// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <optional>

#include <k3/core/error.hpp>

namespace k3 {

/// The activation of a gated MLP. `situ`: [b1 tanh(g/b1) sigmoid(g)] [b2 tanh(u/b2)]; `silu`: g sigmoid(g) u.
/// Source: `hidden_act`, `activation_situ_beta`, `activation_situ_linear_beta` (null: the up branch is uncapped).
struct GluConfig {
  enum class Kind : unsigned char { situ, silu };
  Kind kind = Kind::situ;
  float beta = 4.0f;
  std::optional<float> linear_beta = 25.0f;

  static constexpr GluConfig silu() { return {Kind::silu, 1.0f, std::nullopt}; }

  friend bool operator==(const GluConfig&, const GluConfig&) = default;
};

/// What the mixture-of-experts operations read of a geometry. `latent` 0 means that experts work on the hidden vector.
template <class G>
concept latent_moe_geometry = requires(G g) {
  { g.hidden } -> std::convertible_to<size>;
  { g.latent } -> std::convertible_to<size>;
  { g.expert_hidden } -> std::convertible_to<size>;
  { g.n_routed } -> std::convertible_to<size>;
  { g.top_k } -> std::convertible_to<size>;
  { g.n_shared } -> std::convertible_to<size>;
  { g.activation } -> std::convertible_to<GluConfig>;
  { g.use_norm } -> std::convertible_to<bool>;
  { g.renormalize } -> std::convertible_to<bool>;
  { g.routed_scaling_factor } -> std::convertible_to<float>;
};

/// Run-time geometry of a LatentMoE layer. Source: `hidden_size`, `routed_expert_hidden_size`, `moe_intermediate_size`,
/// `num_experts`, `num_experts_per_token`, `num_shared_experts`, `latent_moe_use_norm`, `moe_renormalize`.
struct LatentMoeConfig {
  size hidden = 0;
  size latent = 0;  ///< 0: no latent space
  size expert_hidden = 0;
  size n_routed = 0;
  size top_k = 0;
  size n_shared = 0;
  GluConfig activation{};
  bool use_norm = true;
  bool renormalize = true;
  float routed_scaling_factor = 1.0f;

  /// The released model: 896 experts of 3072 on a latent of 3584, 16 chosen, 2 shared.
  static constexpr LatentMoeConfig production() { return {7168, 3584, 3072, 896, 16, 2, {}, true, true, 1.0f}; }
  /// The 0.40B sibling.
  static constexpr LatentMoeConfig twin_0_40b() { return {1024, 512, 256, 8, 2, 1, {}, true, true, 1.0f}; }

  friend bool operator==(const LatentMoeConfig&, const LatentMoeConfig&) = default;
};

/// Width of what an expert reads and writes: the latent, or the hidden size where there is none.
template <latent_moe_geometry G>
K3_HOST_DEVICE constexpr size moe_expert_width(G g) {
  return g.latent > 0 ? g.latent : g.hidden;
}
/// Width of the shared experts, stored as one MLP: n_shared * expert_hidden.
template <latent_moe_geometry G>
K3_HOST_DEVICE constexpr size moe_shared_width(G g) {
  return g.n_shared * g.expert_hidden;
}
/// Weights of one routed expert: w1, w3 [expert_hidden, width] and w2 [width, expert_hidden].
template <latent_moe_geometry G>
K3_HOST_DEVICE constexpr size moe_expert_weights(G g) {
  return 3 * g.expert_hidden * moe_expert_width(g);
}
/// Weights of the shared experts' MLP on the full hidden vector.
template <latent_moe_geometry G>
K3_HOST_DEVICE constexpr size moe_shared_weights(G g) {
  return 3 * g.hidden * moe_shared_width(g);
}

namespace detail {

/// Throws invalid_argument where a cap of SiTU is 0 or not finite.
inline void require_caps(const char* operation, const GluConfig& config) {
  const auto usable = [](float cap) { return cap != 0.0f && cap - cap == 0.0f; };
  if (config.kind != GluConfig::Kind::situ) return;
  require(usable(config.beta), operation, "beta", config.beta, "finite and not 0");
  if (config.linear_beta)
    require(usable(*config.linear_beta), operation, "linear_beta", *config.linear_beta, "finite and not 0");
}

}  // namespace detail

/// Throws invalid_argument where a size is zero (latent and n_shared may be), top_k exceeds the experts, a product
/// overflows, a cap of the activation is 0 or not finite, or the scaling factor is not finite.
template <latent_moe_geometry G>
void check(G g, const char* operation) {
  detail::require(g.hidden > 0, operation, "geometry.hidden", g.hidden, "at least 1");
  detail::require(g.expert_hidden > 0, operation, "geometry.expert_hidden", g.expert_hidden, "at least 1");
  detail::require(g.n_routed > 0 && g.n_routed < (size{1} << 31), operation, "geometry.n_routed", g.n_routed,
                  "between 1 and 2^31 - 1");
  detail::require(g.top_k > 0 && g.top_k <= g.n_routed, operation, "geometry.top_k", g.top_k,
                  "between 1 and the number of experts");
  detail::require(g.latent > 0 || !g.use_norm, operation, "geometry.use_norm", true, "false without a latent width");
  const size limit = size{1} << 31;
  detail::require(g.hidden < limit && g.latent < limit && g.expert_hidden < limit && g.n_shared < limit, operation,
                  "geometry's widest part", detail::larger(g.hidden, detail::larger(g.latent, g.expert_hidden)),
                  "below 2^31");
  detail::checked_product(operation, "the experts' weights",
                          detail::checked_product(operation, "an expert", g.hidden + g.latent, g.expert_hidden),
                          3 * g.n_routed);
  detail::checked_product(operation, "the shared width", g.n_shared, g.expert_hidden);
  detail::require_caps(operation, g.activation);
  detail::require(g.routed_scaling_factor - g.routed_scaling_factor == 0.0f, operation,
                  "geometry.routed_scaling_factor", float{g.routed_scaling_factor}, "finite");
}

/// The run-time twin of any mixture-of-experts geometry.
template <latent_moe_geometry G>
constexpr LatentMoeConfig latent_moe_config(G g) {
  return {g.hidden,   g.latent,     g.expert_hidden, g.n_routed,    g.top_k,
          g.n_shared, g.activation, g.use_norm,      g.renormalize, g.routed_scaling_factor};
}

}  // namespace k3
