// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include <k3/core/types.hpp>

namespace k3 {

/// How experts are streamed.
struct StreamingOptions {
  size memory = 0;                  ///< bytes for experts; at least those of one token's, rounded down to whole experts
  int readers = most_readers();     ///< threads that read, and so reads in flight
  size read_bytes = size{9} << 15;  ///< longest read: an expert of the released model is 60
  /// Where not 0: so many slots instead of `memory`, and no floor, for a user that holds fewer at a time. A window for
  /// a GPU to copy from: small enough to stay in the processor's cache, which makes copies one and a half times as
  /// fast, and at least 4 for each K3DeviceModel that streams from it, which keeps them between its layers.
  size window = 0;
  /// Where the memory comes from, page-locked memory for a GPU to copy from; null: the heap. May give null.
  std::function<std::shared_ptr<std::byte>(size bytes)> allocate{};

  /// 8 to 16. Two processors are left to others where there are so many: a reader that has to wait for one holds up all
  /// that wait for its expert.
  static int most_readers() {
    const unsigned processors = std::thread::hardware_concurrency();
    return processors < 10 ? 8 : processors < 18 ? static_cast<int>(processors) - 2 : 16;
  }
};

/// What streaming did so far. A use is a miss where the expert had to be read for it.
struct StreamingStatistics {
  std::uint64_t hits = 0, misses = 0, bytes_read = 0;

  double hit_rate() const {
    return hits + misses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(hits + misses);
  }
};

}  // namespace k3
