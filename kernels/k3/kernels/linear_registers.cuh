// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/linear_finish.cuh>

// What becomes of products that lie in a warp's registers as wgmma leaves them: of row lane / 4 + 8 i of a unit and
// token 8 j + lane % 4 * 2 + e, a lane has v[4 j + 2 i + e]. For whole units with outputs of bf16 that can be stored 8
// bytes at a time: they are rounded first, then exchanged between lanes by 8 x 8 transposition.
namespace k3::kernel {

/// Rows and columns of 8 x 8 elements of 16 bits exchanged: lane l has two neighbours of row l / 4.
__device__ __forceinline__ unsigned transposed(unsigned pair) {
  unsigned result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

/// A whole unit of a segment; `Tiles` times 8 tokens from `first` on.
template <unsigned Tiles>
struct LinearDirect {
  const LinearArguments<bf16>& a;
  const LinearSegment& s;
  unsigned unit, first;
  unsigned lane = threadIdx.x % 32, token = first + lane / 4;
  // Of the 16 rows, a lane stores four.
  unsigned row = unit * 16 + (lane % 2 == 0 ? lane % 4 * 2 : lane % 4 * 2 + 6);

  /// Whether it can be stored so.
  static __device__ __forceinline__ bool fits(const LinearArguments<bf16>& a, const LinearSegment& s, unsigned unit) {
    const auto aligned = [](const LinearRows& r) { return (reinterpret_cast<size>(r.data) | r.stride * 2) % 8 == 0; };
    return !s.float_out && (unit + 1) * (s.kind == LinearKind::glu ? 8 : 16) <= s.rows && aligned(s.out) &&
           (s.kind != LinearKind::add || (aligned(a.add.other) && aligned(a.add.part) && aligned(a.add.snapshot)));
  }

  __device__ __forceinline__ void finish(const float (&v)[Tiles * 4]) const {
    if (s.kind == LinearKind::store)
      store(v);
    else if (s.kind == LinearKind::add)
      add(v);
    else if (s.glu.silu)
      activate(v, [](float gate, float up) { return fast_silu_glu(gate, up); });
    else
      activate(v, [glu = s.glu](float gate, float up) { return glu.fast_situ(gate, up); });
  }

 private:
  __device__ __forceinline__ bool has(unsigned tile) const { return token + tile * 8 < a.tokens; }
  template <class T>
  __device__ __forceinline__ T* at(const LinearRows& rows, unsigned tile, unsigned which) const {
    return reinterpret_cast<T*>(static_cast<bf16*>(rows.data) + size{token + tile * 8} * rows.stride + which);
  }

  /// The four rows of this lane's token of a tile, rounded.
  __device__ __forceinline__ static uint2 four(const float* v) {
    const unsigned low = transposed(bf16_pair(v[0], v[1])), high = transposed(bf16_pair(v[2], v[3]));
    const bool odd = threadIdx.x % 2 != 0;
    const unsigned other = __shfl_xor_sync(full_warp, odd ? low : high, 1);
    return odd ? uint2{other, high} : uint2{low, other};
  }
  __device__ __forceinline__ static uint2 sum(uint2 x, uint2 y) {
    return {bf16_pair(low_of(x.x) + low_of(y.x), high_of(x.x) + high_of(y.x)),
            bf16_pair(low_of(x.y) + low_of(y.y), high_of(x.y) + high_of(y.y))};
  }

  // Without branches between tiles, so that their chains of exchanges overlap.
  template <class T>
  __device__ __forceinline__ void put(const T (&result)[Tiles], unsigned which) const {
    T* to = at<T>(s.out, 0, which);
    const size step = s.out.stride * 8 * sizeof(bf16) / sizeof(T);
#pragma unroll
    for (unsigned tile = 0; tile < Tiles; ++tile, to += step)
      if (has(tile)) *to = result[tile];
  }
  __device__ __forceinline__ void store(const float (&v)[Tiles * 4]) const {
    uint2 result[Tiles];
#pragma unroll
    for (unsigned tile = 0; tile < Tiles; ++tile) result[tile] = four(&v[tile * 4]);
    put(result, row);
  }

  /// Rows 0 to 7 of the unit are gates, the others their partners.
  template <class Work>
  __device__ __forceinline__ void activate(const float (&v)[Tiles * 4], Work&& work) const {
    unsigned result[Tiles];
#pragma unroll
    for (unsigned tile = 0; tile < Tiles; ++tile) {
      const unsigned gate = bf16_pair(v[tile * 4], v[tile * 4 + 1]), up = bf16_pair(v[tile * 4 + 2], v[tile * 4 + 3]);
      result[tile] = transposed(bf16_pair(work(low_of(gate), low_of(up)), work(high_of(gate), high_of(up))));
    }
    put(result, unit * 8 + lane % 4 * 2);
  }

  /// As linear_finish says it. Of four tiles, what is read is on its way before the first of it is used.
  __device__ __forceinline__ void add(const float (&v)[Tiles * 4]) const {
    constexpr unsigned some = Tiles < 4 ? Tiles : 4;
#pragma unroll
    for (unsigned from = 0; from < Tiles; from += some) {
      uint2 before[some], other[some], part[some];
#pragma unroll
      for (unsigned i = 0; i < some; ++i) {
        before[i] = has(from + i) ? *at<const uint2>(s.out, from + i, row) : uint2{};
        if (a.add.other.data) other[i] = has(from + i) ? *at<const uint2>(a.add.other, from + i, row) : uint2{};
      }
#pragma unroll
      for (unsigned i = 0; i < some; ++i) part[i] = four(&v[(from + i) * 4]);
#pragma unroll
      for (unsigned i = 0; i < some; ++i) {
        const unsigned tile = from + i;
        if (!has(tile)) continue;
        if (a.add.other.data) part[i] = sum(part[i], other[i]);
        if (a.add.part.data) *at<uint2>(a.add.part, tile, row) = part[i];
        if (a.add.snapshot.data) *at<uint2>(a.add.snapshot, tile, row) = before[i];
        *at<uint2>(s.out, tile, row) = a.add.replace ? part[i] : sum(before[i], part[i]);
      }
      __syncwarp();
    }
  }
};

}  // namespace k3::kernel
