// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>

#include <k3/core/bf16.hpp>
#include <k3/core/view.hpp>
#include <k3/geometry/kda_config.hpp>

namespace k3 {

namespace detail {

/// Memory on cache-line boundaries, so that a vector load of a state row never touches two lines.
template <class T>
struct CacheLineAllocator {
  using value_type = T;
  static constexpr std::align_val_t alignment{64};

  CacheLineAllocator() = default;
  template <class U>
  CacheLineAllocator(const CacheLineAllocator<U>&) noexcept {}

  T* allocate(size count) {
    if (count > ~size{0} / sizeof(T)) throw std::bad_array_new_length();
    return static_cast<T*>(::operator new(count * sizeof(T), alignment));
  }
  void deallocate(T* data, size) noexcept { ::operator delete(data, alignment); }

  friend bool operator==(const CacheLineAllocator&, const CacheLineAllocator&) { return true; }
};

}  // namespace detail

/// The memory a KDA step updates, one entry per slot: `recurrent` [slots, H, D key, D value] and `conv`
/// [slots, 3*H*D, kernel-1], the last inputs of every q, k and v channel before the convolution, oldest first.
template <class State, class Window, MemorySpace Space = MemorySpace::host>
struct KdaStateView {
  View<State, 4, Space> recurrent;
  View<Window, 3, Space> conv;
};

/// The states of `slots` sequences in one KDA layer, zero at the start and after `reset`. Copying copies the memory.
/// `State` is float or double, `Window` the type in which past inputs are kept (float, double or bf16).
/// Size: kda_state_elements + kda_conv_elements per slot (6.3 MB + 0.4 MB for the released model's float state).
template <class State = float, class Window = float>
class KdaState {
  static_assert(std::is_same_v<State, float> || std::is_same_v<State, double>, "the state is float or double");
  static_assert(real<Window>);

 public:
  KdaState() = default;

  /// Throws invalid_argument where the geometry has an empty size or the memory's byte count does not fit 64 bits.
  template <kda_geometry G>
  KdaState(G geometry, size slots) : geometry_{geometry.heads, geometry.head_dim, geometry.conv_kernel}, slots_(slots) {
    constexpr const char* operation = "KdaState";
    check(geometry_, operation);
    detail::require(slots < size{1} << 31, operation, "slots", slots, "below 2^31");
    recurrent_.resize(detail::checked_length<State>(operation, slots, kda_state_elements(geometry_)));
    conv_.resize(detail::checked_length<Window>(operation, slots, kda_conv_elements(geometry_)));
  }

  size slots() const { return slots_; }
  /// The sizes this memory was made for; the gate's fields are not kept.
  const KdaConfig& geometry() const { return geometry_; }

  /// What the operations take.
  KdaStateView<State, Window> view() {
    return {k3::view(recurrent_.data(), slots(), geometry_.heads, geometry_.head_dim, geometry_.head_dim),
            k3::view(conv_.data(), slots(), kda_conv_channels(geometry_), geometry_.conv_kernel - 1)};
  }

  /// One sequence's recurrent state [H, D key, D value], contiguous. Throws invalid_argument where there is no slot.
  HostView<State, 3> recurrent(size slot) { return view().recurrent[checked(slot)]; }
  HostView<const State, 3> recurrent(size slot) const { return const_cast<KdaState*>(this)->recurrent(slot); }
  /// One sequence's convolution window [3*H*D, kernel-1], contiguous.
  HostView<Window, 2> conv(size slot) { return view().conv[checked(slot)]; }
  HostView<const Window, 2> conv(size slot) const { return const_cast<KdaState*>(this)->conv(slot); }

  /// Makes `slot` a new sequence's: zero, whatever was there.
  void reset(size slot) {
    const HostView<State, 3> state = recurrent(slot);
    const HostView<Window, 2> window = conv(slot);
    for (size i = 0; i < state.elements(); ++i) state.data[i] = State(0);
    for (size i = 0; i < window.elements(); ++i) window.data[i] = Window{};
  }

 private:
  size checked(size slot) const {
    detail::require(slot < slots_, "KdaState", "slot", slot, "below the number of slots");
    return slot;
  }

  KdaConfig geometry_{};
  detail::OwnedSize slots_;
  std::vector<State, detail::CacheLineAllocator<State>> recurrent_{};
  std::vector<Window, detail::CacheLineAllocator<Window>> conv_{};
};

}  // namespace k3
