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
// In two 32-bit words (16 codes) the bits are in another order. A pair is codes i and i + 4 of a released word, of
// which a tensor core takes two bf16: sign at bit 15, the other three bits at 8 to 6, which is 2^-126 times the code's
// value. `packed_pairs` makes eight pairs of two words in 15 operations: a mask each, six shifts and a permutation of
// bytes. Moving bits alone takes 16: the four places of a pair, modulo 16, do not tile the 16 bits of half a word, so
// that three pairs come from either word and two from what is left of both, one of these as a sum modulo 2 with bits of
// others.
namespace k3::kernel {

inline constexpr unsigned slab_rows = 8, piece_columns = 512;
inline constexpr unsigned piece_code_bytes = slab_rows * piece_columns / 2;
inline constexpr unsigned piece_scale_bytes = slab_rows * piece_columns / 32;

/// Codes I and I + 4 of a released word as two bf16 of 2^-126 times their value: sign to bit 15, exponent and mantissa
/// to bits 8 to 6, where E2M1's subnormal 0.5 is a bf16 subnormal.
template <int I>
__device__ __forceinline__ unsigned e2m1_pair(unsigned word) {
  const unsigned sign = word << (12 - 4 * I);
  const unsigned magnitude = I < 2 ? word << (I < 2 ? 6 - 4 * I : 0) : word >> (I < 2 ? 0 : 4 * I - 6);
  return (sign & 0x80008000u) | (magnitude & 0x01c001c0u);
}
/// The four pairs of a released word.
__device__ __forceinline__ void released_pairs(unsigned (&pair)[4], unsigned w) {
  pair[0] = e2m1_pair<0>(w), pair[1] = e2m1_pair<1>(w), pair[2] = e2m1_pair<2>(w), pair[3] = e2m1_pair<3>(w);
}
__device__ __forceinline__ unsigned rotated_left(unsigned w, unsigned bits) { return __funnelshift_l(w, w, bits); }
__device__ __forceinline__ unsigned rotated_right(unsigned w, unsigned bits) { return __funnelshift_r(w, w, bits); }

/// The eight pairs of two packed words. Pairs 0 to 2 are in x and 4 to 6 in y, which leaves bits 15, 14, 8, 7 of x's
/// halves and 10, 9, 1, 0 of y's. Pair 7 takes 15 and 14 of x and 10 and 1 of y, and comes from bytes of x and of y
/// rotated by 6. Pair 3 is x ^ that: its bits 8 and 7 are chosen in x, 15 and 6 in y, so that the sum is right whatever
/// the other word has in these places.
__device__ __forceinline__ void packed_pairs(unsigned (&pair)[8], uint2 w) {
  constexpr unsigned mask = 0x81c081c0u;
  const unsigned turned = rotated_left(w.y, 6);
  pair[0] = w.x << 2 & mask;
  pair[1] = w.x << 6 & mask;
  pair[2] = rotated_left(w.x, 12) & mask;
  pair[3] = (w.x ^ turned) & mask;
  pair[4] = w.y & mask;
  pair[5] = w.y << 4 & mask;
  pair[6] = rotated_left(w.y, 10) & mask;
  pair[7] = __byte_perm(w.x, turned, 0x6341) & mask;
}
/// Sixteen codes as released (code i of a word at bits 4i to 4i + 3) to the packed order.
__device__ __forceinline__ uint2 pack_codes(uint2 w) {
  const unsigned summed = e2m1_pair<3>(w.x), mixed = e2m1_pair<3>(w.y);  // pairs 3 and 7
  unsigned x = e2m1_pair<0>(w.x) >> 2 | e2m1_pair<1>(w.x) >> 6 | rotated_right(e2m1_pair<2>(w.x), 12) |
               (mixed << 8 & 0xc000c000u);
  unsigned y = e2m1_pair<0>(w.y) | e2m1_pair<1>(w.y) >> 4 | rotated_right(e2m1_pair<2>(w.y), 10) |
               rotated_right(mixed >> 8 & 0x00810081u, 6);
  x |= (summed ^ rotated_left(y, 6)) & 0x01800180u;
  y |= rotated_right((summed ^ x) & 0x80408040u, 6);
  return {x, y};
}
/// The inverse.
__device__ __forceinline__ uint2 unpack_codes(uint2 w) {
  unsigned pair[8], words[2] = {0, 0};
  packed_pairs(pair, w);
#pragma unroll
  for (unsigned i = 0; i < 8; ++i)
    words[i / 4] |= ((pair[i] >> 12 & 0x00080008u) | (pair[i] >> 6 & 0x00070007u)) << i % 4 * 4;
  return {words[0], words[1]};
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
      const uint2 low = pack_codes({v.x, v.y}), high = pack_codes({v.z, v.w});
      codes_at[packed_codes_at(row, block)] = {low.x, low.y, high.x, high.y};
      scales_at[packed_scale_at(row, block)] = slab_scales[i];
    } else {
      const uint4 v = slab[packed_codes_at(row, block)];
      const uint2 low = unpack_codes({v.x, v.y}), high = unpack_codes({v.z, v.w});
      codes_at[i] = {low.x, low.y, high.x, high.y};
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
