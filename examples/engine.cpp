// SPDX-License-Identifier: Apache-2.0

#include "engine.hpp"

#include "cuda_backend.hpp"

namespace {

template <class P>
struct HostDecoder {
  k3::Decoder<P> decoder;
};

/// Owns the decoder that the engine refers to; the base comes first so that it is there in time.
template <class P>
class HostEngine : HostDecoder<P>, public EngineOf<k3::Decoder<P>, k3::HybridCache<P>> {
 public:
  HostEngine(const k3::K3CpuModel& model, const EngineOptions& options)
      : HostDecoder<P>{{k3::host{options.threads}, model, options.rows, 1, k3::Ablation::from_env()}},
        EngineOf<k3::Decoder<P>, k3::HybridCache<P>>(this->decoder, this->decoder.make_cache(1, options.capacity)) {}
};

}  // namespace

std::unique_ptr<Engine> make_engine(const k3::K3CpuModel& model, const EngineOptions& options,
                                    const MoveProgress& progress) {
  if (options.backend == "cuda") return make_cuda_engine(model, options, progress);
  if (options.precision == "fp64") return std::make_unique<HostEngine<k3::Fp64>>(model, options);
  if (options.precision == "bf16") return std::make_unique<HostEngine<k3::Bf16>>(model, options);
  return std::make_unique<HostEngine<k3::Fp32>>(model, options);
}
