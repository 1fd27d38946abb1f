// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla_counted.hpp"
#include "cuda/mla_device.hpp"

using namespace k3;
using namespace k3::test;

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
  if (small_only()) return check_against_host<TestType>(batch_of(mla_geometry_of(17, 128, 64, 128, 512), {3, 70}, 21));
  check_against_host<TestType>(batch_of(MlaConfig::production(), {1000, 129}, 21));
  check_against_host<TestType>(batch_of(MlaConfig::production(), {4200}, 22, 0, 64));
}

TEMPLATE_TEST_CASE("mla_absorb_query and mla_expand_values agree with the host", "[gpu][mla]", float, bf16) {
  constexpr bool narrow = std::is_same_v<TestType, bf16>;
  std::vector<std::pair<MlaConfig, size>> cases{{odd, 9}, {mla_geometry_of(5, 33, 7, 19, 71), 70}};
  if (small_only()) cases = {{odd, 9}};
  if (!small_only()) cases.push_back({MlaConfig::production(), 17});
  for (const auto& one : cases) {
    const MlaConfig g = one.first;
    const size rows = one.second;
    CAPTURE(g.heads, g.kv_lora_rank, rows);
    const MlaDeviceInputs in = batch_of(g, std::vector<size>(rows, 1), 27);
    const size width = mla_cache_width(g), values = mla_v_width(g);
    std::vector<float> means;
    for (const double value : random_normal(rows * g.heads * g.kv_lora_rank, 28))
      means.push_back(static_cast<float>(value));
    const auto host_results = [&](auto precision) {
      using P = decltype(precision);
      using U = typename P::activation;
      const auto q = converted<U>(in.q), kv_b = converted<U>(in.kv_b);
      const auto o = converted<typename P::accumulator>(means);
      std::vector<U> absorbed(rows * g.heads * width), expanded(rows * values);
      const auto weight = view(kv_b, mla_kv_b_rows(g), g.kv_lora_rank);
      mla_absorb_query(host{}, g, view(q, rows, mla_q_width(g)), weight, view(absorbed, rows, g.heads, width));
      mla_expand_values(host{}, g, view(o, rows, g.heads, g.kv_lora_rank), weight, view(expanded, rows, values));
      return std::pair(converted<double>(absorbed), converted<double>(expanded));
    };
    const auto absorbed = mla_absorbed_on_device<TestType>(in), expanded = mla_expanded_on_device<TestType>(in, means);
    if constexpr (narrow) {
      const auto [absorbed_want, expanded_want] = host_results(Bf16{});
      const double first = relative_l2(absorbed, absorbed_want), second = relative_l2(expanded, expanded_want);
      CAPTURE(first, second);
      CHECK(first <= 1e-4);   // measured 2.6e-5
      CHECK(second <= 3e-4);  // measured 1.1e-4
    } else {
      const auto [absorbed_want, expanded_want] = host_results(Fp64{});
      check(compare(absorbed, absorbed_want, float_bound, 0, true));
      check(compare(expanded, expanded_want, float_bound, 0, true));
    }
  }
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

namespace {

// Of a head's values, relative L2. In bf16 the rounded weights of few positions count more than those of many.
constexpr double counted_bound = 4e-3, counted_long_bound = 1e-3, counted_float_bound = 1e-4;

/// Rows [first, first + count) of a problem, in both modes.
template <class T>
void check_counted(const MlaCounted& problem, size first, size count, double bound) {
  const MlaAttendInputs in = rows_of(problem.in, first, count);
  for (const bool independent : {true, false}) {
    const MlaAttendOutputs got = mla_attend_on_device<T>(in, independent);
    const Comparison comparison = problem.compare_rows(got.out, first, count);
    INFO(in.g.heads << " heads, rows " << first << " to " << first + count - 1 << ", independent " << independent
                    << "; " << comparison.text);
    CHECK(comparison.worst <= bound);
    CHECK(got.status == std::vector<unsigned>(count));
  }
}

MlaConfig latent_512(size heads) { return mla_geometry_of(heads, 128, 64, 128, 512); }

}  // namespace

TEST_CASE("attention on rows of 32 and of 64 parts agrees with double", "[gpu][mla]") {
  std::vector<size> lengths{65472, 65536, 65600, 131073};
  if (small_only()) lengths = {250, 513, 260, 600};
  const double bound = small_only() ? counted_bound : counted_long_bound;
  for (const size heads : all_or_few<size>({8, 24, 96}, {8})) {  // up to 16 heads have another kernel
    const MlaCounted problem(latent_512(heads), lengths, 29, 64);
    check_counted<bf16>(problem, 0, 4, bound);
    check_counted<bf16>(problem, 1, 1, bound);
    if (!small_only()) check_counted<bf16>(problem, 2, 2, bound);
  }
}

TEST_CASE("attention on a million positions agrees with double, offsets beyond 32 bits", "[gpu][mla]") {
  const std::vector<size> lengths = small_only() ? std::vector<size>{700, 65} : std::vector<size>{1048576, 1000001};
  // Nearly 5e9 elements, over which each row's pages are scattered.
  const size page_size = 64, pages = small_only() ? 20 : (size{1} << 23) / page_size - 1;
  const double bound = small_only() ? counted_bound : counted_long_bound;
  for (const size heads : all_or_few<size>({3, 24, 96}, {24}))
    check_counted<bf16>(MlaCounted(latent_512(heads), lengths, 37, page_size, pages), 0, 2, bound);
  check_counted<float>(MlaCounted(latent_512(2), lengths, 38, page_size, pages), 0, 2, counted_float_bound);
}

TEST_CASE("attention of one row to several launches' agrees with double", "[gpu][mla]") {
  // Kernels and grids differ for 1, 3, 9 and 65 rows, and from 257 on there are several launches.
  for (const size heads : all_or_few<size>({24, 96}, {24})) {
    std::vector<size> lengths;
    const size rows = small_only() ? 66 : heads == 24 ? 300 : 130;
    for (size r = 0; r < rows; ++r)
      lengths.push_back(small_only() ? (r < 9 ? 250 + 60 * r : 1 + r) : r % 11 == 3 ? 4000 + r : 1 + r * 617 % 1500);
    const MlaCounted problem(latent_512(heads), lengths, 39, 64, 0, small_only() ? 5 : 7);
    for (const size count : all_or_few<size>({1, 2, 3, 8, 9, 64, 65, 130, 256, 257, 300}, {2, 8, 9, 66}))
      if (count <= rows) check_counted<bf16>(problem, small_only() ? 0 : rows - count, count, counted_bound);
  }
}

TEST_CASE("attention: a row's bits do not depend on its batch at the released sizes", "[gpu][mla]") {
  // Grids and launches differ for 1, 3 and 9 rows; one row has 64 parts.
  const size rows = small_only() ? 16 : 128, long_row = 5;
  std::vector<size> lengths;
  for (size r = 0; r < rows; ++r)
    lengths.push_back(r == long_row ? (small_only() ? 513 : 70001) : 1 + r * 617 % (small_only() ? 200 : 1500));
  const size heads = small_only() ? 24 : 96, each = heads * 512;
  const MlaCounted problem(latent_512(heads), lengths, 43, 64, 0, heads);
  const std::vector<float> all = mla_attend_on_device<bf16>(problem.in, true).out;
  CHECK(problem.compare_rows(all, 0, rows).worst <= counted_bound);
  for (const size count : all_or_few<size>({1, 2, 3, 8, 9, 64}, {1, 9}))
    for (const size first : {long_row - (count < 8 ? count - 1 : 1), size{0}, rows - count}) {
      CAPTURE(count, first);
      const auto at = all.begin() + static_cast<std::ptrdiff_t>(first * each);
      check_same(mla_attend_on_device<bf16>(rows_of(problem.in, first, count), true).out,
                 std::vector<float>(at, at + static_cast<std::ptrdiff_t>(count * each)));
      if (small_only()) break;
    }
}

TEST_CASE("attention of many rows leaves out those that have no place", "[gpu][mla]") {
  const size heads = small_only() ? 20 : 96, rows = small_only() ? 67 : 140, each = heads * 512;
  std::vector<size> lengths;
  for (size r = 0; r < rows; ++r) lengths.push_back(small_only() ? 1 + 5 * r : 1 + r * 617 % 1500);
  const MlaCounted problem(latent_512(heads), lengths, 41, 64, 0, 9);
  MlaAttendInputs in = problem.in;
  const size capacity = in.blocks * in.page_size;
  for (size r = 3; r < rows; r += 8) in.slot[r] = pad_slot, in.position[r] = ~size{0};
  for (size r = 5; r < rows; r += 16) in.slot[r] = static_cast<id>(rows);
  for (size r = 13; r < rows; r += 16) in.position[r] = capacity;
  in.table[24 * in.blocks + 1] = -1;
  for (const bool independent : {true, false}) {
    const MlaAttendOutputs got = mla_attend_on_device<bf16>(in, independent);
    for (size r = 0; r < rows; ++r) {
      const bool padding = r % 8 == 3, bad = r % 8 == 5 || r == 24;
      const auto at = got.out.begin() + static_cast<std::ptrdiff_t>(r * each);
      const std::vector<float> mine(at, at + static_cast<std::ptrdiff_t>(each));
      CAPTURE(independent, r, lengths[r]);
      CHECK(got.status[r] == (bad ? bad_slot : 0));
      if (padding || bad) {
        check(same_bits(mine, std::vector<float>(each)));
      } else {
        const Comparison comparison = problem.compare_rows(mine, r, 1);
        INFO(comparison.text);
        CHECK(comparison.worst <= counted_bound);
      }
    }
  }
}

TEST_CASE("the latent kernel: pages and what lies behind a row change no bit", "[gpu][mla]") {
  std::vector<size> lengths{1100, 1, 63, 64, 65, 129};
  if (small_only()) lengths = {70, 1};
  const MlaDeviceInputs in = batch_of(mla_geometry_of(96, 16, 64, 16, 512), lengths, 24, 0, 64);
  const auto want = mla_on_device<bf16>(in).out;
  for (const float value : want) CHECK(std::isfinite(value));
  // The last slot's table ends before the row's last tile does.
  check_against_host<bf16>(batch_of(in.g, {33, 70}, 27, 0, 16));
  for (const size page : all_or_few<size>({16, 0, 192, 40}, {16})) {
    CAPTURE(page);
    check_same(mla_on_device<bf16>(repaged(in, page, 100, nan_float)).out, want);
  }
}

TEST_CASE("the latent kernel: a row's bits do not depend on its batch", "[gpu][mla]") {
  // All of them go through mla_attend_wide with 96 heads to a block, nine with 48, one and two through mla_attend_few.
  std::vector<size> lengths{4200, 1, 63, 64, 65, 129};
  for (size r = 0; r < 22; ++r) lengths.push_back(1400 + 13 * r);
  if (small_only()) lengths = {70, 1, 64, 130, 5, 9, 300, 2, 65};
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
                                                               {"out over q", "out"},
                                                               {"out over kv_a", "out"},
                                                               {"out over kv_b", "out"},
                                                               {"out over pages", "out"},
                                                               {"slots over out", "out"},
                                                               {"positions over out", "out"},
                                                               {"pages over kv_b", "kv.pages"},
                                                               {"pages over kv_a", "kv.pages"},
                                                               {"pages over q", "kv.pages"},
                                                               {"pages over gate", "kv.pages"},
                                                               {"pages over table", "kv.pages"},
                                                               {"status over slots", "status"},
                                                               {"status over out", "status"},
                                                               {"status", "status"}};
  for (const auto& [wrong, argument] : cases)
    CHECK(mla_refused_argument(wrong) == std::string("mla_decode_token/") + argument);
  CHECK(mla_refused_argument("nothing") == "nothing thrown");
  CHECK(mla_refused_overlap("append") == "mla_append/kv.pages");
  CHECK(mla_refused_overlap("append, status") == "mla_append/status");
  CHECK(mla_refused_overlap("absorb") == "mla_absorb_query/q_latent");
  CHECK(mla_refused_overlap("attend") == "mla_attend/o_latent");
  CHECK(mla_refused_overlap("expand") == "mla_expand_values/out");
  CHECK(mla_device_kv_faults() == "");
  for (const char* name : {"q", "kv_a", "kv_a_layernorm", "kv_b", "out"})
    for (const char* how : {"", "no "}) {
      INFO(how << name);
      CHECK(mla_launch_refused(std::string(how) + name) == std::string("launch_k3_mla_decode_token/") + name);
    }
  for (const char* name : {"positions", "positions that do not follow", "slots"}) {
    INFO(name);
    CHECK(mla_launch_refused(name) ==
          "launch_k3_mla_decode_token/" + std::string(name).substr(0, std::string(name).find(' ')));
  }
  CHECK(mla_launch_refused("gate") == "launch_k3_mla_decode_token/gate");
  CHECK(mla_launch_refused("out over kv_b") == "launch_k3_mla_decode_token/out");
  CHECK(mla_launch_refused("nothing") == "nothing thrown");
}
