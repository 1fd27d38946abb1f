// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#include <k3/io/safetensors_set.hpp>

namespace k3::bench {

template <class Body>
double seconds_of(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Asks the system to forget what it has of the files in memory.
inline void drop_cached_pages(const Safetensors& files) {
  for (const MappedFile& file : files.files()) {
    const int descriptor = ::open(file.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) continue;
    ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    ::close(descriptor);
  }
}

/// All files from end to end in reads of 8 MB by `threads` threads; GB/s.
inline double plain_reads(const Safetensors& files, int threads) {
  constexpr size block = size{8} << 20;
  std::vector<std::pair<const MappedFile*, size>> blocks;
  size total = 0;
  for (const MappedFile& file : files.files()) {
    total += file.bytes();
    for (size at = 0; at < file.bytes(); at += block) blocks.emplace_back(&file, at);
  }
  std::atomic<size> next{0};
  const auto work = [&] {
    std::vector<std::byte> buffer(block);
    for (size i; (i = next++) < blocks.size();) {
      const auto& [file, at] = blocks[i];
      const size end = detail::smaller(at + block, file->bytes());
      if (file->read(at, end, buffer.data()).at != end) std::abort();
    }
  };
  const double seconds = seconds_of([&] {
    std::vector<std::thread> readers;
    for (int i = 0; i < threads; ++i) readers.emplace_back(work);
    for (std::thread& reader : readers) reader.join();
  });
  return static_cast<double>(total) / seconds / 1e9;
}

}  // namespace k3::bench
