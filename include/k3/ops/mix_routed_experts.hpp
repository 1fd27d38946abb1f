// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/dense_mlp.hpp>
#include <k3/ops/row_status.hpp>
#include <k3/ops/sigmoid_topk.hpp>

namespace k3 {

/// One routed expert: w1 (gate) and w3 (up) [expert_hidden, width], w2 (down) [width, expert_hidden].
/// Source: `block_sparse_moe.experts.E.*`.
struct ExpertWeights {
  AnyMatrix<> w1, w3, w2;
};

/// Something that has experts: a std::vector<ExpertWeights>, or an object that fetches and checks an expert when it is
/// asked for and throws where that fails. What it returns must stay valid until the next one is asked for. A source
/// that has them is told with need() which experts come, and is asked with acquire() and release() (see ExpertSource).
template <class S>
concept expert_source = requires(S& source, size e) {
  { source[e] } -> std::convertible_to<const ExpertWeights&>;
  { source.size() } -> std::convertible_to<size>;
};

namespace detail {

/// An expert while it is in use.
template <class Experts>
class UsedExpert {
 public:
  static constexpr bool managed = requires(Experts& experts, size e) {
    { experts.acquire(e) } -> std::same_as<ExpertWeights>;
    experts.release(e);
  };

  UsedExpert(Experts& experts, size e) : experts_(experts), expert_(e), weights_(get(experts, e)) {}
  UsedExpert(const UsedExpert&) = delete;
  UsedExpert& operator=(const UsedExpert&) = delete;
  ~UsedExpert() {
    if constexpr (managed) experts_.release(expert_);
  }
  const ExpertWeights& weights() const { return weights_; }

 private:
  static ExpertWeights get(Experts& experts, size e) {
    if constexpr (managed)
      return experts.acquire(e);
    else
      return experts[e];
  }

  Experts& experts_;
  size expert_;
  ExpertWeights weights_;
};

/// The memory behind a MoeWorkspace.
template <precision P>
struct MoeBuffers {
  using Activation = typename P::activation;
  using Accumulator = typename P::accumulator;

  std::vector<Accumulator> logits, weights;          // [rows, n_routed], [rows, top_k]
  std::vector<id> ids;                               // [rows, top_k]
  std::vector<Activation> latent, combined, normed;  // [rows, expert width]
  std::vector<Activation> routed, shared;            // [rows, hidden]
  std::vector<Activation> gathered;                  // [rows, expert width]: the rows of one expert
  std::vector<Activation> expert_out;                // [rows * top_k, expert width], in order of expert
  std::vector<size> first;                           // [n_routed + 1]: where an expert's part of `order` begins
  std::vector<size> chosen;                          // the distinct experts that rows chose, in order of id
  std::vector<size> order, position;  // [rows * top_k]: choice (row * top_k + rank) by place, and place by choice
  std::vector<RowStatus> status;      // [rows]
  std::vector<unsigned char> skip;    // [rows]: 1 where no expert is read for a row
  MlpWorkspace<P> expert_mlp, shared_mlp;

  MoeBuffers(const LatentMoeConfig& g, size rows)
      : logits(length<Accumulator>(rows, g.n_routed)),
        weights(length<Accumulator>(rows, g.top_k)),
        ids(weights.size()),
        latent(length<Activation>(rows, g.latent)),
        combined(length<Activation>(rows, moe_expert_width(g))),
        normed(combined.size()),
        routed(length<Activation>(rows, g.hidden)),
        shared(g.n_shared > 0 ? routed.size() : 0),
        gathered(combined.size()),
        expert_out(length<Activation>(ids.size(), moe_expert_width(g))),
        first(g.n_routed + 1),
        order(length<size>(rows, g.top_k)),
        position(order.size()),
        status(rows),
        skip(rows),
        expert_mlp(g.expert_hidden, rows),
        shared_mlp(moe_shared_width(g), rows) {
    chosen.reserve(g.n_routed);
  }

 private:
  template <class T>
  static size length(size rows, size width) {
    return checked_length<T>("MoeWorkspace", rows, width);
  }
};

}  // namespace detail

/// Scratch memory of the mixture-of-experts operations for up to `max_rows` rows, allocated once and reused by every
/// layer of that geometry. It also keeps what the last latent_moe_forward routed, for inspection. Most of it is top_k *
/// max_rows * (expert width) activations: an expert's outputs wait for the sum in order of rank.
template <precision P>
class MoeWorkspace {
 public:
  using Activation = typename P::activation;
  using Accumulator = typename P::accumulator;

  template <latent_moe_geometry G>
  MoeWorkspace(G geometry, size max_rows)
      : geometry_(checked(latent_moe_config(geometry))), max_rows_(max_rows), buffers_(geometry_, max_rows) {}

  const LatentMoeConfig& geometry() const { return geometry_; }
  size max_rows() const { return max_rows_; }

  /// Of the last latent_moe_forward: router logits [R, E], chosen experts and weights [R, top_k] (0..k-1 and 0 for a
  /// row that was not routed), the sum of its experts [R, width] and the routed and shared parts of its output [R,
  /// hidden].
  auto router_logits() const { return rows_of(buffers_.logits, geometry_.n_routed); }
  auto topk_ids() const { return rows_of(buffers_.ids, geometry_.top_k); }
  auto topk_weights() const { return rows_of(buffers_.weights, geometry_.top_k); }
  auto expert_sum() const { return rows_of(buffers_.combined, moe_expert_width(geometry_)); }
  auto routed() const { return rows_of(geometry_.latent > 0 ? buffers_.routed : buffers_.combined, geometry_.hidden); }
  auto shared() const { return rows_of(buffers_.shared, geometry_.hidden); }

  /// How many rows of the last call (this one or mix_routed_experts) expert `e` was computed for.
  size expert_rows(size e) const {
    detail::require(e < geometry_.n_routed && max_rows_ > 0, "MoeWorkspace::expert_rows", "e", e, "one of the experts");
    return buffers_.first[e + 1] - buffers_.first[e];
  }

  /// For the operations.
  detail::MoeBuffers<P>& buffers(size rows) {
    rows_ = rows;
    return buffers_;
  }

 private:
  static LatentMoeConfig checked(const LatentMoeConfig& g) {
    check(g, "MoeWorkspace");
    return g;
  }
  template <class T>
  auto rows_of(const std::vector<T>& values, size columns) const {
    return view(values.data(), values.empty() ? 0 : size{rows_}, columns);
  }

  LatentMoeConfig geometry_;
  detail::OwnedSize max_rows_, rows_;
  detail::MoeBuffers<P> buffers_;
};

namespace detail {

template <precision P, latent_moe_geometry G>
void require_workspace(const char* operation, G g, const MoeWorkspace<P>& workspace, size rows) {
  const LatentMoeConfig& own = workspace.geometry();
  const bool same = own.hidden == g.hidden && own.latent == g.latent && own.expert_hidden == g.expert_hidden &&
                    own.n_routed == g.n_routed && own.top_k == g.top_k && own.n_shared == g.n_shared;
  require(same, operation, "workspace", "made for other sizes", "made for this geometry");
  require_rows(operation, workspace, rows);
}

/// Throws invalid_argument where an expert's matrices do not have the geometry's shapes.
template <latent_moe_geometry G>
void require_expert(const char* operation, G g, const ExpertWeights& expert, size e) {
  const size width = moe_expert_width(g);
  const auto fits = [](const AnyMatrix<>& w, size rows, size columns) {
    return w && w.extent(0) == rows && w.extent(1) == columns;
  };
  if (fits(expert.w1, g.expert_hidden, width) && fits(expert.w3, g.expert_hidden, width) &&
      fits(expert.w2, width, g.expert_hidden))
    return;
  const std::string name = "experts[" + std::to_string(e) + "].";
  require_weight(operation, (name + "w1").c_str(), expert.w1, g.expert_hidden, width);
  require_weight(operation, (name + "w3").c_str(), expert.w3, g.expert_hidden, width);
  require_weight(operation, (name + "w2").c_str(), expert.w2, width, g.expert_hidden);
}

/// The memory that a call writes at its end: no expert's weights may lie in it.
struct MoeResult {
  Footprint out, status{};
};

inline void require_apart(const char* operation, const MoeResult& result, const ExpertWeights& expert) {
  const auto apart = [&](const char* written, const Footprint& to) {
    require_disjoint(operation, written, to, "an expert's w1", expert.w1);
    require_disjoint(operation, written, to, "an expert's w3", expert.w3);
    require_disjoint(operation, written, to, "an expert's w2", expert.w2);
  };
  apart("out", result.out);
  apart("status", result.status);
}

/// Sorts the choices of all rows that are not skipped by expert (a counting sort: stable, no allocation), and tells the
/// source which experts they are.
template <precision P, class Ids, class Experts>
void choose_experts(MoeBuffers<P>& buffers, const Ids& ids, Experts& source) {
  const size rows = ids.extent(0), k = ids.extent(1), experts = buffers.first.size() - 1;
  size* first = buffers.first.data();
  for (size e = 0; e <= experts; ++e) first[e] = 0;
  const auto each_choice = [&](auto&& visit_choice) {
    for (size row = 0; row < rows; ++row)
      for (size j = 0; j < k && !buffers.skip[row]; ++j) visit_choice(static_cast<size>(ids(row, j)), row * k + j);
  };
  each_choice([&](size e, size) { ++first[e + 1]; });
  for (size e = 0; e < experts; ++e) first[e + 1] += first[e];
  each_choice([&](size e, size choice) {
    buffers.position[choice] = first[e];
    buffers.order[first[e]++] = choice;
  });
  for (size e = experts; e > 0; --e) first[e] = first[e - 1];  // each first[e] had moved on to first[e + 1]
  first[0] = 0;
  buffers.chosen.clear();
  for (size e = 0; e < experts; ++e)
    if (first[e] < first[e + 1]) buffers.chosen.push_back(e);
  if constexpr (requires { source.need(buffers.chosen.data(), buffers.chosen.size()); })
    source.need(buffers.chosen.data(), buffers.chosen.size());
}

/// One expert for all rows that chose it: every weight is read once for as many rows as the workspace holds.
template <precision P, latent_moe_geometry G>
void run_expert(const host& exec, G g, const ExpertWeights& expert, HostView<const typename P::activation, 2> x,
                MoeBuffers<P>& buffers, size first, size last) {
  const size width = moe_expert_width(g), max_rows = buffers.skip.size();
  for (; first < last; first += max_rows) {
    const size rows = smaller(max_rows, last - first);
    HostView<const typename P::activation, 2> chosen = x.slice(0, buffers.order[first] / g.top_k, 1);
    if (rows > 1) {
      const auto gathered = view(buffers.gathered.data(), rows, width);
      for (size i = 0; i < rows; ++i) {
        const auto row = x[buffers.order[first + i] / g.top_k];
        for (size c = 0; c < width; ++c) gathered(i, c) = row(c);
      }
      chosen = gathered;
    }
    dense_mlp(exec, g.activation, chosen, expert.w1, expert.w3, expert.w2, buffers.expert_mlp,
              view(buffers.expert_out.data() + first * width, rows, width));
  }
}

/// out = sum of the experts' outputs times their weights, in order of rank; 0 for skipped rows.
template <precision P, class Weights, class Out>
void combine_experts(const host& exec, const MoeBuffers<P>& buffers, const Weights& weights, const Out& out) {
  using Acc = typename P::accumulator;
  constexpr size tile = 64;
  const size rows = out.extent(0), width = out.extent(1), k = weights.extent(1);
  parallel_chunks(exec, width, tile, rows * width * (k + 1) * sizeof(Acc), [&](size begin, size end) {
    for (size row = 0; row < rows; ++row)
      for (size c = begin; c < end; c += tile) {
        const size columns = smaller(tile, end - c);
        Acc sum[tile] = {};
        for (size j = 0; j < k && !buffers.skip[row]; ++j) {
          const Acc weight = weights(row, j);
          const auto* y = buffers.expert_out.data() + buffers.position[row * k + j] * width + c;
          for (size i = 0; i < columns; ++i) sum[i] += weight * static_cast<Acc>(y[i]);
        }
        for (size i = 0; i < columns; ++i) out(row, c + i) = static_cast<typename Out::value_type>(sum[i]);
      }
  });
}

/// mix_routed_experts after its checks and choose_experts; `buffers.skip` says which rows are left out.
template <precision P, latent_moe_geometry G, class Weights, class Experts, class Out>
void mix_experts(const host& exec, G g, HostView<const typename P::activation, 2> x, const Weights& weights,
                 Experts& experts, MoeBuffers<P>& buffers, const Out& out, const MoeResult& result,
                 const char* operation) {
  for (const size e : buffers.chosen) {
    const UsedExpert<Experts> expert(experts, e);
    require_expert(operation, g, expert.weights(), e);
    require_apart(operation, result, expert.weights());
    run_expert<P>(exec, g, expert.weights(), x, buffers, buffers.first[e], buffers.first[e + 1]);
  }
  combine_experts(exec, buffers, weights, out);
}

template <class Experts>
void require_experts(const char* operation, Experts& experts, size expected) {
  require(static_cast<size>(experts.size()) == expected, operation, "experts.size()", static_cast<size>(experts.size()),
          expected);
}

/// Throws invalid_argument for an id outside [0, experts) in a row that is not padding.
template <class Ids>
void require_expert_ids(const char* operation, const Ids& ids, size experts, const HostView<const id, 1>& slots) {
  for (size row = 0; row < ids.extent(0); ++row)
    for (size j = 0; j < ids.extent(1) && !(slots.data && slots(row) == pad_slot); ++j)
      if (ids(row, j) < 0 || static_cast<size>(ids(row, j)) >= experts)
        throw invalid_argument(operation, "ids[" + std::to_string(row) + ", " + std::to_string(j) + "]",
                               std::to_string(ids(row, j)), "at least 0 and below " + std::to_string(experts));
}

}  // namespace detail

/// The weighted sum of the chosen experts: out = sum_j weights[j] * y_j, y = w2 . glu(w1 . x, w3 . x), each linear, the
/// activation and y rounded to the activation type, the sum in the accumulator type in order of rank.
/// Shapes: latent [R, W], ids and weights [R, top_k], out [R, W] (activation or accumulator; it may be latent), W the
/// latent width or, without latent space, the hidden size. Rows that chose the same expert are computed together, so
/// each chosen expert is asked for once and read once for up to 32 rows; a row's bits do not depend on the others.
/// `slots` [R], if given: rows with pad_slot are not looked at and give 0.
/// Throws invalid_argument on shapes, sizes and ids that do not fit and other overlapping memory, before any expert is
/// read, and passes on what `experts` throws; `out` is then unchanged. Accuracy: <= 8e-7 of the largest element
/// relative to double for float. Cost: 6 * R * top_k * expert_hidden * W FLOPs.
template <latent_moe_geometry G, host_tensor<2> Latent, host_tensor<2> Ids, host_tensor<2> Weights, class Experts,
          precision P, writable_host_tensor<2> Out>
  requires(expert_source<std::remove_reference_t<Experts>> &&
           std::same_as<typename Latent::value_type, typename P::activation> &&
           std::same_as<typename Weights::value_type, typename P::accumulator> &&
           std::same_as<typename Ids::value_type, id>)
void mix_routed_experts(const host& exec, G geometry, const Latent& latent, const Ids& ids, const Weights& weights,
                        Experts&& experts, MoeWorkspace<P>& workspace, const Out& out,
                        HostView<const id, 1> slots = {}) {
  constexpr const char* operation = "mix_routed_experts";
  const size rows = latent.extent(0), width = moe_expert_width(geometry);
  check(geometry, operation);
  detail::require_workspace(operation, geometry, workspace, rows);
  detail::require_shape(operation, "latent", latent, rows, width);
  detail::require_shape(operation, "ids", ids, rows, geometry.top_k);
  detail::require_shape(operation, "weights", weights, rows, geometry.top_k);
  detail::require_experts(operation, experts, geometry.n_routed);
  detail::require_shape(operation, "out", out, rows, width);
  if (slots.data) detail::require_shape(operation, "slots", slots, rows);
  detail::require_same_or_disjoint(operation, "out", out, "latent", latent);
  detail::require_disjoint(operation, "out", out, "ids", ids, "weights", weights, "slots", slots);
  detail::require_expert_ids(operation, ids, geometry.n_routed, slots);
  detail::MoeBuffers<P>& buffers = workspace.buffers(rows);
  for (size row = 0; row < rows; ++row) buffers.skip[row] = slots.data && slots(row) == pad_slot;
  detail::choose_experts(buffers, ids, experts);
  detail::mix_experts<P>(exec, geometry, latent, weights, experts, buffers, out, {detail::footprint(out)}, operation);
}

}  // namespace k3
