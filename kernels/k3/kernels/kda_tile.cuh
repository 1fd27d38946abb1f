// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/kda.hpp>
#include <k3/geometry/kda_config.hpp>
#include <k3/kernels/common.cuh>

// The parts of the Kimi Delta Attention kernel (kda_decode_token.cuh): its operands, a head of a token in shared
// memory, and a head's state, in registers or in memory.
namespace k3::kernel {

inline constexpr int kda_threads = 256, kda_groups = kda_threads / 32;
inline constexpr unsigned kda_chunk = 128;              ///< columns summed at a time
inline constexpr unsigned kda_widest_head = 1024;       ///< what the shared memory is made for
inline constexpr unsigned kda_register_head_dim = 128;  ///< heads of this size live in registers

/// The bits of an element that the kernel only reads, and their value: a conversion right behind a load would wait for
/// it.
__device__ __forceinline__ unsigned raw(const float* p) { return __float_as_uint(__ldg(p)); }
__device__ __forceinline__ unsigned raw(const bf16* p) { return __ldg(&p->bits); }
template <class T>
__device__ __forceinline__ float value_of(unsigned bits) {
  return __uint_as_float(sizeof(T) == 2 ? bits << 16 : bits);
}

/// A weight, float or bf16 as its tensor is stored. `Float` where all weights of a call are known to be float, as the
/// released model's: reading one is then a load and nothing else.
struct KdaWeight {
  const void* data = nullptr;
  bool is_bf16 = false;

  template <bool Float>
  __device__ __forceinline__ float at(size i) const {
    if (!Float && is_bf16) return value_of<bf16>(raw(static_cast<const bf16*>(data) + i));
    return __ldg(static_cast<const float*>(data) + i);
  }
  /// Elements 4 i to 4 i + 3, where the weight lies on a multiple of 4 elements.
  template <bool Float>
  __device__ __forceinline__ void four(size i, float (&to)[4]) const {
    if (!Float && is_bf16) {
      const uint2 v = __ldg(static_cast<const uint2*>(data) + i);
      to[0] = __uint_as_float(v.x << 16), to[1] = __uint_as_float(v.x & 0xffff0000u);
      to[2] = __uint_as_float(v.y << 16), to[3] = __uint_as_float(v.y & 0xffff0000u);
    } else {
      const float4 v = __ldg(static_cast<const float4*>(data) + i);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }
};

/// What only the fused form reads. `gate` are the logits of the output gate.
template <class Gate>
struct KdaFusedInputs {
  KdaWeight A_log, dt_bias, o_norm;
  bool bounded = false;
  float lower_bound = 0, norm_eps = 0;
  const Gate* gate = nullptr;
  size gate_stride = 0;
};

/// Operands of the kernel. Rows lie `*_stride` elements apart, slots of the state likewise; inside they are dense.
template <class XType, class WindowType, class DecayType, class BetaType, class OutType>
struct KdaDecodeArguments {
  using X = XType;
  using Window = WindowType;
  using Decay = DecayType;
  using Beta = BetaType;
  using Out = OutType;

  unsigned heads, head_dim, taps, rows;
  size slot_count;
  const X* x;  // [rows, 3*H*D]
  size x_stride;
  KdaWeight conv_q, conv_k, conv_v;  // [H*D, taps] each
  const DecayType* decay;            // [rows, H*D]: the log-decay, or z in the fused form
  size decay_stride;
  const BetaType* beta;  // [rows, H]
  size beta_stride;
  const id* slots;  // [rows]
  float* state;     // [slot_count, H, D key, D value]
  size state_stride;
  Window* window;  // [slot_count, 3*H*D, taps-1]
  size window_stride;
  Out* out;  // [rows, H*D]
  size out_stride;
  unsigned* status;  // [rows], or null
  unsigned bad_slot;
  KdaFusedInputs<X> fused;
};

/// What the conv channels and decays of a head are for.
enum KdaRole : unsigned { kda_query, kda_key, kda_value, kda_decay };

/// One head of one token in shared memory; n is its widest size.
template <unsigned n>
struct KdaShared {
  alignas(16) float of[4][n];                                // by KdaRole
  alignas(16) float written[n];                              // what the delta rule writes to each column
  float core[n];                                             // S^T q
  float gate[n];                                             // what multiplies it after its norm
  alignas(16) float partial[2][kda_groups][kda_chunk + 16];  // of S^T k and S^T q; padded against bank conflicts
  float squares[kda_groups * (n / kda_chunk)];
};

/// The factors of q and k, and the product of the two normalised.
struct KdaScales {
  float query, key, key_query;
};

/// Every warp takes the sums for itself: that costs less than a barrier.
template <unsigned n>
__device__ __forceinline__ KdaScales kda_scales(const KdaShared<n>& shared, unsigned dim) {
  float query = 0, key = 0, both = 0;
  for (unsigned c = threadIdx.x % 32; c < dim; c += 32) {
    const float q = shared.of[kda_query][c], k = shared.of[kda_key][c];
    query = fmaf(q, q, query), key = fmaf(k, k, key), both = fmaf(q, k, both);
  }
  query = warp_sum(query), key = warp_sum(key), both = warp_sum(both);
  KdaScales scales{kda_query_scale(query, dim, KDA_L2_EPS), l2_scale(key, KDA_L2_EPS), 0};
  scales.key_query = both * scales.query * scales.key;
  return scales;
}

/// The state of a head of 128: a warp holds 16 rows, a lane 4 columns of them.
struct KdaRegisterTile {
  static constexpr unsigned rows = kda_register_head_dim / kda_groups;
  float s[rows][4];

  static __device__ __forceinline__ unsigned first() { return threadIdx.x / 32 * rows; }
  static __device__ __forceinline__ size place() { return first() * (kda_register_head_dim / 4) + threadIdx.x % 32; }

  __device__ __forceinline__ void load(const float* state, unsigned) {
    const float4* from = reinterpret_cast<const float4*>(state) + place();
#pragma unroll
    for (unsigned i = 0; i < rows; ++i) {
      const float4 v = __ldcs(from + i * (kda_register_head_dim / 4));
      s[i][0] = v.x, s[i][1] = v.y, s[i][2] = v.z, s[i][3] = v.w;
    }
  }
  __device__ __forceinline__ void store(float* state) const {
    float4* to = reinterpret_cast<float4*>(state) + place();
#pragma unroll
    for (unsigned i = 0; i < rows; ++i)
      __stcs(to + i * (kda_register_head_dim / 4), make_float4(s[i][0], s[i][1], s[i][2], s[i][3]));
  }

  /// S = diag(decay) S, and this warp's part of S^T k and S^T q.
  template <unsigned n>
  __device__ __forceinline__ void decay_and_read(KdaShared<n>& shared, const KdaScales& scales, unsigned) {
    float read[4] = {}, seen[4] = {};
#pragma unroll
    for (unsigned i = 0; i < rows; i += 4) {
      float d[4], k[4], q[4];
      four(shared.of[kda_decay] + first() + i, d), four(shared.of[kda_key] + first() + i, k),
          four(shared.of[kda_query] + first() + i, q);
#pragma unroll
      for (unsigned r = 0; r < 4; ++r) {
        const float key = k[r] * scales.key, query = q[r] * scales.query;
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
          s[i + r][j] *= d[r];
          read[j] = fmaf(s[i + r][j], key, read[j]);
          seen[j] = fmaf(s[i + r][j], query, seen[j]);
        }
      }
    }
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    reinterpret_cast<float4*>(shared.partial[0][warp])[lane] = make_float4(read[0], read[1], read[2], read[3]);
    reinterpret_cast<float4*>(shared.partial[1][warp])[lane] = make_float4(seen[0], seen[1], seen[2], seen[3]);
  }

  /// S += k written^T.
  template <unsigned n>
  __device__ __forceinline__ void write(const KdaShared<n>& shared, const KdaScales& scales, unsigned) {
    float w[4];
    four(shared.written + 4 * (threadIdx.x % 32), w);
#pragma unroll
    for (unsigned i = 0; i < rows; i += 4) {
      float k[4];
      four(shared.of[kda_key] + first() + i, k);
#pragma unroll
      for (unsigned r = 0; r < 4; ++r)
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) s[i + r][j] = fmaf(k[r] * scales.key, w[j], s[i + r][j]);
    }
  }

 private:
  static __device__ __forceinline__ void four(const float* from, float (&to)[4]) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
};

/// A head of any size, left in memory. A thread comes back to the same elements, so no fence is needed.
struct KdaMemoryTile {
  float* state;
  unsigned dim;

  __device__ __forceinline__ void load(float* head, unsigned head_dim) { state = head, dim = head_dim; }
  __device__ __forceinline__ void store(float*) const {}

  /// f(row, column in the chunk, S) over this thread's elements of a chunk, four columns in flight.
  template <class F>
  __device__ __forceinline__ void visit(unsigned chunk, F&& f) {
    const unsigned rows = (dim + kda_groups - 1) / kda_groups;
    const unsigned first = threadIdx.x / 32 * rows, last = detail::smaller(dim, first + rows);
    for (unsigned row = first; row < last; ++row)
#pragma unroll
      for (unsigned j = 0; j < kda_chunk / 32; ++j) {
        const unsigned c = threadIdx.x % 32 + 32 * j, column = chunk * kda_chunk + c;
        if (column < dim) f(row, j, column, state[size{row} * dim + column]);
      }
  }

  template <unsigned n>
  __device__ __forceinline__ void decay_and_read(KdaShared<n>& shared, const KdaScales& scales, unsigned chunk) {
    float read[kda_chunk / 32] = {}, seen[kda_chunk / 32] = {};
    visit(chunk, [&](unsigned row, unsigned j, unsigned, const float& old) {
      const float s = old * shared.of[kda_decay][row];
      read[j] = fmaf(s, shared.of[kda_key][row] * scales.key, read[j]);
      seen[j] = fmaf(s, shared.of[kda_query][row] * scales.query, seen[j]);
    });
#pragma unroll
    for (unsigned j = 0; j < kda_chunk / 32; ++j) {
      shared.partial[0][threadIdx.x / 32][threadIdx.x % 32 + 32 * j] = read[j];
      shared.partial[1][threadIdx.x / 32][threadIdx.x % 32 + 32 * j] = seen[j];
    }
  }

  template <unsigned n>
  __device__ __forceinline__ void write(const KdaShared<n>& shared, const KdaScales& scales, unsigned chunk) {
    visit(chunk, [&](unsigned row, unsigned, unsigned column, float& s) {
      s = fmaf(shared.of[kda_key][row] * scales.key, shared.written[column], s * shared.of[kda_decay][row]);
    });
  }
};

/// Sums the groups' parts of a chunk of columns, 16 columns a warp: what the delta rule writes, S'^T q, and the sum of
/// its squares. S'^T q = S^T q + written (k . q), so that the new state need not be read again.
template <unsigned n>
__device__ __forceinline__ void kda_finish_columns(KdaShared<n>& shared, const KdaScales& scales, float beta,
                                                   unsigned dim, unsigned chunk) {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned c = warp * 16 + lane % 16, column = chunk * kda_chunk + c;
  float read = 0, seen = 0;
#pragma unroll
  for (unsigned i = 0; i < kda_groups; i += 2) {
    read += shared.partial[0][lane / 16 + i][c];
    seen += shared.partial[1][lane / 16 + i][c];
  }
  read += __shfl_xor_sync(full_warp, read, 16);
  seen += __shfl_xor_sync(full_warp, seen, 16);
  const bool inside = column < dim;
  const float written = inside ? kda_delta(shared.of[kda_value][column], read, beta) : 0.0f;
  const float core = inside ? fmaf(written, scales.key_query, seen) : 0.0f;
  if (inside && lane < 16) shared.written[column] = written, shared.core[column] = core;
  float squares = core * core;
#pragma unroll
  for (int offset = 1; offset < 16; offset *= 2) squares += __shfl_xor_sync(full_warp, squares, offset);
  if (lane == 0) shared.squares[chunk * kda_groups + warp] = squares;
}

}  // namespace k3::kernel
