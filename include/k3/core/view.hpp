// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <string>
#include <type_traits>
#include <vector>

#include <k3/core/error.hpp>

namespace k3 {

/// Where a view's memory lies. It is part of the view's type: host memory given to a GPU call does not compile.
enum class MemorySpace { host, device };

/// A non-owning tensor: pointer, extents and strides in elements. Row-major unless strides say otherwise; the last
/// dimension is always dense (stride 1). Copies are shallow; the caller keeps the memory alive.
template <class T, size Rank, MemorySpace Space = MemorySpace::host>
struct View {
  using value_type = std::remove_const_t<T>;
  static constexpr size rank = Rank;
  static constexpr MemorySpace space = Space;

  T* data = nullptr;
  size extents[Rank] = {};
  size strides[Rank] = {};

  /// The same memory, read-only.
  template <class U>
    requires(std::same_as<U, const T> && !std::is_const_v<T>)
  K3_HOST_DEVICE constexpr operator View<U, Rank, Space>() const {
    View<U, Rank, Space> result{data, {}, {}};
    for (size d = 0; d < Rank; ++d) {
      result.extents[d] = extents[d];
      result.strides[d] = strides[d];
    }
    return result;
  }

  K3_HOST_DEVICE constexpr size extent(size dimension) const { return extents[dimension]; }

  /// Whether an extent is 0.
  K3_HOST_DEVICE constexpr bool empty() const {
    for (size d = 0; d < Rank; ++d)
      if (extents[d] == 0) return true;
    return false;
  }

  K3_HOST_DEVICE constexpr size elements() const {
    size product = 1;
    for (size d = 0; d < Rank; ++d) product *= extents[d];
    return product;
  }

  template <class... Index>
    requires(sizeof...(Index) == Rank)
  K3_HOST_DEVICE constexpr T& operator()(Index... index) const {
    const size at[Rank] = {static_cast<size>(index)...};
    size offset = 0;
    for (size d = 0; d < Rank; ++d) offset += at[d] * strides[d];
    return data[offset];
  }

  /// The sub-tensor at `index` of the first dimension.
  K3_HOST_DEVICE constexpr auto operator[](size index) const {
    if constexpr (Rank == 1) {
      return data[index * strides[0]];
    } else {
      View<T, Rank - 1, Space> result{data + index * strides[0], {}, {}};
      for (size d = 1; d < Rank; ++d) {
        result.extents[d - 1] = extents[d];
        result.strides[d - 1] = strides[d];
      }
      return result;
    }
  }

  /// Entries [first, first + count) of `dimension`, all others whole. No check: internal and hot.
  K3_HOST_DEVICE constexpr View slice(size dimension, size first, size count) const {
    View result = *this;
    result.data += first * strides[dimension];
    result.extents[dimension] = count;
    return result;
  }

  /// True where the elements lie one after the other without gaps.
  K3_HOST_DEVICE constexpr bool contiguous() const {
    size expected = 1;
    for (size d = Rank; d-- > 0;) {
      if (extents[d] != 1 && strides[d] != expected) return false;
      expected *= extents[d];
    }
    return true;
  }
};

template <class T, size Rank>
using HostView = View<T, Rank, MemorySpace::host>;
template <class T, size Rank>
using DeviceView = View<T, Rank, MemorySpace::device>;

namespace detail {

template <class T>
struct view_traits : std::false_type {};
template <class T, size Rank, MemorySpace Space>
struct view_traits<View<T, Rank, Space>> : std::true_type {
  static constexpr bool writable = !std::is_const_v<T>;
};

template <MemorySpace Space, class T, class... Extent>
constexpr auto dense_view(T* data, Extent... extent) {
  constexpr size rank = sizeof...(Extent);
  View<T, rank, Space> result{data, {static_cast<size>(extent)...}, {}};
  size stride = 1;
  for (size d = rank; d-- > 0;) {
    result.strides[d] = stride;
    stride *= result.extents[d];
  }
  return result;
}

}  // namespace detail

/// A host (device) view of rank `Rank`, read-only or not.
template <class V, size Rank>
concept host_tensor = detail::view_traits<V>::value && V::rank == Rank && V::space == MemorySpace::host;
template <class V, size Rank>
concept device_tensor = detail::view_traits<V>::value && V::rank == Rank && V::space == MemorySpace::device;

/// As above, and its elements can be written.
template <class V, size Rank>
concept writable_host_tensor = host_tensor<V, Rank> && detail::view_traits<V>::writable;
template <class V, size Rank>
concept writable_device_tensor = device_tensor<V, Rank> && detail::view_traits<V>::writable;

/// A dense row-major host view: `view(pointer, rows, columns)`. Unchecked.
template <class T, class... Extent>
  requires(std::convertible_to<Extent, size> && ...)
constexpr auto view(T* data, Extent... extent) {
  return detail::dense_view<MemorySpace::host>(data, extent...);
}

/// A dense row-major view of device memory. Unchecked.
template <class T, class... Extent>
  requires(std::convertible_to<Extent, size> && ...)
constexpr auto device_view(T* data, Extent... extent) {
  return detail::dense_view<MemorySpace::device>(data, extent...);
}

/// A dense view of a whole vector: `view(v)` is one-dimensional, `view(v, rows, columns)` has these extents.
/// Throws invalid_argument where their product is not the vector's length or does not fit 64 bits.
template <class Vector, class... Extent>
  requires requires(Vector& v) {
    v.data();
    v.size();
  }
auto view(Vector& vector, Extent... extent) {
  if constexpr (sizeof...(Extent) == 0) {
    return view(vector.data(), vector.size());
  } else {
    size product = 1;
    ((product = detail::checked_product("view", "the extents", product, static_cast<size>(extent))), ...);
    detail::require(product == vector.size(), "view", "the vector's length", vector.size(), product);
    return view(vector.data(), static_cast<size>(extent)...);
  }
}

namespace detail {

template <size Rank>
std::string shape_text(const size (&extents)[Rank]) {
  std::string text = "[";
  for (size d = 0; d < Rank; ++d) text += (d ? ", " : "") + std::to_string(extents[d]);
  return text + "]";
}

/// Whether memory could hold the tensor: neither the number of its elements nor the way to its furthest one passes half
/// the address space. A stride that goes backwards (wrapped around 2^64) passes it.
template <class T, size Rank, MemorySpace Space>
constexpr bool addressable(const View<T, Rank, Space>& tensor) {
  if (tensor.empty()) return true;
  constexpr size room = (~size{0} >> 1) / sizeof(T);
  size elements = 1, furthest = 0;
  for (size d = 0; d < Rank; ++d) {
    const size steps = tensor.extents[d] - 1;
    if (elements > room / tensor.extents[d]) return false;
    if (steps > 0 && tensor.strides[d] > (room - furthest) / steps) return false;
    elements *= tensor.extents[d];
    furthest += steps * tensor.strides[d];
  }
  return true;
}

/// Throws invalid_argument unless `tensor` has exactly these extents, a dense last dimension, strides that memory can
/// have, and memory if not empty.
template <class V, class... Extent>
  requires(sizeof...(Extent) == V::rank)
void require_shape(const char* operation, const char* argument, const V& tensor, Extent... extent) {
  const size expected[V::rank] = {static_cast<size>(extent)...};
  bool same = true;
  for (size d = 0; d < V::rank; ++d) same = same && tensor.extents[d] == expected[d];
  if (!same) throw invalid_argument(operation, argument, shape_text(tensor.extents), shape_text(expected));
  require(tensor.strides[V::rank - 1] == 1, operation, argument, "strided in its last dimension", "dense rows");
  require(addressable(tensor), operation, argument, "strided or extended beyond all memory", "within 2^63 bytes");
  require(tensor.data != nullptr || tensor.empty(), operation, argument, "null", "memory");
}

}  // namespace detail
}  // namespace k3
