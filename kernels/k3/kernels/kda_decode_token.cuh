// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <k3/formula/activation.hpp>
#include <k3/kernels/kda_tile.cuh>

// Kimi Delta Attention, one token or a run of tokens of a sequence: one block per head and run. The state of a head is
// read once and written once. Sums are taken in an order that head_dim alone decides:
//   over keys:    8 groups of consecutive rows, one warp each, then the groups 0, 2, 4, 6 and 1, 3, 5, 7, then both;
//   over columns: 16 columns by a butterfly, then those pieces in order.
// Heads of 128 with 4 taps pass through shared memory; others stay in memory and are read twice. Both do the same
// arithmetic: a head of 128 whose memory cannot be copied in bulk gets the same bits.
//
// Before the predecessor on the stream is known to be done, a block reads its slot and weights and fetches what the
// slot holds into the L2 cache. The slot is only a guess until it has been read again; the state is loaded after the
// wait.
namespace k3::kernel {

/// What a thread fetches for one channel of q, k or v or for one decay, before it computes.
template <class Window>
struct KdaChannel {
  unsigned input;  // raw
  float taps[4];   // of a kernel of 4; for a decay dt_bias and A_log
  Window past[3];
};

/// One head of one run of tokens, done by one block. Staged: a head of 128 with 4 taps.
template <bool Fused, bool Staged, bool FloatWeights, class Arguments>
struct KdaRun {
  using X = typename Arguments::X;
  using Window = typename Arguments::Window;
  using Tile = std::conditional_t<Staged, KdaStagedTile, KdaMemoryTile>;
  using Shared = typename Tile::Shared;
  /// Channels of q, k, v and decay that a thread has where the head is staged.
  static constexpr unsigned own_channels = 2;
  static_assert(2 * kda_staged_head == kda_threads);

  const Arguments& a;
  Shared& shared;
  unsigned head;

  __device__ __forceinline__ unsigned dim() const { return Staged ? kda_staged_head : a.head_dim; }
  __device__ __forceinline__ unsigned taps() const { return Staged ? 4 : a.taps; }
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
  __device__ __forceinline__ float* state(size slot) const {
    return a.state + slot * a.state_stride + size{head} * dim() * dim();
  }

  __device__ __forceinline__ void fetch_weights(KdaChannel<Window>& channel, unsigned role, unsigned c) const {
    if (role == kda_decay) {
      channel.taps[0] = Fused ? a.fused.dt_bias.template at<FloatWeights>(at(c)) : 0;
      channel.taps[1] = Fused ? a.fused.A_log.template at<FloatWeights>(head) : 0;
      channel.taps[2] = channel.taps[3] = 0;
    } else if constexpr (Staged) {
      conv(role).template four<FloatWeights>(at(c), channel.taps);
    } else {
      for (unsigned j = 0; taps() == 4 && j < 4; ++j) channel.taps[j] = tap(role, c, j);
    }
  }
  __device__ __forceinline__ void fetch_input(KdaChannel<Window>& channel, unsigned row, unsigned role,
                                              unsigned c) const {
    channel.input = role == kda_decay ? raw(a.decay + size{row} * a.decay_stride + at(c))
                                      : raw(a.x + size{row} * a.x_stride + role * (a.heads * dim()) + at(c));
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
  __device__ __forceinline__ float compute(const KdaChannel<Window>& channel, size slot, unsigned role,
                                           unsigned c) const {
    if (role == kda_decay) return std::exp(log_decay(channel));
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
    return static_cast<float>(static_cast<X>(silu(sum)));
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

  /// What multiplies a channel after its norm.
  __device__ __forceinline__ float gate(float o_norm, unsigned raw_logit) const {
    return o_norm * sigmoid(value_of<X>(raw_logit));
  }
  __device__ __forceinline__ float o_norm(unsigned c) const { return a.fused.o_norm.template at<FloatWeights>(c); }
  __device__ __forceinline__ unsigned gate_logit(unsigned row, unsigned c) const {
    return raw(a.fused.gate + size{row} * a.fused.gate_stride + at(c));
  }
  __device__ __forceinline__ float norm_scale() const {
    if constexpr (!Fused) return 1;
    float squares = 0;
    for (unsigned i = 0; i < (dim() + kda_chunk - 1) / kda_chunk * kda_groups; ++i) squares += shared.squares[i];
    return rms_scale(squares, dim(), a.fused.norm_eps);
  }
  __device__ __forceinline__ void emit(unsigned row, unsigned c, float core, float scale, float factor) const {
    a.out[size{row} * a.out_stride + at(c)] =
        static_cast<typename Arguments::Out>(Fused ? core * scale * factor : core);
  }

  /// What a thread of a staged head knows of a row before the slot's memory answers.
  struct Ahead {
    KdaChannel<Window> own[own_channels];
    unsigned beta, gate;  // raw
    float o_norm;
  };
  __device__ __forceinline__ unsigned own_role(unsigned i) const {
    return (threadIdx.x < kda_staged_head ? 0 : 1) + 2 * i;
  }
  __device__ __forceinline__ unsigned own_c() const { return threadIdx.x % kda_staged_head; }
  /// The column that this thread finishes, with the thread 16 lanes on.
  __device__ __forceinline__ unsigned own_column() const {
    return threadIdx.x / 32 * kda_piece + threadIdx.x % kda_piece;
  }
  __device__ __forceinline__ void fetch_weights(Ahead& ahead) const {
    if constexpr (Staged) {
#pragma unroll
      for (unsigned i = 0; i < own_channels; ++i) fetch_weights(ahead.own[i], own_role(i), own_c());
      ahead.o_norm = Fused ? o_norm(own_column()) : 0;
    }
  }
  __device__ __forceinline__ void fetch_inputs(Ahead& ahead, unsigned row) const {
    ahead.beta = raw(a.beta + size{row} * a.beta_stride + head);
    if constexpr (Staged) {
#pragma unroll
      for (unsigned i = 0; i < own_channels; ++i) fetch_input(ahead.own[i], row, own_role(i), own_c());
      ahead.gate = Fused ? gate_logit(row, own_column()) : 0;
    }
  }
  __device__ __forceinline__ void fetch_pasts(Ahead& ahead, size slot) const {
    if constexpr (Staged) {
#pragma unroll
      for (unsigned i = 0; i < own_channels; ++i) fetch_past(ahead.own[i], slot, own_role(i), own_c());
    }
  }
  /// f(channel, role, c) for this thread's channels: those fetched ahead, or each fetched now.
  template <class F>
  __device__ __forceinline__ void each_channel(const Ahead& ahead, unsigned row, size slot, F&& f) const {
    if constexpr (Staged) {
#pragma unroll
      for (unsigned i = 0; i < own_channels; ++i) f(ahead.own[i], own_role(i), own_c());
    } else {
      for (unsigned i = threadIdx.x; i < 4 * dim(); i += kda_threads) {
        KdaChannel<Window> one;
        fetch_weights(one, i / dim(), i % dim());
        fetch_input(one, row, i / dim(), i % dim());
        fetch_past(one, slot, i / dim(), i % dim());
        f(one, i / dim(), i % dim());
      }
    }
  }

  __device__ __forceinline__ id slot_of(unsigned row) const { return row < a.rows ? a.slots[row] : pad_slot; }
  /// Whether this thread finds `slot` before `row`, where `row` is the first of its run: two blocks would then change
  /// one state. `first_rows` is the slot of row threadIdx.x.
  __device__ __forceinline__ bool comes_again(id slot, unsigned row, id first_rows) const {
    bool again = threadIdx.x < row && first_rows == slot;
#pragma unroll 1
    for (unsigned r = threadIdx.x + kda_threads; r < row; r += kda_threads) again |= a.slots[r] == slot;
    return again;
  }

  /// The slot of the run that starts at `row`, pad_slot where none starts. Before the predecessor is done it is a
  /// guess, the same in all lanes of a warp, but not in all warps where the predecessor changes it.
  template <class Slots>
  __device__ __forceinline__ id starting_slot(Slots* slots, unsigned row) const {
    if (row >= a.rows) return pad_slot;
    const id slot = slots[row], before = row > 0 ? slots[row - 1] : pad_slot;
    const bool starts = slot >= 0 && static_cast<size>(slot) < a.slot_count && slot != before;
    return __shfl_sync(full_warp, starts ? slot : pad_slot, 0);
  }
  /// Into the L2 cache, where it is coherent whoever still writes it.
  __device__ __forceinline__ void prefetch_row(unsigned row, id slot) const {
    if constexpr (Staged) {
      if (slot == pad_slot) return;
      const unsigned c = own_c();
      for (unsigned i = 0; i < own_channels; ++i) {
        const unsigned role = own_role(i);
        if (role == kda_decay) {
          if (c % 64 == 0) async::prefetch(a.decay + size{row} * a.decay_stride + at(c));
          if (Fused && c % 64 == 0) async::prefetch(a.fused.gate + size{row} * a.fused.gate_stride + at(c));
        } else {
          if (c % 16 == 0) async::prefetch(past(static_cast<size>(slot), role, c));
          if (c % 64 == 0) async::prefetch(a.x + size{row} * a.x_stride + role * (a.heads * dim()) + at(c));
        }
      }
      Tile::prefetch_head(state(static_cast<size>(slot)));
    }
  }

  /// From the convolved q, k, v and the decay in shared memory to the row's output and the state after it. `more`: the
  /// state stays here for the next token.
  __device__ __forceinline__ void step(const Tile& tile, const Ahead& ahead, unsigned row, float* to, bool more) const {
    const KdaScales scales = kda_scales(shared, dim());
    const float beta = sigmoid(value_of<typename Arguments::Beta>(ahead.beta));
    const unsigned chunks = Staged ? 1 : (a.head_dim + kda_chunk - 1) / kda_chunk;
    float core = 0;
    for (unsigned chunk = 0; chunk < chunks; ++chunk) {
      tile.read(shared, chunk);
      __syncthreads();
      core = kda_finish_columns(shared, scales, beta, dim(), chunk);
      const unsigned column = chunk * kda_chunk + own_column();
      if (!Staged && column < dim()) shared.core[column] = core;
      __syncthreads();
      if constexpr (Staged) {
        const float scale = norm_scale(), factor = Fused ? gate(ahead.o_norm, ahead.gate) : 1;
        tile.write(shared, chunk, to, more);
        if (threadIdx.x % 32 < kda_piece) emit(row, own_column(), core, scale, factor);
      } else {
        tile.write(shared, chunk, to, more);
      }
    }
    if constexpr (!Staged) {
      const float scale = norm_scale();
      for (unsigned c = threadIdx.x; c < dim(); c += kda_threads)
        emit(row, c, shared.core[c], scale, Fused ? gate(o_norm(c), gate_logit(row, c)) : 1);
    }
  }

  /// The run that starts at `row`; nothing where that row goes on with the row before it.
  __device__ __forceinline__ void operator()(Tile& tile, Ahead& ahead, unsigned row, id guessed) const {
    // The small loads first: behind the state's they would come last.
    fetch_inputs(ahead, row);
    if (guessed != pad_slot) {
      fetch_pasts(ahead, static_cast<size>(guessed));
      tile.load(state(static_cast<size>(guessed)));
    }
    const id slot_id = slot_of(row), before = row > 0 ? slot_of(row - 1) : pad_slot, first_rows = slot_of(threadIdx.x);
    const size slot = static_cast<size>(slot_id);
    const bool known = slot_id >= 0 && slot < a.slot_count, starts = known && before != slot_id;
    const bool right = guessed == slot_id && starts;
    if (guessed != pad_slot && !right) tile.wait();
    if (!starts) return known ? void() : slot_id == pad_slot ? clear(row) : refuse(row);
    if (!right) {
      async::fence();
      __syncwarp();
      fetch_pasts(ahead, slot);
      tile.load(state(slot));
    }
    const bool again = comes_again(slot_id, row, first_rows);

    for (bool loaded = false;; loaded = true) {
      const bool more = slot_of(row + 1) == slot_id;
      each_channel(ahead, row, slot, [&](const KdaChannel<Window>& channel, unsigned role, unsigned c) {
        shared.of[role][c] = compute(channel, slot, role, c);
      });
      const bool refused = __syncthreads_or(again);
      if (!loaded) tile.wait();
      if (refused) {
        refuse(row);
      } else {
        each_channel(ahead, row, slot, [&](const KdaChannel<Window>& channel, unsigned role, unsigned c) {
          shift(channel, slot, role, c);
        });
        step(tile, ahead, row, state(slot), more);
      }
      if (!more) return;
      __syncthreads();
      fetch_inputs(ahead, ++row);
      fetch_pasts(ahead, slot);
    }
  }
};

/// Block (h, r) does head h of the run that starts at row r, then of the run at row r + gridDim.y and so on. Staged:
/// heads of 128 with 4 taps, every head's state on a multiple of 16 bytes; otherwise any.
template <bool Fused, bool Staged, bool FloatWeights, class Arguments>
__global__ void __launch_bounds__(kda_threads, Staged ? 3 : 2) kda_decode(const __grid_constant__ Arguments a) {
  using Run = KdaRun<Fused, Staged, FloatWeights, Arguments>;
  extern __shared__ __align__(128) unsigned char kda_tile_memory[];
  __shared__ typename Run::Shared shared;
  const Run run{a, shared, blockIdx.x};
  auto tile = [&] {
    if constexpr (Staged)
      return KdaStagedTile(kda_tile_memory, shared);
    else
      return KdaMemoryTile(a.head_dim);
  }();
  // A block that is there from the start may find its predecessor at work, a later one does not.
  const bool early = blockIdx.y * gridDim.x + blockIdx.x < a.blocks_at_once;
  id guessed = early ? run.starting_slot(static_cast<const volatile id*>(a.slots), blockIdx.y) : pad_slot;
  typename Run::Ahead ahead;
  run.fetch_weights(ahead);
  if (early) run.prefetch_row(blockIdx.y, guessed);
  wait_for_earlier();
  let_later_start();
  if (!early) guessed = run.starting_slot(a.slots, blockIdx.y);
  for (unsigned row = blockIdx.y; row < a.rows; row += gridDim.y) {
    run(tile, ahead, row, row == blockIdx.y ? guessed : pad_slot);
    if (a.rows - row <= gridDim.y) return;
    async::fence();
    __syncthreads();
  }
}

}  // namespace k3::kernel
