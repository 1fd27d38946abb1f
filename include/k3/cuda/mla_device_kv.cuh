// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/buffer.cuh>
#include <k3/ops/mla_kv.hpp>

namespace k3 {

/// MlaKv in device memory: the latent cache of one MLA layer for `slots` sequences of up to `capacity` positions, zero
/// at the start. Without a page size a slot is one page; with one, the capacity is rounded up to whole pages, page b of
/// slot s being s * blocks + b until a block table says otherwise. It allocates when it is made and never again. Copies
/// from and to the host are ordered after what `stream` holds and return when they are done. Moves, does not copy.
/// Bytes: slots * capacity * (kv_lora_rank + qk_rope_head_dim) * sizeof(T).
template <class T>
class MlaDeviceKv {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, bf16>, "the device's latent cache is float or bf16");

 public:
  MlaDeviceKv() = default;

  /// Throws invalid_argument as MlaKv does, cuda_error where the memory is not there.
  template <mla_geometry G>
  MlaDeviceKv(G geometry, size slots, size capacity, size page_size = 0)
      : page_size_(page_size ? page_size : capacity), slots_(slots), width_(mla_cache_width(geometry)) {
    check(geometry, "MlaDeviceKv");
    constexpr size most = size{1} << 31;
    detail::require(slots > 0 && slots < most, "MlaDeviceKv", "slots", slots, "between 1 and 2^31 - 1");
    detail::require(capacity > 0 && capacity < most, "MlaDeviceKv", "capacity", capacity, "between 1 and 2^31 - 1");
    detail::require(page_size_ < most, "MlaDeviceKv", "page_size", page_size_, "below 2^31");
    blocks_ = (capacity + page_size_ - 1) / page_size_;
    const size pages = detail::checked_product("MlaDeviceKv", "slots * blocks", slots_, blocks_);
    detail::require(pages < most, "MlaDeviceKv", "the number of pages", pages, "below 2^31");
    const size rows = detail::checked_product("MlaDeviceKv", "slots * capacity", pages, page_size_);
    data_ = DeviceBuffer<T>(detail::checked_product("MlaDeviceKv", "the cache's size", rows, width_));
    table_.resize(pages);
    for (size page = 0; page < pages; ++page) table_[page] = static_cast<id>(page);
    device_table_ = DeviceBuffer<id>(table_);
    lengths_.resize(slots_);
  }

  size slots() const { return slots_; }
  size capacity() const { return blocks_ * page_size_; }
  size page_size() const { return page_size_; }
  size width() const { return width_; }
  size bytes() const { return data_.bytes(); }

  /// What the operations take.
  MlaKvView<T, MemorySpace::device> view() const {
    return {data_.view(slots_ * blocks_, page_size_, width_),
            device_view(static_cast<const id*>(device_table_.data()), slots(), size{blocks_}), page_size_};
  }

  /// Another order of the pages: table [slots * blocks], each entry a page of this cache. Rows stay in their pages.
  /// Throws invalid_argument on a wrong length or page.
  void set_block_table(const std::vector<id>& table, cudaStream_t stream) {
    detail::require(table.size() == table_.size(), "MlaDeviceKv", "the block table's length", table.size(),
                    table_.size());
    for (const id page : table)
      detail::require(page >= 0 && static_cast<size>(page) < table_.size(), "MlaDeviceKv", "a page", page,
                      "one of the cache's");
    table_ = table;
    copy(device_table_.data(), table_.data(), table_.size(), stream);
    wait(stream);
  }

  /// The bookkeeping of MlaKv: for snapshots and resets; no operation reads or changes it.
  size length(size slot) const { return lengths_[checked_slot(slot)]; }
  void set_length(size slot, size length) {
    require_length(length);
    lengths_[checked_slot(slot)] = length;
  }
  void reset(size slot) { lengths_[checked_slot(slot)] = 0; }

  /// The first `count` rows of a slot from the host, [count, width]; and to the host. Throw invalid_argument where the
  /// slot or the rows are not there.
  void upload(size slot, const T* rows, size count, cudaStream_t stream) {
    each_page(slot, count, stream,
              [&](T* page, size first, size here) { copy(page, rows + first * width_, here * width_, stream); });
  }
  void download(size slot, T* rows, size count, cudaStream_t stream) const {
    each_page(slot, count, stream,
              [&](T* page, size first, size here) { copy(rows + first * width_, page, here * width_, stream); });
  }
  /// As above, with a slot of a host cache of the same width.
  void upload(size slot, const MlaKv<T>& from, size from_slot, size count, cudaStream_t stream) {
    require_same(from, from_slot, count);
    each_page(slot, count, stream, [&](T* page, size first, size here) {
      for (size i = 0; i < here; i += run(from, first + i, here - i))
        copy(page + i * width_, from.row(from_slot, first + i), run(from, first + i, here - i) * width_, stream);
    });
  }
  void download(size slot, MlaKv<T>& to, size to_slot, size count, cudaStream_t stream) const {
    require_same(to, to_slot, count);
    each_page(slot, count, stream, [&](T* page, size first, size here) {
      for (size i = 0; i < here; i += run(to, first + i, here - i))
        copy(to.row(to_slot, first + i), page + i * width_, run(to, first + i, here - i) * width_, stream);
    });
  }

 private:
  /// How many of `count` rows from `position` on lie one after the other in a host cache.
  static size run(const MlaKv<T>& host_kv, size position, size count) {
    return detail::smaller(count, host_kv.page_size() - position % host_kv.page_size());
  }

  /// f(first row in a page, its position, rows) until `count` rows are done; then waits.
  template <class F>
  void each_page(size slot, size count, cudaStream_t stream, F&& f) const {
    require_length(count);
    checked_slot(slot);
    for (size first = 0; first < count; first += page_size_) {
      const size page = static_cast<size>(table_[slot * blocks_ + first / page_size_]);
      f(data_.data() + page * page_size_ * width_, first, detail::smaller(page_size_, count - first));
    }
    wait(stream);
  }

  void require_same(const MlaKv<T>& other, size slot, size count) const {
    detail::require(other.width() == width_, "MlaDeviceKv", "the host cache's width", other.width(), width_);
    detail::require(slot < other.slots() && count <= other.capacity(), "MlaDeviceKv", "the host cache", "too small",
                    "the slot and its rows");
  }
  void require_length(size length) const {
    detail::require(length <= capacity(), "MlaDeviceKv", "length", length, "at most the capacity");
  }
  size checked_slot(size slot) const {
    detail::require(slot < slots_, "MlaDeviceKv", "slot", slot, "below the number of slots");
    return slot;
  }

  template <class U>
  static void copy(U* to, const U* from, size count, cudaStream_t stream) {
    const detail::BesideCaptures beside;
    detail::check_cuda("MlaDeviceKv", "cudaMemcpyAsync",
                       cudaMemcpyAsync(to, from, count * sizeof(U), cudaMemcpyDefault, stream));
  }
  static void wait(cudaStream_t stream) {
    const detail::BesideCaptures beside;
    detail::check_cuda("MlaDeviceKv", "cudaStreamSynchronize", cudaStreamSynchronize(stream));
  }

  size page_size_ = 0;
  detail::OwnedSize slots_, blocks_;
  size width_ = 0;
  DeviceBuffer<T> data_{};
  std::vector<id> table_;
  DeviceBuffer<id> device_table_{};
  std::vector<size> lengths_;
};

}  // namespace k3
