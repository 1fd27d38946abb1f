// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/gated_rms_norm.hpp>
#include <k3/ops/kda_gate.hpp>

#include "cuda/device_test.hpp"
#include "cuda/kda_device.hpp"
#include "support/kda_oracle.hpp"

// Random KDA problems for the device, and the host's results for them.
namespace k3::test {

/// Heads of odd sizes, of the staged kernel's and its neighbours.
inline std::vector<KdaConfig> kda_shapes() {
  return all_or_few<KdaConfig>({{1, 1, 4},
                                {2, 2, 1},
                                {3, 5, 3},
                                {2, 7, 4},
                                {1, 13, 2},
                                {3, 24, 4},
                                {2, 31, 5},
                                {3, 64, 4},
                                {1, 97, 4},
                                {3, 128, 4},
                                {2, 128, 1},
                                {1, 128, 7},
                                {2, 129, 4},
                                {3, 256, 4},
                                {1, 300, 3},
                                {1, 1024, 2}},
                               {{2, 2, 1}, {2, 7, 4}, {2, 31, 5}, {3, 128, 4}, {1, 129, 4}});
}

inline std::string name(const KdaConfig& g) {
  return std::to_string(g.heads) + " heads of " + std::to_string(g.head_dim) + ", kernel " +
         std::to_string(g.conv_kernel) + (g.gate_lower_bound ? ", bounded" : "");
}

/// A random problem whose numbers are exact in bf16 where X is; row r belongs to slot r / tokens.
template <class X>
KdaDeviceInputs<X> kda_device_problem(KdaConfig g, size slots, size tokens, std::uint32_t seed) {
  const KdaProblem p = kda_problem(g, slots, tokens, seed);
  const size width = kda_width(g);
  const auto normal = [&](size count, std::uint32_t offset, double scale) {
    return random_normal(count, seed + offset, scale);
  };
  const auto weights = [&](const std::vector<double>& values) { return converted<float>(converted<bf16>(values)); };
  KdaDeviceInputs<X> in;
  in.g = g, in.rows = p.rows, in.slots = slots;
  in.x = converted<X>(p.x), in.window = converted<X>(p.window), in.state = converted<float>(p.state), in.slot = p.slot;
  in.conv = weights(p.conv);
  in.log_decay = converted<float>(p.log_decay), in.beta_float = converted<float>(p.beta),
  in.beta = converted<X>(p.beta);
  in.z = converted<X>(normal(p.rows * width, 10, 2)), in.gate = converted<X>(normal(p.rows * width, 11, 2));
  in.a_log = weights(normal(g.heads, 12, 0.5)), in.dt_bias = weights(normal(width, 13, 1));
  in.o_norm = weights(normal(g.head_dim, 14, 1));
  in.a_log.push_back(NAN);  // padding that must not be read
  return in;
}

/// The host's result in T for both activations and accumulation where T is a float or double, or in bf16.
template <class T, class X>
KdaDeviceOutputs<T, T> on_host(const KdaDeviceInputs<X>& given, std::vector<accumulator_t<T>>* core_out = nullptr,
                               bool from_log_decay = false) {
  using Acc = accumulator_t<T>;
  const KdaConfig g = given.g;
  const size rows = given.rows, width = kda_width(g), channels = kda_conv_channels(g);
  const auto x = converted<T>(given.x), z = converted<T>(given.z), gate = converted<T>(given.gate);
  auto beta = converted<Acc>(from_log_decay ? given.beta_float : converted<float>(given.beta));
  auto log_decay = converted<Acc>(given.log_decay);
  auto state = converted<Acc>(given.state);
  KdaDeviceOutputs<T, T> result;
  result.window = converted<T>(given.window);
  std::vector<Acc> core(rows * width);
  result.out.resize(rows * width);
  const host exec{.isa = Isa::plain};
  if (!from_log_decay)
    kda_gate(exec, g, view(z, rows, width), view(given.a_log), view(given.dt_bias), g.gate_lower_bound,
             view(log_decay, rows, width));
  kda_decode_token(exec, g, view(x, rows, channels), kda_conv_weights(g, view(given.conv, channels, g.conv_kernel)),
                   view(log_decay, rows, width), view(beta, rows, g.heads), view(given.slot),
                   KdaStateView<Acc, T>{view(state, given.slots, g.heads, g.head_dim, g.head_dim),
                                        view(result.window, given.slots, channels, g.conv_kernel - 1)},
                   view(core, rows, width));
  if (core_out) *core_out = core;
  gated_rms_norm(exec, g, view(core, rows, width), view(gate, rows, width), view(given.o_norm),
                 static_cast<Acc>(given.norm_eps), view(result.out, rows, width));
  result.state = converted<float>(state);
  return result;
}

/// Equal bits, and nothing written beside them.
template <class Outputs>
void check_same(const Outputs& got, const Outputs& want) {
  check(same_bits(got.out, want.out));
  check(same_bits(got.state, want.state));
  check(same_bits(got.window, want.window));
  CHECK(got.gaps_kept);
}

/// `count` rows of a problem from row `first` on, with the whole state.
template <class X>
KdaDeviceInputs<X> rows_of(const KdaDeviceInputs<X>& in, size first, size count) {
  const auto cut = [&](auto& v) {
    const size width = v.size() / in.rows;
    v.erase(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(first * width));
    v.resize(count * width);
  };
  KdaDeviceInputs<X> result = in;
  cut(result.x), cut(result.z), cut(result.beta), cut(result.gate), cut(result.log_decay), cut(result.beta_float);
  cut(result.slot);
  result.rows = count;
  return result;
}

/// `count` elements from `first` on.
template <class V>
V slice(const V& v, size first, size count) {
  const auto begin = v.begin() + static_cast<std::ptrdiff_t>(first);
  return V(begin, begin + static_cast<std::ptrdiff_t>(count));
}

}  // namespace k3::test
