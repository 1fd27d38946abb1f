// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

#include <k3/core/bf16.hpp>

namespace k3 {

/// The number types of a forward pass. Weights keep the type they are stored in, whatever the precision.
/// `activation` holds everything the reference rounds: embeddings, outputs of linears and norms, q, latent, the
/// residual stream, snapshots, conv windows and latent caches; storing to it is the rounding. `accumulator` holds what
/// it does not round: router logits and weights, log-decay, normalised q and k, softmax statistics, AttnRes mixes,
/// logits. `state` is the KDA state's type.
template <class P>
concept precision = real<typename P::activation> && real<typename P::accumulator> && real<typename P::state> &&
                    std::same_as<typename P::accumulator, accumulator_t<typename P::activation>>;

/// All double: the oracle.
struct Fp64 {
  using activation = double;
  using accumulator = double;
  using state = double;
  static constexpr const char* name = "fp64";
};

/// All float.
struct Fp32 {
  using activation = float;
  using accumulator = float;
  using state = float;
  static constexpr const char* name = "fp32";
};

/// bf16 activations and caches, float arithmetic and KDA state, rounded where the released model rounds.
struct Bf16 {
  using activation = bf16;
  using accumulator = float;
  using state = float;
  static constexpr const char* name = "bf16";
};

static_assert(precision<Fp64> && precision<Fp32> && precision<Bf16>);

}  // namespace k3
