// SPDX-License-Identifier: Apache-2.0
#include "cuda/shapes_device.hpp"

#include <algorithm>

#include <k3/geometry/presets.hpp>

#include "cuda/every_operation.cuh"
#include "cuda/graph.cuh"

namespace k3::test {

namespace {

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && __builtin_memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

std::vector<std::string> faults_of_many_rows(size rows, size block, size& operations) {
  const RandomModel model(three_layers(runtime_geometry(tiny::Decoder{})), 2);
  EveryOperation all(model, rows, 4, 1);
  const Stream stream;
  std::vector<std::string> faults;
  for (const EveryOperation::Call& call : all.calls) {
    all.restore(stream);
    stream.wait();
    const std::vector<float> before = call.result();
    call.run(gpu{stream}, rows);
    stream.wait();
    const std::vector<float> want = call.result();
    if (same(want, before)) faults.push_back(call.name + ": no result");
    all.restore(stream);
    for (size first = 0; first < rows; first += block) {
      all.begin_with(first);
      call.run(gpu{stream}, detail::smaller(block, rows - first));
    }
    all.begin_with(0);
    stream.wait();
    const std::vector<float> got = call.result();
    if (same(got, want)) continue;
    size at = 0;
    while (at < want.size() && same({got[at]}, {want[at]})) ++at;
    faults.push_back(call.name + ": other bits from element " + std::to_string(at) + " of " +
                     std::to_string(want.size()) + " on");
  }
  operations = all.calls.size();
  return faults;
}

namespace {

/// Memory for small operands, and calls on it.
class EmptyCalls {
 public:
  std::vector<EmptyCall> results;

  EmptyCalls() {
    row_operations();
    products();
    states();
  }

 private:
  using P = Bf16;
  DeviceView<bf16, 2> x(size rows, size columns) const { return device_view(x_.data(), rows, columns); }
  DeviceView<bf16, 2> out(size rows, size columns) const { return device_view(out_.data(), rows, columns); }
  AnyMatrix<MemorySpace::device> weight(size rows, size columns) const {
    return device_view(static_cast<const bf16*>(weight_.data()), rows, columns);
  }
  AnyVector<MemorySpace::device> vector(size count) const {
    return device_view(static_cast<const bf16*>(weight_.data()), count);
  }

  template <class Run>
  void add(const char* name, Run run) {
    EmptyCall result{name, ""};
    try {
      out_.copy_from(std::vector<bf16>(out_.count(), bf16(3.0f)).data(), 0, out_.count());
      run(gpu{stream_});
      stream_.wait();
      const std::vector<bf16> got = out_.to_vector();
      const auto is = [&](float value) {
        return std::any_of(got.begin(), got.end(), [&](bf16 g) { return static_cast<float>(g) == value; });
      };
      size_t nodes = 0;
      const cudaGraph_t graph = captured(stream_, [&] { run(gpu{stream_}); });
      detail::check_cuda("test", "nodes", cudaGraphGetNodes(graph, nullptr, &nodes));
      detail::check_cuda("test", "destroy", cudaGraphDestroy(graph));
      result.outcome = nodes == 0 && !is(0.0f) ? "nothing" : is(0.0f) && nodes > 0 ? "zeros" : "launched";
    } catch (const invalid_argument& e) {
      result.outcome = "refused: " + e.operation() + "/" + e.argument();
    } catch (const std::exception& e) {
      result.outcome = e.what();
    }
    const cudaError_t left = cudaGetLastError();
    if (left != cudaSuccess) result.outcome += std::string(", left behind: ") + cudaGetErrorString(left);
    results.push_back(result);
  }

  void row_operations() {
    const auto float_logits = device_view(floats_.data(), size{2}, size{0});
    const auto ids = [this](size rows, size k) { return device_view(ids_.data(), rows, k); };
    add("embed_tokens, rows of no width", [this](const gpu& exec) {
      embed_tokens(exec, device_view(static_cast<const id*>(ids_.data()), size{2}), weight(4, 0), out(2, 0));
    });
    add("rms_norm, rows of no width",
        [this](const gpu& exec) { rms_norm(exec, x(2, 0), vector(0), 1e-5f, out(2, 0)); });
    add("attnres_norm, rows of no width", [this](const gpu& exec) {
      const DeviceView<bf16, 3> stored = device_view(x_.data(), size{1}, size{2}, size{0});
      attnres_norm(exec, stored, x(2, 0), vector(0), vector(0), 1e-5f, vector(0), 1e-5f, out(2, 0));
    });
    add("argmax of no logits",
        [=, this](const gpu& exec) { argmax(exec, float_logits, argmax_, device_view(ids_.data(), size{2})); });
    add("sigmoid_topk of no experts", [=, this](const gpu& exec) {
      sigmoid_topk(exec, float_logits, vector(0), 1, true, 1.0f, ids(2, 1),
                   device_view(more_.data(), size{2}, size{1}));
    });
    add("sigmoid_topk, none chosen", [=, this](const gpu& exec) {
      sigmoid_topk(exec, device_view(floats_.data(), size{2}, size{4}), vector(4), 0, true, 1.0f, ids(2, 0),
                   device_view(more_.data(), size{2}, size{0}));
    });
  }

  void products() {
    add("linear, no outputs", [this](const gpu& exec) { linear(exec, x(2, 4), weight(0, 4), out(2, 0)); });
    add("linear of no columns", [this](const gpu& exec) { linear(exec, x(2, 0), weight(3, 0), out(2, 3)); });
    add("projections, none", [this](const gpu& exec) { projections(exec, x(2, 4), {}); });
    add("projections, one of no outputs",
        [this](const gpu& exec) { projections(exec, x(2, 4), {projection(weight(0, 4), out(2, 0))}); });
    add("linear_add, no outputs", [this](const gpu& exec) { linear_add(exec, x(2, 4), weight(0, 4), out(2, 0)); });
    add("dense_mlp, no outputs", [this](const gpu& exec) {
      dense_mlp(exec, GluConfig{}, x(2, 0), weight(0, 0), weight(0, 0), weight(0, 0), mlp_, out(2, 0));
    });
    add("dense_mlp of no width", [this](const gpu& exec) {
      dense_mlp(exec, GluConfig{}, x(2, 4), weight(0, 4), weight(0, 4), weight(4, 0), mlp_, out(2, 4));
    });
  }

  void states() {
    LatentMoeConfig none_chosen = moe_, no_experts = moe_;
    none_chosen.top_k = 0, no_experts.n_routed = 0;
    for (const auto& [name, g] : {std::pair("experts, none chosen", none_chosen), std::pair("no experts", no_experts)})
      add(name, [=](const gpu&) { const ExpertTable table(g, std::vector<DeviceExpertWeights>(g.n_routed)); });
    KdaConfig no_heads = KdaConfig::production();
    no_heads.heads = 0;
    add("KDA, no heads", [=](const gpu&) { const KdaDeviceState<float, bf16> state(no_heads, 1); });
    MlaConfig no_mla_heads = MlaConfig::production();
    no_mla_heads.heads = 0;
    add("MLA, no heads", [=](const gpu&) { const MlaDeviceWorkspace<P> state(no_mla_heads, 1, 4); });
    add("KDA, no slots", [](const gpu&) { const KdaDeviceState<float, bf16> state(KdaConfig::production(), 0); });
    add("MLA, no slots", [](const gpu&) { const MlaDeviceKv<bf16> cache(MlaConfig::production(), 0, 4); });
    add("buffer of nothing", [](const gpu&) { const DeviceBuffer<float> buffer{std::vector<float>()}; });
  }

  const Stream stream_;
  DeviceBuffer<bf16> x_{64}, out_{64}, weight_{64};
  DeviceBuffer<float> floats_{64}, more_{64};
  DeviceBuffer<id> ids_{64};
  DeviceArgmaxWorkspace argmax_{2};
  DeviceMlpWorkspace<P> mlp_{4, 2};
  LatentMoeConfig moe_{8, 8, 8, 4, 2, 1, {}, true, true, 1.0f};
};

}  // namespace

std::vector<EmptyCall> empty_calls() { return EmptyCalls().results; }

}  // namespace k3::test
