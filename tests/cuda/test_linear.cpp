// SPDX-License-Identifier: Apache-2.0
#include <k3/ops/dense_mlp.hpp>

#include "cuda/device_test.hpp"
#include "cuda/linear_device.hpp"
#include "cuda/random_numbers.hpp"
#include "support/differences.hpp"

using namespace k3;
using namespace k3::test;

namespace {

using sizes = std::initializer_list<size>;

ProductCase make_case(size tokens, size columns, bool bf16_x = true) {
  ProductCase c;
  c.tokens = tokens, c.columns = columns, c.bf16_x = bf16_x;
  c.x = numbers(tokens * columns, static_cast<unsigned>(tokens + 31 * columns), bf16_x);
  return c;
}

ProductMatrix make_matrix(size rows, size columns, bool bf16_weight = true, bool bf16_out = true, bool gated = false) {
  ProductMatrix m;
  const double scale = 1 / std::sqrt(static_cast<double>(columns + 1));
  m.rows = rows, m.bf16_weight = bf16_weight, m.bf16_out = bf16_out;
  m.weight = numbers(rows * columns, static_cast<unsigned>(7 + rows), bf16_weight, scale);
  if (gated) m.up = numbers(rows * columns, static_cast<unsigned>(9 + rows), bf16_weight, scale);
  return m;
}

/// out = x W^T in double, by loops of its own.
std::vector<double> product(const std::vector<float>& x, const std::vector<float>& weight, size tokens, size rows,
                            size columns) {
  std::vector<double> out(tokens * rows);
  for (size t = 0; t < tokens; ++t)
    for (size n = 0; n < rows; ++n)
      for (size k = 0; k < columns; ++k)
        out[t * rows + n] += static_cast<double>(x[t * columns + k]) * static_cast<double>(weight[n * columns + k]);
  return out;
}

std::vector<float> first_rows(const std::vector<float>& values, size from, size count, size columns) {
  return {values.begin() + static_cast<std::ptrdiff_t>(from * columns),
          values.begin() + static_cast<std::ptrdiff_t>((from + count) * columns)};
}

float rounded(float value, bool is_bf16) { return is_bf16 ? static_cast<float>(bf16(value)) : value; }

struct Shape {
  size tokens, rows, columns;
};

}  // namespace

TEST_CASE("the device's product agrees with double") {
  for (const Shape s :
       {Shape{1, 1, 1}, Shape{1, 16, 32}, Shape{3, 7, 5}, Shape{9, 33, 96}, Shape{33, 17, 1000}, Shape{2, 100, 1024},
        Shape{13, 48, 1032}, Shape{40, 65, 2056}, Shape{5, 31, 3583}, Shape{130, 19, 1537}})
    for (const bool bf16_x : {true, false})
      for (const bool bf16_weight : {true, false}) {
        CAPTURE(s.tokens, s.rows, s.columns, bf16_x, bf16_weight);
        const ProductCase c = make_case(s.tokens, s.columns, bf16_x);
        const ProductMatrix m = make_matrix(s.rows, s.columns, bf16_weight, false);
        const auto want = product(c.x, m.weight, s.tokens, s.rows, s.columns);
        check(compare(device_linear(c, m), want, bf16_x && bf16_weight ? 1e-5 : 2e-6, 0, true));
      }
}

TEST_CASE("the device's product at released shapes agrees with the host's") {
  const std::vector<Shape> released{{4, 576, 7168}, {33, 96, 7168}, {2, 128, 12288}, {2, 300, 3584}, {9, 256, 33792}};
  for (const Shape s : small_only() ? std::vector<Shape>{{4, 65, 1536}} : released) {
    CAPTURE(s.tokens, s.rows, s.columns);
    const ProductCase c = make_case(s.tokens, s.columns);
    const ProductMatrix m = make_matrix(s.rows, s.columns);
    const auto x = converted<bf16>(c.x), weight = converted<bf16>(m.weight);
    std::vector<bf16> host_out(s.tokens * s.rows);
    linear(host{}, view(x, s.tokens, s.columns), view(weight, s.rows, s.columns), view(host_out, s.tokens, s.rows));
    const auto got = device_linear(c, m);
    CHECK(relative_l2(got, host_out, 1) <= 1e-3);
    check(compare(got, host_out, 1.0 / 128, 1e-4));  // one unit in the last place of bf16, at most
  }
}

namespace {

/// The product of all 128 rows must be what any part of them gives, at any place in memory, directly and replayed.
void check_bits(size columns, bool bf16_x) {
  CAPTURE(columns, bf16_x);
  const size rows = 45;
  const ProductMatrix m = make_matrix(rows, columns, true, false);
  const ProductCase all = make_case(128, columns, bf16_x);
  const auto want = device_linear(all, m);
  for (const size tokens : sizes{1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 127})
    for (const size from : {size{0}, 128 - tokens}) {
      CAPTURE(tokens, from);
      ProductCase c = all;
      c.tokens = tokens, c.x = first_rows(all.x, from, tokens, columns);
      check(same_bits(device_linear(c, m), first_rows(want, from, tokens, rows)));
    }
  for (const size shift : {size{1}, size{8}})
    for (const size gap : {size{0}, size{3}, size{8}}) {
      CAPTURE(shift, gap);
      ProductCase c = all;
      c.shift = shift, c.gap = gap;
      check(same_bits(device_linear(c, m), want));
    }
  check(same_bits(device_linear(all, m), want));
  ProductCase replayed = all;
  replayed.replays = 3;
  check(same_bits(device_linear(replayed, m), want));
}

}  // namespace

TEST_CASE("a row of the device's product has the same bits in any batch, alone and shifted") {
  for (const size columns : sizes{96, 1000, 1024, 1056, 2312, 3584})
    for (const bool bf16_x : {true, false})
      if (!small_only() || columns <= 1056) check_bits(columns, bf16_x);
}

TEST_CASE("a row of the device's product has the same bits however the rows of the weight are shared out") {
  // Many rows: blocks that go through theirs in several passes, of one or three steps, and do not split K; then few of
  // them, alone.
  const std::vector<Shape> many{{128, 30000, 136}, {128, 8333, 1032}, {128, 160000, 40}};
  for (const Shape s : small_only() ? std::vector<Shape>{{128, 240, 72}} : many) {
    CAPTURE(s.rows, s.columns);
    const ProductMatrix m = make_matrix(s.rows, s.columns, true, false);
    const ProductCase all = make_case(s.tokens, s.columns);
    const auto want = device_linear(all, m);
    for (const size tokens : sizes{1, 9, 32, 33, 65}) {
      CAPTURE(tokens);
      ProductCase c = all;
      c.tokens = tokens, c.x = first_rows(all.x, 0, tokens, s.columns);
      check(same_bits(device_linear(c, m), first_rows(want, 0, tokens, s.rows)));
    }
    const size first = s.rows - 200, count = 200;
    ProductMatrix few = m;
    few.rows = count, few.weight = first_rows(m.weight, first, count, s.columns);
    const auto alone = device_linear(all, few);
    for (size t = 0; t < s.tokens; ++t)
      check(same_bits(first_rows(alone, t, 1, count),
                      std::vector<float>(want.begin() + static_cast<std::ptrdiff_t>(t * s.rows + first),
                                         want.begin() + static_cast<std::ptrdiff_t>((t + 1) * s.rows))));
    // 300 rows of x: in groups
    ProductCase more = make_case(300, s.columns);
    std::copy(all.x.begin(), all.x.end(), more.x.begin() + static_cast<std::ptrdiff_t>(150 * s.columns));
    const auto grouped = device_linear(more, few);
    check(same_bits(first_rows(grouped, 150, 128, count), alone));
  }
}

TEST_CASE("many rows of x give the bits of few, whatever becomes of the products") {
  // Blocks with 7, 9 and 12 units of 16 rows, and with several passes; K of one piece and of four.
  const std::vector<Shape> shapes{{100, 13000, 72},  {128, 13003, 1032}, {128, 18000, 72},
                                  {77, 24000, 1032}, {300, 26000, 72},   {128, 40000, 72}};
  for (const Shape s : small_only() ? std::vector<Shape>{{100, 40, 72}, {300, 2200, 72}} : shapes) {
    CAPTURE(s.tokens, s.rows, s.columns);
    const ProductCase all = make_case(s.tokens, s.columns);
    ProductCase few = all;
    few.tokens = 40, few.x = first_rows(all.x, 0, 40, s.columns);
    const size half = s.rows / 32 * 8;
    for (const bool silu : {true, false}) {
      std::vector<ProductMatrix> list = {make_matrix(half, s.columns, true, true, true),
                                         make_matrix(s.rows / 4, s.columns, true, false),
                                         make_matrix(s.rows / 4, s.columns)};
      if (silu) list[0].glu = GluConfig::silu();
      const auto want = device_projections(few, list), got = device_projections(all, list);
      for (size i = 0; i < list.size(); ++i) check(same_bits(first_rows(got[i], 0, 40, list[i].rows), want[i]));
    }
    const ProductMatrix m = make_matrix(s.rows, s.columns);
    check(same_bits(first_rows(device_linear(all, m), 0, 40, s.rows), device_linear(few, m)));
    const auto stream = numbers(s.tokens * s.rows, 3, true), other = numbers(s.tokens * s.rows, 4, true);
    const AddResult want = device_linear_add(few, m, first_rows(stream, 0, 40, s.rows),
                                             first_rows(other, 0, 40, s.rows), false),
                    got = device_linear_add(all, m, stream, other, false);
    check(same_bits(first_rows(got.stream, 0, 40, s.rows), want.stream));
    check(same_bits(first_rows(got.part, 0, 40, s.rows), want.part));
    check(same_bits(got.snapshot, stream));
  }
}

TEST_CASE("a head's product has the same bits in any batch, and agrees with double") {
  if (small_only()) return;
  const size rows = 65551, columns = 1032;
  const ProductMatrix m = make_matrix(rows, columns, true, false);
  const ProductCase all = make_case(128, columns);
  const auto want = device_linear(all, m);
  for (const size tokens : sizes{1, 9, 33, 64, 65})
    for (const size shift : {size{0}, size{1}}) {
      if (shift != 0 && tokens != 9) continue;
      CAPTURE(tokens, shift);
      ProductCase c = all;
      c.tokens = tokens, c.shift = shift, c.x = first_rows(all.x, 0, tokens, columns);
      check(same_bits(device_linear(c, m), first_rows(want, 0, tokens, rows)));
    }
  for (size row = 5; row < rows; row += rows / 7)
    for (size t = 0; t < 128; t += 9) {
      const auto exact =
          product(first_rows(all.x, t, 1, columns), first_rows(m.weight, row, 1, columns), 1, 1, columns);
      CAPTURE(row, t, want[t * rows + row], exact[0]);
      CHECK(std::abs(static_cast<double>(want[t * rows + row]) - exact[0]) <= 2e-5);
    }
}

TEST_CASE("the device's product of released shapes agrees with double on sampled rows") {
  const std::vector<Shape> released{{128, 896, 7168}, {32, 2112, 7168}, {33, 7168, 1536}};
  for (const Shape s : small_only() ? std::vector<Shape>{{33, 70, 1536}} : released)
    for (const size tokens : {size{1}, s.tokens}) {
      CAPTURE(tokens, s.rows, s.columns);
      const ProductCase c = make_case(tokens, s.columns);
      const ProductMatrix m = make_matrix(s.rows, s.columns, true, false);
      const auto out = device_linear(c, m);
      for (size row = 5; row < s.rows; row += s.rows / 7)
        for (size t = 0; t < tokens; t += 9) {
          const auto want =
              product(first_rows(c.x, t, 1, s.columns), first_rows(m.weight, row, 1, s.columns), 1, 1, s.columns);
          CAPTURE(row, t, out[t * s.rows + row], want[0]);
          CHECK(std::abs(static_cast<double>(out[t * s.rows + row]) - want[0]) <= 2e-5);
        }
    }
}

TEST_CASE("projections in one launch have the bits of separate ones") {
  for (const size columns : {size{64}, size{1096}})
    for (const size tokens : {size{1}, size{8}, size{19}, size{70}})
      for (const bool bf16_x : {true, false}) {
        CAPTURE(columns, tokens, bf16_x);
        const ProductCase c = make_case(tokens, columns, bf16_x);
        const std::vector<ProductMatrix> matrices = {
            make_matrix(33, columns, true, bf16_x), make_matrix(1, columns, true, bf16_x),
            make_matrix(50, columns, true, false),  make_matrix(21, columns, true, bf16_x, true),
            make_matrix(20, columns, false, false), make_matrix(0, columns),
            make_matrix(17, columns, true, bf16_x)};
        const auto together = device_projections(c, matrices);
        for (size i = 0; i < matrices.size(); ++i) {
          CAPTURE(i);
          check(same_bits(together[i], device_projections(c, {matrices[i]})[0]));
          if (matrices[i].up.empty()) check(same_bits(together[i], device_linear(c, matrices[i])));
        }
      }
}

TEST_CASE("a gated projection is the activation of two rounded products") {
  for (const GluConfig glu : {GluConfig{}, GluConfig{GluConfig::Kind::situ, 4.0f, std::nullopt}, GluConfig::silu()})
    for (const size tokens : {size{1}, size{12}})
      for (const bool bf16_x : {true, false}) {
        const size columns = 1040, rows = 37;
        CAPTURE(tokens, bf16_x, static_cast<int>(glu.kind));
        const ProductCase c = make_case(tokens, columns, bf16_x);
        ProductMatrix m = make_matrix(rows, columns, true, bf16_x, true), up = m;
        m.glu = glu;
        up.weight = m.up, up.up.clear();
        ProductMatrix gate = m;
        gate.up.clear();
        const auto g = device_linear(c, gate), u = device_linear(c, up);
        std::vector<float> want(tokens * rows);
        situ_glu_vec(host{}, glu, view(g, tokens, rows), view(u, tokens, rows), view(want, tokens, rows));
        check(compare(device_projections(c, {m})[0], want, bf16_x ? 1.0 / 256 : 2e-6, 1e-30));
      }
}

TEST_CASE("linear_add rounds where separate additions do") {
  for (const bool bf16_x : {true, false})
    for (const bool replace : {true, false})
      for (const bool with_other : {true, false})
        for (const Shape s : {Shape{1, 40, 96}, Shape{9, 19, 1056}}) {
          CAPTURE(bf16_x, replace, with_other, s.tokens);
          ProductCase c = make_case(s.tokens, s.columns, bf16_x);
          const ProductMatrix m = make_matrix(s.rows, s.columns, true, bf16_x);
          const auto stream = numbers(s.tokens * s.rows, 3, bf16_x);
          const auto other = with_other ? numbers(s.tokens * s.rows, 4, bf16_x) : std::vector<float>{};
          auto part = device_linear(c, m);
          std::vector<float> want = part;
          for (size i = 0; i < part.size(); ++i) {
            if (with_other) part[i] = rounded(part[i] + other[i], bf16_x);
            want[i] = replace ? part[i] : rounded(stream[i] + part[i], bf16_x);
          }
          for (const int replays : {0, 3}) {
            c.replays = replays;
            const AddResult got = device_linear_add(c, m, stream, other, replace);
            check(same_bits(got.part, part));
            check(same_bits(got.stream, want));
            check(same_bits(got.snapshot, stream));
          }
        }
}

TEST_CASE("the device's gated MLP agrees with the host's") {
  for (const Shape s : {Shape{1, 8, 16}, Shape{5, 70, 33}, Shape{11, 40, 1100}})
    for (const bool bf16_x : {true, false}) {
      CAPTURE(s.tokens, s.rows, s.columns, bf16_x);
      const ProductCase c = make_case(s.tokens, s.columns, bf16_x);
      const ProductMatrix gated = make_matrix(s.rows, s.columns, true, bf16_x, true),
                          down = make_matrix(s.columns, s.rows);
      const auto got = device_dense_mlp(c, gated, down);
      const auto host_mlp = [&](auto precision, auto zero) {
        using P = decltype(precision);
        using T = typename P::activation;
        const auto x = converted<T>(c.x);
        const auto g = converted<bf16>(gated.weight), u = converted<bf16>(gated.up), d = converted<bf16>(down.weight);
        std::vector<T> out(s.tokens * s.columns, zero);
        MlpWorkspace<P> workspace(s.rows, s.tokens);
        dense_mlp(host{}, gated.glu, view(x, s.tokens, s.columns), view(g, s.rows, s.columns),
                  view(u, s.rows, s.columns), view(d, s.columns, s.rows), workspace, view(out, s.tokens, s.columns));
        return converted<double>(out);
      };
      if (bf16_x)
        CHECK(relative_l2(got, host_mlp(Bf16{}, bf16(0.0f)), 1) <= 1e-3);
      else
        check(compare(got, host_mlp(Fp64{}, 0.0), 5e-6, 0, true));
    }
}

TEST_CASE("device cases 40, 41, 42: the caps keep 1e-37, saturate, and let NaN through") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> gates = {3, 3, 1000, 0, 3, 3, -3, 3, 3, 3, 3, inf, -1000, -inf, nan, 1e-37f, -1e-37f, 3},
                           ups = {50,  1,    1000, 50, 1e-37f, -1e-37f, 1e-37f, 2000, -2000,
                                  inf, -inf, 50,   50, 50,     50,      50,     50,   nan};
  const size rows = gates.size();
  // Widths that tensor cores cannot read, of one piece and of several.
  for (const size columns : {size{1}, size{72}, size{1056}})
    for (const bool bf16_x : {true, false})
      for (const size tokens : {size{1}, size{33}}) {
        CAPTURE(columns, bf16_x, tokens);
        // The first column of the weights, for every token.
        ProductCase c = make_case(tokens, columns, bf16_x);
        ProductMatrix m = make_matrix(rows, columns, true, bf16_x, true);
        std::vector<double> g(rows), u(rows), want(rows), all;
        for (size r = 0; r < rows; ++r)
          for (size k = 0; k < columns; ++k) {
            m.weight[r * columns + k] = k == 0 ? rounded(gates[r], true) : 0.0f;
            m.up[r * columns + k] = k == 0 ? rounded(ups[r], true) : 0.0f;
          }
        for (size i = 0; i < c.x.size(); ++i) c.x[i] = i % columns == 0 ? 1.0f : 0.0f;
        for (size r = 0; r < rows; ++r)
          g[r] = static_cast<double>(m.weight[r * columns]), u[r] = static_cast<double>(m.up[r * columns]);
        situ_glu_vec(host{}, m.glu, view(g, 1, rows), view(u, 1, rows), view(want, 1, rows));
        check(compare(std::vector<double>(want.begin(), want.begin() + 4),
                      std::vector<double>{58.3262193, 2.4188159, 100, 0}, 1e-7));
        for (size t = 0; t < tokens; ++t) all.insert(all.end(), want.begin(), want.end());
        check(compare(device_projections(c, {m})[0], all, bf16_x ? 1.0 / 200 : 1e-5, 1e-39));
      }
}

TEST_CASE("device case 74: pointers off by an element and gaps between rows change no bit of fused products") {
  for (const size columns : {size{96}, size{1056}})
    for (const bool bf16_x : {true, false}) {
      ProductCase c = make_case(9, columns, bf16_x);
      const ProductMatrix gated = make_matrix(40, columns, true, bf16_x, true), down = make_matrix(columns, 40),
                          last = make_matrix(19, columns, true, bf16_x);
      const auto stream = numbers(9 * 19, 3, bf16_x), other = numbers(9 * 19, 4, bf16_x);
      const auto products = device_projections(c, {gated, last});
      const AddResult added = device_linear_add(c, last, stream, other, false);
      const auto mlp = device_dense_mlp(c, gated, down);
      struct Place {
        size shift, gap;
        int replays;
      };
      for (const Place p : {Place{1, 0, 0}, Place{0, 1, 0}, Place{3, 5, 0}, Place{8, 8, 0}, Place{0, 0, 3}}) {
        CAPTURE(columns, bf16_x, p.shift, p.gap, p.replays);
        c.shift = p.shift, c.gap = p.gap, c.replays = p.replays;
        const auto moved = device_projections(c, {gated, last});
        for (size i = 0; i < 2; ++i) check(same_bits(moved[i], products[i]));
        const AddResult again = device_linear_add(c, last, stream, other, false);
        check(same_bits(again.stream, added.stream));
        check(same_bits(again.part, added.part));
        check(same_bits(again.snapshot, stream));
        check(same_bits(device_dense_mlp(c, gated, down), mlp));
      }
    }
}

TEST_CASE("NaN and infinity stay in their row of the device's product") {
  for (const size columns : {size{72}, size{1048}})
    for (const size tokens : {size{3}, size{20}}) {
      const ProductCase c = make_case(tokens, columns);
      const ProductMatrix m = make_matrix(18, columns);
      auto want = device_linear(c, m);
      ProductCase bad = c;
      bad.x[columns + 3] = std::numeric_limits<float>::quiet_NaN();
      bad.x[2 * columns + columns - 1] = std::numeric_limits<float>::infinity();
      const auto got = device_linear(bad, m);
      for (size n = 0; n < 18; ++n) {
        CHECK(std::isnan(got[18 + n]));
        CHECK(std::isinf(got[36 + n]));
        want[18 + n] = got[18 + n], want[36 + n] = got[36 + n];
      }
      check(same_bits(got, want));
    }
}

TEST_CASE("empty products on the device") {
  CHECK(device_linear(make_case(0, 8), make_matrix(3, 8)).empty());
  CHECK(device_linear(make_case(3, 8), make_matrix(0, 8)).empty());
  CHECK(device_linear(make_case(2, 0), make_matrix(3, 0)) == std::vector<float>(6, 0.0f));
  CHECK(device_projections(make_case(2, 8), {}).empty());
}

TEST_CASE("70,000 rows of x") {
  const size tokens = small_only() ? 700 : 70000, columns = 40;
  const ProductMatrix m = make_matrix(9, columns);
  const ProductCase all = make_case(tokens, columns);
  const auto got = device_linear(all, m);
  const size block = tokens / 70;
  for (size from = 0; from < tokens; from += 14 * block) {
    ProductCase c = all;
    c.tokens = block, c.x = first_rows(all.x, from, block, columns);
    check(same_bits(first_rows(got, from, block, 9), device_linear(c, m)));
  }
}

TEST_CASE("the device's products refuse what does not fit") {
  const std::vector<std::string> want = {
      "linear/weight",       "linear/out's rows", "linear/weight",         "linear/out",
      "linear/weight",       "linear_add/other",  "gated_projection/beta", "dense_mlp/workspace.max_rows",
      "dense_mlp/down_proj", "linear/out",        "projections/out",       "projections/out",
      "linear_add/stream",   "linear_add/part",   "linear_add/snapshot",   "dense_mlp/out",
      "dense_mlp/out",       "dense_mlp/part",    "dense_mlp/part",        "dense_mlp/snapshot"};
  CHECK(device_linear_refusals() == want);
}
