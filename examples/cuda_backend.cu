// SPDX-License-Identifier: Apache-2.0

#include <k3/k3.cuh>

#include "cuda_backend.hpp"

namespace {

struct Stream {
  cudaStream_t stream = nullptr;
  Stream() { k3::detail::check_cuda("decode_on_cuda", "cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream)); }
};

template <class P>
k3::GreedyResult<float> decode(cudaStream_t stream, const k3::K3DeviceModel& model, const std::vector<k3::id>& prompt,
                               const k3::GreedyOptions& options, const std::function<void(k3::id)>& on_token) {
  const std::size_t capacity = prompt.size() + options.max_new;
  k3::DeviceDecoder<P> decoder(k3::gpu{stream}, model, capacity, std::min<std::size_t>(32, prompt.size()), 1, k3::Ablation::from_env());
  k3::DeviceHybridCache<P> cache = decoder.make_cache(1, capacity);
  return k3::greedy_decode(decoder, cache, 0, k3::view(prompt), options, on_token);
}

}  // namespace

bool cuda_backend_built() { return true; }

k3::GreedyResult<float> decode_on_cuda(const k3::K3CpuModel& model, const std::vector<k3::id>& prompt,
                                       const k3::GreedyOptions& options, bool half,
                                       const std::function<void(k3::id)>& on_token,
                                       const std::function<void(std::size_t, std::size_t)>& progress) {
  const Stream stream;
  const k3::K3DeviceModel moved(model, progress);
  return half ? decode<k3::Bf16>(stream.stream, moved, prompt, options, on_token)
              : decode<k3::Fp32>(stream.stream, moved, prompt, options, on_token);
}
