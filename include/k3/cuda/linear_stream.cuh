// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/launch.cuh>
#include <k3/cuda/tensor_map.cuh>
#include <k3/kernels/linear_wide.cuh>

namespace k3::detail {

/// Bytes of shared memory of a block: nearly all there is, for much of it holds tokens where there are many; with few,
/// what the measured rate needs and no more, since kernels before and after may then lie on the same multiprocessor.
/// All that a block may have is 232448 bytes; static memory takes up to 1024, for dynamic memory begins where the
/// strictest kernel of the program wants it.
inline constexpr int stream_most_shared = 231424;
template <int Tokens>
inline constexpr int stream_shared = Tokens > 32 ? stream_most_shared : 160000;
/// Units of a pass where steps are fetched together and one pass is not enough: slots are smaller, and more.
inline constexpr unsigned stream_few_units = 8;
/// Slots of the ring of tokens where there are many.
inline constexpr unsigned stream_token_slots = 4;

/// A matrix of bf16 in boxes of `box_rows` rows and 64 columns. `wide`: the L2 cache fetches 256 bytes of a row at
/// once.
inline CUtensorMap stream_map(const char* operation, const void* data, size rows, size columns, size stride,
                              unsigned box_rows, bool wide) {
  static_assert(kernel::stream_columns == 64);
  return tensor_map<2>(operation, static_cast<const bf16*>(data), {columns, rows}, {stride}, box_rows,
                       wide ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

/// Whether linear_stream can run: it is empty where it was compiled for another target.
inline bool stream_available() { return target("linear").warpgroup_products; }

/// Clusters of a kernel that the device holds at a time, one block on a multiprocessor.
template <int Tokens, int Split>
unsigned stream_clusters() {
  static const unsigned count = [] {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = Split, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = Split, config.blockDim = 128, config.dynamicSmemBytes = size{200} << 10;
    config.attrs = &attribute, config.numAttrs = 1;
    check_cuda("linear", "cudaFuncSetAttribute",
               cudaFuncSetAttribute(kernel::linear_stream<Tokens, Split>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    stream_most_shared));
    int clusters = 0;
    check_cuda("linear", "cudaOccupancyMaxActiveClusters",
               cudaOccupancyMaxActiveClusters(&clusters, kernel::linear_stream<Tokens, Split>, &config));
    return static_cast<unsigned>(clusters);
  }();
  return count;
}

/// The maps of the weights of all segments.
inline void map_weights(const char* operation, kernel::StreamArguments& a, size segments) {
  for (size i = 0; i < segments; ++i) {
    const kernel::LinearSegment& s = a.linear.segment[i];
    const unsigned box = s.kind == kernel::LinearKind::glu ? 8 : 16;
    const auto map = [&](const void* weight) {
      return stream_map(operation, weight, s.rows, a.linear.columns, a.linear.columns, box, !a.together);
    };
    a.weight[i] = map(s.weight);
    if (s.up != nullptr) a.up[i] = map(s.up);
  }
}

template <int Tokens, int Split>
void launch_stream(const gpu& exec, const char* operation, kernel::StreamArguments& a, size segments) {
  const auto function = kernel::linear_stream<Tokens, Split>;
  check_cuda(operation, "cudaFuncSetAttribute",
             cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, stream_most_shared));
  const unsigned units = a.linear.units;
  const unsigned owners =
      smaller(units, Split == 1 ? static_cast<unsigned>(multiprocessors()) : stream_clusters<Tokens, Split>());
  const unsigned own = (units + owners - 1) / owners;
  a.together = Tokens < kernel::wide_tokens;
  const unsigned most =
      a.together && Split == 1 && own > kernel::stream_most_warps ? stream_few_units : kernel::stream_most_warps;
  a.passes = (own + most - 1) / most;
  a.tile_units = (own + a.passes - 1) / a.passes;
  const unsigned warps = (a.tile_units + 3) / 4 * 4;
  a.linear.groups = (a.linear.tokens + Tokens - 1) / Tokens;
  const size slot = a.tile_units * kernel::stream_unit_bytes + Tokens * kernel::stream_row_bytes;
  const size chunk = kernel::stream_chunk<kernel::stream_tiles<Tokens, Split> * 8>;
  const size scratch = warps * chunk * kernel::stream_scratch_stride * 4;
  const size over = (warps - a.tile_units) * kernel::stream_unit_bytes;  // read beyond the last slot, and not used
  const size beyond = 1024 + larger(over, Split > 1 ? 0 : scratch);
  a.slots = static_cast<unsigned>(smaller<size>((stream_shared<Tokens> - beyond) / slot, kernel::stream_most_slots));
  // With a split, what the blocks exchange takes the ring's place, and the scratch memory follows it.
  const size exchange = Split > 1 ? warps * kernel::stream_tiles<Tokens, Split> * 1024 : 0;
  a.scratch_at = static_cast<unsigned>(Split > 1 ? exchange : a.slots * slot);
  map_weights(operation, a, segments);
  a.x = stream_map(operation, a.linear.x, a.linear.tokens, a.linear.columns,
                   a.linear.tokens == 1 ? a.linear.columns : a.linear.x_stride, Tokens, true);
  launch_clusters(operation, exec.stream, Split, owners * Split, (warps + kernel::stream_fill_warps) * 32,
                  larger(a.slots * slot, Split > 1 ? exchange + scratch : 0) + beyond, function, a);
}

/// Whether a launch's K is to be split: there are few rows for the multiprocessors, and each cluster has one pass.
template <int Tokens, int Split>
bool stream_splits(const kernel::LinearArguments<bf16>& l) {
  return !l.whole && l.tokens <= Tokens && l.units <= stream_clusters<Tokens, Split>() * kernel::stream_most_warps;
}

/// Many tokens, `own` units a block at most, in passes of up to `Units`.
template <int Units, bool Whole = false>
void launch_wide(const gpu& exec, const char* operation, kernel::StreamArguments& a, size segments, unsigned own) {
  const auto function = kernel::linear_wide<kernel::wide_tokens, Units, Whole>;
  check_cuda(operation, "cudaFuncSetAttribute",
             cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, stream_most_shared));
  a.passes = (own + Units - 1) / Units;
  a.tile_units = (own + a.passes - 1) / a.passes;
  a.linear.groups = (a.linear.tokens + kernel::wide_tokens - 1) / kernel::wide_tokens;
  const size slot = a.tile_units * kernel::stream_unit_bytes;
  a.token_slots = stream_token_slots;
  const size tokens = size{a.token_slots} * kernel::wide_tokens * kernel::stream_row_bytes;
  const size scratch = kernel::wide_warps * 8 * kernel::stream_scratch_stride * 4, beyond = 1024 + tokens + scratch;
  a.slots = static_cast<unsigned>(smaller<size>((stream_most_shared - beyond) / slot, kernel::stream_most_slots));
  a.together = true;
  a.tokens_at = static_cast<unsigned>(a.slots * slot);  // read beyond the last slot, and not used
  a.scratch_at = static_cast<unsigned>(a.slots * slot + tokens);
  map_weights(operation, a, segments);
  a.x = stream_map(operation, a.linear.x, a.linear.tokens, a.linear.columns, a.linear.x_stride, kernel::wide_tokens,
                   true);
  const unsigned blocks = smaller(a.linear.units, static_cast<unsigned>(multiprocessors()));
  launch_clusters(operation, exec.stream, 1, blocks, kernel::wide_threads, a.slots * slot + beyond, function, a);
}

/// More than 64 tokens, K not split. Eight units fill weights' operands of 64 rows, and are no faster as the other.
inline void launch_many(const gpu& exec, const char* operation, kernel::StreamArguments& a, size segments) {
  const unsigned blocks = smaller(a.linear.units, static_cast<unsigned>(multiprocessors()));
  const unsigned own = (a.linear.units + blocks - 1) / blocks;
  if (a.linear.whole && own > 12) return launch_wide<13, true>(exec, operation, a, segments, own);
  if (own == 8) return launch_stream<kernel::wide_tokens, 1>(exec, operation, a, segments);
  if (own < 8) return launch_wide<7>(exec, operation, a, segments, own);
  if (own == 9) return launch_wide<9>(exec, operation, a, segments, own);
  launch_wide<12>(exec, operation, a, segments, own);
}

template <int Tokens>
void launch_stream(const gpu& exec, const char* operation, kernel::StreamArguments& a, size segments) {
  if (stream_splits<Tokens, 2>(a.linear)) return launch_stream<Tokens, 2>(exec, operation, a, segments);
  if constexpr (Tokens == kernel::wide_tokens)
    launch_many(exec, operation, a, segments);
  else
    launch_stream<Tokens, 1>(exec, operation, a, segments);
}

inline void launch_stream(const gpu& exec, const char* operation, const kernel::LinearArguments<bf16>& l,
                          size segments) {
  kernel::StreamArguments a;
  a.linear = l;
  if (l.tokens <= 8) return launch_stream<8>(exec, operation, a, segments);
  if (l.tokens <= 16) return launch_stream<16>(exec, operation, a, segments);
  if (l.tokens <= 32) return launch_stream<32>(exec, operation, a, segments);
  if (l.tokens <= 64) return launch_stream<64>(exec, operation, a, segments);
  launch_stream<128>(exec, operation, a, segments);
}

}  // namespace k3::detail
