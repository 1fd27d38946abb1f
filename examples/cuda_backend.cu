// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include <k3/k3.cuh>

#include "cuda_backend.hpp"

namespace {

using Read = std::function<void(const void*, std::size_t, std::byte*)>;

Read reader(const EngineOptions& options) { return options.read ? options.read : Read(k3::CopyWeights{}); }

template <class P>
struct DeviceParts {
  k3::DeviceStream stream;
  k3::K3DeviceModel model;
  k3::DeviceDecoder<P> decoder;

  DeviceParts(const k3::K3CpuModel& host_model, const EngineOptions& options, const MoveProgress& progress)
      : model(k3::WithoutExperts{}, host_model, progress, reader(options)),
        decoder(k3::gpu{stream}, model, options.capacity, options.rows, 1, k3::Ablation::from_env()) {}
};

/// Owns what the engine refers to; the base comes first so that it is there in time. Experts come last, into the memory
/// that is left.
template <class P>
class DeviceEngine : DeviceParts<P>, public EngineOf<k3::DeviceDecoder<P>, k3::DeviceHybridCache<P>> {
 public:
  DeviceEngine(const k3::K3CpuModel& model, const EngineOptions& options, const MoveProgress& progress)
      : DeviceParts<P>(model, options, progress),
        EngineOf<k3::DeviceDecoder<P>, k3::DeviceHybridCache<P>>(this->decoder,
                                                                 this->decoder.make_cache(1, options.capacity)) {
    constexpr k3::size most = k3::K3DeviceModel::automatic - 1;
    const std::uint64_t memory = options.gpu_memory.value_or(most);
    this->model.place_experts(memory == EngineOptions::automatic ? k3::K3DeviceModel::automatic : memory, progress);
  }

  std::optional<ExpertUse> experts() const override {
    const k3::ExpertCache* const cache = this->model.expert_cache();
    if (!cache) return ExpertUse{};
    const k3::ExpertCacheStatistics s = cache->statistics();
    return ExpertUse{cache->slots(), cache->memory(), s.hits, s.misses, s.bytes_copied};
  }
};

}  // namespace

bool cuda_backend_built() { return true; }

std::string gpu_problem() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  k3::detail::ignore_cuda(code);
  if (code == cudaErrorNoDevice || (code == cudaSuccess && count == 0))
    return "no NVIDIA GPU can be seen here: see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES lets it through";
  if (code == cudaErrorInsufficientDriver)
    return "there is no NVIDIA driver here, or it is older than the CUDA version of this program: install one at least "
           "as new (nvidia-smi shows the version that a driver supports)";
  return code == cudaSuccess ? "" : k3::detail::cuda_description(code);
}

std::uint64_t gpu_expert_floor(const k3::K3CpuModel& model) {
  std::uint64_t largest = 0;
  for (const k3::LayerWeights& layer : model.weights.layers)
    if (layer.experts) largest = std::max<std::uint64_t>(largest, k3::detail::planned_bytes((*layer.experts)[0]));
  return model.config.moe.top_k * largest;
}

std::shared_ptr<std::byte> gpu_host_memory(std::size_t bytes) { return k3::pinned_memory(bytes); }

std::unique_ptr<Engine> make_cuda_engine(const k3::K3CpuModel& model, const EngineOptions& options,
                                         const MoveProgress& progress) {
  if (options.precision == "bf16") return std::make_unique<DeviceEngine<k3::Bf16>>(model, options, progress);
  return std::make_unique<DeviceEngine<k3::Fp32>>(model, options, progress);
}
