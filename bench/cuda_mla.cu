// SPDX-License-Identifier: Apache-2.0
// MLA attention on the device at the released model's geometry in bf16: from absorbed queries to latent means (attend
// and combine), over a paged cache whose pages lie in random order, and the products before and after it. A graph's
// launches read different pages and queries, as many as the memory has room for. Two limits are measured in the same
// run: reading, and matrix products of the kernel's shape. Ends with a comparison with sums in double.

#include <algorithm>
#include <cmath>
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

/// Numbers that are sums of four uniform ones, of deviation `deviation`, from the index.
__global__ void fill(bf16* to, size count, float deviation, unsigned seed) {
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < count; i += size{gridDim.x} * blockDim.x) {
    unsigned long long bits = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
    bits = (bits ^ (bits >> 31)) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 29)) * 0x94d049bb133111ebull;
    float sum = -2;
    for (int part = 0; part < 4; ++part) sum += static_cast<float>((bits >> (16 * part)) & 0xffff) / 65536.0f;
    to[i] = bf16(sum * deviation * 1.7320508f);
  }
}

/// Products [64, N] = [64, 64] [64, N] from shared memory, two warpgroups a block.
template <int N>
__global__ void __launch_bounds__(256, 1) multiply(const bf16* from, unsigned steps, float* sink) {
  if constexpr (kernel::mla_on_hopper) {
    extern __shared__ __align__(1024) unsigned char operands[];
    for (unsigned i = threadIdx.x; i < 160 * 1024 / 16; i += 256)
      reinterpret_cast<uint4*>(operands)[i] = reinterpret_cast<const uint4*>(from)[i];
    kernel::async_fence();
    __syncthreads();
    const unsigned base = kernel::shared_address(operands) + threadIdx.x / 128 * 65536;
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
  const Timing time = measure(stream, 1, 9, [&] { multiply<N><<<132, 256, 160 * 1024, stream>>>(from, steps, sink); });
  return 132.0 * 2 * steps * 16 * 64 * N * 16 * 2 / time.median_us * 1e-6;
}

struct Memory {
  size pages;
  DeviceBuffer<bf16> cache, q, kv_b, projected;
  DeviceBuffer<id> table, slots;
  DeviceBuffer<size> positions;
  DeviceBuffer<float> out{most_rows * heads * latent};
  DeviceBuffer<bf16> expanded{most_rows * mla_v_width(geometry)};
  std::vector<id> order;
  MlaDeviceWorkspace<Bf16> workspace{geometry, most_rows, size{1} << 20};

  explicit Memory(size page_count)
      : pages(page_count),
        cache(pages * page_size * width, false),
        q(4 * most_rows * heads * width, false),
        kv_b(8 * mla_kv_b_rows(geometry) * latent, false),
        projected(4 * most_rows * mla_q_width(geometry), false),
        table(pages, false),
        slots(most_rows),
        positions(most_rows),
        order(pages) {
    fill<<<1024, 256>>>(cache.data(), cache.count(), 1, 1);
    fill<<<1024, 256>>>(q.data(), q.count(), 1, 2);
    fill<<<1024, 256>>>(kv_b.data(), kv_b.count(), 0.05f, 3);
    fill<<<1024, 256>>>(projected.data(), projected.count(), 1, 4);
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

/// Largest difference from sums in double of some heads of the last row, relative to the largest value.
double difference(const Memory& m, size set, size rows, size context) {
  const size row = rows - 1, blocks = context / page_size;
  std::vector<bf16> q(heads * width), tile(page_size * width);
  std::vector<float> got(heads * latent);
  check_cuda(cudaMemcpy(q.data(), m.queries(set, rows).data + row * heads * width, q.size() * 2, cudaMemcpyDefault));
  check_cuda(cudaMemcpy(got.data(), m.out.data() + row * heads * latent, got.size() * 4, cudaMemcpyDefault));
  double worst = 0, largest = 0;
  const size sampled[3] = {0, 47, 95};
  std::vector<double> sums(3 * latent), totals(3);
  for (size b = 0; b < blocks; ++b) {
    const size page = static_cast<size>(m.order[set * rows * blocks + row * blocks + b]);
    check_cuda(cudaMemcpy(tile.data(), m.cache.data() + page * tile.size(), tile.size() * 2, cudaMemcpyDefault));
    for (size i = 0; i < 3; ++i)
      for (size p = 0; p < page_size; ++p) {
        double score = 0;
        for (size c = 0; c < width; ++c)
          score += double{static_cast<float>(q[sampled[i] * width + c])} * static_cast<float>(tile[p * width + c]);
        const double weight = std::exp(score / std::sqrt(192.0));
        totals[i] += weight;
        for (size c = 0; c < latent; ++c) sums[i * latent + c] += weight * static_cast<float>(tile[p * width + c]);
      }
  }
  for (size i = 0; i < 3; ++i)
    for (size c = 0; c < latent; ++c) {
      const double want = sums[i * latent + c] / totals[i];
      largest = std::max(largest, std::abs(want));
      worst = std::max(worst, std::abs(want - got[sampled[i] * latent + c]));
    }
  return worst / largest;
}

}  // namespace

int main(int argc, char** argv) try {
  Report report(argc, argv);
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const gpu exec{stream};
  Memory m(128 * 2048);
  const DeviceBuffer<float> sink(1);
  const Timing read = measure(stream, 1, 9, [&] {
    read_all<<<132 * 16, 256, 0, stream>>>(reinterpret_cast<const uint4*>(m.cache.data()), size{1} << 28,
                                           reinterpret_cast<unsigned*>(sink.data()));
  });
  const double ceiling = static_cast<double>(size{1} << 32) / read.median_us * 1e-3;
  const double rate = products_per_second<96>(stream, m.q.data(), sink.data());
  std::printf("read ceiling %.0f GB/s; products 64 x 48 x 16: %.0f, 64 x 96 x 16: %.0f TFLOP/s\n", ceiling,
              products_per_second<48>(stream, m.q.data(), sink.data()), rate);
  std::printf("workspace %.1f MB\n", static_cast<double>(m.workspace.bytes()) * 1e-6);
  const auto time_attend = [&](size context, size rows) {
    if (rows * (context / page_size) > m.pages) return;
    m.set_batch(rows, context);
    const double tokens = static_cast<double>(rows * context);
    const size sets = std::min(size{16}, m.pages / (rows * (context / page_size)));
    const size launches = tokens > 1e6 ? 2 : 16;
    Timing times[2];
    double worst = 0;
    for (const bool independent : {false, true}) {
      const gpu how{stream, independent};
      times[independent] = measure(stream, launches, tokens > 4e6 ? 5 : 15, [&] {
        for (size i = 0; i < launches; ++i) m.attend(how, i % sets, rows, context);
      });
      if (tokens > 6e5 || (context > 4096 && rows > 1)) continue;
      m.attend(how, 0, rows, context);
      check_cuda(cudaStreamSynchronize(stream));
      worst = std::max(worst, difference(m, 0, rows, context));
    }
    const double bytes = tokens * width * 2, products = tokens * heads * (width + latent) * 2;
    const double limit = std::max(bytes / ceiling * 1e-3, products / 750e6), us = times[0].median_us;
    std::printf(
        "%8zu x %4zu: %8.2f us (%.2f to %.2f), independent %8.2f (%.2f to %.2f); limit %7.2f, %4.1f %%, %5.0f GB/s, "
        "%4.0f TFLOP/s",
        context, rows, us, times[0].low_us, times[0].high_us, times[1].median_us, times[1].low_us, times[1].high_us,
        limit, 100 * limit / us, bytes / us * 1e-3, products / us * 1e-6);
    if (worst > 0) std::printf(", difference %.1e", worst);
    std::printf("\n");
    if (worst > 1e-2)
      throw invalid_argument("bench", "mla_attention", std::to_string(worst), "a difference below 1e-2");
    report.add("mla_attention", rows, context, times[0], bytes);
    report.add("mla_attention_independent", rows, context, times[1], bytes);
  };
  const std::vector<size> contexts =
      report.quick() ? std::vector<size>{4096, 32768, 131072} : std::vector<size>{1024, 4096, 32768, 131072};
  for (const size context : contexts)
    for (const size rows : report.batches()) time_attend(context, rows);
  if (!report.quick()) time_attend(size{1} << 20, 1);
  for (const size rows : {size{1}, size{8}, size{32}, size{128}}) {
    const auto weights = [&](size i) {
      return AnyMatrix<MemorySpace::device>(
          device_view(static_cast<const bf16*>(m.kv_b.data()) + i % 8 * mla_kv_b_rows(geometry) * latent,
                      mla_kv_b_rows(geometry), latent));
    };
    const auto q = device_view(static_cast<const bf16*>(m.projected.data()), rows, mla_q_width(geometry));
    const auto absorbed = m.workspace.q_latent(rows);
    const Timing absorb = measure(stream, 16, 15, [&] {
      for (size i = 0; i < 16; ++i) mla_absorb_query(exec, geometry, q, weights(i), absorbed);
    });
    const Timing expand = measure(stream, 16, 15, [&] {
      for (size i = 0; i < 16; ++i)
        mla_expand_values(exec, geometry, DeviceView<const float, 3>(m.out.view(rows, heads, latent)), weights(i),
                          m.expanded.view(rows, mla_v_width(geometry)));
    });
    std::printf("batch %4zu: absorb %.2f us (%.2f to %.2f), expand %.2f us (%.2f to %.2f)\n", rows, absorb.median_us,
                absorb.low_us, absorb.high_us, expand.median_us, expand.low_us, expand.high_us);
  }
  check_cuda(cudaStreamDestroy(stream));
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
