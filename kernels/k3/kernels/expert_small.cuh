// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/async.cuh>
#include <k3/kernels/expert_stream.cuh>

// Both products of up to small_choices choices, which no kernel before lists. As in expert_stream.cuh a warp does a
// unit alone, but its chunks come by bulk copies into slots of shared memory that are its own. So a fence does not wait
// for weights under way: each unit is reported when it is done, units are dealt over the whole device in turn, and the
// second product finds the first one done without waiting.
namespace k3::kernel {

inline constexpr unsigned small_slots = 2;  ///< chunks of a warp
inline constexpr unsigned small_slot_bytes = 2 * (piece_code_bytes + piece_scale_bytes);
inline constexpr unsigned small_rows_bytes = 32 * 1024;  ///< most that the rows may take
inline constexpr unsigned small_ring_bytes = expert_stream_warps * small_slots * (small_slot_bytes + 8);

/// A warp's slots, filled in order of its units' chunks. All lanes call; one copies.
struct SmallRing {
  const std::uint8_t *low, *high, *low_scale, *high_scale;  ///< the next chunk to fetch
  unsigned slots, barriers;                                 ///< addresses in shared memory
  unsigned fetch_slot = 0, slot = 0, phase = 0;
  unsigned left = 0, flying = 0;  ///< chunks of the unit that are not fetched; fetched, not used
  bool ahead = false;             ///< the unit being fetched is the next one

  __device__ explicit SmallRing(void* memory) {
    const unsigned first = async::shared_address(memory), warp = threadIdx.x / 32;
    slots = first + warp * (small_slots * small_slot_bytes);
    barriers = first + expert_stream_warps * (small_slots * small_slot_bytes) + warp * (small_slots * 8);
    if (threadIdx.x % 32 == 0) {
      for (unsigned i = 0; i < small_slots; ++i) async::init(barriers + i * 8, 1);
      async::init_fence();
    }
    __syncwarp();
  }
  __device__ __forceinline__ void begin(const ExpertStreamUnit& u, unsigned chunks) {
    low = u.low, high = u.high, low_scale = u.low_scale, high_scale = u.high_scale, left = chunks;
  }
  /// Fetches what there is room for, of `next` too once it is known where that is.
  __device__ __forceinline__ void fill(const ExpertStreamUnit& next, unsigned chunks_of_next, bool known) {
    while (flying < small_slots) {
      if (left == 0) {
        if (ahead || !known || !next.exists) return;
        begin(next, chunks_of_next), ahead = true;
      }
      fetch();
    }
  }
  __device__ __forceinline__ void fetch() {
    if (async::elected()) {
      const unsigned to = slots + fetch_slot * small_slot_bytes, barrier = barriers + fetch_slot * 8;
      async::arrive_expecting(barrier, small_slot_bytes);
      async::copy(to, low, piece_code_bytes, barrier);
      async::copy(to + piece_code_bytes, high, piece_code_bytes, barrier);
      async::copy(to + 2 * piece_code_bytes, low_scale, piece_scale_bytes, barrier);
      async::copy(to + 2 * piece_code_bytes + piece_scale_bytes, high_scale, piece_scale_bytes, barrier);
    }
    low += piece_code_bytes, high += piece_code_bytes;
    low_scale += piece_scale_bytes, high_scale += piece_scale_bytes;
    fetch_slot = (fetch_slot + 1) % small_slots;
    --left, ++flying;
  }
  /// Waits for the chunk in front; gives its address.
  __device__ __forceinline__ unsigned wait() const {
    async::wait(barriers + slot * 8, phase);
    return slots + slot * small_slot_bytes;
  }
  /// All lanes have read it.
  __device__ __forceinline__ void leave() {
    __syncwarp();
    slot = (slot + 1) % small_slots, phase ^= slot == 0 ? 1 : 0;
    --flying;
  }
};

__device__ __forceinline__ uint4 shared_piece(unsigned at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ unsigned shared_word(unsigned at) {
  unsigned v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
/// sum += the chunk at `at` times x. Returns its scales, or-ed.
__device__ __forceinline__ unsigned small_chunk(float (&sum)[2][4], unsigned at, const bf16* x) {
  const unsigned lane = threadIdx.x % 32, scales = at + 2 * piece_code_bytes + lane * 4;
  const unsigned low_scales = shared_word(scales), high_scales = shared_word(scales + piece_scale_bytes);
  at += lane * 16;
#pragma unroll
  for (unsigned step = 0; step < expert_stream_steps; ++step) {
    const uint4 low = shared_piece(at + step * 512);
    const uint4 high = shared_piece(at + piece_code_bytes + step * 512);
    expert_stream_step<false>(sum, low, high, scale_byte(low_scales, step), scale_byte(high_scales, step),
                              x + step * 128);
  }
  return low_scales | high_scales;
}

struct SmallWorker : ExpertStreamWorker {
  using ExpertStreamWorker::ExpertStreamWorker;

  __device__ __forceinline__ unsigned number(unsigned round) const {
    const unsigned n = (round * expert_stream_warps + threadIdx.x / 32) * gridDim.x + blockIdx.x;
    return n < total ? n : expert_stream_none;
  }

  __device__ __forceinline__ void run(void* memory) {
    ExpertStreamUnit unit, next;
    SmallRing ring(memory);
    find(unit, number(0));
    if (!unit.exists) return;
    settle(unit);
    ring.begin(unit, chunks(unit));
    ring.fill(unit, 0, false);
    for (unsigned round = 1;; ++round) {
      while (!unit.ready) unit.ready = is_ready(unit);
      const bf16* x = input(unit);
      find(next, number(round));
      float sum[2][4] = {};
      unsigned scales = 0;
#pragma unroll 1
      for (unsigned chunk = 0, end = chunks(unit), known = detail::smaller(1u, end - 1); chunk < end; ++chunk) {
        if (chunk == known) settle(next);
        scales |= small_chunk(sum, ring.wait(), x);
        x += piece_columns;
        ring.leave();
        ring.fill(next, chunks(next), chunk >= known);
      }
      if (__any_sync(full_warp, (scales & 0x80808080u) != 0)) multiply_large(sum, number(round - 1));
      float both[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) both[i] = sum[0][i] + sum[1][i];
      store(unit, both);
      if (!unit.down) release(unit.head, 1);
      if (!next.exists) return;
      unit = next, ring.ahead = false;
    }
  }
};

/// Small: up to small_choices choices; no kernel before lists them. Dynamic shared memory: the slots, and the rows,
/// [rows, width].
template <bool Small>
__global__ void __launch_bounds__(expert_stream_threads, 1)
    expert_stream(const __grid_constant__ ExpertStreamArguments a) {
  if constexpr (architecture::bulk_copies) {
    wait_for_earlier();
    let_later_start();
    if constexpr (Small) {
      __shared__ ExpertItem items[small_choices];
      __shared__ unsigned order[small_choices], count;
      extern __shared__ __align__(128) unsigned char small_memory[];
      bf16* const rows = reinterpret_cast<bf16*>(small_memory + small_ring_bytes);
      if (threadIdx.x < 32) {
        WorklistArguments list = a.list;
        list.items = items, list.item_count = &count, list.order = order;
        list.reports = blockIdx.x == 0;
        build_small_worklist(list);
      } else {
        for (unsigned row = 0; row < a.list.rows; ++row) {
          if (a.list.slots != nullptr && a.list.slots[row] < 0) continue;
          stage_row(rows + row * a.width, a.latent + row * a.latent_stride, a.width, a.width, RowOrder::e2m1,
                    threadIdx.x - 32, expert_stream_threads - 32);
        }
      }
      __syncthreads();
      if (blockIdx.x == 0 && threadIdx.x < count) a.list.items[threadIdx.x] = items[threadIdx.x];
      if (blockIdx.x == 0 && threadIdx.x == 0) *a.list.item_count = count;
      const ExpertStreamWork work{items, order, rows, count};
      SmallWorker(a, work).run(small_memory);
    } else {
      const ExpertStreamWork work{a.list.items, a.list.order, a.x, *a.list.item_count};
      ExpertStreamWorker(a, work).run();
    }
  }
}

}  // namespace k3::kernel
