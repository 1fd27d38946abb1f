// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/attn_res.hpp>
#include <k3/kernels/async.cuh>
#include <k3/kernels/row_ops.cuh>

// The mixture of Attention Residuals and the RMSNorm behind it. A thread reads eight elements of every source once and
// keeps them. A row's warps are spread over one block or a cluster of 2 or 4, as many as the device has room for; the
// sums travel through distributed shared memory. Wider rows, more sources and, where one block is not enough, devices
// without clusters take the kernel that reads the sources three times.
namespace k3::kernel {

inline constexpr int attnres_kept = 9, attnres_any_threads = 512;
inline constexpr unsigned attnres_piece = 256, attnres_most_pieces = 32;  ///< elements that one warp sums
inline constexpr unsigned attnres_most_sources = 256;

/// A vector of float or bf16.
struct AttnResVector {
  const void* data;
  bool is_float, vector;

  __device__ __forceinline__ void read(unsigned at, unsigned count, float (&to)[8]) const {
    if (is_float) {
      const auto eight = read_eight(static_cast<const float*>(data) + at, count, vector);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = eight[i];
    } else {
      const auto eight = read_eight(static_cast<const bf16*>(data) + at, count, vector);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = eight[i];
    }
  }
};

template <class T>
struct AttnResArguments {
  const T* snapshots;  // [stored, rows, hidden]
  const T* running;    // [rows, hidden]
  T* out;              // [rows, hidden]
  float* mixed;        // [rows, hidden], or null
  float* probs;        // [rows, stored + 1], or null
  size source_stride, snapshot_stride, running_stride, out_stride, mixed_stride, probs_stride, rows;
  AttnResVector norm, proj, weight;
  unsigned stored, hidden;
  float res_eps, norm_eps, mix;
  bool vector;  // rows of T lie on multiples of 16 bytes
  // The kernel behind this one begins before this one waits for those in front: a product, which has weights to fetch,
  // gains 0.3 to 0.6 us by it; in front of another norm it costs as much.
  bool early;

  __device__ __forceinline__ const T* source(unsigned j, size row) const {
    return j < stored ? snapshots + j * source_stride + row * snapshot_stride : running + row * running_stride;
  }
};

/// Threads that a kernel with clusters of `Blocks` blocks is compiled for. One or two blocks take the released width,
/// 7168, in bf16: more threads would not leave each the registers for nine sources.
template <int Blocks, class T>
constexpr int attnres_threads() {
  return Blocks == 4 ? 256 : sizeof(T) == 2 ? 896 / Blocks : 256;
}

/// Sums over a warp of `Count` values of each lane, one of them in each lane: every step halves what a lane still
/// holds, a fraction of the exchanges of a butterfly for each value, and sums in the order of that butterfly.
template <int Count>
struct WarpSums {
  float sum;
  unsigned index;  ///< which of the values this lane has the sum of
  bool valid;      ///< or none

  __device__ __forceinline__ explicit WarpSums(const float (&values)[Count]) {
    index = 0;
    sum = halve<Count, 16>(values, Count);
  }

 private:
  template <int Held, int Offset>
  __device__ __forceinline__ float halve(const float (&values)[Held], unsigned count) {
    constexpr int half = (Held + 1) / 2;
    const bool upper = threadIdx.x & Offset;
    float kept[half];
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float high = half + i < Held ? values[half + i < Held ? half + i : 0] : 0.0f;
      kept[i] = (upper ? high : values[i]) + __shfl_xor_sync(full_warp, upper ? values[i] : high, Offset);
    }
    count = upper ? (count > half ? count - half : 0) : (count < half ? count : half);
    if (upper) index += half;
    if constexpr (Offset > 1) return halve<half, Offset / 2>(kept, count);
    static_assert(Offset > 1 || half == 1);
    valid = count > 0;
    return kept[0];
  }
};

/// What the blocks of a row tell each other, each has all of it; and this block's part of the last norm's weight.
template <int Threads>
struct AttnResShared {
  // Squares of each source, then products with u, by piece; rows lie 4 banks apart.
  alignas(16) float scores[2 * attnres_kept][attnres_most_pieces + 4];
  float squares[attnres_most_pieces];  // of the mixture
  alignas(16) float probs[(attnres_kept + 3) / 4 * 4];
  alignas(16) float4 weight[2][Threads];
  async::Barrier scores_arrived, squares_arrived;
};

/// A row has one cluster of `Blocks` blocks; a warp sums a piece of 256 elements, and pieces are joined in one order:
/// the bits do not depend on Blocks. Plain: all that is read and written lies on multiples of 16 bytes, rows are a
/// multiple of 8 wide, the weights are bf16, and nothing but the norm of the mixture is wanted: a third of the code.
template <int Blocks, bool Plain, class T>
struct AttnResRow {
  using Shared = AttnResShared<attnres_threads<Blocks, T>()>;

  const AttnResArguments<T>& a;
  Shared& shared;
  size row;
  unsigned sources, pieces, piece, at, count;
  const T *snapshot, *running;  // this thread's part of the first and the last source

  __device__ __forceinline__ AttnResRow(const AttnResArguments<T>& arguments, Shared& memory)
      : a(arguments), shared(memory), row(blockIdx.x / Blocks), sources(arguments.stored + 1) {
    pieces = (a.hidden + attnres_piece - 1) / attnres_piece;
    piece = (Blocks > 1 ? async::cluster_rank() * (blockDim.x / 32) : 0) + threadIdx.x / 32;
    at = piece * attnres_piece + threadIdx.x % 32 * 8;
    count = at < a.hidden ? a.hidden - at : 0;
    snapshot = a.snapshots + row * a.snapshot_stride + at;
    running = a.running + row * a.running_stride + at;
    if constexpr (Blocks > 1) {
      if (threadIdx.x == 0) {
        async::init(shared.scores_arrived, 1), async::init(shared.squares_arrived, 1);
        async::init_fence();
        async::arrive_expecting(shared.scores_arrived, pieces * 2 * attnres_kept * sizeof(float));
        async::arrive_expecting(shared.squares_arrived, pieces * sizeof(float));
      }
      async::cluster_arrive();
    }
  }

  /// f(j, this thread's part of source j) for every source.
  template <class F>
  __device__ __forceinline__ void each_source(F&& f) const {
    const T* at_source = snapshot;
#pragma unroll
    for (unsigned j = 0; j < attnres_kept; ++j) {
      if (j < sources) f(j, j < a.stored ? at_source : running);
      at_source += a.source_stride;
    }
  }
  /// Into the L2 cache: allowed while the predecessor still writes the last sources.
  __device__ __forceinline__ void prefetch_sources() const {
    if (threadIdx.x % (128 / sizeof(Eight<T>)) != 0 || count == 0) return;
    each_source([&](unsigned, const T* source) { async::prefetch(source); });
  }
  __device__ __forceinline__ void read_sources(Eight<T> (&to)[attnres_kept]) const {
#pragma unroll
    for (unsigned j = 0; j < attnres_kept; ++j) to[j] = {};
    if (Plain && count == 0) return;
    each_source([&](unsigned j, const T* source) { to[j] = read(source); });
  }
  template <class Entry>
  __device__ __forceinline__ Eight<Entry> read(const Entry* from) const {
    return Plain ? read_eight(from, 8, true) : read_eight(from, count, a.vector && sizeof(Entry) == sizeof(T));
  }
  /// The weights, which no predecessor writes. Plain ones are not looked at before the sources are on their way.
  struct Weights {
    Eight<bf16> norm, proj, weight;
    float u[8];
  };
  __device__ __forceinline__ void read_weights(Weights& w) const {
    if constexpr (Plain) {
      w.norm = w.proj = w.weight = {};
      if (count == 0) return;
      w.norm = read(static_cast<const bf16*>(a.norm.data) + at);
      w.proj = read(static_cast<const bf16*>(a.proj.data) + at);
      w.weight = read(static_cast<const bf16*>(a.weight.data) + at);
    } else {
      float factor[8];
      a.weight.read(at, count, factor);
      keep_weight(factor);
      a.norm.read(at, count, w.u);
      a.proj.read(at, count, factor);
#pragma unroll
      for (int i = 0; i < 8; ++i) w.u[i] *= factor[i];
    }
  }
  __device__ __forceinline__ void use_weights(Weights& w) const {
    if constexpr (Plain) {
      float factor[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) w.u[i] = w.norm[i] * w.proj[i], factor[i] = w.weight[i];
      keep_weight(factor);
    }
  }
  /// In shared memory, for registers are full of sources.
  __device__ __forceinline__ void keep_weight(const float (&factor)[8]) const {
    shared.weight[0][threadIdx.x] = make_float4(factor[0], factor[1], factor[2], factor[3]);
    shared.weight[1][threadIdx.x] = make_float4(factor[4], factor[5], factor[6], factor[7]);
  }

  /// This warp's part of the sums of every source, to all blocks.
  __device__ __forceinline__ void sum_scores(const Eight<T> (&source)[attnres_kept], const float (&u)[8]) const {
    float sums[2 * attnres_kept] = {};
#pragma unroll
    for (unsigned j = 0; j < attnres_kept; ++j)
      if (j < sources) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[j] = fmaf(source[j][i], source[j][i], sums[j]);
          sums[attnres_kept + j] = fmaf(u[i], source[j][i], sums[attnres_kept + j]);
        }
      }
    const WarpSums<2 * attnres_kept> mine(sums);
    if (!mine.valid || piece >= pieces) return;
    float* const to = &shared.scores[mine.index][piece];
    if constexpr (Blocks == 1) {
      *to = mine.sum;
    } else {
#pragma unroll
      for (unsigned rank = 0; rank < Blocks; ++rank) async::send(to, rank, mine.sum, shared.scores_arrived);
    }
  }
  __device__ __forceinline__ float join_pieces(const float* parts) const {
    float4 sum = {0, 0, 0, 0};
#pragma unroll
    for (unsigned p = 0; p < attnres_most_pieces; p += 4) {
      const float4 four = p < pieces ? *reinterpret_cast<const float4*>(parts + p) : make_float4(0, 0, 0, 0);
      sum.x += four.x;
      sum.y += p + 1 < pieces ? four.y : 0;
      sum.z += p + 2 < pieces ? four.z : 0;
      sum.w += p + 3 < pieces ? four.w : 0;
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
  }
  /// Softmax of the scores, by one warp with a source in each lane.
  __device__ __forceinline__ void weigh_sources() const {
    const unsigned lane = threadIdx.x;
    const float total = lane < 2 * attnres_kept ? join_pieces(shared.scores[lane]) : 0;
    const float dot = __shfl_down_sync(full_warp, total, attnres_kept);
    const bool any = lane < sources;
    const float score = any ? attn_res_score(dot, total, a.hidden, a.res_eps) : -INFINITY;
    const float most = warp_max(score);
    const float power = any ? std::exp(score - most) : 0.0f;
    const float p = power / warp_sum(power);
    if (any) shared.probs[lane] = p;
    if (any && a.probs && piece == 0) a.probs[row * a.probs_stride + lane] = p;
  }
  __device__ __forceinline__ void mix(const Eight<T> (&source)[attnres_kept], float (&mixed)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) mixed[i] = shared.probs[0] * source[0][i];
#pragma unroll
    for (unsigned j = 1; j < attnres_kept; ++j)
      if (j < sources) {
#pragma unroll
        for (int i = 0; i < 8; ++i) mixed[i] = fmaf(shared.probs[j], source[j][i], mixed[i]);
      }
    if constexpr (Plain) return;
    if (a.mix != 1) {
      const Eight<T> skip = read(running);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        mixed[i] = static_cast<unsigned>(i) < count ? attn_res_blend(skip[i], mixed[i], a.mix) : 0;
    }
    if (a.mixed) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (static_cast<unsigned>(i) < count) a.mixed[row * a.mixed_stride + at + i] = mixed[i];
    }
  }
  /// This warp's part of the mixture's squares, to all blocks.
  __device__ __forceinline__ void sum_squares(const float (&mixed)[8]) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(mixed[i], mixed[i], squares);
    squares = warp_sum(squares);
    const unsigned lane = threadIdx.x % 32;
    if (lane >= Blocks || piece >= pieces) return;
    if constexpr (Blocks == 1)
      shared.squares[piece] = squares;
    else
      async::send(&shared.squares[piece], lane, squares, shared.squares_arrived);
  }
  __device__ __forceinline__ float scale() const {
    const unsigned lane = threadIdx.x % 32;
    return rms_scale(warp_sum(lane < pieces ? shared.squares[lane] : 0.0f), a.hidden, a.norm_eps);
  }
  /// What all warps of the row have written is there.
  static __device__ __forceinline__ void wait_for_all(async::Barrier& arrived) {
    if constexpr (Blocks > 1)
      async::wait(arrived, 0);
    else
      __syncthreads();
  }
};

/// One row per cluster of `Blocks` blocks.
template <int Blocks, bool Plain, class T>
__global__ void __launch_bounds__(attnres_threads<Blocks, T>(), Blocks == 1 ? 1 : 2)
    attnres_norm(const __grid_constant__ AttnResArguments<T> a) {
  using Row = AttnResRow<Blocks, Plain, T>;
  __shared__ typename Row::Shared shared;
  const Row row(a, shared);
  row.prefetch_sources();
  typename Row::Weights weights;
  row.read_weights(weights);
  if (a.early) let_later_start();
  wait_for_earlier();
  if (!a.early) let_later_start();
  Eight<T> source[attnres_kept];
  row.read_sources(source);
  row.use_weights(weights);
  if constexpr (Blocks > 1) async::cluster_wait();  // all blocks have started, their memory is there
  row.sum_scores(source, weights.u);
  if (Blocks == 1 || threadIdx.x < 32) row.wait_for_all(shared.scores_arrived);
  if (threadIdx.x < 32) row.weigh_sources();
  __syncthreads();
  float mixed[8];
  row.mix(source, mixed);
  row.sum_squares(mixed);
  row.wait_for_all(shared.squares_arrived);
  const float scale = row.scale();
  const float4 low = shared.weight[0][threadIdx.x], high = shared.weight[1][threadIdx.x];
  const float factor[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) mixed[i] = mixed[i] * scale * factor[i];
  Eight<T> result;
  result.set_all(mixed);
  if (row.count > 0)
    write_eight(a.out + row.row * a.out_stride + row.at, result, Plain ? 8 : row.count, Plain || a.vector);
}

/// Any width and up to attnres_most_sources sources, one block a row.
template <class T>
__global__ void __launch_bounds__(attnres_any_threads) attnres_norm_any(const __grid_constant__ AttnResArguments<T> a) {
  __shared__ float scratch[attnres_any_threads / 32 + 1], probs[attnres_most_sources];
  const unsigned sources = a.stored + 1, first = threadIdx.x * 8, step = attnres_any_threads * 8;
  if (a.early) let_later_start();
  wait_for_earlier();
  if (!a.early) let_later_start();
  for (size row = blockIdx.x; row < a.rows; row += gridDim.x) {
    SoftmaxSum<float> softmax;
    for (unsigned j = 0; j < sources; ++j) {
      float squares = 0, dot = 0, norm[8], proj[8];
      for (unsigned at = first; at < a.hidden; at += step) {
        const Eight<T> source = read_eight(a.source(j, row) + at, a.hidden - at, a.vector);
        a.norm.read(at, a.hidden - at, norm);
        a.proj.read(at, a.hidden - at, proj);
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += source[i] * source[i], dot += norm[i] * proj[i] * source[i];
      }
      squares = block_sum<attnres_any_threads>(squares, scratch);
      dot = block_sum<attnres_any_threads>(dot, scratch);
      const float score = attn_res_score(dot, squares, a.hidden, a.res_eps);
      softmax.next(score);
      if (threadIdx.x == 0) probs[j] = score;
    }
    __syncthreads();
    if (threadIdx.x < sources) {
      const float p = softmax.weight(probs[threadIdx.x]);
      probs[threadIdx.x] = p;
      if (a.probs) a.probs[row * a.probs_stride + threadIdx.x] = p;
    }
    __syncthreads();
    const auto mix = [&](unsigned at, float(&mixed)[8]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) mixed[i] = 0;
      Eight<T> source = {};
      for (unsigned j = 0; j < sources; ++j) {
        source = read_eight(a.source(j, row) + at, a.hidden - at, a.vector);
#pragma unroll
        for (int i = 0; i < 8; ++i) mixed[i] = j == 0 ? probs[j] * source[i] : mixed[i] + probs[j] * source[i];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
        mixed[i] = attn_res_blend(source[i], mixed[i], a.mix);  // the last source is `running`
    };
    float squares = 0, mixed[8], weight[8];
    for (unsigned at = first; at < a.hidden; at += step) {
      mix(at, mixed);
#pragma unroll
      for (int i = 0; i < 8; ++i) squares += mixed[i] * mixed[i];
    }
    const float scale = rms_scale(block_sum<attnres_any_threads>(squares, scratch), a.hidden, a.norm_eps);
    for (unsigned at = first; at < a.hidden; at += step) {
      mix(at, mixed);
      a.weight.read(at, a.hidden - at, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (a.mixed && at + i < a.hidden) a.mixed[row * a.mixed_stride + at + i] = mixed[i];
        mixed[i] = mixed[i] * scale * weight[i];
      }
      Eight<T> result;
      result.set_all(mixed);
      write_eight(a.out + row * a.out_stride + at, result, a.hidden - at, a.vector);
    }
    __syncthreads();  // probs and scratch are used again
  }
}

}  // namespace k3::kernel
