// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/view.hpp>

// Whether what an operation writes shares memory with what it reads. Nothing here allocates unless it throws.
namespace k3::detail {

/// The bytes that a tensor touches: `rows` pieces of `width` bytes, `stride` bytes apart.
struct Footprint {
  std::uintptr_t first = 0;
  size rows = 0, width = 0, stride = 0;
  std::uintptr_t last() const { return first + (rows - 1) * stride + width; }
};

template <class T, size Rank, MemorySpace Space>
Footprint footprint(const View<T, Rank, Space>& v) {
  if (v.elements() == 0) return {};
  const auto first = reinterpret_cast<std::uintptr_t>(v.data);
  if constexpr (Rank == 2) return {first, v.extents[0], v.extents[1] * sizeof(T), v.strides[0] * sizeof(T)};
  size furthest = 0;
  for (size d = 0; d < Rank; ++d) furthest += (v.extents[d] - 1) * v.strides[d];
  return {first, 1, (furthest + 1) * sizeof(T), 0};
}

/// Whether two tensors share a byte. Column blocks of one buffer (equal strides, disjoint columns) do not.
inline bool shares_bytes(const Footprint& a, const Footprint& b) {
  if (a.rows == 0 || b.rows == 0 || a.last() <= b.first || b.last() <= a.first) return false;
  if (a.stride != b.stride || a.stride == 0) return true;
  const size apart =
      b.first >= a.first ? (b.first - a.first) % a.stride : (a.stride - (a.first - b.first) % a.stride) % a.stride;
  return apart < a.width || apart + b.width > a.stride;
}

/// Throws invalid_argument where `written` shares memory with `read`.
inline void require_disjoint(const char* operation, const char* written, const Footprint& to, const char* read,
                             const Footprint& from) {
  if (shares_bytes(to, from))
    throw invalid_argument(operation, written, std::string("overlapping ") + read, "memory of its own");
}
template <class Written, class Read>
  requires(view_traits<Written>::value && view_traits<Read>::value)
void require_disjoint(const char* operation, const char* written, const Written& to, const char* read,
                      const Read& from) {
  require_disjoint(operation, written, footprint(to), read, footprint(from));
}

}  // namespace k3::detail
