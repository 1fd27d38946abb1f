// SPDX-License-Identifier: Apache-2.0
// KDA on the host at the released model's geometry: the step (convolution, normalisation, recurrence), its gate and its
// gated norm. GB/s counts the state, once read and once written; the states of 64 slots (400 MB) are taken in turn.

#include <k3/geometry/presets.hpp>
#include <k3/ops/gated_rms_norm.hpp>
#include <k3/ops/kda_decode_token.hpp>
#include <k3/ops/kda_gate.hpp>

#include "harness.hpp"

namespace {

using namespace k3;

constexpr kimi_k3::Kda geometry;
constexpr size slots = 64, width = kda_width(geometry), channels = kda_conv_channels(geometry);

struct Setting {
  host exec;
  double ceiling;
};

/// Inputs of up to 4 rows and the weights, of moderate random values.
template <class T>
struct Inputs {
  std::vector<T> x, gate;
  std::vector<float> conv, log_decay, beta, a_log, bias, norm, core;

  Inputs()
      : x(4 * channels),
        gate(4 * width),
        conv(channels * 4),
        log_decay(4 * width),
        beta(4 * 96),
        a_log(96, 0.1f),
        bias(width, 0.2f),
        norm(128, 1.0f),
        core(4 * width) {
    fill(x, 2, 0), fill(gate, 2, 0), fill(conv, 1, 0), fill(log_decay, 1, -1), fill(beta, 2, 0), fill(core, 1, 0);
  }

 private:
  std::uint32_t bits_ = 1;
  template <class V>
  void fill(V& values, float range, float offset) {
    for (auto& v : values) {
      bits_ = bits_ * 1664525u + 1013904223u;
      v = static_cast<typename V::value_type>(range * (static_cast<float>(bits_ >> 8) / 8388608.0f - 1) + offset);
    }
  }
};

template <class T>
void run(bench::Report& report, const char* type, const Setting& s) {
  Inputs<T> in;
  KdaState<float, T> state(geometry, slots);
  std::vector<float> out(4 * width);
  std::vector<T> normed(4 * width);
  const auto conv = kda_conv_weights(geometry, view(in.conv, channels, 4));
  const auto add = [&](const std::string& name, size rows, double bytes, auto&& body) {
    const bench::Timing time = bench::measure(report.seconds(0.5), 400, body);
    report.add({name + " " + type, "96x128 B=" + std::to_string(rows), bench::isa_name(s.exec.isa), s.exec.threads,
                time, bytes, 0, s.ceiling});
  };
  for (const size rows : {size{1}, size{4}}) {
    const double bytes = static_cast<double>(2 * rows * kda_state_elements(geometry) * sizeof(float));
    add("kda step", rows, bytes, [&](int repetition) {
      id slot[4];
      for (size r = 0; r < rows; ++r) slot[r] = static_cast<id>((static_cast<size>(repetition) * rows + r) % slots);
      kda_decode_token(s.exec, geometry, view(in.x.data(), rows, channels), conv,
                       view(in.log_decay.data(), rows, width), view(in.beta.data(), rows, 96), view(slot, rows),
                       state.view(), view(out.data(), rows, width));
    });
  }
  const double small = static_cast<double>(width * (sizeof(T) + sizeof(float)));
  add("kda gate", 1, small, [&](int) {
    kda_gate(s.exec, geometry, view(in.gate.data(), 1, width), view(in.a_log), view(in.bias), -5.0f,
             view(out.data(), 1, width));
  });
  add("kda gated norm", 1, small + static_cast<double>(width * sizeof(T)), [&](int) {
    gated_rms_norm(s.exec, geometry, view(in.core.data(), 1, width), view(in.gate.data(), 1, width), view(in.norm),
                   1e-5f, view(normed.data(), 1, width));
  });
}

}  // namespace

int main(int argc, char** argv) {
  using k3::bench::Report;
  Report report(argc, argv);
  const k3::bench::RotatingPool pool(k3::size{512} << 20);
  for (const int threads : Report::thread_counts()) {
    const double ceiling = k3::bench::read_ceiling(pool, threads);
    report.print_ceiling(threads, ceiling);
    for (const k3::Isa isa : Report::isas(threads, k3::Isa::plain)) {
      const Setting setting{{.threads = threads, .isa = isa}, ceiling};
      run<float>(report, "fp32", setting);
      run<bf16>(report, "bf16", setting);
    }
  }
}
