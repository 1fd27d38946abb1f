// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/kernels/mla_wide_runs.cuh>

// How tiles of the cache, and queries, come into the shared memory of a block of mla_attend_wide.
namespace k3::kernel {

/// Where piece `i` of a half of the tile is in the half's ring, and the parity of its barrier.
template <unsigned Ring>
struct MlaRing {
  unsigned at = 0, parity = 0;

  __device__ __forceinline__ unsigned slot(unsigned i) const { return at + i < Ring ? at + i : at + i - Ring; }
  __device__ __forceinline__ unsigned phase(unsigned i) const { return at + i < Ring ? parity : parity ^ 1; }
  __device__ __forceinline__ void next_tile() {
    parity = phase(4);
    at = slot(4);
  }
};

/// What a thread knows of its block, and the copies that its warp issues.
template <int N>
struct MlaWideCopies {
  using Shared = MlaWideShared<N>;
  static constexpr unsigned ring = Shared::ring;
  const MlaWideArguments& w;
  Shared& memory;
  MlaWideControl& shared;
  const CUtensorMap *q_map, *kv_map;
  unsigned group;  // of N heads
  unsigned thread = threadIdx.x % 128, lane = thread % 32;
  unsigned half = uniform(threadIdx.x / 128), warp = uniform(thread / 32);
  MlaRing<ring> at{};                  // of the tile whose values are added
  unsigned later = (warp + ring) / 4;  // tiles from the one whose piece this warp replaces to that of the new one
  bool keys = half == 1 && warp == 3;  // this warp copies the keys' own part, too
  MlaPlace next_place{}, key_place{};  // of what this warp copies next

  __device__ __forceinline__ MlaWideCopies(const MlaWideArguments& arguments, Shared& block, const CUtensorMap* queries,
                                           const CUtensorMap* cache, unsigned heads)
      : w(arguments), memory(block), shared(block.control), q_map(queries), kv_map(cache), group(heads) {}

  __device__ __forceinline__ void sync_half() const { group_sync<128>(1 + half); }

  /// Where this lane's part of a tile is.
  __device__ __forceinline__ MlaPlace place_of(unsigned tile) const { return mla_place(w, shared.segment, tile, lane); }
  /// And of the tile behind it.
  __device__ __forceinline__ MlaPlace after(MlaPlace p) const {
    for (p.row += mla_tile; p.row >= w.a.cache.page_size; p.row -= w.a.cache.page_size) ++p.index;
    p.page = mla_page(shared.segment, p.index);
    return p;
  }
  /// Columns [64 column, ..) of a tile. One warp.
  __device__ __forceinline__ void load(unsigned slot, unsigned column, MlaPlace from, unsigned more = 0) const {
    if (lane == 0) async::arrive_expecting(shared.full[slot], mla_piece_bytes + more);
    if (lane < w.boxes)
      async::copy_box(async::shared_address(memory.pieces[slot] + lane * w.box_rows * 128), kv_map,
                      static_cast<int>(column * mla_piece_columns), static_cast<int>(from.row), from.page,
                      shared.full[slot]);
    __syncwarp();
  }
  /// The same columns of the queries, before it.
  __device__ __forceinline__ void load_queries(unsigned slot, unsigned column) const {
    if (lane < N / 48)
      async::copy_box(async::shared_address(memory.q[column] + lane * (48 * 128)), q_map,
                      static_cast<int>(column * mla_piece_columns), static_cast<int>(group * N + lane * 48),
                      static_cast<int>(shared.segment.row), shared.full[slot]);
    __syncwarp();
  }
  /// As many pieces as there is room for, those of this warp, and the queries unless they are there.
  __device__ __forceinline__ void load_first(unsigned first, unsigned count, bool again) {
    const unsigned slot = half * ring + at.slot(warp), column = half * 4 + warp, queries = again ? 0 : N * 128;
    if (!again) {
      load_queries(slot, column);
      if (keys) load_queries(2 * ring, 8);
    }
    const MlaPlace place = place_of(first), second = count > 1 ? after(place) : place;
    load(slot, column, place, queries);
    if (keys) load(2 * ring, 8, place, queries);
    if (4 + warp < ring && count > 1) load(half * ring + at.slot(4 + warp), column, second);
    key_place = second;
    next_place = later > 1 && count > 2 ? after(second) : second;
  }
  /// All warps are done with piece i of this half of the tile: it may be replaced by the one that is `ring` pieces
  /// later.
  __device__ __forceinline__ void replace(unsigned i, unsigned left) {
    const unsigned slot = half * ring + at.slot(i);
    if (lane == 0) async::arrive(shared.empty[slot]);
    if (warp != i || later >= left) return;
    async::wait(shared.empty[slot], at.phase(i));
    load(slot, half * 4 + (i + ring) % 4, next_place);
  }
};

}  // namespace k3::kernel
