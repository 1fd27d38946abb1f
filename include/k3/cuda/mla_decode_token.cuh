// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/launch.cuh>
#include <k3/cuda/mla_device_workspace.cuh>
#include <k3/kernels/mla_project_tensor.cuh>
#include <k3/ops/mla_decode_token.hpp>

namespace k3 {

namespace detail {

/// Status words share memory with nothing that is read or written.
template <class T>
void mla_check_status(const char* operation, DeviceView<unsigned, 1> status, DeviceView<const id, 1> slots,
                      DeviceView<const size, 1> positions, const MlaKvView<T, MemorySpace::device>& kv) {
  require_disjoint(operation, "status", status, "slots", slots, "positions", positions, "kv.pages", kv.pages,
                   "kv.block_table", kv.block_table);
}

template <mla_geometry G, class KvA, class T>
void mla_check_append(const char* operation, G g, const KvA& kv_a, const AnyVector<MemorySpace::device>& norm,
                      float eps, DeviceView<const id, 1> slots, DeviceView<const size, 1> positions,
                      const MlaKvView<T, MemorySpace::device>& kv, DeviceView<unsigned, 1> status) {
  const size rows = slots.extents[0];
  mla_check_geometry(g, operation);
  mla_check_kv(operation, g, kv);
  require_shape(operation, "kv_a", kv_a, rows, mla_cache_width(g));
  require_shape(operation, "kv_a_layernorm", norm, {size{g.kv_lora_rank}});
  mla_require_weight(operation, "kv_a_layernorm", norm.type);
  require(eps >= 0 && eps < 1, operation, "norm_eps", eps, "at least 0 and below 1");
  mla_check_rows(operation, rows, slots, positions, kv, status);
  require_disjoint(operation, "kv.pages", kv.pages, "kv_a", kv_a, "kv_a_layernorm", norm, "slots", slots, "positions",
                   positions, "kv.block_table", kv.block_table);
  mla_check_status(operation, status, slots, positions, kv);
  require_disjoint(operation, "status", status, "kv_a", kv_a, "kv_a_layernorm", norm);
}

template <mla_geometry G>
void mla_check_kv_b(const char* operation, G g, const AnyMatrix<MemorySpace::device>& kv_b) {
  require_shape(operation, "kv_b", kv_b, {mla_kv_b_rows(g), size{g.kv_lora_rank}});
  mla_require_weight(operation, "kv_b", kv_b.type);
}

/// f(arguments with everything that absorb and expand share), for the type of kv_b.
template <class T, mla_geometry G, class F>
void mla_with_kv_b(G g, const AnyMatrix<MemorySpace::device>& kv_b, size rows, F&& f) {
  const auto call = [&](auto* weight) {
    using W = std::remove_const_t<std::remove_pointer_t<decltype(weight)>>;
    kernel::MlaProjectArguments<T, W> a;
    a.kv_b = weight, a.rows = rows;
    a.heads = static_cast<unsigned>(g.heads), a.nope = static_cast<unsigned>(g.qk_nope_head_dim);
    a.rope = static_cast<unsigned>(g.qk_rope_head_dim), a.v = static_cast<unsigned>(g.v_head_dim);
    a.latent = static_cast<unsigned>(g.kv_lora_rank);
    a.vector = mla_aligned(weight) && g.kv_lora_rank % 8 == 0;
    f(a);
  };
  if (kv_b.type == ElementType::bf16)
    call(static_cast<const bf16*>(kv_b.data));
  else
    call(static_cast<const float*>(kv_b.data));
}

/// Blocks for `rows` rows, `step` at a time.
inline dim3 mla_project_grid(size heads, size blocks, size rows, size step) {
  return dim3(static_cast<unsigned>(heads), static_cast<unsigned>(blocks),
              static_cast<unsigned>(smaller((rows + step - 1) / step, size{65535})));
}

/// mla_absorb for any types, on tensor cores in bf16.
template <class T, class W>
void mla_launch_absorb(const gpu& exec, const kernel::MlaProjectArguments<T, W>& a) {
  if constexpr (std::same_as<T, bf16> && std::same_as<W, bf16>) {
    const size columns = kernel::mla_absorb_threads / 32 * kernel::mla_absorb_warp_columns;
    const dim3 grid = mla_project_grid(a.heads, (a.latent + columns - 1) / columns, a.rows, 64);
    launch("mla_absorb_query", exec.stream, grid, dim3(kernel::mla_absorb_threads), 0,
           a.vector ? kernel::mla_absorb_tensor<true> : kernel::mla_absorb_tensor<false>, a);
  } else {
    const size columns = kernel::mla_absorb_columns, step = a.rows == 1 ? 1 : 8;  // the bits are the same
    const dim3 grid = mla_project_grid(a.heads, (a.latent + columns - 1) / columns, a.rows, step);
    (a.rows == 1 ? kernel::mla_absorb<1, T, W>
                 : kernel::mla_absorb<8, T, W>)<<<grid, kernel::mla_threads, 0, exec.stream>>>(a);
    check_launch("mla_absorb_query");
  }
}

/// mla_expand likewise.
template <class T, class W>
void mla_launch_expand(const gpu& exec, const kernel::MlaProjectArguments<T, W>& a) {
  if constexpr (std::same_as<T, bf16> && std::same_as<W, bf16>) {
    const size outputs = a.rows <= 16 ? 32 : 128, step = a.rows <= 16 ? 16 : 32;  // the bits are the same
    const dim3 grid = mla_project_grid(a.heads, (a.v + outputs - 1) / outputs, a.rows, step);
    const auto few = a.vector ? kernel::mla_expand_tensor<true, 1> : kernel::mla_expand_tensor<false, 1>;
    const auto many = a.vector ? kernel::mla_expand_tensor<true, 4> : kernel::mla_expand_tensor<false, 4>;
    launch("mla_expand_values", exec.stream, grid, dim3(a.rows <= 16 ? 128 : 256), 0, a.rows <= 16 ? few : many, a);
  } else {
    const size outputs = kernel::mla_warps * kernel::mla_expand_outputs, step = a.rows == 1 ? 1 : 8;
    const dim3 grid = mla_project_grid(a.heads, (a.v + outputs - 1) / outputs, a.rows, step);
    (a.rows == 1 ? kernel::mla_expand<1, T, W>
                 : kernel::mla_expand<8, T, W>)<<<grid, kernel::mla_threads, 0, exec.stream>>>(a);
    check_launch("mla_expand_values");
  }
}

template <class T, class Arguments>
void mla_launch_attend(const gpu& exec, const Arguments& a, unsigned tiles, size rows) {
  const auto zs = static_cast<unsigned>(smaller(rows, size{65535}));
  if (tiles == 0) {
    const dim3 grid(a.splits, (a.heads + kernel::mla_general_heads - 1) / kernel::mla_general_heads, zs);
    kernel::mla_attend_general<T><<<grid, kernel::mla_threads, 0, exec.stream>>>(a);
  } else if constexpr (std::same_as<T, bf16>) {
    const dim3 grid(a.whole ? 1 : a.splits, (a.heads + tiles * 8 - 1) / (tiles * 8), zs);
    const size bytes = kernel::mla_shared_bytes(tiles * 8, a.width, a.stages);
    (tiles == 2 ? kernel::mla_attend_tensor<2>
                : kernel::mla_attend_tensor<6>)<<<grid, kernel::mla_threads, bytes, exec.stream>>>(a);
  }
  check_launch("mla_attend");
  if (a.whole) return;
  kernel::mla_combine<T><<<dim3((a.latent + 127) / 128, a.heads, zs), 128, 0, exec.stream>>>(a);
  check_launch("mla_attend");
}

/// o = mla_expand_values, gated and with zeros for rows that are not live; gate and live may be null.
template <mla_geometry G, class O, class Gate, class Out>
void mla_launch_expand(const gpu& exec, G g, const O& o_latent, const AnyMatrix<MemorySpace::device>& kv_b,
                       const Gate& gate, const unsigned char* live, const Out& out) {
  using T = typename Out::value_type;
  const size rows = o_latent.extents[0];
  if (rows == 0) return;
  mla_with_kv_b<T>(g, kv_b, rows, [&](auto a) {
    a.o_latent = o_latent.data, a.o_row = o_latent.strides[0], a.o_head = o_latent.strides[1];
    a.live = live, a.gate = gate.data, a.gate_stride = gate.strides[0];
    a.out = out.data, a.out_stride = out.strides[0];
    a.latent_vector = mla_aligned(a.o_latent) && a.o_row % 4 == 0 && a.o_head % 4 == 0;
    mla_launch_expand(exec, a);
  });
}

}  // namespace detail

/// The host's mla_append on the device, for slots and positions in device memory. A row whose slot, position or page is
/// not there writes nothing; its word of `status` [R], if given, becomes RowStatus::bad_slot (words are written, never
/// cleared). Rows of one slot must not name one position twice. Throws invalid_argument for what the arguments show.
template <mla_geometry G, device_tensor<2> KvA, class T>
void mla_append(const gpu& exec, G geometry, const KvA& kv_a, const AnyVector<MemorySpace::device>& kv_a_norm,
                float norm_eps, DeviceView<const id, 1> slots, DeviceView<const size, 1> positions,
                const MlaKvView<T, MemorySpace::device>& kv, DeviceView<unsigned, 1> status = {}) {
  using X = typename KvA::value_type;
  detail::mla_check_append("mla_append", geometry, kv_a, kv_a_norm, norm_eps, slots, positions, kv, status);
  if (slots.extents[0] == 0) return;
  kernel::MlaAppendArguments<X, T> a;
  a.rows = detail::mla_rows(slots, positions, status);
  a.cache = detail::mla_cache<T>(kv);
  a.kv_a = kv_a.data, a.kv_a_stride = kv_a.strides[0];
  a.norm = {kv_a_norm.data, kv_a_norm.type == ElementType::bf16};
  a.latent = static_cast<unsigned>(geometry.kv_lora_rank), a.width = static_cast<unsigned>(mla_cache_width(geometry));
  a.eps = norm_eps;
  detail::launch("mla_append", exec.stream, dim3(detail::grid_size(a.rows.count, 1)), dim3(128), 0,
                 kernel::mla_append<X, T>, a);
}

/// The host's mla_absorb_query on the device; kv_b F32 or BF16, all in bf16 on tensor cores. Cost: W_UK, half of kv_b,
/// read once, and again from the L2 cache for each 64 rows (8 in float).
template <mla_geometry G, device_tensor<2> Q, writable_device_tensor<3> Out>
  requires std::same_as<typename Q::value_type, typename Out::value_type>
void mla_absorb_query(const gpu& exec, G geometry, const Q& q, const AnyMatrix<MemorySpace::device>& kv_b,
                      const Out& q_latent) {
  using T = typename Out::value_type;
  constexpr const char* operation = "mla_absorb_query";
  const size rows = q.extents[0];
  detail::mla_check_geometry(geometry, operation);
  detail::require_shape(operation, "q", q, rows, mla_q_width(geometry));
  detail::mla_check_kv_b(operation, geometry, kv_b);
  detail::require_shape(operation, "q_latent", q_latent, rows, geometry.heads, mla_cache_width(geometry));
  detail::require_disjoint(operation, "q_latent", q_latent, "q", q, "kv_b", kv_b);
  if (rows == 0) return;
  detail::mla_with_kv_b<T>(geometry, kv_b, rows, [&](auto a) {
    a.q = q.data, a.q_stride = q.strides[0];
    a.q_latent = q_latent.data, a.q_latent_row = q_latent.strides[0], a.q_latent_head = q_latent.strides[1];
    a.q_vector = detail::mla_aligned(a.q) && a.q_stride % 8 == 0 && (a.nope + a.rope) % 8 == 0;
    a.latent_vector = detail::mla_aligned(a.q_latent) && a.q_latent_row % 8 == 0 && a.q_latent_head % 8 == 0;
    detail::mla_launch_absorb(exec, a);
  });
}

/// The host's mla_attend on the device: bf16 on tensor cores where kv_lora_rank is at most 512, everything else in
/// float. On sm_90a latents of 512 and keys of 576 with more than 16 heads take mla_attend_few or, for many rows,
/// mla_attend_wide (the same bits), where pages are multiples of 8 positions or a slot is one page, and memory is
/// aligned to 16 bytes. A row's context is cut by its own length: there into at most 32 parts, 64 from 65,473 positions
/// on, whose values are kept in 16 bits (2^-15 of the largest of 8); elsewhere into at most 64, in float. No other row,
/// capacity, or page size within one kernel changes a bit. With gpu::independent false the parts of those two kernels
/// depend on the whole batch, which is faster. Rows whose slot, position or pages are not there give zeros and
/// RowStatus::bad_slot. Shapes as on the host, o_latent float. Accuracy and cost: those of mla_decode_token.
template <mla_geometry G, device_tensor<3> Q, class T, precision P, writable_device_tensor<3> Out>
  requires(std::same_as<typename Q::value_type, T> && std::same_as<typename P::activation, T>)
void mla_attend(const gpu& exec, G geometry, const Q& q_latent, const MlaKvView<T, MemorySpace::device>& kv,
                DeviceView<const id, 1> slots, DeviceView<const size, 1> positions,
                const MlaDeviceWorkspace<P>& workspace, const Out& o_latent, DeviceView<unsigned, 1> status = {}) {
  constexpr const char* operation = "mla_attend";
  const size rows = slots.extents[0];
  detail::mla_check_geometry(geometry, operation);
  detail::mla_check_kv(operation, geometry, kv);
  detail::mla_check_rows(operation, rows, slots, positions, kv, status);
  detail::require_shape(operation, "q_latent", q_latent, rows, geometry.heads, mla_cache_width(geometry));
  detail::require_shape(operation, "o_latent", o_latent, rows, geometry.heads, geometry.kv_lora_rank);
  workspace.check(operation, geometry, rows, kv.capacity());
  detail::require_disjoint(operation, "o_latent", o_latent, "q_latent", q_latent, "kv.pages", kv.pages, "slots", slots,
                           "positions", positions, "kv.block_table", kv.block_table);
  detail::mla_check_status(operation, status, slots, positions, kv);
  detail::require_disjoint(operation, "status", status, "q_latent", q_latent, "o_latent", o_latent);
  const unsigned tiles = workspace.stages() ? detail::mla_group_tiles(geometry.heads) : 0;
  kernel::MlaAttendArguments<T> a;
  a.cache = detail::mla_cache<const T>(kv);
  a.q_row = q_latent.strides[0], a.q_head = q_latent.strides[1];
  a.out_row = o_latent.strides[0], a.out_head = o_latent.strides[1];
  a.part = workspace.part(), a.stats = workspace.stats();
  a.heads = static_cast<unsigned>(geometry.heads), a.latent = static_cast<unsigned>(geometry.kv_lora_rank);
  a.width = static_cast<unsigned>(mla_cache_width(geometry));
  a.splits = static_cast<unsigned>(detail::mla_capacity_splits(kv.capacity()));
  a.stages = workspace.stages();
  a.scale = static_cast<float>(1.4426950408889634 * mla_score_scale<double>(mla_qk_head_dim(geometry)));
  a.whole = tiles > 0 && rows * detail::mla_groups(geometry.heads) >= detail::mla_whole_blocks;
  a.vector = detail::mla_aligned(kv.pages.data) && kv.pages.strides[0] % 8 == 0 && kv.pages.strides[1] % 8 == 0 &&
             a.width % 8 == 0;
  a.q_vector = detail::mla_aligned(q_latent.data) && a.q_row % 8 == 0 && a.q_head % 8 == 0;
  size step = a.whole ? rows : workspace.part_rows();
  unsigned boxes = 0;
  if constexpr (std::same_as<T, bf16>) {
    const bool fits = workspace.wide() && a.vector && a.q_vector && a.out_head < size{1} << 24;
    boxes = fits ? detail::mla_boxes(kv.page_size, kv.block_table.extents[1]) : 0;
    if (boxes > 0) step = workspace.wide().rows(exec.independent, kv.capacity());
  }
  for (size first = 0; first < rows; first += step) {
    const size count = detail::smaller(step, rows - first);
    const auto state = status.data ? status.slice(0, first, count) : status;
    a.rows = detail::mla_rows(slots.slice(0, first, count), positions.slice(0, first, count), state);
    a.q = q_latent.data + first * a.q_row, a.out = o_latent.data + first * a.out_row, a.live = workspace.live() + first;
    if constexpr (std::same_as<T, bf16>)
      if (boxes > 0) {
        detail::mla_launch_wide(exec, workspace.wide(), a, boxes);
        continue;
      }
    detail::mla_launch_attend<T>(exec, a, tiles, count);
  }
}

/// The host's mla_expand_values on the device; kv_b F32 or BF16, all in bf16 on tensor cores, where a mean is the sum
/// of two bf16 (16 bits). Cost: W_UV, half of kv_b, read once, and again from the L2 cache for each 32 rows (8 in
/// float).
template <mla_geometry G, device_tensor<3> O, writable_device_tensor<2> Out>
  requires std::same_as<typename O::value_type, float>
void mla_expand_values(const gpu& exec, G geometry, const O& o_latent, const AnyMatrix<MemorySpace::device>& kv_b,
                       const Out& out) {
  constexpr const char* operation = "mla_expand_values";
  detail::mla_check_geometry(geometry, operation);
  detail::require_shape(operation, "o_latent", o_latent, o_latent.extents[0], geometry.heads, geometry.kv_lora_rank);
  detail::mla_check_kv_b(operation, geometry, kv_b);
  detail::require_shape(operation, "out", out, o_latent.extents[0], mla_v_width(geometry));
  detail::require_disjoint(operation, "out", out, "o_latent", o_latent, "kv_b", kv_b);
  detail::mla_launch_expand(exec, geometry, o_latent, kv_b, DeviceView<const typename Out::value_type, 2>{}, nullptr,
                            out);
}

/// The host's mla_decode_token on the device, of the same shapes and rounding points, with the output gate in the
/// kernel of mla_expand_values. Slots and positions are device data: a row whose slot, position or pages are not there
/// gives zeros, writes no cache row unless its own page is there, and its word of `status` [R], if given, becomes
/// RowStatus::bad_slot; that the rows of a slot follow each other is not checked. A row's bits depend on its own
/// sequence alone. May be captured: the launch depends on the number of rows and the cache's capacity only. Throws
/// invalid_argument for what the arguments show, before anything is launched. Accuracy: float within 2e-6 of double, of
/// the largest output up to 1000 positions; bf16 within 5e-3 (relative L2) of the host's. Cost: kv_b once, and
/// of each row's positions 1152 bytes once per 96 heads, per 48 in calls of few rows or tiles, at the released
/// geometry.
template <mla_geometry G, device_tensor<2> Q, device_tensor<2> KvA, device_tensor<2> Gate, class T, precision P,
          writable_device_tensor<2> Out>
  requires(std::same_as<typename Out::value_type, T> && std::same_as<typename Q::value_type, T> &&
           std::same_as<typename KvA::value_type, T> && std::same_as<typename Gate::value_type, T> &&
           std::same_as<typename P::activation, T>)
void mla_decode_token(const gpu& exec, G geometry, const Q& q, const KvA& kv_a,
                      const AnyVector<MemorySpace::device>& kv_a_norm, const AnyMatrix<MemorySpace::device>& kv_b,
                      const Gate& gate, DeviceView<const id, 1> slots, DeviceView<const size, 1> positions,
                      const MlaKvView<T, MemorySpace::device>& kv, const MlaDeviceWorkspace<P>& workspace,
                      const Out& out, DeviceView<unsigned, 1> status = {}) {
  constexpr const char* operation = "mla_decode_token";
  const size rows = slots.extents[0];
  const float eps = detail::mla_norm_eps(geometry);
  detail::mla_check_append(operation, geometry, kv_a, kv_a_norm, eps, slots, positions, kv, status);
  detail::require_shape(operation, "q", q, rows, mla_q_width(geometry));
  detail::mla_check_kv_b(operation, geometry, kv_b);
  detail::require_shape(operation, "out", out, rows, mla_v_width(geometry));
  workspace.check(operation, geometry, rows, kv.capacity());
  if constexpr (requires { geometry.mla_use_output_gate; })
    detail::require((gate.data != nullptr) == geometry.mla_use_output_gate || rows == 0, operation, "gate",
                    gate.data ? "given" : "absent",
                    geometry.mla_use_output_gate ? "a gate" : "none: mla_use_output_gate is false");
  if (gate.data != nullptr) {
    detail::require_shape(operation, "gate", gate, rows, mla_v_width(geometry));
    detail::require_disjoint(operation, "out", out, "gate", gate);
    detail::require_disjoint(operation, "kv.pages", kv.pages, "gate", gate);
    detail::require_disjoint(operation, "status", status, "gate", gate);
  }
  detail::require_disjoint(operation, "out", out, "q", q, "kv_a", kv_a, "kv_a_layernorm", kv_a_norm, "kv_b", kv_b,
                           "slots", slots, "positions", positions, "kv.pages", kv.pages, "kv.block_table",
                           kv.block_table);
  detail::require_disjoint(operation, "kv.pages", kv.pages, "q", q, "kv_b", kv_b);
  detail::require_disjoint(operation, "status", status, "q", q, "kv_a", kv_a, "kv_a_layernorm", kv_a_norm, "kv_b", kv_b,
                           "out", out);
  if (rows == 0) return;
  const auto q_latent = workspace.q_latent(rows);
  const auto o_latent = workspace.o_latent(rows);
  mla_append(exec, geometry, kv_a, kv_a_norm, eps, slots, positions, kv, status);
  mla_absorb_query(exec, geometry, q, kv_b, q_latent);
  mla_attend(exec, geometry, q_latent, kv, slots, positions, workspace, o_latent, status);
  detail::mla_launch_expand(exec, geometry, o_latent, kv_b, gate, workspace.live(), out);
}

}  // namespace k3
