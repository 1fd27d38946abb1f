// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/buffer.cuh>
#include <k3/kernels/mla_attend_few.cuh>
#include <k3/kernels/mla_attend_wide.cuh>
#include <k3/kernels/mla_combine_wide.cuh>
#include <k3/ops/mla_kv.hpp>

// What the host does for mla_attend_wide and mla_attend_few: where they apply, their partial results, and the
// descriptions of tensors that their copies take.
namespace k3::detail {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

/// The driver's encoder, without linking to the driver; null where there is none.
inline TensorMapEncoder tensor_map_encoder() {
  static const TensorMapEncoder found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    static_cast<void>(cudaGetLastError());
    return code == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<TensorMapEncoder>(function)
                                                                        : nullptr;
  }();
  return found;
}

/// bf16 [planes, rows, columns] with `row_stride` and `plane_stride` elements, in boxes of 64 columns and `box` rows.
inline CUtensorMap mla_tensor_map(const bf16* data, size planes, size rows, size columns, size plane_stride,
                                  size row_stride, unsigned box) {
  CUtensorMap map;
  const cuuint64_t extents[3] = {columns, rows, planes};
  const cuuint64_t strides[2] = {row_stride * sizeof(bf16), plane_stride * sizeof(bf16)};
  const cuuint32_t boxes[3] = {kernel::mla_piece_columns, box, 1}, steps[3] = {1, 1, 1};
  const CUresult code =
      tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<bf16*>(data), extents, strides, boxes,
                           steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(code == CUDA_SUCCESS, "mla_attend", "the tensor map's code", static_cast<int>(code), "0");
  return map;
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
    cudaFuncAttributes attributes{};
    check_cuda(operation, "cudaFuncGetAttributes", cudaFuncGetAttributes(&attributes, kernel::mla_wide_probe<32>));
    if (attributes.sharedSizeBytes == 0) return;  // not built for sm_90a
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
  }

  explicit operator bool() const { return blocks_ != 0; }
  float* part() const { return part_.data(); }
  kernel::MlaStats* stats() const { return stats_.data(); }
  /// Heads of rows that there is room for as floats.
  size parts() const { return stats_.count() / 2; }
  size bytes() const { return part_.bytes() + exponents_.bytes() + stats_.bytes() + segments_.bytes(); }
  unsigned blocks() const { return blocks_; }
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
  unsigned blocks_ = 0;
  size places_ = 0;
  DeviceBuffer<float> part_{};
  DeviceBuffer<unsigned char> exponents_{};
  DeviceBuffer<kernel::MlaStats> stats_{};
  DeviceBuffer<uint2> segments_{};
};

/// A launch that may start while the kernel before it ends: the kernel itself waits for it.
template <class... Parameter, class... Argument>
void mla_launch_after(const gpu& exec, void (*function)(Parameter...), dim3 grid, unsigned threads, size shared,
                      const Argument&... argument) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared, config.stream = exec.stream;
  config.attrs = &attribute, config.numAttrs = 1;
  check_cuda("mla_attend", "cudaLaunchKernelEx",
             cudaLaunchKernelEx(&config, function, static_cast<Parameter>(argument)...));
}

/// Up to so many rows mla_attend_few is faster, above them mla_attend_wide; a row's bits are the same.
constexpr unsigned mla_few_rows(bool independent) { return independent ? 8 : 64; }

/// Rows of at most MlaWideWorkspace::rows.
inline void mla_launch_wide(const gpu& exec, const MlaWideWorkspace& workspace,
                            const kernel::MlaAttendArguments<bf16>& a, unsigned boxes) {
  const kernel::MlaCache<const bf16>& cache = a.cache;
  const CUtensorMap q_map = mla_tensor_map(a.q, a.rows.count, a.heads, a.width, a.q_row, a.q_head, 48);
  const CUtensorMap kv_map = mla_tensor_map(cache.pages, cache.page_count, cache.page_size, a.width, cache.page_stride,
                                            cache.row_stride, kernel::mla_tile / boxes);
  const kernel::MlaWideArguments w = workspace.arguments(a, exec.independent, boxes);
  const unsigned rows = static_cast<unsigned>(a.rows.count), pieces = (a.heads + 7) / 8 * 4 * rows;
  if (rows <= mla_few_rows(exec.independent))
    mla_launch_after(exec, kernel::mla_attend_few, dim3(workspace.blocks()), kernel::mla_few_threads,
                     sizeof(kernel::MlaFewShared), w, q_map, kv_map);
  else
    mla_launch_after(exec, kernel::mla_attend_wide, dim3(workspace.blocks()), kernel::mla_wide_threads,
                     sizeof(kernel::MlaWideShared<96>), w, q_map, kv_map);
  // Few rows have many parts each, many rows few.
  const unsigned most = workspace.blocks();
  if (rows <= 2)
    mla_launch_after(exec, kernel::mla_combine_wide<32, 8>, dim3(smaller(4 * pieces, 3 * most)), 256, 0, w);
  else if (rows <= 8)
    mla_launch_after(exec, kernel::mla_combine_wide<128, 2>, dim3(smaller(pieces, 3 * most)), 256, 0, w);
  else
    mla_launch_after(exec, kernel::mla_combine_wide<128, 1>, dim3(smaller(pieces, 6 * most)), 128, 0, w);
}

}  // namespace k3::detail
