// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <k3/formula/activation.hpp>
#include <k3/kernels/kda_tile.cuh>

// Kimi Delta Attention, one token or a run of tokens of a sequence: one block per head and run. The state of a head is
// read once and written once. Sums are taken in an order that head_dim alone decides:
//   over keys:    8 groups of consecutive rows, one warp each, then the groups 0, 2, 4, 6 and 1, 3, 5, 7, then both;
//   over columns: 16 columns by a butterfly, then those pieces in order.
// Heads of 128 with 4 taps keep their 64 KB of state in registers, 256 bytes a thread; others leave it in memory and
// read it twice. Both do the same arithmetic: a head of 128 whose memory cannot be read 16 bytes at a time gets the
// same bits.
namespace k3::kernel {

/// What a thread fetches for one channel of q, k or v or for one decay, before it computes.
template <class Window>
struct KdaChannel {
  unsigned input;  // raw
  float taps[4];   // of a kernel of 4; for a decay dt_bias, A_log, the raw gate logit and o_norm
  Window past[3];
};

/// threadIdx.x, read anew: what is computed from it is not kept in registers meanwhile, where the state needs them.
__device__ __forceinline__ unsigned thread_anew() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// One head of one run of tokens, done by one block.
template <bool Fused, unsigned StaticDim, bool FloatWeights, class Arguments>
struct KdaRun {
  using X = typename Arguments::X;
  using Window = typename Arguments::Window;
  /// Channels of q, k, v and decay that a thread has where StaticDim is not 0.
  static constexpr unsigned own_channels = 2;
  using Tile = std::conditional_t<StaticDim == 0, KdaMemoryTile, KdaRegisterTile>;
  using Shared = KdaShared<StaticDim == 0 ? kda_widest_head : StaticDim>;
  static_assert(StaticDim == 0 || (StaticDim == kda_register_head_dim && 2 * StaticDim == kda_threads));

  const Arguments& a;
  Shared& shared;
  unsigned head;

  __device__ __forceinline__ unsigned dim() const { return StaticDim == 0 ? a.head_dim : StaticDim; }
  __device__ __forceinline__ unsigned taps() const { return StaticDim == 0 ? a.taps : 4; }
  /// Of a head's channel c among the H*D.
  __device__ __forceinline__ unsigned at(unsigned c) const { return head * dim() + c; }
  __device__ __forceinline__ KdaWeight conv(unsigned role) const {
    return role == 0 ? a.conv_q : role == 1 ? a.conv_k : a.conv_v;
  }
  __device__ __forceinline__ float tap(unsigned role, unsigned c, unsigned j) const {
    return conv(role).template at<FloatWeights>(size{at(c)} * taps() + j);
  }
  __device__ __forceinline__ Window* past(size slot, unsigned role, unsigned c) const {
    return a.window + slot * a.window_stride + size{role * (a.heads * dim()) + at(c)} * (taps() - 1);
  }

  /// The part that does not wait for the slot.
  __device__ __forceinline__ void fetch(KdaChannel<Window>& channel, unsigned row, unsigned role, unsigned c) const {
    if (role == kda_decay) {
      channel.input = raw(a.decay + size{row} * a.decay_stride + at(c));
      if constexpr (Fused) {
        channel.taps[0] = a.fused.dt_bias.template at<FloatWeights>(at(c));
        channel.taps[1] = a.fused.A_log.template at<FloatWeights>(head);
        channel.taps[2] = __uint_as_float(raw(a.fused.gate + size{row} * a.fused.gate_stride + at(c)));
        channel.taps[3] = a.fused.o_norm.template at<FloatWeights>(c);
      } else {
        for (float& unused : channel.taps) unused = 0;  // defined on both sides, the loads need no branch and no spill
      }
      return;
    }
    channel.input = raw(a.x + size{row} * a.x_stride + role * (a.heads * dim()) + at(c));
    if constexpr (StaticDim != 0) {
      conv(role).template four<FloatWeights>(at(c), channel.taps);
    } else {
      for (unsigned j = 0; taps() == 4 && j < 4; ++j) channel.taps[j] = tap(role, c, j);
    }
  }
  __device__ __forceinline__ void fetch_past(KdaChannel<Window>& channel, size slot, unsigned role, unsigned c) const {
    if (role == kda_decay || taps() != 4) return;
#pragma unroll
    for (unsigned j = 0; j < 3; ++j) channel.past[j] = past(slot, role, c)[j];
  }

  __device__ __forceinline__ float log_decay(const KdaChannel<Window>& channel) const {
    const float input = value_of<typename Arguments::Decay>(channel.input);
    if constexpr (Fused) {
      const float z = input + channel.taps[0], rate = std::exp(channel.taps[1]);
      return a.fused.bounded ? kda_log_decay_bounded(z, rate, a.fused.lower_bound) : kda_log_decay_softplus(z, rate);
    } else {
      return input;
    }
  }
  /// q, k or v after convolution and SiLU, rounded to the activation type, or the decay.
  __device__ __forceinline__ void compute(const KdaChannel<Window>& channel, size slot, unsigned role,
                                          unsigned c) const {
    float* to = shared.of[role] + c;
    if (role == kda_decay) {
      *to = std::exp(log_decay(channel));
      if constexpr (Fused) shared.gate[c] = channel.taps[3] * sigmoid(value_of<X>(__float_as_uint(channel.taps[2])));
      return;
    }
    const float input = value_of<X>(channel.input);
    float sum = 0;
    if (taps() == 4) {
#pragma unroll
      for (unsigned j = 0; j < 3; ++j) sum = fmaf(channel.taps[j], static_cast<float>(channel.past[j]), sum);
      sum = fmaf(channel.taps[3], input, sum);
    } else {
      const Window* before = past(slot, role, c);
      for (unsigned j = 0; j + 1 < taps(); ++j) sum = fmaf(tap(role, c, j), static_cast<float>(before[j]), sum);
      sum = fmaf(tap(role, c, taps() - 1), input, sum);
    }
    *to = static_cast<float>(static_cast<X>(silu(sum)));
  }
  /// The input enters the window.
  __device__ __forceinline__ void shift(const KdaChannel<Window>& channel, size slot, unsigned role, unsigned c) const {
    if (role == kda_decay || taps() == 1) return;
    Window* window = past(slot, role, c);
    if (taps() == 4) {
      window[0] = channel.past[1], window[1] = channel.past[2];
    } else {
      for (unsigned j = 0; j + 2 < taps(); ++j) window[j] = window[j + 1];
    }
    window[taps() - 2] = static_cast<Window>(value_of<X>(channel.input));
  }

  __device__ __forceinline__ void clear(unsigned row) const {
#pragma unroll 1
    for (unsigned c = threadIdx.x; c < dim(); c += kda_threads)
      a.out[size{row} * a.out_stride + at(c)] = static_cast<typename Arguments::Out>(0.0f);
  }
  __device__ __forceinline__ void refuse(unsigned row) const {
    clear(row);
    if (head == 0 && threadIdx.x == 0 && a.status) a.status[row] = a.bad_slot;
  }

  /// The row's output, from shared.core and shared.gate.
  __device__ __forceinline__ void emit(unsigned row) const {
    float scale = 1;
    if constexpr (Fused) {
      float squares = 0;
      for (unsigned i = 0; i < (dim() + kda_chunk - 1) / kda_chunk * kda_groups; ++i) squares += shared.squares[i];
      scale = rms_scale(squares, dim(), a.fused.norm_eps);
    }
    for (unsigned c = thread_anew(); c < dim(); c += StaticDim == 0 ? kda_threads : StaticDim) {
      const float result = Fused ? shared.core[c] * scale * shared.gate[c] : shared.core[c];
      a.out[size{row} * a.out_stride + at(c)] = static_cast<typename Arguments::Out>(result);
    }
  }

  /// From the convolved q, k, v and the decay in shared memory to the row's output and the state after it.
  __device__ __forceinline__ void step(Tile& tile, float beta_logit) const {
    const KdaScales scales = kda_scales(shared, dim());
    const float beta = sigmoid(beta_logit);
    const unsigned chunks = StaticDim == 0 ? (a.head_dim + kda_chunk - 1) / kda_chunk : 1;
    for (unsigned chunk = 0; chunk < chunks; ++chunk) {
      tile.decay_and_read(shared, scales, chunk);
      __syncthreads();
      kda_finish_columns(shared, scales, beta, dim(), chunk);
      __syncthreads();
      tile.write(shared, scales, chunk);
    }
  }

  /// f(channel, role, c) for this thread's channels: those fetched ahead, or each fetched now.
  template <class F>
  __device__ __forceinline__ void each_channel(const KdaChannel<Window> (&own)[own_channels], unsigned row, size slot,
                                               F&& f) const {
    const unsigned thread = thread_anew();
    if constexpr (StaticDim != 0) {
#pragma unroll
      for (unsigned i = 0; i < own_channels; ++i) f(own[i], own_role(thread, i), own_c(thread));
    } else {
      for (unsigned i = thread; i < 4 * dim(); i += kda_threads) {
        KdaChannel<Window> one;
        fetch(one, row, i / dim(), i % dim());
        fetch_past(one, slot, i / dim(), i % dim());
        f(one, i / dim(), i % dim());
      }
    }
  }
  static __device__ __forceinline__ unsigned own_role(unsigned thread, unsigned i) {
    return (thread < kda_register_head_dim ? 0 : 1) + 2 * i;
  }
  static __device__ __forceinline__ unsigned own_c(unsigned thread) { return thread % kda_register_head_dim; }

  /// What a thread knows of a row before the slot's memory answers.
  struct Ahead {
    KdaChannel<Window> own[own_channels];
    unsigned beta;  // raw
  };
  __device__ __forceinline__ void fetch_ahead(Ahead& ahead, unsigned row) const {
    const unsigned thread = thread_anew();
    ahead.beta = raw(a.beta + size{row} * a.beta_stride + head);
    if constexpr (StaticDim != 0) {
#pragma unroll
      for (unsigned i = 0; i < own_channels; ++i) fetch(ahead.own[i], row, own_role(thread, i), own_c(thread));
    }
  }
  __device__ __forceinline__ void fetch_own_past(Ahead& ahead, size slot) const {
    const unsigned thread = thread_anew();
    if constexpr (StaticDim != 0) {
#pragma unroll
      for (unsigned i = 0; i < own_channels; ++i) fetch_past(ahead.own[i], slot, own_role(thread, i), own_c(thread));
    }
  }

  __device__ __forceinline__ id slot_of(unsigned row) const { return row < a.rows ? __ldg(a.slots + row) : pad_slot; }
  /// Whether this thread finds `slot` before `row`, where `row` is the first of its run: two blocks would then change
  /// one state. `first_rows` is the slot of row threadIdx.x.
  __device__ __forceinline__ bool comes_again(id slot, unsigned row, id first_rows) const {
    bool again = threadIdx.x < row && first_rows == slot;
#pragma unroll 1
    for (unsigned r = threadIdx.x + kda_threads; r < row; r += kda_threads) again |= __ldg(a.slots + r) == slot;
    return again;
  }

  /// The run that starts at `row`; nothing where that row goes on with the row before it.
  __device__ __forceinline__ void operator()(unsigned row) const {
    Ahead ahead;
    fetch_ahead(ahead, row);
    const id slot_id = slot_of(row), before = row > 0 ? slot_of(row - 1) : pad_slot, first_rows = slot_of(threadIdx.x);
    const size slot = static_cast<size>(slot_id);
    if (slot_id < 0 || slot >= a.slot_count) return slot_id == pad_slot ? clear(row) : refuse(row);
    if (before == slot_id) return;
    const bool again = comes_again(slot_id, row, first_rows);
    fetch_own_past(ahead, slot);
    float* state = a.state + slot * a.state_stride + size{head} * dim() * dim();
    Tile tile;
    tile.load(state, dim());

    while (true) {
      const bool more = slot_of(row + 1) == slot_id;
      each_channel(ahead.own, row, slot, [&](const KdaChannel<Window>& channel, unsigned role, unsigned c) {
        compute(channel, slot, role, c);
      });
      if (__syncthreads_or(again)) {
        refuse(row);
      } else {
        each_channel(ahead.own, row, slot, [&](const KdaChannel<Window>& channel, unsigned role, unsigned c) {
          shift(channel, slot, role, c);
        });
        step(tile, value_of<typename Arguments::Beta>(ahead.beta));
        if (!more) tile.store(state);
        emit(row);
      }
      if (!more) return;
      __syncthreads();
      fetch_ahead(ahead, ++row);
      fetch_own_past(ahead, slot);
    }
  }
};

/// Block (h, r) does head h of the run that starts at row r, then of the run at row r + gridDim.y and so on. StaticDim
/// 0 takes any head_dim; otherwise every head's state must lie on a multiple of 16 bytes.
template <bool Fused, unsigned StaticDim, bool FloatWeights, class Arguments>
__global__ void __launch_bounds__(kda_threads, 2) kda_decode(const __grid_constant__ Arguments a) {
  using Run = KdaRun<Fused, StaticDim, FloatWeights, Arguments>;
  __shared__ typename Run::Shared shared;
  const Run run{a, shared, blockIdx.x};
  for (unsigned row = blockIdx.y; row < a.rows; row += gridDim.y) {
    run(row);
    __syncthreads();
  }
}

}  // namespace k3::kernel
