// SPDX-License-Identifier: Apache-2.0
// MLA: behaviour cases, caches, batches, and attention on expanded keys and values against plain loops.
#include <cstdlib>
#include <limits>

#include <k3/ops/gated_mla_attend.hpp>

#include "ops/mla_problem.hpp"

namespace {

using namespace k3;
using namespace k3::test;

const double nan_value = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();

template <class T>
std::vector<T> rows_of(const std::vector<T>& all, size width, size first, size count) {
  const auto at = all.begin() + static_cast<std::ptrdiff_t>(first * width);
  return {at, at + static_cast<std::ptrdiff_t>(count * width)};
}

}  // namespace

TEST_CASE("case 31: scores are scaled by the head's width, position part included", "[mla]") {
  const MlaConfig g = mla_geometry_of(1, 128, 64, 128, 512);
  MlaKv<double> kv(g, 1, 2);
  kv.row(0, 0)[0] = 2;
  kv.row(0, 0)[512] = 4;
  kv.row(0, 1)[1] = 1;  // a dot product of 0 and a value that tells the second weight
  std::vector<double> q(576), out(512);
  q[0] = 4;                         // the latent part gives 8
  q[512] = (13.8564065 - 8.0) / 4;  // the position part the rest
  const std::vector<id> slots{0}, positions{1};
  for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512}) {
    mla_attend(host{1, isa}, g, view(q, 1, 1, 576), kv.view(), view(slots), view(positions), view(out, 1, 1, 512));
    check(compare(std::vector<double>{out[0] / 2, out[1]}, std::vector<double>{0.7310586, 0.2689414}, 0, 1e-7));
  }
}

TEMPLATE_TEST_CASE("case 32: positions past the last are never read", "[mla]", Fp64, Fp32, Bf16) {
  using T = typename TestType::activation;
  const MlaConfig g = mla_geometry_of(3, 20, 12, 28, 40);
  const MlaInputs<TestType> inputs(MlaProblem(g, 13, 1));
  for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512})
    for (const size page : {size{16}, size{4}}) {
      const auto decode = [&](double fill) {
        ShuffledKv<T> kv(g, 1, 16, page, T(static_cast<float>(fill)));
        return inputs.decode_all(host{1, isa}, kv.view(), 0, 13);
      };
      const auto want = decode(0);
      check(same_bits(decode(nan_value), want));
      check(same_bits(decode(infinity), want));
      for (const T value : want) CHECK(std::isfinite(static_cast<float>(value)));
    }
}

TEST_CASE("case 33: offsets do not wrap at 32 bits", "[mla]") {
  static_assert(mla_row_offset(id{4000000}, 1, 0, 576) == 2304000000u);
  static_assert(mla_row_offset(id{7456541}, 1, 0, 576) == size{4294967616});
  CHECK(mla_row_offset(id{7456541}, 64, 7 * 64 + 5, 576) == (size{7456541} * 64 + 5) * 576);
  // The view computes the same; its memory is never touched here.
  const std::vector<id> table{4000000, 7456541};
  const auto* base = reinterpret_cast<const bf16*>(std::uintptr_t{1} << 20);
  const MlaKvView<const bf16> kv{view(base, size{8000000}, size{1}, size{576}), view(table, 2, 1), 1};
  CHECK(reinterpret_cast<std::uintptr_t>(kv.row(0, 0)) == (std::uintptr_t{1} << 20) + 2 * size{2304000000});
  CHECK(reinterpret_cast<std::uintptr_t>(kv.row(1, 0)) == (std::uintptr_t{1} << 20) + 2 * size{4294967616});
}

TEST_CASE("a cache of a million positions takes memory only as it is written", "[mla]") {
  const MlaConfig g = MlaConfig::production();
  MlaKv<bf16> kv(g, 2, 1000000);  // 2.3 GB
  CHECK(kv.bytes() == size{2} * 1000000 * 576 * 2);
  kv.row(1, 999999)[575] = bf16(3.0f);
  CHECK(static_cast<size>(kv.row(1, 999999) - kv.row(0, 0)) == size{1999999} * 576);
  CHECK(static_cast<float>(kv.row(1, 999998)[0]) == 0.0f);
  CHECK(reinterpret_cast<std::uintptr_t>(kv.row(0, 0)) % 64 == 0);
}

TEMPLATE_TEST_CASE("case 34: the gate halves at 0, opens at +30, closes at -30", "[mla]", Fp64, Fp32, Bf16) {
  using T = typename TestType::activation;
  MlaProblem problem(mla_geometry_of(3, 20, 12, 28, 40), 5, 2);
  const auto gated = [&](double gate) {
    problem.g.mla_use_output_gate = true;
    problem.gate.assign(problem.gate.size(), gate);
    return MlaInputs<TestType>(problem).decode_all(host{1}, 5);
  };
  problem.g.mla_use_output_gate = false;
  const auto open = MlaInputs<TestType>(problem).decode_all(host{1}, 5);
  std::vector<T> half = open;
  for (T& value : half) value = T(static_cast<float>(static_cast<double>(value) * 0.5));
  if constexpr (std::is_same_v<T, double>)
    for (size i = 0; i < half.size(); ++i) half[i] = open[i] * 0.5;
  check(same_bits(gated(0), half));
  // sigmoid(30) is 1 - 9e-14, which only a double can tell from 1.
  if (std::is_same_v<T, double>)
    check(compare(gated(30), open, 1e-13));
  else
    check(same_bits(gated(30), open));
  const auto closed = gated(-30);
  for (size i = 0; i < closed.size(); ++i)
    CHECK(std::abs(static_cast<double>(closed[i])) <= 1e-12 * std::abs(static_cast<double>(open[i])));
}

TEMPLATE_TEST_CASE("case 35: pages and spare capacity change no bit", "[mla]", Fp64, Fp32, Bf16) {
  using T = typename TestType::activation;
  const MlaConfig g = mla_geometry_of(3, 20, 12, 28, 40);
  for (const size length : {size{1}, size{63}, size{64}, size{65}, size{127}, size{128}, size{129}}) {
    CAPTURE(length);
    const MlaInputs<TestType> inputs(MlaProblem(g, length, 3));
    for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512}) {
      const auto want = inputs.decode_all(host{1, isa}, length);
      for (const size page : {size{64}, size{4}, size{48}}) {
        CAPTURE(page);
        ShuffledKv<T> kv(g, 2, length + 9, page, T(static_cast<float>(nan_value)));
        check(same_bits(inputs.decode_all(host{1, isa}, kv.view(), 1, length), want));
        check(same_bits(inputs.decode_all(host{1, isa}, length, length, page), want));
      }
      check(same_bits(inputs.decode_all(host{1, isa}, length, 1000), want));
    }
  }
}

TEMPLATE_TEST_CASE("cases 46 and 47: sequences in slots do not meet", "[mla]", Fp64, Fp32, Bf16) {
  using T = typename TestType::activation;
  const MlaConfig g = mla_geometry_of(3, 20, 12, 28, 40);
  const MlaInputs<TestType> a(MlaProblem(g, 20, 4)), b(MlaProblem(g, 20, 5));
  const auto alone_a = a.decode_all(host{1}, 1), alone_b = b.decode_all(host{1}, 1);
  for (const auto& [slot_a, slot_b] : {std::pair<id, id>{0, 1}, {3, 7}}) {
    MlaKv<T> kv(g, 8, 20, 8);
    std::vector<T> got_a, got_b;
    for (size t = 0; t < 20; ++t) {
      for (const T value : a.decode(host{1}, g, kv.view(), slot_a, t, 1)) got_a.push_back(value);
      for (const T value : b.decode(host{1}, g, kv.view(), slot_b, t, 1)) got_b.push_back(value);
    }
    check(same_bits(got_a, alone_a));
    check(same_bits(got_b, alone_b));
    kv.set_length(static_cast<size>(slot_a), 20);
    for (size t = 0; t < 20; ++t) std::fill_n(kv.row(static_cast<size>(slot_a), t), kv.width(), T(std::nanf("")));
    kv.reset(static_cast<size>(slot_a));
    CHECK(kv.length(static_cast<size>(slot_a)) == 0);
    check(same_bits(b.decode_all(host{1}, kv.view(), slot_a, 3), alone_b));
  }
}

namespace {

/// A batch of rows (sequence, token), -1 for padding whose inputs are NaN, and its output.
template <class P>
struct Batch {
  using T = typename P::activation;
  MlaConfig g;
  std::vector<T> q, kv_a, gate, out;
  std::vector<id> slots, positions;

  Batch(const MlaConfig& geometry, const std::vector<const MlaInputs<P>*>& sequences,
        const std::vector<std::pair<id, size>>& rows)
      : g(geometry), out(rows.size() * mla_v_width(g), T(7.0f)) {
    for (const auto& [sequence, token] : rows) {
      slots.push_back(sequence);
      positions.push_back(sequence < 0 ? -5 : static_cast<id>(token));
      const auto add = [&, s = sequence, t = token](std::vector<T>& to, const std::vector<T> MlaInputs<P>::* from,
                                                    size n) {
        const std::vector<T> row =
            s < 0 ? std::vector<T>(n, T(std::nanf(""))) : rows_of(sequences[static_cast<size>(s)]->*from, n, t, 1);
        to.insert(to.end(), row.begin(), row.end());
      };
      add(q, &MlaInputs<P>::q, mla_q_width(g));
      add(kv_a, &MlaInputs<P>::kv_a, mla_cache_width(g));
      add(gate, &MlaInputs<P>::gate, mla_v_width(g));
    }
  }
  void decode(const host& exec, const MlaInputs<P>& weights, MlaKv<T>& kv) {
    const size n = slots.size();
    MlaWorkspace<T> workspace(g, n + 2);
    mla_decode_token(exec, g, view(q, n, mla_q_width(g)), view(kv_a, n, mla_cache_width(g)), view(weights.norm),
                     view(weights.kv_b, mla_kv_b_rows(g), g.kv_lora_rank), view(gate, n, mla_v_width(g)), view(slots),
                     view(positions), kv.view(), workspace, view(out, n, mla_v_width(g)));
  }
};

}  // namespace

TEMPLATE_TEST_CASE("case 50: a batch gives the bits of its rows alone, padding touches nothing", "[mla]", Fp64, Fp32,
                   Bf16) {
  using T = typename TestType::activation;
  const MlaConfig g = mla_geometry_of(6, 20, 12, 28, 40);
  MlaInputs<TestType> a(MlaProblem(g, 90, 6)), b(MlaProblem(g, 70, 7));
  b.norm = a.norm;
  b.kv_b = a.kv_b;
  const size width = mla_v_width(g);
  for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512})
    for (const int threads : {1, 2, 3}) {
      const host exec{threads, isa};
      MlaKv<T> kv(g, 2, 90, 16), kv_a(g, 1, 90), kv_b(g, 1, 90);
      const auto want_a = a.decode_all(host{1, isa}, kv_a.view(), 0, 90);
      const auto want_b = b.decode_all(host{1, isa}, kv_b.view(), 0, 70);
      a.decode(exec, g, kv.view(), 0, 0, 85);
      b.decode(exec, g, kv.view(), 1, 0, 66);
      Batch<TestType> batch(g, {&a, &b}, {{-1, 0}, {0, 85}, {1, 66}, {0, 86}, {-1, 0}, {1, 67}, {1, 68}, {0, 87}});
      batch.decode(exec, a, kv);
      const auto row = [&](size r) { return rows_of(batch.out, width, r, 1); };
      const std::vector<T> zeros(width);
      for (const size pad : {size{0}, size{4}}) check(same_bits(row(pad), zeros));
      check(same_bits(row(1), rows_of(want_a, width, 85, 1)));
      check(same_bits(row(3), rows_of(want_a, width, 86, 1)));
      check(same_bits(row(7), rows_of(want_a, width, 87, 1)));
      check(same_bits(row(2), rows_of(want_b, width, 66, 1)));
      check(same_bits(row(5), rows_of(want_b, width, 67, 1)));
      check(same_bits(row(6), rows_of(want_b, width, 68, 1)));
      for (size t = 0; t < 90; ++t)
        for (size i = 0; i < kv.width(); ++i) {
          const bool written = t < 88, written_b = t < 69;
          REQUIRE(static_cast<double>(kv.row(0, t)[i]) == (written ? static_cast<double>(kv_a.row(0, t)[i]) : 0.0));
          REQUIRE(static_cast<double>(kv.row(1, t)[i]) == (written_b ? static_cast<double>(kv_b.row(0, t)[i]) : 0.0));
        }
      const MlaKv<T> before = kv;
      Batch<TestType> padding(g, {&a, &b}, {{-1, 0}, {-1, 0}});
      padding.decode(exec, a, kv);
      check(same_bits(padding.out, std::vector<T>(2 * width)));
      CHECK(std::memcmp(before.row(0, 0), static_cast<const MlaKv<T>&>(kv).row(0, 0), kv.bytes()) == 0);
    }
}

TEST_CASE("a copied cache goes its own way", "[mla]") {
  const MlaConfig g = mla_geometry_of(2, 8, 4, 8, 12);
  const MlaInputs<Fp32> inputs(MlaProblem(g, 20, 8));
  MlaKv<float> kv(g, 1, 600, 8);  // larger than the pieces in which a copy looks for what was written
  inputs.decode(host{1}, g, kv.view(), 0, 0, 15);
  kv.set_length(0, 15);
  MlaKv<float> copy = kv;
  CHECK(copy.length(0) == 15);
  CHECK(copy.capacity() == 600);
  CHECK(std::memcmp(copy.row(0, 0), kv.row(0, 0), kv.bytes()) == 0);
  const MlaKv<float> before = kv;
  check(
      same_bits(inputs.decode(host{1}, g, copy.view(), 0, 15, 5), rows_of(inputs.decode_all(host{1}, 20), 16, 15, 5)));
  CHECK(std::memcmp(before.row(0, 0), kv.row(0, 0), kv.bytes()) == 0);
  const MlaKv<float> moved = std::move(copy);
  CHECK(moved.length(0) == 15);
  // What was moved from is empty, and so are its copies.
  const MlaKv<float> of_nothing = copy;
  for (const MlaKv<float>* empty : {static_cast<const MlaKv<float>*>(&copy), &of_nothing}) {
    CHECK((empty->slots() == 0 && empty->capacity() == 0 && empty->bytes() == 0));
    CHECK(empty->view().pages.data == nullptr);
    CHECK_THROWS_AS(empty->row(0, 0), invalid_argument);
    CHECK_THROWS_AS(empty->length(0), invalid_argument);
  }
  CHECK_THROWS_AS(inputs.decode(host{1}, g, copy.view(), 0, 0, 1), invalid_argument);
  copy = moved;
  CHECK(std::memcmp(copy.row(0, 0), moved.row(0, 0), kv.bytes()) == 0);

  MlaWorkspace<float> workspace(g, 2);
  const MlaWorkspace<float> kept(std::move(workspace));
  CHECK((workspace.max_rows() == 0 && kept.max_rows() == 2));
  CHECK_THROWS_AS(workspace.check("test", g, 1), invalid_argument);
  CHECK_THROWS_AS(MlaWorkspace<float>(g, size{1} << 60), invalid_argument);
  MlaExpandedKv<float> expanded(g, 1);
  const MlaExpandedKv<float> taken(std::move(expanded));
  const std::vector<float> key(24), value(16);
  CHECK_THROWS_AS(expanded.append(view(key), view(value)), invalid_argument);
  CHECK(taken.capacity() == 1);
}

namespace {

/// Queries, keys, values and gates of several tokens, exact in bf16, and the attention on them.
struct ExpandedProblem {
  MlaConfig g;
  size tokens, first;
  std::vector<double> q, k, v, gate;

  ExpandedProblem(const MlaConfig& geometry, size token_count, size first_position, std::uint32_t seed)
      : g(geometry), tokens(token_count), first(first_position) {
    const auto numbers = [&](size count) {
      return converted<double>(converted<bf16>(random_normal(count, seed++, 1.0)));
    };
    q = numbers(tokens * mla_q_width(g));
    k = numbers(tokens * mla_q_width(g));
    v = numbers(tokens * mla_v_width(g));
    gate = numbers(tokens * mla_v_width(g));
  }

  /// Element i of a head's query or key, `row` beginning at the head and `t` its token, turned as a complex number.
  double turned(const double* row, size t, size i) const {
    const size nope = g.qk_nope_head_dim, rope = g.qk_rope_head_dim;
    if (g.mla_use_nope || i < nope) return row[i];
    const size pair = (i - nope) % (rope / 2);
    const double a = row[nope + pair], b = row[nope + pair + rope / 2];
    const double angle =
        static_cast<double>(first + t) * std::pow(1e4, -2 * static_cast<double>(pair) / static_cast<double>(rope));
    return i - nope < rope / 2 ? a * std::cos(angle) - b * std::sin(angle) : a * std::sin(angle) + b * std::cos(angle);
  }

  /// The output [tokens, heads * v], written from the formulas.
  std::vector<double> oracle() const {
    const size qk = g.qk_nope_head_dim + g.qk_rope_head_dim, dv = g.v_head_dim;
    std::vector<double> out(v.size());
    for (size t = 0; t < tokens; ++t)
      for (size h = 0; h < g.heads; ++h) {
        std::vector<double> weight(t + 1);
        double sum = 0;
        for (size s = 0; s <= t; ++s) {
          double dot = 0;
          for (size i = 0; i < qk; ++i)
            dot += turned(&q[(t * g.heads + h) * qk], t, i) * turned(&k[(s * g.heads + h) * qk], s, i);
          sum += weight[s] = std::exp(dot / std::sqrt(static_cast<double>(qk)));
        }
        for (size i = 0; i < dv; ++i) {
          const size at = (t * g.heads + h) * dv + i;
          for (size s = 0; s <= t; ++s) out[at] += weight[s] / sum * v[(s * g.heads + h) * dv + i];
          if (g.mla_use_output_gate) out[at] /= 1 + std::exp(-gate[at]);
        }
      }
    return out;
  }

  template <class T, class G>
  std::vector<T> attend(G geometry) const {
    const std::vector<T> qs = converted<T>(q), ks = converted<T>(k), vs = converted<T>(v), gates = converted<T>(gate);
    std::vector<T> out(v.size(), T(7.0f));
    const size q_width = mla_q_width(g), v_width = mla_v_width(g);
    View<const T, 2> gate_rows;
    if (g.mla_use_output_gate) gate_rows = view(gates, tokens, v_width);
    gated_mla_attend(host{1}, geometry, view(qs, tokens, q_width), view(ks, tokens, q_width), view(vs, tokens, v_width),
                     gate_rows, first, 1e4, view(out, tokens, v_width));
    return out;
  }
};

/// mla_geometry_of(3, 20, 12, 28, 40) with RoPE, at compile time.
struct RopeMla {
  static constexpr size heads = 3, qk_nope_head_dim = 20, qk_rope_head_dim = 12, v_head_dim = 28;
  static constexpr size q_lora_rank = 0, kv_lora_rank = 40;
  static constexpr bool mla_use_nope = false, mla_use_output_gate = true;
  static constexpr float norm_eps = 1e-6f;
};

}  // namespace

TEST_CASE("gated_mla_attend against plain loops in double, NoPE and RoPE", "[mla]") {
  for (MlaConfig g : {mla_geometry_of(3, 20, 12, 28, 40), mla_geometry_of(2, 8, 4, 6, 10, false),
                      mla_geometry_of(2, 128, 64, 128, 512)})
    for (const bool nope : {true, false})
      for (const size first : {size{0}, size{1000}}) {
        g.mla_use_nope = nope;
        const ExpandedProblem problem(g, 40, first, 11);
        const std::vector<double> want = problem.oracle();
        // An angle of a thousand radians is itself known to no more than 1e-13.
        const Comparison fp64 = compare(problem.attend<double>(g), want, nope || first == 0 ? 1.2e-15 : 3e-14, 0, true);
        const Comparison fp32 = compare(problem.attend<float>(g), want, 5e-7, 0, true);
        CAPTURE(g.heads, g.v_head_dim, nope, first, fp64.worst, fp32.worst);
        if (std::getenv("K3_TEST_VERBOSE")) WARN("double " << fp64.worst << ", float " << fp32.worst);
        check(fp64);
        check(fp32);
      }
}

TEMPLATE_TEST_CASE("gated_mla_attend gives the same bits with compile-time geometry", "[mla]", Fp64, Fp32, Bf16) {
  using T = typename TestType::activation;
  const ExpandedProblem problem(mla_config(RopeMla{}), 20, 5, 12);
  check(same_bits(problem.attend<T>(RopeMla{}), problem.attend<T>(problem.g)));
}
