// SPDX-License-Identifier: Apache-2.0
#include "cuda/moe_device.hpp"
#include "cuda/moe_problem.hpp"

using namespace k3;
using namespace k3::test;

TEST_CASE("The router on the device gives the known routings", "[cuda][moe]") {
  // In float both scores are 12: the lower index comes first.
  check_routing(sigmoid_topk_on_device(router({-18, -17, -20, -30}, {12, 12, 0, 0}, 2)), {0, 1},
                {0.2689414f, 0.7310586f});
  check_routing(sigmoid_topk_on_device(router({2, 1, 0}, {-10, 0, 0}, 2)), {1, 2}, {0.5938455f, 0.4061545f});
  check_routing(sigmoid_topk_on_device(router({1, 0, -1, -2}, {0, 0, 0, 0}, 2, false, 2.5f)), {0, 1},
                {1.8276464f, 1.25f});
  check_routing(sigmoid_topk_on_device(router({3, 3, 3, 3}, {1, 1, 1, 1}, 2)), {0, 1}, {0.5f, 0.5f});
  check_routing(sigmoid_topk_on_device(router({-infinity, -infinity, -infinity, -infinity}, {0, 0, 0, 0}, 3)),
                {0, 1, 2}, {0, 0, 0});
  check_routing(sigmoid_topk_on_device(router({1.0f, 1.001f, 1.002f}, {0, 0, 0}, 2)), {2, 1}, {0.5000672f, 0.4999328f});
  check_routing(sigmoid_topk_on_device(router({0.5f}, {0}, 1)), {0}, {0.6224593f});  // one expert: not divided

  RouterInputs last = router(std::vector<float>(896), std::vector<float>(896), 16);
  std::vector<id> ids;
  for (int i = 895; i >= 880; --i)
    last.logits[static_cast<size>(i)] = 1 + static_cast<float>(i - 880) / 100, ids.push_back(i);
  CHECK(sigmoid_topk_on_device(last).ids == ids);
}

TEST_CASE("The router on the device agrees with double", "[cuda][moe]") {
  struct Shape {
    size rows, experts, k;
  };
  // the tournament's two sizes and their edges, then what it does not take
  for (const Shape s : {Shape{1, 896, 16},
                        {33, 896, 16},
                        {3, 1, 1},
                        {4, 7, 3},
                        {2, 255, 32},
                        {2, 1024, 9},
                        {2, 1025, 16},
                        {2, 4096, 32},
                        {2, 4097, 5},
                        {2, 40, 40},
                        {3, 100, 33}}) {
    CAPTURE(s.rows, s.experts, s.k);
    RouterInputs in{s.rows, s.experts, s.k, true, 1.5f, {}, {}, {}};
    in.logits = converted<float>(random_normal(s.rows * s.experts, 5, 2));
    in.bias = converted<float>(random_normal(s.experts, 6, 0.1));
    check_against_double(in, sigmoid_topk_on_device(in));
    check_against_double(in, sigmoid_topk_on_device(in, {.shift = 1, .extra_stride = 3}));
    in.bias = converted<float>(converted<bf16>(in.bias));
    const RouterOutputs wide = sigmoid_topk_on_device(in), narrow = sigmoid_topk_on_device(in, {.bf16_bias = true});
    CHECK(wide.ids == narrow.ids);
    check(same_bits(wide.weights, narrow.weights));
    // many equal scores, of both zeros: always the lower index
    for (float& logit : in.logits) logit = std::round(logit);
    for (size e = 0; e < s.experts; ++e) in.bias[e] = e % 2 ? 0.0f : -0.0f;
    const RouterOutputs tied = sigmoid_topk_on_device(in);
    for (size row = 0; row < s.rows; ++row)
      for (size j = 0; j < s.k; ++j) CHECK(tied.ids[row * s.k + j] == route_in_double(in, row).ids[j]);
  }
}

TEST_CASE("NaN and padding rows stay alone in the device's router", "[cuda][moe]") {
  for (const auto& [experts, k] : {std::pair<size, size>{896, 16}, {5000, 4}, {50, 40}}) {
    CAPTURE(experts, k);
    RouterInputs in{7, experts, k, true, 1, {}, {}, {}};
    in.logits = converted<float>(random_normal(7 * experts, 15));
    in.bias = converted<float>(random_normal(experts, 16, 0.1));
    const RouterOutputs clean = sigmoid_topk_on_device(in);
    in.logits[2 * experts + experts - 1] = nan_value;                           // one
    for (size e = 0; e < experts; ++e) in.logits[4 * experts + e] = nan_value;  // all
    for (size e = 0; e < experts; ++e) in.logits[5 * experts + e] = nan_value;  // of a row that is padding
    in.slots = {0, 1, 2, 3, 4, pad_slot, 5};
    const RouterOutputs got = sigmoid_topk_on_device(in);
    CHECK(got.status == std::vector<unsigned>{0, 0, nan_router, 0, nan_router, 0, 0});
    for (size row = 0; row < 7; ++row)
      for (size j = 0; j < k; ++j) {
        const bool routed = row != 2 && row != 4 && row != 5;
        const size at = row * k + j;
        CHECK(got.ids[at] == (routed ? clean.ids[at] : static_cast<id>(j)));
        CHECK(got.weights[at] == (routed ? clean.weights[at] : 0.0f));
      }
    const RouterOutputs replayed = sigmoid_topk_on_device(in, {.graph = true});
    CHECK(replayed.ids == got.ids);
    check(same_bits(replayed.weights, got.weights));
  }
  for (const size rows : all_or_few<size>({65536, 70000}, {300})) {
    RouterInputs many{rows, 8, 2, true, 1, converted<float>(random_normal(rows * 8, 17)), std::vector<float>(8), {}};
    check_against_double(many, sigmoid_topk_on_device(many));
  }
  CHECK(sigmoid_topk_on_device({0, 8, 2, true, 1, {}, std::vector<float>(8), {}}).ids.empty());
}

TEST_CASE("Routed experts on the device agree with the host", "[cuda][moe]") {
  struct Shape {
    LatentMoeConfig g;
    size rows;
    bool large;
  };
  std::vector<Shape> shapes{{geometry(32, 32, 1, 1), 1, false},  {geometry(96, 32, 5, 3), 7, false},
                            {geometry(64, 96, 4, 2), 9, false},  {geometry(160, 352, 8, 3), 33, false},
                            {geometry(512, 256, 8, 2), 5, true}, {geometry(1056, 2080, 6, 4), 12, true}};
  if (!small_only()) {
    LatentMoeConfig released = LatentMoeConfig::production();
    released.n_routed = 6, released.top_k = 4;
    shapes.push_back({released, 2, true});
  }
  shapes[1].g.activation = GluConfig::silu();
  shapes[2].g.activation.linear_beta = std::nullopt;
  for (const Shape& s : shapes) {
    if (s.large && small_only()) continue;
    for (const ElementType type : {ElementType::mxfp4, ElementType::bf16, ElementType::f32}) {
      if (type != ElementType::mxfp4 && s.g.hidden > 2000) continue;
      CAPTURE(moe_expert_width(s.g), s.g.expert_hidden, s.rows, static_cast<int>(type));
      const auto in = random_problem<float>(s.g, type, s.rows, 3);
      const auto got = mix_experts_on_device(in);
      check(compare(got.out, on_host<Fp64>(in), 2e-6, 0, true));
      CHECK(total(got.expert_rows) == s.rows * s.g.top_k);
      const auto narrow = random_problem<bf16>(s.g, type, s.rows, 4);
      const double error = relative_l2(mix_experts_on_device(narrow).out, on_host<Bf16>(narrow), 1);
      INFO("relative L2 error of bf16 " << error);
      CHECK(error <= 1e-3);
    }
  }
}

TEST_CASE("More experts than shared memory counts are listed all the same", "[cuda][moe]") {
  const size rows = small_only() ? 3 : 40;
  const auto in = random_problem<float>(geometry(32, 32, 8193, 2), ElementType::mxfp4, rows, 51);
  const auto got = mix_experts_on_device(in);
  check(compare(got.out, on_host<Fp64>(in), 2e-6, 0, true));
  CHECK(total(got.expert_rows) == rows * 2);
}

TEMPLATE_TEST_CASE("Plain weights of any width have a device path", "[cuda][moe]", float, bf16) {
  for (const ElementType type : {ElementType::bf16, ElementType::f32})
    for (const auto& [width, hidden] : {std::pair<size, size>{1, 1}, {7, 13}, {24, 40}, {37, 129}, {100, 20}}) {
      CAPTURE(width, hidden, static_cast<int>(type));
      const auto in = random_problem<TestType>(geometry(width, hidden, 5, 3), type, 11, 8);
      const auto got = mix_experts_on_device(in);
      using P = std::conditional_t<std::is_same_v<TestType, float>, Fp32, Bf16>;
      CHECK(relative_l2(got.out, on_host<P>(in), 1) <= (std::is_same_v<TestType, float> ? 1e-6 : 1e-3));
      check(same_bits(
          mix_experts_on_device(in, {.shift = 1, .extra_stride = 3, .misaligned = type == ElementType::bf16 ? 2u : 4u})
              .out,
          got.out));
    }
}

TEMPLATE_TEST_CASE("A row's bits do not depend on its batch, the run or where memory lies", "[cuda][moe]", float,
                   bf16) {
  for (const ElementType type : {ElementType::mxfp4, ElementType::bf16}) {
    const auto in = random_problem<TestType>(geometry(416, 160, 12, 3), type, 128, 21);
    const size width = 416;
    const auto whole = mix_experts_on_device(in);
    for (const size rows : {1u, 2u, 7u, 8u, 9u, 33u}) {
      CAPTURE(rows, static_cast<int>(type));
      const size first = 128 - rows - 3;
      const auto part = mix_experts_on_device(rows_of(in, first, rows));
      for (size row = 0; row < rows; ++row)
        check(same_bits(row_of(part.out, row, width), row_of(whole.out, first + row, width)));
    }
    check(same_bits(mix_experts_on_device(in, {.calls = 3}).out, whole.out));
    check(same_bits(mix_experts_on_device(in, {.graph = true}).out, whole.out));
    check(same_bits(mix_experts_on_device(in, {.in_place = true}).out, whole.out));
    check(same_bits(mix_experts_on_device(in, {.shift = 1, .extra_stride = 5}).out, whole.out));
    check(same_bits(mix_experts_on_device(in, {.misaligned = 2}).out, whole.out));
    if (type != ElementType::mxfp4) continue;
    check(same_bits(mix_experts_on_device(in, {.misaligned = 1}).out, whole.out));
    check(same_bits(mix_experts_on_device(in, {.launch_name = true}).out, whole.out));
    // and all rows on the same experts, the last of them in part of an item
    auto same = in;
    for (size row = 0; row < 128; ++row)
      for (size j = 0; j < 3; ++j) same.ids[row * 3 + j] = static_cast<id>(j * 5);
    const auto crowded = mix_experts_on_device(same);
    CHECK(crowded.expert_rows[5] == 128);
    for (const size row : {0u, 31u, 32u, 77u, 127u})
      check(same_bits(mix_experts_on_device(rows_of(same, row, 1)).out, row_of(crowded.out, row, width)));
  }
}

TEMPLATE_TEST_CASE("Ids that are no experts read nothing and change no other row", "[cuda][moe]", float, bf16) {
  const auto in = random_problem<TestType>(geometry(64, 96, 6, 2), ElementType::mxfp4, 6, 31);
  const auto clean = mix_experts_on_device(in);
  auto bad = in;
  bad.ids[1 * 2] = -1, bad.ids[2 * 2 + 1] = 6, bad.ids[4 * 2] = 2147483647;
  bad.experts[5].absent = true;
  std::vector<unsigned> expected{0, bad_expert, bad_expert, 0, bad_expert, 0};
  for (size row = 0; row < 6; ++row)
    if (bad.ids[row * 2] == 5 || bad.ids[row * 2 + 1] == 5) expected[row] = bad_expert;
  for (const bool with_status : {true, false}) {
    bad.with_status = with_status;
    const auto got = mix_experts_on_device(bad);
    if (with_status) CHECK(got.status == expected);
    size routed = 0;
    for (size row = 0; row < 6; ++row) {
      CAPTURE(row);
      const auto mine = row_of(got.out, row, 64);
      if (expected[row] == 0) check(same_bits(mine, row_of(clean.out, row, 64)));
      for (size i = 0; i < 64 && expected[row] != 0; ++i) CHECK(std::isnan(static_cast<float>(mine[i])));
      routed += expected[row] == 0;
    }
    CHECK(total(got.expert_rows) == routed * 2);
  }
}

TEMPLATE_TEST_CASE("Padding rows and rows that failed are not computed", "[cuda][moe]", float, bf16) {
  const auto five = random_problem<TestType>(geometry(64, 96, 6, 2), ElementType::mxfp4, 5, 41);
  auto eight = five;
  eight.rows = 8;
  eight.latent.resize(8 * 64, TestType(nan_value));
  eight.ids.resize(8 * 2, 1 << 30);
  eight.weights.resize(8 * 2, nan_value);
  eight.slots = {4, 3, 2, 1, 0, pad_slot, pad_slot, pad_slot};
  const auto alone = mix_experts_on_device(five);
  const auto padded = mix_experts_on_device(eight);
  CHECK(total(padded.expert_rows) == 5 * 2);
  CHECK(padded.status == std::vector<unsigned>(8));
  for (size i = 0; i < 8 * 64; ++i) {
    const float want = i < 5 * 64 ? static_cast<float>(alone.out[i]) : 0.0f;
    REQUIRE(static_cast<float>(padded.out[i]) == want);
  }
  eight.status = {0, nan_router, 0, 0, 0, 0, 0, 0};
  const auto failed = mix_experts_on_device(eight);
  CHECK(failed.status == eight.status);
  CHECK(total(failed.expert_rows) == 4 * 2);
  CHECK(std::isnan(static_cast<float>(failed.out[64])));
  check(same_bits(row_of(failed.out, 2, 64), row_of(alone.out, 2, 64)));

  auto poisoned = five;
  poisoned.latent[3 * 64 + 5] = TestType(nan_value);
  for (size row = 0; row < 10; ++row) poisoned.ids[row] = static_cast<id>(row % 2);  // all in the same tiles
  auto sound = poisoned;
  sound.latent = five.latent;
  const auto with = mix_experts_on_device(poisoned), without = mix_experts_on_device(sound);
  for (const size row : {0u, 1u, 2u, 4u}) check(same_bits(row_of(with.out, row, 64), row_of(without.out, row, 64)));
  CHECK(std::isnan(static_cast<float>(with.out[3 * 64])));
  CHECK(mix_experts_on_device(rows_of(five, 0, 0)).out.empty());
}

TEMPLATE_TEST_CASE("Every E2M1 code with every E8M0 scale is exact on the device", "[cuda][moe]", float, bf16) {
  // One expert whose mid is 1 at one column and 0 elsewhere (silu(64) * 2^-6 = 1), so that out is that column of w2:
  // row i has code i % 16 under scale byte i / 16, or 0 everywhere.
  LatentMoeConfig g = geometry(4096, 32, 1, 1);
  g.activation = GluConfig::silu();
  for (const size column : {0u, 1u, 6u, 31u})
    for (const bool zeros : {false, true}) {
      CAPTURE(column, zeros);
      MoeInputs<TestType> in;
      in.g = g, in.rows = 1;
      in.experts.resize(1);
      ExpertBytes& e = in.experts[0];
      for (size m = 0; m < 3; ++m) e.data[m].assign(32 * 4096 / 2, 0), e.scale[m].assign(32 * 4096 / 32, 127);
      const auto set = [&](size m, size row, size columns, size at, unsigned code, unsigned scale) {
        e.data[m][(row * columns + at) / 2] = static_cast<unsigned char>(code << at % 2 * 4);
        e.scale[m][(row * columns + at) / 32] = static_cast<unsigned char>(scale);
      };
      set(0, column, 4096, 77, 2, 133);
      set(1, column, 4096, 77, 2, 121);
      for (size i = 0; i < 255 * 16; ++i) set(2, i, 32, column, zeros ? 0 : i % 16, static_cast<unsigned>(i / 16));
      in.latent.assign(4096, TestType(0.0f));
      in.latent[77] = TestType(1.0f);
      in.ids = {0}, in.weights = {1};
      const auto got = mix_experts_on_device(in);
      for (size i = 0; i < 255 * 16; ++i) {
        const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        double want = zeros ? 0 : magnitudes[i % 8] * std::pow(2.0, static_cast<double>(i / 16) - 127);
        if (want >= std::pow(2.0, 128)) want = std::numeric_limits<double>::infinity();
        if (i % 16 >= 8 && !zeros) want = -want;
        INFO("scale byte " << i / 16 << " code " << i % 16);
        REQUIRE(static_cast<double>(static_cast<float>(got.out[i])) == want);
      }
    }
}

TEMPLATE_TEST_CASE("device cases 40, 41, 42: an expert's activation at known points", "[cuda][moe]", float, bf16) {
  // Gates and ups are the first columns of w1 and w3, w2 is the identity: out is what the activation gives.
  const std::vector<float> gates{3, 3, 1000, 0, 3, -3, 3, 3, -1000, 1e-37f},
      ups{50, 1, 1000, 50, 2000, 2000, -2000, 1e-37f, 50, 50};
  const size width = 32;
  std::vector<double> g(width), u(width), want(width);
  for (size i = 0; i < gates.size(); ++i)
    g[i] = static_cast<double>(static_cast<float>(bf16(gates[i]))),
    u[i] = static_cast<double>(static_cast<float>(bf16(ups[i])));
  situ_glu_vec(host{}, GluConfig{}, view(g, 1, width), view(u, 1, width), view(want, 1, width));
  for (const ElementType type : {ElementType::f32, ElementType::bf16}) {
    MoeInputs<TestType> in;
    in.g = geometry(width, width, 1, 1), in.rows = 1, in.type = type;
    in.experts.resize(1);
    const auto fill = [&](size m, auto&& value) {
      for (size i = 0; i < width * width; ++i) {
        const bf16 rounded(static_cast<float>(value(i / width, i % width)));
        const float whole(rounded);
        const auto* from = reinterpret_cast<const unsigned char*>(&whole);
        // The upper half of a float is the bf16.
        in.experts[0].data[m].insert(in.experts[0].data[m].end(), from + (type == ElementType::bf16 ? 2 : 0), from + 4);
      }
    };
    fill(0, [&](size row, size column) { return column == 0 ? g[row] : 0; });
    fill(1, [&](size row, size column) { return column == 0 ? u[row] : 0; });
    fill(2, [](size row, size column) { return row == column ? 1.0 : 0.0; });
    in.latent.assign(width, TestType(0.0f));
    in.latent[0] = TestType(1.0f);
    in.ids = {0}, in.weights = {1};
    INFO("type " << static_cast<int>(type));
    check(compare(mix_experts_on_device(in).out, want, std::is_same_v<TestType, float> ? 1e-5 : 1.0 / 200, 1e-39));
  }
}

TEST_CASE("The device's router and experts refuse what does not fit", "[cuda][moe]") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"router.bias", "sigmoid_topk/bias"},
      {"router.k", "sigmoid_topk/k"},
      {"router.scale", "sigmoid_topk/scale"},
      {"router.ids", "sigmoid_topk/ids"},
      {"router.weights", "sigmoid_topk/weights"},
      {"router.slots", "sigmoid_topk/slots"},
      {"table.shape", "ExpertTable/experts[0].w1"},
      {"table.count", "ExpertTable/experts.size()"},
      {"table.type", "ExpertTable/experts[2].w2"},
      {"table.half", "ExpertTable/experts[1].w3"},
      {"caps", "mix_routed_experts/beta"},
      {"geometry", "mix_routed_experts/workspace"},
      {"workspace", "mix_routed_experts/workspace.max_rows"},
      {"latent", "mix_routed_experts/latent"},
      {"ids", "mix_routed_experts/ids"},
      {"weights", "mix_routed_experts/weights"},
      {"out", "mix_routed_experts/out"},
      {"slots", "mix_routed_experts/slots"},
      {"status", "mix_routed_experts/status"},
      {"out over latent", "mix_routed_experts/out"},
      {"out over ids", "mix_routed_experts/out"},
      {"out over weights", "mix_routed_experts/out"},
      {"out over slots", "mix_routed_experts/out"},
      {"status over latent", "mix_routed_experts/status"},
      {"status over ids", "mix_routed_experts/status"},
      {"status over weights", "mix_routed_experts/status"},
      {"status over slots", "mix_routed_experts/status"},
      {"launch", "launch_k3_latent_moe_experts/table"},
      {"entry.layout", "ExpertTable/layout"},
      {"entry.table", "ExpertTable::set/table"},
      {"entry.expert", "ExpertTable::set/expert"},
      {"entry.shape", "ExpertTable::set/weights"},
      {"entry.aligned", "ExpertTable::set/weights"},
      {"entry.half", "ExpertTable::set/weights"},
      {"entry", "nothing thrown"}};
  for (const auto& [wrong, argument] : cases) {
    INFO(wrong);
    CHECK(moe_refused_argument(wrong) == argument);
  }
}
