// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/execution.cuh>

namespace k3::test {

/// A stream of its own that does not wait for the default one.
class Stream {
 public:
  Stream() {
    detail::check_cuda("Stream", "cudaStreamCreateWithFlags",
                       cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  operator cudaStream_t() const { return stream_; }
  void wait() const { detail::check_cuda("Stream", "cudaStreamSynchronize", cudaStreamSynchronize(stream_)); }
  bool capturing() const {
    cudaStreamCaptureStatus status{};
    detail::check_cuda("Stream", "cudaStreamIsCapturing", cudaStreamIsCapturing(stream_, &status));
    return status != cudaStreamCaptureStatusNone;
  }

 private:
  cudaStream_t stream_ = nullptr;
};

/// The graph of what `work` puts on the stream; the caller destroys it. What `work` throws goes on when the capture has
/// been ended, so that the stream can be used again.
template <class Work>
cudaGraph_t captured(const Stream& stream, Work&& work) {
  cudaGraph_t graph = nullptr;
  detail::check_cuda("captured", "cudaStreamBeginCapture", cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  try {
    work();
  } catch (...) {
    detail::ignore_cuda(cudaStreamEndCapture(stream, &graph));
    if (graph) detail::ignore_cuda(cudaGraphDestroy(graph));
    throw;
  }
  detail::check_cuda("captured", "cudaStreamEndCapture", cudaStreamEndCapture(stream, &graph));
  return graph;
}

/// Captures what `work` puts on the stream and replays it `times` times, waiting for the last; `before` runs before
/// each replay.
template <class Work, class Before>
void replay(const Stream& stream, int times, Work&& work, Before&& before) {
  const cudaGraph_t graph = captured(stream, work);
  cudaGraphExec_t exec = nullptr;
  detail::check_cuda("replay", "cudaGraphInstantiate", cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < times; ++i) {
    before();
    detail::check_cuda("replay", "cudaGraphLaunch", cudaGraphLaunch(exec, stream));
    stream.wait();
  }
  detail::check_cuda("replay", "cudaGraphExecDestroy", cudaGraphExecDestroy(exec));
  detail::check_cuda("replay", "cudaGraphDestroy", cudaGraphDestroy(graph));
}

}  // namespace k3::test
