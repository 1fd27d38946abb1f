// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include <k3/core/environment.hpp>
#include <k3/geometry/k3_config.hpp>

namespace k3 {

/// Deliberate faults, for tests that must notice them and for studies of a part's worth. The default changes nothing.
struct Ablation {
  float attnres_mix = 1.0f;                ///< 0: the running stream alone; 1: the trained mixture
  std::optional<size> force_expert{};      ///< router logits become 0, this expert's 8
  std::optional<size> skip_layer{};        ///< this layer does nothing
  size o_proj_tp = 1;                      ///< 2: o_proj as the sum of two column halves, as two ranks would compute it
  std::optional<size> drop_o_proj_rank{};  ///< with o_proj_tp 2: leave this half out

  /// What K3_ATTNRES_MIX and K3_FORCE_EXPERT ask for.
  static Ablation from_env() {
    Ablation result;
    result.attnres_mix = environment().attnres_mix;
    result.force_expert = environment().force_expert;
    return result;
  }
};

/// Throws invalid_argument, naming the field, for an ablation that a model of these sizes cannot have.
inline void check(const Ablation& ablation, size layers, size experts, const char* operation) {
  detail::require(ablation.attnres_mix >= 0.0f && ablation.attnres_mix <= 1.0f, operation, "ablation.attnres_mix",
                  ablation.attnres_mix, "between 0 and 1");
  if (ablation.force_expert)
    detail::require(*ablation.force_expert < experts, operation, "ablation.force_expert", *ablation.force_expert,
                    "below " + std::to_string(experts));
  if (ablation.skip_layer)
    detail::require(*ablation.skip_layer < layers, operation, "ablation.skip_layer", *ablation.skip_layer,
                    "below " + std::to_string(layers));
  detail::require(ablation.o_proj_tp == 1 || ablation.o_proj_tp == 2, operation, "ablation.o_proj_tp",
                  ablation.o_proj_tp, "1 or 2");
  if (ablation.drop_o_proj_rank)
    detail::require(ablation.o_proj_tp == 2 && *ablation.drop_o_proj_rank < 2, operation, "ablation.drop_o_proj_rank",
                    *ablation.drop_o_proj_rank, "0 or 1, with o_proj_tp 2");
}

/// The same for a model of these settings, whose o_proj must have two halves for o_proj_tp 2.
inline void check(const Ablation& ablation, const K3Config& config, const char* operation) {
  check(ablation, config.num_hidden_layers(), config.moe.n_routed, operation);
  for (const MixerKind mixer : config.mixers) {
    const size width = mixer == MixerKind::Kda ? kda_width(config.kda) : mla_v_width(config.mla);
    detail::require(width % ablation.o_proj_tp == 0, operation, "ablation.o_proj_tp", ablation.o_proj_tp,
                    "1: o_proj has an odd number of columns");
  }
}

}  // namespace k3
