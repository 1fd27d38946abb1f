// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/grid_order.cuh>
#include <k3/kernels/linear_finish.cuh>
#include <k3/kernels/linear_hopper.cuh>
#include <k3/kernels/linear_registers.cuh>

// Products with weight matrices on sm_90a: weights stream through a ring in shared memory and are the 64-row operand of
// wgmma, tokens the other. Blocks stay: each owns an equal run of units of 16 rows of weights and goes through it in
// passes. Four warps fill the ring by tensor copies (of weights even before the kernel's input is there), four more for
// every 64 rows of a pass multiply. Memory gives 95 % of its rate where 128 bytes of a row are read at a time and 99 %
// where it is 256, as measured. So the two steps that hold them are fetched at once, `together`, unless tensor cores
// are the limit.
//
// `Split` 2: the two blocks of a cluster share the K of their units, two pieces each. For launches with so few rows
// that the tensor cores' 64 would be badly filled and blocks unequal.
namespace k3::kernel {

inline constexpr unsigned stream_columns = linear_step;  ///< of k in a slot of the ring: 128 bytes of a row
inline constexpr unsigned stream_most_slots = 16;
inline constexpr unsigned stream_row_bytes = 2 * stream_columns, stream_unit_bytes = 16 * stream_row_bytes;
inline constexpr unsigned stream_scratch_stride = 20;  ///< floats of a token of a unit: 16, and no bank conflicts

struct StreamArguments {
  LinearArguments<bf16> linear{};
  unsigned tile_units = 0;  ///< of a block in a pass
  unsigned passes = 0, slots = 0;
  bool together = false;                    ///< two steps are fetched at once, when both their slots are free; needs 3
  unsigned scratch_at = 0;                  ///< bytes from the ring on
  unsigned token_slots = 0, tokens_at = 0;  ///< of the ring of tokens of linear_wide
  CUtensorMap x{};                          ///< boxes of `Tokens` rows
  CUtensorMap weight[linear_most_segments]{};  ///< boxes of 16 rows, of a gated segment 8
  CUtensorMap up[linear_most_segments]{};
};

/// One warp cannot issue the copies fast enough: each takes about 80 cycles.
inline constexpr unsigned stream_fill_warps = 4;
/// Warps that multiply, at most: registers for the sums of two pieces of so many tokens.
inline constexpr unsigned stream_most_warps = 12;
/// Where the sum and a piece need more registers than an equal share: the warps that fill the ring give up most of
/// theirs.
template <int Tokens>
inline constexpr bool stream_uneven = Tokens == 128;
inline constexpr unsigned stream_most_threads = (stream_most_warps + stream_fill_warps) * 32;
/// Tiles of 8 tokens that a block finishes of a unit: with a split, half of them.
template <int Tokens, int Split>
inline constexpr unsigned stream_tiles = (Tokens / 8 + Split - 1) / Split;
/// Tokens whose results lie in shared memory at a time, where each warp finishes its own.
template <int Tokens>
inline constexpr unsigned stream_chunk = Tokens < 16 ? Tokens : 16;

/// A block's part of the work.
template <int Split>
struct StreamPart {
  static_assert(Split == 1 || Split * 2 == linear_pieces);
  unsigned split;
  unsigned first_unit, end_unit;
  unsigned first_step, steps, piece;

  __device__ explicit StreamPart(const StreamArguments& a) {
    const unsigned owners = gridDim.x / Split, owner = blockIdx.x / Split;
    const unsigned own = a.linear.units / owners, longer = a.linear.units % owners;  // one more
    split = blockIdx.x % Split;
    first_unit = owner * own + detail::smaller(owner, longer);
    end_unit = first_unit + own + (owner < longer ? 1 : 0);
    const LinearSteps k(a.linear.columns, a.linear.whole);
    piece = k.piece;
    first_step = split * 2 * piece;
    steps = Split == 1 ? k.all : split == 0 ? 2 * piece : k.all - 2 * piece;
  }
};

struct LinearRing {
  async::Barrier full[stream_most_slots], empty[stream_most_slots];
};

/// The four warps that fill the ring. Warps 0 and 2 have the even steps and 1 and 3 the odd ones, each pair every
/// second unit. Two steps are neighbours in the weights' rows: fetched `together`, they are 256 bytes of each row at a
/// time.
template <int Tokens, int Split>
struct StreamProducer {
  const StreamArguments& a;
  const StreamPart<Split>& part;
  LinearRing& ring;
  unsigned memory, slot_bytes;  // of the ring
  unsigned lane = threadIdx.x % 32, fill_warp = threadIdx.x / 32 % stream_fill_warps, odd = fill_warp % 2;

  struct Place {
    unsigned group = 0, pass = 0, step = 0;  ///< a step of a pass over some tokens
  } weights_at{}, tokens_at{};
  unsigned begun = ~0u;  ///< the pass that the following is of
  // This lane's box of every step of the pass, if it has one.
  const CUtensorMap* map = nullptr;
  unsigned row = 0, offset = 0;
  unsigned long long first = async::policy_first(), last = async::policy_last();

  __device__ __forceinline__ void advance(Place& p, unsigned steps) {
    for (p.step += steps; p.step >= part.steps; p.step -= part.steps)
      if (++p.pass == a.passes) p.pass = 0, ++p.group;
  }

  __device__ __forceinline__ unsigned units_of(unsigned pass) const {
    const unsigned from = part.first_unit + pass * a.tile_units;
    return from < part.end_unit ? detail::smaller(a.tile_units, part.end_unit - from) : 0;
  }

  /// Lane l has the box of one of the warp's units; of gated ones lane 8 + l has the second half.
  __device__ __forceinline__ void begin_pass(unsigned pass) {
    begun = pass;
    const unsigned place = lane % 8 * 2 + fill_warp / 2;
    map = nullptr;
    if (place >= units_of(pass) || lane >= 16) return;
    unsigned unit = part.first_unit + pass * a.tile_units + place;
    const unsigned index = find_segment(a.linear, unit);
    const bool glu = a.linear.segment[index].kind == LinearKind::glu, second = lane >= 8;
    if (second && !glu) return;
    map = second ? &a.up[index] : &a.weight[index];
    row = unit * (glu ? 8 : 16);
    offset = place * stream_unit_bytes + (second ? stream_unit_bytes / 2 : 0);
  }

  __device__ __forceinline__ void fetch_weights(unsigned slot) {
    const Place& p = weights_at;
    if (p.pass != begun) begin_pass(p.pass);
    if (lane == 0 && fill_warp < 2)
      async::arrive_expecting(ring.full[slot], units_of(p.pass) * stream_unit_bytes + Tokens * stream_row_bytes);
    __syncwarp();
    if (map != nullptr)
      async::copy_box(memory + slot * slot_bytes + offset, map, (part.first_step + p.step) * stream_columns, row,
                      ring.full[slot], first);
    advance(weights_at, 2);
  }

  __device__ __forceinline__ void fetch_tokens(unsigned slot) {
    const Place& p = tokens_at;
    if (lane == 0 && fill_warp >= 2)
      async::copy_box(memory + slot * slot_bytes + a.tile_units * stream_unit_bytes, &a.x,
                      (part.first_step + p.step) * stream_columns, p.group * Tokens, ring.full[slot], last);
    advance(tokens_at, 2);
  }

  /// Until the slot of a step is free, and that of the next one where both are fetched together.
  __device__ __forceinline__ void wait_for_slot(unsigned slot, unsigned phase) {
    async::wait(ring.empty[slot], phase);
    if (!a.together || odd == 1) return;
    if (++slot == a.slots) slot = 0, phase ^= 1;
    async::wait(ring.empty[slot], phase);
  }

  __device__ __forceinline__ void run() {
    const unsigned total = a.linear.groups * a.passes * part.steps, early = detail::smaller(total, a.slots);
    advance(weights_at, odd), advance(tokens_at, odd);
    for (unsigned i = odd; i < early; i += 2) fetch_weights(i);
    wait_for_earlier();
    unsigned i = odd;
    for (; i < early; i += 2) fetch_tokens(i);
    if (lane == 0) let_later_start();
    unsigned slot = i - a.slots, phase = 0;
    for (; i < total; i += 2) {
      wait_for_slot(slot, phase);
      fetch_weights(slot);
      fetch_tokens(slot);
      if ((slot += 2) >= a.slots) slot -= a.slots, phase ^= 1;
    }
  }
};

/// Puts a warp's sums of eight tokens where they can be read by token and row.
__device__ __forceinline__ void stream_spread(float* to, const float* sum) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (unsigned i = 0; i < 4; ++i) to[(lane % 4 * 2 + i % 2) * stream_scratch_stride + lane / 4 + i / 2 * 8] = sum[i];
}

template <int Tokens, int Split>
struct StreamConsumer {
  const StreamArguments& a;
  const StreamPart<Split>& part;
  LinearRing& ring;
  unsigned memory, slot_bytes;
  unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned slot = 0, phase = 0;
  float sum[Tokens / 2], piece[Tokens / 2];

  __device__ __forceinline__ void release(unsigned which) {
    if (lane == 0) async::arrive(ring.empty[which]);
  }

  /// Adds up `steps` steps in `piece`.
  __device__ __forceinline__ void multiply(unsigned steps) {
#pragma unroll
    for (float& p : piece) p = 0;
    unsigned before = 0;
    for (unsigned step = 0; step < steps; ++step) {
      async::wait(ring.full[slot], phase);
      const unsigned at = memory + slot * slot_bytes;
      unsigned long long weights = hopper::operand(at + warp / 4 * 4 * stream_unit_bytes);
      unsigned long long tokens = hopper::operand(at + a.tile_units * stream_unit_bytes);
      wgmma_fence();
#pragma unroll
      for (unsigned k = 0; k < stream_columns / 16; ++k) hopper::wgmma(piece, weights + 2 * k, tokens + 2 * k);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        release(before);
      }
      before = slot;
      if (++slot == a.slots) slot = 0, phase ^= 1;
    }
    wgmma_wait<0>();
    release(before);
  }

  /// The sum of all pieces of this block, one after the other.
  __device__ __forceinline__ void multiply_all() {
    multiply(detail::smaller(part.piece, part.steps));
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i) sum[i] = piece[i];
    for (unsigned done = part.piece; done < part.steps; done += part.piece) {
      multiply(detail::smaller(part.piece, part.steps - done));
#pragma unroll
      for (int i = 0; i < Tokens / 2; ++i) sum[i] += piece[i];
    }
  }

  /// Products of this warp's unit, tokens from `first` on: from registers, or through `scratch` where their places do
  /// not allow it.
  template <unsigned Tiles>
  __device__ __forceinline__ void finish(unsigned unit, unsigned first, const float (&v)[Tiles * 4], float* scratch) {
    unsigned own = unit;
    const LinearSegment& s = a.linear.segment[find_segment(a.linear, own)];
    if (LinearDirect<Tiles>::fits(a.linear, s, own)) return LinearDirect<Tiles>{a.linear, s, own, first}.finish(v);
    constexpr unsigned chunk = stream_chunk<Tiles * 8>;
    with_unit(a.linear, unit, [&](const auto& rows) {
#pragma unroll
      for (unsigned from = 0; from < Tiles * 8; from += chunk) {
        if (first + from >= a.linear.tokens) break;
        __syncwarp();
#pragma unroll
        for (unsigned tile = 0; tile < chunk / 8; ++tile)
          stream_spread(scratch + tile * 8 * stream_scratch_stride, &v[(from / 8 + tile) * 4]);
        __syncwarp();
        rows.template finish<chunk>(first + from, [&](unsigned token, unsigned row) {
          return *reinterpret_cast<const float4*>(scratch + token * stream_scratch_stride + row);
        });
      }
    });
  }

  __device__ __forceinline__ void run(float* scratch) {
    for (unsigned group = 0; group < a.linear.groups; ++group)
      for (unsigned pass = 0; pass < a.passes; ++pass) {
        multiply_all();
        const unsigned place = pass * a.tile_units + warp, unit = part.first_unit + place;
        if (warp < a.tile_units && unit < part.end_unit) finish<Tokens / 8>(unit, group * Tokens, sum, scratch);
        __syncwarp();
      }
  }

  /// With a split: the first block has p0 + p1, the second p2 and p3. Each finishes half of the tokens and leaves what
  /// the other needs in `exchange`, by warp, tile, piece and lane.
  __device__ __forceinline__ void run_split(float4* exchange, float* scratch) {
    constexpr unsigned tiles = Tokens / 8, half = stream_tiles<Tokens, 2>;
    const bool first = part.split == 0;
    multiply(part.piece);
#pragma unroll
    for (int i = 0; i < Tokens / 2; ++i) sum[i] = piece[i];
    multiply(part.steps - part.piece);
    asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x - 32 * stream_fill_warps) : "memory");  // the ring is free
    exchange += warp * half * 64 + lane;
    const auto four = [](const float* v) { return float4{v[0], v[1], v[2], v[3]}; };
    if (first) {
#pragma unroll
      for (int i = 0; i < Tokens / 2; ++i) sum[i] += piece[i];
#pragma unroll
      for (unsigned tile = half; tile < tiles; ++tile) exchange[(tile - half) * 64] = four(&sum[tile * 4]);
    } else {
#pragma unroll
      for (unsigned tile = 0; tile < half; ++tile) {
        exchange[tile * 64] = four(&sum[tile * 4]);
        exchange[tile * 64 + 32] = four(&piece[tile * 4]);
      }
    }
    async::cluster_sync();
    const unsigned from = async::address_at_rank(exchange, part.split ^ 1);
    float own[half * 4];
#pragma unroll
    for (unsigned tile = 0; tile < half; ++tile) {
      float4 v = async::load_at(from + tile * 64 * 16);
      if (first) {
        const float4 last = async::load_at(from + (tile * 64 + 32) * 16);
        v = added(added(four(&sum[tile * 4]), v), last);
      } else if (half + tile < tiles) {
        v = added(added(v, four(&sum[(half + tile) * 4])), four(&piece[(half + tile) * 4]));
      }
      own[tile * 4] = v.x, own[tile * 4 + 1] = v.y, own[tile * 4 + 2] = v.z, own[tile * 4 + 3] = v.w;
    }
    async::cluster_arrive();
    const unsigned unit = part.first_unit + warp, token = part.split * half * 8;
    if (unit < part.end_unit && token < Tokens) finish<half>(unit, token, own, scratch);
    __syncwarp();
    async::cluster_wait();  // no block may go while another reads its memory
  }

 private:
  __device__ __forceinline__ static float4 added(float4 x, float4 y) {
    return {x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w};
  }
};

/// The products of a launch. Empty, and without static shared memory, where the target is not sm_90a.
template <int Tokens, int Split>
__global__ void __launch_bounds__(stream_most_threads, Tokens <= 32 ? 2 : 1)
    linear_stream(const __grid_constant__ StreamArguments a) {
  if constexpr (on_hopper) {
    extern __shared__ unsigned char dynamic[];
    __shared__ LinearRing ring;
    const unsigned base = (async::shared_address(dynamic) + 1023) / 1024 * 1024;
    const unsigned warps = blockDim.x / 32 - stream_fill_warps;  // that multiply
    unsigned char* const memory = dynamic + (base - async::shared_address(dynamic));
    const unsigned slot_bytes = a.tile_units * stream_unit_bytes + Tokens * stream_row_bytes;
    if (threadIdx.x < a.slots) {
      async::init(ring.full[threadIdx.x], 1), async::init(ring.empty[threadIdx.x], warps);
      async::init_fence();
    }
    const StreamPart<Split> part(a);
    __syncthreads();
    if (threadIdx.x / 32 >= warps) {
      if constexpr (stream_uneven<Tokens>) give_registers<32>();
      StreamProducer<Tokens, Split>{a, part, ring, base, slot_bytes}.run();
      if constexpr (Split > 1) {
        __syncwarp();
        async::cluster_sync();
        async::cluster_sync();
      }
    } else {
      if constexpr (stream_uneven<Tokens>) take_registers<160>();
      wait_for_earlier();
      StreamConsumer<Tokens, Split> consumer{a, part, ring, base, slot_bytes};
      float* const scratch = reinterpret_cast<float*>(memory + a.scratch_at) +
                             threadIdx.x / 32 * (stream_chunk<stream_tiles<Tokens, Split> * 8> * stream_scratch_stride);
      if constexpr (Split > 1)
        consumer.run_split(reinterpret_cast<float4*>(memory), scratch);
      else
        consumer.run(scratch);
    }
  }
}

}  // namespace k3::kernel
