// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include <k3/ops/row_status.hpp>

#include "cuda/device_test.hpp"
#include "cuda/mla_device.hpp"
#include "ops/mla_problem.hpp"

namespace {

using namespace k3;
using namespace k3::test;

const float nan_float = std::numeric_limits<float>::quiet_NaN();
const unsigned bad_slot = static_cast<unsigned>(RowStatus::bad_slot);
constexpr double float_bound = 2e-6, bf16_bound = 5e-3;

std::vector<float> numbers(size count, std::uint32_t seed, double scale = 1.0) {
  std::vector<float> values;
  for (const double value : random_normal(count, seed, scale)) values.push_back(static_cast<float>(bf16(value)));
  return values;
}

/// One row for each of `lengths`, in a slot of its own, at the last position of that length; the cache before it is
/// random.
MlaDeviceInputs batch_of(const MlaConfig& g, const std::vector<size>& lengths, std::uint32_t seed, size capacity = 0,
                         size page_size = 0) {
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
MlaDeviceInputs rows_of(const MlaDeviceInputs& in, size first, size count) {
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
MlaDeviceInputs repaged(const MlaDeviceInputs& in, size page_size, size spare, float fill) {
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

/// The host's output in the precision of U.
template <class U>
std::vector<double> on_host(const MlaDeviceInputs& in) {
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
  std::vector<double> result;
  for (const U value : out) result.push_back(static_cast<double>(value));
  return result;
}

template <class T>
void check_against_host(const MlaDeviceInputs& in, const MlaDeviceOptions& options = {}) {
  const MlaDeviceOutputs got = mla_on_device<T>(in, options);
  CHECK(std::count(got.status.begin(), got.status.end(), 0u) == static_cast<std::ptrdiff_t>(in.rows()));
  if constexpr (std::is_same_v<T, float>) {
    check(compare(got.out, on_host<double>(in), float_bound, 0, true));
  } else {
    const std::vector<double> want = on_host<bf16>(in);
    const double difference = relative_l2(std::vector<double>(got.out.begin(), got.out.end()), want);
    INFO("relative L2 " << difference << ", bound " << bf16_bound);
    CHECK(difference <= bf16_bound);
  }
}

template <class T>
void check_same(const std::vector<T>& got, const std::vector<T>& want) {
  check(same_bits(got, want));
}

const MlaConfig odd = mla_geometry_of(3, 20, 12, 28, 40);
const std::vector<size> edges{1, 63, 64, 65, 127, 128, 129, 1000};

}  // namespace

TEMPLATE_TEST_CASE("MLA on the device agrees with the host", "[gpu][mla]", float, bf16) {
  for (const size heads : {size{1}, size{3}, size{5}, size{17}})
    for (const size rope : {size{12}, size{0}}) {
      CAPTURE(heads, rope);
      check_against_host<TestType>(batch_of(mla_geometry_of(heads, 20, rope, 28, 40), edges, 11));
    }
  check_against_host<TestType>(batch_of(mla_geometry_of(50, 24, 16, 33, 96, false), {1, 200}, 12));
  check_against_host<TestType>(
      batch_of(mla_geometry_of(2, 300, 8, 40, 600), {5, 130}, 13));  // wider than the tensor kernel
  check_against_host<TestType>(batch_of(MlaConfig::twin_0_40b(), {77}, 14));
  check_against_host<TestType>(batch_of(odd, {3, 70}, 15), {0, 1, 3, 0, true, true});
}

TEMPLATE_TEST_CASE("MLA on the device at the released geometry", "[gpu][mla]", float, bf16) {
  if (small_only()) return;
  check_against_host<TestType>(batch_of(MlaConfig::production(), {1000, 129}, 21));
  check_against_host<TestType>(batch_of(MlaConfig::production(), {4200}, 22, 0, 64));
}

TEST_CASE("the latent kernel agrees with the host however rows are cut", "[gpu][mla]") {
  std::vector<size> lengths{1, 63, 64, 65, 4095, 4096, 4097};
  if (small_only()) lengths = {1, 130};
  for (const size heads : {size{96}, size{50}}) {  // of 50 the second group of 48 is nearly empty
    if (heads == 50 && small_only()) continue;
    const MlaDeviceInputs in = batch_of(mla_geometry_of(heads, 128, 64, 128, 512), lengths, 23, 0, 64);
    const std::vector<double> want = on_host<bf16>(in);
    for (const bool independent : {true, false}) {
      MlaDeviceOptions options;
      options.independent = independent;
      const auto got = mla_on_device<bf16>(in, options).out;
      const double difference = relative_l2(std::vector<double>(got.begin(), got.end()), want);
      CAPTURE(heads, independent, difference, bf16_bound);
      CHECK(difference <= bf16_bound);
      options.replays = 3;
      check_same(mla_on_device<bf16>(in, options).out, got);
    }
  }
}

TEST_CASE("the latent kernel: pages and what lies behind a row change no bit", "[gpu][mla]") {
  std::vector<size> lengths{1100, 1, 63, 64, 65, 129};
  if (small_only()) lengths = {70, 1};
  const MlaDeviceInputs in = batch_of(mla_geometry_of(96, 16, 64, 16, 512), lengths, 24, 0, 64);
  const auto want = mla_on_device<bf16>(in).out;
  for (const float value : want) CHECK(std::isfinite(value));
  for (const size page : {size{16}, size{0}, size{192}, size{40}}) {
    CAPTURE(page);
    check_same(mla_on_device<bf16>(repaged(in, page, 100, nan_float)).out, want);
    if (small_only()) return;
  }
}

TEST_CASE("the latent kernel: a row's bits do not depend on its batch", "[gpu][mla]") {
  // All of them have 96 heads to a block, a few alone 48.
  std::vector<size> lengths{4200, 1, 63, 64, 65, 129};
  for (size r = 0; r < 22; ++r) lengths.push_back(1400 + 13 * r);
  if (small_only()) lengths = {70, 1, 64, 130, 5, 9, 300};
  const MlaDeviceInputs in = batch_of(mla_geometry_of(96, 16, 64, 16, 512), lengths, 26, 0, 64);
  const size n = mla_v_width(in.g);
  const auto all = mla_on_device<bf16>(in).out;
  for (const size count : {size{1}, size{2}, size{9}})
    for (const size first : {size{0}, size{5}}) {
      if (first + count > lengths.size()) continue;
      CAPTURE(first, count);
      const auto at = all.begin() + static_cast<std::ptrdiff_t>(first * n);
      check_same(mla_on_device<bf16>(rows_of(in, first, count)).out,
                 std::vector<float>(at, at + static_cast<std::ptrdiff_t>(count * n)));
    }
}

TEST_CASE("the latent kernel: rows that have no place give zeros, a NaN stays in its row", "[gpu][mla]") {
  const MlaConfig g = mla_geometry_of(96, 16, 64, 16, 512);
  const MlaDeviceInputs good = batch_of(g, std::vector<size>(7, 700), 25, 800, 64);
  const size n = mla_v_width(g);
  for (const bool independent : {true, false}) {
    MlaDeviceOptions options;
    options.independent = independent;
    const auto want = mla_on_device<bf16>(good, options);
    MlaDeviceInputs in = good;
    in.slot[0] = pad_slot;                                         // padding
    in.slot[2] = -7;                                               // no slot
    in.position[3] = 832;                                          // no position
    in.table[4 * in.blocks + 1] = static_cast<id>(in.page_count);  // no page
    in.pages[static_cast<size>(in.table[5 * in.blocks + 2]) * 64 * 576 + 3] = nan_float;
    const auto got = mla_on_device<bf16>(in, options);
    for (size r = 0; r < 7; ++r) {
      CAPTURE(independent, r);
      CHECK(got.status[r] == (r >= 2 && r <= 4 ? bad_slot : 0));
      for (size i = r * n; i < (r + 1) * n; ++i) {
        if (r == 5) {
          if (!std::isnan(got.out[i])) FAIL("row 5 lost its NaN at " << i);
        } else {
          // Other rows decide where rows that are not independent are cut, and so how their sums are rounded.
          const bool good_row = r == 1 || r == 6;
          const float there = good_row ? want.out[i] : 0.0f;
          const float slack = good_row && !independent ? 0.02f * (1 + std::abs(there)) : 0.0f;
          if (!(std::abs(got.out[i] - there) <= slack))
            FAIL("row " << r << " differs at " << i << ": " << got.out[i] << ", " << there);
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("device case 32: positions past the last are never read", "[gpu][mla]", float, bf16) {
  const MlaDeviceInputs in = batch_of(odd, {13}, 31);
  for (const size page : {size{0}, size{4}}) {
    const auto want = mla_on_device<TestType>(repaged(in, page, 3, 0)).out;
    check_same(mla_on_device<TestType>(repaged(in, page, 3, nan_float)).out, want);
    check_same(mla_on_device<TestType>(repaged(in, page, 3, std::numeric_limits<float>::infinity())).out, want);
    for (const float value : want) CHECK(std::isfinite(value));
  }
}

TEST_CASE("device case 33: offsets do not wrap at 32 bits", "[gpu][mla]") {
  if (small_only()) return;
  const MlaDeviceInputs in = batch_of(mla_geometry_of(1, 20, 64, 28, 512), {1}, 33);
  const auto want = mla_in_far_slot(in, 1, 0);
  REQUIRE(!want.empty());
  for (const size slot : {size{0}, size{4000000}, size{7456541}}) check_same(mla_in_far_slot(in, 7456542, slot), want);
}

TEMPLATE_TEST_CASE("device case 34: the gate halves at 0, opens at +30, closes at -30", "[gpu][mla]", float, bf16) {
  MlaDeviceInputs in = batch_of(odd, {5, 70}, 34);
  const auto gated = [&](float gate) {
    in.gate.assign(in.gate.size(), gate);
    return mla_on_device<TestType>(in).out;
  };
  const auto half = gated(0), full = gated(30), closed = gated(-30);
  MlaDeviceInputs ungated = in;
  ungated.g.mla_use_output_gate = false;
  ungated.gate.clear();
  const auto open = mla_on_device<TestType>(ungated).out;
  check_same(full, open);
  for (size i = 0; i < open.size(); ++i) {
    CHECK(half[i] == open[i] / 2);
    CHECK(std::abs(closed[i]) <= 1e-12 * std::abs(open[i]));
  }
}

TEMPLATE_TEST_CASE("device case 35: pages and spare capacity change no bit", "[gpu][mla]", float, bf16) {
  for (const size length : edges) {
    CAPTURE(length);
    const MlaDeviceInputs in = batch_of(odd, {length}, 35);
    const auto want = mla_on_device<TestType>(in).out;
    for (const size page : {size{64}, size{4}, size{48}, size{0}})
      check_same(mla_on_device<TestType>(repaged(in, page, 9, nan_float)).out, want);
    check_same(mla_on_device<TestType>(repaged(in, 0, 5000, nan_float)).out, want);
  }
}

TEMPLATE_TEST_CASE("a row's bits on the device do not depend on its batch", "[gpu][mla]", float, bf16) {
  // 50 heads are two groups: 48 rows and more are not split over blocks. 5000 positions are splits of two tiles.
  for (const size heads : {size{3}, size{50}}) {
    if (heads == 50 && small_only()) continue;
    const MlaConfig g = mla_geometry_of(heads, 20, 16, 28, 40);
    std::vector<size> lengths;
    for (size r = 0; r < 128; ++r) lengths.push_back(r == 5 ? (small_only() ? 300 : 5000) : 1 + r * 37 % 300);
    const MlaDeviceInputs in = batch_of(g, lengths, 41, 0, 64);
    const size n = mla_v_width(g);
    const auto all = mla_on_device<TestType>(in).out;
    check_same(mla_on_device<TestType>(in).out, all);
    for (const size count : {size{1}, size{2}, size{7}, size{8}, size{9}, size{33}}) {
      const size first = count == 1 ? 5 : 0;
      CAPTURE(heads, count);
      const auto at = all.begin() + static_cast<std::ptrdiff_t>(first * n);
      check_same(mla_on_device<TestType>(rows_of(in, first, count)).out,
                 std::vector<float>(at, at + static_cast<std::ptrdiff_t>(count * n)));
    }
  }
}

TEMPLATE_TEST_CASE("rows of one slot on the device: all at once are one by one", "[gpu][mla]", float, bf16) {
  const size tokens = small_only() ? 20 : 130;
  MlaDeviceInputs in = batch_of(odd, std::vector<size>(tokens, 1), 51);
  in.slots = 1, in.blocks = 1, in.page_count = 1, in.page_size = tokens, in.table = {0};
  in.slot.assign(tokens, 0);
  std::iota(in.position.begin(), in.position.end(), size{0});
  in.pages.assign(tokens * mla_cache_width(odd), nan_float);
  const auto want = mla_on_device<TestType>(in);
  check_against_host<TestType>(in);
  for (const size step : {size{1}, size{13}}) {
    MlaDeviceOptions options;
    options.step = step;
    const auto got = mla_on_device<TestType>(in, options);
    check_same(got.out, want.out);
    check_same(got.pages, want.pages);
  }
}

TEMPLATE_TEST_CASE("padding and rows that have no place touch nothing on the device", "[gpu][mla]", float, bf16) {
  for (const size rows : {size{7}, size{100}}) {  // 100 rows are not split over blocks
    const MlaDeviceInputs good = batch_of(odd, std::vector<size>(rows, 70), 61, 80, 16);
    const size n = mla_v_width(odd);
    const auto want = mla_on_device<TestType>(good);
    struct Change {
      const char* what;
      id slot;
      size position;
      bool bad_page;
      unsigned status;
    };
    for (const Change& change :
         {Change{"padding", pad_slot, 69, false, 0}, Change{"slot", static_cast<id>(rows), 69, false, bad_slot},
          Change{"negative", -7, 69, false, bad_slot}, Change{"position", 2, 80, false, bad_slot},
          Change{"far position", 2, ~size{0}, false, bad_slot}, Change{"page", 2, 69, true, bad_slot}}) {
      CAPTURE(rows, change.what);
      MlaDeviceInputs in = good;
      in.slot[2] = change.slot, in.position[2] = change.position;
      if (change.bad_page) in.table[2 * in.blocks + 1] = static_cast<id>(in.page_count);
      if (!change.bad_page) {
        std::fill_n(in.q.begin() + static_cast<std::ptrdiff_t>(2 * mla_q_width(odd)), mla_q_width(odd), nan_float);
        std::fill_n(in.kv_a.begin() + static_cast<std::ptrdiff_t>(2 * mla_cache_width(odd)), mla_cache_width(odd),
                    nan_float);
      }
      std::fill_n(in.gate.begin() + static_cast<std::ptrdiff_t>(2 * n), n, nan_float);
      const auto got = mla_on_device<TestType>(in);
      auto out = want.out;
      std::fill_n(out.begin() + static_cast<std::ptrdiff_t>(2 * n), n, 0.0f);
      check_same(got.out, out);
      for (size r = 0; r < rows; ++r) CHECK(got.status[r] == (r == 2 ? change.status : 0));
      auto pages = want.pages;  // of slot 2 only the page of position 69 may differ
      const size page = in.page_size * mla_cache_width(odd),
                 at = static_cast<size>(good.table[2 * in.blocks + 4]) * page;
      if (!change.bad_page)
        std::copy_n(good.pages.begin() + static_cast<std::ptrdiff_t>(at), page,
                    pages.begin() + static_cast<std::ptrdiff_t>(at));
      check_same(got.pages, pages);
    }
  }
  MlaDeviceInputs none = rows_of(batch_of(odd, {5}, 62), 0, 0);
  none.g.mla_use_output_gate = false;
  CHECK(mla_on_device<TestType>(none).out.empty());
}

TEMPLATE_TEST_CASE("a NaN in one sequence stays there on the device", "[gpu][mla]", float, bf16) {
  const MlaDeviceInputs good = batch_of(odd, {70, 80, 90}, 71);
  const size n = mla_v_width(odd);
  const auto want = mla_on_device<TestType>(good).out;
  MlaDeviceInputs in = good;
  in.pages[in.page_size * mla_cache_width(odd) + 66 * mla_cache_width(odd) + 1] = nan_float;  // slot 1, position 66
  const auto got = mla_on_device<TestType>(in).out;
  for (size i = 0; i < got.size(); ++i) {
    if (i / n == 1)
      CHECK(std::isnan(got[i]));
    else
      CHECK(got[i] == want[i]);
  }
}

TEMPLATE_TEST_CASE("MLA on the device: shifted pointers, strides and graphs change no bit", "[gpu][mla]", float, bf16) {
  for (const MlaConfig& g : {odd, mla_geometry_of(3, 24, 16, 32, 48)}) {  // the second can be read 16 bytes at a time
    const MlaDeviceInputs in = batch_of(g, {70, 1, 129}, 81);
    const auto want = mla_on_device<TestType>(in);
    for (const MlaDeviceOptions& options :
         {MlaDeviceOptions{0, 1, 0, 0, false, true}, MlaDeviceOptions{0, 0, 5, 0, false, false},
          MlaDeviceOptions{0, 3, 1, 0, false, true}, MlaDeviceOptions{0, 0, 0, 3, false, true}}) {
      CAPTURE(options.shift, options.gap, options.replays);
      const auto got = mla_on_device<TestType>(in, options);
      check_same(got.out, want.out);
      check_same(got.pages, want.pages);
    }
  }
  CHECK(mla_static_geometry_agrees());
}

TEMPLATE_TEST_CASE("launch_k3_mla_decode_token gives the bits of mla_decode_token", "[gpu][mla]", float, bf16) {
  const MlaDeviceInputs in = batch_of(odd, {70, 1, 129}, 91);
  const auto want = mla_on_device<TestType>(in);
  for (const bool resident : {true, false}) {
    const auto got = mla_launched<TestType>(in, resident);
    check_same(got.out, want.out);
    check_same(got.pages, want.pages);
  }
}

TEST_CASE("MLA on the device refuses what its arguments show", "[gpu][mla]") {
  const std::vector<std::pair<const char*, const char*>> cases{{"rotated", "geometry.mla_use_nope"},
                                                               {"q", "q"},
                                                               {"kv_a", "kv_a"},
                                                               {"norm", "kv_a_layernorm"},
                                                               {"kv_b", "kv_b"},
                                                               {"double weights", "kv_b"},
                                                               {"no gate", "gate"},
                                                               {"positions", "positions"},
                                                               {"pages", "kv.pages"},
                                                               {"workspace rows", "the workspace's max_rows"},
                                                               {"workspace capacity", "the workspace's capacity"},
                                                               {"out", "out"},
                                                               {"out over gate", "out"},
                                                               {"status", "status"}};
  for (const auto& [wrong, argument] : cases)
    CHECK(mla_refused_argument(wrong) == std::string("mla_decode_token/") + argument);
  CHECK(mla_refused_argument("nothing") == "");
  CHECK(mla_device_kv_faults() == "");
}
