// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/formula/attn_res.hpp>
#include <k3/kernels/row_ops.cuh>

// The mixture of Attention Residuals and the RMSNorm behind it. A cluster of 8 blocks has one row: each thread reads
// eight elements of every source once and keeps them; the sums travel through distributed shared memory. Rows of up to
// 1024 elements have one block. Wider rows, more sources and devices without clusters take the kernel that reads the
// sources three times.
namespace k3::kernel {

inline constexpr int attnres_threads = 128, attnres_kept = 9, attnres_any_threads = 512;
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

  __device__ __forceinline__ const T* source(unsigned j, size row) const {
    return j < stored ? snapshots + j * source_stride + row * snapshot_stride : running + row * running_stride;
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/// *at = value in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void store_at_rank(float* at, unsigned rank, float value) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(at))), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
#else
// Never run: without clusters a row has one block (the launch asks what the kernel was compiled for).
__device__ __forceinline__ unsigned cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() { __trap(); }
__device__ __forceinline__ void cluster_wait() { __trap(); }
__device__ __forceinline__ void store_at_rank(float*, unsigned, float) { __trap(); }
#endif

/// Sums of a row over all threads of its `Blocks` blocks: `Count` values in total[], the same bits everywhere.
template <int Blocks, int Count>
struct AttnResSums {
  float warps[attnres_threads / 32][Count];
  float blocks[Blocks][Count];
  float total[Count];

  /// `values`: this thread's. All threads of the cluster call it, each object once.
  __device__ __forceinline__ void add(const float (&values)[Count], bool ready) {
    constexpr unsigned all_warps = attnres_threads / 32;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float sum = warp_sum(values[i]);
      if (lane == static_cast<unsigned>(i) % 32) warps[warp][i] = sum;
    }
    __syncthreads();
    if constexpr (Blocks > 1) {
      if (!ready) cluster_wait();  // the other blocks have started, their memory is there
      for (unsigned i = threadIdx.x; i < Blocks * Count; i += attnres_threads) {
        float sum = 0;
        for (unsigned w = 0; w < all_warps; ++w) sum += warps[w][i % Count];
        store_at_rank(&blocks[cluster_rank()][i % Count], i / Count, sum);
      }
      cluster_arrive();
      cluster_wait();
    } else {
      for (unsigned i = threadIdx.x; i < Count; i += attnres_threads) {
        float sum = 0;
        for (unsigned w = 0; w < all_warps; ++w) sum += warps[w][i];
        blocks[0][i] = sum;
      }
      __syncthreads();
    }
    for (unsigned i = threadIdx.x; i < Count; i += attnres_threads) {
      float sum = 0;
      for (unsigned b = 0; b < Blocks; ++b) sum += blocks[b][i];
      total[i] = sum;
    }
    __syncthreads();
  }
};

/// One row per cluster of `Blocks` blocks, at most 9 sources and 1024 elements a block.
template <int Blocks, class T>
__global__ void __launch_bounds__(attnres_threads) attnres_norm(const __grid_constant__ AttnResArguments<T> a) {
  __shared__ AttnResSums<Blocks, 2 * attnres_kept> scores;
  __shared__ AttnResSums<Blocks, 1> squares;
  if constexpr (Blocks > 1) cluster_arrive();
  const size row = blockIdx.x / Blocks;
  const unsigned groups = (a.hidden + 7) / 8, share = (groups + Blocks - 1) / Blocks;
  const unsigned group = (Blocks > 1 ? cluster_rank() : 0) * share + threadIdx.x;
  const unsigned at = group * 8, count = threadIdx.x < share && group < groups ? a.hidden - at : 0;
  const unsigned sources = a.stored + 1;

  Eight<T> source[attnres_kept];
#pragma unroll
  for (unsigned j = 0; j < attnres_kept; ++j)
    source[j] = read_eight(a.source(j, row) + at, j < sources ? count : 0, a.vector);
  float u[8], factor[8], weight[8];
  a.norm.read(at, count, u);
  a.proj.read(at, count, factor);
  a.weight.read(at, count, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) u[i] *= factor[i];

  float sums[2 * attnres_kept] = {};
#pragma unroll
  for (int j = 0; j < attnres_kept; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[2 * j] += source[j][i] * source[j][i];
      sums[2 * j + 1] += u[i] * source[j][i];
    }
  scores.add(sums, false);

  SoftmaxSum<float> softmax;
  float score[attnres_kept];
#pragma unroll
  for (unsigned j = 0; j < attnres_kept; ++j)
    if (j < sources) {
      score[j] = attn_res_score(scores.total[2 * j + 1], scores.total[2 * j], a.hidden, a.res_eps);
      softmax.next(score[j]);
    }
  float mixed[8] = {}, square[1] = {};
#pragma unroll
  for (unsigned j = 0; j < attnres_kept; ++j)
    if (j < sources) {
      const float p = softmax.weight(score[j]);
      if (a.probs && group == 0) a.probs[row * a.probs_stride + j] = p;
#pragma unroll
      for (int i = 0; i < 8; ++i) mixed[i] = j == 0 ? p * source[j][i] : mixed[i] + p * source[j][i];
    }
  const Eight<T> skip = read_eight(a.running + row * a.running_stride + at, a.mix == 1 ? 0 : count, a.vector);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    mixed[i] = static_cast<unsigned>(i) < count ? attn_res_blend(skip[i], mixed[i], a.mix) : 0;
    square[0] += mixed[i] * mixed[i];
    if (a.mixed && static_cast<unsigned>(i) < count) a.mixed[row * a.mixed_stride + at + i] = mixed[i];
  }
  squares.add(square, true);
  const float scale = rms_scale(squares.total[0], a.hidden, a.norm_eps);
  Eight<T> result = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) result.set(i, mixed[i] * scale * weight[i]);
  if (count > 0) write_eight(a.out + row * a.out_stride + at, result, count, a.vector);
}

/// Any width and up to attnres_most_sources sources, one block a row.
template <class T>
__global__ void __launch_bounds__(attnres_any_threads) attnres_norm_any(const __grid_constant__ AttnResArguments<T> a) {
  __shared__ float scratch[attnres_any_threads / 32 + 1], probs[attnres_most_sources];
  const unsigned sources = a.stored + 1, first = threadIdx.x * 8, step = attnres_any_threads * 8;
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
      Eight<T> result = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        result.set(i, mixed[i] * scale * weight[i]);
        if (a.mixed && at + i < a.hidden) a.mixed[row * a.mixed_stride + at + i] = mixed[i];
      }
      write_eight(a.out + row * a.out_stride + at, result, a.hidden - at, a.vector);
    }
    __syncthreads();  // probs and scratch are used again
  }
}

}  // namespace k3::kernel
