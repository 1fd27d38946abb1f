// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/kda_device_state.cuh>
#include <k3/cuda/rms_norm.cuh>
#include <k3/kernels/kda_decode_token.cuh>
#include <k3/ops/kda_decode_token.hpp>
#include <k3/ops/row_status.hpp>

namespace k3 {

/// The q, k and v blocks of one weight [3*H*D, kernel] in device memory. Throws invalid_argument on another shape.
template <kda_geometry G, device_tensor<2> W>
KdaConvWeights<W> kda_conv_weights(G geometry, const W& weight) {
  const size width = kda_width(geometry);
  detail::require_shape("kda_conv_weights", "weight", weight, kda_conv_channels(geometry), geometry.conv_kernel);
  return {weight.slice(0, 0, width), weight.slice(0, width, width), weight.slice(0, 2 * width, width)};
}
template <kda_geometry G>
KdaConvWeights<AnyMatrix<MemorySpace::device>> kda_conv_weights(G geometry,
                                                                const AnyMatrix<MemorySpace::device>& weight) {
  return visit(weight, [&](const auto& typed) -> KdaConvWeights<AnyMatrix<MemorySpace::device>> {
    const auto parts = kda_conv_weights(geometry, typed);
    return {parts.q, parts.k, parts.v};
  });
}

namespace detail {

/// A weight for the kernel, float or bf16; shapes are checked by the caller.
template <size Rank>
kernel::KdaWeight kda_weight(const char* operation, const char* argument,
                             const AnyView<Rank, MemorySpace::device>& any) {
  require(any.type == ElementType::f32 || any.type == ElementType::bf16, operation, argument, "of another type",
          "F32 or BF16 on the device");
  return {any.data, any.type == ElementType::bf16};
}

inline kernel::KdaWeight kda_vector(const char* operation, const char* argument,
                                    const AnyVector<MemorySpace::device>& any, size count, bool may_be_longer) {
  require(static_cast<bool>(any), operation, argument, "absent", "a weight");
  require(any.extents[0] == count || (may_be_longer && any.extents[0] > count), operation, argument, any.extents[0],
          count);
  require_memory(operation, argument, any);
  return kda_weight(operation, argument, any);
}

/// The memory of states that are dense inside a slot.
template <class T, size Rank>
Footprint kda_slots_footprint(const DeviceView<T, Rank>& states) {
  const size slots = states.extents[0], width = slots > 0 ? states.elements() / slots : 0;
  if (width == 0) return {};
  return {reinterpret_cast<std::uintptr_t>(states.data), slots, width * sizeof(T), states.strides[0] * sizeof(T)};
}

/// The checks that both forms share, and the kernel's operands from them.
template <class G, class X, class W, class Decay, class Beta, class Window, class Out>
struct KdaDeviceCall {
  const char* operation;
  G g;
  X x;
  const KdaConvWeights<W>& conv;
  const char* decay_name;
  Decay decay;
  Beta beta;
  DeviceView<const id, 1> slots;
  KdaStateView<float, Window, MemorySpace::device> state;
  Out out;
  DeviceView<unsigned, 1> status;

  using Arguments = kernel::KdaDecodeArguments<typename X::value_type, Window, typename Decay::value_type,
                                               typename Beta::value_type, typename Out::value_type>;

  void check_shapes() const {
    check(g, operation);
    require(g.head_dim <= kernel::kda_widest_head, operation, "geometry.head_dim", g.head_dim,
            "at most kda_max_head_dim (1024)");
    require(kda_conv_channels(g) < size{1} << 31 && g.conv_kernel < size{1} << 31, operation, "geometry", "too large",
            "below 2^31 channels");
    const size rows = x.extent(0), width = kda_width(g), slot_count = state.recurrent.extent(0);
    require(rows < size{1} << 31, operation, "rows", rows, "below 2^31");
    require_shape(operation, "x_qkv", x, rows, kda_conv_channels(g));
    require_shape(operation, decay_name, decay, rows, width);
    require_shape(operation, "beta", beta, rows, g.heads);
    require_shape(operation, "slots", slots, rows);
    require_shape(operation, "state.recurrent", state.recurrent, slot_count, g.heads, g.head_dim, g.head_dim);
    require_shape(operation, "state.conv", state.conv, slot_count, kda_conv_channels(g), g.conv_kernel - 1);
    require(slot_count == 0 || (state.recurrent[0].contiguous() && state.conv[0].contiguous()), operation, "state",
            "strided inside a slot", "dense slots");
    require_shape(operation, "out", out, rows, width);
    if (status.data != nullptr) require_shape(operation, "status", status, rows);
  }

  kernel::KdaWeight taps(const char* name, const AnyMatrix<MemorySpace::device>& weight) const {
    require_weight(operation, name, weight, kda_width(g), g.conv_kernel);
    require_written_apart(name, footprint(weight));
    return kda_weight(operation, name, weight);
  }

  /// What the kernel writes must not be what it reads.
  void require_written_apart(const char* read, const Footprint& from) const {
    require_disjoint(operation, "out", footprint(out), read, from);
    require_disjoint(operation, "state.recurrent", kda_slots_footprint(state.recurrent), read, from);
    require_disjoint(operation, "state.conv", kda_slots_footprint(state.conv), read, from);
    require_disjoint(operation, "status", footprint(status), read, from);
  }

  Arguments arguments() const {
    check_shapes();
    require_written_apart("x_qkv", footprint(x));
    require_written_apart(decay_name, footprint(decay));
    require_written_apart("beta", footprint(beta));
    require_written_apart("slots", footprint(slots));
    require_distinct(operation, "out", out);
    require_distinct(operation, "state.recurrent", state.recurrent);
    require_distinct(operation, "state.conv", state.conv);
    const Footprint recurrent = kda_slots_footprint(state.recurrent), window = kda_slots_footprint(state.conv);
    require_disjoint(operation, "state.recurrent", recurrent, "state.conv", window);
    require_disjoint(operation, "out", footprint(out), "state.recurrent", recurrent);
    require_disjoint(operation, "out", footprint(out), "state.conv", window);
    require_disjoint(operation, "status", footprint(status), "state.recurrent", recurrent);
    require_disjoint(operation, "status", footprint(status), "state.conv", window);
    require_disjoint(operation, "status", footprint(status), "out", footprint(out));
    Arguments a{};
    a.heads = static_cast<unsigned>(g.heads), a.rows = static_cast<unsigned>(x.extent(0));
    a.slot_count = state.recurrent.extent(0);
    a.head_dim = static_cast<unsigned>(g.head_dim), a.taps = static_cast<unsigned>(g.conv_kernel);
    a.x = x.data, a.x_stride = x.strides[0];
    a.conv_q = taps("conv.q", conv.q), a.conv_k = taps("conv.k", conv.k), a.conv_v = taps("conv.v", conv.v);
    a.decay = decay.data, a.decay_stride = decay.strides[0];
    a.beta = beta.data, a.beta_stride = beta.strides[0];
    a.slots = slots.data;
    a.state = state.recurrent.data, a.state_stride = state.recurrent.strides[0];
    a.window = state.conv.data, a.window_stride = state.conv.strides[0];
    a.out = out.data, a.out_stride = out.strides[0];
    a.status = status.data, a.bad_slot = static_cast<unsigned>(RowStatus::bad_slot);
    return a;
  }
};

/// Whether memory lies so that a head can be copied in bulk, and 4 weights read at a time.
template <class Arguments>
bool kda_aligned(const Arguments& a) {
  const auto in_fours = [](const kernel::KdaWeight& weight) {
    return reinterpret_cast<std::uintptr_t>(weight.data) % (weight.is_bf16 ? 8 : 16) == 0;
  };
  return reinterpret_cast<std::uintptr_t>(a.state) % 16 == 0 && a.state_stride % 4 == 0 && in_fours(a.conv_q) &&
         in_fours(a.conv_k) && in_fours(a.conv_v);
}

template <class G>
constexpr bool kda_may_be_staged() {
  if constexpr (std::is_empty_v<G>)
    return G::head_dim == kernel::kda_staged_head;
  else
    return true;
}

template <bool Fused, bool Staged, bool FloatWeights, class Arguments>
void launch_kda_decode(const char* operation, const gpu& exec, const Arguments& a) {
  const auto function = kernel::kda_decode<Fused, Staged, FloatWeights, Arguments>;
  constexpr unsigned shared = Staged ? kernel::KdaStagedTile::bytes : 0;
  if constexpr (Staged)
    check_cuda(operation, "cudaFuncSetAttribute",
               cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  launch(operation, exec.stream, dim3(a.heads, smaller(a.rows, 65535u)), dim3(kernel::kda_threads), shared, function,
         a);
}

/// Which kernel runs depends on the target, the geometry, the weights' type and how memory is aligned; the bits do not.
template <bool Fused, class G, class Arguments>
void launch_kda_decode(const char* operation, const gpu& exec, G geometry, Arguments a) {
  if (a.rows == 0) return;
  a.blocks_at_once = 3 * static_cast<unsigned>(multiprocessors());
  if constexpr (kda_may_be_staged<G>()) {
    if (target(operation).bulk_copies && geometry.head_dim == kernel::kda_staged_head && geometry.conv_kernel == 4 &&
        kda_aligned(a)) {
      const bool in_float = !a.conv_q.is_bf16 && !a.conv_k.is_bf16 && !a.conv_v.is_bf16 && !a.fused.A_log.is_bf16 &&
                            !a.fused.dt_bias.is_bf16 && !a.fused.o_norm.is_bf16;
      if (in_float) return launch_kda_decode<Fused, true, true>(operation, exec, a);
      return launch_kda_decode<Fused, true, false>(operation, exec, a);
    }
  }
  launch_kda_decode<Fused, false, false>(operation, exec, a);
}

}  // namespace detail

/// One Kimi Delta Attention step per row on the device: what the host's `kda_decode_token` computes, of the same
/// shapes. Conv weights are float or bf16, the state float. Slots are device data: a row whose slot is out of range, or
/// comes back after rows of other slots, gives zeros and changes no state; its word of `status` [R], if given, becomes
/// RowStatus::bad_slot (words are written, never cleared). A row's bits depend on its own sequence alone.
/// Throws invalid_argument as the host's for what the arguments show, overlapping memory among it, before anything is
/// launched; nothing allocates or waits. Accuracy: float within 2e-6 of double, of the largest output.
template <kda_geometry G, device_tensor<2> X, class W, device_tensor<2> Decay, device_tensor<2> Beta, class Window,
          writable_device_tensor<2> Out>
  requires(std::same_as<typename Out::value_type, float>)
void kda_decode_token(const gpu& exec, G geometry, const X& x_qkv, const KdaConvWeights<W>& conv,
                      const Decay& log_decay, const Beta& beta, DeviceView<const id, 1> slots,
                      const KdaStateView<float, Window, MemorySpace::device>& state, const Out& out,
                      DeviceView<unsigned, 1> status = {}) {
  const detail::KdaDeviceCall<G, X, W, Decay, Beta, Window, Out> call{
      "kda_decode_token", geometry, x_qkv, conv, "log_decay", log_decay, beta, slots, state, out, status};
  detail::launch_kda_decode<false>(call.operation, exec, geometry, call.arguments());
}

/// A KDA layer between its projections, in one kernel: `kda_gate`, `kda_decode_token` and `gated_rms_norm` with nothing
/// but the rounding points of the three: the convolved q, k, v and the output, each once, to the type of x_qkv. Shapes:
/// x_qkv [R, 3*H*D] before the convolution, z [R, H*D] (f_b_proj), A_log [H or more], dt_bias [H*D], beta [R, H]
/// logits, gate [R, H*D] logits (g_proj), o_norm [D], slots [R], out [R, H*D]; weights float or bf16. Decay by
/// geometry.gate_lower_bound. Bad slots, padding, status, errors and bits as in the form above; out may not be gate.
/// Accuracy: float within 2e-6 of double, of the largest output; bf16 within 5e-4 of the host's bf16 path (relative L2,
/// heads of 24 and more). Cost: 8 H D^2 bytes of state a row (12.6 MB at the released geometry), once through shared
/// memory where D is 128, the kernel 4 and the device has bulk copies; other heads are read twice.
template <kda_geometry G, device_tensor<2> X, class W, device_tensor<2> Z, device_tensor<2> Beta, device_tensor<2> Gate,
          class Window, writable_device_tensor<2> Out>
  requires(std::same_as<typename Gate::value_type, typename X::value_type> &&
           std::same_as<typename Out::value_type, typename X::value_type>)
void kda_decode_fused(const gpu& exec, G geometry, const X& x_qkv, const KdaConvWeights<W>& conv, const Z& z,
                      const AnyVector<MemorySpace::device>& A_log, const AnyVector<MemorySpace::device>& dt_bias,
                      const Beta& beta, const Gate& gate, const AnyVector<MemorySpace::device>& o_norm, float norm_eps,
                      DeviceView<const id, 1> slots, const KdaStateView<float, Window, MemorySpace::device>& state,
                      const Out& out, DeviceView<unsigned, 1> status = {}) {
  const detail::KdaDeviceCall<G, X, W, Z, Beta, Window, Out> call{
      "kda_decode_fused", geometry, x_qkv, conv, "z", z, beta, slots, state, out, status};
  auto a = call.arguments();
  const char* operation = call.operation;
  const std::optional<float> bound = geometry.gate_lower_bound;
  detail::require(norm_eps >= 0 && norm_eps - norm_eps == 0, operation, "norm_eps", norm_eps,
                  "finite and not negative");
  detail::require_shape(operation, "gate", gate, x_qkv.extent(0), kda_width(geometry));
  call.require_written_apart("gate", detail::footprint(gate));
  call.require_written_apart("A_log", detail::footprint(A_log));
  call.require_written_apart("dt_bias", detail::footprint(dt_bias));
  call.require_written_apart("o_norm", detail::footprint(o_norm));
  a.fused.A_log = detail::kda_vector(operation, "A_log", A_log, geometry.heads, true);
  a.fused.dt_bias = detail::kda_vector(operation, "dt_bias", dt_bias, kda_width(geometry), false);
  a.fused.o_norm = detail::kda_vector(operation, "o_norm", o_norm, geometry.head_dim, false);
  a.fused.bounded = bound.has_value();
  a.fused.lower_bound = bound.value_or(0.0f);
  a.fused.norm_eps = norm_eps;
  a.fused.gate = gate.data, a.fused.gate_stride = gate.strides[0];
  detail::launch_kda_decode<true>(operation, exec, geometry, a);
}

}  // namespace k3
