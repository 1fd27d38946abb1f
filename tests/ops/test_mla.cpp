// SPDX-License-Identifier: Apache-2.0
#include <k3/geometry/presets.hpp>
#include <k3/ops/gated_mla_attend.hpp>

#include "ops/mla_problem.hpp"
#include "support/ops_fixture.hpp"

namespace {

using namespace k3;
using namespace k3::test;

const double infinity = std::numeric_limits<double>::infinity();
const host every_isa[] = {{1, Isa::plain}, {1, Isa::avx2}, {1, Isa::avx512}};

template <class T>
std::vector<T> product(const OpsTensor& weight, const std::vector<T>& x, size rows) {
  const std::vector<T> w = converted<T>(weight.values);
  const size n = weight.shape[0], k = weight.shape[1];
  std::vector<T> out(rows * n);
  linear(host{1}, view(x, rows, k), view(w, n, k), view(out, rows, n));
  return out;
}

}  // namespace

TEMPLATE_TEST_CASE("mla_decode_token gives the fixture's attention", "[mla]", double, float) {
  for (const OpsCase& one : ops_cases("mla_decode_token")) {
    INFO(one.name);
    const auto field = [&](const char* name) { return one.params.at(name).get<size>(); };
    MlaConfig g = mla_geometry_of(field("heads"), field("qk_nope_head_dim"), field("qk_rope_head_dim"),
                                  field("v_head_dim"), field("kv_lora_rank"), false);
    g.norm_eps = one.params.at("latent_norm_eps").get<float>();
    const size tokens = field("tokens"), rank = g.kv_lora_rank, rope = g.qk_rope_head_dim;
    const auto x = converted<TestType>(one.tensor("x").values);
    auto cq = product(one.tensor("w_q_a"), x, tokens);
    const auto q_norm = converted<TestType>(one.tensor("w_q_a_norm").values);
    rms_norm(host{1}, view(cq, tokens, q_norm.size()), view(q_norm), TestType(1e-6), view(cq, tokens, q_norm.size()));
    const auto q = product(one.tensor("w_q_b"), cq, tokens), kv_a = product(one.tensor("w_kv_a"), x, tokens);
    const auto gate = product(one.tensor("w_g"), x, tokens),
               norm = converted<TestType>(one.tensor("w_kv_a_norm").values);
    const auto kv_b = converted<TestType>(one.tensor("w_kv_b").values);
    const auto expect = [&](const auto& got, const char* name) {
      INFO(name);
      check(compare(got, one.tensor(name).values, one.rtol, one.atol));
    };
    expect(q, "q");

    MlaKv<TestType> kv(g, 1, tokens);
    std::vector<TestType> out(tokens * mla_v_width(g)), latent(tokens * rank), k_rope(tokens * rope);
    std::vector<id> slots(tokens), positions{0, 1, 2, 3, 4};
    MlaWorkspace<TestType> workspace(g, tokens);
    const auto decode = [&](MlaConfig config, View<const TestType, 2> gates) {
      mla_decode_token(host{1}, config, view(q, tokens, mla_q_width(g)), view(kv_a, tokens, rank + rope), view(norm),
                       view(kv_b, mla_kv_b_rows(g), rank), gates, view(slots), view(positions), kv.view(), workspace,
                       view(out, tokens, mla_v_width(g)));
    };
    decode(g, {});
    expect(out, "attn");
    for (size t = 0; t < tokens; ++t) {
      std::copy_n(kv.row(0, t), rank, latent.begin() + static_cast<std::ptrdiff_t>(t * rank));
      std::copy_n(kv.row(0, t) + rank, rope, k_rope.begin() + static_cast<std::ptrdiff_t>(t * rope));
    }
    expect(latent, "latent");
    expect(k_rope, "k_rope");
    g.mla_use_output_gate = true;
    decode(g, view(gate, tokens, mla_v_width(g)));
    expect(product(one.tensor("w_o"), out, tokens), "out");
  }
}

TEST_CASE("absorbed attention equals the expanded oracle in double", "[mla]") {
  const MlaConfig geometries[] = {
      mla_geometry_of(1, 8, 4, 6, 10),
      mla_geometry_of(3, 20, 12, 28, 40),
      mla_geometry_of(5, 20, 12, 28, 40, false),
      mla_geometry_of(2, 16, 0, 16, 32),
      mla_geometry_of(1, 1, 1, 1, 1),
      mla_geometry_of(4, 32, 16, 32, 1100),
      MlaConfig{2, 4, 2, 4, 8, 6, true, true, 0.5f},
  };
  for (const MlaConfig& g : geometries)
    for (const size tokens : {size{1}, size{2}, size{63}, size{64}, size{65}, size{130}}) {
      if (g.kv_lora_rank > 1000 && tokens > 65) continue;
      CAPTURE(g.heads, g.kv_lora_rank, tokens);
      const MlaProblem problem(g, tokens, 1);
      check(compare(MlaInputs<Fp64>(problem).decode_all(host{1}, tokens), mla_oracle(problem), 1e-12, 0, true));
    }
}

TEST_CASE("every length from 1 to 200 equals the expanded oracle", "[mla]") {
  const MlaProblem problem(mla_geometry_of(3, 20, 12, 28, 40), 200, 2);
  const std::vector<double> want = mla_oracle(problem);  // its rows are the lengths 1..200
  check(compare(MlaInputs<Fp64>(problem).decode_all(host{1}, 1), want, 1e-12, 0, true));
  for (const host& exec : every_isa) {
    CAPTURE(static_cast<int>(exec.isa));
    const Comparison fp32 = compare(MlaInputs<Fp32>(problem).decode_all(exec, 1), want, 1e-6, 0, true);
    const double bf16_l2 = relative_l2(converted<double>(MlaInputs<Bf16>(problem).decode_all(exec, 1)), want);
    CAPTURE(fp32.worst, bf16_l2);
    if (std::getenv("K3_TEST_VERBOSE")) WARN("float " << fp32.worst << ", bf16 " << bf16_l2);
    check(fp32);
    CHECK(bf16_l2 < 8e-3);
  }
}

TEST_CASE("a released head's sizes stay accurate over a thousand positions", "[mla]") {
  const MlaProblem problem(mla_geometry_of(2, 128, 64, 128, 512), 1000, 3);
  const std::vector<double> all = mla_oracle(problem, 999);
  const std::vector<double> want(all.end() - static_cast<std::ptrdiff_t>(mla_v_width(problem.g)), all.end());
  for (const host& exec : every_isa) {
    const auto last_row = [&](const auto& inputs) {
      using T = typename std::decay_t<decltype(inputs)>::T;
      MlaKv<T> kv(problem.g, 1, 1000);
      const std::vector<id> slots(999);
      std::vector<id> positions(999);
      for (size t = 0; t < 999; ++t) positions[t] = static_cast<id>(t);
      mla_append(exec, problem.g, view(inputs.kv_a, 1000, mla_cache_width(problem.g)).slice(0, 0, 999),
                 view(inputs.norm), accumulator_t<T>(1e-6f), view(slots), view(positions), kv.view());
      return inputs.decode(exec, problem.g, kv.view(), 0, 999, 1);
    };
    const Comparison fp32 = compare(last_row(MlaInputs<Fp32>(problem)), want, 2e-6, 0, true);
    const double bf16_l2 = relative_l2(converted<double>(last_row(MlaInputs<Bf16>(problem))), want);
    CAPTURE(static_cast<int>(exec.isa), fp32.worst, bf16_l2);
    if (std::getenv("K3_TEST_VERBOSE")) WARN("float " << fp32.worst << ", bf16 " << bf16_l2);
    check(fp32);
    CHECK(bf16_l2 < 8e-3);
  }
}

TEMPLATE_TEST_CASE("fixed and run-time geometry give the same bits", "[mla]", Fp64, Fp32, Bf16) {
  const MlaProblem problem(mla_config(kimi_k3_0_4b::Mla{}), 70, 4);
  const MlaInputs<TestType> inputs(problem);
  MlaKv<typename TestType::activation> kv(problem.g, 1, 70), fixed_kv(kimi_k3_0_4b::Mla{}, 1, 70);
  check(same_bits(inputs.decode(host{1}, kimi_k3_0_4b::Mla{}, fixed_kv.view(), 0, 0, 70),
                  inputs.decode(host{1}, problem.g, kv.view(), 0, 0, 70)));
}

TEMPLATE_TEST_CASE("one call, token by token, threads and vector widths give the same bits", "[mla]", Fp64, Fp32,
                   Bf16) {
  for (const MlaConfig& g : {mla_geometry_of(5, 20, 12, 28, 40), mla_geometry_of(21, 16, 8, 16, 96)}) {
    const MlaInputs<TestType> inputs(MlaProblem(g, 150, 5));
    for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512}) {
      CAPTURE(static_cast<int>(isa), g.heads);
      const auto want = inputs.decode_all(host{1, isa}, 150);
      for (const size step : {size{1}, size{7}, size{64}})
        check(same_bits(inputs.decode_all(host{1, isa}, step), want));
      for (const int threads : {2, 3}) check(same_bits(inputs.decode_all(host{threads, isa}, 150), want));
      if (isa == Isa::avx512 && best_isa() == Isa::avx512)
        check(same_bits(inputs.decode_all(host{1, Isa::avx2}, 150), want));
    }
  }
}

TEST_CASE("a weight of unknown type gives the bits of a typed one", "[mla]") {
  const MlaProblem problem(mla_geometry_of(3, 20, 12, 28, 40), 3, 6);
  const MlaConfig g = problem.g;
  const MlaInputs<Bf16> in(problem);
  MlaKv<bf16> kv(g, 1, 3);
  MlaWorkspace<bf16> workspace(g, 3);
  std::vector<bf16> out(3 * mla_v_width(g));
  const std::vector<id> slots{0, 0, 0};
  const std::vector<size> positions{0, 1, 2};
  mla_decode_token(host{1}, g, view(in.q, 3, mla_q_width(g)), view(in.kv_a, 3, mla_cache_width(g)),
                   AnyVector<>(view(in.norm)), AnyMatrix<>(view(in.kv_b, mla_kv_b_rows(g), g.kv_lora_rank)),
                   view(in.gate, 3, mla_v_width(g)), view(slots), view(positions), kv.view(), workspace,
                   view(out, 3, mla_v_width(g)));
  check(same_bits(out, in.decode_all(host{1}, 3)));
}

TEST_CASE("the online softmax merges like one softmax", "[mla]") {
  SoftmaxState<double> a, b, none;
  for (const double score : {1.0, 3.0}) a = softmax_merge(a, SoftmaxState<double>{score, 1.0});
  b = softmax_merge(none, SoftmaxState<double>{700.0, 1.0});
  CHECK(a.max == 3.0);
  CHECK(std::abs(a.sum - (1 + std::exp(-2.0))) < 1e-15);
  const SoftmaxState<double> joint = softmax_merge(a, b), swapped = softmax_merge(b, a);
  CHECK(joint.max == 700.0);
  CHECK(joint.sum == 1.0);  // e^-697 does not show
  CHECK(swapped.sum == joint.sum);
  CHECK(softmax_merge(none, none).sum == 0.0);
  CHECK(softmax_merge(none, none).max == SoftmaxState<double>::no_max);
  CHECK(softmax_rescale(2.0f, 2.0f) == 1.0f);
  CHECK(softmax_rescale(SoftmaxState<float>::no_max, 2.0f) == 0.0f);
}

TEST_CASE("NoPE leaves a row as it is and RoPE turns its pairs", "[mla]") {
  MlaConfig g = mla_geometry_of(2, 1, 4, 1, 1);
  const std::vector<double> row{9, 1, 2, 3, 4, 8, 0, 1, 0, 0};
  std::vector<double> turned = row;
  mla_rotate(g, view(turned), 3, 100.0);
  check(same_bits(turned, row));
  g.mla_use_nope = false;
  mla_rotate(g, view(turned), 3, 100.0);
  // Pair 0 (elements 0 and 2 of the slice) by 3 radians, pair 1 (1 and 3) by 3 / 100^(2/4) = 0.3.
  const std::vector<double> want{9, -1.41335252, 0.728592151, -2.82885748, 4.41238637,
                                 8, 0,           0.955336489, 0,           0.295520207};
  check(compare(turned, want, 1e-8));
}

TEMPLATE_TEST_CASE("expanded attention: one call equals token by token exactly", "[mla]", Fp64, Fp32, Bf16) {
  using T = typename TestType::activation;
  for (const bool nope : {true, false}) {
    MlaConfig g = mla_geometry_of(3, 8, 4, 6, 10);
    g.mla_use_nope = nope;
    const size tokens = 9, first = 5;
    const auto q = converted<T>(random_normal(tokens * mla_q_width(g), 1)),
               k = converted<T>(random_normal(q.size(), 2));
    const auto v = converted<T>(random_normal(tokens * mla_v_width(g), 3)),
               gate = converted<T>(random_normal(v.size(), 4));
    std::vector<T> out(v.size()), single(v.size()), first_row(mla_v_width(g));
    const auto rows = [&](const std::vector<T>& x) { return view(x, tokens, x.size() / tokens); };
    gated_mla_attend(host{1}, g, rows(q), rows(k), rows(v), rows(gate), first, 1e4, view(out, tokens, mla_v_width(g)));
    MlaExpandedKv<T> kv(g, tokens);
    for (size t = 0; t < tokens; ++t)
      mla_decode_token(host{1}, g, rows(q)[t], rows(k)[t], rows(v)[t], rows(gate)[t], kv, first + t, 1e4,
                       view(single, tokens, mla_v_width(g))[t]);
    check(same_bits(single, out));
    gated_mla_attend(host{1}, g, rows(q).slice(0, 0, 1), rows(k).slice(0, 0, 1), rows(v).slice(0, 0, 1),
                     rows(gate).slice(0, 0, 1), first, 1e4, view(first_row, size{1}, mla_v_width(g)));
    check(
        same_bits(first_row, std::vector<T>(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(first_row.size()))));
  }
}

TEST_CASE("expanded attention equals the latent one on the keys and values it expands to", "[mla]") {
  const MlaProblem p(mla_geometry_of(3, 20, 12, 28, 40), 40, 7);
  const size nope = 20, rope = 12, dv = 28, rank = 40;
  const MlaInputs<Fp64> in(p);
  MlaKv<double> kv(p.g, 1, 40);
  const auto want = in.decode(host{1}, p.g, kv.view(), 0, 0, 40);
  std::vector<double> k(40 * 3 * 32), v(40 * 3 * dv), out(v.size()), turned(v.size()), moved(v.size());
  for (size t = 0; t < 40; ++t)
    for (size h = 0; h < 3; ++h) {
      const auto expand = [&](size row) {
        double sum = 0;
        for (size i = 0; i < rank; ++i) sum += p.kv_b[row * rank + i] * kv.row(0, t)[i];
        return sum;
      };
      for (size i = 0; i < nope; ++i) k[(t * 3 + h) * 32 + i] = expand(h * 48 + i);
      for (size i = 0; i < rope; ++i) k[(t * 3 + h) * 32 + nope + i] = kv.row(0, t)[rank + i];
      for (size i = 0; i < dv; ++i) v[(t * 3 + h) * dv + i] = expand(h * 48 + nope + i);
    }
  const auto attend = [&](MlaConfig g, size first, std::vector<double>& to) {
    gated_mla_attend(host{1}, g, view(p.q, 40, 96), view(k, 40, 96), view(v, 40, 84), view(p.gate, 40, 84), first, 1e4,
                     view(to, 40, 84));
  };
  attend(p.g, 0, out);
  check(compare(out, want, 1e-12, 0, true));
  MlaConfig rope_g = p.g;
  rope_g.mla_use_nope = false;
  attend(rope_g, 0, turned);
  CHECK(relative_l2(turned, want) > 1e-4);
  attend(rope_g, 77, moved);  // only distances count
  check(compare(moved, turned, 1e-11, 0, true));
}

TEST_CASE("softmax weights are rounded for the value product but not for their sum", "[mla]") {
  const MlaConfig g = mla_geometry_of(2, 8, 4, 6, 24);
  const size length = 150, width = 28, rank = 24;
  const auto q = converted<bf16>(random_normal(2 * width, 1, 1.0)),
             cached = converted<bf16>(random_normal(length * width, 2));
  MlaKv<bf16> kv(g, 1, length);
  std::copy(cached.begin(), cached.end(), kv.row(0, 0));
  std::vector<double> want(2 * rank), unrounded(2 * rank);
  for (size h = 0; h < 2; ++h) {
    double running = -infinity, sum = 0;
    std::vector<double> score(length);
    for (size s = 0; s < length; ++s) {
      for (size i = 0; i < width; ++i)
        score[s] += static_cast<double>(q[h * width + i]) * static_cast<double>(cached[s * width + i]);
      score[s] /= std::sqrt(12.0);
    }
    for (size s = 0; s < length; ++s) {
      if (s % 64 == 0) {  // the largest of all blocks up to this one
        const double largest =
            *std::max_element(score.begin(), score.begin() + static_cast<std::ptrdiff_t>(std::min(s + 64, length)));
        const double scale = std::exp(running - largest);
        for (size i = 0; i < rank; ++i) want[h * rank + i] *= scale, unrounded[h * rank + i] *= scale;
        sum *= scale;
        running = largest;
      }
      const double weight = std::exp(score[s] - running);
      sum += weight;
      for (size i = 0; i < rank; ++i) {
        const double value = static_cast<double>(cached[s * width + i]);
        want[h * rank + i] += static_cast<double>(bf16(weight)) * value;
        unrounded[h * rank + i] += weight * value;
      }
    }
    for (size i = 0; i < rank; ++i) want[h * rank + i] /= sum, unrounded[h * rank + i] /= sum;
  }
  CHECK(relative_l2(unrounded, want) > 2e-4);
  for (const host& exec : every_isa) {
    std::vector<float> out(2 * rank);
    const std::vector<id> slots{0}, positions{static_cast<id>(length - 1)};
    mla_attend(exec, g, view(q, size{1}, size{2}, width), kv.view(), view(slots), view(positions),
               view(out, size{1}, size{2}, rank));
    check(compare(out, want, 2e-6, 0, true));
  }
}

TEST_CASE("mla_append agrees with double, and copies the key part", "[mla]") {
  constexpr double bound = 6e-7;
  double worst = 0;
  for (const size rank : {size{1}, size{6}, size{127}, size{512}}) {
    const MlaConfig g = mla_geometry_of(1, 2, 64, 2, rank, false);
    const size rows = 300, width = mla_cache_width(g);
    for (const double scale : {1e-4, 1.0, 300.0}) {
      const auto kv_a = converted<float>(random_normal(rows * width, static_cast<std::uint32_t>(rank), scale));
      const auto norm = converted<float>(random_normal(rank, 99, 0.5));
      std::vector<id> slots(rows, 0), positions(rows);
      for (size r = 0; r < rows; ++r) positions[r] = static_cast<id>(r);
      MlaKv<float> kv(g, 1, rows);
      mla_append(host{}, g, view(kv_a, rows, width), view(norm), 1e-6f, view(slots), view(positions), kv.view());
      for (size r = 0; r < rows; ++r) {
        double squares = 0;
        const float *from = kv_a.data() + r * width, *row = kv.row(0, r);
        for (size i = 0; i < rank; ++i) squares += static_cast<double>(from[i]) * static_cast<double>(from[i]);
        const double root = std::sqrt(squares / static_cast<double>(rank) + static_cast<double>(1e-6f));
        for (size i = 0; i < rank; ++i) {
          const double want = static_cast<double>(from[i]) / root * static_cast<double>(norm[i]);
          const double got = static_cast<double>(row[i]), error = std::fabs(got - want) / std::fabs(want);
          worst = std::max(worst, error);
          if (error > bound)
            FAIL_CHECK("row " << r << ", element " << i << " of " << rank << ", scale " << scale << ": " << got
                              << " for " << want << ", relative " << error << ", bound " << bound);
        }
        for (size i = rank; i < width; ++i) REQUIRE(row[i] == from[i]);
      }
    }
  }
  INFO("worst relative error " << worst);
  CHECK(worst > 0);
}
