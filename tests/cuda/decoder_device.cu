// SPDX-License-Identifier: Apache-2.0

#include <k3/k3.cuh>

#include "cuda/decoder_device.hpp"
#include "cuda/graph.cuh"

namespace k3::test {

namespace {

template <class P>
class Runner final : public DeviceRunner {
 public:
  Runner(const K3CpuModel& model, const RunnerOptions& o)
      : model_(model), decoder_(gpu{o.graphs ? static_cast<cudaStream_t>(stream_) : nullptr}, model_, o.capacity, o.max_rows, o.max_logit_rows, o.ablation),
        options_(o), cache_(fresh_cache()) {}

  void forward(const DecoderBatch& batch) override { decoder_.forward(cache_, batch); }
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

 private:
  DeviceHybridCache<P> fresh_cache() const {
    const K3CpuModel& model = model_.host_model();
    return DeviceHybridCache<P>(options_.graphs ? static_cast<cudaStream_t>(stream_) : nullptr, model.graph, model.config.kda,
                                model.config.mla, options_.slots, options_.capacity,
                                Environment{!options_.kda_on_host, !options_.mla_on_host, 1.0f, {}});
  }

  Stream stream_;
  K3DeviceModel model_;
  DeviceDecoder<P> decoder_;
  RunnerOptions options_;
  DeviceHybridCache<P> cache_;
  RollbackPoint<P> point_;
};

}  // namespace

std::unique_ptr<DeviceRunner> make_device_runner(const K3CpuModel& model, const RunnerOptions& options) {
  if (options.half) return std::make_unique<Runner<Bf16>>(model, options);
  return std::make_unique<Runner<Fp32>>(model, options);
}

std::string refuse_too_large(const K3CpuModel& model, size& needed) {
  needed = K3DeviceModel::plan(model);
  try {
    const K3DeviceModel moved(model);
  } catch (const cuda_error& problem) {
    return problem.what();
  }
  return "";
}

}  // namespace k3::test
