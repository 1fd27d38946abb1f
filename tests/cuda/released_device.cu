// SPDX-License-Identifier: Apache-2.0
#include "cuda/released_device.hpp"

#include <k3/geometry/presets.hpp>

#include "cuda/every_operation.cuh"
#include "cuda/graph.cuh"
#include "cuda/released_products.cuh"

namespace k3::test {

namespace {

class Released final : public ReleasedModel {
 public:
  static constexpr size most_rows = 2;

  ReleasedRun run(const std::vector<ReleasedRow>& rows, bool fixed_geometry) override {
    remember();
    for (size row = 0; row < rows.size(); ++row) {
      work_.tokens.copy_from(&rows[row].token, row, 1);
      work_.slots.copy_from(&rows[row].slot, row, 1);
      work_.positions.copy_from(&rows[row].position, row, 1);
    }
    if (fixed_geometry)
      pass(kimi_k3::Decoder{}, rows.size());
    else
      pass(decoder_geometry_from(model_.config), rows.size());
    stream_.wait();
    ReleasedRun result;
    result.stream = floats(work_.stream, rows.size() * hidden);
    result.logits = floats(work_.logits, rows.size() * vocab);
    result.argmax = work_.argmax.to_vector(), result.argmax.resize(rows.size());
    result.status = work_.status.to_vector(), result.status.resize(rows.size());
    return result;
  }

  std::vector<std::string> faults_of_operations() override {
    std::vector<std::string> faults;
    EveryOperation all(model_, most_rows, capacity, 8);
    all.restore(stream_);
    for (const EveryOperation::Call& call : all.calls) {
      call.run(gpu{stream_}, most_rows);
      stream_.wait();
      bool finite = true, zero = true;
      for (const float value : call.result()) {
        finite = finite && value - value == 0;
        zero = zero && value == 0;
      }
      if (!finite || zero) faults.push_back(call.name);
    }
    return faults;
  }

  std::vector<SampledProduct> sampled_products(const std::vector<size>& rows) override {
    ReleasedProducts products(model_);
    std::vector<SampledProduct> results;
    for (const size count : rows) products.compare(count, results);
    return results;
  }

 private:
  /// The block size is the checkpoint's, so that the fixed geometry fits; the only block then starts at layer 0.
  static K3Config config() {
    K3Config c = three_layers(runtime_geometry(kimi_k3::Decoder{}));
    c.attn_res_block_size = kimi_k3::Decoder::attn_res_block_size;
    return c;
  }

  template <class T>
  static std::vector<float> floats(const DeviceBuffer<T>& from, size count) {
    std::vector<T> values(count);
    from.copy_to(values.data(), 0, count);
    std::vector<float> result;
    for (const T& value : values) result.push_back(static_cast<float>(value));
    return result;
  }

  void remember() {
    for (size index = 0; index < caches_.size(); ++index) {
      const unsigned seed = static_cast<unsigned>(100 + index);
      if (auto* state = std::get_if<DeviceHybridCache<Bf16>::Kda>(&caches_[index])) {
        fill(state->view().recurrent.data, state->view().recurrent.elements(), seed, 0.0f, 0.1f);
        fill(state->view().conv.data, state->view().conv.elements(), seed, 0.0f, 1.0f);
      } else {
        const auto pages = std::get<DeviceHybridCache<Bf16>::Mla>(caches_[index]).view().pages;
        fill(pages.data, pages.elements(), seed, 0.0f, 1.0f);
      }
    }
  }

  template <class G>
  void pass(G geometry, size rows) {
    NoObserver observe;
    for (const auto* words : {&work_.status, &work_.logit_status})
      detail::check_cuda("test", "memset", cudaMemsetAsync(words->data(), 0, words->bytes(), stream_));
    DevicePass<Bf16, G> one(gpu{stream_}, geometry, rows, work_, observe);
    one.embed(model_.weights.embed_tokens);
    for (size index = 0; index < caches_.size(); ++index) one.layer(caches_[index], model_.weights.layers[index]);
    std::vector<size> wanted;
    for (size row = 0; row < rows; ++row) wanted.push_back(row);
    one.head(model_.weights, wanted);
  }
  std::vector<DeviceLayerCache<Bf16>> caches() const {
    std::vector<DeviceLayerCache<Bf16>> all;
    for (const K3LayerSpec& layer : model_.graph.layers) {
      if (layer.mixer == MixerKind::Kda)
        all.emplace_back(std::in_place_type<DeviceHybridCache<Bf16>::Kda>, model_.config.kda, most_rows);
      else
        all.emplace_back(std::in_place_type<DeviceHybridCache<Bf16>::Mla>, model_.config.mla, most_rows, capacity);
    }
    return all;
  }

  const RandomModel model_{config(), 6};
  const Stream stream_;
  DeviceWorkspace<Bf16> work_{decoder_geometry_from(model_.config), model_.graph, most_rows, most_rows, capacity};
  std::vector<DeviceLayerCache<Bf16>> caches_ = caches();
};

}  // namespace

std::unique_ptr<ReleasedModel> make_released_model() { return std::make_unique<Released>(); }

}  // namespace k3::test
