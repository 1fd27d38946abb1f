// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <k3/core/mxfp4.hpp>
#include <k3/cuda/buffer.cuh>
#include <k3/formula/activation.hpp>
#include <k3/geometry/latent_moe_config.hpp>

// Random data whose element i can be computed anywhere, and products of them in double, as naively as can be, on the
// device: a weight is made again from its seed, so that nothing of the timed program's memory goes into the reference
// but a layer's input.
namespace k3::bench {

inline void check_cuda(cudaError_t code) { detail::check_cuda("bench", "CUDA", code); }

/// 64 well mixed bits from a counter, the same on every machine.
__host__ __device__ inline std::uint64_t mixed_bits(std::uint64_t z) {
  z = (z + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
/// Evenly spread in offset +- range.
__host__ __device__ inline float uniform(std::uint64_t seed, size i, float range, float offset) {
  return offset + range * (static_cast<float>(mixed_bits((seed << 40) + i) >> 40) / 8388608.0f - 1);
}
template <class T>
__global__ void uniform_kernel(T* to, size count, std::uint64_t seed, float range, float offset) {
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < count; i += size{gridDim.x} * blockDim.x)
    to[i] = static_cast<T>(uniform(seed, i, range, offset));
}
/// Random bytes from `first` on, as many different ones as `mask` (2^n - 1) lets through; in words of 8 bytes.
static __global__ void bytes_kernel(std::uint64_t* to, size words, std::uint64_t seed, std::uint64_t mask,
                                    std::uint64_t first) {
  for (size i = blockIdx.x * size{blockDim.x} + threadIdx.x; i < words; i += size{gridDim.x} * blockDim.x)
    to[i] = (mixed_bits((seed << 40) + i) & mask * 0x0101010101010101ull) + first * 0x0101010101010101ull;
}
template <class T>
void fill_uniform(T* to, size count, std::uint64_t seed, float range, float offset = 0, cudaStream_t stream = nullptr) {
  if (count > 0) uniform_kernel<<<detail::grid_size(count, 4096), 256, 0, stream>>>(to, count, seed, range, offset);
  detail::check_launch("fill_uniform");
}
/// `bytes` is a multiple of 8.
inline void fill_bytes(void* to, size bytes, std::uint64_t seed, unsigned char mask = 255, unsigned char first = 0,
                       cudaStream_t stream = nullptr) {
  bytes_kernel<<<detail::grid_size(bytes / 8, 1024), 256, 0, stream>>>(static_cast<std::uint64_t*>(to), bytes / 8, seed,
                                                                       mask, first);
  detail::check_launch("fill_bytes");
}

/// Uniform numbers of a seed, as fill_uniform makes them, in bf16.
struct RandomWeight {
  std::uint64_t seed;
  float range, offset;

  __host__ __device__ double operator()(size i) const {
    return static_cast<double>(static_cast<float>(bf16(uniform(seed, i, range, offset))));
  }
};

/// Expert codes of any kind with scales of 2^-9 to 2^-6, as fill_mxfp4 makes them; rows are whole groups of 32.
struct RandomMxfp4 {
  static constexpr unsigned char lowest_scale = 118, scale_mask = 3;
  std::uint64_t seed;

  __host__ __device__ double operator()(size i) const {
    const auto code = static_cast<std::uint8_t>(mixed_bits((seed << 40) + i / 16) >> i % 16 * 4 & 15);
    const size group = i / mxfp4_group;
    const std::uint64_t scale = mixed_bits(((seed + 1) << 40) + group / 8) >> group % 8 * 8 & scale_mask;
    return static_cast<double>(e2m1_value(code)) *
           static_cast<double>(e8m0_value(static_cast<std::uint8_t>(scale + lowest_scale)));
  }
};
inline void fill_mxfp4(void* codes, void* scales, size count, std::uint64_t seed) {
  fill_bytes(codes, count / 2, seed);
  fill_bytes(scales, count / mxfp4_group, seed + 1, RandomMxfp4::scale_mask, RandomMxfp4::lowest_scale);
}

/// One warp a result: the sum of element(starts[b] + k step) x[k].
template <class Element>
__global__ void __launch_bounds__(32)
    product_kernel(Element element, const size* starts, size step, const double* x, size count, double* out) {
  double sum = 0;
  for (size k = threadIdx.x; k < count; k += 32) sum += element(starts[blockIdx.x] + k * step) * x[k];
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
/// W x for the rows of a matrix that begin at these elements, `step` elements from one column to the next.
template <class Element>
std::vector<double> random_product(const Element& element, const std::vector<size>& starts,
                                   const std::vector<double>& x, size step = 1) {
  const DeviceBuffer<size> rows(starts);
  const DeviceBuffer<double> from(x), out(starts.size(), false);
  product_kernel<<<static_cast<unsigned>(starts.size()), 32>>>(element, rows.data(), step, from.data(), x.size(),
                                                               out.data());
  detail::check_launch("random_product");
  return out.to_vector();
}

/// 64 channels of `all`, evenly spread, or all where they are fewer.
inline std::vector<size> sampled(size all, size most = 64) {
  std::vector<size> channels(std::min(all, most));
  for (size i = 0; i < channels.size(); ++i) channels[i] = i * (all - 1) / std::max<size>(channels.size() - 1, 1);
  return channels;
}
/// first + distance i for each of `all`.
inline std::vector<size> places(const std::vector<size>& all, size first, size distance) {
  std::vector<size> result;
  for (const size i : all) result.push_back(first + distance * i);
  return result;
}

/// W x, W [rows, x.size()].
template <class Element>
std::vector<double> random_product(const Element& element, size rows, const std::vector<double>& x) {
  return random_product(element, places(sampled(rows, rows), 0, x.size()), x);
}

inline double rounded(double value) { return static_cast<double>(static_cast<float>(bf16(static_cast<float>(value)))); }

/// Some channels of what an expert makes of x, from the sources of its matrices w1, w3 and w2.
inline std::vector<double> random_expert(const LatentMoeConfig& g, const RandomMxfp4 (&w)[3],
                                         const std::vector<double>& x, const std::vector<size>& channels) {
  const std::vector<double> gate = random_product(w[0], g.expert_hidden, x),
                            up = random_product(w[1], g.expert_hidden, x);
  std::vector<double> mid(g.expert_hidden);
  for (size i = 0; i < mid.size(); ++i)
    mid[i] = rounded(situ_glu(gate[i], up[i], double{g.activation.beta}, double{*g.activation.linear_beta}));
  return random_product(w[2], places(channels, 0, mid.size()), mid);
}

/// Elements of device memory, in double.
template <class T>
std::vector<double> device_row(const T* from, size count) {
  std::vector<T> values(count);
  check_cuda(cudaDeviceSynchronize());
  check_cuda(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  std::vector<double> result(count);
  for (size i = 0; i < count; ++i) result[i] = static_cast<double>(static_cast<float>(values[i]));
  return result;
}
/// Those of the first `count` that are listed.
template <class T>
std::vector<double> device_row(const T* from, size count, const std::vector<size>& listed) {
  const std::vector<double> all = device_row(from, count);
  std::vector<double> result;
  for (const size i : listed) result.push_back(all[i]);
  return result;
}

/// |got - want| / |want|.
inline double relative_l2(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (size i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace k3::bench
