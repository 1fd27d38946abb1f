// SPDX-License-Identifier: Apache-2.0
#include "support/catch.hpp"

#include <bit>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <k3/io/bpe.hpp>

namespace {

using k3::BpeMerger;
using k3::RankTable;
using Ids = std::vector<k3::id>;

RankTable table(const std::vector<std::string>& tokens) {
  RankTable ranks;
  for (const std::string& token : tokens) ranks.add(token);
  return ranks;
}

Ids merge(const RankTable& ranks, const std::string& piece) {
  Ids out;
  BpeMerger().encode(ranks, piece, out);
  return out;
}

/// The definition, word for word: a list of strings, searched from the left for the pair of lowest rank until there is
/// none.
Ids merge_by_definition(const std::vector<std::string>& tokens, const std::string& piece) {
  const auto rank = [&](const std::string& bytes) {
    std::size_t r = 0;
    while (r < tokens.size() && tokens[r] != bytes) ++r;
    return r;
  };
  if (rank(piece) < tokens.size()) return {static_cast<k3::id>(rank(piece))};
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  for (;;) {
    std::size_t best = tokens.size(), where = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      if (const std::size_t r = rank(parts[i] + parts[i + 1]); r < best) best = r, where = i;
    }
    if (best == tokens.size()) break;
    parts[where] += parts[where + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(where) + 1);
  }
  Ids out;
  for (const std::string& part : parts) out.push_back(static_cast<k3::id>(rank(part)));
  return out;
}

/// The letters, then concatenations of earlier tokens.
std::vector<std::string> random_vocabulary(std::mt19937& random, const std::string& letters, std::size_t count) {
  std::vector<std::string> tokens;
  for (const char c : letters) tokens.emplace_back(1, c);
  while (tokens.size() < count) {
    std::string joined = tokens[random() % tokens.size()] + tokens[random() % tokens.size()];
    if (joined.size() > 12) continue;
    bool known = false;
    for (const std::string& token : tokens) known = known || token == joined;
    if (!known) tokens.push_back(joined);
  }
  return tokens;
}

}  // namespace

TEST_CASE("merging takes the lowest rank first", "[io][bpe]") {
  SECTION("leftmost of equals") {
    const RankTable ranks = table({"a", "b", "ab", "ba"});
    CHECK(merge(ranks, "aba") == Ids{2, 0});
    CHECK(merge(ranks, "bab") == Ids{1, 2});
  }
  SECTION("merges build on merges") {
    const RankTable ranks = table({"a", "b", "ab", "bc", "abc", "c"});
    CHECK(merge(ranks, "abc") == Ids{4});
    CHECK(merge(ranks, "bcab") == Ids{3, 2});
    CHECK(merge(ranks, "cba") == Ids{5, 1, 0});
  }
  SECTION("two spaces are one token") { CHECK(merge(table({" ", "  "}), "  ") == Ids{1}); }
  SECTION("an odd run pairs from the left") { CHECK(merge(table({"a", "aa"}), "aaaaa") == Ids{1, 1, 0}); }
  SECTION("a whole piece needs no path of merges") {
    const RankTable ranks = table({"a", "b", "c", "abc"});
    CHECK(merge(ranks, "abc") == Ids{3});
    CHECK(merge(ranks, "abcabc") == Ids{0, 1, 2, 0, 1, 2});
  }
  SECTION("nothing gives nothing, and what is there stays") {
    Ids out{7};
    BpeMerger merger;
    merger.encode(table({"a"}), "", out);
    CHECK(out == Ids{7});
    merger.encode(table({"a"}), "aa", out);
    CHECK(out == Ids{7, 0, 0});
  }
}

TEST_CASE("merging agrees with its definition, short pieces and long ones", "[io][bpe]") {
  std::mt19937 random(20);
  for (int vocabulary = 0; vocabulary < 20; ++vocabulary) {
    const std::string letters = vocabulary % 2 ? "ab" : "abcde";
    const std::vector<std::string> tokens = random_vocabulary(random, letters, 10 + random() % 90);
    const RankTable ranks = table(tokens);
    BpeMerger merger;  // one for all pieces: nothing may be left over from one to the next
    for (const std::size_t length : {1u, 2u, 3u, 7u, 20u, 47u, 48u, 49u, 50u, 100u, 300u}) {
      std::string piece;
      while (piece.size() < length) piece += letters[random() % letters.size()];
      CAPTURE(vocabulary, length, piece);
      Ids found;
      merger.encode(ranks, piece, found);
      REQUIRE(found == merge_by_definition(tokens, piece));
    }
  }
}

TEST_CASE("a very long piece is merged in one go", "[io][bpe]") {
  // Powers of two of one letter: a run of n letters is the binary form of n, largest power first.
  std::vector<std::string> tokens;
  for (std::size_t bit = 0; bit <= 10; ++bit) tokens.emplace_back(std::size_t{1} << bit, 'a');
  const std::size_t length = 1024 * 400 + 512 + 64 + 1;  // scanning again for each merge would take minutes
  Ids expected(400, 10);
  for (const k3::id bit : {9, 6, 0}) expected.push_back(bit);
  CHECK(merge(table(tokens), std::string(length, 'a')) == expected);
}

TEST_CASE("the rank table finds what was added and nothing else", "[io][bpe]") {
  std::mt19937 random(3);
  RankTable ranks;
  std::vector<std::string> tokens;
  while (tokens.size() < 20000) {  // lengths 1 to 20, so every branch of the hash
    std::string token;
    for (std::size_t n = 1 + random() % 20; n > 0; --n) token += static_cast<char>(random() % 4 * 85);
    const std::size_t before = ranks.count();
    const std::uint32_t rank = ranks.add(token);
    REQUIRE(rank <= before);
    if (rank == before)
      tokens.push_back(token);
    else
      REQUIRE(tokens[rank] == token);
  }
  CHECK(ranks.count() == tokens.size());
  CHECK(ranks.longest() == 20);
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    CAPTURE(r);
    REQUIRE(ranks.find(tokens[r]) == r);
    REQUIRE(ranks.bytes(static_cast<std::uint32_t>(r)) == tokens[r]);
  }
  CHECK(ranks.find("") == RankTable::none);
  CHECK(ranks.find("x") == RankTable::none);
  CHECK(ranks.find("xy") == RankTable::none);
  CHECK(ranks.find("xyz") == RankTable::none);
  CHECK(ranks.find(tokens[100] + std::string(20, 'x')) == RankTable::none);
}

TEST_CASE("tokens of equal hash are told apart by their bytes", "[io][bpe]") {
  const std::string first = "06677486", second = "11506832";
  const auto seen = [](const std::string& token) {  // the tag and the place in the smallest table
    const std::uint64_t hash = k3::detail::token_hash(token);
    return std::pair<std::uint64_t, std::uint64_t>(hash >> 32, hash % 1024);
  };
  if constexpr (std::endian::native == std::endian::little) CHECK(seen(first) == seen(second));
  RankTable ranks;
  CHECK(ranks.add(first) == 0);
  CHECK(ranks.find(second) == RankTable::none);
  CHECK(ranks.add(second) == 1);
  CHECK(ranks.find(first) == 0);
  CHECK(ranks.find(second) == 1);
}

TEST_CASE("merging refuses bytes without a token and changes nothing", "[io][bpe]") {
  const RankTable ranks = table({"a", "b", "ab"});
  Ids out{5};
  BpeMerger merger;
  CHECK_THROWS_AS(merger.encode(ranks, "abc", out), k3::invalid_argument);
  CHECK_THROWS_AS(merger.encode(ranks, std::string(100, 'a') + "c", out), k3::invalid_argument);
  CHECK(out == Ids{5});
  RankTable empty;
  CHECK_THROWS_AS(empty.add(""), k3::invalid_argument);
  CHECK(empty.count() == 0);
}
