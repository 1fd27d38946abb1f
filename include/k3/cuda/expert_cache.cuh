// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>

#include <k3/cuda/expert_transfer.cuh>
#include <k3/model/k3_cpu_model.hpp>
#include <k3/model/use_counts.hpp>

namespace k3 {

/// What an ExpertCache did so far. A use is a miss where the expert had to be brought for it.
struct ExpertCacheStatistics {
  std::uint64_t hits = 0, misses = 0, bytes_copied = 0;

  double hit_rate() const {
    return hits + misses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(hits + misses);
  }
};

/// The routed experts of all layers of a model in a fixed number of slots of device memory, brought from the model's
/// ExpertSource when they are needed and not there. The least used makes room (docs/streaming.md). Made by
/// K3DeviceModel::stream_experts, used by DevicePass. One layer of one pass at a time uses it; others wait.
class ExpertCache {
 public:
  /// Makes the tables of the layers, with no expert in them. Throws invalid_argument where `memory` is less than the
  /// experts of one token in a layer take, cuda_error where the device does not have it.
  ExpertCache(const K3CpuModel& model, const std::vector<ExpertTable*>& tables, size memory);

  size slots() const { return slots_.size(); }
  size slot_bytes() const { return slot_bytes_; }
  size memory() const { return memory_.bytes(); }
  ExpertCacheStatistics statistics() const {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

  /// A layer's experts while they are being used.
  class Use {
   public:
    Use(Use&&) = default;
    ~Use() {
      if (!lock_.owns_lock()) return;
      const detail::BesideCaptures beside;
      detail::ignore_cuda(cudaStreamSynchronize(stream_));
    }
    /// To be called when what reads them has been put on the stream: from then on they may go.
    void end() {
      cache_.used_.record(stream_);
      cache_.transfer_.begin_after(cache_.used_);
      lock_.unlock();
    }

   private:
    friend class ExpertCache;
    Use(ExpertCache& cache, cudaStream_t stream) : cache_(cache), stream_(stream), lock_(cache.mutex_) {}
    ExpertCache& cache_;
    cudaStream_t stream_;
    std::unique_lock<std::mutex> lock_;
  };

  /// Sees to it that these experts, no more than there are slots, are in the layer's table for what the stream is given
  /// next. Waits for reads, not for the device. Throws what the source throws; no expert that came is kept then.
  [[nodiscard]] Use fetch(const gpu& exec, size layer, const std::vector<size>& experts);

  /// The distinct experts of rows [first, the returned row), in order of id: of as many rows as have room together, one
  /// at least. `ids` [rows, k] and `slots` [rows] in host memory; `experts` is what was returned, `seen` scratch.
  size take_rows(const id* ids, size k, const id* row_slots, size first, size rows, std::vector<size>& experts,
                 std::vector<size>& seen) const;

 private:
  static constexpr size nowhere = ~size{0};

  struct Layer {
    const ExpertSource* source = nullptr;
    ExpertTable* table = nullptr;
    size first = 0;  // key of its expert 0
  };
  struct Slot {
    size key = nowhere;
    size fetch = 0;  // the last one that needed it
  };

  void choose_slots(size count);
  void bring(const gpu& exec, const Layer& layer);
  void set_entries(const gpu& exec, const Layer& layer) const;
  unsigned char* memory_of(size slot) const { return memory_.data() + slot * slot_bytes_; }

  K3CpuModel model_;           // keeps the sources
  std::vector<Layer> layers_;  // by number of the decoder layer
  size routed_, slot_bytes_ = 0;
  mutable std::mutex mutex_;
  detail::UseCounts uses_;
  std::vector<Slot> slots_;
  std::vector<size> where_;             // slot of an expert, by key
  std::vector<size> missing_, chosen_;  // ids; slots
  std::vector<ExpertEntry> entries_;    // of those that came
  size fetches_ = 0;
  ExpertCacheStatistics statistics_;
  DeviceEvent used_;
  DeviceBuffer<unsigned char> memory_;  // [slots, slot_bytes]
  detail::ExpertTransfer transfer_;     // goes first: waits for its copies
};

inline ExpertCache::ExpertCache(const K3CpuModel& model, const std::vector<ExpertTable*>& tables, size memory)
    : model_(model),
      layers_(tables.size()),
      routed_(model.config.moe.n_routed),
      // A use counts half after 64 tokens, as on the host.
      uses_(routed_ * tables.size(), 64.0 * static_cast<double>(model.config.moe.top_k * tables.size())),
      where_(routed_ * tables.size(), nowhere),
      transfer_(model.config.moe.top_k) {
  constexpr const char* operation = "ExpertCache";
  std::vector<ExpertWeights> one(layers_.size());
  size count = 0;
  for (size i = 0; i < layers_.size(); ++i) {
    if (!tables[i]) continue;
    layers_[i] = {model_.weights.layers[i].experts.get(), tables[i], routed_ * i};
    one[i] = (*layers_[i].source)[0];
    slot_bytes_ = detail::larger(slot_bytes_, detail::planned_bytes(one[i]));
    count += routed_;
  }
  const size floor = detail::checked_product(operation, "the floor", model.config.moe.top_k, slot_bytes_);
  detail::require(memory >= floor, operation, "memory", memory, [&] {
    return "at least " + std::to_string(floor) + " bytes, the " + std::to_string(model.config.moe.top_k) +
           " experts of one token";
  });
  slots_.resize(slot_bytes_ == 0 ? 0 : detail::smaller(memory / slot_bytes_, count));
  memory_ = DeviceBuffer<unsigned char>(slots_.size() * slot_bytes_, false);
  const LatentMoeConfig& moe = model.config.moe;
  const bool packable = experts_packable(moe.expert_hidden, moe_expert_width(moe));
  for (size i = 0; i < layers_.size(); ++i) {
    if (!tables[i]) continue;
    if (one[i].w1.type == ElementType::mxfp4 && packable) {
      *tables[i] = ExpertTable(moe, ExpertLayout::packed);
      continue;
    }
    // As if all were in the first slot, to know their type and alignment; none is there in fact.
    const auto there = [&](const AnyMatrix<>& m) { return detail::device_matrix(m, memory_.data(), memory_.data()); };
    const DeviceExpertWeights like{there(one[i].w1), there(one[i].w3), there(one[i].w2)};
    *tables[i] = ExpertTable(moe, std::vector<DeviceExpertWeights>(routed_, like));
    entries_.clear();
    for (size e = 0; e < routed_; ++e) entries_.push_back({e, {}});
    set_entries(gpu{}, layers_[i]);
  }
  detail::check_cuda(operation, "cudaDeviceSynchronize", cudaDeviceSynchronize());
}

inline size ExpertCache::take_rows(const id* ids, size k, const id* row_slots, size first, size rows,
                                   std::vector<size>& experts, std::vector<size>& seen) const {
  seen.assign(routed_, 0);
  experts.clear();
  size row = first;
  for (; row < rows; ++row) {
    if (row_slots[row] == pad_slot) continue;
    const size before = experts.size();
    for (size i = 0; i < k; ++i) {
      const id expert = ids[row * k + i];
      if (expert < 0 || static_cast<size>(expert) >= routed_) continue;  // of a row that failed
      if (std::exchange(seen[static_cast<size>(expert)], size{1}) == 0) experts.push_back(static_cast<size>(expert));
    }
    if (experts.size() <= slots_.size() || row == first) continue;
    experts.resize(before);
    break;
  }
  std::sort(experts.begin(), experts.end());
  return row;
}

inline ExpertCache::Use ExpertCache::fetch(const gpu& exec, size layer, const std::vector<size>& experts) {
  Use use(*this, exec.stream);
  const Layer& l = layers_[layer];
  detail::require(experts.size() <= slots_.size(), "ExpertCache::fetch", "experts", experts.size(), slots_.size());
  ++fetches_;
  missing_.clear();
  for (const size id : experts) {
    const size key = l.first + id;
    uses_.use(key);
    if (where_[key] == nowhere)
      missing_.push_back(id);
    else
      slots_[where_[key]].fetch = fetches_;
  }
  statistics_.hits += experts.size() - missing_.size();
  statistics_.misses += missing_.size();
  used_.make_wait(exec.stream);  // of another stream
  if (!missing_.empty()) bring(exec, l);
  return use;
}

/// Empties the slots of the least used experts that this fetch does not need.
inline void ExpertCache::choose_slots(size count) {
  chosen_.clear();
  for (size s = 0; s < slots_.size(); ++s)
    if (slots_[s].key == nowhere || slots_[s].fetch != fetches_) chosen_.push_back(s);
  const auto uses = [&](size s) { return slots_[s].key == nowhere ? -1.0 : uses_[slots_[s].key]; };
  const auto less_used = [&](size a, size b) { return uses(a) != uses(b) ? uses(a) < uses(b) : a < b; };
  std::nth_element(chosen_.begin(), chosen_.begin() + static_cast<std::ptrdiff_t>(count - 1), chosen_.end(), less_used);
  chosen_.resize(count);
  for (const size s : chosen_) {
    if (slots_[s].key != nowhere) where_[slots_[s].key] = nowhere;
    slots_[s].key = nowhere;
  }
}

/// Entries of experts that have gone stay in their tables: nobody reads one before it has been set anew.
inline void ExpertCache::bring(const gpu& exec, const Layer& layer) {
  choose_slots(missing_.size());
  entries_.clear();
  const auto place = [&](size i, const ExpertWeights& expert) {
    const bool alike = expert.w1.type == layer.table->type() && expert.w3.type == expert.w1.type &&
                       expert.w2.type == expert.w1.type && detail::planned_bytes(expert) <= slot_bytes_;
    detail::require(alike, "ExpertCache", "the experts", "stored in different types", "stored alike");
    statistics_.bytes_copied += detail::stored_bytes(expert);
    return memory_of(chosen_[i]);
  };
  transfer_.bring(*layer.source, missing_.data(), missing_.size(), layer.table->layout() == ExpertLayout::packed, place,
                  [&](size i, const DeviceExpertWeights& there) { entries_.push_back({missing_[i], there}); });
  transfer_.make_wait(exec.stream);
  set_entries(exec, layer);
  for (size i = 0; i < missing_.size(); ++i) {
    slots_[chosen_[i]] = {layer.first + missing_[i], fetches_};
    where_[layer.first + missing_[i]] = chosen_[i];
  }
}

inline void ExpertCache::set_entries(const gpu& exec, const Layer& layer) const {
  if (layer.table->type() == ElementType::mxfp4) return layer.table->set(exec, entries_.data(), entries_.size());
  for (size from = 0; from < entries_.size(); from += kernel::expert_list_most) {
    kernel::ExpertEntries list{};
    list.list.count = static_cast<unsigned>(detail::smaller(entries_.size() - from, size{kernel::expert_list_most}));
    for (unsigned i = 0; i < list.list.count; ++i) {
      list.list.of[i] = detail::expert_pointers(entries_[from + i].weights);
      list.expert[i] = static_cast<unsigned>(entries_[from + i].expert);
    }
    kernel::set_experts<<<1, kernel::expert_list_most, 0, exec.stream>>>(
        list, const_cast<kernel::ExpertPointers*>(layer.table->data()));
    detail::check_launch("ExpertCache");
  }
}

}  // namespace k3
