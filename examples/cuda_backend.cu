// SPDX-License-Identifier: Apache-2.0

#include <k3/k3.cuh>

#include "cuda_backend.hpp"

namespace {

struct Stream {
  cudaStream_t stream = nullptr;
  Stream() {
    k3::detail::check_cuda("make_cuda_engine", "cudaStreamCreate",
                           cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
};

template <class P>
struct DeviceParts {
  Stream stream;
  k3::K3DeviceModel model;
  k3::DeviceDecoder<P> decoder;

  DeviceParts(const k3::K3CpuModel& host_model, const EngineOptions& options, const MoveProgress& progress)
      : model(host_model, progress),
        decoder(k3::gpu{stream.stream}, model, options.capacity, options.rows, 1, k3::Ablation::from_env()) {}
};

/// Owns what the engine refers to; the base comes first so that it is there in time.
template <class P>
class DeviceEngine : DeviceParts<P>, public EngineOf<k3::DeviceDecoder<P>, k3::DeviceHybridCache<P>> {
 public:
  DeviceEngine(const k3::K3CpuModel& model, const EngineOptions& options, const MoveProgress& progress)
      : DeviceParts<P>(model, options, progress),
        EngineOf<k3::DeviceDecoder<P>, k3::DeviceHybridCache<P>>(this->decoder,
                                                                 this->decoder.make_cache(1, options.capacity)) {}
};

}  // namespace

bool cuda_backend_built() { return true; }

std::unique_ptr<Engine> make_cuda_engine(const k3::K3CpuModel& model, const EngineOptions& options,
                                         const MoveProgress& progress) {
  if (options.precision == "bf16") return std::make_unique<DeviceEngine<k3::Bf16>>(model, options, progress);
  return std::make_unique<DeviceEngine<k3::Fp32>>(model, options, progress);
}
