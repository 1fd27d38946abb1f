// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "cuda/moe_device.hpp"
#include "cuda/moe_problem.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// Code `number` of the 16 in two packed words.
unsigned code_of_two_words(const unsigned char* at, size number) {
  const auto word = [&](size i) {
    return unsigned{at[i]} | unsigned{at[i + 1]} << 8 | unsigned{at[i + 2]} << 16 | unsigned{at[i + 3]} << 24;
  };
  const auto turned = [](unsigned w, unsigned bits) { return w << bits | w >> (32 - bits); };
  const unsigned x = word(0), y = word(4), z = turned(y, 6);
  const unsigned mixed = (x >> 8 & 0xff) | (z & 0xff) << 8 | x >> 24 << 16 | (z >> 16 & 0xff) << 24;
  // each with the pair of codes i and i + 4 of the first word, then of the second, where bf16 has them
  const unsigned pairs[8] = {x << 2, x << 6, turned(x, 12), x ^ z, y, y << 4, turned(y, 10), mixed};
  const unsigned half = pairs[number / 8 * 4 + number % 4] >> number % 8 / 4 * 16;
  return (half >> 12 & 8) | (half >> 6 & 7);
}

}  // namespace

TEST_CASE("Repacking experts is lossless and puts every bit where the layout says", "[cuda][moe]") {
  const LatentMoeConfig g = geometry(512, 1024, 1, 1);
  ExpertBytes expert = random_experts(g, ElementType::mxfp4, 61)[0];
  // every code at every place of a word, and every scale
  for (size i = 0; i < 16 * 4; ++i) expert.data[0][i] = static_cast<unsigned char>(i / 4 * 0x11);
  for (size i = 0; i < 256; ++i) expert.scale[0][i] = static_cast<unsigned char>(i);
  const auto got = repack_on_device(g, expert);
  for (size m = 0; m < 3; ++m) {
    CHECK(got.restored.data[m] == expert.data[m]);
    CHECK(got.restored.scale[m] == expert.scale[m]);
    const size columns = m == 2 ? 1024 : 512, rows = m == 2 ? 512 : 1024;
    size wrong = 0;
    for (size row = 0; row < rows; ++row)
      for (size k = 0; k < columns; ++k) {
        const size piece = row / 8 * (columns / 512) + k / 512, lane = row % 8 * 4 + k / 32 % 4, step = k / 128 % 4;
        const unsigned char* const at = &got.packed.data[m][piece * 2048 + step * 512 + lane * 16 + k % 32 / 16 * 8];
        wrong += code_of_two_words(at, k % 16) != (expert.data[m][(row * columns + k) / 2] >> k % 2 * 4 & 15u);
        wrong += got.packed.scale[m][piece * 128 + lane * 4 + step] != expert.scale[m][(row * columns + k) / 32];
      }
    CHECK(wrong == 0);
  }
  CHECK(repack_on_device(g, expert, 4).packed.data[0].empty());
  const LatentMoeConfig narrow = geometry(256, 512, 1, 1);
  CHECK(repack_on_device(narrow, random_experts(narrow, ElementType::mxfp4, 62)[0]).packed.data[0].empty());
}

TEST_CASE("Repacking experts gives every pair of words back", "[cuda][moe]") {
  // Both ways only shift, mask, join and add modulo 2: they are linear over GF(2), so that what holds for zero and each
  // of the 64 bits alone holds for all 2^64 values. Ors that join bits of both sides would not be: hence all values of
  // each 16 bits, the other 48 being zero, and random ones.
  const LatentMoeConfig g = geometry(2048, 2048, 1, 1);
  ExpertBytes expert = random_experts(g, ElementType::mxfp4, 63)[0];
  REQUIRE(expert.data[0].size() == 4 * 65536 * 8);
  for (size quarter = 0; quarter < 4; ++quarter)
    for (size value = 0; value < 65536; ++value) {
      unsigned char* const pair = &expert.data[0][(quarter * 65536 + value) * 8];
      std::fill_n(pair, 8, static_cast<unsigned char>(0));
      pair[2 * quarter] = static_cast<unsigned char>(value),
               pair[2 * quarter + 1] = static_cast<unsigned char>(value >> 8);
    }
  const auto got = repack_on_device(g, expert);
  size zero = 0, single = 0, wrong = 0;
  for (size i = 0; i < expert.data[0].size(); i += 8) {
    std::uint64_t in = 0, out = 0;
    __builtin_memcpy(&in, &expert.data[0][i], 8);
    __builtin_memcpy(&out, &got.restored.data[0][i], 8);
    zero += in == 0, single += std::has_single_bit(in), wrong += in != out;
  }
  CHECK(zero == 4);
  CHECK(single == 64);
  CHECK(wrong == 0);
  for (size m = 1; m < 3; ++m) CHECK(got.restored.data[m] == expert.data[m]);
  // The codes in the packed words, at the places that the layout says.
  wrong = 0;
  for (size row = 0; row < 2048; ++row)
    for (size k = 0; k < 2048; ++k) {
      const size piece = row / 8 * 4 + k / 512, lane = row % 8 * 4 + k / 32 % 4, step = k / 128 % 4;
      const unsigned char* const at = &got.packed.data[0][piece * 2048 + step * 512 + lane * 16 + k % 32 / 16 * 8];
      wrong += code_of_two_words(at, k % 16) != (expert.data[0][(row * 2048 + k) / 2] >> k % 2 * 4 & 15u);
    }
  CHECK(wrong == 0);
}

namespace {

template <class X>
void check_packed(const MoeInputs<X>& in) {
  const size width = moe_expert_width(in.g);
  const auto released = mix_experts_on_device(in), packed = mix_experts_on_device(in, {.packed = true});
  REQUIRE(packed.out.size() == released.out.size());
  check(same_bits(packed.out, released.out));
  CHECK(packed.expert_rows == released.expert_rows);
  CHECK(packed.status == released.status);
  check(same_bits(mix_experts_on_device(in, {.graph = true, .packed = true}).out, released.out));
  check(same_bits(mix_experts_on_device(in, {.packed = true, .restored = true}).out, released.out));
  for (const size row : {size{0}, in.rows - 1})
    check(
        same_bits(mix_experts_on_device(rows_of(in, row, 1), {.packed = true}).out, row_of(released.out, row, width)));
}

}  // namespace

TEMPLATE_TEST_CASE("Packed experts give the bits of released ones", "[cuda][moe]", float, bf16) {
  struct Shape {
    size width, hidden, rows, k;
  };
  // up to 32 choices the products' kernel lists them itself
  for (const Shape s : {Shape{512, 512, 3, 3},
                        {512, 512, 11, 3},
                        {1024, 512, 33, 3},
                        {512, 1536, 40, 5},
                        {512, 512, 33, 1},
                        {512, 512, 300, 2},
                        {3584, 3072, 2, 3},
                        {3584, 3072, 19, 3},
                        {4096, 512, 2, 3}}) {
    const bool small = s.width < 1000 && s.rows < 34;
    if (!small && (small_only() || (std::is_same_v<TestType, float> && s.width > 1024))) continue;
    CAPTURE(s.width, s.hidden, s.rows);
    auto in = random_problem<TestType>(geometry(s.width, s.hidden, 7, s.k), ElementType::mxfp4, s.rows, 71);
    // one expert with scales that need the second product, one that nobody has
    for (size i = 0; i < in.experts[2].scale[2].size(); i += 5) in.experts[2].scale[2][i] = 131;
    in.experts[6].absent = true;
    for (auto& e : in.ids) e = e == 6 ? 5 : e;
    check_packed(in);
    auto crowded = in;  // all rows on the same experts
    for (size i = 0; i < crowded.ids.size(); ++i) crowded.ids[i] = static_cast<id>(i % s.k);
    check(same_bits(mix_experts_on_device(crowded, {.packed = true}).out, mix_experts_on_device(crowded).out));
  }
}

TEST_CASE("Experts of the released sizes are read within their memory", "[cuda][moe]") {
  LatentMoeConfig g = LatentMoeConfig::production();
  g.n_routed = 4, g.top_k = 2;
  const auto in = random_problem<bf16>(g, ElementType::mxfp4, 3, 73);
  const auto packed = mix_experts_on_device(in, {.packed = true});
  check(same_bits(packed.out, mix_experts_on_device(in).out));
  CHECK(total(packed.expert_rows) == 6);
}

TEMPLATE_TEST_CASE("Packed experts keep padding rows, failed rows and absent experts apart", "[cuda][moe]", float,
                   bf16) {
  for (const size rows : {6u, 20u}) {  // listed by the products' kernel; by a kernel of its own
    CAPTURE(rows);
    auto in = random_problem<TestType>(geometry(512, 512, 6, 2), ElementType::mxfp4, rows, 81);
    const auto clean = mix_experts_on_device(in);
    in.slots.assign(rows, 0);
    in.slots[1] = pad_slot;
    in.ids[2] = in.ids[3] = 1 << 30;
    for (size i = 0; i < 512; ++i) in.latent[512 + i] = TestType(nan_value);
    in.ids[2 * 2 + 1] = -1;
    in.status.assign(rows, 0);
    in.status[3] = nan_router;
    in.experts[5].absent = true;
    std::vector<unsigned> expected = in.status;
    expected[2] = bad_expert;
    for (size row = 0; row < rows; ++row)
      if (row != 1 && row != 3 && (in.ids[row * 2] == 5 || in.ids[row * 2 + 1] == 5)) expected[row] = bad_expert;
    for (const bool cached : {false, true}) {
      const auto got = mix_experts_on_device(in, {.packed = true, .cached = cached});
      CHECK(got.status == expected);
      size routed = 0;
      for (size row = 0; row < rows; ++row) {
        CAPTURE(row, cached);
        const auto mine = row_of(got.out, row, 512);
        const bool computed = row != 1 && expected[row] == 0;
        routed += computed;
        if (computed) check(same_bits(mine, row_of(clean.out, row, 512)));
        for (size i = 0; i < 512 && !computed; ++i)
          REQUIRE((row == 1 ? static_cast<float>(mine[i]) == 0 : std::isnan(static_cast<float>(mine[i]))));
      }
      CHECK(total(got.expert_rows) == routed * 2);
    }
  }
}

TEST_CASE("A table that begins empty holds the experts that are set", "[cuda][moe]") {
  const auto in = random_problem<bf16>(geometry(512, 512, 70, 3), ElementType::mxfp4, 9, 91);
  const auto want = mix_experts_on_device(in);
  check(same_bits(mix_experts_on_device(in, {.cached = true}).out, want.out));
  check(same_bits(mix_experts_on_device(in, {.packed = true, .cached = true}).out, want.out));
  CHECK(mix_experts_on_device(in, {.misaligned = 4, .packed = true, .cached = true}).out.empty());
}
