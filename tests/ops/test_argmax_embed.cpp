// SPDX-License-Identifier: Apache-2.0
#include <k3/ops/argmax.hpp>
#include <k3/ops/embed_tokens.hpp>

#include <algorithm>

#include "support/compare.hpp"

using namespace k3;
using namespace k3::test;

namespace {

template <class T>
std::vector<id> greedy(const std::vector<T>& logits, std::size_t rows, int threads = 0) {
  std::vector<id> ids(rows, -7);
  argmax(host{.threads = threads}, view(logits, rows, logits.size() / rows), view(ids));
  return ids;
}

template <class F>
std::string thrown_by(F&& f) {
  try {
    f();
  } catch (const invalid_argument& e) {
    return e.operation() + "/" + e.argument() + "/" + e.found();
  }
  return "nothing thrown";
}

template <class T>
constexpr T not_a_number = std::numeric_limits<T>::quiet_NaN();

}  // namespace

TEMPLATE_TEST_CASE("argmax takes the largest logit, ties to the lower id (case 67)", "[argmax]", float, double) {
  const TestType inf = std::numeric_limits<TestType>::infinity();
  CHECK(greedy<TestType>({0, 1, 1}, 1) == std::vector<id>{1});
  CHECK(greedy<TestType>({-3, -2, -5, 4, 0, 4}, 2) == std::vector<id>{1, 0});
  CHECK(greedy<TestType>({-inf, -inf, 0, inf, inf, -1}, 3) == std::vector<id>{0, 1, 0});
  CHECK(greedy<TestType>({5}, 1) == std::vector<id>{0});
  CHECK(greedy(std::vector<bf16>{bf16(1.0f), bf16(2.0f)}, 1) == std::vector<id>{1});
}

TEMPLATE_TEST_CASE("argmax reports NaN wherever it is, and does the other rows (case 68)", "[argmax]", float, double) {
  for (const std::size_t bad : {0u, 1u, 2u}) {
    std::vector<TestType> logits{0, 2, 1, 0, 1, 2, 3, 1, 2};
    for (const std::size_t at : {0u, 1u, 2u}) {
      auto with_nan = logits;
      with_nan[bad * 3 + at] = not_a_number<TestType>;
      std::vector<id> ids(3, -7), want{1, 2, 0};
      want[bad] = -1;
      CHECK(thrown_by([&] { argmax(host{}, view(with_nan, 3, 3), view(ids)); }) ==
            "argmax/logits of row " + std::to_string(bad) + "/NaN");
      CHECK(ids == want);
      std::vector<RowStatus> status(3, RowStatus::ok);
      k3::detail::argmax_rows(host{}, view(with_nan, 3, 3), view(ids), view(status));
      for (std::size_t row = 0; row < 3; ++row)
        CHECK(status[row] == (row == bad ? RowStatus::nan_logits : RowStatus::ok));
    }
  }
  std::vector<id> ids(1);
  const std::vector<TestType> a{not_a_number<TestType>, 1, 2}, b{1, not_a_number<TestType>, 2};
  CHECK_THROWS_AS(argmax(host{}, view(a, 1, 3), view(ids)), invalid_argument);
  CHECK_THROWS_AS(argmax(host{}, view(b, 1, 3), view(ids)), invalid_argument);
}

TEST_CASE("argmax against the standard library, for any number of threads", "[argmax]") {
  const std::size_t rows = 17, vocab = 4099;
  const auto logits = converted<float>(random_normal(rows * vocab, 21));
  std::vector<id> want;
  for (std::size_t row = 0; row < rows; ++row) {
    const auto first = logits.begin() + static_cast<std::ptrdiff_t>(row * vocab);
    want.push_back(static_cast<id>(std::max_element(first, first + vocab) - first));
  }
  for (const int threads : {1, 2, 3}) CHECK(greedy(logits, rows, threads) == want);
}

TEST_CASE("argmax names what does not fit and changes nothing", "[argmax]") {
  const std::vector<float> logits(6);
  std::vector<id> ids(3, 7);
  CHECK(thrown_by([&] { argmax(host{}, view(logits, 2, 3), view(ids)); }) == "argmax/ids/[3]");
  CHECK(thrown_by([&] { argmax(host{}, view(logits.data(), 3, 0), view(ids)); }) == "argmax/the number of logits/0");
  CHECK(ids == std::vector<id>(3, 7));
  argmax(host{}, view(logits.data(), 0, 3), view(ids.data(), 0));
}

TEMPLATE_TEST_CASE("embed_tokens copies rows and rounds once", "[embed_tokens]", float, double, bf16) {
  const std::size_t vocab = 11, hidden = 37;
  const auto values = random_normal(vocab * hidden, 22);
  const std::vector<id> ids{3, 0, 10, 3};
  const auto table_f = converted<float>(values);
  const auto table_d = converted<double>(values);
  const auto table_b = converted<bf16>(values);
  const auto check_table = [&](const auto& table) {
    std::vector<TestType> out(ids.size() * hidden), want;
    for (const id token : ids)
      for (std::size_t i = 0; i < hidden; ++i)
        want.push_back(static_cast<TestType>(static_cast<double>(table[static_cast<std::size_t>(token) * hidden + i])));
    embed_tokens(host{}, view(ids), view(table, vocab, hidden), view(out, ids.size(), hidden));
    check(same_bits(out, want));
    std::fill(out.begin(), out.end(), TestType{});
    embed_tokens(host{.threads = 2}, view(ids), AnyMatrix<>(view(table, vocab, hidden)), view(out, ids.size(), hidden));
    check(same_bits(out, want));
  };
  check_table(table_f);
  check_table(table_d);
  check_table(table_b);
}

TEST_CASE("embed_tokens: threads change no bit", "[embed_tokens]") {
  const auto table = converted<bf16>(random_normal(64 * 1024, 23));
  std::vector<id> ids;
  for (id row = 0; row < 99; ++row) ids.push_back((row * 37) % 64);
  std::vector<float> one(99 * 1024), more(99 * 1024);
  embed_tokens(host{.threads = 1}, view(ids), view(table, 64, 1024), view(one, 99, 1024));
  for (const int threads : {2, 3}) {
    std::fill(more.begin(), more.end(), 0.0f);
    embed_tokens(host{.threads = threads}, view(ids), view(table, 64, 1024), view(more, 99, 1024));
    check(same_bits(more, one));
  }
}

TEST_CASE("embed_tokens refuses ids outside the vocabulary before it writes (case 72)", "[embed_tokens]") {
  const std::vector<float> table(5 * 3, 1.0f);
  std::vector<float> out(2 * 3, 7.0f);
  for (const id bad : {id{-1}, id{5}, std::numeric_limits<id>::max(), std::numeric_limits<id>::min()}) {
    const std::vector<id> ids{4, bad};
    CHECK(thrown_by([&] { embed_tokens(host{}, view(ids), view(table, 5, 3), view(out, 2, 3)); }) ==
          "embed_tokens/the id of row 1/" + std::to_string(bad));
  }
  const std::vector<id> ids{0, 1};
  CHECK(thrown_by([&] { embed_tokens(host{}, view(ids), view(table, 3, 5), view(out, 2, 3)); }) ==
        "embed_tokens/table/[3, 5]");
  CHECK(thrown_by([&] { embed_tokens(host{}, view(ids), AnyMatrix<>{}, view(out, 2, 3)); }) ==
        "embed_tokens/table/absent");
  CHECK(thrown_by([&] { embed_tokens(host{}, view(ids), view(table, 5, 3), view(out, 3, 2)); }) ==
        "embed_tokens/table/[5, 3]");
  CHECK(thrown_by([&] { embed_tokens(host{}, view(ids), view(table, 5, 3), view(out.data(), 1, 3)); }) ==
        "embed_tokens/out/[1, 3]");
  const std::vector<std::uint8_t> bytes(64);
  const AnyMatrix<> packed(Mxfp4Matrix<>{view(bytes.data(), 2, 16), view(bytes.data(), 2, 1)});
  std::vector<float> wide(64, 7.0f);
  CHECK(thrown_by([&] { embed_tokens(host{}, view(ids), packed, view(wide, 2, 32)); }) == "embed_tokens/table/MXFP4");
  CHECK(out == std::vector<float>(6, 7.0f));
}
