// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include <k3/core/environment.hpp>
#include <k3/cuda/kda_device_state.cuh>
#include <k3/cuda/mla_device_kv.cuh>
#include <k3/model/hybrid_cache.hpp>

namespace k3 {

/// One layer's cache for a decoder on the device: device memory, or host memory for a mixer that runs on the host
/// (K3_CUDA_KDA=0, K3_CUDA_MLA=0).
template <precision P>
using DeviceLayerCache =
    std::variant<KdaDeviceState<typename P::state, typename P::activation>, MlaDeviceKv<typename P::activation>,
                 KdaState<typename P::state, typename P::activation>, MlaKv<typename P::activation>>;

/// HybridCache in device memory: the same sequences, the same snapshots. A snapshot taken here opens on the host and
/// the other way round, byte for byte, in the same precision. Allocates when it is made and never again; snapshots and
/// resets wait for the stream, forward passes do not. The decoder that last used it must have been asked for its tokens
/// before that. A CUDA error in reset, restore or rollback leaves that slot's sequence interrupted.
template <precision P = Fp32>
class DeviceHybridCache {
 public:
  using Kda = KdaDeviceState<typename P::state, typename P::activation>;
  using Mla = MlaDeviceKv<typename P::activation>;
  using HostKda = KdaState<typename P::state, typename P::activation>;
  using HostMla = MlaKv<typename P::activation>;

  /// Throws invalid_argument as HybridCache does, cuda_error with what is needed and what is free where the memory is
  /// not there; nothing is allocated then.
  DeviceHybridCache(cudaStream_t stream, const K3Graph& graph, const KdaConfig& kda, const MlaConfig& mla, size slots,
                    size capacity, const Environment& switches = environment())
      : stream_(stream),
        capacity_(capacity),
        shapes_(detail::layer_shapes(graph, kda, mla)),
        sequences_(slots),
        identity_(next_identity()) {
    detail::require(capacity > 0, "DeviceHybridCache", "capacity", capacity, "at least 1 position");
    detail::require_free(
        "DeviceHybridCache",
        std::to_string(slots) + " sequence(s) of up to " + std::to_string(capacity) + " positions need",
        bytes_needed(graph, kda, mla, slots, capacity, switches));
    layers_.reserve(graph.layers.size());
    for (const K3LayerSpec& layer : graph.layers) {
      const bool on_device = layer.mixer == MixerKind::Kda ? switches.cuda_kda : switches.cuda_mla;
      on_host_ = on_host_ || !on_device;
      if (layer.mixer == MixerKind::Kda && on_device)
        layers_.emplace_back(std::in_place_type<Kda>, kda, slots);
      else if (layer.mixer == MixerKind::Kda)
        layers_.emplace_back(std::in_place_type<HostKda>, kda, slots);
      else if (on_device)
        layers_.emplace_back(std::in_place_type<Mla>, mla, slots, capacity);
      else
        layers_.emplace_back(std::in_place_type<HostMla>, mla, slots, capacity);
    }
  }

  /// Bytes of the states and latents that such a cache keeps on the device; block tables and what CUDA rounds up come
  /// to it. Throws invalid_argument where they do not fit 64 bits.
  static size bytes_needed(const K3Graph& graph, const KdaConfig& kda, const MlaConfig& mla, size slots, size capacity,
                           const Environment& switches = environment()) {
    K3Graph resident = graph;
    std::erase_if(resident.layers, [&](const K3LayerSpec& layer) {
      return layer.mixer == MixerKind::Kda ? !switches.cuda_kda : !switches.cuda_mla;
    });
    return HybridCache<P>::bytes_needed(resident, kda, mla, slots, capacity);
  }

  size layers() const { return layers_.size(); }
  /// What the layers keep; a decoder compares it with its model's.
  const std::vector<detail::LayerShape>& shapes() const { return shapes_; }
  size slots() const { return sequences_.slots(); }
  size capacity() const { return capacity_; }
  size position(size slot) const { return sequences_[slot].position; }
  RowStatus status(size slot) const { return sequences_[slot].status; }
  /// Whether a mixer runs on the host; a step is then not captured.
  bool on_host() const { return on_host_; }
  /// Tells caches apart for as long as the process runs, as an address would not.
  size identity() const { return identity_; }

  DeviceLayerCache<P>& layer(size index) { return layers_[index]; }

  /// Makes the slot that of a new, empty sequence.
  void reset(size slot) {
    sequences_.invalidate(slot, RowStatus::interrupted);
    for (DeviceLayerCache<P>& layer : layers_) {
      if (Kda* state = std::get_if<Kda>(&layer)) state->reset(slot, stream_);
      if (HostKda* state = std::get_if<HostKda>(&layer)) state->reset(slot);
    }
    wait();
    sequences_.replace(slot, 0);
  }
  /// What a step makes of a slot; for decoders.
  void advance(size slot, size tokens) { sequences_.advance(slot, tokens); }
  void invalidate(size slot, RowStatus status) { sequences_.invalidate(slot, status); }

  CacheSnapshot<P> snapshot(size slot) const;
  /// Replaces the slot's sequence; throws invalid_argument, changing nothing, for another geometry or too long a
  /// sequence.
  void restore(size slot, const CacheSnapshot<P>& snapshot);
  std::vector<unsigned char> to_bytes(size slot) const { return snapshot(slot).to_bytes(); }
  void from_bytes(size slot, const std::vector<unsigned char>& bytes) {
    restore(slot, CacheSnapshot<P>::from_bytes(bytes.data(), bytes.size()));
  }

  /// As HybridCache's: the KDA states of now, to which this sequence can be set back.
  RollbackPoint<P> rollback_point(size slot) const {
    const SequenceTable::Sequence& s = sequences_.usable(slot, "DeviceHybridCache::rollback_point");
    RollbackPoint<P> point{slot, s.position, s.generation, {}};
    for (size index = 0; index < layers_.size(); ++index)
      if (is_kda(index)) point.kda_layers.push_back(layer_snapshot(index, slot, s.position));
    return point;
  }
  /// Sets the sequence back to a point of its own past. Throws invalid_argument, changing nothing, as
  /// HybridCache::rollback.
  void rollback(const RollbackPoint<P>& point) {
    sequences_.require_past(point.slot, point.generation, point.position, "DeviceHybridCache::rollback");
    detail::check_point("DeviceHybridCache::rollback", shapes_, point);
    sequences_.invalidate(point.slot, RowStatus::interrupted);
    size next = 0;
    for (size index = 0; index < layers_.size(); ++index)
      if (is_kda(index)) put(index, point.slot, point.position, point.kda_layers[next++]);
    sequences_.rewind(point.slot, point.position);
  }

 private:
  static size next_identity() {
    static std::atomic<size> count{0};
    return ++count;
  }
  void wait() const {
    const detail::BesideCaptures beside;
    detail::check_cuda("DeviceHybridCache", "cudaStreamSynchronize", cudaStreamSynchronize(stream_));
  }
  bool is_kda(size index) const { return shapes_[index].mixer == MixerKind::Kda; }

  LayerSnapshot<P> layer_snapshot(size index, size slot, size position) const {
    LayerSnapshot<P> result;
    const DeviceLayerCache<P>& layer = layers_[index];
    result.mixer = is_kda(index) ? MixerKind::Kda : MixerKind::Mla;
    if (const Kda* state = std::get_if<Kda>(&layer)) {
      auto values = state->download(slot, stream_);
      result.recurrent = std::move(values.recurrent);
      result.conv = std::move(values.conv);
    } else if (const HostKda* host = std::get_if<HostKda>(&layer)) {
      const auto recurrent = host->recurrent(slot);
      const auto conv = host->conv(slot);
      result.recurrent.assign(recurrent.data, recurrent.data + recurrent.elements());
      result.conv.assign(conv.data, conv.data + conv.elements());
    } else if (const Mla* kv = std::get_if<Mla>(&layer)) {
      result.latents.resize(position * kv->width());
      kv->download(slot, result.latents.data(), position, stream_);
    } else {
      const HostMla& host_kv = std::get<HostMla>(layer);
      for (size p = 0; p < position; ++p)
        result.latents.insert(result.latents.end(), host_kv.row(slot, p), host_kv.row(slot, p) + host_kv.width());
    }
    return result;
  }

  void put(size index, size slot, size position, const LayerSnapshot<P>& from) {
    DeviceLayerCache<P>& layer = layers_[index];
    if (Kda* state = std::get_if<Kda>(&layer)) {
      state->upload(slot, from.recurrent, from.conv, stream_);
    } else if (HostKda* host = std::get_if<HostKda>(&layer)) {
      for (size i = 0; i < from.recurrent.size(); ++i) host->recurrent(slot).data[i] = from.recurrent[i];
      for (size i = 0; i < from.conv.size(); ++i) host->conv(slot).data[i] = from.conv[i];
    } else if (Mla* kv = std::get_if<Mla>(&layer)) {
      kv->upload(slot, from.latents.data(), position, stream_);
    } else {
      HostMla& host_kv = std::get<HostMla>(layer);
      for (size i = 0; i < from.latents.size(); ++i)
        host_kv.row(slot, i / host_kv.width())[i % host_kv.width()] = from.latents[i];
    }
  }

  cudaStream_t stream_;
  size capacity_;
  std::vector<detail::LayerShape> shapes_;
  std::vector<DeviceLayerCache<P>> layers_;
  SequenceTable sequences_;
  size identity_;
  bool on_host_ = false;
};

template <precision P>
CacheSnapshot<P> DeviceHybridCache<P>::snapshot(size slot) const {
  CacheSnapshot<P> result;
  result.position = sequences_.usable(slot, "DeviceHybridCache::snapshot").position;
  for (size index = 0; index < layers_.size(); ++index)
    result.layers.push_back(layer_snapshot(index, slot, result.position));
  return result;
}

template <precision P>
void DeviceHybridCache<P>::restore(size slot, const CacheSnapshot<P>& snapshot) {
  static_cast<void>(sequences_[slot]);  // throws where there is no such slot
  detail::check_snapshot("DeviceHybridCache::restore", shapes_, capacity_, snapshot);
  sequences_.invalidate(slot, RowStatus::interrupted);
  for (size index = 0; index < layers_.size(); ++index) put(index, slot, snapshot.position, snapshot.layers[index]);
  sequences_.replace(slot, snapshot.position);
}

}  // namespace k3
