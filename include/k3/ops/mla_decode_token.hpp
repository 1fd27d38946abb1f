// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/activation.hpp>
#include <k3/ops/linear.hpp>
#include <k3/ops/mla_append.hpp>
#include <k3/ops/mla_attend.hpp>

namespace k3 {

namespace detail {

template <mla_geometry G, class KvB>
void check_kv_b(const char* operation, G g, const KvB& kv_b) {
  if constexpr (!host_tensor<KvB, 2>)
    require(kv_b.type != ElementType::mxfp4, operation, "kv_b", "MXFP4", "F64, F32 or BF16");
  require_weight(operation, "kv_b", kv_b, mla_kv_b_rows(g), g.kv_lora_rank);
}

/// Head h of a [R, heads, n] view as a matrix [R, n], rows heads * n apart.
template <class T>
View<T, 2> head_rows(const View<T, 3>& v, size h) {
  return {v.data + h * v.strides[1], {v.extents[0], v.extents[2]}, {v.strides[0], v.strides[2]}};
}

}  // namespace detail

/// Queries moved into the latent space: q_latent_h = (W_UK_h^T q_nope_h | q_rope_h), W_UK_h head h's `nope` rows of
/// kv_b, rounded once to the type of q_latent. Then q . (k_nope | kpe) = q_latent . (c | kpe) without expanding a key.
/// Shapes: q [R, heads * (nope + rope)], kv_b [heads * (nope + v), kv_lora], a view or an AnyMatrix, q_latent
/// [R, heads, kv_lora + rope]. Throws invalid_argument on shapes that do not fit, overlapping memory and `mla_use_nope`
/// false. Cost: 2 R heads nope kv_lora FLOPs, half of kv_b. Source: `kv_b_proj`.
template <mla_geometry G, host_tensor<2> Q, class KvB, writable_host_tensor<3> Out>
void mla_absorb_query(const host& exec, G geometry, const Q& q, const KvB& kv_b, const Out& q_latent) {
  using To = typename Out::value_type;
  const size rows = q.extents[0], nope = geometry.qk_nope_head_dim, rope = geometry.qk_rope_head_dim;
  const size latent = geometry.kv_lora_rank, per_head = nope + geometry.v_head_dim;
  detail::require_nope(geometry, "mla_absorb_query");
  detail::require_shape("mla_absorb_query", "q", q, rows, mla_q_width(geometry));
  detail::check_kv_b("mla_absorb_query", geometry, kv_b);
  detail::require_shape("mla_absorb_query", "q_latent", q_latent, rows, geometry.heads, mla_cache_width(geometry));
  detail::require_disjoint("mla_absorb_query", "q_latent", q_latent, "q", q, "kv_b", kv_b);
  detail::with_typed(kv_b, [&](const auto& weight) {
    const size bytes = geometry.heads * nope * latent * sizeof(*weight.data);
    detail::parallel_chunks(exec, geometry.heads, 1, bytes, [&](size first, size last) {
      for (size h = first; h < last; ++h) {
        const auto q_head = q.slice(1, h * (nope + rope), nope + rope);  // [R, nope + rope]
        const auto out = detail::head_rows(q_latent, h);                 // [R, kv_lora + rope]
        linear_transposed(host{1, exec.isa}, q_head.slice(1, 0, nope), weight.slice(0, h * per_head, nope),
                          out.slice(1, 0, latent));
        for (size r = 0; r < rows; ++r)
          for (size i = 0; i < rope; ++i) out(r, latent + i) = static_cast<To>(q_head(r, nope + i));
      }
    });
  });
}

/// The attention output of every head from its latent mean: o_h = W_UV_h o_latent_h, W_UV_h the `v` rows of head h in
/// kv_b (behind its `nope` rows), rounded once to the type of `out`.
/// Shapes: o_latent [R, heads, kv_lora], kv_b [heads * (nope + v), kv_lora], a view or AnyMatrix, out [R, heads * v].
/// Throws invalid_argument on shapes that do not fit and overlapping memory. Cost: 2 R heads v kv_lora FLOPs.
template <mla_geometry G, host_tensor<3> O, class KvB, writable_host_tensor<2> Out>
void mla_expand_values(const host& exec, G geometry, const O& o_latent, const KvB& kv_b, const Out& out) {
  const size rows = o_latent.extents[0], nope = geometry.qk_nope_head_dim, v = geometry.v_head_dim;
  detail::require_nope(geometry, "mla_expand_values");
  detail::require_shape("mla_expand_values", "o_latent", o_latent, rows, geometry.heads, geometry.kv_lora_rank);
  detail::check_kv_b("mla_expand_values", geometry, kv_b);
  detail::require_shape("mla_expand_values", "out", out, rows, mla_v_width(geometry));
  detail::require_disjoint("mla_expand_values", "out", out, "o_latent", o_latent, "kv_b", kv_b);
  detail::with_typed(kv_b, [&](const auto& weight) {
    const size bytes = geometry.heads * v * geometry.kv_lora_rank * sizeof(*weight.data);
    detail::parallel_chunks(exec, geometry.heads, 1, bytes, [&](size first, size last) {
      for (size h = first; h < last; ++h)
        linear(host{1, exec.isa}, detail::head_rows(o_latent, h), weight.slice(0, h * (nope + v) + nope, v),
               out.slice(1, h * v, v));
    });
  });
}

/// The output gate: out = x * sigmoid(gate), rounded once on store.
/// Shapes: x, gate and out [R, n]; out may be x or gate. Throws invalid_argument on shapes that do not fit and memory
/// that overlaps in another way. Source: `g_proj`, `mla_use_output_gate`.
template <host_tensor<2> X, host_tensor<2> Gate, writable_host_tensor<2> Out>
void mla_output_gate(const host& exec, const X& x, const Gate& gate, const Out& out) {
  using Acc = accumulator_t<typename X::value_type>;
  const size rows = x.extents[0], count = x.extents[1];
  detail::require_shape("mla_output_gate", "x", x, rows, count);
  detail::require_shape("mla_output_gate", "gate", gate, rows, count);
  detail::require_shape("mla_output_gate", "out", out, rows, count);
  detail::require_same_or_disjoint("mla_output_gate", "out", out, "x", x);
  detail::require_same_or_disjoint("mla_output_gate", "out", out, "gate", gate);
  detail::parallel_chunks(exec, rows * count, 64, rows * count * 32, [&](size first, size last) {
    for (size i = first; i < last; ++i) {
      const size r = i / count, c = i % count;
      out(r, c) =
          static_cast<typename Out::value_type>(static_cast<Acc>(x(r, c)) * sigmoid(static_cast<Acc>(gate(r, c))));
    }
  });
}

/// What mla_decode_token keeps between its parts, for up to `max_rows` rows: the absorbed queries
/// [rows, heads, kv_lora + rope] and the latent means [rows, heads, kv_lora]. Allocated here, once.
template <real Activation, real Accumulator = accumulator_t<Activation>>
class MlaWorkspace {
 public:
  MlaWorkspace() = default;
  template <mla_geometry G>
  MlaWorkspace(G geometry, size max_rows)
      : max_rows_(max_rows),
        heads_(geometry.heads),
        width_(mla_cache_width(geometry)),
        latent_(geometry.kv_lora_rank),
        q_latent_(detail::checked_length<Activation>("MlaWorkspace", max_rows, row_length(width_))),
        o_latent_(detail::checked_length<Accumulator>("MlaWorkspace", max_rows, row_length(latent_))) {}

  size max_rows() const { return max_rows_; }
  auto q_latent(size rows) { return k3::view(q_latent_.data(), rows, heads_, width_); }
  auto o_latent(size rows) { return k3::view(o_latent_.data(), rows, heads_, latent_); }

  /// Throws invalid_argument where the workspace was made for another geometry or for fewer rows.
  template <mla_geometry G>
  void check(const char* operation, G geometry, size rows) const {
    detail::require(rows <= max_rows_, operation, "the workspace's max_rows", max_rows(), rows);
    detail::require(heads_ == geometry.heads, operation, "the workspace's heads", heads_, geometry.heads);
    detail::require(width_ == mla_cache_width(geometry) && latent_ == geometry.kv_lora_rank, operation,
                    "the workspace's width", width_, mla_cache_width(geometry));
  }

 private:
  size row_length(size width) const { return detail::checked_product("MlaWorkspace", "a row's size", heads_, width); }

  detail::OwnedSize max_rows_;
  size heads_ = 0, width_ = 0, latent_ = 0;
  std::vector<Activation> q_latent_;
  std::vector<Accumulator> o_latent_;
};

namespace detail {

template <mla_geometry G>
constexpr float mla_norm_eps(G g) {
  if constexpr (requires { g.norm_eps; })
    return g.norm_eps;
  else
    return 1e-6f;
}

/// Everything mla_decode_token refuses, before anything is written.
template <mla_geometry G, class Q, class KvA, class Norm, class KvB, class Gate, class Slots, class Positions, class T,
          class Workspace, class Out>
void check_mla_decode(G g, const Q& q, const KvA& kv_a, const Norm& norm, const KvB& kv_b, const Gate& gate,
                      const Slots& slots, const Positions& positions, const MlaKvView<T>& kv,
                      const Workspace& workspace, const Out& out) {
  constexpr const char* operation = "mla_decode_token";
  const size rows = slots.extents[0];
  check_mla_append(operation, g, kv_a, norm, mla_norm_eps(g), slots, positions, kv);
  check_mla_rows(operation, slots, positions, kv, [](size) { return size{0}; });
  require_shape(operation, "q", q, rows, mla_q_width(g));
  check_kv_b(operation, g, kv_b);
  require_shape(operation, "out", out, rows, mla_v_width(g));
  workspace.check(operation, g, rows);
  if constexpr (requires { g.mla_use_output_gate; })
    require((gate.data != nullptr) == g.mla_use_output_gate || rows == 0, operation, "gate",
            gate.data ? "given" : "absent", g.mla_use_output_gate ? "a gate" : "none: mla_use_output_gate is false");
  if (gate.data) {
    require_shape(operation, "gate", gate, rows, mla_v_width(g));
    require_disjoint(operation, "out", out, "gate", gate);  // out is written before the gate is read
    require_disjoint(operation, "kv.pages", kv.pages, "gate", gate);
  }
  require_disjoint(operation, "out", out, "q", q, "kv_a", kv_a, "kv_a_layernorm", norm, "kv_b", kv_b, "slots", slots,
                   "positions", positions, "kv.pages", kv.pages, "kv.block_table", kv.block_table);
  require_disjoint(operation, "kv.pages", kv.pages, "q", q, "kv_b", kv_b);
}

}  // namespace detail

/// The attention of a gated NoPE MLA layer, from its projections to the input of o_proj, for R new tokens: mla_append,
/// mla_absorb_query, mla_attend, mla_expand_values, mla_output_gate, with their rounding points.
/// Shapes: q [R, heads * (nope + rope)], the output of q_b_proj; kv_a [R, kv_lora + rope], of kv_a_proj_with_mqa;
/// kv_a_norm [kv_lora]; kv_b [heads * (nope + v), kv_lora]; gate [R, heads * v], of g_proj, its data null exactly where
/// `mla_use_output_gate` is false; slots, positions [R]; out [R, heads * v]. Rows of pad_slot are not
/// looked at and give zeros. Throws invalid_argument as its parts do, before anything changes.
/// Accuracy against double: float within 1e-6 of the largest element up to 200 positions and 2e-6 at 1000, bf16 within
/// 8e-3 (relative L2). Source: `self_attn` of a full-attention layer; eps is the geometry's `norm_eps`.
template <mla_geometry G, host_tensor<2> Q, host_tensor<2> KvA, class Norm, class KvB, host_tensor<2> Gate,
          index_view Slots, index_view Positions, real T, class Activation, class Accumulator,
          writable_host_tensor<2> Out>
void mla_decode_token(const host& exec, G geometry, const Q& q, const KvA& kv_a, const Norm& kv_a_norm, const KvB& kv_b,
                      const Gate& gate, const Slots& slots, const Positions& positions, const MlaKvView<T>& kv,
                      MlaWorkspace<Activation, Accumulator>& workspace, const Out& out) {
  using Eps = accumulator_t<typename KvA::value_type>;
  detail::check_mla_decode(geometry, q, kv_a, kv_a_norm, kv_b, gate, slots, positions, kv, workspace, out);
  const size rows = slots.extents[0];
  const auto q_latent = workspace.q_latent(rows);
  const auto o_latent = workspace.o_latent(rows);
  mla_append(exec, geometry, kv_a, kv_a_norm, static_cast<Eps>(detail::mla_norm_eps(geometry)), slots, positions, kv);
  mla_absorb_query(exec, geometry, q, kv_b, q_latent);
  mla_attend(exec, geometry, q_latent, kv, slots, positions, o_latent);
  mla_expand_values(exec, geometry, o_latent, kv_b, out);
  if (gate.data) mla_output_gate(exec, out, gate, out);
  for (size r = 0; r < rows; ++r)
    if (slots[r] == pad_slot)
      for (size i = 0; i < mla_v_width(geometry); ++i) out(r, i) = typename Out::value_type{};
}

}  // namespace k3
