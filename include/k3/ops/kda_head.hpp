// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/kda.hpp>
#include <k3/ops/reduce.hpp>

namespace k3::detail {

/// Operands of one token in one head: rows of head_dim numbers. `value` becomes what is written, `out` is S^T q.
template <class Acc>
struct KdaHeadStep {
  const Acc* decay;
  const Acc* query;
  const Acc* key;
  Acc* value;
  Acc* out;
  Acc beta;
  size head_dim;
};

/// The readable version of a head's arithmetic. The vector versions have the same members.
template <class Accumulator>
struct KdaPlain {
  using Acc = Accumulator;

  template <class In>
  static void exponential(const In* x, Acc* y, size count) {
    for (size i = 0; i < count; ++i) y[i] = std::exp(static_cast<Acc>(x[i]));
  }
  static void silu(Acc* y, size count) {
    for (size i = 0; i < count; ++i) y[i] = k3::silu(y[i]);
  }
  static Acc squares(const Acc* x, size count) {
    return lane_sum<Acc>(count, [&](size i) { return x[i] * x[i]; });
  }
  static void scale(Acc* x, Acc factor, size count) {
    for (size i = 0; i < count; ++i) x[i] *= factor;
  }

  /// One token: decay, read, write, read. `state` is [D key, D value]; every sum runs over the keys in order.
  template <class State>
  static void step(State* state, const KdaHeadStep<Acc>& t, const State*) {
    const size n = t.head_dim;
    Acc *value = t.value, *out = t.out;
    for (size v = 0; v < n; ++v) out[v] = 0;
    for (size k = 0; k < n; ++k) {
      State* row = state + k * n;
      const Acc decay = t.decay[k], key = t.key[k];
      for (size v = 0; v < n; ++v) {
        row[v] = static_cast<State>(decay * static_cast<Acc>(row[v]));
        out[v] += static_cast<Acc>(row[v]) * key;
      }
    }
    for (size v = 0; v < n; ++v) {
      value[v] = kda_delta(value[v], out[v], t.beta);
      out[v] = 0;
    }
    for (size k = 0; k < n; ++k) {
      State* row = state + k * n;
      const Acc key = t.key[k], query = t.query[k];
      for (size v = 0; v < n; ++v) {
        row[v] = static_cast<State>(static_cast<Acc>(row[v]) + key * value[v]);
        out[v] += static_cast<Acc>(row[v]) * query;
      }
    }
  }
};

}  // namespace k3::detail
