// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <k3/core/any_view.hpp>
#include <k3/core/execution.hpp>
#include <k3/core/overlap.hpp>
#include <k3/ops/kda_head_avx512.hpp>
#include <k3/ops/require_weight.hpp>
#include <k3/ops/slot_runs.hpp>

namespace k3 {

namespace detail {

/// One token in `count` channels: sum = taps over the window and x, the last tap on x; x enters the window.
/// `taps` is a size or an integral_constant.
template <class Taps, class Acc, class X, class W, class Window>
void convolve(Taps taps, const X* x, const W* weight, size weight_stride, Window* window, Acc* sum, size count) {
  const size held = taps - 1;
  for (size c = 0; c < count; ++c) {
    const W* tap = weight + c * weight_stride;
    Window* past = window + c * held;
    Acc total = 0;
    for (size j = 0; j < held; ++j) total += static_cast<Acc>(tap[j]) * static_cast<Acc>(past[j]);
    sum[c] = total + static_cast<Acc>(tap[held]) * static_cast<Acc>(x[c]);
    for (size j = 0; j + 1 < held; ++j) past[j] = past[j + 1];
    if (held > 0) past[held - 1] = static_cast<Window>(static_cast<Acc>(x[c]));
  }
}

/// y = SiLU of the convolution, rounded to Rounded.
template <class Rounded, class Kernel, class X, class W, class Window>
void short_conv_row(size taps, const X* x, const W* weight, size weight_stride, Window* window, typename Kernel::Acc* y,
                    size count) {
  using Acc = typename Kernel::Acc;
  if (taps == 4)
    convolve(std::integral_constant<size, 4>{}, x, weight, weight_stride, window, y, count);
  else
    convolve(taps, x, weight, weight_stride, window, y, count);
  Kernel::silu(y, count);
  if constexpr (!std::is_same_v<Rounded, Acc>)
    for (size c = 0; c < count; ++c) y[c] = static_cast<Acc>(static_cast<Rounded>(y[c]));
}

/// f(kernel) with the version of a head's arithmetic to run. The vector versions need float throughout.
template <class Acc, class State, class F>
void with_kda_kernel(const host& exec, F&& f) {
#if K3_X86_64
  if constexpr (std::is_same_v<Acc, float> && std::is_same_v<State, float>) {
    const Isa isa = exec.isa > best_isa() ? best_isa() : exec.isa;
    if (isa == Isa::avx512) return f(KdaAvx512{});
    if (isa == Isa::avx2) return f(KdaAvx2{});
  }
#endif
  static_cast<void>(exec);
  f(KdaPlain<Acc>{});
}

}  // namespace detail

/// Causal depthwise convolution with SiLU, one token per row: y[c] = silu(sum_j weight[c, j] input[c, t - K + 1 + j]),
/// the last tap on the current token, no bias. `window` keeps the last K - 1 inputs of every slot, oldest first.
/// Shapes: x [R, C], weight [C, K] (a stored [C, 1, K] is the same memory), slots [R], window [slots, C, K-1], out
/// [R, C], rounded once on store. Rows of one slot are consecutive tokens; a row of pad_slot gives zeros.
/// Throws invalid_argument on shapes, slots or overlapping memory, before anything changes.
/// Accuracy: float within 6e-7 of double, of the sum of |terms|. Source: `{q,k,v}_conv1d.weight`.
template <host_tensor<2> X, class Weight, class Window, writable_host_tensor<2> Out>
void short_conv(const host& exec, const X& x, const Weight& weight, HostView<const id, 1> slots,
                const HostView<Window, 3>& window, const Out& out) {
  using Acc = accumulator_t<typename X::value_type>;
  using OutType = typename Out::value_type;
  constexpr const char* operation = "short_conv";
  const size rows = x.extent(0), channels = x.extent(1), taps = weight.extent(1);
  detail::require(taps > 0, operation, "weight's taps", taps, "at least 1");
  detail::require_shape(operation, "x", x, rows, channels);
  detail::require_weight(operation, "weight", weight, channels, taps);
  detail::require_shape(operation, "window", window, window.extent(0), channels, taps - 1);
  detail::require(window[0].contiguous() || window.elements() == 0, operation, "window", "strided inside a slot",
                  "dense slots");
  detail::require_shape(operation, "out", out, rows, channels);
  detail::require_slots(operation, slots, rows, window.extent(0));
  detail::require_disjoint(operation, "out", out, "x", x, "window", window, "weight", weight, "slots", slots);
  detail::require_disjoint(operation, "window", window, "x", x, "weight", weight, "slots", slots);
  detail::with_typed(weight, [&](const auto& w) {
    for (size row = 0; row < rows; ++row)
      for (size c = 0; slots[row] == pad_slot && c < channels; ++c) out(row, c) = OutType{};
    detail::with_kda_kernel<Acc, Acc>(exec, [&](auto kernel) {
      detail::parallel_chunks(exec, channels, 64, rows * channels * (taps * 8 + 32), [&](size first, size last) {
        constexpr size block = 256;
        alignas(64) Acc y[block];
        for (size row = 0; row < rows; ++row) {
          if (slots[row] == pad_slot) continue;
          for (size c = first; c < last; c += block) {
            const size count = detail::smaller(block, last - c);
            Window* past = window.data + static_cast<size>(slots[row]) * window.strides[0] + c * (taps - 1);
            detail::short_conv_row<Acc, decltype(kernel)>(taps, &x(row, c), &w(c, 0), w.strides[0], past, y, count);
            for (size i = 0; i < count; ++i) out(row, c + i) = static_cast<OutType>(y[i]);
          }
        }
      });
    });
  });
}

}  // namespace k3
