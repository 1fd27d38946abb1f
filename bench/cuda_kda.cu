// SPDX-License-Identifier: Apache-2.0
// KDA on the device at the released model's geometry in bf16: the fused kernel of a layer, a step of 1, 8, 32 and 128
// sequences. Every launch has its own slots, inputs and weights, and a graph's launches touch more memory than the L2
// holds. Bytes: the state and the window read and written once, inputs, output and weights once.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

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

/// Numbers in +-range, from the index.
template <class T>
__global__ void fill(T* to, size count, float range, float offset) {
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < count; i += size{gridDim.x} * blockDim.x) {
    unsigned bits = static_cast<unsigned>(i) * 2654435761u;
    bits = (bits ^ (bits >> 15)) * 2246822519u;
    to[i] = static_cast<T>(range * (static_cast<float>(bits >> 8) / 8388608.0f - 1) + offset);
  }
}

/// Reads and writes every element once, as the state is.
__global__ void update_all(float4* all, size count) {
  const size step = size{gridDim.x} * blockDim.x;
  size i = blockIdx.x * size{blockDim.x} + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    float4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(all + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) __stcs(all + i + j * step, make_float4(-v[j].x, -v[j].y, -v[j].z, -v[j].w));
  }
}

template <class T>
DeviceBuffer<T> filled(size count, float range, float offset = 0) {
  DeviceBuffer<T> buffer(count, false);
  fill<<<1024, 256>>>(buffer.data(), count, range, offset);
  detail::check_launch("fill");
  return buffer;
}

struct Memory {
  KdaDeviceState<float, bf16> state{geometry, slot_count};
  DeviceBuffer<bf16> x = filled<bf16>(slot_count * channels, 2), z = filled<bf16>(slot_count * width, 2);
  DeviceBuffer<bf16> gate = filled<bf16>(slot_count * width, 2), beta = filled<bf16>(slot_count * heads, 2);
  DeviceBuffer<bf16> out = filled<bf16>(slot_count * width, 1);
  DeviceBuffer<float> conv = filled<float>(most_launches * channels * 4, 0.7f);
  DeviceBuffer<float> a_log = filled<float>(128, 1), bias = filled<float>(most_launches * width, 1);
  DeviceBuffer<float> norm = filled<float>(128, 0.5f, 1);
  DeviceBuffer<id> slots;
  DeviceBuffer<unsigned> status{slot_count};

  Memory() {
    const auto view = state.view();
    fill<<<1024, 256>>>(view.recurrent.data, view.recurrent.elements(), 0.5f, 0.0f);
    fill<<<1024, 256>>>(view.conv.data, view.conv.elements(), 2.0f, 0.0f);
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

}  // namespace

int main(int argc, char** argv) try {
  const bool json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const gpu exec{stream};
  const Memory memory;
  const auto state = memory.state.view().recurrent;
  const size bytes = state.elements() * sizeof(float);
  const DeviceBuffer<unsigned> sink(1);
  const Timing read = measure(stream, 1, 15, [&] {
    read_all<<<132 * 16, 256, 0, stream>>>(reinterpret_cast<const uint4*>(state.data), bytes / 16, sink.data());
  });
  const Timing update = measure(stream, 1, 15, [&] {
    update_all<<<132 * 16, 256, 0, stream>>>(reinterpret_cast<float4*>(state.data), bytes / 16);
  });
  const double ceiling = static_cast<double>(bytes) / read.median_us * 1e-3;
  const double updated = 2 * static_cast<double>(bytes) / update.median_us * 1e-3;
  if (json)
    std::printf("{\"read_gb_per_s\": %.1f, \"update_gb_per_s\": %.1f, \"results\": [", ceiling, updated);
  else
    std::printf("read ceiling %.0f GB/s, read and write in place %.0f GB/s\n", ceiling, updated);
  for (const size rows : {size{1}, size{8}, size{32}, size{128}}) {
    const size launches = (std::min)(most_launches, slot_count / rows);
    const Timing time = measure(stream, launches, 30, [&] {
      for (size i = 0; i < launches; ++i) memory.launch(exec, i, i * rows, rows);
    });
    const double moved = static_cast<double>(
        rows * (2 * state_elements * 4 + 2 * window_elements * 2 + (channels + 3 * width + heads) * 2) + channels * 16 +
        width * 4);
    const double gigabytes = moved / time.median_us * 1e-3;
    std::printf(
        json ? "%s\n{\"operation\": \"kda fused bf16\", \"batch\": %zu, \"median_us\": %.2f, \"p10_us\": %.2f, "
               "\"p90_us\": %.2f, \"gb_per_s\": %.1f, \"percent_of_read\": %.1f}"
             : "%skda fused bf16, 96 heads of 128, batch %4zu: %8.2f us (%.2f to %.2f), %5.0f GB/s, %5.1f %% of read\n",
        json && rows > 1 ? "," : "", rows, time.median_us, time.low_us, time.high_us, gigabytes,
        100 * gigabytes / ceiling);
  }
  if (json) std::printf("]}\n");
  check_cuda(cudaStreamDestroy(stream));
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
