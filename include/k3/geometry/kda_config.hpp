// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <optional>

#include <k3/core/error.hpp>

namespace k3 {

/// What the KDA operations read of a geometry: H heads of D channels (keys and values alike) and the convolution's
/// taps. A geometry is passed by value; its fields are run-time members or `static constexpr` ones of an empty type.
template <class G>
concept kda_geometry = requires(G g) {
  { g.heads } -> std::convertible_to<size>;
  { g.head_dim } -> std::convertible_to<size>;
  { g.conv_kernel } -> std::convertible_to<size>;
};

/// Run-time geometry of a Kimi Delta Attention layer. Source: `linear_attn_config`.
struct KdaConfig {
  size heads = 0;
  size head_dim = 0;
  size conv_kernel = 4;
  std::optional<float> gate_lower_bound{};  ///< set: g = bound * sigmoid(..); unset: g = -exp(A_log) * softplus(..)
  bool use_full_rank_gate = true;           ///< one g_proj instead of g_a_proj, g_b_proj

  /// The released model's 96 heads of 128.
  static constexpr KdaConfig production() { return {96, 128, 4, -5.0f, true}; }
  /// The 0.40B sibling's 8 heads of 32, with the unbounded gate.
  static constexpr KdaConfig twin_0_40b() { return {8, 32, 4, std::nullopt, true}; }

  friend bool operator==(const KdaConfig&, const KdaConfig&) = default;
};

/// The largest head_dim: a head's scratch lies on the stack of a host's thread, in a GPU's shared memory.
inline constexpr size kda_max_head_dim = 1024;

/// Added to the sum (not the mean) of squares under the root when q and k are normalised.
inline constexpr float KDA_L2_EPS = 1e-6f;

/// Width of q, k, v and of the output: H * D.
template <kda_geometry G>
K3_HOST_DEVICE constexpr size kda_width(G g) {
  return g.heads * g.head_dim;
}
/// Channels of the convolution: the q, k and v blocks, 3 * H * D.
template <kda_geometry G>
K3_HOST_DEVICE constexpr size kda_conv_channels(G g) {
  return 3 * g.heads * g.head_dim;
}
/// Elements of one sequence's recurrent state [H, D key, D value].
template <kda_geometry G>
K3_HOST_DEVICE constexpr size kda_state_elements(G g) {
  return g.heads * g.head_dim * g.head_dim;
}
/// Elements of one sequence's convolution window [3 * H * D, kernel - 1].
template <kda_geometry G>
K3_HOST_DEVICE constexpr size kda_conv_elements(G g) {
  return kda_conv_channels(g) * (g.conv_kernel - 1);
}

namespace detail {

/// Throws invalid_argument where the gate has a bound that is not finite and below 0.
inline void require_gate_bound(const char* operation, const char* argument, const std::optional<float>& bound) {
  if (bound) require(*bound < 0 && *bound - *bound == 0, operation, argument, *bound, "finite and below 0");
}

}  // namespace detail

/// Throws invalid_argument where a size is zero or the state's element count overflows, head_dim passes
/// kda_max_head_dim, or the gate's bound is not finite and below 0.
template <kda_geometry G>
void check(G g, const char* operation) {
  detail::require(g.heads > 0, operation, "geometry.heads", g.heads, "at least 1");
  detail::require(g.head_dim > 0, operation, "geometry.head_dim", g.head_dim, "at least 1");
  detail::require(g.conv_kernel > 0, operation, "geometry.conv_kernel", g.conv_kernel, "at least 1");
  const size width = detail::checked_product(operation, "geometry.heads * head_dim", g.heads, g.head_dim);
  detail::checked_product(operation, "the state's size", width, g.head_dim);
  detail::checked_product(operation, "the convolution window",
                          detail::checked_product(operation, "3 * width", 3, width), g.conv_kernel);
  detail::require(g.head_dim <= kda_max_head_dim, operation, "geometry.head_dim", g.head_dim,
                  "at most kda_max_head_dim (1024)");
  if constexpr (requires { g.gate_lower_bound; })
    detail::require_gate_bound(operation, "geometry.gate_lower_bound", g.gate_lower_bound);
}

/// The run-time twin of any KDA geometry that has all of KdaConfig's fields.
template <kda_geometry G>
constexpr KdaConfig kda_config(G g) {
  return {g.heads, g.head_dim, g.conv_kernel, g.gate_lower_bound, g.use_full_rank_gate};
}

}  // namespace k3
