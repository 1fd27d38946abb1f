// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/bf16.hpp>
#include <k3/core/mxfp4.hpp>

namespace k3 {

/// How a weight is stored. Known only at run time: a checkpoint chooses it tensor by tensor.
enum class ElementType : std::uint8_t { none, f64, f32, bf16, mxfp4 };

/// A dense read-only vector or matrix whose element type is known at run time; `none` means there is no such weight.
/// `visit` turns it into a typed view. Only matrices can be MXFP4, with `data` the codes and `scale` the E8M0 bytes.
template <size Rank, MemorySpace Space = MemorySpace::host>
struct AnyView {
  const void* data = nullptr;
  const std::uint8_t* scale = nullptr;
  ElementType type = ElementType::none;
  size extents[Rank] = {};

  AnyView() = default;
  template <class T>
    requires real<std::remove_const_t<T>>
  AnyView(const View<T, Rank, Space>& typed) : data(typed.data), type(element_type<std::remove_const_t<T>>()) {
    detail::require(typed.contiguous(), "AnyView", "the weight", "strided", "contiguous");
    for (size d = 0; d < Rank; ++d) extents[d] = typed.extents[d];
  }
  AnyView(const Mxfp4Matrix<Space>& matrix)
    requires(Rank == 2)
      : data(matrix.packed.data),
        scale(matrix.scale.data),
        type(ElementType::mxfp4),
        extents{matrix.rows(), matrix.columns()} {
    detail::require(matrix.packed.contiguous() && matrix.scale.contiguous(), "AnyView", "the weight", "strided",
                    "contiguous");
  }

  explicit operator bool() const { return type != ElementType::none; }
  size extent(size dimension) const { return extents[dimension]; }

  template <class T>
  static constexpr ElementType element_type() {
    if constexpr (std::is_same_v<T, double>)
      return ElementType::f64;
    else if constexpr (std::is_same_v<T, float>)
      return ElementType::f32;
    else
      return ElementType::bf16;
  }
};

template <MemorySpace Space = MemorySpace::host>
using AnyVector = AnyView<1, Space>;
template <MemorySpace Space = MemorySpace::host>
using AnyMatrix = AnyView<2, Space>;

namespace detail {

template <class T, size Rank, MemorySpace Space>
View<const T, Rank, Space> typed_view(const AnyView<Rank, Space>& any) {
  const T* data = static_cast<const T*>(any.data);
  if constexpr (Rank == 1)
    return dense_view<Space>(data, any.extents[0]);
  else if constexpr (Rank == 2)
    return dense_view<Space>(data, any.extents[0], any.extents[1]);
  else
    return dense_view<Space>(data, any.extents[0], any.extents[1], any.extents[2]);
}

template <MemorySpace Space>
Mxfp4Matrix<Space> mxfp4_matrix(const AnyView<2, Space>& any) {
  return {dense_view<Space>(static_cast<const std::uint8_t*>(any.data), any.extents[0], any.extents[1] / 2),
          dense_view<Space>(any.scale, any.extents[0], any.extents[1] / mxfp4_group)};
}

/// Throws invalid_argument where a weight that is not empty has no memory.
template <size Rank, MemorySpace Space>
void require_memory(const char* operation, const char* argument, const AnyView<Rank, Space>& any) {
  bool empty = false;
  for (const size extent : any.extents) empty = empty || extent == 0;
  const bool there = any.data != nullptr && (any.type != ElementType::mxfp4 || any.scale != nullptr);
  require(empty || there, operation, argument, "null", "memory");
}

template <size Rank, MemorySpace Space>
void require_shape(const char* operation, const char* argument, const AnyView<Rank, Space>& any,
                   const size (&expected)[Rank]) {
  require(static_cast<bool>(any), operation, argument, "absent", "a weight");
  bool same = true;
  for (size d = 0; d < Rank; ++d) same = same && any.extents[d] == expected[d];
  if (!same) throw invalid_argument(operation, argument, shape_text(any.extents), shape_text(expected));
  require_memory(operation, argument, any);
}

}  // namespace detail

/// f(View<const T, Rank>) with T the stored type F64, F32 or BF16. Throws invalid_argument for an absent weight
/// and for MXFP4.
template <size Rank, MemorySpace Space, class F>
decltype(auto) visit(const AnyView<Rank, Space>& any, F&& f) {
  switch (any.type) {
    case ElementType::f64: return f(detail::typed_view<double>(any));
    case ElementType::f32: return f(detail::typed_view<float>(any));
    case ElementType::bf16: return f(detail::typed_view<bf16>(any));
    default: break;
  }
  throw invalid_argument("visit", "the weight", any.type == ElementType::none ? "absent" : "MXFP4", "F64, F32 or BF16");
}

/// As `visit`, for an `f` that takes an Mxfp4Matrix too.
template <MemorySpace Space, class F>
decltype(auto) visit_matrix(const AnyMatrix<Space>& any, F&& f) {
  return any.type == ElementType::mxfp4 ? f(detail::mxfp4_matrix(any)) : visit(any, f);
}

namespace detail {

/// f(typed view) for a typed view as for one whose type is known at run time: how operations take either.
template <class V, class F>
decltype(auto) with_typed(const V& weight, F&& f) {
  return f(weight);
}
template <size Rank, MemorySpace Space, class F>
decltype(auto) with_typed(const AnyView<Rank, Space>& weight, F&& f) {
  return visit(weight, f);
}

}  // namespace detail
}  // namespace k3
