// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/expert_worklist.cuh>

// The packed layout of MXFP4 experts: the same bits as released, in the same memory, in the order in which the tensor
// cores take them.
//
// A matrix is cut into slabs of 8 rows (8 * columns / 2 bytes of codes, 8 * columns / 32 of scales, contiguous in both
// layouts) and a slab into pieces of 512 columns: 16 blocks of 32 in each row. With block b = 4 * step + c:
//   codes of a piece   [step 4][row 8][c 4][16 bytes]   lane 4 * row + c of a warp has 16 bytes of a contiguous 512
//   scales of a piece  [row 8][c 4][step 4]             and its four scales are a word
// In each 32-bit word (eight codes) the bits are permuted. A pair is codes i and i + 4, of which a tensor core takes
// two bf16: sign at bit 15, the other three bits at 8 to 6, which is 2^-126 times the code's value. With
// m = 0x81c081c0,
//   pair 0 = w & m,  pair 1 = w << 4 & m,  pair 2 = (w rotated left by 10) & m,
//   pair 3 = w << 6 & 0x80c080c0 | w >> 2 & 0x01000100:
// nine operations for eight codes. No permutation needs fewer: the four places of a pair, modulo 16, do not tile the
// 16 bits, so that a fifth shift of the word is needed and one pair has to be put together from two.
namespace k3::kernel {

inline constexpr unsigned slab_rows = 8, piece_columns = 512;
inline constexpr unsigned piece_code_bytes = slab_rows * piece_columns / 2;
inline constexpr unsigned piece_scale_bytes = slab_rows * piece_columns / 32;

/// Eight codes as released (code i at bits 4i to 4i + 3) to the packed order.
K3_HOST_DEVICE constexpr unsigned pack_codes(unsigned w) {
  return (w << 12 & 0x80008000u) | (w << 6 & 0x01c001c0u) | (w << 4 & 0x08000800u) | (w >> 2 & 0x001c001cu) |
         (w >> 6 & 0x02200220u) | ((w << 20 | w >> 12) & 0x70007000u) | (w >> 12 & 0x00030003u) |
         (w >> 4 & 0x04000400u);
}
/// The inverse.
K3_HOST_DEVICE constexpr unsigned unpack_codes(unsigned w) {
  const unsigned crossed = w & 0x70007000u;
  return (w >> 12 & 0x00080008u) | (w >> 6 & 0x00070007u) | (w >> 4 & 0x00800080u) | (w << 2 & 0x00700070u) |
         (w << 6 & 0x88008800u) | (crossed >> 20 | crossed << 12) | (w << 12 & 0x30003000u) | (w << 4 & 0x40004000u);
}

/// Where block `block` of row `row` of a slab lies among the slab's pieces of 16 bytes, and where its scale.
K3_HOST_DEVICE constexpr unsigned packed_codes_at(unsigned row, unsigned block) {
  return block / 4 * 32 + row * 4 + block % 4;
}
K3_HOST_DEVICE constexpr unsigned packed_scale_at(unsigned row, unsigned block) {
  return block / 16 * 128 + (row * 4 + block % 4) * 4 + block / 4 % 4;
}

/// A few experts as an argument of a kernel.
inline constexpr unsigned expert_list_most = 64;
struct ExpertList {
  ExpertPointers of[expert_list_most];
  unsigned count;
};
struct ExpertEntries {
  ExpertList list;
  unsigned expert[expert_list_most];
};

/// One block: entry `expert[i]` of a table becomes `list.of[i]`.
static __global__ void __launch_bounds__(expert_list_most)
    set_experts(const __grid_constant__ ExpertEntries entries, ExpertPointers* table) {
  if (threadIdx.x < entries.list.count) table[entries.expert[threadIdx.x]] = entries.list.of[threadIdx.x];
}

/// Shared memory of a block that repacks: a slab with its scales.
inline unsigned repack_shared(unsigned hidden, unsigned width) {
  return slab_rows * detail::larger(hidden, width) / 32 * 17;
}

/// Rewrites a slab of an expert, numbered through w1, w3 and w2, through shared memory.
template <bool Pack>
__device__ __forceinline__ void repack_slab(const ExpertPointers& e, unsigned number, unsigned hidden, unsigned width) {
  extern __shared__ uint4 slab[];
  if (e.w1 == nullptr) return;
  const unsigned of_up = hidden / slab_rows, matrix = detail::smaller(number / of_up, 2u);
  const unsigned blocks = (matrix == 2 ? hidden : width) / 32, pieces = slab_rows * blocks;
  const void* const codes = matrix == 0 ? e.w1 : matrix == 1 ? e.w3 : e.w2;
  const std::uint8_t* const scales = matrix == 0 ? e.scale1 : matrix == 1 ? e.scale3 : e.scale2;
  const size first = static_cast<size>(number - matrix * of_up) * pieces;
  uint4* const codes_at = static_cast<uint4*>(const_cast<void*>(codes)) + first;
  std::uint8_t* const scales_at = const_cast<std::uint8_t*>(scales) + first;
  std::uint8_t* const slab_scales = reinterpret_cast<std::uint8_t*>(slab + pieces);
  for (unsigned i = threadIdx.x; i < pieces; i += 256) slab[i] = codes_at[i], slab_scales[i] = scales_at[i];
  __syncthreads();
  for (unsigned i = threadIdx.x; i < pieces; i += 256) {
    const unsigned row = i / blocks, block = i % blocks;
    if constexpr (Pack) {
      const uint4 v = slab[i];
      codes_at[packed_codes_at(row, block)] = {pack_codes(v.x), pack_codes(v.y), pack_codes(v.z), pack_codes(v.w)};
      scales_at[packed_scale_at(row, block)] = slab_scales[i];
    } else {
      const uint4 v = slab[packed_codes_at(row, block)];
      codes_at[i] = {unpack_codes(v.x), unpack_codes(v.y), unpack_codes(v.z), unpack_codes(v.w)};
      scales_at[i] = slab_scales[packed_scale_at(row, block)];
    }
  }
}

/// Block (s, e): slab s of expert e of a table, or of a list.
template <bool Pack>
__global__ void __launch_bounds__(256) repack_table(const ExpertPointers* table, unsigned hidden, unsigned width) {
  repack_slab<Pack>(table[blockIdx.y], blockIdx.x, hidden, width);
}
template <bool Pack>
__global__ void __launch_bounds__(256)
    repack_listed(const __grid_constant__ ExpertList list, unsigned hidden, unsigned width) {
  repack_slab<Pack>(list.of[blockIdx.y], blockIdx.x, hidden, width);
}

}  // namespace k3::kernel
