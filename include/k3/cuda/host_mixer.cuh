// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/device_hybrid_cache.cuh>
#include <k3/cuda/device_workspace.cuh>
#include <k3/cuda/linear.cuh>
#include <k3/model/k3_cpu_model.hpp>
#include <k3/model/kda_layer.hpp>
#include <k3/model/mla_layer.hpp>

namespace k3::detail {

/// The mixer of layer `index` on the host, for K3_CUDA_KDA=0 and K3_CUDA_MLA=0: normed input and stream come over, the
/// host's layer runs on the host's weights and cache, and the stream goes back. It allocates and waits; a fallback, not
/// a fast path.
template <precision P, decoder_geometry G>
void host_mixer(const gpu& exec, G g, const K3CpuModel& model, size index, DeviceLayerCache<P>& cache, size rows,
                DeviceWorkspace<P>& work, const Ablation& ablation,
                const LinearAddOptions<typename P::activation>& add) {
  using Activation = typename P::activation;
  using Acc = typename P::accumulator;
  const size hidden = g.hidden, count = rows * hidden;
  const auto put = [&](Activation* to, const std::vector<Activation>& from) {
    if (to == nullptr) return;
    check_cuda("host_mixer", "cudaMemcpy", cudaMemcpy(to, from.data(), count * sizeof(Activation), cudaMemcpyDefault));
    // A copy from pageable memory may return before it has landed.
    check_cuda("host_mixer", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  };
  check_cuda("host_mixer", "cudaStreamSynchronize", cudaStreamSynchronize(exec.stream));
  std::vector<Activation> normed(count), stream(count), part(count);
  work.normed.copy_to(normed.data(), 0, count);
  work.stream.copy_to(stream.data(), 0, count);
  put(add.snapshot.data, stream);

  const auto x = view(static_cast<const Activation*>(normed.data()), rows, hidden);         // [R, hidden]
  const auto out = view(part.data(), rows, hidden);                                         // [R, hidden]
  const auto slots = view(static_cast<const id*>(work.host_slots.data()), rows);            // [R]
  const auto positions = view(static_cast<const size*>(work.host_positions.data()), rows);  // [R]
  const LayerWeights& weights = model.weights.layers[index];
  if (auto* state = std::get_if<typename DeviceHybridCache<P>::HostKda>(&cache)) {
    KdaWorkspace<P> scratch(g.kda, rows);
    kda_layer<P>(host{}, g.kda, weights.kda, g.rms_norm_eps, x, slots, ablation, state->view(), scratch, out);
  } else {
    MlaLayerWorkspace<P> scratch(g.mla, rows);
    auto& kv = std::get<typename DeviceHybridCache<P>::HostMla>(cache);
    mla_layer<P>(host{}, g.mla, weights.mla, x, slots, positions, ablation, kv.view(), scratch, out);
  }
  for (size i = 0; i < count; ++i)
    stream[i] =
        add.replace ? part[i] : static_cast<Activation>(static_cast<Acc>(stream[i]) + static_cast<Acc>(part[i]));
  put(work.stream.data(), stream);
  put(add.part.data, part);
}

}  // namespace k3::detail
