// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include <k3/core/precision.hpp>
#include <k3/ops/mla_decode_token.hpp>

#include "support/compare.hpp"
#include "support/differences.hpp"

namespace k3::test {

/// Inputs of an MLA layer's attention for one sequence, every number exact in bf16 so that all precisions start equal.
struct MlaProblem {
  MlaConfig g;
  size tokens;
  std::vector<double> q, kv_a, norm, kv_b, gate;

  MlaProblem(const MlaConfig& geometry, size token_count, std::uint32_t seed) : g(geometry), tokens(token_count) {
    const auto numbers = [&](size count, double scale) {
      std::vector<double> values = random_normal(count, seed++, scale);
      for (double& value : values) value = static_cast<double>(static_cast<float>(bf16(value)));
      return values;
    };
    q = numbers(tokens * mla_q_width(g), 1.5);
    kv_a = numbers(tokens * mla_cache_width(g), 1.0);
    norm = numbers(g.kv_lora_rank, 0.3);
    for (double& value : norm) value = static_cast<double>(static_cast<float>(bf16(1 + value)));
    kv_b = numbers(mla_kv_b_rows(g) * g.kv_lora_rank, 1 / std::sqrt(static_cast<double>(g.kv_lora_rank)));
    gate = numbers(tokens * mla_v_width(g), 1.0);
  }
};

/// The attention output [tokens, heads * v] in expanded form, written from the formulas alone: latent = norm of kv_a's
/// first part, keys and values of every head and position from kv_b, plain softmax. Rows before `first` stay zero.
inline std::vector<double> mla_oracle(const MlaProblem& p, size first = 0) {
  const size nope = p.g.qk_nope_head_dim, rope = p.g.qk_rope_head_dim, v = p.g.v_head_dim, rank = p.g.kv_lora_rank;
  const size width = rank + rope, qk = nope + rope;
  std::vector<double> latent(p.tokens * rank), out(p.tokens * p.g.heads * v);
  for (size t = 0; t < p.tokens; ++t) {
    double squares = 0;
    for (size i = 0; i < rank; ++i) squares += p.kv_a[t * width + i] * p.kv_a[t * width + i];
    const double root = std::sqrt(squares / static_cast<double>(rank) + static_cast<double>(p.g.norm_eps));
    for (size i = 0; i < rank; ++i) latent[t * rank + i] = p.kv_a[t * width + i] / root * p.norm[i];
  }
  const auto expanded = [&](size row, size t) {
    double sum = 0;
    for (size i = 0; i < rank; ++i) sum += p.kv_b[row * rank + i] * latent[t * rank + i];
    return sum;
  };
  for (size h = 0; h < p.g.heads; ++h) {
    std::vector<double> keys(p.tokens * nope), values(p.tokens * v);
    for (size t = 0; t < p.tokens; ++t) {
      for (size i = 0; i < nope; ++i) keys[t * nope + i] = expanded(h * (nope + v) + i, t);
      for (size i = 0; i < v; ++i) values[t * v + i] = expanded(h * (nope + v) + nope + i, t);
    }
    for (size t = first; t < p.tokens; ++t) {
      const double* q = &p.q[(t * p.g.heads + h) * qk];
      std::vector<double> weight(t + 1);
      double largest = -1e300, sum = 0;
      for (size s = 0; s <= t; ++s) {
        double dot = 0;
        for (size i = 0; i < nope; ++i) dot += q[i] * keys[s * nope + i];
        for (size i = 0; i < rope; ++i) dot += q[nope + i] * p.kv_a[s * width + rank + i];
        weight[s] = dot / std::sqrt(static_cast<double>(qk));
        largest = std::max(largest, weight[s]);
      }
      for (double& w : weight) sum += w = std::exp(w - largest);
      for (size i = 0; i < v; ++i) {
        const size at = (t * p.g.heads + h) * v + i;
        double mean = 0;
        for (size s = 0; s <= t; ++s) mean += weight[s] / sum * values[s * v + i];
        out[at] = p.g.mla_use_output_gate ? mean / (1 + std::exp(-p.gate[at])) : mean;
      }
    }
  }
  return out;
}

/// The same inputs in a precision's activation type.
template <class P>
struct MlaInputs {
  using T = typename P::activation;
  MlaConfig g;
  size tokens;
  std::vector<T> q, kv_a, norm, kv_b, gate;

  explicit MlaInputs(const MlaProblem& p)
      : g(p.g),
        tokens(p.tokens),
        q(converted<T>(p.q)),
        kv_a(converted<T>(p.kv_a)),
        norm(converted<T>(p.norm)),
        kv_b(converted<T>(p.kv_b)),
        gate(converted<T>(p.gate)) {}

  /// mla_decode_token for tokens [first, first + count) in `slot`: the output rows.
  template <class G>
  std::vector<T> decode(const host& exec, G geometry, const MlaKvView<T>& kv, id slot, size first, size count) const {
    std::vector<T> out(count * mla_v_width(g), T(7.0f));
    std::vector<id> slots(count, slot), positions(count);
    for (size r = 0; r < count; ++r) positions[r] = static_cast<id>(first + r);
    MlaWorkspace<T> workspace(geometry, count);
    View<const T, 2> gates;
    if (g.mla_use_output_gate) gates = view(gate, tokens, mla_v_width(g)).slice(0, first, count);
    mla_decode_token(exec, geometry, view(q, tokens, mla_q_width(g)).slice(0, first, count),
                     view(kv_a, tokens, mla_cache_width(g)).slice(0, first, count), view(norm),
                     view(kv_b, mla_kv_b_rows(g), g.kv_lora_rank), gates, view(slots), view(positions), kv, workspace,
                     view(out, count, mla_v_width(g)));
    return out;
  }
  /// All tokens in calls of `step`, in a cache of their own.
  std::vector<T> decode_all(const host& exec, size step, size capacity = 0, size page_size = 0) const {
    MlaKv<T> kv(g, 1, capacity ? capacity : tokens, page_size);
    return decode_all(exec, kv.view(), 0, step);
  }
  std::vector<T> decode_all(const host& exec, const MlaKvView<T>& kv, id slot, size step) const {
    std::vector<T> out;
    for (size t = 0; t < tokens; t += step) {
      const std::vector<T> rows = decode(exec, g, kv, slot, t, std::min(step, tokens - t));
      out.insert(out.end(), rows.begin(), rows.end());
    }
    return out;
  }
};

/// A paged cache whose pages lie in an order that is not that of the positions, filled with a value.
template <class T>
struct ShuffledKv {
  size slots, blocks, page_size, width;
  std::vector<T> data;
  std::vector<id> table;

  ShuffledKv(const MlaConfig& g, size slot_count, size capacity, size page, T fill)
      : slots(slot_count),
        blocks((capacity + page - 1) / page),
        page_size(page),
        width(mla_cache_width(g)),
        data((slots * blocks + 3) * page * width, fill),
        table(slots * blocks) {
    for (size i = 0; i < table.size(); ++i) table[i] = static_cast<id>(i + 2);
    std::shuffle(table.begin(), table.end(), std::mt19937(5));
  }
  MlaKvView<T> view() {
    return {k3::view(data, slots * blocks + 3, page_size, width), k3::view(table.data(), slots, blocks), page_size};
  }
};

/// heads, nope, rope, v, kv_lora.
inline MlaConfig mla_geometry_of(size heads, size nope, size rope, size v, size rank, bool gate = true) {
  return {heads, nope, rope, v, 0, rank, true, gate, 1e-6f};
}

}  // namespace k3::test
