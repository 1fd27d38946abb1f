// SPDX-License-Identifier: Apache-2.0
#include <set>

#include <k3/ops/mix_routed_experts.hpp>

#include "cuda/device_test.hpp"
#include "cuda/moe_device.hpp"
#include "support/compare.hpp"

namespace {

using k3::bf16;
using k3::ElementType;
using k3::LatentMoeConfig;
using k3::RowStatus;
using k3::size;
using k3::test::check;
using k3::test::compare;
using k3::test::converted;
using k3::test::ExpertBytes;
using k3::test::mix_experts_on_device;
using k3::test::MoeDeviceOptions;
using k3::test::MoeInputs;
using k3::test::MoeOutputs;
using k3::test::random_normal;
using k3::test::RouterInputs;
using k3::test::RouterOutputs;
using k3::test::same_bits;
using k3::test::sigmoid_topk_on_device;

constexpr unsigned nan_router = static_cast<unsigned>(RowStatus::nan_router_logits);
constexpr unsigned bad_expert = static_cast<unsigned>(RowStatus::bad_expert);
const float nan_value = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();

// ---- the router

RouterInputs router(std::vector<float> logits, std::vector<float> bias, size k, bool renormalize = true,
                    float scale = 1) {
  const size experts = bias.size(), rows = logits.size() / experts;
  return {rows, experts, k, renormalize, scale, std::move(logits), std::move(bias), {}};
}

void check_routing(const RouterOutputs& got, const std::vector<k3::id>& ids, const std::vector<float>& weights) {
  CHECK(got.ids == ids);
  check(compare(got.weights, weights, 1e-5));
  CHECK(got.status == std::vector<unsigned>(got.status.size()));
}

/// The routing in double, by sorting.
struct Routed {
  std::vector<k3::id> ids;
  std::vector<double> weights, scores;
};
Routed route_in_double(const RouterInputs& in, size row) {
  std::vector<double> p(in.experts), score(in.experts);
  std::vector<k3::id> order(in.experts);
  for (size e = 0; e < in.experts; ++e) {
    p[e] = 1 / (1 + std::exp(-static_cast<double>(in.logits[row * in.experts + e])));
    score[e] = p[e] + static_cast<double>(in.bias[e]);
    order[e] = static_cast<k3::id>(e);
  }
  const auto at = [](const std::vector<double>& values, k3::id e) { return values[static_cast<size>(e)]; };
  std::stable_sort(order.begin(), order.end(), [&](k3::id a, k3::id b) { return at(score, a) > at(score, b); });
  order.resize(in.k);
  Routed result{order, {}, score};
  double sum = 0;
  for (k3::id e : order) sum += at(p, e);
  const bool divide = in.renormalize && in.k > 1;
  for (k3::id e : order)
    result.weights.push_back((divide ? at(p, e) / (sum + 1e-20) : at(p, e)) * static_cast<double>(in.scale));
  return result;
}

/// Ids of one router row must be those of double but where scores are so close that float may order them otherwise.
void check_against_double(const RouterInputs& in, const RouterOutputs& got) {
  std::vector<float> got_weights;
  std::vector<double> want_weights;
  for (size row = 0; row < in.rows; ++row) {
    const Routed want = route_in_double(in, row);
    const std::vector<k3::id> ids(got.ids.begin() + static_cast<long>(row * in.k),
                                  got.ids.begin() + static_cast<long>((row + 1) * in.k));
    REQUIRE(std::set<k3::id>(ids.begin(), ids.end()).size() == in.k);
    REQUIRE(*std::min_element(ids.begin(), ids.end()) >= 0);
    REQUIRE(static_cast<size>(*std::max_element(ids.begin(), ids.end())) < in.experts);
    for (size j = 0; j < in.k; ++j) {
      const double mine = want.scores[static_cast<size>(ids[j])], theirs = want.scores[static_cast<size>(want.ids[j])];
      INFO("row " << row << " rank " << j << ": expert " << ids[j] << " of score " << mine << ", in double "
                  << want.ids[j] << " of " << theirs);
      CHECK(std::abs(mine - theirs) <= 3e-7 * (1 + std::abs(theirs)));
      if (ids == want.ids) {
        got_weights.push_back(got.weights[row * in.k + j]);
        want_weights.push_back(want.weights[j]);
      }
    }
  }
  check(compare(got_weights, want_weights, 2e-6));
}

// ---- experts

unsigned random_bits(std::uint64_t& state) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return static_cast<unsigned>(state >> 20);
}

/// Weights of about 1 / sqrt(columns): MXFP4 with scale bytes over a range of 2^4, or plain elements.
std::vector<ExpertBytes> random_experts(const LatentMoeConfig& g, ElementType type, std::uint64_t seed) {
  std::vector<ExpertBytes> experts(g.n_routed);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  const size width = moe_expert_width(g), count = g.expert_hidden * width;
  for (ExpertBytes& expert : experts)
    for (size m = 0; m < 3; ++m) {
      const double columns = static_cast<double>(m == 2 ? g.expert_hidden : width);
      if (type == ElementType::mxfp4) {
        const unsigned scale = static_cast<unsigned>(127 - std::lround(std::log2(columns) / 2) - 3);
        expert.data[m].resize(count / 2);
        expert.scale[m].resize(count / 32);
        for (auto& byte : expert.data[m]) byte = static_cast<unsigned char>(random_bits(state));
        for (auto& byte : expert.scale[m]) byte = static_cast<unsigned char>(scale + random_bits(state) % 5);
        continue;
      }
      expert.data[m].resize(count * (type == ElementType::bf16 ? 2 : 4));
      for (size i = 0; i < count; ++i) {
        const float value = static_cast<float>((random_bits(state) % 20001 / 1e4 - 1) * 1.7 / std::sqrt(columns));
        const bf16 rounded(value);
        if (type == ElementType::bf16)
          __builtin_memcpy(&expert.data[m][i * 2], &rounded, 2);
        else
          __builtin_memcpy(&expert.data[m][i * 4], &value, 4);
      }
    }
  return experts;
}

template <class X>
MoeInputs<X> random_problem(LatentMoeConfig g, ElementType type, size rows, std::uint32_t seed) {
  MoeInputs<X> in;
  in.g = g, in.rows = rows, in.type = type;
  in.experts = random_experts(g, type, seed);
  in.latent = converted<X>(random_normal(rows * moe_expert_width(g), seed));
  std::uint64_t state = seed + 99;
  for (size row = 0; row < rows; ++row) {
    std::set<k3::id> chosen;
    while (chosen.size() < g.top_k) {
      const k3::id e = static_cast<k3::id>(random_bits(state) % g.n_routed);
      if (!chosen.insert(e).second) continue;
      in.ids.push_back(e);
      in.weights.push_back(0.1f + static_cast<float>(random_bits(state) % 1000) / 1000.0f);
    }
  }
  return in;
}

/// The host operation in precision P.
template <class P, class X>
std::vector<typename P::activation> on_host(const MoeInputs<X>& in) {
  using T = typename P::activation;
  const size width = moe_expert_width(in.g);
  std::vector<k3::ExpertWeights> experts(in.g.n_routed);
  for (size e = 0; e < experts.size(); ++e) {
    k3::AnyMatrix<>* matrices[3] = {&experts[e].w1, &experts[e].w3, &experts[e].w2};
    for (size m = 0; m < 3; ++m) {
      matrices[m]->data = in.experts[e].data[m].data(), matrices[m]->scale = in.experts[e].scale[m].data();
      matrices[m]->type = in.type;
      matrices[m]->extents[0] = m == 2 ? width : in.g.expert_hidden;
      matrices[m]->extents[1] = m == 2 ? in.g.expert_hidden : width;
    }
  }
  const auto latent = converted<T>(in.latent);
  const auto weights = converted<typename P::accumulator>(in.weights);
  std::vector<T> out(in.rows * width);
  k3::MoeWorkspace<P> workspace(in.g, in.rows);
  mix_routed_experts(
      k3::host{}, in.g, k3::view(latent.data(), in.rows, width), k3::view(in.ids.data(), in.rows, size{in.g.top_k}),
      k3::view(weights.data(), in.rows, size{in.g.top_k}), experts, workspace, k3::view(out.data(), in.rows, width));
  return out;
}

template <class Got, class Want>
double relative_l2(const Got& got, const Want& want) {
  double error = 0, norm = 0;
  for (size i = 0; i < want.size(); ++i) {
    const double g = static_cast<double>(got[i]), w = static_cast<double>(want[i]);
    error += (g - w) * (g - w), norm += w * w;
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

template <class X>
MoeInputs<X> rows_of(const MoeInputs<X>& in, size first, size count) {
  MoeInputs<X> part = in;
  const auto take = [&](auto& values, size columns) {
    values.assign(values.begin() + static_cast<long>(first * columns),
                  values.begin() + static_cast<long>((first + count) * columns));
  };
  part.rows = count;
  take(part.latent, moe_expert_width(in.g));
  take(part.ids, in.g.top_k);
  take(part.weights, in.g.top_k);
  return part;
}

template <class X>
std::vector<X> row_of(const std::vector<X>& values, size row, size width) {
  return {values.begin() + static_cast<long>(row * width), values.begin() + static_cast<long>((row + 1) * width)};
}

LatentMoeConfig geometry(size width, size expert_hidden, size experts, size k) {
  return {width, 0, expert_hidden, experts, k, 0, {}, false, true, 1.0f};
}

size total(const std::vector<size>& counts) {
  size sum = 0;
  for (size c : counts) sum += c;
  return sum;
}

}  // namespace

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
  std::vector<k3::id> ids;
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
    in.slots = {0, 1, 2, 3, 4, k3::pad_slot, 5};
    const RouterOutputs got = sigmoid_topk_on_device(in);
    CHECK(got.status == std::vector<unsigned>{0, 0, nan_router, 0, nan_router, 0, 0});
    for (size row = 0; row < 7; ++row)
      for (size j = 0; j < k; ++j) {
        const bool routed = row != 2 && row != 4 && row != 5;
        const size at = row * k + j;
        CHECK(got.ids[at] == (routed ? clean.ids[at] : static_cast<k3::id>(j)));
        CHECK(got.weights[at] == (routed ? clean.weights[at] : 0.0f));
      }
    const RouterOutputs replayed = sigmoid_topk_on_device(in, {.graph = true});
    CHECK(replayed.ids == got.ids);
    check(same_bits(replayed.weights, got.weights));
  }
  if (k3::test::small_only()) return;
  RouterInputs many{70000, 8, 2, true, 1, converted<float>(random_normal(70000 * 8, 17)), std::vector<float>(8), {}};
  check_against_double(many, sigmoid_topk_on_device(many));
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
  if (!k3::test::small_only()) {
    LatentMoeConfig released = LatentMoeConfig::production();
    released.n_routed = 6, released.top_k = 4;
    shapes.push_back({released, 2, true});
  }
  shapes[1].g.activation = k3::GluConfig::silu();
  shapes[2].g.activation.linear_beta = std::nullopt;
  for (const Shape& s : shapes) {
    if (s.large && k3::test::small_only()) continue;
    for (const ElementType type : {ElementType::mxfp4, ElementType::bf16, ElementType::f32}) {
      if (type != ElementType::mxfp4 && s.g.hidden > 2000) continue;
      CAPTURE(moe_expert_width(s.g), s.g.expert_hidden, s.rows, static_cast<int>(type));
      const auto in = random_problem<float>(s.g, type, s.rows, 3);
      const auto got = mix_experts_on_device(in);
      check(compare(got.out, on_host<k3::Fp64>(in), 2e-6, 0, true));
      CHECK(total(got.expert_rows) == s.rows * s.g.top_k);
      const auto narrow = random_problem<bf16>(s.g, type, s.rows, 4);
      const double error = relative_l2(mix_experts_on_device(narrow).out, on_host<k3::Bf16>(narrow));
      INFO("relative L2 error of bf16 " << error);
      CHECK(error <= 5e-3);
    }
  }
}

TEST_CASE("More experts than shared memory counts are listed all the same", "[cuda][moe]") {
  if (k3::test::small_only()) return;
  const auto in = random_problem<float>(geometry(32, 32, 8193, 2), ElementType::mxfp4, 40, 51);
  const auto got = mix_experts_on_device(in);
  check(compare(got.out, on_host<k3::Fp64>(in), 2e-6, 0, true));
  CHECK(total(got.expert_rows) == 80);
}

TEMPLATE_TEST_CASE("Plain weights of any width have a device path", "[cuda][moe]", float, bf16) {
  for (const ElementType type : {ElementType::bf16, ElementType::f32})
    for (const auto& [width, hidden] : {std::pair<size, size>{1, 1}, {7, 13}, {24, 40}, {37, 129}, {100, 20}}) {
      CAPTURE(width, hidden, static_cast<int>(type));
      const auto in = random_problem<TestType>(geometry(width, hidden, 5, 3), type, 11, 8);
      const auto got = mix_experts_on_device(in);
      using P = std::conditional_t<std::is_same_v<TestType, float>, k3::Fp32, k3::Bf16>;
      CHECK(relative_l2(got.out, on_host<P>(in)) <= (std::is_same_v<TestType, float> ? 1e-6 : 5e-3));
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
      for (size j = 0; j < 3; ++j) same.ids[row * 3 + j] = static_cast<k3::id>(j * 5);
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
  eight.slots = {4, 3, 2, 1, 0, k3::pad_slot, k3::pad_slot, k3::pad_slot};
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
  for (size row = 0; row < 10; ++row) poisoned.ids[row] = static_cast<k3::id>(row % 2);  // all in the same tiles
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
  g.activation = k3::GluConfig::silu();
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

TEST_CASE("The device's router and experts refuse what does not fit", "[cuda][moe]") {
  using k3::test::moe_refused_argument;
  CHECK(moe_refused_argument("router.bias") == "bias");
  CHECK(moe_refused_argument("router.k") == "k");
  CHECK(moe_refused_argument("router.scale") == "scale");
  CHECK(moe_refused_argument("router.ids") == "ids");
  CHECK(moe_refused_argument("router.weights") == "weights");
  CHECK(moe_refused_argument("router.slots") == "slots");
  CHECK(moe_refused_argument("table.shape") == "experts[0].w1");
  CHECK(moe_refused_argument("table.count") == "experts.size()");
  CHECK(moe_refused_argument("table.type") == "experts[2].w2");
  CHECK(moe_refused_argument("table.half") == "experts[1].w3");
  CHECK(moe_refused_argument("caps") == "beta");
  CHECK(moe_refused_argument("geometry") == "workspace");
  CHECK(moe_refused_argument("workspace") == "workspace.max_rows");
  for (const char* name : {"latent", "ids", "weights", "out", "slots", "status"})
    CHECK(moe_refused_argument(name) == name);
  CHECK(moe_refused_argument("launch") == "table");
}
