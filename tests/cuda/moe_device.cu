// SPDX-License-Identifier: Apache-2.0
#include "cuda/moe_device.hpp"

#include <algorithm>
#include <limits>

#include <k3/cuda/mix_routed_experts.cuh>
#include <k3/cuda/repack_experts.cuh>
#include <k3/cuda/sigmoid_topk.cuh>

#include "cuda/graph.cuh"
#include "support/thrown_by.hpp"

namespace k3::test {

namespace {

/// A matrix or vector on the device with a shifted first element and gaps between its rows; all else holds `fill`.
template <class T>
class Placed {
 public:
  Placed(const std::vector<T>& values, size rows, size columns, const MoeDeviceOptions& o, T fill)
      : rows_(rows), columns_(columns), stride_(columns + o.extra_stride), shift_(o.shift) {
    std::vector<T> all(shift_ + rows * stride_ + 1, fill);
    for (size i = 0; i < values.size(); ++i) all[shift_ + i / columns * stride_ + i % columns] = values[i];
    buffer_ = DeviceBuffer<T>(all);
  }

  DeviceView<T, 2> matrix() const { return {buffer_.data() + shift_, {rows_, columns_}, {stride_, 1}}; }
  DeviceView<T, 1> vector() const { return device_view(buffer_.data() + shift_, columns_); }
  std::vector<T> get() const {
    const std::vector<T> all = buffer_.to_vector();
    std::vector<T> values(rows_ * columns_);
    for (size i = 0; i < values.size(); ++i) values[i] = all[shift_ + i / columns_ * stride_ + i % columns_];
    return values;
  }

 private:
  size rows_, columns_, stride_, shift_;
  DeviceBuffer<T> buffer_;
};

template <class T>
Placed<T> vector_of(const std::vector<T>& values, const MoeDeviceOptions& o) {
  return Placed<T>(values, 1, values.size(), o, T{});
}

template <class Work>
void execute(const Stream& stream, const MoeDeviceOptions& options, Work&& work) {
  if (options.graph) {
    replay(stream, 3, work, [] {});
  } else {
    for (int i = 0; i < options.calls; ++i) work();
  }
  stream.wait();
}

/// All experts in one allocation, in another order than their numbers and with gaps of 0xff bytes.
class PlacedExperts {
 public:
  PlacedExperts(const LatentMoeConfig& g, ElementType type, const std::vector<ExpertBytes>& experts, size misaligned) {
    size total = 0;
    const auto place = [&](const std::vector<unsigned char>& bytes) {
      const size at = total + misaligned;
      total += (bytes.size() + misaligned + 255) / 256 * 256 + 256;
      return at;
    };
    at_.resize(experts.size() * 6);
    std::vector<size>& at = at_;
    for (size i = 0; i < experts.size(); ++i) {
      const size e = experts.size() - 1 - i;
      for (size m = 0; m < 3; ++m)
        at[e * 6 + m] = place(experts[e].data[m]), at[e * 6 + 3 + m] = place(experts[e].scale[m]);
    }
    std::vector<unsigned char> all(total, 0xff);
    for (size e = 0; e < experts.size(); ++e)
      for (size m = 0; m < 3; ++m) {
        std::copy(experts[e].data[m].begin(), experts[e].data[m].end(), all.begin() + static_cast<long>(at[e * 6 + m]));
        std::copy(experts[e].scale[m].begin(), experts[e].scale[m].end(),
                  all.begin() + static_cast<long>(at[e * 6 + 3 + m]));
      }
    memory_ = DeviceBuffer<unsigned char>(all);
    std::vector<DeviceExpertWeights>& weights = weights_;
    weights.resize(experts.size());
    const size width = moe_expert_width(g);
    for (size e = 0; e < experts.size(); ++e) {
      if (experts[e].absent) continue;
      AnyMatrix<MemorySpace::device>* matrices[3] = {&weights[e].w1, &weights[e].w3, &weights[e].w2};
      for (size m = 0; m < 3; ++m) {
        AnyMatrix<MemorySpace::device>& w = *matrices[m];
        w.data = memory_.data() + at[e * 6 + m];
        w.scale = type == ElementType::mxfp4 ? memory_.data() + at[e * 6 + 3 + m] : nullptr;
        w.type = type;
        w.extents[0] = m == 2 ? width : g.expert_hidden;
        w.extents[1] = m == 2 ? g.expert_hidden : width;
      }
    }
    table_ = ExpertTable(g, weights);
  }

  const ExpertTable& table() const { return table_; }
  bool repack(const gpu& exec, ExpertLayout layout) { return repack_experts(exec, table_, layout); }

  /// The same experts in a table that begins empty: all entries name expert 0 first, then each its own or none.
  bool set_all(const gpu& exec, const LatentMoeConfig& g, ExpertLayout layout) {
    if (layout == ExpertLayout::packed && !repack_experts(exec, weights_.data(), weights_.size())) return false;
    table_ = ExpertTable(g, layout);
    std::vector<ExpertEntry> entries;
    for (size e = 0; e < weights_.size(); ++e) entries.push_back({e, weights_[0]});
    table_.set(exec, entries.data(), entries.size());
    for (ExpertEntry& entry : entries) entry.weights = weights_[entry.expert];
    table_.set(exec, entries.data() + 1, entries.size() - 1);
    table_.set(exec, entries[0]);
    return true;
  }

  /// What lies where an expert was placed.
  ExpertBytes get(size e, const ExpertBytes& like) const {
    const std::vector<unsigned char> all = memory_.to_vector();
    ExpertBytes result = like;
    for (size m = 0; m < 3; ++m) {
      const auto from = [&](size which) { return all.begin() + static_cast<long>(at_[e * 6 + which]); };
      std::copy_n(from(m), result.data[m].size(), result.data[m].begin());
      std::copy_n(from(3 + m), result.scale[m].size(), result.scale[m].begin());
    }
    return result;
  }

 private:
  std::vector<size> at_;
  DeviceBuffer<unsigned char> memory_;
  std::vector<DeviceExpertWeights> weights_;
  ExpertTable table_;
};

}  // namespace

RepackedExpert repack_on_device(const LatentMoeConfig& g, const ExpertBytes& expert, size misaligned) {
  const Stream stream;
  const gpu exec{stream};
  PlacedExperts placed(g, ElementType::mxfp4, {expert}, misaligned);
  RepackedExpert result;
  if (!placed.repack(exec, ExpertLayout::packed)) return result;
  stream.wait();
  result.packed = placed.get(0, expert);
  placed.repack(exec, ExpertLayout::released);
  stream.wait();
  result.restored = placed.get(0, expert);
  return result;
}

RouterOutputs sigmoid_topk_on_device(const RouterInputs& in, const MoeDeviceOptions& options) {
  const Stream stream;
  const gpu exec{stream};
  const Placed<float> logits(in.logits, in.rows, in.experts, options, std::numeric_limits<float>::quiet_NaN());
  const Placed<float> bias = vector_of(in.bias, options);
  std::vector<bf16> rounded;
  for (float b : in.bias) rounded.push_back(bf16(b));
  const Placed<bf16> bias_bf16 = vector_of(rounded, options);
  const Placed<id> slots = vector_of(in.slots, options);
  const Placed<id> ids({}, in.rows, in.k, options, -77);
  const Placed<float> weights({}, in.rows, in.k, options, -77.0f);
  const Placed<unsigned> status = vector_of(std::vector<unsigned>(in.rows), options);
  execute(stream, options, [&] {
    const DeviceView<const id, 1> given =
        in.slots.empty() ? DeviceView<const id, 1>{} : DeviceView<const id, 1>(slots.vector());
    if (options.bf16_bias)
      sigmoid_topk(exec, logits.matrix(), AnyVector<MemorySpace::device>(bias_bf16.vector()), in.k, in.renormalize,
                   in.scale, ids.matrix(), weights.matrix(), given, status.vector());
    else
      sigmoid_topk(exec, logits.matrix(), bias.vector(), in.k, in.renormalize, in.scale, ids.matrix(), weights.matrix(),
                   given, status.vector());
  });
  return {ids.get(), weights.get(), status.get()};
}

template <class X>
MoeOutputs<X> mix_experts_on_device(const MoeInputs<X>& in, const MoeDeviceOptions& options) {
  using P = std::conditional_t<std::same_as<X, float>, Fp32, Bf16>;
  const Stream stream;
  const gpu exec{stream};
  const size width = moe_expert_width(in.g);
  PlacedExperts experts(in.g, in.type, in.experts, options.misaligned);
  if (options.cached) {
    const ExpertLayout layout = options.packed ? ExpertLayout::packed : ExpertLayout::released;
    if (!experts.set_all(exec, in.g, layout)) return {};
  } else if (options.packed && !experts.repack(exec, ExpertLayout::packed)) {
    return {};
  }
  if (options.restored) experts.repack(exec, ExpertLayout::released);
  const X nan(std::numeric_limits<float>::quiet_NaN());
  const Placed<X> latent(in.latent, in.rows, width, options, nan);
  const Placed<id> ids(in.ids, in.rows, in.g.top_k, options, id{-5});
  const Placed<float> weights(in.weights, in.rows, in.g.top_k, options, std::numeric_limits<float>::quiet_NaN());
  const Placed<id> slots = vector_of(in.slots, options);
  const Placed<unsigned> status = vector_of(in.status.empty() ? std::vector<unsigned>(in.rows) : in.status, options);
  const Placed<X> apart({}, in.rows, width, options, nan);
  const Placed<X>& out = options.in_place ? latent : apart;
  MoeDeviceWorkspace<P> workspace(in.g, in.rows + 1);
  const auto given_slots = in.slots.empty() ? DeviceView<const id, 1>{} : DeviceView<const id, 1>(slots.vector());
  const auto given_status = in.with_status ? status.vector() : DeviceView<unsigned, 1>{};
  execute(stream, options, [&] {
    if (options.launch_name)
      launch_k3_latent_moe_experts(exec, in.g, latent.matrix(), ids.matrix(), weights.matrix(), experts.table(),
                                   workspace, out.matrix(), given_slots, given_status);
    else
      mix_routed_experts(exec, in.g, latent.matrix(), ids.matrix(), weights.matrix(), experts.table(), workspace,
                         out.matrix(), given_slots, given_status);
  });
  return {out.get(), status.get(), in.rows > 0 ? workspace.expert_rows() : std::vector<size>(in.g.n_routed)};
}

template MoeOutputs<float> mix_experts_on_device(const MoeInputs<float>&, const MoeDeviceOptions&);
template MoeOutputs<bf16> mix_experts_on_device(const MoeInputs<bf16>&, const MoeDeviceOptions&);

std::string moe_refused_argument(const std::string& wrong) {
  const auto is = [&](const char* name) { return wrong == name; };
  const gpu exec{};
  LatentMoeConfig g{64, 32, 64, 4, 2, 1, {}, true, true, 1.0f};
  // Never read: a call is refused, or only keeps them.
  float* const f = reinterpret_cast<float*>(0x10000);
  bf16* const b = reinterpret_cast<bf16*>(0x20000);
  id* const i = reinterpret_cast<id*>(0x30000);
  unsigned* const words = reinterpret_cast<unsigned*>(0x40000);
  return thrown_by([&] {
    if (wrong.rfind("router", 0) == 0) {
      const auto bias = device_view(f, is("router.bias") ? 5 : 4);
      sigmoid_topk(exec, device_view(f, 2, 4), bias, is("router.k") ? 5 : 2, true,
                   is("router.scale") ? std::numeric_limits<float>::infinity() : 1.0f,
                   device_view(i, is("router.ids") ? 3 : 2, 2), device_view(f, 2, is("router.weights") ? 3 : 2),
                   device_view(static_cast<const id*>(i), is("router.slots") ? 3 : 2));
      return;
    }
    AnyMatrix<MemorySpace::device> in(device_view(b, 64, is("table.shape") ? 64 : 32)), down(device_view(b, 32, 64));
    AnyMatrix<MemorySpace::device> other(device_view(f, 32, 64));
    std::vector<DeviceExpertWeights> experts(is("table.count") ? 3 : 4, DeviceExpertWeights{in, in, down});
    if (is("table.type")) experts[2].w2 = other;
    if (is("table.half")) experts[1].w3 = {};
    const ExpertTable table(g, experts);
    if (wrong.rfind("entry", 0) == 0) {
      ExpertTable empty(g, is("entry.layout") ? ExpertLayout::packed : ExpertLayout::released);
      if (is("entry.table")) empty = ExpertTable(g, experts);
      const auto half = reinterpret_cast<unsigned char*>(is("entry.aligned") ? 1026 : 1024);
      DeviceExpertWeights w;
      w.w1 = w.w3 = Mxfp4Matrix<MemorySpace::device>{device_view(half, 64, 16), device_view(half, 64, 1)};
      w.w2 = Mxfp4Matrix<MemorySpace::device>{device_view(half, 32, 32), device_view(half, 32, 2)};
      if (is("entry.shape")) w.w3 = w.w2;
      if (is("entry.half")) w.w2 = {};
      return empty.set(exec, {is("entry.expert") ? size{4} : size{3}, w});
    }
    MoeDeviceWorkspace<Bf16> workspace(g, 2);
    if (is("geometry")) g.top_k = 3;
    if (is("caps")) g.activation.beta = 0;
    const size rows = is("workspace") ? 3 : 2;
    const auto call = [&](auto&& function) {
      // What is written lies over something else, or nowhere near.
      void* const over = is("out over latent") || is("status over latent")     ? static_cast<void*>(b + 8)
                         : is("out over ids") || is("status over ids")         ? static_cast<void*>(i)
                         : is("out over weights") || is("status over weights") ? static_cast<void*>(f)
                         : is("out over slots") || is("status over slots")     ? static_cast<void*>(i + 64)
                                                                               : nullptr;
      bf16* const out = over && wrong[0] == 'o' ? static_cast<bf16*>(over) : b;
      unsigned* const status = over && wrong[0] == 's' ? static_cast<unsigned*>(over) : words;
      function(device_view(b, rows, is("latent") ? 31 : 32), device_view(i, rows, is("ids") ? 1 : 2),
               device_view(f, rows, is("weights") ? 3 : 2), device_view(out, rows, is("out") ? 33 : 32),
               device_view(static_cast<const id*>(i + 64), is("slots") ? 5 : rows),
               device_view(status, is("status") ? 5 : rows));
    };
    call([&](auto x, auto ids, auto weights, auto out, auto slots, auto status) {
      if (is("launch"))
        launch_k3_latent_moe_experts(exec, g, x, ids, weights, table, workspace, out, slots, status);
      else
        mix_routed_experts(exec, g, x, ids, weights, table, workspace, out, slots, status);
    });
  });
}

}  // namespace k3::test
