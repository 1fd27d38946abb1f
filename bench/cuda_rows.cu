// SPDX-License-Identifier: Apache-2.0
// The row-wise operations on the device at the released model's geometry in bf16: the mixture of Attention Residuals
// with its norm, RMSNorm, arg-max over the vocabulary and the lookup of embeddings. Every launch of a graph has its own
// rows, which together are more than the L2 cache holds. The last row of the last timed launch is computed again in
// double.

#include <algorithm>

#include <k3/cuda/argmax.cuh>
#include <k3/cuda/attnres_norm.cuh>
#include <k3/cuda/embed_tokens.cuh>
#include <k3/ops/attnres_softmax_mix.hpp>
#include <k3/ops/rms_norm.hpp>

#include "cuda_harness.cuh"

namespace {

using namespace k3;
using namespace k3::bench;

constexpr size hidden = 7168, vocab = 163840, most_rows = 128, most_launches = 1536;
constexpr size pool_bytes = size{320} << 20;

class Rows {
 public:
  Rows(Report& report) : report_(report) {
    fill_uniform(pool_.data(), pool_.count(), 1, 1);
    fill_uniform(out_.data(), out_.count(), 2, 1);
    fill_uniform(weights_.data(), weights_.count(), 3, 1);
    fill_uniform(logits_.data(), logits_.count(), 4, 10);
    std::vector<id> ids(most_launches + most_rows);
    for (size i = 0; i < ids.size(); ++i) ids[i] = static_cast<id>(mixed_bits(i) % vocab);
    tokens_ = DeviceBuffer<id>(ids);
    check_cuda(cudaDeviceSynchronize());
  }

  void attnres(const char* name, size rows, size sources, List list = List::none) {
    const size each = sources * rows * hidden;
    const double bytes = 2.0 * static_cast<double>(each + rows * hidden + 3 * hidden);
    const size last = run(name, rows, pool_.count() / each, bytes, list, [&](size i) {
      const bf16* const at = pool_.data() + i * each;
      attnres_norm(gpu{stream_}, device_view(at, sources - 1, rows, hidden),
                   device_view(at + (sources - 1) * rows * hidden, rows, hidden), weight(0), weight(1), 1e-5f,
                   weight(2), 1e-5f, out(i, rows));
    });
    std::vector<double> all, mixed(hidden);
    for (size source = 0; source < sources; ++source) {
      const auto values = device_row(pool_.data() + last * each + (source * rows + rows - 1) * hidden, hidden);
      all.insert(all.end(), values.begin(), values.end());
    }
    const std::vector<double> w = device_row(weights_.data(), weights_.count());
    const auto vector = [&](size which) { return view(w.data() + which * hidden, hidden); };
    attnres_softmax_mix(host{}, view(static_cast<const double*>(all.data()), sources - 1, size{1}, hidden),
                        view(static_cast<const double*>(all.data()) + (sources - 1) * hidden, size{1}, hidden),
                        vector(0), vector(1), 1e-5, view(mixed.data(), size{1}, hidden));
    compare_normed("attnres_norm", mixed, vector(2), last, rows);
  }
  void norm(size rows) {
    const size each = rows * hidden;
    const double bytes = 2.0 * static_cast<double>(2 * each + hidden);
    const size last = run("rms_norm", rows, pool_.count() / each, bytes, List::none, [&](size i) {
      rms_norm(gpu{stream_}, device_view(static_cast<const bf16*>(pool_.data() + i * each), rows, hidden), weight(0),
               1e-5f, out(i, rows));
    });
    const std::vector<double> w = device_row(weights_.data(), hidden);
    compare_normed("rms_norm", device_row(pool_.data() + last * each + (rows - 1) * hidden, hidden),
                   view(w.data(), hidden), last, rows);
  }
  void embed(size rows) {
    const auto table = device_view(static_cast<const bf16*>(table_.data()), vocab, hidden);
    run("embed_tokens", rows, most_launches, 4.0 * static_cast<double>(rows * hidden), List::none, [&](size i) {
      embed_tokens(gpu{stream_}, device_view(static_cast<const id*>(tokens_.data() + i), rows), table, out(i, rows));
    });
  }
  void choose(size rows) {
    const size each = rows * vocab;
    run("argmax", rows, logits_.count() / each, 4.0 * static_cast<double>(each), List::none, [&](size i) {
      argmax(gpu{stream_}, device_view(static_cast<const float*>(logits_.data() + i * each), rows, vocab), workspace_,
             ids_.view(rows));
    });
  }

 private:
  DeviceView<const bf16, 1> weight(size which) const {
    return device_view(static_cast<const bf16*>(weights_.data() + which * hidden), hidden);
  }
  DeviceView<bf16, 2> out(size i, size rows) const {
    return device_view(out_.data() + i * rows * hidden % (out_.count() - most_rows * hidden), rows, hidden);
  }
  /// Against what launch `last` left for the last row.
  void compare_normed(const char* name, const std::vector<double>& x, const HostView<const double, 1>& w, size last,
                      size rows) {
    std::vector<double> want(hidden);
    rms_norm(host{}, view(x.data(), size{1}, hidden), w, 1e-5, view(want.data(), size{1}, hidden));
    report_.compare(name, device_row(out(last, rows).data + (rows - 1) * hidden, hidden), want, 4e-3);
  }
  /// Times as many launches as there is room for; returns the index of the last.
  template <class Launch>
  size run(const char* name, size rows, size room, double bytes, List list, Launch&& launch) {
    const size launches = (std::min)(room, most_launches);
    const Timing time = measure(stream_, launches, report_.replays(21), [&] {
      for (size i = 0; i < launches; ++i) launch(i);
    });
    report_.add(name, rows, 0, time, bytes, list);
    return launches - 1;
  }

  Report& report_;
  DeviceStream stream_;
  DeviceBuffer<bf16> pool_{pool_bytes / 2, false}, out_{(size{64} << 20) + most_rows * hidden, false};
  DeviceBuffer<bf16> weights_{3 * hidden, false}, table_{vocab * hidden};
  DeviceBuffer<float> logits_{size{4} * most_rows * vocab, false};
  DeviceBuffer<id> tokens_{}, ids_{most_rows};
  DeviceArgmaxWorkspace workspace_{most_rows};
};

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    Report report(argc, argv);
    Rows rows(report);
    for (const size batch : report.batches()) rows.attnres("attnres_norm", batch, 9, List::results);
    for (const size batch : report.batches()) rows.attnres("attnres_norm, 5 sources", batch, 5);
    for (const size batch : report.batches()) rows.attnres("attnres_norm, 1 source", batch, 1);
    for (const size batch : report.batches()) rows.norm(batch);
    for (const size batch : report.batches()) rows.choose(batch);
    for (const size batch : report.batches()) rows.embed(batch);
  });
}
