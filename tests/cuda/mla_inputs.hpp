// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <numeric>

#include <k3/ops/row_status.hpp>

#include "cuda/device_test.hpp"
#include "cuda/mla_device.hpp"
#include "ops/mla_problem.hpp"

// Batches for the tests of MLA on the device, and the host's results for them.
namespace k3::test {

inline const float nan_float = std::numeric_limits<float>::quiet_NaN();
inline const unsigned bad_slot = static_cast<unsigned>(RowStatus::bad_slot);
inline constexpr double float_bound = 2e-6, float_pages_bound = 2e-6, bf16_bound = 5e-3;
inline constexpr double bf16_step = 1.0 / 128;  // of a bf16 to the next one, at most

inline std::vector<float> numbers(size count, std::uint32_t seed, double scale = 1.0) {
  std::vector<float> values;
  for (const double value : random_normal(count, seed, scale)) values.push_back(static_cast<float>(bf16(value)));
  return values;
}

/// One row for each of `lengths`, in a slot of its own, at the last position of that length; the cache before it is
/// random.
inline MlaDeviceInputs batch_of(const MlaConfig& g, const std::vector<size>& lengths, std::uint32_t seed,
                                size capacity = 0, size page_size = 0) {
  MlaDeviceInputs in;
  const size rows = lengths.size(), width = mla_cache_width(g);
  in.g = g;
  in.slots = rows, in.page_count = 0;
  for (const size length : lengths) capacity = std::max(capacity, length);
  in.page_size = page_size ? page_size : capacity;
  in.blocks = (capacity + in.page_size - 1) / in.page_size;
  in.table.assign(in.slots * in.blocks, 0);  // blocks that no position of the row needs share page 0
  for (size r = 0; r < rows; ++r)
    for (size b = 0; b * in.page_size < lengths[r]; ++b) in.table[r * in.blocks + b] = static_cast<id>(in.page_count++);
  in.q = numbers(rows * mla_q_width(g), seed, 1.5);
  in.kv_a = numbers(rows * width, seed + 1);
  in.norm = numbers(g.kv_lora_rank, seed + 2, 0.3);
  for (float& value : in.norm) value = static_cast<float>(bf16(1 + value));
  in.kv_b = numbers(mla_kv_b_rows(g) * g.kv_lora_rank, seed + 3, 1 / std::sqrt(static_cast<double>(g.kv_lora_rank)));
  if (g.mla_use_output_gate) in.gate = numbers(rows * mla_v_width(g), seed + 4);
  in.pages = numbers(in.page_count * in.page_size * width, seed + 5);
  for (size r = 0; r < rows; ++r) {
    in.slot.push_back(static_cast<id>(r));
    in.position.push_back(lengths[r] - 1);
  }
  return in;
}

/// Rows [first, first + count) of the batch, with the same cache.
inline MlaDeviceInputs rows_of(const MlaDeviceInputs& in, size first, size count) {
  MlaDeviceInputs result = in;
  const auto cut = [&](const auto& all) {
    const size width = in.rows() ? all.size() / in.rows() : 0;
    const auto at = all.begin() + static_cast<std::ptrdiff_t>(first * width);
    return std::decay_t<decltype(all)>(at, at + static_cast<std::ptrdiff_t>(count * width));
  };
  result.q = cut(in.q), result.kv_a = cut(in.kv_a), result.gate = cut(in.gate);
  result.slot = cut(in.slot), result.position = cut(in.position);
  return result;
}

/// The same numbers in another cache: other pages in a shuffled order, what no position uses filled with `fill`.
inline MlaDeviceInputs repaged(const MlaDeviceInputs& in, size page_size, size spare, float fill) {
  MlaDeviceInputs to = in;
  const size width = mla_cache_width(in.g), capacity = in.blocks * in.page_size + spare;
  to.page_size = page_size ? page_size : capacity;
  to.blocks = (capacity + to.page_size - 1) / to.page_size;
  to.page_count = to.slots * to.blocks + 2;
  to.table.resize(to.slots * to.blocks);
  std::iota(to.table.begin(), to.table.end(), 1);
  std::shuffle(to.table.begin(), to.table.end(), std::mt19937(5));
  to.pages.assign(to.page_count * to.page_size * width, fill);
  for (size r = 0; r < in.rows(); ++r) {
    const size slot = static_cast<size>(in.slot[r]);
    for (size p = 0; p < in.position[r]; ++p) {
      const auto row = [&](const MlaDeviceInputs& i) {
        return mla_row_offset(i.table[slot * i.blocks + p / i.page_size], i.page_size, p, width);
      };
      std::copy_n(in.pages.begin() + static_cast<std::ptrdiff_t>(row(in)), width,
                  to.pages.begin() + static_cast<std::ptrdiff_t>(row(to)));
    }
  }
  return to;
}

/// The host's output in the precision of U, and what its cache holds then.
template <class U>
std::vector<double> on_host(const MlaDeviceInputs& in, std::vector<double>* pages_then = nullptr) {
  const auto q = converted<U>(in.q), kv_a = converted<U>(in.kv_a), norm = converted<U>(in.norm),
             kv_b = converted<U>(in.kv_b), gate = converted<U>(in.gate);
  auto pages = converted<U>(in.pages);
  const size rows = in.rows(), n = mla_v_width(in.g), width = mla_cache_width(in.g);
  std::vector<U> out(rows * n);
  MlaWorkspace<U> workspace(in.g, rows);
  View<const U, 2> gates;
  if (in.g.mla_use_output_gate) gates = view(gate, rows, n);
  const MlaKvView<U> kv{view(pages, in.page_count, in.page_size, width), view(in.table, in.slots, in.blocks),
                        in.page_size};
  mla_decode_token(host{}, in.g, view(q, rows, mla_q_width(in.g)), view(kv_a, rows, width), view(norm),
                   view(kv_b, mla_kv_b_rows(in.g), in.g.kv_lora_rank), gates, view(in.slot), view(in.position), kv,
                   workspace, view(out, rows, n));
  if (pages_then) *pages_then = converted<double>(pages);
  return converted<double>(out);
}

template <class T>
void check_against_host(const MlaDeviceInputs& in, const MlaDeviceOptions& options = {}) {
  const MlaDeviceOutputs got = mla_on_device<T>(in, options);
  CHECK(std::count(got.status.begin(), got.status.end(), 0u) == static_cast<std::ptrdiff_t>(in.rows()));
  std::vector<double> pages;
  if constexpr (std::is_same_v<T, float>) {
    check(compare(got.out, on_host<double>(in, &pages), float_bound, 0, true));
    check(compare(got.pages, pages, float_pages_bound));
  } else {
    const std::vector<double> want = on_host<bf16>(in, &pages);
    check(compare(got.pages, pages, bf16_step));
    const double difference = relative_l2(std::vector<double>(got.out.begin(), got.out.end()), want);
    INFO("relative L2 " << difference << ", bound " << bf16_bound);
    CHECK(difference <= bf16_bound);
  }
}

template <class T>
void check_same(const std::vector<T>& got, const std::vector<T>& want) {
  check(same_bits(got, want));
}

inline const MlaConfig odd = mla_geometry_of(3, 20, 12, 28, 40);
inline const std::vector<size> edges{1, 63, 64, 65, 127, 128, 129, 1000};

}  // namespace k3::test
