// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>

#include <k3/cuda/buffer.cuh>

namespace k3 {

/// Page-locked host memory, which copies to and from the device need in order not to wait.
template <class T>
class PinnedBuffer {
 public:
  explicit PinnedBuffer(size count) {
    const size bytes = detail::checked_product("PinnedBuffer", "count", count ? count : 1, sizeof(T));
    const cudaError_t code = cudaMallocHost(reinterpret_cast<void**>(&data_), bytes);
    detail::check_cuda("PinnedBuffer", ("cudaMallocHost of " + std::to_string(bytes) + " bytes").c_str(), code);
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer() { detail::ignore_cuda(cudaFreeHost(data_)); }

  T* data() { return data_; }
  T& operator[](size i) { return data_[i]; }
  const T& operator[](size i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
};

/// Page-locked host memory that is shared, such as for StreamingOptions::allocate; null where the system does not give
/// it.
inline std::shared_ptr<std::byte> pinned_memory(size bytes) {
  // In large pages where there are such: they are locked five times as fast.
  constexpr size page = size{2} << 20;
  const size whole = (bytes + page - 1) / page * page;
  if (void* const large = bytes < page ? nullptr : std::aligned_alloc(page, whole)) {
    ::madvise(large, whole, MADV_HUGEPAGE);
    const cudaError_t code = cudaHostRegister(large, whole, cudaHostRegisterPortable);
    if (code == cudaSuccess)
      return {static_cast<std::byte*>(large), [](std::byte* old) {
                detail::ignore_cuda(cudaHostUnregister(old));
                std::free(old);
              }};
    detail::ignore_cuda(code);
    std::free(large);
  }
  void* memory = nullptr;
  const cudaError_t code = cudaMallocHost(&memory, bytes ? bytes : 1);
  detail::ignore_cuda(code);
  if (code != cudaSuccess) return nullptr;
  return {static_cast<std::byte*>(memory), [](std::byte* old) { detail::ignore_cuda(cudaFreeHost(old)); }};
}

}  // namespace k3
