// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <k3/ops/kda_decode_token.hpp>

#include "support/compare.hpp"

namespace k3::test {

/// A batch for KDA in double, with its state; every value is exact in float.
struct KdaProblem {
  KdaConfig g;
  std::size_t rows = 1, slots = 1;
  std::vector<double> x{}, conv{}, log_decay{}, beta{}, state{}, window{};
  std::vector<id> slot{};
};

inline std::vector<double> exact_in_float(const std::vector<double>& values) {
  return converted<double>(converted<float>(values));
}

/// Random inputs, weights and state; row r belongs to slot r / tokens.
inline KdaProblem kda_problem(KdaConfig g, std::size_t slots, std::size_t tokens, std::uint32_t seed) {
  KdaProblem p{g, slots * tokens, slots};
  const std::size_t width = g.heads * g.head_dim, channels = 3 * width;
  p.x = exact_in_float(random_normal(p.rows * channels, seed, 1.5));
  p.conv = exact_in_float(random_normal(channels * g.conv_kernel, seed + 1, 0.7));
  p.log_decay = random_normal(p.rows * width, seed + 2, 1.5);
  for (double& v : p.log_decay) v = -std::min(std::abs(v), 5.0);
  p.log_decay = exact_in_float(p.log_decay);
  p.beta = exact_in_float(random_normal(p.rows * g.heads, seed + 3, 2));
  p.state = exact_in_float(random_normal(slots * width * g.head_dim, seed + 4, 0.5));
  p.window = exact_in_float(random_normal(slots * channels * (g.conv_kernel - 1), seed + 5));
  for (std::size_t r = 0; r < p.rows; ++r) p.slot.push_back(static_cast<id>(r / tokens));
  return p;
}

/// The definition, in double, one value column at a time. Changes p.state and p.window, returns out [rows, H*D].
/// `sigmoid_of_beta` false is a deliberate fault that the tests must be able to see.
inline std::vector<double> kda_oracle(KdaProblem& p, bool sigmoid_of_beta = true) {
  const std::size_t H = p.g.heads, D = p.g.head_dim, K = p.g.conv_kernel, width = H * D;
  std::vector<double> out(p.rows * width);
  for (std::size_t r = 0; r < p.rows; ++r) {
    if (p.slot[r] < 0) continue;
    const std::size_t slot = static_cast<std::size_t>(p.slot[r]);
    std::vector<double> y(3 * width);
    for (std::size_t c = 0; c < 3 * width; ++c) {
      double* past = p.window.data() + (slot * 3 * width + c) * (K - 1);
      std::vector<double> inputs(past, past + (K - 1));
      inputs.push_back(p.x[r * 3 * width + c]);
      double sum = 0;
      for (std::size_t j = 0; j < K; ++j) sum += p.conv[c * K + j] * inputs[j];
      for (std::size_t j = 0; j + 1 < K; ++j) past[j] = inputs[j + 1];
      y[c] = sum / (1 + std::exp(-sum));
    }
    for (std::size_t h = 0; h < H; ++h) {
      const double *q = &y[h * D], *k = &y[width + h * D], *v = &y[2 * width + h * D];
      double qq = 1e-6f, kk = 1e-6f;
      for (std::size_t d = 0; d < D; ++d) qq += q[d] * q[d], kk += k[d] * k[d];
      const double logit = p.beta[r * H + h], beta = sigmoid_of_beta ? 1 / (1 + std::exp(-logit)) : logit;
      for (std::size_t e = 0; e < D; ++e) {
        double read = 0, result = 0;
        double* column = p.state.data() + (slot * H + h) * D * D + e;
        for (std::size_t d = 0; d < D; ++d) column[d * D] *= std::exp(p.log_decay[r * width + h * D + d]);
        for (std::size_t d = 0; d < D; ++d) read += column[d * D] * k[d] / std::sqrt(kk);
        for (std::size_t d = 0; d < D; ++d) column[d * D] += k[d] / std::sqrt(kk) * beta * (v[e] - read);
        for (std::size_t d = 0; d < D; ++d) result += column[d * D] * q[d] / std::sqrt(qq) / std::sqrt(double(D));
        out[r * width + h * D + e] = result;
      }
    }
  }
  return out;
}

/// What a run of the library left behind.
template <class T, class State, class Window>
struct KdaRun {
  std::vector<T> out;
  std::vector<State> state;
  std::vector<Window> window;
};

/// The library on a problem: X the type of x_qkv, with State and Window memory. The problem keeps its state.
template <class X, class State = accumulator_t<X>, class Window = X, class G>
KdaRun<accumulator_t<X>, State, Window> run_kda(const host& exec, G geometry, const KdaProblem& p) {
  using Acc = accumulator_t<X>;
  const std::size_t H = p.g.heads, D = p.g.head_dim, K = p.g.conv_kernel, width = H * D;
  const auto x = converted<X>(p.x);
  const auto conv = converted<Acc>(p.conv);
  const auto log_decay = converted<Acc>(p.log_decay);
  const auto beta = converted<Acc>(p.beta);
  KdaRun<Acc, State, Window> run{std::vector<Acc>(p.rows * width, Acc(7)), converted<State>(p.state),
                                 converted<Window>(p.window)};
  const KdaStateView<State, Window> state{view(run.state, p.slots, H, D, D),
                                          view(run.window, p.slots, 3 * width, K - 1)};
  kda_decode_token(exec, geometry, view(x, p.rows, 3 * width), kda_conv_weights(geometry, view(conv, 3 * width, K)),
                   view(log_decay, p.rows, width), view(beta, p.rows, H), view(p.slot), state,
                   view(run.out, p.rows, width));
  return run;
}

/// Fails the test where two runs differ in any bit of output, state or window.
template <class Run>
void check_same_run(const Run& got, const Run& want) {
  check(same_bits(got.out, want.out));
  check(same_bits(got.state, want.state));
  check(same_bits(got.window, want.window));
}

/// The versions of the vector code that this machine has.
inline std::vector<Isa> available_isas() {
  std::vector<Isa> result;
  for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512})
    if (isa <= best_isa()) result.push_back(isa);
  return result;
}

}  // namespace k3::test
