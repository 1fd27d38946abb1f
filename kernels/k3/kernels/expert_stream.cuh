// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/expert_weights.cuh>

// Both products of all chosen experts in one kernel, for packed MXFP4 experts. One block an SM stays. A unit is an item
// of the work list and 16 rows of weights (8 of w1 and the same 8 of w3; then 16 of w2) by all of K; a warp does a unit
// alone, and the next one right behind it: while it multiplies a chunk of 512 columns, the next chunk, of this unit or
// the next, is on its way into the same registers. Each block has an equal run of the units of either product, so that
// its warps share rows of x in the L1 cache and say rarely, for many units at once, that they are done. Few choices go
// through expert_small.cuh, which has the kernel.
namespace k3::kernel {

/// Between this thread's stores, with those it knows of, and its counting them.
__device__ __forceinline__ void expert_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void expert_count(unsigned* counter, unsigned more) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(more) : "memory");
}
/// A counter's value; what happened before it got there, by whoever counts behind a fence, can be read from here on.
__device__ __forceinline__ unsigned expert_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

inline constexpr unsigned expert_stream_warps = 16, expert_stream_threads = 32 * expert_stream_warps;
inline constexpr unsigned expert_stream_steps = piece_columns / 128;  ///< of 128 columns in a chunk, which is a piece
inline constexpr unsigned small_choices = 32;                         ///< up to so many, expert_small.cuh does it
inline constexpr unsigned expert_stream_none = ~0u;

struct ExpertStreamArguments {
  WorklistArguments list{};      ///< small: as for build_small_worklist; otherwise items, item_count and order are read
  const bf16* latent = nullptr;  ///< small: [rows, width]
  size latent_stride = 0;
  const bf16* x = nullptr;    ///< not small: [rows, width], RowOrder::e2m1
  bf16* mid = nullptr;        ///< [choices, hidden] by place, RowOrder::e2m1
  bf16* y = nullptr;          ///< [choices, width]
  unsigned* ready = nullptr;  ///< by item: units of the first product that are done
  unsigned* done = nullptr;   ///< such units of all items
  unsigned width = 0, hidden = 0;
  LinearGlu glu{};
};

/// What a block reads work from: global memory, or in a small call the block's own.
struct ExpertStreamWork {
  const ExpertItem* items;
  const unsigned* order;
  const bf16* x;
  unsigned item_count;
};

struct ExpertStreamUnit {
  const std::uint8_t *low, *high, *low_scale, *high_scale;  ///< from the first column on, for this lane
  unsigned head, parts;                                     ///< the expert's first item, and how many it has
  unsigned row, first, count;  ///< first row of weights, choices; before `settle` the number of the unit, ...
  unsigned choice;             ///< first product: the lane's
  bool exists, down, ready;
};

__device__ __forceinline__ unsigned scale_byte(unsigned word, unsigned step) {
  return __byte_perm(word, 0, 0x4440 | step);
}

/// sum += 128 columns of 16 rows times x, each word's first product into one sum and its second into the other.
/// `Large`: a scale may be above 128.
template <bool Large>
__device__ __forceinline__ void expert_stream_step(float (&sum)[2][4], const uint4& low, const uint4& high,
                                                   unsigned low_scale, unsigned high_scale, const bf16* x) {
  uint4 v[4];
#pragma unroll
  for (unsigned q = 0; q < 4; ++q) v[q] = *reinterpret_cast<const uint4*>(x + q * 32);
  const auto scale_of = [](unsigned s) { return Large ? E8m0Pair::any(s) : E8m0Pair{E8m0Pair::small(s), 0}; };
  const E8m0Pair low_pair = scale_of(low_scale), high_pair = scale_of(high_scale);
  const uint2 low_words[2] = {{low.x, low.y}, {low.z, low.w}}, high_words[2] = {{high.x, high.y}, {high.z, high.w}};
#pragma unroll
  for (unsigned two = 0; two < 2; ++two) {
    unsigned p[8], r[8];
    scaled_packed<Large>(p, r, low_words[two], high_words[two], low_pair, high_pair);
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      const uint4& columns = v[2 * two + i];
      multiply_add(sum[0], p[4 * i], r[4 * i], p[4 * i + 1], r[4 * i + 1], columns.x, columns.y);
      multiply_add(sum[1], p[4 * i + 2], r[4 * i + 2], p[4 * i + 3], r[4 * i + 3], columns.z, columns.w);
    }
  }
}

struct ExpertStreamWorker {
  const ExpertStreamArguments& a;
  const ExpertStreamWork& work;
  const unsigned lane, gate_units, down_units;  ///< of an item
  const unsigned gate, total;
  bool all_done = false;

  __device__ ExpertStreamWorker(const ExpertStreamArguments& arguments, const ExpertStreamWork& w)
      : a(arguments),
        work(w),
        lane(threadIdx.x % 32),
        gate_units(a.hidden / 8),
        down_units(a.width / 16),
        gate(w.item_count * gate_units),
        total(w.item_count * (gate_units + down_units)) {}

  /// The unit that this warp does in a round: of the block's share of the first product, then of the second.
  __device__ __forceinline__ unsigned number(unsigned round) const {
    unsigned own = round * expert_stream_warps + threadIdx.x / 32;
    const unsigned first = share(gate, blockIdx.x), of_gate = share(gate, blockIdx.x + 1) - first;
    if (own < of_gate) return first + own;
    own -= of_gate;
    const unsigned down = total - gate, second = share(down, blockIdx.x);
    return own < share(down, blockIdx.x + 1) - second ? gate + second + own : expert_stream_none;
  }
  /// Where block `block` begins in so many units.
  static __device__ __forceinline__ unsigned share(unsigned units, unsigned block) {
    return static_cast<unsigned>(static_cast<unsigned long long>(units) * block / gridDim.x);
  }

  /// Begins to load what says where a unit is.
  __device__ __forceinline__ void find(ExpertStreamUnit& u, unsigned number) const {
    u.exists = number != expert_stream_none;
    if (!u.exists) return;
    u.down = number >= gate;
    const unsigned units = u.down ? down_units : gate_units, own = u.down ? number - gate : number;
    const ExpertItem& item = work.items[own / units];
    const ExpertPointers& e = item.weights;
    const void* const low = u.down ? e.w2 : e.w1;
    u.low = static_cast<const std::uint8_t*>(low), u.low_scale = u.down ? e.scale2 : e.scale1;
    u.high = static_cast<const std::uint8_t*>(e.w3), u.high_scale = e.scale3;
    u.head = item.head, u.parts = item.items, u.row = own, u.first = item.first, u.count = item.count;
  }

  /// Finds it: an expert's units in order, each for all items of the expert.
  __device__ __forceinline__ void settle(ExpertStreamUnit& u) {
    if (!u.exists) return;
    unsigned tile = u.row - u.head * (u.down ? down_units : gate_units);
    if (u.parts > 1) {
      const ExpertItem& item = work.items[u.head + tile % u.parts];
      u.first = item.first, u.count = item.count, tile /= u.parts;
    }
    const unsigned columns = u.down ? a.hidden : a.width;
    const size codes = slab_rows * columns / 2, scales = slab_rows * columns / 32;
    const unsigned slab = u.down ? 2 * tile : tile;
    u.low += slab * codes + lane * 16, u.low_scale += slab * scales + lane * 4;
    if (u.down)
      u.high = u.low + codes, u.high_scale = u.low_scale + scales;
    else
      u.high += slab * codes + lane * 16, u.high_scale += slab * scales + lane * 4;
    u.row = slab * slab_rows;
    u.choice = u.down ? 0 : work.order[place(u)];
    if (u.down && !all_done) all_done = __all_sync(full_warp, expert_acquire(a.done) == gate);
    u.ready = !u.down || all_done || is_ready(u);
  }
  __device__ __forceinline__ unsigned chunks(const ExpertStreamUnit& u) const {
    return (u.down ? a.hidden : a.width) / piece_columns;
  }
  /// Of the lane's column of x: a row of x; beyond the item's, the last again.
  __device__ __forceinline__ unsigned place(const ExpertStreamUnit& u) const {
    return u.first + detail::smaller(lane / 4, u.count - 1);
  }

  __device__ __forceinline__ bool is_ready(const ExpertStreamUnit& u) const {
    return __all_sync(full_warp, expert_acquire(a.ready + u.head) == gate_units * u.parts);
  }

  __device__ __forceinline__ const bf16* input(const ExpertStreamUnit& u) const {
    const bf16* const row = u.down ? a.mid + static_cast<size>(place(u)) * a.hidden
                                   : work.x + static_cast<size>(u.choice / a.list.k) * a.width;
    return row + lane % 4 * 8;
  }

  __device__ __forceinline__ void store(const ExpertStreamUnit& u, const float (&sum)[4]) const {
    const unsigned row = u.row + lane / 4;
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned token = lane % 4 * 2 + i;
      if (token >= u.count) continue;
      const size place = u.first + token;
      if (u.down) {
        bf16* const to = a.y + static_cast<size>(work.order[place]) * a.width + row;
        to[0] = bf16(sum[i]), to[8] = bf16(sum[2 + i]);
      } else {
        const float value = a.glu.rounded_soon(float(bf16(sum[i])), float(bf16(sum[2 + i])));
        a.mid[place * a.hidden + row_place(RowOrder::e2m1, row)] = bf16(value);
      }
    }
  }

  /// The sums of a unit that has a scale above 128, all anew: so rare that the fast loop does not ask.
  __device__ __forceinline__ void multiply_large(float (&sum)[2][4], unsigned number) {
    ExpertStreamUnit u;
    find(u, number);
    settle(u);
    const bf16* x = input(u);
#pragma unroll
    for (float(&chain)[4] : sum)
#pragma unroll
      for (float& s : chain) s = 0;
#pragma unroll 1
    for (unsigned chunk = 0, end = chunks(u); chunk < end; ++chunk) {
#pragma unroll 1
      for (unsigned step = 0; step < expert_stream_steps; ++step) {
        const uint4 low = load_streaming(u.low + step * 512), high = load_streaming(u.high + step * 512);
        expert_stream_step<true>(sum, low, high, u.low_scale[step], u.high_scale[step], x + step * 128);
      }
      x += piece_columns, u.low += piece_code_bytes, u.high += piece_code_bytes;
      u.low_scale += piece_scale_bytes, u.high_scale += piece_scale_bytes;
    }
  }

  /// Says that this warp's last units of an expert's first product are done. Waits for all that the warp loads, so not
  /// after each.
  __device__ __forceinline__ void release(unsigned head, unsigned units) const {
    __syncwarp();
    if (lane != 0) return;
    expert_fence();
    expert_count(a.ready + head, units);
    expert_count(a.done, units);
  }

  __device__ __forceinline__ void run();
};

/// A chunk of weights in registers, and where the next one comes from.
struct ExpertStreamRing {
  const std::uint8_t *low, *high, *low_scale, *high_scale;
  uint4 l[expert_stream_steps], h[expert_stream_steps];
  unsigned next_low_scale = 0, next_high_scale = 0;  ///< of the steps, a byte each
  bool on = true;

  __device__ __forceinline__ void begin(const ExpertStreamUnit& u) {
    on = u.exists;
    low = u.low, high = u.high, low_scale = u.low_scale, high_scale = u.high_scale;
  }
  __device__ __forceinline__ void load_scales() {
    if (on) next_low_scale = load_streaming_word(low_scale), next_high_scale = load_streaming_word(high_scale);
  }
  __device__ __forceinline__ void load(unsigned step) {
    if (on) l[step] = load_streaming(low + step * 512), h[step] = load_streaming(high + step * 512);
  }
  __device__ __forceinline__ void advance() {
    low += piece_code_bytes, high += piece_code_bytes;
    low_scale += piece_scale_bytes, high_scale += piece_scale_bytes;
  }

  /// sum += the chunk times x; loads the next.
  __device__ __forceinline__ void multiply(float (&sum)[2][4], const bf16* x, unsigned low_scales,
                                           unsigned high_scales) {
#pragma unroll
    for (unsigned step = 0; step < expert_stream_steps; ++step) {
      expert_stream_step<false>(sum, l[step], h[step], scale_byte(low_scales, step), scale_byte(high_scales, step),
                                x + step * 128);
      load(step);
    }
  }
};

__device__ __forceinline__ void ExpertStreamWorker::run() {
  ExpertStreamUnit unit, next;
  ExpertStreamRing ring;
  find(unit, number(0));
  if (!unit.exists) return;
  settle(unit);
  ring.begin(unit);
  ring.load_scales();
#pragma unroll
  for (unsigned step = 0; step < expert_stream_steps; ++step) ring.load(step);
  ring.advance();
  unsigned finished = 0;  // units of this expert that nobody knows of yet
  for (unsigned round = 1;; ++round) {
    while (!unit.ready) unit.ready = is_ready(unit);
    const bf16* x = input(unit);
    find(next, number(round));
    const unsigned chunks = (unit.down ? a.hidden : a.width) / piece_columns;
    float sum[2][4] = {};
    unsigned scales = 0;
#pragma unroll 1
    for (unsigned chunk = 0; chunk < chunks; ++chunk) {
      if (chunk == detail::smaller(1u, chunks - 1)) settle(next);
      if (chunk + 1 == chunks) ring.begin(next);
      const unsigned low_scales = ring.next_low_scale, high_scales = ring.next_high_scale;
      scales |= low_scales | high_scales;
      ring.load_scales();
      ring.multiply(sum, x, low_scales, high_scales);
      x += piece_columns;
      ring.advance();
    }
    if (__any_sync(full_warp, (scales & 0x80808080u) != 0)) multiply_large(sum, number(round - 1));
    float both[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) both[i] = sum[0][i] + sum[1][i];
    store(unit, both);
    if (!unit.down) {
      ++finished;
      if (!next.exists || next.down || next.head != unit.head) release(unit.head, finished), finished = 0;
    }
    if (!next.exists) return;
    unit = next;
  }
}

}  // namespace k3::kernel
