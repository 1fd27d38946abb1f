// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/buffer.cuh>
#include <k3/ops/kda_state.hpp>

namespace k3 {

/// One sequence's KDA state as host vectors, in the order of KdaState: recurrent [H, D key, D value], conv [3*H*D,
/// kernel-1].
template <class State, class Window>
struct KdaSlotValues {
  std::vector<State> recurrent;
  std::vector<Window> conv;
};

/// KdaState in device memory: the states of `slots` sequences in one KDA layer, zero at the start, in the host's layout
/// and bytes. It allocates when it is made and never again. `reset` may be captured into a graph; copies from and to
/// the host are ordered after what `stream` holds and return when they are done. Moves, does not copy.
template <class State = float, class Window = float>
class KdaDeviceState {
  static_assert(std::is_same_v<State, float>, "the device's KDA state is float");
  static_assert(std::is_same_v<Window, float> || std::is_same_v<Window, bf16>, "past inputs are kept as float or bf16");

 public:
  KdaDeviceState() = default;

  /// Throws invalid_argument as KdaState does, cuda_error where the memory is not there.
  template <kda_geometry G>
  KdaDeviceState(G geometry, size slots)
      : geometry_{geometry.heads, geometry.head_dim, geometry.conv_kernel}, slots_(slots) {
    constexpr const char* operation = "KdaDeviceState";
    check(geometry_, operation);
    detail::require(slots < size{1} << 31, operation, "slots", slots, "below 2^31");
    const size state = detail::checked_product(operation, "slots", slots, kda_state_elements(geometry_));
    const size window = detail::checked_product(operation, "slots", slots, kda_conv_elements(geometry_));
    recurrent_ = DeviceBuffer<State>(state);
    conv_ = DeviceBuffer<Window>(window);
  }

  size slots() const { return slots_; }
  /// The sizes this memory was made for; the gate's fields are not kept.
  const KdaConfig& geometry() const { return geometry_; }
  size bytes() const { return recurrent_.bytes() + conv_.bytes(); }

  /// What the operations take.
  KdaStateView<State, Window, MemorySpace::device> view() const {
    return {recurrent_.view(slots(), geometry_.heads, geometry_.head_dim, geometry_.head_dim),
            conv_.view(slots(), kda_conv_channels(geometry_), geometry_.conv_kernel - 1)};
  }

  /// Makes `slot` a new sequence's: zero. Throws invalid_argument where there is no such slot, here and below.
  void reset(size slot, cudaStream_t stream) {
    require_slot(slot);
    detail::check_cuda("KdaDeviceState", "cudaMemsetAsync",
                       cudaMemsetAsync(recurrent_at(slot), 0, state_size() * sizeof(State), stream));
    if (window_size() > 0)
      detail::check_cuda("KdaDeviceState", "cudaMemsetAsync",
                         cudaMemsetAsync(conv_at(slot), 0, window_size() * sizeof(Window), stream));
  }

  /// One sequence's state from the host. Throws invalid_argument where the lengths are not those of the geometry.
  void upload(size slot, const std::vector<State>& recurrent, const std::vector<Window>& conv, cudaStream_t stream) {
    require_slot(slot);
    detail::require(recurrent.size() == state_size(), "KdaDeviceState", "recurrent's length", recurrent.size(),
                    state_size());
    detail::require(conv.size() == window_size(), "KdaDeviceState", "conv's length", conv.size(), window_size());
    copy(recurrent_at(slot), recurrent.data(), state_size(), conv_at(slot), conv.data(), window_size(), stream);
  }
  /// As above, from a slot of a host state of the same sizes.
  void upload(size slot, const KdaState<State, Window>& from, size from_slot, cudaStream_t stream) {
    require_slot(slot);
    require_same(from);
    const auto recurrent = from.recurrent(from_slot);
    const auto conv = from.conv(from_slot);
    copy(recurrent_at(slot), recurrent.data, state_size(), conv_at(slot), conv.data, window_size(), stream);
  }

  /// One sequence's state as it is after what `stream` holds.
  KdaSlotValues<State, Window> download(size slot, cudaStream_t stream) const {
    require_slot(slot);
    KdaSlotValues<State, Window> values{std::vector<State>(state_size()), std::vector<Window>(window_size())};
    copy(values.recurrent.data(), recurrent_at(slot), state_size(), values.conv.data(), conv_at(slot), window_size(),
         stream);
    return values;
  }
  /// As above, into a slot of a host state of the same sizes.
  void download(size slot, KdaState<State, Window>& to, size to_slot, cudaStream_t stream) const {
    require_slot(slot);
    require_same(to);
    const auto recurrent = to.recurrent(to_slot);
    const auto conv = to.conv(to_slot);
    copy(recurrent.data, recurrent_at(slot), state_size(), conv.data, conv_at(slot), window_size(), stream);
  }

 private:
  size state_size() const { return kda_state_elements(geometry_); }
  size window_size() const { return kda_conv_elements(geometry_); }
  State* recurrent_at(size slot) const { return recurrent_.data() + slot * state_size(); }
  Window* conv_at(size slot) const { return conv_.data() + slot * window_size(); }

  void require_slot(size slot) const {
    detail::require(slot < slots_, "KdaDeviceState", "slot", slot, "below the number of slots");
  }
  void require_same(const KdaState<State, Window>& other) const {
    detail::require(other.geometry().heads == geometry_.heads && other.geometry().head_dim == geometry_.head_dim &&
                        other.geometry().conv_kernel == geometry_.conv_kernel,
                    "KdaDeviceState", "the host state's geometry", "another", "the device state's");
  }

  static void copy(State* to_state, const State* state, size state_count, Window* to_window, const Window* window,
                   size window_count, cudaStream_t stream) {
    constexpr const char* operation = "KdaDeviceState";
    const detail::BesideCaptures beside;
    detail::check_cuda(operation, "cudaMemcpyAsync",
                       cudaMemcpyAsync(to_state, state, state_count * sizeof(State), cudaMemcpyDefault, stream));
    if (window_count > 0)
      detail::check_cuda(operation, "cudaMemcpyAsync",
                         cudaMemcpyAsync(to_window, window, window_count * sizeof(Window), cudaMemcpyDefault, stream));
    detail::check_cuda(operation, "cudaStreamSynchronize", cudaStreamSynchronize(stream));
  }

  KdaConfig geometry_{};
  detail::OwnedSize slots_;
  DeviceBuffer<State> recurrent_{};
  DeviceBuffer<Window> conv_{};
};

}  // namespace k3
