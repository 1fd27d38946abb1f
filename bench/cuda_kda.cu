// SPDX-License-Identifier: Apache-2.0
// KDA on the device at the released model's geometry in bf16: the fused kernel of a layer. Every launch has its own
// slots, inputs and weights, and a graph's launches touch more memory than the L2 cache holds. Bytes: the state and the
// window read and written once, inputs, output and weights once.

#include <algorithm>

#include <k3/cuda/kda_decode_token.cuh>
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
    cudaStream_t stream;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const auto state = memory.state.view().recurrent;
    const size bytes = state.elements() * sizeof(float);
    const Timing update = measure(stream, 1, 9, [&] {
      update_all<<<static_cast<unsigned>(bytes / 65536), 256, 0, stream>>>(reinterpret_cast<float4*>(state.data));
    });
    report.add("update in place", slot_count, 0, update, 2.0 * static_cast<double>(bytes));
    for (const size rows : report.batches()) {
      const size launches = (std::min)(most_launches, slot_count / rows);
      const Timing time = measure(stream, launches, report.replays(30), [&] {
        for (size i = 0; i < launches; ++i) memory.launch(gpu{stream}, i, i * rows, rows);
      });
      report.add("kda_fused", rows, 0, time, moved(rows));
    }
    check_cuda(cudaStreamDestroy(stream));
  });
}
