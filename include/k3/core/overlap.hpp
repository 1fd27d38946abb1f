// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>

// Whether what an operation writes shares memory with itself or with what it reads. Nothing here allocates unless it
// throws.
namespace k3::detail {

/// The bytes that a tensor touches: `rows` pieces of `width` bytes, `stride` bytes apart.
struct Footprint {
  std::uintptr_t first = 0;
  size rows = 0, width = 0, stride = 0;
  std::uintptr_t last() const { return first + (rows - 1) * stride + width; }
};

template <class T, size Rank, MemorySpace Space>
Footprint footprint(const View<T, Rank, Space>& v) {
  if (v.empty()) return {};
  const auto first = reinterpret_cast<std::uintptr_t>(v.data);
  if constexpr (Rank == 2) return {first, v.extents[0], v.extents[1] * sizeof(T), v.strides[0] * sizeof(T)};
  size furthest = 0;
  for (size d = 0; d < Rank; ++d) furthest += (v.extents[d] - 1) * v.strides[d];
  return {first, 1, (furthest + 1) * sizeof(T), 0};
}

/// The memory of a weight of run-time type, of an MXFP4 one its codes.
template <size Rank, MemorySpace Space>
Footprint footprint(const AnyView<Rank, Space>& any) {
  size count = any ? 1 : 0;
  for (size d = 0; d < Rank; ++d) count *= any.extents[d];
  if (count == 0) return {};
  const size bytes = any.type == ElementType::f64    ? 8 * count
                     : any.type == ElementType::f32  ? 4 * count
                     : any.type == ElementType::bf16 ? 2 * count
                                                     : count / 2;
  return {reinterpret_cast<std::uintptr_t>(any.data), 1, bytes, 0};
}

/// The memory of its scales, if it is MXFP4.
template <class Other>
Footprint scale_footprint(const Other&) {
  return {};
}
template <MemorySpace Space>
Footprint scale_footprint(const AnyView<2, Space>& any) {
  if (any.type != ElementType::mxfp4) return {};
  return {reinterpret_cast<std::uintptr_t>(any.scale), 1, any.extents[0] * (any.extents[1] / mxfp4_group), 0};
}

/// Whether two tensors share a byte. Column blocks of one buffer (equal strides, disjoint columns) do not.
inline bool shares_bytes(const Footprint& a, const Footprint& b) {
  if (a.rows == 0 || b.rows == 0 || a.last() <= b.first || b.last() <= a.first) return false;
  if (a.rows == 1 && b.rows == 1) return true;
  const size stride = a.rows == 1 ? b.stride : a.stride;
  if (stride == 0 || (b.rows > 1 && b.stride != stride)) return true;
  const size apart =
      b.first >= a.first ? (b.first - a.first) % stride : (stride - (a.first - b.first) % stride) % stride;
  return apart < a.width || apart + b.width > stride;
}

[[noreturn]] inline void refuse_overlap(const char* operation, const char* written, const char* read,
                                        const char* expected) {
  throw invalid_argument(operation, written, std::string("overlapping ") + read, expected);
}

/// Throws invalid_argument where two elements of `written` may be the same memory: each stride, in ascending order, has
/// to pass what the smaller ones span.
template <class T, size Rank, MemorySpace Space>
void require_distinct(const char* operation, const char* written, const View<T, Rank, Space>& to) {
  if (to.empty()) return;
  bool seen[Rank] = {};
  size span = 1;
  for (size count = 0; count < Rank; ++count) {
    size next = Rank;
    for (size d = Rank; d-- > 0;)
      if (!seen[d] && (next == Rank || to.strides[d] < to.strides[next])) next = d;
    seen[next] = true;
    if (to.extents[next] == 1) continue;
    if (to.strides[next] < span) refuse_overlap(operation, written, "itself", "elements that lie apart");
    span += (to.extents[next] - 1) * to.strides[next];
  }
}

/// Throws invalid_argument where `written` shares memory with `read`.
inline void require_disjoint(const char* operation, const char* written, const Footprint& to, const char* read,
                             const Footprint& from) {
  if (shares_bytes(to, from)) refuse_overlap(operation, written, read, "memory of its own");
}

/// The same for what is read as a view, a weight of run-time type or an MXFP4 matrix, and for several: name, tensor,
/// name, tensor, ...
template <class Read, class... Others>
void require_disjoint(const char* operation, const char* written, const Footprint& to, const char* read,
                      const Read& from, const Others&... others) {
  if constexpr (requires { from.packed; }) {
    require_disjoint(operation, written, to, read, footprint(from.packed));
    require_disjoint(operation, written, to, read, footprint(from.scale));
  } else {
    require_disjoint(operation, written, to, read, footprint(from));
    require_disjoint(operation, written, to, read, scale_footprint(from));
  }
  if constexpr (sizeof...(Others) > 0) require_disjoint(operation, written, to, others...);
}

/// The same, and where two elements of `written` share memory.
template <class Written, class... Reads>
  requires view_traits<Written>::value
void require_disjoint(const char* operation, const char* written, const Written& to, const Reads&... reads) {
  require_distinct(operation, written, to);
  require_disjoint(operation, written, footprint(to), reads...);
}

/// Throws invalid_argument where `written` shares memory with `read` and is not `read` itself, element for element, and
/// where two elements of `written` share memory.
template <class T, class Read, size Rank, MemorySpace Space>
void require_same_or_disjoint(const char* operation, const char* written, const View<T, Rank, Space>& to,
                              const char* read, const View<Read, Rank, Space>& from) {
  require_distinct(operation, written, to);
  const Footprint a = footprint(to), b = footprint(from);
  if constexpr (std::is_same_v<T, std::remove_const_t<Read>>)
    if (a.first == b.first && a.rows == b.rows && a.width == b.width && (a.rows <= 1 || a.stride == b.stride)) return;
  if (shares_bytes(a, b)) refuse_overlap(operation, written, read, "the same memory or memory of its own");
}

}  // namespace k3::detail
