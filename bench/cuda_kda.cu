// SPDX-License-Identifier: Apache-2.0
// KDA on the device at the released model's geometry in bf16: the fused kernel of a layer. Every launch has its own
// slots, inputs and weights, and a graph's launches touch more memory than the L2 cache holds. Bytes: the state and the
// window read and written once, inputs, output and weights once. After its timing a batch takes one more step, of which
// one head of the last row is compared with the formulae in double.

#include <algorithm>

#include <k3/cuda/kda_decode_token.cuh>
#include <k3/formula/kda.hpp>
#include <k3/geometry/presets.hpp>

#include "cuda_harness.cuh"

namespace {

using namespace k3;
using namespace k3::bench;

constexpr kimi_k3::Kda geometry;
constexpr size width = kda_width(geometry), channels = kda_conv_channels(geometry), heads = geometry.heads;
constexpr size state_elements = kda_state_elements(geometry), window_elements = kda_conv_elements(geometry);
constexpr size most_launches = 64, slot_count = 512;

/// Reads and writes 64 KB a block in place, as the kernel does with a head: what the memory gives for that alone.
__global__ void __launch_bounds__(256) update_all(float4* all) {
  float4 v[16];
  all += blockIdx.x * size{4096} + threadIdx.x;
#pragma unroll
  for (int j = 0; j < 16; ++j) v[j] = __ldcs(all + j * 256);
#pragma unroll
  for (int j = 0; j < 16; ++j) __stcs(all + j * 256, make_float4(-v[j].x, -v[j].y, -v[j].z, -v[j].w));
}

template <class T>
DeviceBuffer<T> filled(size count, std::uint64_t seed, float range, float offset = 0) {
  DeviceBuffer<T> buffer(count, false);
  fill_uniform(buffer.data(), count, seed, range, offset);
  return buffer;
}

struct Memory {
  KdaDeviceState<float, bf16> state{geometry, slot_count};
  DeviceBuffer<bf16> x = filled<bf16>(slot_count * channels, 1, 2), z = filled<bf16>(slot_count * width, 2, 2);
  DeviceBuffer<bf16> gate = filled<bf16>(slot_count * width, 3, 2), beta = filled<bf16>(slot_count * heads, 4, 2);
  DeviceBuffer<bf16> out = filled<bf16>(slot_count * width, 5, 1);
  DeviceBuffer<float> conv = filled<float>(most_launches * channels * 4, 6, 0.7f);
  DeviceBuffer<float> a_log = filled<float>(128, 7, 1), bias = filled<float>(most_launches * width, 8, 1);
  DeviceBuffer<float> norm = filled<float>(128, 9, 0.5f, 1);
  DeviceBuffer<id> slots;
  DeviceBuffer<unsigned> status{slot_count};

  Memory() {
    const auto view = state.view();
    fill_uniform(view.recurrent.data, view.recurrent.elements(), 10, 0.5f);
    fill_uniform(view.conv.data, view.conv.elements(), 11, 2.0f);
    std::vector<id> ids(slot_count);
    for (size i = 0; i < slot_count; ++i) ids[i] = static_cast<id>(i);
    slots = DeviceBuffer<id>(ids);
    check_cuda(cudaDeviceSynchronize());
  }

  /// The step of `rows` sequences in a layer, from row `first` of everything.
  void launch(const gpu& exec, size layer, size first, size rows) const {
    const auto conv_weights =
        kda_conv_weights(geometry, device_view(conv.data() + layer * channels * 4, channels, size{4}));
    kda_decode_fused(exec, geometry, device_view(x.data() + first * channels, rows, channels), conv_weights,
                     device_view(z.data() + first * width, rows, width), device_view(a_log.data(), heads),
                     device_view(bias.data() + layer * width, width),
                     device_view(beta.data() + first * heads, rows, heads),
                     device_view(gate.data() + first * width, rows, width), device_view(norm.data(), size{128}), 1e-5f,
                     device_view(slots.data() + first, rows), state.view(),
                     device_view(out.data() + first * width, rows, width), device_view(status.data() + first, rows));
  }
};

/// One more step, of layer 0 and slots from 0 on: the last head of the last row against the formulae in double.
void compare_step(Report& report, const Memory& m, cudaStream_t stream, size rows) {
  constexpr size dim = geometry.head_dim, head = heads - 1, taps = 4;
  const size row = rows - 1, channel = row * width + head * dim;
  const auto state = m.state.view();
  const float* const at = state.recurrent.data + row * state_elements + head * dim * dim;
  std::vector<double> s = device_row(at, dim * dim);
  std::vector<double> parts[3];  // q, k, v: convolved
  for (size part = 0; part < 3; ++part) {
    const size first = part * width + head * dim;
    const auto past = device_row(state.conv.data + row * window_elements + first * (taps - 1), dim * (taps - 1));
    const auto x = device_row(m.x.data() + row * channels + first, dim);
    const auto weights = device_row(m.conv.data() + first * taps, dim * taps);
    for (size c = 0; c < dim; ++c) {
      double sum = weights[c * taps + taps - 1] * x[c];
      for (size t = 0; t + 1 < taps; ++t) sum += weights[c * taps + t] * past[c * (taps - 1) + t];
      parts[part].push_back(rounded(silu(sum)));
    }
  }
  const auto z = device_row(m.z.data() + channel, dim), bias = device_row(m.bias.data() + head * dim, dim);
  const auto gate = device_row(m.gate.data() + channel, dim), norm = device_row(m.norm.data(), dim);
  const double rate = std::exp(device_row(m.a_log.data() + head, 1)[0]);
  const double beta = sigmoid(device_row(m.beta.data() + row * heads + head, 1)[0]);
  m.launch(gpu{stream}, 0, 0, rows);

  auto& [q, k, v] = parts;
  const auto squares = [](const std::vector<double>& values) {
    double sum = 0;
    for (const double value : values) sum += value * value;
    return sum;
  };
  const double q_scale = 1 / std::sqrt((squares(q) + 1e-6) * dim), k_scale = 1 / std::sqrt(squares(k) + 1e-6);
  for (size i = 0; i < dim; ++i) {
    const double decay = std::exp(*geometry.gate_lower_bound * sigmoid(rate * (z[i] + bias[i])));
    for (size j = 0; j < dim; ++j) s[i * dim + j] *= decay;
    q[i] *= q_scale, k[i] *= k_scale;
  }
  std::vector<double> out(dim, 0.0);
  for (size j = 0; j < dim; ++j) {
    double read = 0;
    for (size i = 0; i < dim; ++i) read += s[i * dim + j] * k[i];
    for (size i = 0; i < dim; ++i) {
      s[i * dim + j] += k[i] * beta * (v[j] - read);
      out[j] += s[i * dim + j] * q[i];
    }
  }
  const double scale = 1 / std::sqrt(squares(out) / dim + 1e-5);
  for (size j = 0; j < dim; ++j) out[j] *= norm[j] * scale * sigmoid(gate[j]);
  report.compare("kda_fused", device_row(m.out.data() + channel, dim), out, 4e-3);
  report.compare("kda_fused, state", device_row(at, dim * dim), s, 1e-5);
}

double moved(size rows) {
  return static_cast<double>(
      rows * (2 * state_elements * 4 + 2 * window_elements * 2 + (channels + 3 * width + heads) * 2) + channels * 16 +
      width * 4);
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    Report report(argc, argv);
    const Memory memory;
    const DeviceStream stream;
    const auto state = memory.state.view().recurrent;
    const size bytes = state.elements() * sizeof(float);
    const Timing update = measure(stream, 1, 9, [&] {
      update_all<<<static_cast<unsigned>(bytes / 65536), 256, 0, stream>>>(reinterpret_cast<float4*>(state.data));
    });
    report.add("update in place", slot_count, 0, update, 2.0 * static_cast<double>(bytes), List::none);
    for (const size rows : report.batches()) {
      const size launches = (std::min)(most_launches, slot_count / rows);
      const Timing time = measure(stream, launches, report.replays(30), [&] {
        for (size i = 0; i < launches; ++i) memory.launch(gpu{stream}, i, i * rows, rows);
      });
      report.add("kda_fused", rows, 0, time, moved(rows));
      compare_step(report, memory, stream, rows);
    }
  });
}
