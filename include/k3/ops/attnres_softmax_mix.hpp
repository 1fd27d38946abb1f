// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/formula/attn_res.hpp>
#include <k3/ops/reduce.hpp>
#include <k3/ops/require_weight.hpp>

namespace k3 {

namespace detail {

/// f(vector) for a weight [n] or [1, n], typed or not.
template <class Weight, class F>
void with_row_weight(const Weight& weight, F&& f) {
  with_typed(weight, [&](const auto& typed) {
    if constexpr (std::remove_cvref_t<decltype(typed)>::rank == 2)
      f(typed[0]);
    else
      f(typed);
  });
}

template <class Weight>
void require_row_weight(const char* operation, const char* argument, const Weight& weight, size count) {
  if constexpr (requires { weight.extents[1]; } && sizeof(weight.extents) == 2 * sizeof(size))
    require_weight(operation, argument, weight, size{1}, count);
  else
    require_weight(operation, argument, weight, count);
}

/// Adds one source to the mixture of a row and returns its score.
template <class Acc, class Source, class Norm, class Proj>
Acc mix_source(const Source* source, const Norm* norm, const Proj* proj, Acc eps, size count, SoftmaxSum<Acc>& sum,
               Acc* out) {
  const auto value = [&](size i) { return static_cast<Acc>(source[i]); };
  const Acc squares = lane_sum<Acc>(count, [&](size i) { return value(i) * value(i); });
  const Acc dot =
      lane_sum<Acc>(count, [&](size i) { return value(i) * (static_cast<Acc>(norm[i]) * static_cast<Acc>(proj[i])); });
  const Acc score = attn_res_score(dot, squares, count, eps);
  const bool first = sum.denominator == Acc(0);
  const auto factors = sum.next(score);
  if (first)
    for (size i = 0; i < count; ++i) out[i] = factors.add * value(i);
  else
    for (size i = 0; i < count; ++i) out[i] = factors.keep * out[i] + factors.add * value(i);
  return score;
}

/// One row of attnres_softmax_mix; `probs` may be null.
template <class Acc, class Snapshots, class Running, class Norm, class Proj>
void mix_row(const Snapshots& snapshots, const Running& running, const Norm* norm, const Proj* proj, Acc eps, size row,
             Acc* out, Acc* probs) {
  const size stored = snapshots.extent(0), count = running.extent(1);
  SoftmaxSum<Acc> sum;
  for (size j = 0; j <= stored; ++j) {
    const Acc score = j < stored ? mix_source(&snapshots(j, row, 0), norm, proj, eps, count, sum, out)
                                 : mix_source(&running(row, 0), norm, proj, eps, count, sum, out);
    if (probs) probs[j] = score;
  }
  for (size i = 0; i < count; ++i) out[i] /= sum.denominator;
  if (probs)
    for (size j = 0; j <= stored; ++j) probs[j] = sum.weight(probs[j]);
}

template <class Snapshots, class Running, class Norm, class Proj, class Out, class Probs>
void check_attnres(const char* operation, const Snapshots& snapshots, const Running& running, const Norm& norm_weight,
                   const Proj& proj_weight, typename Out::value_type eps, const Out& out, const Probs& probs) {
  const size rows = running.extent(0), hidden = running.extent(1);
  require(hidden > 0, operation, "running's width", hidden, "at least 1");
  require_shape(operation, "snapshots", snapshots, snapshots.extent(0), rows, hidden);
  require_shape(operation, "running", running, rows, hidden);
  require_row_weight(operation, "norm_weight", norm_weight, hidden);
  require_row_weight(operation, "proj_weight", proj_weight, hidden);
  require(eps >= 0 && eps - eps == 0, operation, "eps", eps, "finite and not negative");
  require_shape(operation, "out", out, rows, hidden);
  require_disjoint(operation, "out", out, "snapshots", snapshots, "running", running, "norm_weight", norm_weight,
                   "proj_weight", proj_weight);
  if (!probs.data) return;
  require_shape(operation, "probs", probs, rows, snapshots.extent(0) + 1);
  require_disjoint(operation, "probs", probs, "snapshots", snapshots, "running", running, "norm_weight", norm_weight,
                   "proj_weight", proj_weight, "out", out);
}

/// A row of accumulators that the caller need not have.
template <class Out>
using OptionalRows = HostView<typename Out::value_type, 2>;

}  // namespace detail

/// The mixture of Attention Residuals: out = sum_j p_j s_j over the raw sources (the snapshots as stored, the running
/// stream last), p = softmax(score), score_j = sum(norm * proj * s_j) / sqrt(mean(s_j^2) + eps). One source has p 1.
/// Shapes: snapshots [n, R, hidden] (n may be 0), running [R, hidden], norm_weight [hidden], proj_weight [hidden] or
/// [1, hidden], out [R, hidden] in the accumulator type (it feeds an RMSNorm unrounded), probs [R, n + 1] if wanted.
/// Throws invalid_argument on shapes that do not fit and overlapping memory, before anything is written.
/// Accuracy: float against double, scores of a few units and up to 7168 channels: out <= 2e-6 of its largest element,
/// probs <= 6e-6 relative; a score of size S adds about S * 1e-7. Cost: every source is read once, 6 FLOPs an element.
/// Source: `self_attention_res_norm`/`_proj`, `mlp_res_norm`/`_proj`, `output_attn_res_norm`/`_proj`.
template <host_tensor<3> Snapshots, host_tensor<2> Running, class Norm, class Proj, writable_host_tensor<2> Out>
  requires std::same_as<typename Out::value_type, accumulator_t<typename Running::value_type>>
void attnres_softmax_mix(const host& exec, const Snapshots& snapshots, const Running& running, const Norm& norm_weight,
                         const Proj& proj_weight, typename Out::value_type eps, const Out& out,
                         detail::OptionalRows<Out> probs = {}) {
  detail::check_attnres("attnres_softmax_mix", snapshots, running, norm_weight, proj_weight, eps, out, probs);
  const size rows = running.extent(0), stored = snapshots.extent(0);
  const size bytes = rows * (stored + 1) * running.extent(1) * 3 * sizeof(typename Running::value_type);
  detail::with_row_weight(norm_weight, [&](const auto& norm) {
    detail::with_row_weight(proj_weight, [&](const auto& proj) {
      detail::parallel_chunks(exec, rows, 1, bytes, [&](size first, size last) {
        for (size row = first; row < last; ++row)
          detail::mix_row(snapshots, running, norm.data, proj.data, eps, row, &out(row, 0),
                          probs.data ? &probs(row, 0) : nullptr);
      });
    });
  });
}

/// out = (1 - mix) skip + mix mixed: exactly `skip` at mix 0 and exactly `mixed` at mix 1, whatever the other holds.
/// Shapes: skip, mixed and out [R, n]; out may be skip or mixed. Throws invalid_argument on shapes that do not fit,
/// memory that overlaps in another way, and a mix outside 0..1.
template <host_tensor<2> Skip, host_tensor<2> Mixed, writable_host_tensor<2> Out>
void attnres_blend(const host& exec, const Skip& skip, const Mixed& mixed, float mix, const Out& out) {
  using Acc = accumulator_t<typename Mixed::value_type>;
  const size rows = skip.extent(0), count = skip.extent(1);
  detail::require_shape("attnres_blend", "skip", skip, rows, count);
  detail::require_shape("attnres_blend", "mixed", mixed, rows, count);
  detail::require(mix >= 0.0f && mix <= 1.0f, "attnres_blend", "mix", mix, "between 0 and 1");
  detail::require_shape("attnres_blend", "out", out, rows, count);
  detail::require_same_or_disjoint("attnres_blend", "out", out, "skip", skip);
  detail::require_same_or_disjoint("attnres_blend", "out", out, "mixed", mixed);
  detail::parallel_chunks(exec, rows, 1, rows * count * 16, [&](size first, size last) {
    for (size row = first; row < last; ++row)
      for (size i = 0; i < count; ++i)
        out(row, i) = static_cast<typename Out::value_type>(
            attn_res_blend(static_cast<Acc>(skip(row, i)), static_cast<Acc>(mixed(row, i)), static_cast<Acc>(mix)));
  });
}

/// The mixture with its ablation: attnres_blend(running, attnres_softmax_mix(...), mix). Mix 1 gives the mixture and
/// mix 0 the running stream, both bit for bit. Shapes and errors as there; `probs` is written where wanted, whatever
/// the mix. Source: `K3_ATTNRES_MIX`.
template <host_tensor<3> Snapshots, host_tensor<2> Running, class Norm, class Proj, writable_host_tensor<2> Out>
  requires std::same_as<typename Out::value_type, accumulator_t<typename Running::value_type>>
void attnres_mix(const host& exec, const Snapshots& snapshots, const Running& running, const Norm& norm_weight,
                 const Proj& proj_weight, typename Out::value_type eps, float mix, const Out& out,
                 detail::OptionalRows<Out> probs = {}) {
  detail::require(mix >= 0.0f && mix <= 1.0f, "attnres_mix", "mix", mix, "between 0 and 1");
  detail::check_attnres("attnres_mix", snapshots, running, norm_weight, proj_weight, eps, out, probs);
  attnres_softmax_mix(exec, snapshots, running, norm_weight, proj_weight, eps, out, probs);
  if (mix != 1.0f) attnres_blend(exec, running, out, mix, out);
}

}  // namespace k3
