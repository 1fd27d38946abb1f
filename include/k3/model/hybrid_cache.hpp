// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>
#include <utility>
#include <variant>

#include <k3/model/cache_snapshot.hpp>
#include <k3/model/sequence_table.hpp>
#include <k3/ops/kda_state.hpp>
#include <k3/ops/mla_kv.hpp>

namespace k3 {

/// One layer's cache: the fixed-size state of a KDA layer or the growing latents of an MLA layer, for all slots.
template <precision P>
using LayerCache = std::variant<KdaState<typename P::state, typename P::activation>, MlaKv<typename P::activation>>;

/// The caches of all layers for `slots` sequences of up to `capacity` positions each. Memory, per slot: H*D*D state and
/// 3*H*D*(kernel-1) window elements a KDA layer, capacity * (kv_lora + rope) elements an MLA layer; nothing grows
/// later. Copying a HybridCache copies everything. Element types follow the precision.
template <precision P = Fp32>
class HybridCache {
 public:
  using Kda = KdaState<typename P::state, typename P::activation>;
  using Mla = MlaKv<typename P::activation>;

  /// Throws invalid_argument for sizes of zero or beyond 64 bits, out_of_memory with bytes_needed() where the system
  /// does not give that much.
  HybridCache(const K3Graph& graph, const KdaConfig& kda, const MlaConfig& mla, size slots, size capacity,
              size page_size = 0)
      : capacity_(capacity), shapes_(detail::layer_shapes(graph, kda, mla)), sequences_(slots) {
    detail::require(capacity > 0, "HybridCache", "capacity", capacity, "at least 1 position");
    const auto refuse = [&] {
      throw out_of_memory(
          "HybridCache",
          "a cache of " + std::to_string(slots) + " sequence(s) of up to " + std::to_string(capacity) + " positions",
          bytes_needed(graph, kda, mla, slots, capacity));
    };
    try {
      layers_.reserve(graph.layers.size());
      for (const K3LayerSpec& layer : graph.layers) {
        if (layer.mixer == MixerKind::Kda)
          layers_.emplace_back(std::in_place_type<Kda>, kda, slots);
        else
          layers_.emplace_back(std::in_place_type<Mla>, mla, slots, capacity, page_size);
      }
    } catch (const std::bad_alloc&) {
      refuse();
    } catch (const out_of_memory&) {
      refuse();
    }
  }
  static HybridCache from_graph(const K3Graph& graph, const KdaConfig& kda, const MlaConfig& mla, size slots,
                                size capacity) {
    return HybridCache(graph, kda, mla, slots, capacity);
  }

  /// Bytes of such a cache, without the rounding up to whole pages. Those of the latents (MLA) are taken from the
  /// system as positions are written. Throws invalid_argument where they do not fit 64 bits.
  static std::uint64_t bytes_needed(const K3Graph& graph, const KdaConfig& kda, const MlaConfig& mla, size slots,
                                    size capacity) {
    constexpr const char* operation = "HybridCache::bytes_needed";
    if (graph.kda_count() > 0) check(kda, operation);
    if (graph.mla_count() > 0) check(mla, operation);
    const auto times = [](size a, size b) { return detail::checked_product(operation, "the size", a, b); };
    const auto plus = [](size a, size b) {
      detail::require(a <= ~size{0} - b, operation, "the size", "too large", "a sum below 2^64");
      return a + b;
    };
    const auto of_layers = [&](size count, size each) { return times(times(count, each), slots); };
    const size state = plus(times(kda_state_elements(kda), sizeof(typename P::state)),
                            times(kda_conv_elements(kda), sizeof(typename P::activation)));
    const size latents = times(times(capacity, mla_cache_width(mla)), sizeof(typename P::activation));
    return plus(of_layers(graph.kda_count(), state), of_layers(graph.mla_count(), latents));
  }

  size layers() const { return layers_.size(); }
  /// What the layers keep; a decoder compares it with its model's.
  const std::vector<detail::LayerShape>& shapes() const { return shapes_; }
  size slots() const { return sequences_.slots(); }
  size capacity() const { return capacity_; }

  LayerCache<P>& layer(size index) { return layers_[index]; }
  const LayerCache<P>& layer(size index) const { return layers_[index]; }
  /// The KDA (MLA) cache of a layer, null where it is of the other kind or there is no such layer.
  Kda* kda_mut(size index) { return index < layers_.size() ? std::get_if<Kda>(&layers_[index]) : nullptr; }
  Mla* mla_mut(size index) { return index < layers_.size() ? std::get_if<Mla>(&layers_[index]) : nullptr; }
  const Kda* kda(size index) const { return index < layers_.size() ? std::get_if<Kda>(&layers_[index]) : nullptr; }
  const Mla* mla(size index) const { return index < layers_.size() ? std::get_if<Mla>(&layers_[index]) : nullptr; }

  /// Tokens that the sequence in `slot` has taken: the position of its next one.
  size position(size slot) const { return sequences_[slot].position; }
  /// Anything but ok: a step found NaN in this sequence or did not finish; only reset, restore or rollback make the
  /// slot usable again.
  RowStatus status(size slot) const { return sequences_[slot].status; }
  /// The layer in which that was found, or `no_layer`.
  size fault_layer(size slot) const { return sequences_[slot].layer; }

  /// Makes the slot that of a new, empty sequence.
  void reset(size slot) {
    sequences_.replace(slot, 0);
    for (LayerCache<P>& layer : layers_)
      if (Kda* state = std::get_if<Kda>(&layer)) state->reset(slot);
  }

  /// What a step that succeeded (or did not) makes of a slot; for decoders.
  void advance(size slot, size tokens) { sequences_.advance(slot, tokens); }
  void invalidate(size slot, RowStatus status, size layer = no_layer) { sequences_.invalidate(slot, status, layer); }

  CacheSnapshot<P> snapshot(size slot) const;
  /// Replaces the slot's sequence by a snapshot's. Throws invalid_argument, changing nothing, where the snapshot is of
  /// another geometry or longer than the capacity.
  void restore(size slot, const CacheSnapshot<P>& snapshot);

  /// snapshot() and restore() through bytes: see CacheSnapshot. from_bytes changes nothing where it throws.
  std::vector<unsigned char> to_bytes(size slot) const { return snapshot(slot).to_bytes(); }
  void from_bytes(size slot, const std::vector<unsigned char>& bytes) {
    restore(slot, CacheSnapshot<P>::from_bytes(bytes.data(), bytes.size()));
  }

  /// Remembers where the slot's sequence stands, at the cost of its KDA states.
  RollbackPoint<P> rollback_point(size slot) const;
  /// Sets the sequence back to a point of its own past. Throws invalid_argument, changing nothing, for a point of
  /// another slot or cache, of a sequence that was reset or restored since, of tokens that were taken back by a
  /// rollback since, or later than the sequence stands. A copied cache shares the points of the past that it was copied
  /// with.
  void rollback(const RollbackPoint<P>& point);

 private:
  static LayerSnapshot<P> kda_snapshot(const Kda& state, size slot) {
    LayerSnapshot<P> result;
    result.mixer = MixerKind::Kda;
    const auto recurrent = state.recurrent(slot);
    const auto conv = state.conv(slot);
    result.recurrent.assign(recurrent.data, recurrent.data + recurrent.elements());
    result.conv.assign(conv.data, conv.data + conv.elements());
    return result;
  }
  static void put_kda(Kda& state, size slot, const LayerSnapshot<P>& from) {
    for (size i = 0; i < from.recurrent.size(); ++i) state.recurrent(slot).data[i] = from.recurrent[i];
    for (size i = 0; i < from.conv.size(); ++i) state.conv(slot).data[i] = from.conv[i];
  }

  size capacity_ = 0;
  std::vector<detail::LayerShape> shapes_;
  std::vector<LayerCache<P>> layers_;
  SequenceTable sequences_;
};

template <precision P>
CacheSnapshot<P> HybridCache<P>::snapshot(size slot) const {
  CacheSnapshot<P> result;
  result.position = sequences_.usable(slot, "HybridCache::snapshot").position;
  for (const LayerCache<P>& layer : layers_) {
    if (const Kda* state = std::get_if<Kda>(&layer)) {
      result.layers.push_back(kda_snapshot(*state, slot));
      continue;
    }
    const Mla& kv = std::get<Mla>(layer);
    LayerSnapshot<P> rows;
    rows.mixer = MixerKind::Mla;
    rows.latents.reserve(result.position * kv.width());
    for (size position = 0; position < result.position; ++position)
      rows.latents.insert(rows.latents.end(), kv.row(slot, position), kv.row(slot, position) + kv.width());
    result.layers.push_back(std::move(rows));
  }
  return result;
}

template <precision P>
void HybridCache<P>::restore(size slot, const CacheSnapshot<P>& snapshot) {
  static_cast<void>(sequences_[slot]);  // throws where there is no such slot
  detail::check_snapshot("HybridCache::restore", shapes_, capacity_, snapshot);
  for (size index = 0; index < layers_.size(); ++index) {
    const LayerSnapshot<P>& from = snapshot.layers[index];
    if (Kda* state = kda_mut(index)) {
      put_kda(*state, slot, from);
      continue;
    }
    Mla& kv = *mla_mut(index);
    for (size position = 0; position < snapshot.position; ++position)
      for (size i = 0; i < kv.width(); ++i) kv.row(slot, position)[i] = from.latents[position * kv.width() + i];
  }
  sequences_.replace(slot, snapshot.position);
}

template <precision P>
RollbackPoint<P> HybridCache<P>::rollback_point(size slot) const {
  const SequenceTable::Sequence& s = sequences_.usable(slot, "HybridCache::rollback_point");
  RollbackPoint<P> point{slot, s.position, s.generation, {}};
  for (const LayerCache<P>& layer : layers_)
    if (const Kda* state = std::get_if<Kda>(&layer)) point.kda_layers.push_back(kda_snapshot(*state, slot));
  return point;
}

template <precision P>
void HybridCache<P>::rollback(const RollbackPoint<P>& point) {
  sequences_.require_past(point.slot, point.generation, point.position, "HybridCache::rollback");
  detail::check_point("HybridCache::rollback", shapes_, point);
  size next = 0;
  for (LayerCache<P>& layer : layers_)
    if (Kda* state = std::get_if<Kda>(&layer)) put_kda(*state, point.slot, point.kda_layers[next++]);
  sequences_.rewind(point.slot, point.position);
}

}  // namespace k3
