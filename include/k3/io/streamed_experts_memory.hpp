// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <new>
#include <string>

#include <k3/core/error.hpp>
#include <k3/io/expert_layout.hpp>
#include <k3/io/streamed_experts_options.hpp>

namespace k3::detail {

/// Memory for streamed experts: what `allocate` gives, or the heap.
class SlotMemory {
 public:
  SlotMemory() = default;
  /// Throws invalid_argument where there is none.
  SlotMemory(size bytes, const std::function<std::shared_ptr<std::byte>(size bytes)>& allocate) {
    if (bytes == 0) return;
    try {
      if (allocate)
        given_ = allocate(bytes);
      else
        heap_.reset(static_cast<std::byte*>(::operator new(bytes, alignment)));
    } catch (const std::bad_alloc&) {
    }
    if (!data())
      throw invalid_argument("StreamedExperts", "memory", std::to_string(bytes), "at most what the system gives");
  }

  std::byte* data() const { return given_ ? given_.get() : heap_.get(); }

 private:
  static constexpr std::align_val_t alignment{ExpertFileLayout::alignment};
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, alignment); }
  };

  std::unique_ptr<std::byte, Free> heap_;  // one of the two
  std::shared_ptr<std::byte> given_;
};

}  // namespace k3::detail
