// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
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

/// Large amounts of host memory to the device. Threads read pieces of it, through `read(from, bytes, to)`, into
/// page-locked memory, each one while the device fetches its piece before. Little is copied at once.
class DeviceUpload {
 public:
  static constexpr size piece_bytes = size{1} << 20;

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

  /// Returns when all is there. Throws what a read threw, or cuda_error; nothing is left waiting then.
  void flush() {
    try {
      bytes_ < 4 * piece_bytes ? copy_at_once() : copy_in_threads();
    } catch (...) {
      clear();
      throw;
    }
    clear();
  }

 private:
  struct Piece {
    std::byte* to;
    const std::byte* from;
    size bytes;
  };
  /// What a thread has: two places for pieces, and what tells when one is free again.
  struct Lane {
    DeviceStream stream;
    DeviceEvent free[2] = {DeviceEvent(DeviceEvent::Wait::sleeping), DeviceEvent(DeviceEvent::Wait::sleeping)};
  };

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

  void copy_in_threads() {
    if (lanes_.empty()) {
      const unsigned cores = std::thread::hardware_concurrency();
      lanes_ = std::vector<Lane>(smaller(larger(cores, 2u), 16u));
      staging_ = pinned_memory(lanes_.size() * 2 * piece_bytes);
      if (!staging_) throw cuda_error("DeviceUpload", "cudaMallocHost", cudaErrorMemoryAllocation, "no memory");
      check_cuda("DeviceUpload", "cudaGetDevice", cudaGetDevice(&device_));
    }
    std::vector<std::exception_ptr> problems(lanes_.size());
    std::atomic<size> next{0};
    std::vector<std::thread> threads;
    const auto work = [&](size lane) {
      try {
        copy(lane, next);
      } catch (...) {
        problems[lane] = std::current_exception();
        next = pieces_.size();
      }
    };
    try {
      for (size lane = 1; lane < lanes_.size(); ++lane) threads.emplace_back(work, lane);
    } catch (const std::exception&) {  // no more threads: those that are there do it
    }
    work(0);
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& problem : problems)
      if (problem) std::rethrow_exception(problem);
  }

  void copy(size lane, std::atomic<size>& next) const {
    check_cuda("DeviceUpload", "cudaSetDevice", cudaSetDevice(device_));
    const Lane& own = lanes_[lane];
    size i, count = 0;
    try {
      for (; (i = next.fetch_add(1)) < pieces_.size(); ++count) {
        const Piece& p = pieces_[i];
        std::byte* const place = staging_.get() + (2 * lane + count % 2) * piece_bytes;
        if (count >= 2) own.free[count % 2].wait();
        read_(reader_, p.from, p.bytes, place);
        check_cuda("DeviceUpload", "cudaMemcpyAsync",
                   cudaMemcpyAsync(p.to, place, p.bytes, cudaMemcpyHostToDevice, own.stream));
        own.free[count % 2].record(own.stream);
      }
    } catch (...) {
      own.stream.finish_quietly();
      throw;
    }
    own.stream.finish();
  }

  const void* reader_;
  void (*read_)(const void* reader, const void* from, size bytes, std::byte* to);
  std::vector<Piece> pieces_;
  size bytes_ = 0;
  std::vector<Lane> lanes_;
  std::shared_ptr<std::byte> staging_;  // [lanes, 2, piece_bytes]
  int device_ = 0;
};

}  // namespace detail
}  // namespace k3
