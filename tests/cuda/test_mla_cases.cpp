// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla_device.hpp"
#include "cuda/mla_inputs.hpp"

using namespace k3;
using namespace k3::test;

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
  const MlaDeviceInputs in = batch_of(mla_geometry_of(1, 20, 64, 28, 512), {1}, 33);
  const auto want = mla_in_far_slot(in, 1, 0);
  REQUIRE(!want.empty());
  for (const size slot : all_or_few<size>({0, 4000000, 7456541}, {0, 40}))
    check_same(mla_in_far_slot(in, small_only() ? 41 : 7456542, slot), want);
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
