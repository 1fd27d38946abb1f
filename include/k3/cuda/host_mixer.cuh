// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/device_hybrid_cache.cuh>
#include <k3/cuda/device_workspace.cuh>
#include <k3/cuda/linear.cuh>
#include <k3/model/kda_layer.hpp>
#include <k3/model/mla_layer.hpp>

namespace k3::detail {

/// The mixer of a layer on the host, for K3_CUDA_KDA=0 and K3_CUDA_MLA=0: normed input and stream come over, the host's layer
/// runs on the host's weights and cache, and the stream goes back. It allocates and waits; a fallback, not a fast path.
template <precision P, decoder_geometry G>
void host_mixer(const gpu& exec, G g, const K3CpuModel& model, size layer, DeviceLayerCache<P>& cache, size rows,
                DeviceWorkspace<P>& work, const Ablation& ablation, const LinearAddOptions<typename P::activation>& add) {
  using Activation = typename P::activation;
  using Acc = typename P::accumulator;
  const size hidden = g.hidden, count = rows * hidden;
  check_cuda("host_mixer", "cudaStreamSynchronize", cudaStreamSynchronize(exec.stream));
  std::vector<Activation> normed(count), stream(count), part(count);
  work.normed.copy_to(normed.data(), 0, count);
  work.stream.copy_to(stream.data(), 0, count);
  if (add.snapshot.data)
    check_cuda("host_mixer", "cudaMemcpy", cudaMemcpy(add.snapshot.data, stream.data(), count * sizeof(Activation), cudaMemcpyHostToDevice));
  const HostView<const Activation, 2> x = view(static_cast<const Activation*>(normed.data()), rows, hidden);
  const HostView<const id, 1> slots = view(static_cast<const id*>(work.host_slots.data()), rows);
  const LayerWeights& weights = model.weights.layers[layer];
  if (auto* state = std::get_if<typename DeviceHybridCache<P>::HostKda>(&cache)) {
    KdaWorkspace<P> scratch(g.kda, rows);
    kda_layer<P>(host{}, g.kda, weights.kda, g.rms_norm_eps, x, slots, ablation, state->view(), scratch, view(part.data(), rows, hidden));
  } else {
    MlaLayerWorkspace<P> scratch(g.mla, rows);
    auto& kv = std::get<typename DeviceHybridCache<P>::HostMla>(cache);
    mla_layer<P>(host{}, g.mla, weights.mla, x, slots, view(static_cast<const size*>(work.host_positions.data()), rows), ablation,
                 kv.view(), scratch, view(part.data(), rows, hidden));
  }
  for (size i = 0; i < count; ++i)
    stream[i] = add.replace ? part[i] : static_cast<Activation>(static_cast<Acc>(stream[i]) + static_cast<Acc>(part[i]));
  work.stream.copy_from(stream.data(), 0, count);
}

}  // namespace k3::detail
