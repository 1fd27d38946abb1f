// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/rms_norm.cuh>
#include <k3/kernels/attnres_norm.cuh>

namespace k3 {

/// What attnres_norm may bring along.
struct AttnResNormOptions {
  float mix = 1.0f;              ///< ablation: 0 the running stream alone, 1 the mixture. Source: `K3_ATTNRES_MIX`
  DeviceView<float, 2> mixed{};  ///< [R, hidden]: receives what goes into the norm
  DeviceView<float, 2> probs{};  ///< [R, n + 1]: receives the weights of the sources
  /// The launch behind this one is a product: it may fetch its weights before this one's sources are there.
  bool before_product = false;
};

namespace detail {

/// A vector [n] or [1, n] of run-time or known type, as the kernel takes it.
template <class Weight>
kernel::AttnResVector attnres_vector(const char* argument, const Weight& weight, size count) {
  kernel::AttnResVector result{};
  constexpr size rank = sizeof(weight.extents) / sizeof(size);
  if constexpr (device_tensor<Weight, 1>)
    require_shape("attnres_norm", argument, weight, count);
  else if constexpr (device_tensor<Weight, 2>)
    require_shape("attnres_norm", argument, weight, size{1}, count);
  else if constexpr (rank == 1)
    require_shape("attnres_norm", argument, weight, {count});
  else
    require_shape("attnres_norm", argument, weight, {size{1}, count});
  with_device_weight("attnres_norm", argument, weight, [&](const auto& typed) {
    using T = std::remove_const_t<typename std::remove_cvref_t<decltype(typed)>::value_type>;
    result = {typed.data, std::same_as<T, float>, reinterpret_cast<std::uintptr_t>(typed.data) % 16 == 0};
  });
  return result;
}

/// The blocks of a row, 0 for the kernel without clusters: four or two while there is room for all at once. A row's
/// bits do not depend on it.
template <class T>
unsigned attnres_blocks(size rows, size hidden, size sources) {
  const size pieces = (hidden + kernel::attnres_piece - 1) / kernel::attnres_piece;
  const size room = static_cast<size>(multiprocessors());
  if (sources > kernel::attnres_kept || pieces > kernel::attnres_most_pieces || rows >= size{1} << 28) return 0;
  const bool one_fits = 32 * pieces <= size{kernel::attnres_threads<1, T>()};
  const bool two_fit = (pieces + 1) / 2 * 32 <= size{kernel::attnres_threads<2, T>()};
  if (!target("attnres_norm").clusters || pieces == 1) return one_fits ? 1 : 0;
  if (!two_fit || (pieces >= 4 && 4 * rows <= room)) return 4;
  return !one_fits || rows <= room ? 2 : 1;
}

template <int Blocks, class T>
void launch_attnres_norm(const gpu& exec, const kernel::AttnResArguments<T>& a) {
  const unsigned pieces = (a.hidden + kernel::attnres_piece - 1) / kernel::attnres_piece;
  const auto plain = [](const kernel::AttnResVector& v) { return !v.is_float && v.vector; };
  const bool all_plain =
      a.vector && a.hidden % 8 == 0 && plain(a.norm) && plain(a.proj) && plain(a.weight) && !a.mixed && a.mix == 1;
  launch_clusters("attnres_norm", exec.stream, Blocks, dim3(static_cast<unsigned>(a.rows) * Blocks),
                  dim3((pieces + Blocks - 1) / Blocks * 32), 0,
                  all_plain ? kernel::attnres_norm<Blocks, true, T> : kernel::attnres_norm<Blocks, false, T>, a);
}

template <class T>
void launch_attnres_norm(const gpu& exec, const kernel::AttnResArguments<T>& a, unsigned blocks) {
  switch (blocks) {
    case 1: return launch_attnres_norm<1>(exec, a);
    case 2: return launch_attnres_norm<2>(exec, a);
    case 4: return launch_attnres_norm<4>(exec, a);
    default:
      launch("attnres_norm", exec.stream, dim3(grid_size(a.rows, 1)), dim3(kernel::attnres_any_threads), 0,
             kernel::attnres_norm_any<T>, a);
  }
}

}  // namespace detail

/// A sublayer's input on the device, attnres_mix and rms_norm in one launch: out = rms(sum_j p_j s_j; norm, norm_eps)
/// over the snapshots and, last, the running stream; p = softmax of sum(res_norm * res_proj * s_j) / sqrt(mean(s_j^2) +
/// res_eps). The mixture is not rounded, out is rounded once. Shapes: snapshots [n, R, hidden] (n may be 0, up to 255),
/// running and out [R, hidden], res_norm and norm [hidden], res_proj [hidden] or [1, hidden]. A row's bits do not
/// depend on R or on other rows. Throws invalid_argument on shapes that do not fit, overlapping memory, an eps that is
/// negative or not finite, a mix outside 0..1. Cost: up to 9 sources and hidden 8192, every source is read
/// once, by as many blocks a row as there is room for. Source: `*_res_norm`, `*_res_proj` and the norm behind.
template <device_tensor<3> Snapshots, device_tensor<2> Running, class ResNorm, class ResProj, class Norm,
          writable_device_tensor<2> Out>
  requires(std::same_as<typename Out::value_type, typename Running::value_type> &&
           std::same_as<typename Snapshots::value_type, typename Running::value_type>)
void attnres_norm(const gpu& exec, const Snapshots& snapshots, const Running& running, const ResNorm& res_norm,
                  const ResProj& res_proj, float res_eps, const Norm& norm, float norm_eps, const Out& out,
                  const AttnResNormOptions& options = {}) {
  constexpr const char* operation = "attnres_norm";
  const size stored = snapshots.extent(0), rows = running.extent(0), hidden = running.extent(1);
  detail::require(hidden > 0 && hidden < size{1} << 31, operation, "running's width", hidden, "between 1 and 2^31 - 1");
  detail::require(stored < kernel::attnres_most_sources, operation, "the number of snapshots", stored, "at most 255");
  detail::require_shape(operation, "snapshots", snapshots, stored, rows, hidden);
  detail::require_shape(operation, "running", running, rows, hidden);
  detail::require_shape(operation, "out", out, rows, hidden);
  const auto usable = [](float eps) { return eps >= 0 && eps - eps == 0; };
  detail::require(usable(res_eps), operation, "res_eps", res_eps, "finite and not negative");
  detail::require(usable(norm_eps), operation, "norm_eps", norm_eps, "finite and not negative");
  detail::require(options.mix >= 0.0f && options.mix <= 1.0f, operation, "mix", options.mix, "between 0 and 1");
  const auto require_apart = [&](const char* name, const auto& written) {
    detail::require_disjoint(operation, name, written, "snapshots", snapshots, "running", running, "res_norm", res_norm,
                             "res_proj", res_proj, "norm", norm);
  };
  require_apart("out", out);
  if (options.mixed.data) {
    detail::require_shape(operation, "mixed", options.mixed, rows, hidden);
    require_apart("mixed", options.mixed);
    detail::require_disjoint(operation, "mixed", options.mixed, "out", out);
  }
  if (options.probs.data) {
    detail::require_shape(operation, "probs", options.probs, rows, stored + 1);
    require_apart("probs", options.probs);
    detail::require_disjoint(operation, "probs", options.probs, "out", out, "mixed", options.mixed);
  }

  kernel::AttnResArguments<typename Running::value_type> a{};
  a.snapshots = snapshots.data, a.source_stride = snapshots.strides[0], a.snapshot_stride = snapshots.strides[1];
  a.running = running.data, a.running_stride = running.strides[0];
  a.out = out.data, a.out_stride = out.strides[0];
  a.mixed = options.mixed.data, a.mixed_stride = options.mixed.strides[0];
  a.probs = options.probs.data, a.probs_stride = options.probs.strides[0];
  a.norm = detail::attnres_vector("res_norm", res_norm, hidden);
  a.proj = detail::attnres_vector("res_proj", res_proj, hidden);
  a.weight = detail::attnres_vector("norm", norm, hidden);
  a.stored = static_cast<unsigned>(stored), a.hidden = static_cast<unsigned>(hidden), a.rows = rows;
  a.res_eps = res_eps, a.norm_eps = norm_eps, a.mix = options.mix, a.early = options.before_product;
  a.vector =
      (stored == 0 || detail::rows_aligned(snapshots)) && detail::rows_aligned(running) && detail::rows_aligned(out);
  if (rows > 0)
    detail::launch_attnres_norm(exec, a,
                                detail::attnres_blocks<typename Running::value_type>(rows, hidden, stored + 1));
}

}  // namespace k3
