// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/kda_state.hpp>
#include <k3/ops/short_conv.hpp>

namespace k3 {

/// The weights of KDA's three short convolutions, each [H*D, kernel]: views of one type or AnyMatrix of one type.
template <class W>
struct KdaConvWeights {
  W q, k, v;
};
template <class W>
KdaConvWeights(W, W, W) -> KdaConvWeights<W>;

/// The q, k and v blocks of one weight [3*H*D, kernel]. Throws invalid_argument on another shape.
template <kda_geometry G, host_tensor<2> W>
KdaConvWeights<W> kda_conv_weights(G geometry, const W& weight) {
  const size width = kda_width(geometry);
  detail::require_shape("kda_conv_weights", "weight", weight, kda_conv_channels(geometry), geometry.conv_kernel);
  return {weight.slice(0, 0, width), weight.slice(0, width, width), weight.slice(0, 2 * width, width)};
}
template <kda_geometry G>
KdaConvWeights<AnyMatrix<>> kda_conv_weights(G geometry, const AnyMatrix<>& weight) {
  return visit(weight, [&](const auto& typed) -> KdaConvWeights<AnyMatrix<>> {
    const auto parts = kda_conv_weights(geometry, typed);
    return {parts.q, parts.k, parts.v};
  });
}

namespace detail {

template <class G>
constexpr size kda_scratch_size() {
  if constexpr (std::is_empty_v<G>)
    return G::head_dim;
  else
    return kda_max_head_dim;
}

/// One head's rows of a token.
template <class Acc, size N>
struct KdaScratch {
  alignas(64) Acc query[N];
  alignas(64) Acc key[N];
  alignas(64) Acc value[N];
  alignas(64) Acc decay[N];
  alignas(64) Acc out[N];
};

/// One token of one head from its convolved query, key and value on: normalisation, decay, the delta rule, the read.
/// `next` is a state that will be needed soon.
template <class Kernel, size N, class Decay, class State>
void kda_recurrence(KdaScratch<typename Kernel::Acc, N>& s, size n, const Decay* log_decay,
                    typename Kernel::Acc beta_logit, State* state, const State* next) {
  using Acc = typename Kernel::Acc;
  const Acc eps = static_cast<Acc>(KDA_L2_EPS);
  Kernel::scale(s.query, kda_query_scale(Kernel::squares(s.query, n), n, eps), n);
  Kernel::scale(s.key, l2_scale(Kernel::squares(s.key, n), eps), n);
  Kernel::exponential(log_decay, s.decay, n);
  Kernel::step(state, KdaHeadStep<Acc>{s.decay, s.query, s.key, s.value, s.out, sigmoid(beta_logit), n}, next);
}

/// f(KdaConvWeights of typed views).
template <class W, class F>
void with_typed_conv(const char*, const KdaConvWeights<W>& conv, F&& f) {
  f(conv);
}
template <class F>
void with_typed_conv(const char* operation, const KdaConvWeights<AnyMatrix<>>& conv, F&& f) {
  require(conv.k.type == conv.q.type && conv.v.type == conv.q.type, operation, "conv", "of several stored types",
          "three weights of one type");
  visit(conv.q, [&](const auto& q) {
    using T = typename std::remove_cvref_t<decltype(q)>::value_type;
    f(KdaConvWeights<View<const T, 2>>{q, typed_view<T>(conv.k), typed_view<T>(conv.v)});
  });
}

template <class G, class X, class W, class Decay, class Beta, class State, class Window, class Out>
struct KdaCall {
  G g;
  X x;
  KdaConvWeights<W> conv;
  Decay log_decay;
  Beta beta;
  HostView<const id, 1> slots;
  KdaStateView<State, Window> state;
  Out out;

  State* head_state(const SlotRun& run, size head) const {
    return state.recurrent.data + run.slot * state.recurrent.strides[0] + head * state.recurrent.strides[1];
  }

  /// The convolution of a head's channels in one of the blocks q (0), k (1), v (2).
  template <class Kernel>
  void convolve_head(const W& weight, size block, size row, const SlotRun& run, size head,
                     typename Kernel::Acc* y) const {
    const size width = kda_width(g), c = head * g.head_dim, channel = block * width + c;
    Window* window = state.conv.data + run.slot * state.conv.strides[0] + channel * (g.conv_kernel - 1);
    short_conv_row<typename X::value_type, Kernel>(g.conv_kernel, &x(row, channel), &weight(c, 0), weight.strides[0],
                                                   window, y, g.head_dim);
  }

  /// One token of one head.
  template <class Kernel, size N>
  void token(size row, const SlotRun& run, size head, KdaScratch<typename Kernel::Acc, N>& s, const State* next) const {
    using Acc = typename Kernel::Acc;
    const size n = g.head_dim;
    convolve_head<Kernel>(conv.q, 0, row, run, head, s.query);
    convolve_head<Kernel>(conv.k, 1, row, run, head, s.key);
    convolve_head<Kernel>(conv.v, 2, row, run, head, s.value);
    kda_recurrence<Kernel>(s, n, &log_decay(row, head * n), static_cast<Acc>(beta(row, head)), head_state(run, head),
                           next);
    for (size v = 0; v < n; ++v) out(row, head * n + v) = static_cast<typename Out::value_type>(s.out[v]);
  }

  /// Units [first, last) of heads x runs, the runs of a head one after the other so that they share its conv weights.
  template <class Kernel>
  void units(size runs, size first, size last) const {
    KdaScratch<typename Kernel::Acc, kda_scratch_size<G>()> scratch;
    SlotRun run = next_run(slots, 0);
    for (size skip = first % runs; skip > 0; --skip) run = next_run(slots, run.first + run.count);
    for (size unit = first; unit < last; ++unit) {
      const size head = unit / runs;
      SlotRun after = next_run(slots, run.first + run.count);
      if (after.count == 0) after = next_run(slots, 0);
      const State* own = head_state(run, head);
      const State* next = unit + 1 < last ? head_state(after, (unit + 1) / runs) : own;
      for (size i = 0; i < run.count; ++i)
        token<Kernel>(run.first + i, run, head, scratch, i + 1 < run.count ? own : next);
      run = after;
    }
  }
};

template <class G, class State, class Window>
void require_kda_state(const char* operation, G g, const KdaStateView<State, Window>& state) {
  const size slots = state.recurrent.extent(0);
  require_shape(operation, "state.recurrent", state.recurrent, slots, g.heads, g.head_dim, g.head_dim);
  require_shape(operation, "state.conv", state.conv, slots, kda_conv_channels(g), g.conv_kernel - 1);
  require(slots == 0 || (state.recurrent[0].contiguous() && state.conv[0].contiguous()), operation, "state",
          "strided inside a slot", "dense slots");
}

}  // namespace detail

/// One Kimi Delta Attention step per row: convolution and SiLU of q, k, v (rounded to x_qkv's type), q and k divided by
/// sqrt(sum of squares + 1e-6), q by sqrt(D); then per head S = diag(e^g) S, u = sigmoid(beta) (v - S^T k), S += k u^T,
/// out = S^T q, in the accumulator type of x_qkv.
/// Shapes: x_qkv [R, 3*H*D] before the convolution, log_decay [R, H*D] (kda_gate), beta [R, H] logits, slots [R], out
/// [R, H*D]; rows may be strided. Rows of one slot are its next tokens in order, with the bits of as many calls; a row
/// of pad_slot gives zeros, its inputs are not looked at. Nothing allocates; D <= kda_max_head_dim.
/// Throws invalid_argument on shapes, on slots out of range or whose rows are not consecutive, and where out or the
/// state shares memory with another argument, before anything changes. Accuracy: float within 1e-6 (D > 128: 2e-6) of
/// double, of the largest output. Cost per row: 10 H D^2 FLOPs, 2 H D^2 state elements moved.
/// Source: Kimi Linear (arXiv 2510.26692).
template <kda_geometry G, host_tensor<2> X, class W, host_tensor<2> Decay, host_tensor<2> Beta, class State,
          class Window, writable_host_tensor<2> Out>
  requires(std::is_same_v<State, float> || std::is_same_v<State, double>)
void kda_decode_token(const host& exec, G geometry, const X& x_qkv, const KdaConvWeights<W>& conv,
                      const Decay& log_decay, const Beta& beta, HostView<const id, 1> slots,
                      const KdaStateView<State, Window>& state, const Out& out) {
  using Acc = accumulator_t<typename X::value_type>;
  constexpr const char* operation = "kda_decode_token";
  check(geometry, operation);
  const size rows = x_qkv.extent(0), width = kda_width(geometry), taps = geometry.conv_kernel;
  detail::require_shape(operation, "x_qkv", x_qkv, rows, kda_conv_channels(geometry));
  detail::require_weight(operation, "conv.q", conv.q, width, taps);
  detail::require_weight(operation, "conv.k", conv.k, width, taps);
  detail::require_weight(operation, "conv.v", conv.v, width, taps);
  detail::require_shape(operation, "log_decay", log_decay, rows, width);
  detail::require_shape(operation, "beta", beta, rows, geometry.heads);
  detail::require_kda_state(operation, geometry, state);
  detail::require_shape(operation, "out", out, rows, width);
  const size runs = detail::require_slots(operation, slots, rows, state.recurrent.extent(0));
  detail::with_typed_conv(operation, conv, [&](const auto& typed) {
    const auto require_disjoint = [&](const char* written, const auto& to) {
      detail::require_disjoint(operation, written, to, "x_qkv", x_qkv, "log_decay", log_decay, "beta", beta, "conv.q",
                               typed.q, "conv.k", typed.k, "conv.v", typed.v, "slots", slots);
    };
    require_disjoint("out", out);
    require_disjoint("state.recurrent", state.recurrent);
    require_disjoint("state.conv", state.conv);
    detail::require_disjoint(operation, "state.recurrent", state.recurrent, "state.conv", state.conv);
    detail::require_disjoint(operation, "out", out, "state.recurrent", state.recurrent, "state.conv", state.conv);
    for (size row = 0; row < rows; ++row)
      for (size c = 0; slots[row] == pad_slot && c < width; ++c) out(row, c) = typename Out::value_type{};
    const detail::KdaCall<G, X, std::remove_cvref_t<decltype(typed.q)>, Decay, Beta, State, Window, Out> call{
        geometry, x_qkv, typed, log_decay, beta, slots, state, out};
    detail::with_kda_kernel<Acc, State>(exec, [&](auto kernel) {
      const size bytes = 2 * rows * kda_state_elements(geometry) * sizeof(State);
      detail::parallel_chunks(exec, runs * geometry.heads, 1, bytes,
                              [&](size first, size last) { call.template units<decltype(kernel)>(runs, first, last); });
    });
  });
}

}  // namespace k3
