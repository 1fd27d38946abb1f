// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>
#include <vector>

#include <k3/core/view.hpp>
#include <k3/cuda/execution.cuh>

namespace k3 {

namespace detail {

/// Device memory in bytes.
struct DeviceMemory {
  size free = 0, total = 0;
};
inline DeviceMemory device_memory(const char* operation) {
  DeviceMemory memory;
  check_cuda(operation, "cudaMemGetInfo", cudaMemGetInfo(&memory.free, &memory.total));
  return memory;
}

/// "F of T are free", in bytes.
inline std::string text(const DeviceMemory& memory) {
  return std::to_string(memory.free) + " of " + std::to_string(memory.total) + " are free";
}

/// Throws cuda_error where not that much is free: "`what` N bytes, F of T are free".
inline void require_free(const char* operation, const std::string& what, size bytes) {
  const DeviceMemory memory = device_memory(operation);
  if (bytes > memory.free)
    throw cuda_error(operation, "the memory plan", static_cast<int>(cudaErrorMemoryAllocation),
                     what + " " + std::to_string(bytes) + " bytes, " + text(memory));
}

/// Throws cuda_error unless `code` is cudaSuccess: "`call` of N bytes", and where there is no memory "F of T are free".
inline void check_allocation(const char* operation, const char* call, size bytes, cudaError_t code) {
  if (code == cudaSuccess) return;
  ignore_cuda(code);
  std::string description = cuda_description(code);
  if (code == cudaErrorMemoryAllocation) description += ", " + text(device_memory(operation));
  throw cuda_error(operation, std::string(call) + " of " + std::to_string(bytes) + " bytes", static_cast<int>(code),
                   description);
}

}  // namespace detail

/// Owns device memory for `count` elements, zero unless said otherwise. Moves, does not copy. Allocation and release
/// wait for the device: for set-up, never on the decode path. Throws cuda_error where there is no memory, with the size
/// and what is free.
template <class T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size count, bool zero = true) : count_(count) {
    if (count == 0) return;
    const size bytes = detail::checked_product("DeviceBuffer", "count", count, sizeof(T));
    detail::check_allocation("DeviceBuffer", "cudaMalloc", bytes, cudaMalloc(reinterpret_cast<void**>(&data_), bytes));
    if (zero) {
      // Ordered before everything later on any stream: a plain memset would only be ordered on the default one.
      detail::check_cuda("DeviceBuffer", "cudaMemset", cudaMemset(data_, 0, bytes));
      detail::check_cuda("DeviceBuffer", "cudaDeviceSynchronize", cudaDeviceSynchronize());
    }
  }
  /// The elements of a host vector.
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size(), false) {
    if (count_ > 0) copy_from(values.data(), 0, count_);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_) detail::ignore_cuda(cudaFree(data_));
  }

  T* data() const { return data_; }
  size count() const { return count_; }
  size bytes() const { return count_ * sizeof(T); }

  /// A dense view of the first elements.
  template <class... Extent>
  auto view(Extent... extent) const {
    return device_view(data_, static_cast<size>(extent)...);
  }

  /// Copies from and to host memory; both wait until the copy is done.
  void copy_from(const T* host_data, size first, size count) {
    detail::check_cuda("DeviceBuffer", "cudaMemcpy to the device",
                       cudaMemcpy(data_ + first, host_data, count * sizeof(T), cudaMemcpyHostToDevice));
    // A copy from pageable memory may return before it has landed; a kernel on another stream must not overtake it.
    detail::check_cuda("DeviceBuffer", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  }
  void copy_to(T* host_data, size first, size count) const {
    detail::check_cuda("DeviceBuffer", "cudaMemcpy to the host",
                       cudaMemcpy(host_data, data_ + first, count * sizeof(T), cudaMemcpyDeviceToHost));
  }
  std::vector<T> to_vector() const {
    std::vector<T> values(count_);
    if (count_ > 0) copy_to(values.data(), 0, count_);
    return values;
  }

 private:
  T* data_ = nullptr;
  size count_ = 0;
};

}  // namespace k3
