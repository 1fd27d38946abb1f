// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <k3/cuda/execution.cuh>

namespace k3 {

/// A stream of its own that does not wait for the default stream. Moves, does not copy. Using one that was moved from
/// throws invalid_argument: CUDA would take it for the default stream.
class DeviceStream {
 public:
  DeviceStream() {
    detail::check_cuda("DeviceStream", "cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  DeviceStream(DeviceStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  DeviceStream& operator=(DeviceStream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~DeviceStream() {
    if (stream_) detail::ignore_cuda(cudaStreamDestroy(stream_));
  }

  operator cudaStream_t() const {
    detail::require(stream_ != nullptr, "DeviceStream", "the stream", "moved from", "one that was not");
    return stream_;
  }

  /// Waits until all that was put on the stream is done; throws what of it failed.
  void finish() const {
    const detail::BesideCaptures beside;
    detail::check_cuda("DeviceStream", "cudaStreamSynchronize", cudaStreamSynchronize(*this));
  }
  /// As finish, behind another error.
  void finish_quietly() const noexcept {
    const detail::BesideCaptures beside;
    if (stream_) detail::ignore_cuda(cudaStreamSynchronize(stream_));
  }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A point in a stream's work, for other streams and the host to wait for. Moves, does not copy.
class DeviceEvent {
 public:
  enum class Wait { spinning, sleeping };

  /// How the host waits: spinning is sooner, sleeping leaves the processor to others.
  explicit DeviceEvent(Wait how = Wait::spinning) {
    const unsigned flags = cudaEventDisableTiming | (how == Wait::sleeping ? cudaEventBlockingSync : 0u);
    detail::check_cuda("DeviceEvent", "cudaEventCreate", cudaEventCreateWithFlags(&event_, flags));
  }
  DeviceEvent(DeviceEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  DeviceEvent& operator=(DeviceEvent&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~DeviceEvent() {
    if (event_) detail::ignore_cuda(cudaEventDestroy(event_));
  }

  /// The point is now behind all that `stream` was given.
  void record(cudaStream_t stream) const {
    detail::check_cuda("DeviceEvent", "cudaEventRecord", cudaEventRecord(event_, stream));
  }
  /// What `stream` is given from here on begins behind the point.
  void make_wait(cudaStream_t stream) const {
    detail::check_cuda("DeviceEvent", "cudaStreamWaitEvent", cudaStreamWaitEvent(stream, event_, 0));
  }
  /// The host waits.
  void wait() const {
    const detail::BesideCaptures beside;
    detail::check_cuda("DeviceEvent", "cudaEventSynchronize", cudaEventSynchronize(event_));
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace k3
