// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/overlap.hpp>
#include <k3/core/precision.hpp>
#include <k3/cuda/expert_table.cuh>
#include <k3/cuda/launch.cuh>
#include <k3/kernels/expert_general.cuh>
#include <k3/kernels/expert_small.cuh>
#include <k3/ops/mix_routed_experts.hpp>
#include <k3/ops/row_status.hpp>

namespace k3 {

/// Scratch memory of `mix_routed_experts` on the device for up to `max_rows` rows, made once and reused by every layer
/// of that geometry: about top_k * max_rows * (width + expert_hidden) activations. Throws invalid_argument for
/// sizes that do not fit, cuda_error where there is no memory.
template <precision P>
  requires(!std::same_as<typename P::activation, double>)
class MoeDeviceWorkspace {
 public:
  using Activation = typename P::activation;

  template <latent_moe_geometry G>
  MoeDeviceWorkspace(G geometry, size max_rows)
      : geometry_(checked(latent_moe_config(geometry), max_rows)),
        max_rows_(max_rows),
        kinds(max_rows),
        counts(geometry_.n_routed > kernel::worklist_shared_experts ? size{geometry_.n_routed} : 0),
        items(max_rows * geometry_.top_k),
        item_count(1),
        order(items.count()),
        ready(items.count() + 1),
        staged(std::same_as<Activation, bf16> ? max_rows * padded(moe_expert_width(geometry_)) : 0),
        mid(items.count() * padded(geometry_.expert_hidden)),
        y(items.count() * moe_expert_width(geometry_)) {}

  const LatentMoeConfig& geometry() const { return geometry_; }
  size max_rows() const { return max_rows_; }
  size bytes() const {
    return kinds.bytes() + counts.bytes() + items.bytes() + item_count.bytes() + order.bytes() + ready.bytes() +
           staged.bytes() + mid.bytes() + y.bytes();
  }

  /// How many rows of the last call each expert was computed for [n_routed]. For inspection: copies, and so waits.
  std::vector<size> expert_rows() const {
    std::vector<size> rows(geometry_.n_routed);
    const std::vector<kernel::ExpertItem> list = items.to_vector();
    for (unsigned i = 0, n = item_count.to_vector()[0]; i < n; ++i) rows[list[i].expert] += list[i].count;
    return rows;
  }

  /// Elements of a row as the matrix kernels read it.
  static constexpr size padded(size width) { return (width + 127) / 128 * 128; }

 private:
  static LatentMoeConfig checked(const LatentMoeConfig& g, size max_rows) {
    constexpr const char* operation = "MoeDeviceWorkspace";
    check(g, operation);
    detail::require(max_rows < size{1} << 31, operation, "max_rows", max_rows, "below 2^31");
    // Tiles are counted in 32 bits: one for each choice and each 8 rows of its weights, at most.
    const size wider = detail::larger(g.expert_hidden, moe_expert_width(g)) / 8 + 1;
    const size tiles =
        detail::checked_product(operation, "max_rows * top_k * width",
                                detail::checked_product(operation, "max_rows * top_k", max_rows, g.top_k), wider);
    detail::require(tiles < size{1} << 31, operation, "max_rows", max_rows, "fewer rows for this geometry");
    return g;
  }

  LatentMoeConfig geometry_;
  detail::OwnedSize max_rows_;

 public:
  // For the operations.
  DeviceBuffer<unsigned char> kinds;         // [rows]
  DeviceBuffer<unsigned> counts;             // [n_routed] where they are too many for shared memory
  DeviceBuffer<kernel::ExpertItem> items;    // [rows * top_k]
  DeviceBuffer<unsigned> item_count, order;  // [1], [rows * top_k]
  DeviceBuffer<unsigned> ready;              // [rows * top_k + 1], 0 between calls
  DeviceBuffer<Activation> staged;           // [rows, padded width]
  DeviceBuffer<Activation> mid, y;           // [rows * top_k, padded expert_hidden], [rows * top_k, width]
};

namespace detail {

/// Whether expert_stream can run: it is empty where it was compiled for an older target, and wants more shared memory
/// than a block of compute capability 12.x can have.
inline bool expert_stream_runs() {
  static const bool runs = [] {
    constexpr const char* operation = "mix_routed_experts";
    constexpr int shared = kernel::small_ring_bytes + kernel::small_rows_bytes;
    if (!target(operation).bulk_copies) return false;
    int device = 0, most = 0;
    check_cuda(operation, "cudaGetDevice", cudaGetDevice(&device));
    check_cuda(operation, "cudaDeviceGetAttribute",
               cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    cudaFuncAttributes own{};
    check_cuda(operation, "cudaFuncGetAttributes", cudaFuncGetAttributes(&own, kernel::expert_stream<true>));
    if (most < shared + static_cast<int>(own.sharedSizeBytes)) return false;
    check_cuda(operation, "cudaFuncSetAttribute",
               cudaFuncSetAttribute(kernel::expert_stream<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    return true;
  }();
  return runs;
}

/// The two products as two kernels, for any weights.
template <class X>
struct ExpertLaunch {
  const char* operation;
  const gpu& exec;
  const ExpertTable& table;

  /// As many blocks as the device holds at once, or fewer where there are never so many tiles. `items`: at most.
  template <class Function>
  void run(Function function, unsigned threads, const kernel::ExpertGemmArguments<X>& a, size items,
           unsigned unit) const {
    int resident = 0;
    check_cuda(operation, "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
               cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, function, static_cast<int>(threads), 0));
    const size tiles = items * ((a.rows + unit - 1) / unit);
    const size most = static_cast<size>(resident) * static_cast<size>(multiprocessors());
    function<<<static_cast<unsigned>(smaller(tiles, most)), threads, 0, exec.stream>>>(a);
    check_launch(operation);
  }

  template <bool Glu, class W>
  void general(const kernel::ExpertGemmArguments<X>& a, size items) const {
    run(kernel::expert_general<X, W, Glu>, kernel::expert_general_threads, a, items,
        kernel::expert_general_threads / 32);
  }
  template <bool Glu, class Weights>
  void tensor(const kernel::ExpertGemmArguments<X>& a, size items) const {
    run(kernel::expert_tensor<Weights, Glu>, kernel::expert_threads, a, items, Glu ? 8 : 16);
  }

  template <bool Glu>
  void multiply(const kernel::ExpertGemmArguments<X>& a, size items) const {
    using namespace kernel;
    const ElementType type = table.type();
    const bool packed = table.layout() == ExpertLayout::packed;
    if constexpr (std::same_as<X, bf16>) {
      if (type == ElementType::mxfp4 && packed) return tensor<Glu, Mxfp4Weights<true, true>>(a, items);
      if (type == ElementType::mxfp4)
        return table.aligned() ? tensor<Glu, Mxfp4Weights<true, false>>(a, items)
                               : tensor<Glu, Mxfp4Weights<false, false>>(a, items);
      if (type == ElementType::bf16)
        return table.aligned() ? tensor<Glu, Bf16Weights<true>>(a, items) : tensor<Glu, Bf16Weights<false>>(a, items);
    } else {
      if (type == ElementType::mxfp4) return packed ? general<Glu, PackedE2m1>(a, items) : general<Glu, E2m1>(a, items);
      if (type == ElementType::bf16) return general<Glu, bf16>(a, items);
    }
    general<Glu, float>(a, items);
  }

  template <precision P, latent_moe_geometry G, class Latent>
  void both(G geometry, const Latent& latent, const kernel::WorklistArguments& list, bool tensor,
            kernel::RowOrder order, const MoeDeviceWorkspace<P>& workspace) const {
    const size width = latent.extent(1), items = size{list.rows} * list.k;
    kernel::ExpertGemmArguments<X> a{};
    a.items = list.items, a.item_count = list.item_count, a.order = list.order;
    a.k = list.k, a.glu = kernel::LinearGlu(geometry.activation);
    a.x = tensor ? workspace.staged.data() : latent.data;
    a.x_stride = tensor ? workspace.padded(width) : latent.strides[0];
    a.out = workspace.mid.data(), a.out_stride = workspace.padded(geometry.expert_hidden), a.out_order = order;
    a.rows = static_cast<unsigned>(geometry.expert_hidden), a.columns = static_cast<unsigned>(width);
    a.padded_rows = tensor ? static_cast<unsigned>(a.out_stride) : 0;
    multiply<true>(a, items);

    a.x = a.out, a.x_stride = a.out_stride;
    a.out = workspace.y.data(), a.out_stride = width, a.out_order = kernel::RowOrder::natural;
    a.rows = static_cast<unsigned>(width), a.columns = static_cast<unsigned>(geometry.expert_hidden);
    multiply<false>(a, items);
  }
};

template <precision P, latent_moe_geometry G>
void require_workspace(const char* operation, G g, const MoeDeviceWorkspace<P>& workspace, size rows) {
  const LatentMoeConfig& own = workspace.geometry();
  const bool same = moe_expert_width(own) == moe_expert_width(g) && own.expert_hidden == g.expert_hidden &&
                    own.n_routed == g.n_routed && own.top_k == g.top_k;
  require(same, operation, "workspace", "made for other sizes", "made for this geometry");
  require_rows(operation, workspace, rows);
}

/// The list of work, and where tensor cores will read them, the rows in their order.
template <precision P, class X>
void launch_prepare(const gpu& exec, const kernel::WorklistArguments& a, const X& x, bool stage, kernel::RowOrder order,
                    const MoeDeviceWorkspace<P>& w) {
  const size width = x.extent(1);
  const unsigned blocks = stage ? 1 + smaller(a.rows, 1024u) : 1;
  using Activation = typename P::activation;
  launch("mix_routed_experts", exec.stream, dim3(blocks), dim3(kernel::worklist_threads), 0,
         kernel::prepare_experts<Activation>, a, x.data, x.strides[0], static_cast<unsigned>(width), order,
         w.staged.data(), w.padded(width));
}

}  // namespace detail

/// The weighted sum of the chosen experts on the device, rounded as the host's `mix_routed_experts` rounds:
/// out = sum_j weights[j] * y_j, y = w2 . glu(w1 . x, w3 . x).
/// Shapes: latent [R, W], ids [R, top_k], weights [R, top_k] float, out [R, W] (it may be latent). `slots` [R], if
/// given: rows with pad_slot are not looked at and give 0. `status` [R], if given: a row that is marked already is not
/// computed and gives NaN, and so does one with an id that names no expert of the table, which becomes
/// RowStatus::bad_expert; no weight is read for either, and no other row changes. Without `status` such a row still
/// gives NaN. Throws invalid_argument on shapes and sizes that do not fit and memory that overlaps in another way,
/// before anything is launched. Rows that chose the same expert share one reading of its weights (32 at a time); a
/// row's bits do not depend on the others. Accuracy: float within 2e-6 of double, of the largest output; bf16 within
/// 1e-3 (L2) of the host's bf16 (measured 4.2e-4). Cost: 17.5 MB of MXFP4 per distinct expert of the released model;
/// packed (repack_experts) on sm_90, two kernels up to 32 choices and three above, else four.
template <latent_moe_geometry G, device_tensor<2> Latent, device_tensor<2> Ids, device_tensor<2> Weights, precision P,
          writable_device_tensor<2> Out>
  requires(std::same_as<typename Latent::value_type, typename P::activation> &&
           std::same_as<typename Ids::value_type, id> && std::same_as<typename Weights::value_type, float> &&
           std::same_as<typename Out::value_type, typename P::activation>)
void mix_routed_experts(const gpu& exec, G geometry, const Latent& latent, const Ids& ids, const Weights& weights,
                        const ExpertTable& table, MoeDeviceWorkspace<P>& workspace, const Out& out,
                        DeviceView<const id, 1> slots = {}, DeviceView<unsigned, 1> status = {}) {
  using X = typename P::activation;
  constexpr const char* operation = "mix_routed_experts";
  const size rows = latent.extent(0), width = moe_expert_width(geometry), top_k = geometry.top_k;
  check(geometry, operation);
  detail::require_caps(operation, geometry.activation);
  detail::require_workspace(operation, geometry, workspace, rows);
  detail::require_shape(operation, "latent", latent, rows, width);
  detail::require_shape(operation, "ids", ids, rows, top_k);
  detail::require_shape(operation, "weights", weights, rows, top_k);
  const bool fits =
      table.experts() == geometry.n_routed && table.width() == width && table.expert_hidden() == geometry.expert_hidden;
  detail::require(fits, operation, "table", "made for other sizes", "made for this geometry");
  detail::require_shape(operation, "out", out, rows, width);
  if (slots.data != nullptr) detail::require_shape(operation, "slots", slots, rows);
  if (status.data != nullptr) detail::require_shape(operation, "status", status, rows);
  detail::require_same_or_disjoint(operation, "out", out, "latent", latent);
  detail::require_disjoint(operation, "out", out, "ids", ids, "weights", weights, "slots", slots);
  detail::require_disjoint(operation, "status", status, "latent", latent, "ids", ids, "weights", weights, "slots",
                           slots, "out", out);
  if (rows == 0) return;

  const bool tensor = std::same_as<X, bf16> && table.type() != ElementType::f32;
  const auto order = tensor && table.type() == ElementType::mxfp4 ? kernel::RowOrder::e2m1 : kernel::RowOrder::natural;
  kernel::WorklistArguments list{};
  list.ids = ids.data, list.ids_stride = ids.strides[0];
  list.rows = static_cast<unsigned>(rows), list.k = static_cast<unsigned>(top_k);
  list.experts = static_cast<unsigned>(geometry.n_routed), list.table = table.data();
  list.slots = slots.data, list.status = status.data, list.bad_expert = static_cast<unsigned>(RowStatus::bad_expert);
  list.kinds = workspace.kinds.data(), list.counts = workspace.counts.data();
  list.items = workspace.items.data(), list.item_count = workspace.item_count.data();
  list.order = workspace.order.data();

  const bool streams = std::same_as<X, bf16> && table.layout() == ExpertLayout::packed && detail::expert_stream_runs();
  const bool small =
      streams && rows * top_k <= kernel::small_choices && rows * width * sizeof(X) <= kernel::small_rows_bytes;
  if (streams) list.most = 8;
  if (!small) detail::launch_prepare<P>(exec, list, latent, tensor, order, workspace);
  if constexpr (std::same_as<X, bf16>) {
    kernel::ExpertStreamArguments stream{};
    stream.list = list, stream.latent = latent.data, stream.latent_stride = latent.strides[0];
    stream.x = workspace.staged.data(), stream.mid = workspace.mid.data(), stream.y = workspace.y.data();
    stream.ready = workspace.ready.data(), stream.done = stream.ready + workspace.items.count();
    stream.width = static_cast<unsigned>(width), stream.hidden = static_cast<unsigned>(geometry.expert_hidden);
    stream.glu = kernel::LinearGlu(geometry.activation);
    if (streams)
      detail::launch("mix_routed_experts", exec.stream, dim3(static_cast<unsigned>(detail::multiprocessors())),
                     dim3(kernel::expert_stream_threads),
                     small ? kernel::small_ring_bytes + rows * width * sizeof(X) : 0,
                     small ? kernel::expert_stream<true> : kernel::expert_stream<false>, stream);
  }
  if (!streams) {
    const detail::ExpertLaunch<X> launch{operation, exec, table};
    launch.template both<P>(geometry, latent, list, tensor, order, workspace);
  }

  const dim3 grid(static_cast<unsigned>((width + 255) / 256),
                  static_cast<unsigned>(detail::smaller(rows, size{65535})));
  detail::launch("mix_routed_experts", exec.stream, grid, dim3(256), 0, kernel::combine_experts<X>, workspace.y.data(),
                 weights.data, weights.strides[0], list.kinds, list.rows, list.k, static_cast<unsigned>(width),
                 out.data, out.strides[0], workspace.ready.data(),
                 streams ? static_cast<unsigned>(workspace.ready.count()) : 0u);
}

/// The expert path that reads MXFP4 codes and E8M0 scales through a table of pointers, by name.
inline constexpr const char* PTRTABLE_E8M0 = "the E8M0 pointer-table path";

/// `mix_routed_experts` for a table of MXFP4 experts (PTRTABLE_E8M0). Throws invalid_argument for other weights.
template <latent_moe_geometry G, class Latent, class Ids, class Weights, precision P, class Out>
void launch_k3_latent_moe_experts(const gpu& exec, G geometry, const Latent& latent, const Ids& ids,
                                  const Weights& weights, const ExpertTable& table, MoeDeviceWorkspace<P>& workspace,
                                  const Out& out, DeviceView<const id, 1> slots = {},
                                  DeviceView<unsigned, 1> status = {}) {
  detail::require(table.type() == ElementType::mxfp4, "launch_k3_latent_moe_experts", "table", "not MXFP4",
                  PTRTABLE_E8M0);
  mix_routed_experts(exec, geometry, latent, ids, weights, table, workspace, out, slots, status);
}

}  // namespace k3
