// SPDX-License-Identifier: Apache-2.0
// KDA on the device: what a row's bits do not depend on, rows that have no place, states, graphs, bad arguments.

#include <k3/geometry/presets.hpp>
#include <k3/ops/row_status.hpp>

#include "cuda/kda_device.hpp"
#include "cuda/kda_problem.hpp"

using namespace k3;
using namespace k3::test;

namespace {

const unsigned bad_slot = static_cast<unsigned>(RowStatus::bad_slot);
const KdaDeviceOptions plain{};

}  // namespace

TEST_CASE("cuda kda: fixed geometries, weights' types, alignment and strides do not change bits", "[cuda][kda]") {
  std::vector<KdaConfig> geometries = {kda_config(tiny::Kda{}), {3, 24, 4, -5.0f}, {3, 128, 4, std::nullopt}};
  if (!small_only()) geometries.push_back(KdaConfig::production());
  for (const KdaConfig& g : geometries) {
    INFO(name(g));
    const bool fixed = g.head_dim == 4 || g.heads == 96;
    const auto in = kda_device_problem<bf16>(g, 2, 2, 41);
    const auto in_float = kda_device_problem<float>(g, 2, 2, 42);
    const auto fused = kda_fused_on_device(in);
    const auto fused_float = kda_fused_on_device(in_float);
    const auto token = kda_token_on_device(in);
    const auto token_float = kda_token_on_device(in_float);
    for (const KdaDeviceOptions& o :
         all_or_few<KdaDeviceOptions>({plain,
                                       {.static_geometry = fixed},
                                       {.bf16_weights = true},
                                       {.shift = 1},
                                       {.gap = 3},
                                       {.gap = 4},
                                       {.bf16_weights = true, .shift = 1, .gap = 1},
                                       {.static_geometry = fixed, .shift = 3}},
                                      {{.bf16_weights = true}, {.static_geometry = fixed, .shift = 3, .gap = 3}})) {
      INFO("static " << o.static_geometry << ", bf16 weights " << o.bf16_weights << ", shift " << o.shift << ", gap "
                     << o.gap);
      check_same(kda_fused_on_device(in, o), fused);
      check_same(kda_fused_on_device(in_float, o), fused_float);
      check_same(kda_token_on_device(in, o), token);
      check_same(kda_token_on_device(in_float, o), token_float);
    }
  }
}

TEST_CASE("cuda kda: a row's bits do not depend on its batch, nor on the run", "[cuda][kda]") {
  for (const KdaConfig& g : {KdaConfig{2, 128, 4, -5.0f}, KdaConfig{3, 24, 4, std::nullopt}}) {
    INFO(name(g));
    const size most = small_only() ? 9 : 128;
    const auto all = kda_device_problem<bf16>(g, most, 1, 51);
    const size width = kda_width(g), state = kda_state_elements(g);
    const auto alone = kda_fused_on_device(rows_of(all, 0, 1));
    check_same(kda_fused_on_device(rows_of(all, 0, 1)), alone);
    for (const size rows : all_or_few<size>({2, 7, 8, 9, 33, 128}, {9})) {
      INFO(rows << " rows");
      auto batch = rows_of(all, 0, rows);
      const auto together = kda_fused_on_device(batch);
      check(same_bits(slice(together.out, 0, width), alone.out));
      check(same_bits(slice(together.state, 0, state), slice(alone.state, 0, state)));
      const auto last = kda_fused_on_device(rows_of(all, rows - 1, 1));
      check(same_bits(slice(together.out, (rows - 1) * width, width), last.out));
      check(same_bits(slice(together.state, (rows - 1) * state, state), slice(last.state, (rows - 1) * state, state)));
      check_same(kda_fused_on_device(batch), together);
    }
  }
}

TEST_CASE("cuda kda: however a head is shared out over blocks, its bits are the same", "[cuda][kda]") {
  // A block goes through fewer or more heads; off its alignment a head is not brought into shared memory.
  const KdaConfig g = small_only() ? KdaConfig{2, 128, 4, -5.0f} : KdaConfig::production();
  const size rows = 4, width = kda_width(g), state = kda_state_elements(g), window = kda_conv_elements(g);
  const auto all = kda_device_problem<bf16>(g, rows, 1, 55);
  const auto together = kda_fused_on_device(all);
  check_same(kda_fused_on_device(all, {.shift = 1}), together);
  for (const size count : {size{1}, size{2}})
    for (size first = 0; first + count <= rows; ++first)
      for (const size shift : {size{0}, size{1}}) {
        INFO("rows " << first << " to " << first + count - 1 << ", shift " << shift);
        const auto some = kda_fused_on_device(rows_of(all, first, count), {.shift = shift});
        check(same_bits(some.out, slice(together.out, first * width, count * width)));
        check(same_bits(slice(some.state, first * state, count * state),
                        slice(together.state, first * state, count * state)));
        check(same_bits(slice(some.window, first * window, count * window),
                        slice(together.window, first * window, count * window)));
      }
}

TEST_CASE("cuda kda: steps that follow each other at once see the state that the last one left", "[cuda][kda]") {
  // Direct calls of one state: each may start before the one before it has ended. A replayed graph has one step.
  for (KdaConfig g : {KdaConfig{2, 128, 4, -5.0f}, KdaConfig{96, 128, 4, -5.0f}, KdaConfig{3, 24, 4, std::nullopt}}) {
    if (small_only() && g.heads > 8) continue;
    for (const size slots : {size{1}, size{4}}) {
      INFO(name(g) << ", " << slots << " sequences");
      const auto in = kda_device_problem<bf16>(g, slots, 1, 57);
      const int calls = small_only() ? 3 : 24;
      const auto want = kda_fused_on_device(in, {.calls = calls, .graph = true});
      for (int repeat = 0; repeat < (small_only() ? 1 : 3); ++repeat)
        check_same(kda_fused_on_device(in, {.calls = calls}), want);
    }
  }
}

TEST_CASE("cuda kda: several tokens in one call give the bits of one call each", "[cuda][kda]") {
  for (const KdaConfig& g : kda_shapes()) {
    if (small_only() && g.head_dim < 128) continue;
    INFO(name(g));
    auto in = kda_device_problem<bf16>(g, 3, 5, 61);
    in.slot[4] = pad_slot;  // sequence 0 has four tokens, then padding
    const auto together = kda_fused_on_device(in);
    std::vector<bf16> out;
    auto one = in;
    for (size row = 0; row < in.rows; ++row) {
      auto step = rows_of(in, row, 1);
      step.state = one.state, step.window = one.window;
      const auto got = kda_fused_on_device(step);
      one.state = got.state, one.window = got.window;
      out.insert(out.end(), got.out.begin(), got.out.end());
    }
    check(same_bits(together.out, out));
    check(same_bits(together.state, one.state));
    check(same_bits(together.window, one.window));
  }
}

TEST_CASE("cuda kda: 70,000 rows give the bits of blocks of 1,000", "[cuda][kda][cases]") {
  const size rows = small_only() ? 300 : 70000, block = small_only() ? 100 : 1000, width = 4;
  const auto all = kda_device_problem<float>({1, 4, 4, -5.0f}, rows, 1, 101);
  const auto got = kda_fused_on_device(all);
  for (const size first : all_or_few<size>({0, 64800, 69000}, {0, 200})) {
    const auto part = kda_fused_on_device(rows_of(all, first, block));
    check(same_bits(slice(got.out, first * width, block * width), part.out));
    check(same_bits(slice(got.state, first * 16, block * 16), slice(part.state, first * 16, block * 16)));
  }
}

TEST_CASE("cuda kda: a captured step replayed gives the bits of direct calls", "[cuda][kda][cases]") {
  for (const KdaConfig& g : {KdaConfig{2, 128, 4, -5.0f}, KdaConfig{3, 24, 4, std::nullopt}}) {
    const auto in = kda_device_problem<bf16>(g, 3, 1, 111);
    check_same(kda_fused_on_device(in, {.calls = 3, .graph = true}), kda_fused_on_device(in, {.calls = 3}));
    check_same(kda_token_on_device(in, {.calls = 3, .graph = true}), kda_token_on_device(in, {.calls = 3}));
  }
}

TEST_CASE("cuda kda: the launch forms give the bits of the operation", "[cuda][kda]") {
  for (const KdaConfig& g : {KdaConfig{2, 128, 4}, KdaConfig{3, 24, 1}}) {
    auto in = kda_device_problem<bf16>(g, 3, 2, 121);
    in.slot[1] = pad_slot;
    auto want = kda_token_on_device(in);
    want.status.clear();
    check_same(kda_launched(in, true), want);
    check_same(kda_launched(in, false), want);
    in.slot[5] = 3;
    CHECK_THROWS_AS(kda_launched(in, true), invalid_argument);
    CHECK_THROWS_AS(kda_launched(in, false), invalid_argument);
  }
}

TEST_CASE("cuda kda: padding and bad slots give zeros and touch nothing; NaN stays in its sequence", "[cuda][kda]") {
  for (const KdaConfig& g : {KdaConfig{2, 128, 4}, KdaConfig{3, 24, 4}}) {
    INFO(name(g));
    const size width = kda_width(g), state = kda_state_elements(g), window = kda_conv_elements(g);
    const auto good = kda_device_problem<float>(g, 6, 1, 71);
    const auto want = kda_fused_on_device(good);
    for (const id slot : {pad_slot, id{6}, id{-2}, id{0x7fffffff}, id{0}}) {  // 0 comes back after slot 1
      INFO("slot " << slot);
      auto in = good;
      in.slot[2] = slot;
      for (auto* values : {&in.x, &in.z, &in.gate})
        for (size c = 0; c < values->size() / 6; ++c) (*values)[2 * values->size() / 6 + c] = NAN;
      for (size h = 0; h < g.heads; ++h) in.beta[2 * g.heads + h] = NAN;
      const auto got = kda_fused_on_device(in);
      for (size row = 0; row < 6; ++row) {
        INFO("row " << row);
        CHECK(got.status[row] == (row == 2 && slot != pad_slot ? bad_slot : 0u));
        const bool bad = row == 2;
        check(same_bits(slice(got.out, row * width, width),
                        bad ? std::vector<float>(width, 0.0f) : slice(want.out, row * width, width)));
        check(
            same_bits(slice(got.state, row * state, state), slice(bad ? good.state : want.state, row * state, state)));
        check(same_bits(slice(got.window, row * window, window),
                        slice(bad ? good.window : want.window, row * window, window)));
      }
    }
    auto in = good;
    for (size c = 0; c < 3 * width; ++c) in.x[3 * 3 * width + c] = NAN;
    const auto got = kda_fused_on_device(in);
    for (size row = 0; row < 6; ++row)
      if (row == 3)
        for (size c = 0; c < width; ++c) REQUIRE(std::isnan(got.out[row * width + c]));
      else
        check(same_bits(slice(got.out, row * width, width), slice(want.out, row * width, width)));
    auto nobody = good;
    nobody.slot.assign(6, pad_slot);
    check(same_bits(kda_token_on_device(nobody).out, std::vector<float>(6 * width, 0.0f)));
    const auto none = kda_fused_on_device(rows_of(good, 0, 0));
    CHECK(none.out.empty());
    check(same_bits(none.state, good.state));
  }
}

TEST_CASE("cuda kda: device states come back byte for byte", "[cuda][kda]") { CHECK(kda_device_state_fault() == ""); }

TEST_CASE("cuda kda: wrong arguments are refused by name", "[cuda][kda]") {
  const std::vector<std::pair<std::string, std::string>> cases = {{"head_dim", "geometry.head_dim"},
                                                                  {"conv_kernel", "geometry.conv_kernel"},
                                                                  {"bound", "geometry.gate_lower_bound"},
                                                                  {"x_qkv", "x_qkv"},
                                                                  {"conv.q", "conv.q"},
                                                                  {"conv.k", "conv.k"},
                                                                  {"conv.v", "conv.v"},
                                                                  {"f64", "conv.k"},
                                                                  {"z", "z"},
                                                                  {"beta", "beta"},
                                                                  {"gate", "gate"},
                                                                  {"A_log", "A_log"},
                                                                  {"dt_bias", "dt_bias"},
                                                                  {"o_norm", "o_norm"},
                                                                  {"norm_eps", "norm_eps"},
                                                                  {"norm_eps, NaN", "norm_eps"},
                                                                  {"norm_eps, infinity", "norm_eps"},
                                                                  {"slots", "slots"},
                                                                  {"status", "status"},
                                                                  {"out", "out"},
                                                                  {"state.recurrent", "state.recurrent"},
                                                                  {"state.conv", "state.conv"},
                                                                  {"out over x", "out"},
                                                                  {"out over state", "out"},
                                                                  {"out over gate", "out"},
                                                                  {"state over conv", "state.conv"},
                                                                  {"out over conv", "out"},
                                                                  {"out over A_log", "out"},
                                                                  {"out over dt_bias", "out"},
                                                                  {"out over o_norm", "out"},
                                                                  {"state over state", "state.recurrent"},
                                                                  {"status over out", "status"},
                                                                  {"status over slots", "status"},
                                                                  {"status over state", "status"}};
  for (const auto& [wrong, argument] : cases) {
    INFO(wrong);
    CHECK(kda_refused_argument(wrong) == "kda_decode_fused/" + argument);
  }
  CHECK(kda_refused_argument("nothing") == "nothing thrown");
  for (const char* name : {"x_qkv", "conv.q", "conv.k", "conv.v", "log_decay", "beta", "out"})
    for (const char* how : {"", "no "}) {
      INFO(how << name);
      CHECK(kda_launch_refused(std::string(how) + name) == std::string("launch_k3_kda_decode_token/") + name);
    }
  CHECK(kda_launch_refused("slots") == "launch_k3_kda_decode_token/slots[1]");
  CHECK(kda_launch_refused("out over x_qkv") == "launch_k3_kda_decode_token/out");
  CHECK(kda_launch_refused("nothing") == "nothing thrown");
}
