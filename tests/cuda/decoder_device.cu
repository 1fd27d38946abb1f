// SPDX-License-Identifier: Apache-2.0

#include <k3/k3.cuh>

#include "cuda/decoder_device.hpp"
#include "cuda/hold.cuh"

namespace k3::test {

namespace {

template <class P>
class Runner final : public DeviceRunner {
 public:
  Runner(const K3CpuModel& model, const RunnerOptions& o)
      : model_(o.expert_memory ? K3DeviceModel(WithoutExperts{}, model) : K3DeviceModel(model)),
        options_(o),
        decoder_(gpu{used_stream()}, model_, o.capacity, o.max_rows, o.max_logit_rows, o.ablation),
        cache_(fresh_cache()) {
    if (o.expert_memory) model_.place_experts(*o.expert_memory);
    for (DeviceLayerWeights& layer : const_cast<DeviceDecoderWeights&>(model_.weights()).layers) {
      if (o.without_kda) layer.kda = {};
      if (o.without_mla) layer.mla = {};
    }
  }

  void forward(const DecoderBatch& batch) override { decoder_.forward(cache_, batch); }
  void forward(const DecoderBatch& batch, const DeviceWatch& watch) override {
    decoder_.forward(cache_, batch, [&](const char* part, size layer, const auto& values) {
      if (values.data) show(part, layer, values, watch);
    });
  }
  void in_invalid_capture(const std::function<void()>& work) override {
    decoder_.finish();
    detail::check_cuda("test", "begin", cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
    detail::ignore_cuda(cudaStreamSynchronize(stream_));  // not allowed: the capture is invalid from here on
    const auto end = [&] {
      cudaGraph_t graph = nullptr;
      detail::ignore_cuda(cudaStreamEndCapture(stream_, &graph));
    };
    try {
      work();
    } catch (...) {
      end();
      throw;
    }
    end();
  }
  void beside_capture(const std::function<void()>& work) override { beside_a_capture(work); }
  bool forward_behind_work(const DecoderBatch& batch) override {
    decoder_.finish();
    PinnedBuffer<unsigned> over(1);
    bool returned = false;
    beside_a_capture([&] {
      hold(stream_, 20, over.data());
      decoder_.forward(cache_, batch);
      returned = static_cast<volatile unsigned&>(over[0]) == 0;
      decoder_.finish();
    });
    return returned;
  }
  std::vector<float> logits() override { return decoder_.logits(); }
  RowStatus status(size index) override { return decoder_.status(index); }
  id argmax(size index) override { return decoder_.argmax(index); }
  size position(size slot) override { return cache_.position(slot); }
  RowStatus slot_status(size slot) override {
    decoder_.finish();
    return cache_.status(slot);
  }
  void reset(size slot) override {
    decoder_.finish();
    cache_.reset(slot);
  }
  std::vector<unsigned char> to_bytes(size slot) override {
    decoder_.finish();
    return cache_.to_bytes(slot);
  }
  void from_bytes(size slot, const std::vector<unsigned char>& bytes) override { cache_.from_bytes(slot, bytes); }
  void mark() override {
    decoder_.finish();
    point_ = cache_.rollback_point(0);
  }
  void back_to_mark() override {
    decoder_.finish();
    cache_.rollback(point_);
  }

  void spoil_mark() override { point_.kda_layers.pop_back(); }
  void new_cache() override {
    decoder_.finish();
    cache_ = fresh_cache();
  }
  std::vector<float> logits_row(size index) override { return decoder_.logits_row(index); }
  size captured_steps() override { return decoder_.captured_steps(); }
  void forward_into_cache(const DecoderBatch& batch, size capacity) override {
    DeviceHybridCache<P> other = decoder_.make_cache(1, capacity);
    decoder_.forward(other, batch);
    decoder_.finish();
  }
  std::vector<std::vector<float>> host_memory(size slot) override {
    decoder_.finish();
    std::vector<std::vector<float>> all(cache_.layers());
    for (size index = 0; index < all.size(); ++index) {
      const auto add = [&](const auto* values, size count) {
        for (size i = 0; i < count; ++i) all[index].push_back(static_cast<float>(values[i]));
      };
      if (auto* kda = std::get_if<typename DeviceHybridCache<P>::HostKda>(&cache_.layer(index))) {
        add(kda->recurrent(slot).data, kda->recurrent(slot).elements());
        add(kda->conv(slot).data, kda->conv(slot).elements());
      } else if (auto* kv = std::get_if<typename DeviceHybridCache<P>::HostMla>(&cache_.layer(index))) {
        for (size p = 0; p < cache_.position(slot); ++p) add(kv->row(slot, p), kv->width());
      }
    }
    return all;
  }
  Cache cache() override {
    const ExpertCache* const experts = model_.expert_cache();
    if (!experts) return {};
    const ExpertCacheStatistics s = experts->statistics();
    return {experts->slots(), experts->slot_bytes(), s.hits, s.misses, s.bytes_copied};
  }

 private:
  DeviceHybridCache<P> fresh_cache() const {
    const K3CpuModel& model = model_.host_model();
    return DeviceHybridCache<P>(used_stream(), model.graph, model.config.kda, model.config.mla, options_.slots,
                                options_.capacity, Environment{!options_.kda_on_host, !options_.mla_on_host, 1.0f, {}});
  }
  cudaStream_t used_stream() const {
    if (options_.legacy) return cudaStreamLegacy;
    return options_.graphs ? static_cast<cudaStream_t>(stream_) : nullptr;
  }

  template <class T>
  void show(const std::string& part, size layer, const DeviceView<T, 2>& values, const DeviceWatch& watch) {
    using Value = std::remove_const_t<T>;
    if (!values.contiguous()) throw std::runtime_error(part + " is not dense");
    std::vector<Value> there(values.elements());
    const auto copy = [&](void* to, const void* from) {
      detail::check_cuda("test", "synchronise", cudaDeviceSynchronize());
      detail::check_cuda("test", "copy", cudaMemcpy(to, from, there.size() * sizeof(Value), cudaMemcpyDefault));
      detail::check_cuda("test", "synchronise", cudaDeviceSynchronize());
    };
    copy(there.data(), values.data);
    std::vector<float> seen;
    for (const Value& value : there) seen.push_back(static_cast<float>(value));
    watch(part, layer, seen);
    if constexpr (std::is_same_v<T, typename P::activation>) {
      if (part != "residual" && part != "embed") return;
      for (size i = 0; i < seen.size(); ++i) there[i] = Value(seen[i]);
      copy(values.data, there.data());
    }
  }

  Stream stream_;
  K3DeviceModel model_;
  RunnerOptions options_;
  DeviceDecoder<P> decoder_;
  DeviceHybridCache<P> cache_;
  RollbackPoint<P> point_;
};

}  // namespace

std::unique_ptr<DeviceRunner> make_device_runner(const K3CpuModel& model, const RunnerOptions& options) {
  if (options.half) return std::make_unique<Runner<Bf16>>(model, options);
  return std::make_unique<Runner<Fp32>>(model, options);
}

}  // namespace k3::test
