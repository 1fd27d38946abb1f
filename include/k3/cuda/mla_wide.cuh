// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/buffer.cuh>
#include <k3/cuda/launch.cuh>
#include <k3/cuda/tensor_map.cuh>
#include <k3/kernels/mla_attend_few.cuh>
#include <k3/kernels/mla_attend_wide.cuh>
#include <k3/kernels/mla_combine_wide.cuh>
#include <k3/ops/mla_kv.hpp>

// What the host does for mla_attend_wide and mla_attend_few: where they apply, and their partial results.
namespace k3::detail {

/// bf16 [planes, rows, columns] with `row_stride` and `plane_stride` elements, in boxes of 64 columns and `box` rows.
inline CUtensorMap mla_tensor_map(const bf16* data, size planes, size rows, size columns, size plane_stride,
                                  size row_stride, unsigned box) {
  static_assert(kernel::mla_piece_columns == 64);
  return tensor_map<3>("mla_attend", data, {columns, rows, planes}, {row_stride, plane_stride}, box,
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

/// Copies of a tile's piece: a page may be shorter than a tile. 0 where tiles cannot be copied.
inline unsigned mla_boxes(size page_size, size blocks) {
  for (unsigned boxes = 1; boxes <= 8; boxes *= 2)
    if (page_size % (kernel::mla_tile / boxes) == 0) return boxes;
  return blocks == 1 ? 1 : 0;
}

/// What these kernels leave to mla_combine_wide: two parts of each block at most, or, where rows are cut by their own
/// length, as many for each of some rows. Its size does not depend on the batch or the context.
class MlaWideWorkspace {
 public:
  MlaWideWorkspace() = default;
  /// Empty where the kernel does not apply to the geometry or the device.
  MlaWideWorkspace(size heads, size width, size latent, size max_rows) {
    constexpr const char* operation = "MlaDeviceWorkspace";
    if (heads <= 16 || latent != kernel::mla_wide_latent || width != kernel::mla_wide_width) return;
    if (tensor_map_encoder() == nullptr) return;
    if (!target(operation).warpgroup_products) return;
    int device = 0, count = 0;
    check_cuda(operation, "cudaGetDevice", cudaGetDevice(&device));
    check_cuda(operation, "cudaDeviceGetAttribute",
               cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    check_cuda(operation, "cudaFuncSetAttribute",
               cudaFuncSetAttribute(kernel::mla_attend_wide, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(kernel::MlaWideShared<96>))));
    check_cuda(operation, "cudaFuncSetAttribute",
               cudaFuncSetAttribute(kernel::mla_attend_few, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(sizeof(kernel::MlaFewShared))));
    const size groups = (heads + 95) / 96;
    blocks_ = static_cast<unsigned>(larger(static_cast<size>(count), 2 * groups));
    places_ = 8 * larger(blocks_ / groups, size{1});
    stats_ = DeviceBuffer<kernel::MlaStats>(places_ * groups * 96, false);
    part_ = DeviceBuffer<float>(stats_.count() * latent / 2, false);
    exponents_ = DeviceBuffer<unsigned char>(stats_.count() * latent / 8, false);
    segments_ = DeviceBuffer<uint2>(smaller(max_rows, size{kernel::mla_wide_rows}));
    if (heads > kernel::mla_few_heads && groups == 1 && blocks_ % 2 == 0) cluster_ = paired(blocks_) ? 2 : 1;
  }

  explicit operator bool() const { return blocks_ != 0; }
  float* part() const { return part_.data(); }
  kernel::MlaStats* stats() const { return stats_.data(); }
  /// Heads of rows that there is room for as floats.
  size parts() const { return stats_.count() / 2; }
  size bytes() const { return part_.bytes() + exponents_.bytes() + stats_.bytes() + segments_.bytes(); }
  unsigned blocks() const { return blocks_; }
  /// Blocks of mla_attend_few to a cluster.
  unsigned cluster() const { return cluster_; }
  /// Of one launch, for a cache of this capacity.
  size rows(bool independent, size capacity) const {
    const auto tiles = static_cast<unsigned>((capacity + kernel::mla_tile - 1) / kernel::mla_tile);
    const size by_room = larger(places_ / kernel::mla_wide_parts_of(tiles), size{1});
    return smaller(independent ? by_room : size{kernel::mla_wide_rows}, size{kernel::mla_wide_rows});
  }

  kernel::MlaWideArguments arguments(const kernel::MlaAttendArguments<bf16>& a, bool independent,
                                     unsigned boxes) const {
    kernel::MlaWideArguments w;
    w.a = a;
    w.boxes = boxes, w.box_rows = kernel::mla_tile / boxes, w.independent = independent;
    w.part = reinterpret_cast<uint4*>(part_.data()), w.exponents = exponents_.data();
    w.stats = stats_.data(), w.segments = segments_.data();
    return w;
  }

 private:
  /// Whether all blocks of mla_attend_few are there at a time in clusters of two. The two, with the same tiles, then
  /// share a TPC, whose reads of the same lines are joined on their way to the L2 cache.
  static bool paired(unsigned blocks) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks), config.blockDim = dim3(kernel::mla_few_threads);
    config.dynamicSmemBytes = sizeof(kernel::MlaFewShared);
    config.attrs = &attribute, config.numAttrs = 1;
    int clusters = 0;
    check_cuda("MlaDeviceWorkspace", "cudaOccupancyMaxActiveClusters",
               cudaOccupancyMaxActiveClusters(&clusters, kernel::mla_attend_few, &config));
    return 2 * static_cast<unsigned>(clusters) >= blocks;
  }

  unsigned blocks_ = 0, cluster_ = 1;
  size places_ = 0;
  DeviceBuffer<float> part_{};
  DeviceBuffer<unsigned char> exponents_{};
  DeviceBuffer<kernel::MlaStats> stats_{};
  DeviceBuffer<uint2> segments_{};
};

/// Up to so many rows were measured: mla_attend_few is faster than mla_attend_wide, which takes more. A row's bits are
/// the same.
inline constexpr unsigned mla_few_rows = 128;

/// Rows of at most MlaWideWorkspace::rows.
inline void mla_launch_wide(const gpu& exec, const MlaWideWorkspace& workspace,
                            const kernel::MlaAttendArguments<bf16>& a, unsigned boxes) {
  const kernel::MlaCache<const bf16>& cache = a.cache;
  const CUtensorMap q_map = mla_tensor_map(a.q, a.rows.count, a.heads, a.width, a.q_row, a.q_head, 48);
  const CUtensorMap kv_map = mla_tensor_map(cache.pages, cache.page_count, cache.page_size, a.width, cache.page_stride,
                                            cache.row_stride, kernel::mla_tile / boxes);
  const kernel::MlaWideArguments w = workspace.arguments(a, exec.independent, boxes);
  const unsigned rows = static_cast<unsigned>(a.rows.count), pieces = (a.heads + 7) / 8 * 4 * rows;
  constexpr const char* operation = "mla_attend";
  const unsigned most = workspace.blocks();
  if (rows <= mla_few_rows)
    launch_clusters(operation, exec.stream, workspace.cluster(), dim3(most), dim3(kernel::mla_few_threads),
                    sizeof(kernel::MlaFewShared), kernel::mla_attend_few, w, q_map, kv_map);
  else
    launch(operation, exec.stream, dim3(most), dim3(kernel::mla_wide_threads), sizeof(kernel::MlaWideShared<96>),
           kernel::mla_attend_wide, w, q_map, kv_map);
  // Few rows have many parts each, many rows few.
  const auto join = [&](auto* combine, unsigned blocks, unsigned threads) {
    launch(operation, exec.stream, dim3(blocks), dim3(threads), 0, combine, w);
  };
  if (rows <= 2)
    join(kernel::mla_combine_wide<32, 8>, smaller(4 * pieces, 3 * most), 256);
  else if (rows <= 8)
    join(kernel::mla_combine_wide<128, 2>, smaller(pieces, 3 * most), 256);
  else
    join(kernel::mla_combine_wide<128, 1>, smaller(pieces, 6 * most), 128);
}

}  // namespace k3::detail
