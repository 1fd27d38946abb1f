// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <k3/core/bf16.hpp>
#include <k3/core/overlap.hpp>
#include <k3/geometry/mla_config.hpp>

namespace k3 {

namespace detail {

template <class V>
inline constexpr bool is_index_view = false;
template <class T>
inline constexpr bool is_index_view<View<T, 1>> = std::is_integral_v<std::remove_const_t<T>>;

}  // namespace detail

/// One integer per row of a batch: a slot (pad_slot for a padding row) or a position.
template <class V>
concept index_view = detail::is_index_view<V>;

/// Element offset of the row of `position` in page `page`: (page * page_size + position % page_size) * stride, in 64
/// bits whatever the types of the arguments.
template <class Page>
K3_HOST_DEVICE constexpr size mla_row_offset(Page page, size page_size, size position, size stride) {
  return (static_cast<size>(page) * page_size + position % page_size) * stride;
}

/// A latent cache as the operations see it: `pages` [pages, page_size, kv_lora_rank + qk_rope_head_dim], one row per
/// position: the normed latent, then the raw key part that all heads share. Position p of slot s lies in page
/// block_table(s, p / page_size). How many positions are valid is not in here: every call brings positions.
template <class T, MemorySpace Space = MemorySpace::host>
struct MlaKvView {
  View<T, 3, Space> pages;
  View<const id, 2, Space> block_table;  // [slots, blocks]
  size page_size = 0;

  K3_HOST_DEVICE constexpr size slots() const { return block_table.extents[0]; }
  K3_HOST_DEVICE constexpr size capacity() const { return block_table.extents[1] * page_size; }
  K3_HOST_DEVICE constexpr T* row(size slot, size position) const {
    const id page = block_table(slot, position / page_size);
    return pages.data + static_cast<size>(page) * pages.strides[0] + position % page_size * pages.strides[1];
  }

  /// The same cache, read-only.
  template <class U>
    requires(std::same_as<U, const T> && !std::is_const_v<T>)
  K3_HOST_DEVICE constexpr operator MlaKvView<U, Space>() const {
    return {pages, block_table, page_size};
  }
};

/// Owns the latent cache of one MLA layer for `slots` sequences of up to `capacity` positions; it never grows. Without
/// a page size a slot is one page; with one, the capacity is rounded up to whole pages, page b of slot s being
/// s * blocks + b. The lengths are bookkeeping for snapshots and resets; no operation reads or changes them.
/// Bytes: slots * capacity * (kv_lora_rank + qk_rope_head_dim) * sizeof(T), taken from the system as they are written.
/// Throws invalid_argument for sizes of zero or too large, out_of_memory where there is not enough.
template <real T>
class MlaKv {
 public:
  MlaKv() = default;
  template <mla_geometry G>
  MlaKv(G geometry, size slots, size capacity, size page_size = 0) : page_size_(page_size ? page_size : capacity) {
    check(geometry, "MlaKv");
    detail::require(slots > 0 && slots < (size{1} << 31), "MlaKv", "slots", slots, "between 1 and 2^31 - 1");
    detail::require(capacity > 0 && capacity < (size{1} << 31), "MlaKv", "capacity", capacity,
                    "between 1 and 2^31 - 1");
    detail::require(page_size_ < (size{1} << 31), "MlaKv", "page_size", page_size_, "below 2^31");
    slots_ = slots;
    blocks_ = (capacity + page_size_ - 1) / page_size_;
    width_ = mla_cache_width(geometry);
    const size pages = detail::checked_product("MlaKv", "slots * blocks", slots_, blocks_);
    detail::require(pages < (size{1} << 31), "MlaKv", "the number of pages", pages, "below 2^31");
    allocate();
    table_.resize(pages);
    for (size page = 0; page < pages; ++page) table_[page] = static_cast<id>(page);
    lengths_.resize(slots_);
  }

  MlaKv(const MlaKv& other)
      : page_size_(other.page_size_),
        width_(other.width_),
        slots_(other.slots_),
        blocks_(other.blocks_),
        table_(other.table_),
        lengths_(other.lengths_) {
    if (!other.memory_) return;
    allocate();
    copy_written(other);
  }
  MlaKv(MlaKv&&) noexcept = default;
  MlaKv& operator=(const MlaKv& other) { return *this = MlaKv(other); }
  MlaKv& operator=(MlaKv&&) noexcept = default;

  size slots() const { return slots_; }
  size capacity() const { return blocks_ * page_size_; }
  size page_size() const { return page_size_; }
  size width() const { return width_; }
  size bytes() const { return elements() * sizeof(T); }

  MlaKvView<T> view() { return {pages(data()), table(), page_size_}; }
  MlaKvView<const T> view() const { return {pages(static_cast<const T*>(data())), table(), page_size_}; }

  /// The row of a position, [kv_lora_rank | qk_rope_head_dim]; zeros until written.
  T* row(size slot, size position) { return data() + offset(slot, position); }
  const T* row(size slot, size position) const { return data() + offset(slot, position); }

  size length(size slot) const { return lengths_[checked_slot(slot)]; }
  void set_length(size slot, size length) {
    if (length > capacity()) refuse("length", length, capacity() + 1);
    lengths_[checked_slot(slot)] = length;
  }
  /// Makes a slot free for a new sequence. Old rows stay: positions past a sequence's own are never read.
  void reset(size slot) { lengths_[checked_slot(slot)] = 0; }

 private:
  static constexpr size alignment = 64;
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  size elements() const { return slots_ * capacity() * width_; }
  auto table() const { return k3::view(table_.data(), slots(), size{blocks_}); }
  template <class U>
  auto pages(U* data) const {
    return k3::view(data, slots_ * blocks_, page_size_, width_);
  }

  [[noreturn]] static void refuse(const char* argument, size found, size bound) {
    throw invalid_argument("MlaKv", argument, std::to_string(found), "below " + std::to_string(bound));
  }
  size checked_slot(size slot) const {
    if (slot >= slots_) refuse("slot", slot, slots());
    return slot;
  }
  size offset(size slot, size position) const {
    if (position >= capacity()) refuse("position", position, capacity());
    return mla_row_offset(table_[checked_slot(slot) * blocks_ + position / page_size_], page_size_, position, width_);
  }

  // calloc, because the system hands out zero pages only when they are written.
  void allocate() {
    const size positions = detail::checked_product("MlaKv", "slots * capacity", slots_, capacity());
    const size count = detail::checked_product("MlaKv", "the cache's size", positions, width_);
    detail::require(count < ~size{0} / sizeof(T) / 2, "MlaKv", "the cache's size", count, "an allocatable size");
    memory_.reset(std::calloc(count * sizeof(T) + alignment, 1));
    if (!memory_) throw out_of_memory("MlaKv", "the cache", count * sizeof(T));
  }
  T* data() const {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(memory_.get());
    return reinterpret_cast<T*>((address + alignment - 1) / alignment * alignment);
  }

  // Leaves alone what was never written, so that a copy takes no more memory than its original.
  void copy_written(const MlaKv& other) {
    constexpr size chunk = 4096;
    static constexpr unsigned char zeros[chunk] = {};
    const auto* from = reinterpret_cast<const unsigned char*>(other.data());
    auto* to = reinterpret_cast<unsigned char*>(data());
    for (size at = 0; at < bytes(); at += chunk) {
      const size count = detail::smaller(chunk, bytes() - at);
      if (std::memcmp(from + at, zeros, count) != 0) std::memcpy(to + at, from + at, count);
    }
  }

  size page_size_ = 0, width_ = 0;
  detail::OwnedSize slots_, blocks_;
  std::unique_ptr<void, Free> memory_;
  std::vector<id> table_;
  std::vector<size> lengths_;
};

namespace detail {

/// Latent caches hold keys as they are; a rotated one would need each position's own.
template <mla_geometry G>
void require_nope(G g, const char* operation) {
  check(g, operation);
  if constexpr (requires { g.mla_use_nope; })
    require(g.mla_use_nope, operation, "geometry.mla_use_nope", false, "true: a latent cache holds unrotated keys");
}

/// Throws unless `kv` is a cache of this geometry.
template <mla_geometry G, class T>
void check_mla_kv(const char* operation, G g, const MlaKvView<T>& kv) {
  require(kv.page_size > 0, operation, "kv.page_size", kv.page_size, "at least 1");
  require_shape(operation, "kv.pages", kv.pages, kv.pages.extents[0], kv.page_size, mla_cache_width(g));
  require_shape(operation, "kv.block_table", kv.block_table, kv.slots(), kv.block_table.extents[1]);
}

/// Throws unless every row that is no padding has a slot and a position of the cache, the rows of one slot follow each
/// other, and the pages of the blocks [first_block(position), position's own] exist.
template <class Slots, class Positions, class T, class FirstBlock>
void check_mla_rows(const char* operation, const Slots& slots, const Positions& positions, const MlaKvView<T>& kv,
                    FirstBlock&& first_block) {
  const size rows = slots.extents[0];
  require_shape(operation, "slots", slots, rows);
  require_shape(operation, "positions", positions, rows);
  // Texts are made only where they are thrown: a decode step must not allocate.
  const auto refuse = [&](const char* argument, size r, auto found, const std::string& expected) {
    throw invalid_argument(operation, std::string(argument) + "[" + std::to_string(r) + "]", text_of(found), expected);
  };
  for (size r = 0; r < rows; ++r) {
    if (slots[r] == pad_slot) continue;
    if (slots[r] < 0 || static_cast<size>(slots[r]) >= kv.slots())
      refuse("slots", r, slots[r], "pad_slot or below " + std::to_string(kv.slots()));
    const size slot = static_cast<size>(slots[r]), position = static_cast<size>(positions[r]);
    if (position >= kv.capacity())
      refuse("positions", r, positions[r],
             "below the capacity of " + std::to_string(kv.capacity()) + " positions (cache full)");
    size earlier = r;
    while (earlier > 0 && slots[earlier - 1] != slots[r]) --earlier;
    if (earlier > 0 && position != static_cast<size>(positions[earlier - 1]) + 1)
      refuse("positions", r, positions[r],
             "one more than " + std::to_string(positions[earlier - 1]) + ", the slot's row before it");
    for (size block = first_block(position); block <= position / kv.page_size; ++block) {
      const id page = kv.block_table(slot, block);
      if (page < 0 || static_cast<size>(page) >= kv.pages.extents[0])
        refuse("kv.block_table of row ", r, page, "a page below " + std::to_string(kv.pages.extents[0]));
    }
  }
}

}  // namespace detail

}  // namespace k3
