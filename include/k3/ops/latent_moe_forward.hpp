// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>

#include <k3/ops/mix_routed_experts.hpp>
#include <k3/ops/rms_norm.hpp>

namespace k3 {

/// The weights of a LatentMoE layer but its routed experts. The latent matrices are there if and only if the geometry
/// has a latent width, the norm if it has use_norm, the shared experts (one MLP of width n_shared * expert_hidden) if
/// n_shared > 0. Source: `block_sparse_moe.*`.
template <MemorySpace Space>
struct BasicLatentMoeWeights {
  AnyMatrix<Space> gate;                     // [n_routed, hidden]
  AnyVector<Space> e_score_correction_bias;  // [n_routed]
  AnyMatrix<Space> routed_expert_down_proj;  // [latent, hidden]
  AnyVector<Space> routed_expert_norm;       // [latent]
  AnyMatrix<Space> routed_expert_up_proj;    // [hidden, latent]
  BasicMlpWeights<Space> shared_experts{};   // [n_shared * expert_hidden, hidden] twice, and its transpose's shape
};
using LatentMoeWeights = BasicLatentMoeWeights<MemorySpace::host>;

/// An expert's id, or none (as made from nothing or from an empty optional).
class OptionalExpert {
 public:
  OptionalExpert() = default;
  OptionalExpert(size expert) : expert_(expert) {}
  OptionalExpert(const std::optional<size>& expert) {
    if (expert) expert_ = *expert;
  }

  explicit operator bool() const { return expert_ != none; }
  size operator*() const { return expert_; }

 private:
  // Not an optional itself: g++ takes the value that an empty one does not have for one that is read uninitialised.
  static constexpr size none = ~size{0};
  size expert_ = none;
};

/// What a call of latent_moe_forward may bring along.
struct LatentMoeOptions {
  /// Ablation: router logits are 0 but for this expert's, which is 8. Source: `K3_FORCE_EXPERT`.
  OptionalExpert force_expert{};
  /// [R]: rows with pad_slot are not routed and give 0.
  HostView<const id, 1> slots{};
  /// [R]: where given, a row with NaN router logits is marked here and does not throw.
  HostView<RowStatus, 1> status{};
};

namespace detail {

/// Throws invalid_argument unless weights that are `wanted` are there with these extents, and others absent.
template <class Weight, class... Extent>
void require_if(bool wanted, const char* operation, const char* argument, const Weight& weight, Extent... extent) {
  if (wanted)
    require_weight(operation, argument, weight, extent...);
  else
    require(!weight, operation, argument, "there", "absent with this geometry");
}

template <latent_moe_geometry G>
void require_weights(const char* operation, G g, const LatentMoeWeights& w) {
  const bool latent = g.latent > 0, shared = g.n_shared > 0;
  require_weight(operation, "gate", w.gate, g.n_routed, g.hidden);
  require_weight(operation, "e_score_correction_bias", w.e_score_correction_bias, g.n_routed);
  require_if(latent, operation, "routed_expert_down_proj", w.routed_expert_down_proj, g.latent, g.hidden);
  require_if(g.use_norm, operation, "routed_expert_norm", w.routed_expert_norm, g.latent);
  require_if(latent, operation, "routed_expert_up_proj", w.routed_expert_up_proj, g.hidden, g.latent);
  const size width = moe_shared_width(g);
  require_if(shared, operation, "shared_experts.gate_proj", w.shared_experts.gate_proj, width, g.hidden);
  require_if(shared, operation, "shared_experts.up_proj", w.shared_experts.up_proj, width, g.hidden);
  require_if(shared, operation, "shared_experts.down_proj", w.shared_experts.down_proj, g.hidden, width);
}

/// Throws invalid_argument where out or the status shares memory with an input; out may be x. (The experts' weights are
/// looked at when they are fetched.)
template <class X, class Out>
void require_moe_memory(const char* operation, const X& x, const LatentMoeWeights& w, const Out& out,
                        const LatentMoeOptions& options) {
  const auto apart_from_weights = [&](const char* written, const auto& to) {
    require_disjoint(operation, written, to, "gate", w.gate, "e_score_correction_bias", w.e_score_correction_bias,
                     "routed_expert_down_proj", w.routed_expert_down_proj, "routed_expert_norm", w.routed_expert_norm,
                     "routed_expert_up_proj", w.routed_expert_up_proj, "slots", options.slots);
    require_disjoint(operation, written, to, "shared_experts.gate_proj", w.shared_experts.gate_proj,
                     "shared_experts.up_proj", w.shared_experts.up_proj, "shared_experts.down_proj",
                     w.shared_experts.down_proj);
  };
  require_same_or_disjoint(operation, "out", out, "x", x);
  apart_from_weights("out", out);
  apart_from_weights("status", options.status);
  require_disjoint(operation, "status", options.status, "x", x, "out", out);
}

/// Router logits in the accumulator type, the choice of experts, and which rows have none.
template <precision P, latent_moe_geometry G, class X>
void route(const host& exec, G g, const X& x, const LatentMoeWeights& w, const LatentMoeOptions& options,
           MoeBuffers<P>& buffers) {
  using Acc = typename P::accumulator;
  const size rows = x.extent(0), k = g.top_k;
  const auto logits = view(buffers.logits.data(), rows, size{g.n_routed});
  const auto ids = view(buffers.ids.data(), rows, k);
  const auto weights = view(buffers.weights.data(), rows, k);
  if (options.force_expert) {
    for (size row = 0; row < rows; ++row)
      for (size e = 0; e < g.n_routed; ++e) logits(row, e) = e == *options.force_expert ? Acc(8) : Acc(0);
  } else {
    linear(exec, x, w.gate, logits);
  }
  for (size row = 0; row < rows; ++row) buffers.status[row] = RowStatus::ok;
  route_rows(exec, logits, w.e_score_correction_bias, k, g.renormalize, static_cast<Acc>(g.routed_scaling_factor), ids,
             weights, view(buffers.status.data(), rows));
  for (size row = 0; row < rows; ++row) {
    const bool pad = options.slots.data && options.slots(row) == pad_slot;
    if (pad) {
      buffers.status[row] = RowStatus::ok;
      fill_unrouted(&ids(row, 0), &weights(row, 0), k);
    }
    buffers.skip[row] = pad || buffers.status[row] != RowStatus::ok;
  }
}

/// The routed experts' part of the output [R, hidden], rounded to the activation type.
template <precision P, latent_moe_geometry G, class X, class Experts>
HostView<const typename P::activation, 2> routed_part(const host& exec, G g, const X& x, const LatentMoeWeights& w,
                                                      Experts& experts, typename P::accumulator eps,
                                                      MoeBuffers<P>& buffers, const MoeResult& result) {
  const size rows = x.extent(0), width = moe_expert_width(g);
  const auto rows_of = [&](auto& values, size columns) { return view(values.data(), rows, columns); };
  HostView<const typename P::activation, 2> expert_in = x;
  if (g.latent > 0) {
    const auto latent = rows_of(buffers.latent, g.latent);
    linear(exec, x, w.routed_expert_down_proj, latent);
    expert_in = latent;
  }
  const auto combined = rows_of(buffers.combined, width);
  mix_experts<P>(exec, g, expert_in, rows_of(buffers.weights, g.top_k), experts, buffers, combined, result,
                 "latent_moe_forward");
  if (g.latent == 0) return combined;
  auto up_in = combined;
  if (g.use_norm) {
    up_in = rows_of(buffers.normed, width);
    rms_norm(exec, combined, w.routed_expert_norm, eps, up_in);
  }
  const auto routed = rows_of(buffers.routed, g.hidden);
  linear(exec, up_in, w.routed_expert_up_proj, routed);
  return routed;
}

/// out = routed + shared, rounded once; 0 in padding rows, NaN in rows that could not be routed.
template <precision P, class Routed, class Shared, class Out>
void add_shared(const Routed& routed, const Shared& shared, const MoeBuffers<P>& buffers, const Out& out) {
  using Acc = typename P::accumulator;
  for (size row = 0; row < out.extent(0); ++row) {
    const Acc instead = buffers.status[row] == RowStatus::ok ? Acc(0) : std::numeric_limits<Acc>::quiet_NaN();
    for (size i = 0; i < out.extent(1); ++i) {
      Acc value = instead;
      if (!buffers.skip[row]) {
        value = static_cast<Acc>(routed(row, i));
        if (!buffers.shared.empty()) value += static_cast<Acc>(shared(row, i));
      }
      out(row, i) = static_cast<typename Out::value_type>(value);
    }
  }
}

}  // namespace detail

/// A LatentMoE layer: out = up . rms(sum_j weight_j expert_j(down . x); norm, eps) + shared(x). Experts are chosen by
/// sigmoid_topk from unrounded logits gate . x; their sum is normed once; the shared experts see the full x and are not
/// scaled. Without a latent width the experts work on x. Rounded to the activation type: each linear's output, the
/// activations, the experts' outputs, their sum, the norm's output, the result.
/// Shapes: x and out [R, hidden] (out may be x), weights and experts as their types say.
/// Throws invalid_argument, before anything is written, on shapes, sizes and weights that do not fit the geometry,
/// other overlapping memory, a NaN bias and a forced expert that does not exist; passes on what `experts` throws, `out`
/// unchanged. A row with NaN router logits reads no expert and gives NaN; `options.status` is told, or else the call
/// throws at the end. Accuracy: <= 8e-7 of the largest element relative to double for float. Cost: 2 R (n_routed + 2
/// latent) hidden + 6 R (top_k width + n_shared hidden) expert_hidden FLOPs.
template <latent_moe_geometry G, host_tensor<2> X, class Experts, precision P, writable_host_tensor<2> Out>
  requires(expert_source<std::remove_reference_t<Experts>> &&
           std::same_as<typename X::value_type, typename P::activation> &&
           std::same_as<typename Out::value_type, typename P::activation>)
void latent_moe_forward(const host& exec, G geometry, const X& x, const LatentMoeWeights& weights, Experts&& experts,
                        typename P::accumulator eps, MoeWorkspace<P>& workspace, const Out& out,
                        const LatentMoeOptions& options = {}) {
  constexpr const char* operation = "latent_moe_forward";
  const size rows = x.extent(0);
  check(geometry, operation);
  detail::require_shape(operation, "x", x, rows, geometry.hidden);
  detail::require_weights(operation, geometry, weights);
  detail::require_experts(operation, experts, geometry.n_routed);
  detail::require(eps >= 0 && eps - eps == 0, operation, "eps", eps, "finite and not negative");
  detail::require_workspace(operation, geometry, workspace, rows);
  detail::require_shape(operation, "out", out, rows, geometry.hidden);
  if (options.slots.data) detail::require_shape(operation, "slots", options.slots, rows);
  if (options.status.data) detail::require_shape(operation, "status", options.status, rows);
  detail::require_moe_memory(operation, x, weights, out, options);
  if (options.force_expert && *options.force_expert >= geometry.n_routed)
    throw invalid_argument(operation, "force_expert", std::to_string(*options.force_expert),
                           "below the number of experts");
  detail::require_no_nan_bias(operation, "e_score_correction_bias", weights.e_score_correction_bias);

  detail::MoeBuffers<P>& buffers = workspace.buffers(rows);
  detail::route<P>(exec, geometry, x, weights, options, buffers);
  detail::choose_experts(buffers, view(buffers.ids.data(), rows, size{geometry.top_k}), experts);
  // What needs no routed expert comes first: a source that reads them from a drive does so meanwhile.
  const auto shared = view(buffers.shared.data(), rows, size{geometry.hidden});
  if (geometry.n_shared > 0)
    dense_mlp(exec, geometry.activation, x, weights.shared_experts.gate_proj, weights.shared_experts.up_proj,
              weights.shared_experts.down_proj, buffers.shared_mlp, shared);
  const auto routed = detail::routed_part<P>(exec, geometry, x, weights, experts, eps, buffers,
                                             {detail::footprint(out), detail::footprint(options.status)});
  detail::add_shared<P>(routed, shared, buffers, out);
  size failed = rows;
  for (size row = rows; row-- > 0;)
    if (buffers.status[row] != RowStatus::ok) {
      if (options.status.data) options.status(row) = buffers.status[row];
      failed = row;
    }
  if (failed < rows && !options.status.data) detail::throw_nan_row(operation, "router logits", failed);
}

}  // namespace k3
