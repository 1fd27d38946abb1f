// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/kda.hpp>
#include <k3/geometry/kda_config.hpp>
#include <k3/kernels/async.cuh>
#include <k3/kernels/common.cuh>

// The parts of the Kimi Delta Attention kernel (kda_decode_token.cuh): its operands, a head of a token in shared
// memory, and a head's state, in shared memory or left where it is.
namespace k3::kernel {

inline constexpr unsigned kda_threads = 256;
inline constexpr unsigned kda_groups = kda_threads / 32;  ///< of rows that are summed apart, one a warp
inline constexpr unsigned kda_chunk = 128;                ///< columns summed at a time
inline constexpr unsigned kda_widest_head = 1024;         ///< what the shared memory is made for
inline constexpr unsigned kda_staged_head = 128;          ///< heads of this size pass through shared memory
inline constexpr unsigned kda_piece = 16;                 ///< columns whose squares are summed by one warp

/// The bits of an element, and their value: a conversion right behind a load would wait for it. Plain loads, which do
/// not move above the wait for the kernel that writes them, as __ldg may.
__device__ __forceinline__ unsigned raw(const float* p) { return __float_as_uint(*p); }
__device__ __forceinline__ unsigned raw(const bf16* p) { return p->bits; }
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
    if (!Float && is_bf16) return value_of<bf16>(__ldg(&(static_cast<const bf16*>(data) + i)->bits));
    return __ldg(static_cast<const float*>(data) + i);
  }
  /// Elements 4 i to 4 i + 3, where the weight lies on a multiple of 4 elements.
  template <bool Float>
  __device__ __forceinline__ void four(size i, float (&to)[4]) const {
    if (!Float && is_bf16) {
      const uint2 v = __ldg(static_cast<const uint2*>(data) + i);
      to[0] = low_of(v.x), to[1] = high_of(v.x);
      to[2] = low_of(v.y), to[3] = high_of(v.y);
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
  unsigned blocks_at_once;  // that the device holds
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
  static constexpr bool staged = n == kda_staged_head;
  alignas(16) float of[4][n];  // by KdaRole; a value makes way for what the delta rule writes
  alignas(16) float partial[2][kda_groups / 2][2 * kda_chunk + 16];  // of S^T k and S^T q, two groups a row
  float squares[n / kda_piece];
  float core[staged ? 1 : n];                       // S^T q
  async::Barrier arrived[staged ? kda_groups : 1];  // of the loads, one a warp

  /// Sums of group `group`; odd groups lie 16 banks off even ones.
  __device__ __forceinline__ float* sums(unsigned which, unsigned group) {
    return partial[which][group / 2] + group % 2 * (kda_chunk + 16);
  }
};

/// The factors of q and k, which the sums are multiplied by, and the product of the two normalised.
struct KdaScales {
  float query, key, key_query;
};

/// Every warp takes the sums for itself: that costs less than a barrier.
template <class Shared>
__device__ __forceinline__ KdaScales kda_scales(const Shared& shared, unsigned dim) {
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

__device__ __forceinline__ void read_four(const float* from, float (&to)[4]) {
  const float4 v = *reinterpret_cast<const float4*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

/// A head of 128 in shared memory. A warp has 16 rows, a lane 4 columns of them. A warp loads its rows with a bulk copy
/// of its own, so that it waits for nobody else's.
struct KdaStagedTile {
  using Shared = KdaShared<kda_staged_head>;
  static constexpr unsigned rows = kda_staged_head / kda_groups, lanes = kda_staged_head / 4;  // of a warp, of a row
  static constexpr unsigned bytes = kda_staged_head * kda_staged_head * sizeof(float);

  float4* s;
  async::Barrier& arrived;
  unsigned phase = 0;

  __device__ __forceinline__ KdaStagedTile(void* tile, Shared& shared)
      : s(static_cast<float4*>(tile)), arrived(shared.arrived[threadIdx.x / 32]) {
    if (threadIdx.x % 32 == 0) async::init(arrived, 1), async::init_fence();
    __syncwarp();
  }

  static __device__ __forceinline__ unsigned first() { return threadIdx.x / 32 * rows; }
  static __device__ __forceinline__ unsigned place() { return first() * lanes + threadIdx.x % 32; }

  static __device__ __forceinline__ void prefetch_head(const float* state) {
    if (threadIdx.x % 32 == 0)
      async::prefetch_bulk(reinterpret_cast<const float4*>(state) + first() * lanes, bytes / kda_groups);
  }
  /// Starts to load; every thread must wait() before it ends. Kept in the L2 cache until then, the lines take the
  /// writes that would otherwise interrupt the reads: 4.20 instead of 4.04 TB/s where all of it comes and goes.
  __device__ __forceinline__ void load(const float* state) const {
    if (threadIdx.x % 32 != 0) return;
    async::arrive_expecting(arrived, bytes / kda_groups);
    async::copy(async::shared_address(s + first() * lanes), reinterpret_cast<const float4*>(state) + first() * lanes,
                bytes / kda_groups, async::shared_address(&arrived), async::policy_last());
  }
  __device__ __forceinline__ void wait() {
    async::wait(arrived, phase);
    phase ^= 1;
  }

  /// This thread's part of S'^T k and S'^T q, S' = diag(decay) S, k and q not normalised yet.
  __device__ __forceinline__ void read(Shared& shared, unsigned) const {
    float read[4] = {}, seen[4] = {};
#pragma unroll
    for (unsigned i = 0; i < rows; i += 4) {
      float d[4], k[4], q[4];
      read_four(shared.of[kda_decay] + first() + i, d), read_four(shared.of[kda_key] + first() + i, k);
      read_four(shared.of[kda_query] + first() + i, q);
#pragma unroll
      for (unsigned r = 0; r < 4; ++r) {
        const float4 v = s[place() + (i + r) * lanes];
        const float old[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
          const float decayed = old[j] * d[r];
          read[j] = fmaf(decayed, k[r], read[j]), seen[j] = fmaf(decayed, q[r], seen[j]);
        }
      }
    }
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    reinterpret_cast<float4*>(shared.sums(0, warp))[lane] = make_float4(read[0], read[1], read[2], read[3]);
    reinterpret_cast<float4*>(shared.sums(1, warp))[lane] = make_float4(seen[0], seen[1], seen[2], seen[3]);
  }

  /// S = S' + k written^T, to memory, or kept here for the next token.
  __device__ __forceinline__ void write(const Shared& shared, unsigned, float* state, bool keep) const {
    float w[4];
    read_four(shared.of[kda_value] + threadIdx.x % 32 * 4, w);
    float4* const to = reinterpret_cast<float4*>(state) + place();
#pragma unroll
    for (unsigned i = 0; i < rows; i += 4) {
      float d[4], k[4];
      read_four(shared.of[kda_decay] + first() + i, d), read_four(shared.of[kda_key] + first() + i, k);
#pragma unroll
      for (unsigned r = 0; r < 4; ++r) {
        float4 v = s[place() + (i + r) * lanes];
        v.x = fmaf(k[r], w[0], v.x * d[r]), v.y = fmaf(k[r], w[1], v.y * d[r]);
        v.z = fmaf(k[r], w[2], v.z * d[r]), v.w = fmaf(k[r], w[3], v.w * d[r]);
        if (keep)
          s[place() + (i + r) * lanes] = v;
        else
          __stcs(to + (i + r) * lanes, v);
      }
    }
  }
};

/// A head of any size, left in memory and read twice. A thread comes back to the same elements, so no fence is needed.
struct KdaMemoryTile {
  using Shared = KdaShared<kda_widest_head>;
  const float* head = nullptr;
  unsigned dim;

  explicit __device__ __forceinline__ KdaMemoryTile(unsigned head_dim) : dim(head_dim) {}
  __device__ __forceinline__ void load(const float* state) { head = state; }
  __device__ __forceinline__ void wait() const {}

  /// f(row, column in the chunk by 32, column, offset) over this thread's elements of a chunk, four columns in flight.
  template <class F>
  __device__ __forceinline__ void visit(unsigned chunk, F&& f) const {
    const unsigned rows = (dim + kda_groups - 1) / kda_groups;
    const unsigned first = threadIdx.x / 32 * rows, last = detail::smaller(dim, first + rows);
    for (unsigned row = first; row < last; ++row)
#pragma unroll
      for (unsigned j = 0; j < kda_chunk / 32; ++j) {
        const unsigned column = chunk * kda_chunk + threadIdx.x % 32 + 32 * j;
        if (column < dim) f(row, j, column, size{row} * dim + column);
      }
  }

  __device__ __forceinline__ void read(Shared& shared, unsigned chunk) const {
    float read[kda_chunk / 32] = {}, seen[kda_chunk / 32] = {};
    visit(chunk, [&](unsigned row, unsigned j, unsigned, size at) {
      const float decayed = head[at] * shared.of[kda_decay][row];
      read[j] = fmaf(decayed, shared.of[kda_key][row], read[j]);
      seen[j] = fmaf(decayed, shared.of[kda_query][row], seen[j]);
    });
#pragma unroll
    for (unsigned j = 0; j < kda_chunk / 32; ++j) {
      shared.sums(0, threadIdx.x / 32)[threadIdx.x % 32 + 32 * j] = read[j];
      shared.sums(1, threadIdx.x / 32)[threadIdx.x % 32 + 32 * j] = seen[j];
    }
  }

  __device__ __forceinline__ void write(const Shared& shared, unsigned chunk, float* state, bool) const {
    visit(chunk, [&](unsigned row, unsigned, unsigned column, size at) {
      state[at] = fmaf(shared.of[kda_key][row], shared.of[kda_value][column], state[at] * shared.of[kda_decay][row]);
    });
  }
};

/// Sums the groups' parts of a chunk of columns, 16 columns a warp: what the delta rule writes, times the factor of k,
/// in place of the value; S^T q of this thread's column; and the sum of its squares. S^T q = S'^T q + written (k . q),
/// so that the new state need not be read again.
template <unsigned n>
__device__ __forceinline__ float kda_finish_columns(KdaShared<n>& shared, const KdaScales& scales, float beta,
                                                    unsigned dim, unsigned chunk) {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned c = warp * kda_piece + lane % kda_piece, column = chunk * kda_chunk + c;
  float read = 0, seen = 0;
#pragma unroll
  for (unsigned i = 0; i < kda_groups; i += 2) {
    read += shared.sums(0, lane / 16 + i)[c];
    seen += shared.sums(1, lane / 16 + i)[c];
  }
  read += __shfl_xor_sync(full_warp, read, 16);
  seen += __shfl_xor_sync(full_warp, seen, 16);
  const bool inside = column < dim;
  const float written = inside ? kda_delta(shared.of[kda_value][column], read * scales.key, beta) : 0.0f;
  const float core = inside ? fmaf(written, scales.key_query, seen * scales.query) : 0.0f;
  __syncwarp();  // both halves have read the value
  if (inside && lane < 16) shared.of[kda_value][column] = written * scales.key;
  float squares = core * core;
#pragma unroll
  for (int offset = 1; offset < 16; offset *= 2) squares += __shfl_xor_sync(full_warp, squares, offset);
  if (lane == 0) shared.squares[chunk * kda_groups + warp] = squares;
  return core;
}

}  // namespace k3::kernel
