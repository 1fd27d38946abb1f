// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <k3/cuda/pinned_buffer.cuh>
#include <k3/cuda/stream.cuh>

namespace k3 {

/// Reads weights that lie in memory.
struct CopyWeights {
  void operator()(const void* from, size bytes, std::byte* to) const { __builtin_memcpy(to, from, bytes); }
};

namespace detail {

/// Large amounts of host memory to the device. Pieces of it go through a few places in page-locked memory: several
/// threads read the parts of a piece, through `read(from, bytes, to)`, the last of them has it copied, and meanwhile
/// the next piece is read to the next place. The places are small enough to stay in the processor's cache, the pieces
/// large enough for the rate of large copies.
class DeviceUpload {
 public:
  static constexpr size piece_bytes = size{4} << 20, part_bytes = size{1} << 19;

  /// `read` is called by several threads, and must live as long.
  template <class Read>
  explicit DeviceUpload(const Read& read)
      : reader_(&read), read_([](const void* reader, const void* from, size bytes, std::byte* to) {
          (*static_cast<const Read*>(reader))(from, bytes, to);
        }) {}

  /// To be copied by the next `flush`; until then `from` must stay.
  void add(void* to, const void* from, size bytes) {
    bytes_ += bytes;
    for (size at = 0; at < bytes; at += piece_bytes)
      pieces_.push_back({static_cast<std::byte*>(to) + at, static_cast<const std::byte*>(from) + at,
                         smaller(piece_bytes, bytes - at)});
  }
  /// Bytes to be copied.
  size bytes() const { return bytes_; }

  /// Returns when all is there. Throws what a read threw, or cuda_error; nothing is left waiting then. Meanwhile
  /// `arrived(bytes)` hears from this thread how many of them are there, at the end all; it may throw too.
  template <class Arrived>
  void flush(Arrived&& arrived) {
    try {
      bytes_ < piece_bytes ? copy_at_once() : copy_in_threads(arrived);
      arrived(bytes_);
    } catch (...) {
      clear();
      throw;
    }
    clear();
  }
  void flush() {
    flush([](size) {});
  }

 private:
  struct Piece {
    std::byte* to;
    const std::byte* from;
    size bytes;
  };
  struct Place {
    enum class State { free, filling, copying } state = State::free;
    size piece = 0, unread = 0;  // bytes of it
    DeviceEvent copied{DeviceEvent::Wait::sleeping};
  };
  struct Part {
    size place, offset, bytes;
  };
  static constexpr size place_count = 8;

  void clear() {
    pieces_.clear();
    bytes_ = 0;
  }

  void copy_at_once() {
    std::vector<std::byte> bytes;
    for (const Piece& p : pieces_) {
      bytes.resize(larger(bytes.size(), p.bytes));
      read_(reader_, p.from, p.bytes, bytes.data());
      check_cuda("DeviceUpload", "cudaMemcpy", cudaMemcpy(p.to, bytes.data(), p.bytes, cudaMemcpyHostToDevice));
    }
    // A copy from pageable memory may return before it has landed; a kernel on another stream must not overtake it.
    check_cuda("DeviceUpload", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  }

  template <class Arrived>
  void copy_in_threads(Arrived&& arrived) {
    if (places_.empty()) {
      staging_ = pinned_memory(place_count * piece_bytes);
      if (!staging_) throw cuda_error("DeviceUpload", "cudaMallocHost", cudaErrorMemoryAllocation, "no memory");
      check_cuda("DeviceUpload", "cudaGetDevice", cudaGetDevice(&device_));
      places_ = std::vector<Place>(place_count);
    }
    for (Place& place : places_) place.state = Place::State::free;
    next_ = offset_ = arrived_ = 0;
    problem_ = nullptr;
    std::vector<std::thread> threads;
    const unsigned cores = std::thread::hardware_concurrency();
    const size count = smaller<size>(larger(cores, 2u) - 1, 16);
    try {
      for (size i = 1; i < count; ++i) threads.emplace_back([this] { work([](size) {}); });
    } catch (const std::exception&) {  // no more threads: those that are there do it
    }
    work(arrived);
    for (std::thread& thread : threads) thread.join();
    if (!problem_) return stream_.finish();
    stream_.finish_quietly();
    std::rethrow_exception(problem_);
  }

  template <class Arrived>
  void work(Arrived&& arrived) noexcept {
    std::unique_lock lock(mutex_);
    try {
      check_cuda("DeviceUpload", "cudaSetDevice", cudaSetDevice(device_));
      Part part;
      while (take(lock, part)) {
        Place& place = places_[part.place];
        const Piece& piece = pieces_[place.piece];
        std::byte* const at = staging_.get() + part.place * piece_bytes;
        const size there = arrived_;
        lock.unlock();
        arrived(there);
        read_(reader_, piece.from + part.offset, part.bytes, at + part.offset);
        lock.lock();
        if ((place.unread -= part.bytes) > 0) continue;
        check_cuda("DeviceUpload", "cudaMemcpyAsync",
                   cudaMemcpyAsync(piece.to, at, piece.bytes, cudaMemcpyHostToDevice, stream_));
        place.copied.record(stream_);
        place.state = Place::State::copying;
        changed_.notify_all();
      }
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      if (!problem_) problem_ = std::current_exception();
      changed_.notify_all();
    }
  }

  /// The next part to be read, once its place is free; false: there is none, or somebody has failed.
  bool take(std::unique_lock<std::mutex>& lock, Part& part) {
    for (;;) {
      if (problem_ || next_ == pieces_.size()) return false;
      const size p = next_ % place_count, piece = next_;
      Place& place = places_[p];
      if (offset_ == 0 && place.state == Place::State::filling) {
        changed_.wait(lock);
        continue;
      }
      if (offset_ == 0 && place.state == Place::State::copying) {
        lock.unlock();
        place.copied.wait();
        lock.lock();
        if (next_ == piece && offset_ == 0 && place.state == Place::State::copying) {
          place.state = Place::State::free;
          arrived_ += pieces_[place.piece].bytes;
        }
        continue;
      }
      if (offset_ == 0) place.state = Place::State::filling, place.piece = next_, place.unread = pieces_[next_].bytes;
      part = {p, offset_, smaller(part_bytes, pieces_[next_].bytes - offset_)};
      offset_ += part.bytes;
      if (offset_ == pieces_[next_].bytes) ++next_, offset_ = 0;
      return true;
    }
  }

  const void* reader_;
  void (*read_)(const void* reader, const void* from, size bytes, std::byte* to);
  std::vector<Piece> pieces_;
  size bytes_ = 0;
  int device_ = 0;
  std::vector<Place> places_;
  std::shared_ptr<std::byte> staging_;  // [places, piece_bytes]
  DeviceStream stream_;

  std::mutex mutex_;
  std::condition_variable changed_;  // a place is being copied, or somebody has failed
  size next_ = 0, offset_ = 0;       // what is read next
  size arrived_ = 0;                 // bytes whose copies are known to be done
  std::exception_ptr problem_;
};

}  // namespace detail
}  // namespace k3
