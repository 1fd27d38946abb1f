// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/formula/kda.hpp>
#include <k3/geometry/kda_config.hpp>
#include <k3/ops/require_weight.hpp>

namespace k3 {

/// The log-decay of every head and key channel, g <= 0, from the decay projection z = f_b(f_a(x)):
/// lower_bound * sigmoid(exp(A_log[h]) (z + dt_bias)), or -exp(A_log[h]) softplus(z + dt_bias) where no bound is given.
/// Shapes: z [R, H*D], A_log [H or more: what follows the first H entries is padding and never read], dt_bias [H*D],
/// log_decay [R, H*D] in the accumulator type of z; log_decay may be z. Throws invalid_argument on shapes that do not
/// fit, memory that overlaps in another way and a bound that is not finite and below 0. Accuracy: <= 2e-7 |bound|
/// (bounded), <= 1e-6 relative (softplus) of double for float. Source: `A_log`, `dt_bias`, `gate_lower_bound`.
template <kda_geometry G, host_tensor<2> Z, class ALog, class DtBias, writable_host_tensor<2> Out>
  requires(std::same_as<typename Out::value_type, accumulator_t<typename Z::value_type>>)
void kda_gate(const host& exec, G geometry, const Z& z, const ALog& A_log, const DtBias& dt_bias,
              std::optional<float> lower_bound, const Out& log_decay) {
  using Acc = typename Out::value_type;
  constexpr const char* operation = "kda_gate";
  check(geometry, operation);
  const size rows = z.extent(0), heads = geometry.heads, head_dim = geometry.head_dim, width = kda_width(geometry);
  detail::require_shape(operation, "z", z, rows, width);
  detail::require_weight(operation, "A_log", A_log, detail::larger(heads, A_log.extent(0)));
  detail::require_weight(operation, "dt_bias", dt_bias, width);
  detail::require_gate_bound(operation, "lower_bound", lower_bound);
  detail::require_shape(operation, "log_decay", log_decay, rows, width);
  detail::require_same_or_disjoint(operation, "log_decay", log_decay, "z", z);
  detail::require_disjoint(operation, "log_decay", log_decay, "A_log", A_log, "dt_bias", dt_bias);
  detail::with_typed(A_log, [&](const auto& a_log) {
    detail::with_typed(dt_bias, [&](const auto& bias) {
      // Weighted as 64 bytes a channel: the exponential costs more than the memory traffic.
      detail::parallel_chunks(exec, rows * heads, 1, rows * width * 64, [&](size first, size last) {
        for (size unit = first; unit < last; ++unit) {
          const size row = unit / heads, head = unit % heads;
          const Acc rate = std::exp(static_cast<Acc>(a_log(head)));
          for (size c = head * head_dim; c < (head + 1) * head_dim; ++c) {
            const Acc biased = static_cast<Acc>(z(row, c)) + static_cast<Acc>(bias(c));
            log_decay(row, c) = lower_bound ? kda_log_decay_bounded(biased, rate, static_cast<Acc>(*lower_bound))
                                            : kda_log_decay_softplus(biased, rate);
          }
        }
      });
    });
  });
}

}  // namespace k3
