// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <k3/core/bf16.hpp>
#include <k3/cuda/check.cuh>

// Descriptions of tensors in memory that tensor copies take.
namespace k3::detail {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

/// The driver's cuTensorMapEncodeTiled, without linking to the driver; null where there is none.
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

/// bf16 `data` of `extents`, the innermost first, in boxes of 64 columns (128 bytes, their pieces of 16 bytes permuted
/// within 8 rows, as matrix products want them) and `box_rows` rows. `strides`, in elements, of all but the innermost.
/// `promotion`: how much of a row the L2 cache fetches at once. The encoder must be there. Throws cuda_error where it
/// refuses.
template <unsigned Rank>
CUtensorMap tensor_map(const char* operation, const bf16* data, const size (&extents)[Rank],
                       const size (&strides)[Rank - 1], unsigned box_rows, CUtensorMapL2promotion promotion) {
  CUtensorMap map;
  cuuint64_t sizes[Rank], bytes[Rank - 1];
  cuuint32_t box[Rank], steps[Rank];
  for (unsigned i = 0; i < Rank; ++i) sizes[i] = extents[i], box[i] = i == 0 ? 64 : i == 1 ? box_rows : 1, steps[i] = 1;
  for (unsigned i = 0; i + 1 < Rank; ++i) bytes[i] = strides[i] * sizeof(bf16);
  const CUresult code = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, Rank, const_cast<bf16*>(data),
                                             sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) throw cuda_error(operation, "cuTensorMapEncodeTiled", static_cast<int>(code), "refused");
  return map;
}

}  // namespace k3::detail
