// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>

#include <k3/core/overlap.hpp>
#include <k3/cuda/execution.cuh>
#include <k3/cuda/linear_stream.cuh>
#include <k3/ops/dense_mlp.hpp>

namespace k3 {

/// One output of a launch of `projections`: made by `projection` or `gated_projection`.
struct Projection {
  AnyMatrix<MemorySpace::device> weight{};  ///< [N, K], F32 or BF16
  AnyMatrix<MemorySpace::device> up{};      ///< the second matrix of a gated projection
  GluConfig glu{};
  void* out = nullptr;  ///< [R, N], rows out_stride elements apart
  size rows = 0, columns = 0, out_stride = 0;
  bool float_out = false;
};

/// out = x weight^T, rounded to out's type. Shapes: weight [N, K], out [R, N], rows of out may lie apart.
template <writable_device_tensor<2> Out>
  requires(std::same_as<typename Out::value_type, bf16> || std::same_as<typename Out::value_type, float>)
Projection projection(const AnyMatrix<MemorySpace::device>& weight, const Out& out) {
  detail::require_shape("projection", "out", out, out.extents[0], out.extents[1]);
  detail::require_distinct("projection", "out", out);
  constexpr bool float_out = std::same_as<typename Out::value_type, float>;
  return {weight, {}, {}, out.data, out.extents[0], out.extents[1], out.strides[0], float_out};
}

/// out = glu(x gate^T, x up^T), the two products and the result rounded to out's type. Shapes: gate and up [N, K], out
/// [R, N].
template <writable_device_tensor<2> Out>
Projection gated_projection(const GluConfig& glu, const AnyMatrix<MemorySpace::device>& gate,
                            const AnyMatrix<MemorySpace::device>& up, const Out& out) {
  detail::require_caps("gated_projection", glu);
  detail::require(static_cast<bool>(up), "gated_projection", "up_proj", "absent", "a weight");
  Projection result = projection(gate, out);
  result.up = up, result.glu = glu;
  return result;
}

namespace detail {

inline void require_device_weight(const char* operation, const char* argument,
                                  const AnyMatrix<MemorySpace::device>& weight, size rows, size columns) {
  require_shape(operation, argument, weight, {rows, columns});
  require(weight.type == ElementType::f32 || weight.type == ElementType::bf16, operation, argument,
          weight.type == ElementType::f64 ? "F64" : "MXFP4", "F32 or BF16");
  require(weight.data != nullptr || rows * columns == 0, operation, argument, "null", "memory");
}

/// The bytes of a projection's outputs.
inline Footprint out_footprint(const Projection& p) {
  const size element = p.float_out ? 4 : 2;
  return {reinterpret_cast<std::uintptr_t>(p.out), p.columns > 0 ? p.rows : 0, p.columns * element,
          p.out_stride * element};
}

template <class X>
void check_projection(const char* operation, const DeviceView<const X, 2>& x, const Projection& p) {
  const size tokens = x.extents[0], columns = x.extents[1];
  constexpr size most = size{1} << 31;
  require(p.rows == tokens, operation, "out's rows", p.rows, tokens);
  require(p.out != nullptr || p.rows * p.columns == 0, operation, "out", "null", "memory");
  require(columns < most && p.columns < most && tokens < most, operation, "an extent", "2^31 or more", "less");
  require_device_weight(operation, p.up ? "gate_proj" : "weight", p.weight, p.columns, columns);
  if (p.up) {
    require_device_weight(operation, "up_proj", p.up, p.columns, columns);
    require(p.up.type == p.weight.type, operation, "up_proj", "of another type than gate_proj", "of the same type");
  }
  const Footprint out = out_footprint(p);
  require_disjoint(operation, "out", out, "x", x);
  require_disjoint(operation, "out", out, p.up ? "gate_proj" : "weight", p.weight);
  require_disjoint(operation, "out", out, "up_proj", p.up);
}

/// Which kernel a product is for. It depends on types, on addresses and on the matrix, never on the number of tokens.
/// `whole`: K is one piece.
enum class LinearPath : unsigned char {
  tensor,
  tensor_unaligned,
  tensor_whole,
  tensor_whole_unaligned,
  general_f32,
  general_bf16
};

template <class X>
LinearPath linear_path(const DeviceView<const X, 2>& x, const Projection& p) {
  if (p.weight.type == ElementType::f32) return LinearPath::general_f32;
  if constexpr (!std::same_as<X, bf16>) {
    return LinearPath::general_bf16;
  } else {
    const auto aligned = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
    const bool fits = aligned(x.data) && aligned(p.weight.data) && aligned(p.up.data) && x.strides[0] % 8 == 0 &&
                      x.extents[1] % 8 == 0;
    if (x.extents[1] < kernel::linear_split_columns || p.columns >= kernel::linear_whole_rows)
      return fits ? LinearPath::tensor_whole : LinearPath::tensor_whole_unaligned;
    return fits ? LinearPath::tensor : LinearPath::tensor_unaligned;
  }
}

/// Launches with `a.units` units of weights in blocks of `block_units`, and groups of `tokens` tokens.
template <class X>
void launch_linear(const gpu& exec, const char* operation, void (*kernel)(kernel::LinearArguments<X>),
                   kernel::LinearArguments<X>& a, size block_units, size tokens) {
  a.groups = static_cast<unsigned>((a.tokens + tokens - 1) / tokens);
  const size blocks = (a.units + block_units - 1) / block_units * a.groups;
  require(blocks < size{1} << 31, operation, "the number of blocks", blocks, "below 2^31");
  kernel<<<static_cast<unsigned>(blocks), kernel::linear_threads, 0, exec.stream>>>(a);
  check_launch(operation);
}

inline void launch_tensor(const gpu& exec, const char* operation, kernel::LinearArguments<bf16>& a, size segments,
                          bool aligned) {
  if (aligned && a.columns > 0 && a.x_stride >= a.columns && stream_available())
    return launch_stream(exec, operation, a, segments);
  const bool few = a.tokens <= 8;
  if (a.whole) {
    if (!aligned) return launch_linear(exec, operation, kernel::linear_tensor<1, 1, false>, a, 8, 8);
    if (few) return launch_linear(exec, operation, kernel::linear_tensor<1, 1, true>, a, 8, 8);
    return launch_linear(exec, operation, kernel::linear_tensor<1, 4, true>, a, 8, 32);
  }
  if (!aligned) return launch_linear(exec, operation, kernel::linear_tensor<4, 1, false>, a, 2, 8);
  if (few) return launch_linear(exec, operation, kernel::linear_tensor<4, 1, true>, a, 2, 8);
  return launch_linear(exec, operation, kernel::linear_tensor<4, 4, true>, a, 2, 32);
}

/// What linear_add does with the products; null for everything else.
using LinearAddition = const kernel::LinearAdd*;

/// All checks, then one launch for each kernel that is needed.
template <class X>
void run_projections(const gpu& exec, const char* operation, const DeviceView<const X, 2>& x, const Projection* list,
                     size count, LinearAddition add = nullptr) {
  require_shape(operation, "x", x, x.extents[0], x.extents[1]);
  require(count <= kernel::linear_most_segments, operation, "the number of projections", count, "at most 8");
  for (size i = 0; i < count; ++i) check_projection(operation, x, list[i]);
  for (size i = 0; i < count; ++i)
    for (size j = 0; j < count; ++j) {
      if (j < i) require_disjoint(operation, "out", out_footprint(list[i]), "another out", out_footprint(list[j]));
      if (j == i) continue;
      require_disjoint(operation, "out", out_footprint(list[i]), "another weight", list[j].weight);
      require_disjoint(operation, "out", out_footprint(list[i]), "another up_proj", list[j].up);
    }
  if (x.extents[0] == 0) return;
  for (const LinearPath path :
       {LinearPath::tensor, LinearPath::tensor_unaligned, LinearPath::tensor_whole, LinearPath::tensor_whole_unaligned,
        LinearPath::general_f32, LinearPath::general_bf16}) {
    const bool tensor = path < LinearPath::general_f32;
    kernel::LinearArguments<X> a;
    a.x = x.data, a.x_stride = x.strides[0];
    a.tokens = static_cast<unsigned>(x.extents[0]), a.columns = static_cast<unsigned>(x.extents[1]);
    if (add != nullptr) a.add = *add;
    unsigned segments = 0;
    for (size i = 0; i < count; ++i) {
      const Projection& p = list[i];
      if (p.columns == 0 || linear_path(x, p) != path) continue;
      kernel::LinearSegment& s = a.segment[segments++];
      s.weight = p.weight.data, s.up = p.up.data;
      s.out = {p.out, p.out_stride};
      s.rows = static_cast<unsigned>(p.columns);
      s.kind = add != nullptr ? kernel::LinearKind::add : p.up ? kernel::LinearKind::glu : kernel::LinearKind::store;
      s.float_out = p.float_out;
      s.glu = kernel::LinearGlu(p.glu);
      const unsigned unit = tensor ? (p.up ? 8 : 16) : 1;
      a.units += (s.rows + unit - 1) / unit;
      s.end = a.units;
    }
    if (segments == 0) continue;
    a.whole = path == LinearPath::tensor_whole || path == LinearPath::tensor_whole_unaligned;
    if constexpr (std::same_as<X, bf16>) {
      if (tensor)
        launch_tensor(exec, operation, a, segments, path == LinearPath::tensor || path == LinearPath::tensor_whole);
    } else if (path == LinearPath::general_bf16) {
      launch_linear(exec, operation, kernel::linear_general<X, bf16>, a, kernel::linear_warps,
                    kernel::linear_general_tokens);
    }
    if (path == LinearPath::general_f32)
      launch_linear(exec, operation, kernel::linear_general<X, float>, a, kernel::linear_warps,
                    kernel::linear_general_tokens);
  }
}

/// The same view, read-only.
template <class T, size Rank>
DeviceView<const T, Rank> read_only(const DeviceView<T, Rank>& v) {
  return v;
}
template <class T, size Rank>
DeviceView<const T, Rank> read_only(const DeviceView<const T, Rank>& v) {
  return v;
}

}  // namespace detail

/// Several products of one x with different matrices in one launch: q, k, v, g, f_a and b of a KDA layer; q_a, kv_a and
/// g of an MLA layer; router, latent down and the gated shared experts of a MoE layer. Shapes: x [R, K] of bf16 or
/// float, the projections as they were made, up to 8. A projection has the same bits in any company and alone, for any
/// R, aligned or not. Throws invalid_argument on shapes that do not fit, weights that are neither F32 nor BF16, and an
/// output sharing memory with x, a weight or another output, before anything is launched. Cost: each weight read once
/// for up to 128 rows of x.
template <device_tensor<2> X>
void projections(const gpu& exec, const X& x, std::initializer_list<Projection> list) {
  detail::run_projections(exec, "projections", detail::read_only(x), list.begin(), list.size());
}

}  // namespace k3
