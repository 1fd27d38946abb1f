// SPDX-License-Identifier: Apache-2.0
#include "cuda/released_device.hpp"

#include <deque>
#include <map>

#include <k3/geometry/presets.hpp>

#include "cuda/every_operation.cuh"
#include "cuda/graph.cuh"
#include "cuda/released_products.cuh"

namespace k3::test {

namespace {

class Released final : public ReleasedModel {
 public:
  ReleasedRun run(const std::vector<ReleasedRow>& rows, bool fixed_geometry, int replays) override {
    remember();
    set(rows);
    const auto work = [&] {
      if (fixed_geometry)
        pass(kimi_k3::Decoder{}, rows.size());
      else
        pass(decoder_geometry_from(model_.config), rows.size());
    };
    if (replays == 0)
      work();
    else
      replay(stream_, replays, work, [&] { remember(); });
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

  std::vector<SampledProduct> first_layer_and_head(const std::vector<ReleasedRow>& rows, size which) override {
    remember();
    const auto want = first_layer_on_host(rows[which]);
    set(rows);
    NoObserver observe;
    DevicePass<Bf16, DecoderGeometry> one(gpu{stream_}, decoder_geometry_from(model_.config), rows.size(), work_,
                                          observe);
    one.embed(model_.weights.embed_tokens);
    one.layer(caches_[0], model_.weights.layers[0]);
    stream_.wait();
    SampledProduct first{"the stream behind layer 0", doubles(work_.stream, which * hidden, hidden), want};
    one.layer(caches_[1], model_.weights.layers[1]);
    one.layer(caches_[2], model_.weights.layers[2]);
    std::vector<size> wanted(rows.size());
    for (size row = 0; row < wanted.size(); ++row) wanted[row] = row;
    one.head(model_.weights, wanted);
    stream_.wait();
    SampledProduct head{"the logits", {}, {}};
    const std::vector<double> x = doubles(work_.normed, which * hidden, hidden);
    for (size i = 1; i <= 311; ++i) {
      const size channel = vocab * i / 311 - 1;
      head.got.push_back(doubles(work_.logits, which * vocab + channel, 1)[0]);
      const auto weight = fetched(static_cast<const bf16*>(model_.weights.lm_head.data) + channel * hidden, hidden);
      double sum = 0;
      for (size c = 0; c < hidden; ++c) sum += static_cast<double>(static_cast<float>(weight[c])) * x[c];
      head.want.push_back(sum);
    }
    return {first, head};
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

  template <class T>
  static std::vector<T> fetched(const T* from, size count) {
    std::vector<T> values(count);
    detail::check_cuda("test", "copy", cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  template <class T>
  static std::vector<double> doubles(const DeviceBuffer<T>& from, size first, size count) {
    std::vector<double> result;
    for (const T& value : fetched(from.data() + first, count))
      result.push_back(static_cast<double>(static_cast<float>(value)));
    return result;
  }

  void set(const std::vector<ReleasedRow>& rows) {
    for (size row = 0; row < rows.size(); ++row) {
      work_.tokens.copy_from(&rows[row].token, row, 1);
      work_.slots.copy_from(&rows[row].slot, row, 1);
      work_.positions.copy_from(&rows[row].position, row, 1);
    }
  }

  /// The stream behind layer 0 in double: a model of that layer and of the vocabulary's first ids, its weights fetched.
  std::vector<double> first_layer_on_host(const ReleasedRow& row) {
    K3CpuModel one;
    one.config = model_.config;
    one.config.mixers = {MixerKind::Kda};
    one.config.vocab_size = 32;
    one.graph = K3Graph::from_config(one.config);
    std::map<std::string, const void*> there;
    const auto find = [&](const std::string& name, const auto& weight, const auto&, WeightRole) {
      there[name] = weight.data;
      types_[name] = weight.type;
    };
    auto& all = const_cast<DeviceDecoderWeights&>(model_.weights);
    for_each_model_weight(model_.config, all, find);
    for_each_layer_weight(model_.config, all.layers[0].spec, all.layers[0], find);
    std::deque<std::vector<unsigned char>> memory;
    const auto fetch = [&](const std::string& name, auto& weight, const auto& shape, WeightRole) {
      weight.type = types_.at(name);
      for (size d = 0; d < sizeof(shape) / sizeof(size); ++d) weight.extents[d] = shape[d];
      memory.push_back(fetched(static_cast<const unsigned char*>(there.at(name)), k3::detail::data_bytes(weight)));
      weight.data = memory.back().data();
    };
    for_each_model_weight(one.config, one.weights, fetch);
    LayerWeights layer;
    layer.spec = one.graph.layers[0];
    for_each_layer_weight(one.config, layer.spec, layer, fetch);
    one.weights.layers.push_back(std::move(layer));

    Decoder<Fp64> decoder(host{}, one, 1, 1);
    HybridCache<Fp64> cache = decoder.make_cache(1, capacity);
    const auto state =
        std::get<DeviceHybridCache<Bf16>::Kda>(caches_[0]).download(static_cast<size>(row.slot), stream_);
    CacheSnapshot<Fp64> past;
    past.position = row.position;
    past.layers.resize(1);
    for (const float value : state.recurrent) past.layers[0].recurrent.push_back(static_cast<double>(value));
    for (const bf16 value : state.conv) past.layers[0].conv.push_back(static_cast<double>(static_cast<float>(value)));
    cache.restore(0, past);
    const id slot = 0;
    std::vector<double> stream;
    decoder.forward(cache, {view(&row.token, 1), view(&slot, 1), view(&row.position, 1), view(&row.position, 0)},
                    [&](const char* part, size, const auto& values) {
                      if (std::string(part) != "residual") return;
                      if constexpr (std::is_same_v<std::remove_cvref_t<decltype(*values.data)>, double>)
                        stream.assign(values.data, values.data + hidden);
                    });
    return stream;
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
  std::map<std::string, ElementType> types_;
};

}  // namespace

std::unique_ptr<ReleasedModel> make_released_model() { return std::make_unique<Released>(); }

}  // namespace k3::test
