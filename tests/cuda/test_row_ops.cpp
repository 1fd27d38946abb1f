// SPDX-License-Identifier: Apache-2.0
#include <k3/ops/argmax.hpp>
#include <k3/ops/attnres_softmax_mix.hpp>
#include <k3/ops/embed_tokens.hpp>
#include <k3/ops/rms_norm.hpp>

#include "cuda/device_test.hpp"
#include "cuda/random_numbers.hpp"
#include "cuda/row_ops_device.hpp"

using namespace k3;
using namespace k3::test;

namespace {

using sizes = std::initializer_list<size>;

std::vector<float> first_rows(const std::vector<float>& values, size from, size count, size columns) {
  return {values.begin() + static_cast<std::ptrdiff_t>(from * columns),
          values.begin() + static_cast<std::ptrdiff_t>((from + count) * columns)};
}

RowCall call_of(bool is_bf16, bool bf16_weight = true) {
  RowCall call;
  call.is_bf16 = is_bf16, call.bf16_weight = bf16_weight;
  return call;
}

MixCase mix_case(size stored, size rows, size hidden, bool is_bf16, bool bf16_weight = true) {
  MixCase c;
  c.stored = stored, c.rows = rows, c.hidden = hidden;
  c.snapshots = numbers(stored * rows * hidden, 1, is_bf16, 2.0), c.running = numbers(rows * hidden, 2, is_bf16);
  c.res_norm = numbers(hidden, 3, bf16_weight), c.res_proj = numbers(hidden, 4, bf16_weight, 0.1);
  c.norm = numbers(hidden, 5, bf16_weight);
  return c;
}

/// The rows of `c` from `from` on.
MixCase some_rows(const MixCase& c, size from, size rows) {
  MixCase part = c;
  part.rows = rows, part.running = first_rows(c.running, from, rows, c.hidden), part.snapshots.clear();
  for (size j = 0; j < c.stored; ++j)
    for (float value : first_rows(c.snapshots, j * c.rows + from, rows, c.hidden)) part.snapshots.push_back(value);
  return part;
}

struct MixWant {
  std::vector<double> out, mixed, probs;
};

/// The host's mixture and norm in double.
MixWant host_mix(const MixCase& c) {
  const auto snapshots = converted<double>(c.snapshots), running = converted<double>(c.running);
  const auto res_norm = converted<double>(c.res_norm), res_proj = converted<double>(c.res_proj),
             norm = converted<double>(c.norm);
  MixWant want{std::vector<double>(c.rows * c.hidden), std::vector<double>(c.rows * c.hidden),
               std::vector<double>(c.rows * (c.stored + 1))};
  const auto mixed = view(want.mixed, c.rows, c.hidden);
  attnres_mix(host{}, view(snapshots, c.stored, c.rows, c.hidden), view(running, c.rows, c.hidden), view(res_norm),
              view(res_proj), static_cast<double>(c.res_eps), c.mix, mixed, view(want.probs, c.rows, c.stored + 1));
  rms_norm(host{}, mixed, view(norm), static_cast<double>(c.norm_eps), view(want.out, c.rows, c.hidden));
  return want;
}

}  // namespace

TEST_CASE("the device's RMSNorm agrees with the host's") {
  for (const size count :
       all_or_few<size>({1, 7, 24, 96, 1000, 1024, 1025, 1536, 3584, 7168, 8200, 20001}, {7, 1032, 8201}))
    for (const bool is_bf16 : {true, false})
      for (const bool bf16_weight : {true, false}) {
        CAPTURE(count, is_bf16, bf16_weight);
        const size rows = 5;
        const auto x = numbers(rows * count, static_cast<unsigned>(count), is_bf16),
                   weight = numbers(count, 2, bf16_weight);
        const auto xd = converted<double>(x), wd = converted<double>(weight);
        std::vector<double> want(rows * count);
        rms_norm(host{}, view(xd, rows, count), view(wd), 1e-5, view(want, rows, count));
        const RowCall call = call_of(is_bf16, bf16_weight);
        const auto got = device_rms_norm(call, rows, count, x, weight, 1e-5f);
        check(compare(got, want, is_bf16 ? 1.0 / 256 : 1e-6, 1e-30));
        check(same_bits(device_rms_norm(call, rows, count, x, weight, 1e-5f, true), got));
        if (is_bf16) check(same_bits(device_rms_norm(call, rows, count, x, weight, 1e-5f, false, true), got));
        RowCall other = call;
        for (const size shift : all_or_few<size>({1, 8}, {8})) {
          other.shift = shift, other.gap = 8 - shift;
          check(same_bits(device_rms_norm(other, rows, count, x, weight, 1e-5f), got));
        }
        other = call, other.replays = 3;
        check(same_bits(device_rms_norm(other, rows, count, x, weight, 1e-5f, true), got));
        check(same_bits(device_rms_norm(call, 1, count, first_rows(x, 3, 1, count), weight, 1e-5f),
                        first_rows(got, 3, 1, count)));
      }
}

TEST_CASE("the device's AttnRes mixture and norm agree with the host's") {
  struct Shape {
    size stored, rows, hidden;
  };
  // The few: four blocks a row, two, one of several warps, one of one warp, and the kernel for many sources.
  for (const Shape s : all_or_few<Shape>({{0, 2, 8},
                                          {1, 3, 7},
                                          {3, 2, 96},
                                          {8, 2, 1024},
                                          {8, 3, 1025},
                                          {8, 2, 7168},
                                          {4, 2, 7164},
                                          {9, 2, 512},
                                          {12, 2, 3001},
                                          {2, 2, 9000}},
                                         {{8, 2, 1024}, {2, 40, 520}, {1, 140, 520}, {1, 3, 7}, {9, 2, 512}})) {
    for (const bool is_bf16 : {true, false})
      for (const bool bf16_weight : all_or_few<bool>({true, false}, {is_bf16}))
        for (const float mix : all_or_few<float>({1.0f, 0.25f, 0.0f}, {s.hidden == 7 ? 0.25f : 1.0f})) {
          CAPTURE(s.stored, s.rows, s.hidden, is_bf16, bf16_weight, mix);
          MixCase c = mix_case(s.stored, s.rows, s.hidden, is_bf16, bf16_weight);
          c.mix = mix;
          const MixWant want = host_mix(c);
          const RowCall call = call_of(is_bf16, bf16_weight);
          const MixResult got = device_attnres_norm(call, c);
          check(compare(got.probs, want.probs, 3e-5, 1e-30));
          check(compare(got.mixed, want.mixed, 2e-5, 0, true));
          check(compare(got.out, want.out, is_bf16 ? 1.0 / 200 : 2e-5, is_bf16 ? 1e-4 : 0, !is_bf16));
          if (mix == 0.0f || (s.stored == 0 && mix == 1.0f)) check(same_bits(got.mixed, c.running));
          RowCall other = call;
          other.shift = 1, other.gap = 3;
          const MixResult shifted = device_attnres_norm(other, c);
          check(same_bits(shifted.out, got.out));
          check(same_bits(shifted.probs, got.probs));
          c.only_out = true;
          check(same_bits(device_attnres_norm(call, c).out, got.out));
          c.before_product = true;
          check(same_bits(device_attnres_norm(call, c).out, got.out));
          other = call, other.replays = 3;
          check(same_bits(device_attnres_norm(other, c).out, got.out));
        }
  }
}

TEST_CASE("a row of the device's AttnRes mixture has the same bits in any batch") {
  // At 7168 a row has 4, 2 or 1 blocks, by the number of rows.
  for (const size hidden : {size{40}, size{2048}, size{7168}, size{8190}, size{10000}}) {
    if (small_only() && hidden > 100) continue;
    MixCase all = mix_case(8, 128, hidden, true);
    all.mix = hidden == 2048 ? 0.25f : 1.0f;
    const MixResult want = device_attnres_norm(call_of(true), all);
    for (const size rows : all_or_few<size>({1, 2, 7, 8, 9, 16, 17, 33, 34, 66, 67}, {9}))
      for (const size from : {size{0}, 128 - rows}) {
        CAPTURE(hidden, rows, from);
        const MixResult got = device_attnres_norm(call_of(true), some_rows(all, from, rows));
        check(same_bits(got.out, first_rows(want.out, from, rows, hidden)));
        check(same_bits(got.probs, first_rows(want.probs, from, rows, 9)));
        MixCase plain = some_rows(all, from, rows);
        plain.only_out = true;
        check(same_bits(device_attnres_norm(call_of(true), plain).out, got.out));
      }
  }
}

TEST_CASE("sampled rows of the released width: the device's mixtures of 1 to 10 sources agree with double") {
  const size hidden = small_only() ? 520 : 7168, rows = small_only() ? 3 : 70;
  for (const size stored : sizes{0, 1, 4, 8, 9}) {
    const MixCase all = mix_case(stored, rows, hidden, true);
    for (const size count : all_or_few<size>({1, 30, 70}, {3})) {
      const MixResult got = device_attnres_norm(call_of(true), some_rows(all, 0, count));
      for (const size row : {size{0}, count / 2, count - 1}) {
        CAPTURE(stored, count, row);
        const MixWant want = host_mix(some_rows(all, row, 1));
        check(compare(first_rows(got.mixed, row, 1, hidden), want.mixed, 2e-5, 0, true));
        check(compare(first_rows(got.out, row, 1, hidden), want.out, 1.0 / 200, 1e-4, false));
      }
    }
  }
}

TEST_CASE("NaN stays in its row of the device's norms") {
  const size hidden = 1200;
  MixCase c = mix_case(2, 3, hidden, true);
  const MixResult clean = device_attnres_norm(call_of(true), c);
  c.running[hidden + 5] = std::numeric_limits<float>::quiet_NaN();
  const MixResult got = device_attnres_norm(call_of(true), c);
  check(same_bits(first_rows(got.out, 0, 1, hidden), first_rows(clean.out, 0, 1, hidden)));
  check(same_bits(first_rows(got.out, 2, 1, hidden), first_rows(clean.out, 2, 1, hidden)));
  CHECK(std::isnan(got.out[hidden]));
}

TEST_CASE("the device's arg-max agrees with the host's") {
  for (const size count : all_or_few<size>({1, 2, 255, 4096, 4097, 50001, 163840}, {2, 4097}))
    for (const size rows : all_or_few<size>({1, 2, 9, 40}, {9})) {
      CAPTURE(count, rows);
      auto logits = numbers(rows * count, static_cast<unsigned>(count + rows), true, 3.0);  // bf16 values: many ties
      std::vector<id> want(rows);
      argmax(host{}, view(logits, rows, count), view(want));
      for (const size shift : {size{0}, size{1}}) {
        RowCall call;
        call.shift = shift, call.gap = 2 * shift;
        const IdsResult got = device_argmax(call, rows, count, logits);
        CHECK(got.ids == want);
        CHECK(got.status == std::vector<unsigned>(rows, 0));
      }
      RowCall call;
      call.replays = 3;
      CHECK(device_argmax(call, rows, count, logits).ids == want);
    }
}

TEST_CASE("the device's arg-max on ties, zeros, infinities and NaN") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits = {-0.0f, 0.0f, -1,   -2,    // -0 ties with 0: the lower index
                                     -inf,  -inf, -inf, -inf,  //
                                     -3,    -1,   -1,   -2,    //
                                     nan,   inf,  1,    -nan,  // no choice
                                     -inf,  1,    inf,  inf,   //
                                     -5,    -6,   -7,   -4};
  const IdsResult got = device_argmax(RowCall{}, 6, 4, logits);
  CHECK(got.ids == std::vector<id>{0, 0, 1, -1, 2, 3});
  CHECK(got.status == std::vector<unsigned>{0, 0, 0, static_cast<unsigned>(RowStatus::nan_logits), 0, 0});
  std::vector<float> wide(2 * 163840, 1.0f);
  for (size i = 0; i < 9; ++i) wide[163840 + 163839 - 20000 * i] = 2.0f;  // ties in several blocks: the first
  wide[163839] = nan;
  CHECK(device_argmax(RowCall{}, 2, 163840, wide).ids == std::vector<id>{-1, 3839});
}

TEST_CASE("the device's embedding copies rows and guards ids") {
  for (const size hidden : all_or_few<size>({1, 8, 24, 30, 7168}, {24, 30}))
    for (const bool is_bf16 : {true, false})
      for (const bool bf16_table : {true, false})
        for (const size shift : {size{0}, size{1}}) {
          CAPTURE(hidden, is_bf16, bf16_table, shift);
          const size vocab = 11;
          const auto table = numbers(vocab * hidden, 6, bf16_table);
          const std::vector<id> ids = {3, 10, -1, 0, 11, 3, 2147483647};
          RowCall call = call_of(is_bf16, bf16_table);
          call.shift = shift, call.gap = 2 * shift;
          for (const int replays : {0, 3}) {
            if (replays > 0 && small_only()) continue;
            call.replays = replays;
            const EmbedResult got = device_embed(call, ids, vocab, hidden, table);
            for (size r = 0; r < ids.size(); ++r) {
              const bool known = ids[r] >= 0 && ids[r] < 11;
              CHECK(got.status[r] == (known ? 0u : static_cast<unsigned>(RowStatus::bad_id)));
              auto want =
                  known ? first_rows(table, static_cast<size>(ids[r]), 1, hidden) : std::vector<float>(hidden, 0.0f);
              if (is_bf16) want = converted<float>(converted<bf16>(want));
              check(same_bits(first_rows(got.out, r, 1, hidden), want));
            }
          }
        }
}

TEST_CASE("row-wise operations take 65,536 rows and 70,000") {
  const size all = GENERATE(size{65536}, size{70000});
  const size rows = small_only() ? all / 350 : all, part = small_only() ? 50 : 1000, hidden = 24;
  const auto x = numbers(rows * hidden, 8, true), weight = numbers(hidden, 9, true);
  const auto normed = device_rms_norm(RowCall{}, rows, hidden, x, weight, 1e-5f);
  const auto ids = device_argmax(RowCall{}, rows, hidden, x).ids;
  const MixCase mix = mix_case(1, rows, hidden, true);
  const auto mixed = device_attnres_norm(RowCall{}, mix).out;
  std::vector<id> tokens(rows);
  for (size r = 0; r < rows; ++r) tokens[r] = static_cast<id>(r * 7 % 50);
  const auto table = numbers(50 * hidden, 10, true);
  const auto embedded = device_embed(RowCall{}, tokens, 50, hidden, table).out;
  for (size next = 0; next < rows; next += part) {
    const size from = detail::smaller(next, rows - part);  // the last block ends with the rows
    CAPTURE(rows, from);
    if (from % 10000 == 0 || from + part == rows) {
      check(same_bits(device_rms_norm(RowCall{}, part, hidden, first_rows(x, from, part, hidden), weight, 1e-5f),
                      first_rows(normed, from, part, hidden)));
      check(same_bits(device_attnres_norm(RowCall{}, some_rows(mix, from, part)).out,
                      first_rows(mixed, from, part, hidden)));
    }
    std::vector<id> want(part);
    const auto logits = first_rows(x, from, part, hidden);
    argmax(host{}, view(logits, part, hidden), view(want));
    CHECK(std::equal(want.begin(), want.end(), ids.begin() + static_cast<std::ptrdiff_t>(from)));
    for (const size row : {from + 3, from + part - 1})
      check(same_bits(first_rows(embedded, row, 1, hidden),
                      first_rows(table, static_cast<size>(tokens[row]), 1, hidden)));
  }
}

TEST_CASE("row-wise operations of no rows, or rows of no elements, launch nothing and leave no error") {
  const size hidden = 24;
  const auto weight = numbers(hidden, 9, true), table = numbers(50 * hidden, 10, true);
  CHECK(device_rms_norm(RowCall{}, 0, hidden, {}, weight, 1e-5f).empty());
  CHECK(device_rms_norm(RowCall{}, 3, 0, {}, {}, 1e-5f).empty());
  CHECK(device_argmax(RowCall{}, 0, hidden, {}).ids.empty());
  CHECK(device_embed(RowCall{}, {}, 50, hidden, table).out.empty());
  CHECK(device_embed(RowCall{}, {1, 2, 99}, 50, 0, {}).out.empty());
  CHECK(device_attnres_norm(RowCall{}, mix_case(1, 0, hidden, true)).out.empty());
  const EmbedResult no_words = device_embed(RowCall{}, {0, 7}, 0, hidden, {});  // every id is a wrong one
  check(same_bits(no_words.out, std::vector<float>(2 * hidden)));
  CHECK(no_words.status == std::vector<unsigned>(2, static_cast<unsigned>(RowStatus::bad_id)));
  CHECK(device_empty_launches() == std::vector<size>{0, 0, 0, 0, 0, 0, 0, 1});  // the last has a row
}

TEST_CASE("the device's row-wise operations refuse what does not fit") {
  const std::vector<std::string> want = {"rms_norm/weight",
                                         "rms_norm/out",
                                         "rms_norm/weight",  // F64
                                         "rms_norm/weight",  // absent
                                         "rms_norm/eps",
                                         "rms_norm/eps",
                                         "rms_norm/eps",
                                         "rms_norm/out",  // null
                                         "rms_norm/x",
                                         "embed_tokens/table",
                                         "embed_tokens/table",
                                         "embed_tokens/table",
                                         "embed_tokens/table",
                                         "embed_tokens/out",
                                         "embed_tokens/slots",
                                         "embed_tokens/status",
                                         "argmax/workspace.max_rows",
                                         "argmax/the number of logits",
                                         "argmax/ids",
                                         "argmax/status",
                                         "argmax/logits",
                                         "attnres_norm/res_norm",
                                         "attnres_norm/res_proj",
                                         "attnres_norm/norm",
                                         "attnres_norm/res_eps",
                                         "attnres_norm/norm_eps",
                                         "attnres_norm/res_eps",
                                         "attnres_norm/norm_eps",
                                         "attnres_norm/res_eps",
                                         "attnres_norm/norm_eps",
                                         "attnres_norm/mix",
                                         "attnres_norm/mix",
                                         "attnres_norm/mix",
                                         "attnres_norm/snapshots",
                                         "attnres_norm/out",
                                         "attnres_norm/mixed",
                                         "attnres_norm/probs",
                                         "attnres_norm/the number of snapshots",
                                         "attnres_norm/running's width",
                                         "sigmoid_topk/the number of experts",
                                         "sigmoid_topk/bias",
                                         "sigmoid_topk/k",
                                         "sigmoid_topk/k",
                                         "sigmoid_topk/scale",
                                         "sigmoid_topk/scale",
                                         "sigmoid_topk/scale",
                                         "sigmoid_topk/ids",
                                         "sigmoid_topk/weights",
                                         "sigmoid_topk/slots",
                                         "sigmoid_topk/status",
                                         "sigmoid_topk/bias"};
  CHECK(device_row_refusals() == want);
}

TEST_CASE("the device's row-wise operations refuse operands that share memory, but for those that may") {
  const std::vector<std::string> want = {"accepted",  // in place
                                         "accepted",  // columns beside each other
                                         "rms_norm: out overlapping x",
                                         "rms_norm: out overlapping weight",
                                         "rms_norm: out overlapping x",
                                         "accepted",
                                         "attnres_norm: out overlapping snapshots",
                                         "attnres_norm: out overlapping running",
                                         "attnres_norm: out overlapping snapshots",
                                         "attnres_norm: out overlapping res_norm",
                                         "attnres_norm: out overlapping res_proj",
                                         "attnres_norm: out overlapping norm",
                                         "attnres_norm: mixed overlapping running",
                                         "attnres_norm: mixed overlapping out",
                                         "attnres_norm: probs overlapping snapshots",
                                         "attnres_norm: probs overlapping mixed",
                                         "accepted",
                                         "argmax: ids overlapping logits",
                                         "argmax: status overlapping logits",
                                         "argmax: status overlapping ids",
                                         "accepted",
                                         "embed_tokens: out overlapping ids",
                                         "embed_tokens: out overlapping slots",
                                         "embed_tokens: out overlapping table",
                                         "embed_tokens: status overlapping out",
                                         "accepted",
                                         "sigmoid_topk: ids overlapping logits",
                                         "sigmoid_topk: ids overlapping bias",
                                         "sigmoid_topk: ids overlapping slots",
                                         "sigmoid_topk: ids overlapping weights",
                                         "sigmoid_topk: weights overlapping logits",
                                         "sigmoid_topk: status overlapping slots"};
  CHECK(device_row_overlaps() == want);
}
