// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/linear_stream.cuh>

// Products of many tokens: these are the 64-row operand of wgmma and the weights of a pass the other, up to 208 rows of
// them, so that shared memory and the L2 cache are read less often than where weights are the 64-row operand, and no
// row is multiplied in vain. Two warpgroups have 64 tokens each. The bits are those of linear_stream.
namespace k3::kernel {

inline constexpr int wide_tokens = 128;
inline constexpr unsigned wide_warps = 8, wide_threads = (wide_warps + stream_fill_warps) * 32;

/// A lane's results of `Units` units as wgmma leaves them: of token lane / 4 + 8 i and row 8 j + lane % 4 * 2 + e of a
/// unit, v[8 unit + 4 j + 2 i + e]. For whole units of one segment, `from` to `end` - 1 of these, whose outputs can be
/// stored 8 bytes at a time, floats 16.
template <unsigned Units>
struct WideDirect {
  const LinearArguments<bf16>& a;
  const LinearSegment& s;
  int unit;  ///< of the segment: the first of v, which may lie before it
  unsigned from, end;
  unsigned first;  ///< token
  unsigned lane = threadIdx.x % 32, token = first + lane / 4;
  bool odd = lane % 2 != 0;
  unsigned row = odd ? lane % 4 * 2 + 6 : lane % 4 * 2;  // of a unit's 16, a lane stores four

  static __device__ __forceinline__ bool fits(const LinearArguments<bf16>& a, const LinearSegment& s) {
    const auto aligned = [](const LinearRows& r) { return (reinterpret_cast<size>(r.data) | r.stride * 2) % 8 == 0; };
    if (s.float_out)
      return s.kind == LinearKind::store && (reinterpret_cast<size>(s.out.data) | s.out.stride * 4) % 16 == 0;
    if (s.kind == LinearKind::glu) return (reinterpret_cast<size>(s.out.data) | s.out.stride * 2) % 4 == 0;
    return aligned(s.out) &&
           (s.kind != LinearKind::add || (aligned(a.add.other) && aligned(a.add.part) && aligned(a.add.snapshot)));
  }

  __device__ __forceinline__ void finish(const float (&v)[Units * 8]) const {
    if (s.float_out)
      store_floats(v);
    else if (s.kind == LinearKind::store)
      store(v);
    else if (s.kind == LinearKind::add)
      add(v);
    else if (s.glu.silu)
      activate(v, [](float gate, float up) { return fast_silu_glu(gate, up); });
    else
      activate(v, [glu = s.glu](float gate, float up) { return glu.fast_situ(gate, up); });
  }

 private:
  __device__ __forceinline__ bool has(unsigned u, unsigned i) const {
    return u >= from && u < end && token + i * 8 < a.tokens;
  }
  template <class T, class Element = bf16>
  __device__ __forceinline__ T* at(const LinearRows& rows, unsigned i, unsigned u) const {
    return reinterpret_cast<T*>(static_cast<Element*>(rows.data) + size{token + i * 8} * rows.stride +
                                ((unit + static_cast<int>(u)) * 16 + static_cast<int>(row)));
  }
  template <class T>
  __device__ __forceinline__ T exchanged(T low, T high) const {
    return __shfl_xor_sync(full_warp, odd ? low : high, 1);
  }
  /// The four rows of this lane of a unit and one of its tokens, rounded.
  __device__ __forceinline__ uint2 four(const float* v) const {
    const unsigned low = bf16_pair(v[0], v[1]), high = bf16_pair(v[4], v[5]), other = exchanged(low, high);
    return odd ? uint2{other, high} : uint2{low, other};
  }
  __device__ __forceinline__ static uint2 sum(uint2 x, uint2 y) {
    return {bf16_pair(low_of(x.x) + low_of(y.x), high_of(x.x) + high_of(y.x)),
            bf16_pair(low_of(x.y) + low_of(y.y), high_of(x.y) + high_of(y.y))};
  }

  __device__ __forceinline__ void store_floats(const float (&v)[Units * 8]) const {
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      float4* const to = at<float4, float>(s.out, i, 0);
#pragma unroll
      for (unsigned u = 0; u < Units; ++u) {
        const float* const p = &v[u * 8 + i * 2];
        const float x = exchanged(p[0], p[4]), y = exchanged(p[1], p[5]);
        const float4 four = odd ? float4{x, y, p[4], p[5]} : float4{p[0], p[1], x, y};
        if (has(u, i)) __stcs(to + u * 4, four);
      }
    }
  }
  __device__ __forceinline__ void store(const float (&v)[Units * 8]) const {
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      uint2* const to = at<uint2>(s.out, i, 0);
#pragma unroll
      for (unsigned u = 0; u < Units; ++u) {
        const uint2 result = four(&v[u * 8 + i * 2]);
        if (has(u, i)) to[u * 4] = result;
      }
    }
  }

  /// Rows 0 to 7 of a unit are gates, the others their partners.
  template <class Work>
  __device__ __forceinline__ void activate(const float (&v)[Units * 8], Work&& work) const {
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      unsigned* const to =
          reinterpret_cast<unsigned*>(static_cast<bf16*>(s.out.data) + size{token + i * 8} * s.out.stride +
                                      (unit * 8 + static_cast<int>(lane % 4 * 2)));
#pragma unroll
      for (unsigned u = 0; u < Units; ++u) {
        const float* const p = &v[u * 8 + i * 2];
        const unsigned gate = bf16_pair(p[0], p[1]), up = bf16_pair(p[4], p[5]);
        const unsigned result = bf16_pair(work(low_of(gate), low_of(up)), work(high_of(gate), high_of(up)));
        if (has(u, i)) to[u * 4] = result;
      }
    }
  }

  /// As linear_finish says it. Of some units, what is read is on its way before the first of it is used.
  __device__ __forceinline__ void add(const float (&v)[Units * 8]) const {
    constexpr unsigned some = 4;
#pragma unroll
    for (unsigned i = 0; i < 2; ++i)
#pragma unroll
      for (unsigned begin = 0; begin < Units; begin += some) {
        uint2 before[some], other[some];
#pragma unroll
        for (unsigned j = 0; j < some; ++j) {
          before[j] = has(begin + j, i) ? *at<const uint2>(s.out, i, begin + j) : uint2{};
          if (a.add.other.data) other[j] = has(begin + j, i) ? *at<const uint2>(a.add.other, i, begin + j) : uint2{};
        }
#pragma unroll
        for (unsigned j = 0; j < some && begin + j < Units; ++j) {
          const unsigned u = begin + j;
          uint2 part = four(&v[u * 8 + i * 2]);
          if (!has(u, i)) continue;
          if (a.add.other.data) part = sum(part, other[j]);
          if (a.add.part.data) *at<uint2>(a.add.part, i, u) = part;
          if (a.add.snapshot.data) *at<uint2>(a.add.snapshot, i, u) = before[j];
          *at<uint2>(s.out, i, u) = a.add.replace ? part : sum(before[j], part);
        }
        __syncwarp();
      }
  }
};

/// A warp's results of `Units` units, of which `count` count, and 16 tokens: from registers, and through `scratch`
/// where their places do not allow it.
template <unsigned Units>
__device__ __forceinline__ void finish_units(const LinearArguments<bf16>& a, unsigned unit, unsigned count,
                                             unsigned first, float (&v)[Units * 8], float* scratch) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned done = 0; done < count;) {
    unsigned own = unit + done;
    const LinearSegment& s = a.segment[find_segment(a, own)];
    const unsigned whole = s.rows / (s.kind == LinearKind::glu ? 8 : 16), left = count - done;
    const unsigned direct = WideDirect<Units>::fits(a, s) && own < whole ? detail::smaller(whole - own, left) : 0;
    if (direct > 0) {
      WideDirect<Units>{a, s, static_cast<int>(own) - static_cast<int>(done), done, done + direct, first}.finish(v);
      done += direct;
      continue;
    }
    const unsigned end = done + detail::smaller(s.end - (unit + done), left);
    // One unit after the other is the first of v.
#pragma unroll 1
    for (unsigned u = 0; u < Units; ++u) {
      if (u >= done && u < end) {
        with_unit(a, unit + u, [&](const auto& rows) {
#pragma unroll
          for (unsigned half = 0; half < 2; ++half) {
            __syncwarp();
#pragma unroll
            for (unsigned i = 0; i < 4; ++i)
              scratch[lane / 4 * stream_scratch_stride + i / 2 * 8 + lane % 4 * 2 + i % 2] =
                  v[i / 2 * 4 + half * 2 + i % 2];
            __syncwarp();
            rows.template finish<8>(first + half * 8, [&](unsigned token, unsigned row) {
              return *reinterpret_cast<const float4*>(scratch + token * stream_scratch_stride + row);
            });
          }
        });
      }
      float head[8];
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) head[i] = v[i];
#pragma unroll
      for (unsigned i = 0; i + 8 < Units * 8; ++i) v[i] = v[i + 8];
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) v[Units * 8 - 8 + i] = head[i];
    }
    done = end;
  }
}

/// A step of a pass over some tokens.
struct WidePlace {
  unsigned group = 0, pass = 0, step = 0;

  __device__ __forceinline__ void advance(const StreamArguments& a, const StreamPart<1>& part, unsigned steps) {
    for (step += steps; step >= part.steps; step -= part.steps)
      if (++pass == a.passes) pass = 0, ++group;
  }
};

/// Two warps fetch weights, one the even steps and one the odd ones, a third all tokens. Weights and tokens have a ring
/// each, since tokens come from the L2 cache and sooner.
template <int Tokens>
struct WideProducer {
  const StreamArguments& a;
  const StreamPart<1>& part;
  LinearRing &ring, &token_ring;
  unsigned memory, slot_bytes;
  unsigned lane = threadIdx.x % 32, odd = threadIdx.x / 32 % 2;
  WidePlace place{};
  unsigned begun = ~0u;  ///< the pass that the following is of
  const CUtensorMap* map = nullptr;
  unsigned row = 0, offset = 0, bytes = 0;

  /// Lane l has the box of a unit; of gated ones lane 16 + l has the second half.
  __device__ __forceinline__ void begin_pass(unsigned pass) {
    begun = pass;
    const unsigned from = part.first_unit + pass * a.tile_units, own = lane % 16;
    const unsigned count = from < part.end_unit ? detail::smaller(a.tile_units, part.end_unit - from) : 0;
    map = nullptr, bytes = count * stream_unit_bytes;
    if (own >= count) return;
    unsigned unit = from + own;
    const unsigned index = find_segment(a.linear, unit);
    const bool glu = a.linear.segment[index].kind == LinearKind::glu, second = lane >= 16;
    if (second && !glu) return;
    map = second ? &a.up[index] : &a.weight[index];
    row = unit * (glu ? 8 : 16);
    offset = own * stream_unit_bytes + (second ? stream_unit_bytes / 2 : 0);
  }

  __device__ __forceinline__ void fetch(unsigned slot, unsigned long long policy) {
    if (place.pass != begun) begin_pass(place.pass);
    if (lane == 0) async::arrive_expecting(ring.full[slot], bytes);
    __syncwarp();
    if (map != nullptr)
      async::copy_box(memory + slot * slot_bytes + offset, map, (part.first_step + place.step) * stream_columns, row,
                      ring.full[slot], policy);
    place.advance(a, part, 2);
  }

  /// Until the slot of a step is free, and that of the next one where both are fetched together.
  __device__ __forceinline__ void wait_for_slot(unsigned slot, unsigned phase) {
    async::wait(ring.empty[slot], phase);
    if (!a.together || odd == 1) return;
    if (++slot == a.slots) slot = 0, phase ^= 1;
    async::wait(ring.empty[slot], phase);
  }

  __device__ __forceinline__ void run_weights() {
    const unsigned long long policy = async::policy_first();
    const unsigned total = a.linear.groups * a.passes * part.steps, early = detail::smaller(total, a.slots);
    place.advance(a, part, odd);
    unsigned i = odd;
    for (; i < early; i += 2) fetch(i, policy);
    wait_for_earlier();
    if (lane == 0) let_later_start();
    unsigned slot = i - a.slots, phase = 0;
    for (; i < total; i += 2) {
      wait_for_slot(slot, phase);
      fetch(slot, policy);
      if ((slot += 2) >= a.slots) slot -= a.slots, phase ^= 1;
    }
  }

  __device__ __forceinline__ void run_tokens() {
    const unsigned long long policy = async::policy_last();
    const unsigned total = a.linear.groups * a.passes * part.steps;
    wait_for_earlier();
    if (lane != 0) return;
    let_later_start();
    unsigned slot = 0, phase = 1;
    for (unsigned i = 0; i < total; ++i) {
      if (i >= a.token_slots) async::wait(token_ring.empty[slot], phase);
      async::arrive_expecting(token_ring.full[slot], Tokens * stream_row_bytes);
      async::copy_box(memory + a.tokens_at + slot * (Tokens * stream_row_bytes), &a.x, place.step * stream_columns,
                      place.group * Tokens, token_ring.full[slot], policy);
      place.advance(a, part, 1);
      if (++slot == a.token_slots) slot = 0, phase ^= 1;
    }
  }

  __device__ __forceinline__ void run() {
    const unsigned fill_warp = threadIdx.x / 32 % stream_fill_warps;
    if (fill_warp < 2) return run_weights();
    if (fill_warp == 2) return run_tokens();
    wait_for_earlier();
    if (lane == 0) let_later_start();
  }
};

template <int Tokens, int Units, bool Whole>
struct WideConsumer {
  static constexpr unsigned own = Tokens == 128 ? Units : Units / 2;  ///< units of a warpgroup
  const StreamArguments& a;
  const StreamPart<1>& part;
  LinearRing &ring, &token_ring;
  unsigned memory, slot_bytes;
  unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned group = Tokens == 128 ? warp / 4 : 0, first_unit = Tokens == 128 ? 0 : warp / 4 * own;
  unsigned slot = 0, phase = 0, token_slot = 0, token_phase = 0;
  float sum[own * 8];

  __device__ __forceinline__ void release(unsigned which, unsigned token_which) {
    if (lane == 0) async::arrive(ring.empty[which]), async::arrive(token_ring.empty[token_which]);
  }

  __device__ __forceinline__ void multiply(float (&to)[own * 8], unsigned steps) {
#pragma unroll
    for (float& p : to) p = 0;
    unsigned before = 0, token_before = 0;
    for (unsigned step = 0; step < steps; ++step) {
      async::wait(token_ring.full[token_slot], token_phase);
      async::wait(ring.full[slot], phase);
      const unsigned long long weights = hopper::operand(memory + slot * slot_bytes + first_unit * stream_unit_bytes);
      const unsigned long long tokens =
          hopper::operand(memory + a.tokens_at + (token_slot * Tokens + group * 64) * stream_row_bytes);
      wgmma_fence();
#pragma unroll
      for (unsigned k = 0; k < stream_columns / 16; ++k) hopper::wgmma(to, tokens + 2 * k, weights + 2 * k);
      wgmma_commit();
      if (step > 0) {
        wgmma_wait<1>();
        release(before, token_before);
      }
      before = slot, token_before = token_slot;
      if (++slot == a.slots) slot = 0, phase ^= 1;
      if (++token_slot == a.token_slots) token_slot = 0, token_phase ^= 1;
    }
    wgmma_wait<0>();
    release(before, token_before);
  }

  __device__ __forceinline__ void multiply_all() {
    if constexpr (Whole) {
      multiply(sum, part.steps);
    } else {
      multiply(sum, detail::smaller(part.piece, part.steps));
      for (unsigned done = part.piece; done < part.steps; done += part.piece) {
        float piece[own * 8];
        multiply(piece, detail::smaller(part.piece, part.steps - done));
#pragma unroll
        for (unsigned i = 0; i < own * 8; ++i) sum[i] += piece[i];
      }
    }
  }

  __device__ __forceinline__ void run(float* scratch) {
    for (unsigned g = 0; g < a.linear.groups; ++g)
      for (unsigned pass = 0; pass < a.passes; ++pass) {
        multiply_all();
        const unsigned unit = part.first_unit + pass * a.tile_units + first_unit;
        const unsigned end = detail::smaller(part.end_unit, part.first_unit + (pass + 1) * a.tile_units);
        const unsigned first = g * Tokens + group * 64 + warp % 4 * 16;
        if (unit < end && first < a.linear.tokens)
          finish_units<own>(a.linear, unit, detail::smaller(end - unit, own), first, sum, scratch);
        __syncwarp();
      }
  }
};

/// The products of a launch. Empty where the target is not sm_90a.
template <int Tokens, int Units, bool Whole>
__global__ void __launch_bounds__(wide_threads, 1) linear_wide(const __grid_constant__ StreamArguments a) {
  if constexpr (on_hopper) {
    extern __shared__ unsigned char dynamic[];
    __shared__ LinearRing ring, token_ring;
    const unsigned base = (async::shared_address(dynamic) + 1023) / 1024 * 1024;
    unsigned char* const memory = dynamic + (base - async::shared_address(dynamic));
    const unsigned slot_bytes = a.tile_units * stream_unit_bytes;
    if (threadIdx.x < a.slots) {
      async::init(ring.full[threadIdx.x], 1), async::init(ring.empty[threadIdx.x], wide_warps);
      async::init_fence();
    }
    if (threadIdx.x < a.token_slots) {
      async::init(token_ring.full[threadIdx.x], 1), async::init(token_ring.empty[threadIdx.x], wide_warps);
      async::init_fence();
    }
    const StreamPart<1> part(a);
    __syncthreads();
    if (threadIdx.x / 32 >= wide_warps) {
      give_registers<40>();
      WideProducer<Tokens>{a, part, ring, token_ring, base, slot_bytes}.run();
    } else {
      take_registers<232>();
      wait_for_earlier();
      float* const scratch =
          reinterpret_cast<float*>(memory + a.scratch_at) + threadIdx.x / 32 * (8 * stream_scratch_stride);
      WideConsumer<Tokens, Units, Whole>{a, part, ring, token_ring, base, slot_bytes}.run(scratch);
    }
  }
}

}  // namespace k3::kernel
