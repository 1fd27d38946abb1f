// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/formula/activation.hpp>
#include <k3/formula/mla.hpp>
#include <k3/ops/mla_kv.hpp>
#include <k3/ops/reduce.hpp>

// Attention on expanded keys and values: what the latent form is checked against, with the RoPE option that it has not.
namespace k3 {

/// Turns the trailing rope slice of every head of one token's query or key [heads * (nope + rope)] in place: elements i
/// and i + rope/2 by the angle position / theta^(2i / rope). Does nothing where the geometry's `mla_use_nope` is true
/// (or absent) or rope is 0. Throws invalid_argument for an odd rope, a wrong length, and a theta not above 0.
template <mla_geometry G, writable_host_tensor<1> Row>
void mla_rotate(G geometry, const Row& row, size position, double theta) {
  using T = typename Row::value_type;
  using Acc = accumulator_t<T>;
  const size rope = geometry.qk_rope_head_dim, head_dim = mla_qk_head_dim(geometry);
  detail::require_shape("mla_rotate", "row", row, mla_q_width(geometry));
  bool rotated = false;
  if constexpr (requires { geometry.mla_use_nope; }) rotated = !geometry.mla_use_nope;
  if (!rotated || rope == 0) return;
  detail::require(rope % 2 == 0, "mla_rotate", "geometry.qk_rope_head_dim", rope, "even: its elements turn in pairs");
  detail::require(theta > 0, "mla_rotate", "theta", theta, "above 0");
  for (size pair = 0; pair < rope / 2; ++pair) {
    const double angle = rope_angle(static_cast<double>(position), pair, rope, theta);
    const Acc cosine = static_cast<Acc>(std::cos(angle)), sine = static_cast<Acc>(std::sin(angle));
    for (size h = 0; h < geometry.heads; ++h) {
      T* slice = row.data + h * head_dim + geometry.qk_nope_head_dim;
      Acc a = static_cast<Acc>(slice[pair]), b = static_cast<Acc>(slice[pair + rope / 2]);
      rotate_pair(a, b, cosine, sine);
      slice[pair] = static_cast<T>(a);
      slice[pair + rope / 2] = static_cast<T>(b);
    }
  }
}

/// Owns the expanded keys [capacity, heads, nope + rope] and values [capacity, heads, v] of one sequence.
template <real T>
class MlaExpandedKv {
 public:
  template <mla_geometry G>
  MlaExpandedKv(G geometry, size capacity)
      : heads_(geometry.heads), qk_(mla_qk_head_dim(geometry)), v_(geometry.v_head_dim), capacity_(capacity) {
    check(geometry, "MlaExpandedKv");
    keys_.resize(detail::checked_length<T>("MlaExpandedKv", capacity, mla_q_width(geometry)));
    values_.resize(detail::checked_length<T>("MlaExpandedKv", capacity, mla_v_width(geometry)));
  }

  size length() const { return length_; }
  size capacity() const { return capacity_; }
  auto keys() const { return k3::view(keys_.data(), length_, heads_, qk_); }
  auto values() const { return k3::view(values_.data(), length_, heads_, v_); }
  void reset() { length_ = 0; }

  /// Adds one position; returns its key, which the caller may turn. Throws invalid_argument where the cache is full.
  template <host_tensor<1> K, host_tensor<1> V>
  auto append(const K& key, const V& value) {
    detail::require(length_ < capacity_, "MlaExpandedKv::append", "length", length(),
                    "below the capacity of " + std::to_string(capacity()) + " positions (cache full)");
    detail::require_shape("MlaExpandedKv::append", "key", key, heads_ * qk_);
    detail::require_shape("MlaExpandedKv::append", "value", value, heads_ * v_);
    T* k = keys_.data() + length_ * heads_ * qk_;
    T* v = values_.data() + length_ * heads_ * v_;
    for (size i = 0; i < heads_ * qk_; ++i) k[i] = static_cast<T>(key.data[i]);
    for (size i = 0; i < heads_ * v_; ++i) v[i] = static_cast<T>(value.data[i]);
    length_ = length_ + 1;
    return k3::view(k, heads_ * qk_);
  }

  /// Throws invalid_argument where the cache was made for another geometry.
  template <mla_geometry G>
  void check_geometry(const char* operation, G geometry) const {
    detail::require(heads_ == geometry.heads && qk_ == mla_qk_head_dim(geometry) && v_ == geometry.v_head_dim,
                    operation, "kv", "of another geometry", "a cache of this geometry");
  }

 private:
  size heads_, qk_, v_;
  detail::OwnedSize capacity_, length_;
  std::vector<T> keys_, values_;
};

namespace detail {

/// One token: q [heads * qk] over all of keys [T, heads, qk] and values [T, heads, v]; gate null: no gate.
template <mla_geometry G, class Q, class T, class Gate, class Out>
void expanded_attend(G g, const Q* q, const View<const T, 3>& keys, const View<const T, 3>& values, const Gate* gate,
                     Out* out) {
  using Acc = accumulator_t<Q>;
  const size qk = mla_qk_head_dim(g), dv = g.v_head_dim, length = keys.extents[0];
  const Acc scale = mla_score_scale<Acc>(qk);
  std::vector<Acc> weights(length), sums(dv);
  for (size h = 0; h < g.heads; ++h) {
    SoftmaxState<Acc> softmax;
    for (size t = 0; t < length; ++t) {
      const T* key = &keys(t, h, 0);
      weights[t] =
          scale * lane_sum<Acc>(qk, [&](size i) { return static_cast<Acc>(q[h * qk + i]) * static_cast<Acc>(key[i]); });
      softmax.max = larger(softmax.max, weights[t]);
    }
    for (Acc& sum : sums) sum = 0;
    for (size t = 0; t < length; ++t) {
      weights[t] = std::exp(weights[t] - softmax.max);
      softmax.sum += weights[t];
      for (size i = 0; i < dv; ++i) sums[i] += weights[t] * static_cast<Acc>(values(t, h, i));
    }
    for (size i = 0; i < dv; ++i) {
      const Acc factor = gate ? sigmoid(static_cast<Acc>(gate[h * dv + i])) : Acc(1);
      out[h * dv + i] = static_cast<Out>(sums[i] / softmax.sum * factor);
    }
  }
}

template <mla_geometry G>
void check_rotation(const char* operation, G g, double theta) {
  check(g, operation);
  if constexpr (requires { g.mla_use_nope; }) {
    if (g.mla_use_nope || g.qk_rope_head_dim == 0) return;
    require(g.qk_rope_head_dim % 2 == 0, operation, "geometry.qk_rope_head_dim", g.qk_rope_head_dim,
            "even: its elements turn in pairs");
    require(theta > 0, operation, "theta", theta, "above 0");
  }
}

template <mla_geometry G, class Gate>
void check_gate(const char* operation, G g, const Gate& gate) {
  if constexpr (requires { g.mla_use_output_gate; })
    require((gate.data != nullptr) == g.mla_use_output_gate, operation, "gate", gate.data ? "given" : "absent",
            g.mla_use_output_gate ? "a gate" : "none: mla_use_output_gate is false");
}

/// A row copied, so that it can be turned.
template <class T>
std::vector<std::remove_const_t<T>> copy_of(const View<T, 1>& row) {
  return {row.data, row.data + row.extents[0]};
}

}  // namespace detail

/// One token of gated attention on expanded keys and values, an oracle (it allocates and runs on one thread): turns q
/// and k where `mla_use_nope` is false, appends k and v, attends to all of the cache, multiplies by sigmoid(g).
/// Shapes: q, k [heads * (nope + rope)], v, g, out [heads * v], g's data null exactly where `mla_use_output_gate` is
/// false. `position` and `theta` serve the rotation only. Throws invalid_argument, with nothing changed, on shapes that
/// do not fit, overlapping memory, a full cache, an odd rope to be turned.
template <mla_geometry G, host_tensor<1> Q, host_tensor<1> K, host_tensor<1> V, host_tensor<1> Gate, real T,
          writable_host_tensor<1> Out>
void mla_decode_token(const host&, G geometry, const Q& q, const K& k, const V& v, const Gate& g, MlaExpandedKv<T>& kv,
                      size position, double theta, const Out& out) {
  constexpr const char* operation = "mla_decode_token";
  detail::check_rotation(operation, geometry, theta);
  detail::check_gate(operation, geometry, g);
  kv.check_geometry(operation, geometry);
  detail::require_shape(operation, "q", q, mla_q_width(geometry));
  if (g.data) detail::require_shape(operation, "g", g, mla_v_width(geometry));
  detail::require_shape(operation, "out", out, mla_v_width(geometry));
  detail::require_shape(operation, "k", k, mla_q_width(geometry));
  detail::require_shape(operation, "v", v, mla_v_width(geometry));
  detail::require_disjoint(operation, "out", out, "q", q, "k", k, "v", v);
  if (g.data) detail::require_disjoint(operation, "out", out, "g", g);
  mla_rotate(geometry, kv.append(k, v), position, theta);
  auto turned = detail::copy_of(q);
  mla_rotate(geometry, view(turned), position, theta);
  detail::expanded_attend(geometry, turned.data(), kv.keys(), kv.values(), g.data, out.data);
}

/// The same for T tokens at positions first_position, first_position + 1, ..., each seeing itself and those before it.
/// Shapes: q, k [T, heads * (nope + rope)], v, g, out [T, heads * v]; the inputs stay as they are. Bit for bit what
/// mla_decode_token gives token by token. Throws invalid_argument as that does.
/// Accuracy, of the largest output, NoPE and RoPE: float <= 5e-7 (measured 1.9e-7), double <= 1.2e-15, with RoPE at
/// position 1000 3e-14. Cost: heads (nope + rope + v) T^2 FLOPs.
template <mla_geometry G, host_tensor<2> Q, host_tensor<2> K, host_tensor<2> V, host_tensor<2> Gate,
          writable_host_tensor<2> Out>
void gated_mla_attend(const host& exec, G geometry, const Q& q, const K& k, const V& v, const Gate& g,
                      size first_position, double theta, const Out& out) {
  constexpr const char* operation = "gated_mla_attend";
  const size tokens = q.extents[0];
  detail::check_rotation(operation, geometry, theta);
  detail::check_gate(operation, geometry, g);
  detail::require_shape(operation, "q", q, tokens, mla_q_width(geometry));
  detail::require_shape(operation, "k", k, tokens, mla_q_width(geometry));
  detail::require_shape(operation, "v", v, tokens, mla_v_width(geometry));
  if (g.data) detail::require_shape(operation, "g", g, tokens, mla_v_width(geometry));
  detail::require_shape(operation, "out", out, tokens, mla_v_width(geometry));
  detail::require_disjoint(operation, "out", out, "q", q, "k", k, "v", v);
  if (g.data) detail::require_disjoint(operation, "out", out, "g", g);
  MlaExpandedKv<typename K::value_type> kv(geometry, tokens);
  for (size t = 0; t < tokens; ++t) {
    View<const typename Gate::value_type, 1> gate;
    if (g.data) gate = g[t];
    mla_decode_token(exec, geometry, q[t], k[t], v[t], gate, kv, first_position + t, theta, out[t]);
  }
}

}  // namespace k3
