// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/kda_decode_token.cuh>

namespace k3 {

namespace detail {

/// A host tensor copied to the device, dense, on a stream. The host copy lives until the caller has waited.
template <class T>
class KdaUpload {
 public:
  template <class V>
  KdaUpload(const gpu& exec, const V& from) : extents_{} {
    for (size d = 0; d < V::rank; ++d) extents_[d] = from.extents[d];
    staged_.reserve(from.elements());
    append(from);
    device_ = DeviceBuffer<T>(staged_.size(), false);
    if (!staged_.empty())
      check_cuda("launch_k3_kda_decode_token", "cudaMemcpyAsync",
                 cudaMemcpyAsync(device_.data(), staged_.data(), device_.bytes(), cudaMemcpyHostToDevice, exec.stream));
  }

  DeviceView<const T, 1> vector() const { return device_view(static_cast<const T*>(device_.data()), extents_[0]); }
  DeviceView<const T, 2> matrix() const {
    return device_view(static_cast<const T*>(device_.data()), extents_[0], extents_[1]);
  }

 private:
  template <class V>
  void append(const V& from) {
    if constexpr (V::rank == 1)
      staged_.insert(staged_.end(), from.data, from.data + from.extents[0]);
    else
      for (size i = 0; i < from.extents[0]; ++i) append(from[i]);
  }

  size extents_[2];
  std::vector<T> staged_;
  DeviceBuffer<T> device_;
};

/// f(AnyMatrix in device memory) of a host weight, which stays there until f returns.
template <class W, class F>
void with_uploaded(const gpu& exec, const W& weight, F&& f) {
  with_typed(weight, [&](const auto& typed) {
    using T = typename std::remove_cvref_t<decltype(typed)>::value_type;
    const KdaUpload<T> upload(exec, typed);
    f(AnyMatrix<MemorySpace::device>(upload.matrix()));
  });
}

}  // namespace detail

/// `kda_decode_token` on the device for operands in host memory and a state that stays on the device: copies x_qkv,
/// conv, log_decay and beta there and out [R, H*D] back, and waits. A convenience that allocates; a decode step calls
/// `kda_decode_fused` with everything resident. Throws invalid_argument as the host's kda_decode_token, the slots
/// included, before anything changes.
template <kda_geometry G, host_tensor<2> X, class W, host_tensor<2> Decay, host_tensor<2> Beta, class Window>
void launch_k3_kda_decode_token_on_device(const gpu& exec, G geometry, const X& x_qkv, const KdaConvWeights<W>& conv,
                                          const Decay& log_decay, const Beta& beta, HostView<const id, 1> slots,
                                          const KdaStateView<float, Window, MemorySpace::device>& state,
                                          const HostView<float, 2>& out) {
  constexpr const char* operation = "launch_k3_kda_decode_token";
  check(geometry, operation);
  const size rows = x_qkv.extent(0), width = kda_width(geometry), taps = geometry.conv_kernel;
  detail::require_shape(operation, "x_qkv", x_qkv, rows, kda_conv_channels(geometry));
  detail::require_weight(operation, "conv.q", conv.q, width, taps);
  detail::require_weight(operation, "conv.k", conv.k, width, taps);
  detail::require_weight(operation, "conv.v", conv.v, width, taps);
  detail::require_shape(operation, "log_decay", log_decay, rows, width);
  detail::require_shape(operation, "beta", beta, rows, geometry.heads);
  detail::require_shape(operation, "out", out, rows, width);
  detail::require_slots(operation, slots, rows, state.recurrent.extent(0));
  detail::require_disjoint(operation, "out", out, "x_qkv", x_qkv, "conv.q", conv.q, "conv.k", conv.k, "conv.v", conv.v,
                           "log_decay", log_decay, "beta", beta, "slots", slots);
  const detail::KdaUpload<typename X::value_type> x(exec, x_qkv);
  const detail::KdaUpload<typename Decay::value_type> decay(exec, log_decay);
  const detail::KdaUpload<typename Beta::value_type> logits(exec, beta);
  const detail::KdaUpload<id> ids(exec, slots);
  const DeviceBuffer<float> result(out.elements(), false);
  std::vector<float> values(out.elements());
  detail::with_uploaded(exec, conv.q, [&](const auto& q) {
    detail::with_uploaded(exec, conv.k, [&](const auto& k) {
      detail::with_uploaded(exec, conv.v, [&](const auto& v) {
        kda_decode_token(exec, geometry, x.matrix(), KdaConvWeights{q, k, v}, decay.matrix(), logits.matrix(),
                         ids.vector(), state, result.view(rows, kda_width(geometry)));
        if (!values.empty())
          detail::check_cuda(
              operation, "cudaMemcpyAsync",
              cudaMemcpyAsync(values.data(), result.data(), result.bytes(), cudaMemcpyDeviceToHost, exec.stream));
        detail::check_cuda(operation, "cudaStreamSynchronize", cudaStreamSynchronize(exec.stream));
      });
    });
  });
  for (size row = 0; row < rows; ++row)
    for (size c = 0; c < out.extents[1]; ++c) out(row, c) = values[row * out.extents[1] + c];
}

/// As above for a state in host memory, which is copied to the device and back: what a step costs that keeps nothing
/// there.
template <kda_geometry G, host_tensor<2> X, class W, host_tensor<2> Decay, host_tensor<2> Beta, class Window>
void launch_k3_kda_decode_token(const gpu& exec, G geometry, const X& x_qkv, const KdaConvWeights<W>& conv,
                                const Decay& log_decay, const Beta& beta, HostView<const id, 1> slots,
                                KdaState<float, Window>& state, const HostView<float, 2>& out) {
  detail::require_slots("launch_k3_kda_decode_token", slots, x_qkv.extent(0), state.slots());
  KdaDeviceState<float, Window> resident(geometry, state.slots());
  const auto each_slot = [&](auto&& f) {
    for (detail::SlotRun run = detail::next_run(slots, 0); run.count > 0;
         run = detail::next_run(slots, run.first + run.count))
      f(run.slot);
  };
  each_slot([&](size slot) { resident.upload(slot, state, slot, exec.stream); });
  launch_k3_kda_decode_token_on_device(exec, geometry, x_qkv, conv, log_decay, beta, slots, resident.view(), out);
  each_slot([&](size slot) { resident.download(slot, state, slot, exec.stream); });
}

}  // namespace k3
