// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>
#include <k3/core/overlap.hpp>
#include <k3/core/precision.hpp>
#include <k3/cuda/mla_device_kv.cuh>
#include <k3/cuda/mla_wide.cuh>
#include <k3/kernels/mla_attend.cuh>
#include <k3/ops/row_status.hpp>

namespace k3 {

namespace detail {

/// The types of activations that the device has kernels for.
template <class T>
concept mla_device_real = std::same_as<T, float> || std::same_as<T, bf16>;

/// Tiles of 8 heads that one block takes.
inline constexpr unsigned mla_group_tiles(size heads) { return heads <= 16 ? 2 : 6; }
inline constexpr size mla_groups(size heads) {
  return (heads + mla_group_tiles(heads) * 8 - 1) / (mla_group_tiles(heads) * 8);
}
/// From this many blocks without splitting on, a block takes all splits of its row.
inline constexpr size mla_whole_blocks = 96;
/// Splits of a row as long as a cache.
inline size mla_capacity_splits(size capacity) {
  return smaller((capacity + kernel::mla_tile - 1) / kernel::mla_tile, size{kernel::mla_most_splits});
}

inline void mla_require_weight(const char* operation, const char* argument, ElementType type) {
  require(type == ElementType::f32 || type == ElementType::bf16, operation, argument, "of another type",
          "F32 or BF16 on the device");
}

template <class T>
void mla_check_rows(const char* operation, size rows, DeviceView<const id, 1> slots,
                    DeviceView<const size, 1> positions, const MlaKvView<T, MemorySpace::device>& kv,
                    DeviceView<unsigned, 1> status) {
  require(rows < size{1} << 31, operation, "rows", rows, "below 2^31");
  require_shape(operation, "slots", slots, rows);
  require_shape(operation, "positions", positions, rows);
  require(rows < 2 || (slots.strides[0] == 1 && positions.strides[0] == 1), operation, "slots or positions", "strided",
          "dense");
  require(kv.page_size < size{1} << 31 && kv.capacity() < size{1} << 31, operation, "kv.capacity", kv.capacity(),
          "below 2^31");
  if (status.data != nullptr) require_shape(operation, "status", status, rows);
}

template <mla_geometry G, class T>
void mla_check_kv(const char* operation, G g, const MlaKvView<T, MemorySpace::device>& kv) {
  require(kv.page_size > 0, operation, "kv.page_size", kv.page_size, "at least 1");
  require_shape(operation, "kv.pages", kv.pages, kv.pages.extents[0], kv.page_size, mla_cache_width(g));
  require_shape(operation, "kv.block_table", kv.block_table, kv.slots(), kv.block_table.extents[1]);
}

inline kernel::MlaRows mla_rows(DeviceView<const id, 1> slots, DeviceView<const size, 1> positions,
                                DeviceView<unsigned, 1> status) {
  return {slots.data, positions.data, status.data, slots.extents[0], static_cast<unsigned>(RowStatus::bad_slot)};
}

template <class To, class T>
kernel::MlaCache<To> mla_cache(const MlaKvView<T, MemorySpace::device>& kv) {
  kernel::MlaCache<To> cache;
  cache.pages = kv.pages.data, cache.page_stride = kv.pages.strides[0], cache.row_stride = kv.pages.strides[1];
  cache.table = kv.block_table.data, cache.table_stride = kv.block_table.strides[0];
  cache.slots = kv.slots(), cache.page_count = kv.pages.extents[0], cache.capacity = kv.capacity();
  cache.page_size = static_cast<unsigned>(kv.page_size);
  return cache;
}

inline bool mla_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

template <mla_geometry G>
void mla_check_geometry(G g, const char* operation) {
  require_nope(g, operation);
  require(g.heads <= 65535 && mla_cache_width(g) < size{1} << 28 && mla_qk_head_dim(g) < size{1} << 28 &&
              g.v_head_dim < size{1} << 24,
          operation, "geometry", "too large", "at most 65535 heads of less than 2^24");
}

}  // namespace detail

/// Device memory between the parts of mla_decode_token, for rows of up to `capacity` positions: absorbed queries,
/// latent means, and partial results of parts of rows: at the released geometry 111 MB on 132 multiprocessors, whatever
/// the batch and the context. Allocated here, once, on the current device.
template <precision P>
class MlaDeviceWorkspace {
 public:
  using Activation = typename P::activation;
  static_assert(detail::mla_device_real<Activation>);

  MlaDeviceWorkspace() = default;
  template <mla_geometry G>
  MlaDeviceWorkspace(G g, size max_rows, size capacity)
      : max_rows_(max_rows), heads_(g.heads), width_(mla_cache_width(g)), latent_(g.kv_lora_rank), capacity_(capacity) {
    constexpr const char* operation = "MlaDeviceWorkspace";
    k3::check(g, operation);
    detail::mla_check_geometry(g, operation);
    detail::require(capacity > 0 && capacity < size{1} << 31, operation, "capacity", capacity,
                    "between 1 and 2^31 - 1");
    const size groups = detail::mla_groups(heads_);
    part_rows_ = detail::smaller(max_rows, (detail::mla_whole_blocks + groups - 1) / groups);
    const size splits = detail::mla_capacity_splits(capacity);
    if constexpr (std::same_as<Activation, bf16>) {
      prepare();
      wide_ = detail::MlaWideWorkspace(heads_, width_, latent_, max_rows);
    }
    q_latent_ = DeviceBuffer<Activation>(detail::checked_product(operation, "max_rows", max_rows, heads_ * width_));
    o_latent_ = DeviceBuffer<float>(detail::checked_product(operation, "max_rows", max_rows, heads_ * latent_));
    live_ = DeviceBuffer<unsigned char>(max_rows);
    if (wide_) part_rows_ = detail::smaller(part_rows_, wide_.parts() / (heads_ * splits));  // its memory serves both
    if (wide_ && part_rows_ > 0) return;
    part_rows_ = detail::larger(part_rows_, size{1});
    part_ = DeviceBuffer<float>(part_rows_ * heads_ * splits * latent_, false);
    stats_ = DeviceBuffer<kernel::MlaStats>(part_rows_ * heads_ * splits, false);
  }

  size max_rows() const { return max_rows_; }
  size capacity() const { return capacity_; }
  size bytes() const {
    return q_latent_.bytes() + o_latent_.bytes() + part_.bytes() + stats_.bytes() + live_.bytes() + wide_.bytes();
  }
  auto q_latent(size rows) const { return q_latent_.view(rows, heads_, width_); }
  auto o_latent(size rows) const { return o_latent_.view(rows, heads_, latent_); }
  float* part() const { return part_.count() > 0 ? part_.data() : wide_.part(); }
  kernel::MlaStats* stats() const { return part_.count() > 0 ? stats_.data() : wide_.stats(); }
  unsigned char* live() const { return live_.data(); }
  /// Rows whose splits the partial results have room for.
  size part_rows() const { return part_rows_; }
  /// Tiles of the cache in shared memory, 0 where the tensor-core kernel does not fit this geometry or device.
  unsigned stages() const { return stages_; }

  /// Of mla_attend_wide and mla_attend_few, false where they do not apply.
  const detail::MlaWideWorkspace& wide() const { return wide_; }

  /// Throws invalid_argument where the workspace was made for another geometry, for fewer rows or shorter ones.
  template <mla_geometry G>
  void check(const char* operation, G geometry, size rows, size capacity) const {
    detail::require(rows <= max_rows_, operation, "the workspace's max_rows", max_rows(), rows);
    detail::require(capacity <= capacity_, operation, "the workspace's capacity", capacity_, capacity);
    detail::require(heads_ == geometry.heads, operation, "the workspace's heads", heads_, geometry.heads);
    detail::require(width_ == mla_cache_width(geometry) && latent_ == geometry.kv_lora_rank, operation,
                    "the workspace's width", width_, mla_cache_width(geometry));
  }

 private:
  /// Lets the kernel have as much shared memory as it wants: per device, so here and not at the first launch.
  void prepare() {
    constexpr const char* operation = "MlaDeviceWorkspace";
    if (latent_ > kernel::mla_widest_latent) return;
    int device = 0, most = 0;
    detail::check_cuda(operation, "cudaGetDevice", cudaGetDevice(&device));
    detail::check_cuda(operation, "cudaDeviceGetAttribute",
                       cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    const auto allow = [&](auto* function) {
      detail::check_cuda(operation, "cudaFuncSetAttribute",
                         cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    };
    allow(kernel::mla_attend_tensor<2>);
    allow(kernel::mla_attend_tensor<6>);
    const auto width = static_cast<unsigned>(width_), group = detail::mla_group_tiles(heads_) * 8;
    for (unsigned stages = 2; stages > 0 && stages_ == 0; --stages)
      if (kernel::mla_shared_bytes(group, width, stages) <= static_cast<size>(most)) stages_ = stages;
  }

  detail::OwnedSize max_rows_;
  size heads_ = 0, width_ = 0, latent_ = 0, capacity_ = 0, part_rows_ = 0;
  unsigned stages_ = 0;
  DeviceBuffer<Activation> q_latent_{};
  DeviceBuffer<float> o_latent_{}, part_{};
  DeviceBuffer<kernel::MlaStats> stats_{};
  DeviceBuffer<unsigned char> live_{};
  detail::MlaWideWorkspace wide_{};
};

}  // namespace k3
