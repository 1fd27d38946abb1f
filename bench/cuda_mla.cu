// SPDX-License-Identifier: Apache-2.0
// MLA attention on the device at the released model's geometry in bf16: from absorbed queries to latent means (attend
// and combine), over a paged cache whose pages lie in random order, with `independent = false` and by default. A
// graph's launches read different pages, at least 256 MB of them where there is room. Matrix products of the kernel's
// shape are timed too. What the last timed launch left for one head of the last row is compared with sums in double.

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include <k3/cuda/mla_decode_token.cuh>
#include <k3/geometry/presets.hpp>

#include "cuda_harness.cuh"

namespace {

using namespace k3;
using namespace k3::bench;

constexpr kimi_k3::Mla geometry;
constexpr size heads = geometry.heads, width = mla_cache_width(geometry), latent = geometry.kv_lora_rank;
constexpr size page_size = 64, most_rows = 128;

/// Products [64, N] = [64, 64] [64, N] from shared memory, two warpgroups a block.
template <int N>
__global__ void __launch_bounds__(256, 1) multiply(const bf16* from, unsigned steps, float* sink) {
  if constexpr (kernel::on_hopper) {
    extern __shared__ __align__(1024) unsigned char operands[];
    for (unsigned i = threadIdx.x; i < 160 * 1024 / 16; i += 256)
      reinterpret_cast<uint4*>(operands)[i] = reinterpret_cast<const uint4*>(from)[i];
    kernel::async::fence();
    __syncthreads();
    const unsigned base = kernel::async::shared_address(operands) + threadIdx.x / 128 * 65536;
    float d[2][N / 2] = {};
    for (unsigned s = 0; s < steps; ++s) {
      kernel::wgmma_fence();
#pragma unroll
      for (unsigned c = 0; c < 4; ++c)
#pragma unroll
        for (unsigned k = 0; k < 4; ++k)
          kernel::wgmma<0>(d[c % 2], kernel::wgmma_operand(base + c * 8192 + k * 32),
                           kernel::wgmma_operand(base + 32768 + c * 8192 + k * 32), true);
      kernel::wgmma_commit();
      kernel::wgmma_wait<0>();
    }
    float sum = 0;
    for (int c = 0; c < 2; ++c)
      for (int i = 0; i < N / 2; ++i) sum += d[c][i];
    if (sum == 12345.0f) *sink = sum;
  }
}

template <int N>
double products_per_second(cudaStream_t stream, const bf16* from, float* sink) {
  const unsigned steps = 4000;
  check_cuda(cudaFuncSetAttribute(multiply<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, 160 * 1024));
  const auto blocks = static_cast<unsigned>(detail::multiprocessors());
  const Timing time =
      measure(stream, 1, 9, [&] { multiply<N><<<blocks, 256, 160 * 1024, stream>>>(from, steps, sink); });
  return 2.0 * blocks * steps * 16 * 64 * N * 16 * 2 / time.median_us * 1e-6;
}

struct Memory {
  size pages;
  DeviceBuffer<bf16> cache, q;
  DeviceBuffer<id> table, slots;
  DeviceBuffer<size> positions;
  DeviceBuffer<float> out{most_rows * heads * latent};
  MlaDeviceWorkspace<Bf16> workspace{geometry, most_rows, size{1} << 20};

  explicit Memory(size page_count)
      : pages(page_count),
        cache(pages * page_size * width, false),
        q(4 * most_rows * heads * width, false),
        table(pages, false),
        slots(most_rows),
        positions(most_rows) {
    fill_uniform(cache.data(), cache.count(), 1, 1.7f);
    fill_uniform(q.data(), q.count(), 2, 1.7f);
    std::vector<id> order(pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
    table.copy_from(order.data(), 0, pages);
    check_cuda(cudaDeviceSynchronize());
  }
  void set_batch(size rows, size context) {
    std::vector<id> ids(rows);
    std::iota(ids.begin(), ids.end(), 0);
    slots.copy_from(ids.data(), 0, rows);
    positions.copy_from(std::vector<size>(rows, context - 1).data(), 0, rows);
  }
  DeviceView<const bf16, 3> queries(size set, size rows) const {
    return device_view(static_cast<const bf16*>(q.data()) + set % 4 * most_rows * heads * width, rows, heads, width);
  }
  MlaKvView<bf16, MemorySpace::device> kv(size set, size rows, size context) const {
    const size blocks = context / page_size, first = set * rows * blocks;
    return {cache.view(pages, page_size, width),
            device_view(static_cast<const id*>(table.data()) + first, rows, blocks), page_size};
  }
  void attend(const gpu& exec, size set, size rows, size context) const {
    mla_attend(exec, geometry, queries(set, rows), kv(set, rows, context), slots.view(rows), positions.view(rows),
               workspace, out.view(rows, heads, latent));
  }
};

/// Of each page of a row: what its positions weigh in a head, and their sum of each channel weighted so. No maximum is
/// taken off: scores of random numbers are small.
__global__ void __launch_bounds__(page_size)
    page_sums(const bf16* pages, const id* table, const bf16* q, const size* channels, double* sums) {
  __shared__ double weights[page_size];
  const bf16* const page = pages + static_cast<size>(table[blockIdx.x]) * page_size * width;
  double score = 0, total = 0, sum = 0;
  for (size c = 0; c < width; ++c)
    score += double{static_cast<float>(q[c])} * static_cast<float>(page[threadIdx.x * width + c]);
  weights[threadIdx.x] = exp(score / sqrt(192.0));
  __syncthreads();
  for (size p = 0; p < page_size; ++p) {
    total += weights[p];
    sum += weights[p] * static_cast<float>(page[p * width + channels[threadIdx.x]]);
  }
  sums[blockIdx.x * (page_size + 1) + threadIdx.x] = sum;
  if (threadIdx.x == 0) sums[blockIdx.x * (page_size + 1) + page_size] = total;
}

/// 64 channels of the last head of the last row.
void compare(Report& report, const std::string& name, const Memory& m, size set, size rows, size context) {
  const size row = rows - 1, blocks = context / page_size;
  const std::vector<size> channels = sampled(latent);
  const DeviceBuffer<size> listed(channels);
  const DeviceBuffer<double> sums(blocks * (page_size + 1), false);
  page_sums<<<static_cast<unsigned>(blocks), page_size>>>(m.cache.data(), m.table.data() + (set * rows + row) * blocks,
                                                          m.queries(set, rows).data + ((row + 1) * heads - 1) * width,
                                                          listed.data(), sums.data());
  detail::check_launch("page_sums");
  const std::vector<double> parts = sums.to_vector();
  std::vector<double> want(page_size + 1, 0.0);
  for (size i = 0; i < parts.size(); ++i) want[i % want.size()] += parts[i];
  const double total = want.back();
  want.pop_back();
  for (double& value : want) value /= total;
  report.compare(name, device_row(m.out.data() + ((row + 1) * heads - 1) * latent, latent, channels), want, 1e-2);
}

/// Both modes, one after the other.
void time_attend(Report& report, const Memory& m, cudaStream_t stream, size context, size rows) {
  const double tokens = static_cast<double>(rows * context), bytes = tokens * width * 2;
  const size each = rows * (context / page_size), wanted = static_cast<size>(256e6 / bytes) + 1;
  const size sets = std::min(std::max(wanted, size{2}), m.pages / each);
  const size launches = std::max(sets, tokens > 1e6 ? size{2} : size{16});
  for (const bool independent : {false, true}) {
    const Timing time = measure(stream, launches, report.replays(tokens > 4e6 ? 9 : 15), [&] {
      for (size i = 0; i < launches; ++i) m.attend({stream, independent}, i % sets, rows, context);
    });
    report.add("mla_attention", rows, context, time, bytes, independent ? List::independent : List::results);
    compare(report, independent ? "mla_attention, independent" : "mla_attention", m, (launches - 1) % sets, rows,
            context);
  }
}

void run(Report& report) {
  const DeviceStream stream;
  Memory m(128 * 2048);
  const DeviceBuffer<float> sink(1);
  std::printf("products 64 x 48 x 16: %.0f, 64 x 96 x 16: %.0f TFLOP/s; workspace %.1f MB\n",
              products_per_second<48>(stream, m.q.data(), sink.data()),
              products_per_second<96>(stream, m.q.data(), sink.data()),
              static_cast<double>(m.workspace.bytes()) * 1e-6);
  const auto time = [&](size context, size rows) {
    m.set_batch(rows, context);
    time_attend(report, m, stream, context, rows);
  };
  const std::vector<size> contexts =
      report.quick() ? std::vector<size>{4096, 32768, 131072} : std::vector<size>{1024, 4096, 32768, 131072};
  for (const size context : contexts)
    for (const size rows : report.batches()) time(context, rows);
  time(size{1} << 20, 1);
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    Report report(argc, argv);
    run(report);
  });
}
