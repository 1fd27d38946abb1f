// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <k3/core/error.hpp>
#include <k3/core/types.hpp>

namespace k3 {
namespace detail {

/// 64-bit hash of a short byte string. Token bytes come from the vocabulary, so it need not withstand an adversary.
inline std::uint64_t token_hash(std::string_view bytes) {
  const auto load = [&](size at, size count) {
    std::uint64_t word = 0;
    if (count == 8)
      std::memcpy(&word, bytes.data() + at, 8);
    else
      std::memcpy(&word, bytes.data() + at, 4);
    return word;
  };
  const auto mix = [](std::uint64_t h, std::uint64_t word) {
    h = (h ^ word) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 29);
  };
  const size n = bytes.size();
  std::uint64_t h = n * 0xD6E8FEB86659FD93u;
  if (n >= 8) {
    for (size i = 0; i + 8 < n; i += 8) h = mix(h, load(i, 8));
    h = mix(h, load(n - 8, 8));  // the last words may overlap
  } else if (n >= 4) {
    h = mix(h, load(0, 4) << 32 | load(n - 4, 4));
  } else if (n > 0) {
    const auto at = [&](size i) { return std::uint64_t{static_cast<unsigned char>(bytes[i])}; };
    h = mix(h, at(0) << 16 | at(n / 2) << 8 | at(n - 1));
  }
  h *= 0xBF58476D1CE4E5B9u;
  return h ^ (h >> 32);
}

}  // namespace detail

/// The byte strings of a byte-pair vocabulary, numbered by rank: 0, 1, 2, ... in the order in which they are added.
///
/// One contiguous store of bytes and one open-addressed table. `find` takes time linear in the length it is given, at
/// most `longest()`; the table takes 16 to 32 bytes per token. Source: `tiktoken.model`.
class RankTable {
 public:
  /// What `find` answers when no token has these bytes; greater than every rank.
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  /// More tokens than this are refused, so that every id, reserved ones included, is a positive `k3::id`.
  static constexpr size max_tokens = size{1} << 24;

  RankTable() : starts_(1, 0), singles_(256, none), pairs_(size{1} << 16, none) { rehash(size{1} << 10); }

  /// Tokens added so far.
  size count() const noexcept { return starts_.size() - 1; }
  /// Length in bytes of the longest token.
  size longest() const noexcept { return longest_; }

  /// Adds `token` with the next rank and returns that; where it is known already, returns its rank and adds nothing.
  /// Throws invalid_argument for an empty token, more than `max_tokens`, or more than 4 GiB of bytes.
  std::uint32_t add(std::string_view token) {
    detail::require(!token.empty(), "RankTable::add", "token", "empty", "at least one byte");
    detail::require(count() < max_tokens, "RankTable::add", "count", count(), "at most 2^24 tokens");
    detail::require(token.size() < none - bytes_.size(), "RankTable::add", "token", token.size(), "below 4 GiB in all");
    if ((count() + 1) * 2 > slots_.size()) rehash(slots_.size() * 2);
    Slot& slot = slots_[place(token)];
    if (slot.rank != none) return slot.rank;
    const auto rank = static_cast<std::uint32_t>(count());
    slot = {tag(detail::token_hash(token)), rank};
    bytes_.append(token);
    starts_.push_back(static_cast<std::uint32_t>(bytes_.size()));
    longest_ = detail::larger(longest_, token.size());
    if (token.size() == 1) singles_[static_cast<unsigned char>(token[0])] = rank;
    if (token.size() == 2) pairs_[pair_index(token)] = rank;
    return rank;
  }

  /// The rank of the token with exactly these bytes, or `none`.
  std::uint32_t find(std::string_view token) const {
    if (token.size() == 2) return pairs_[pair_index(token)];
    if (token.size() == 1) return singles_[static_cast<unsigned char>(token[0])];
    if (token.empty() || token.size() > longest_) return none;
    return slots_[place(token)].rank;
  }

  /// The bytes of a token; `rank` must be below `count()`.
  std::string_view bytes(std::uint32_t rank) const {
    return std::string_view(bytes_).substr(starts_[rank], starts_[rank + 1] - starts_[rank]);
  }

 private:
  struct Slot {
    std::uint32_t tag, rank;  // the tag spares most comparisons of bytes
  };

  static std::uint32_t tag(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32); }
  static size pair_index(std::string_view token) {
    return size{static_cast<unsigned char>(token[0])} << 8 | static_cast<unsigned char>(token[1]);
  }

  /// The slot that holds `token`, or the free one where it would go; the table is never more than half full.
  size place(std::string_view token) const {
    const std::uint64_t hash = detail::token_hash(token);
    const size mask = slots_.size() - 1;
    size i = static_cast<size>(hash) & mask;
    while (slots_[i].rank != none && (slots_[i].tag != tag(hash) || bytes(slots_[i].rank) != token)) i = (i + 1) & mask;
    return i;
  }

  void rehash(size slots) {
    slots_.assign(slots, Slot{0, none});
    for (std::uint32_t rank = 0; rank < count(); ++rank) {
      const std::string_view token = bytes(rank);
      slots_[place(token)] = {tag(detail::token_hash(token)), rank};
    }
  }

  std::string bytes_;                  // of all tokens, in the order of their ranks
  std::vector<std::uint32_t> starts_;  // [count + 1], into bytes_
  std::vector<Slot> slots_;            // a power of two
  std::vector<std::uint32_t> singles_,
      pairs_;  // [256] and [65536], ranks of the shortest tokens: most lookups are theirs
  size longest_ = 0;
};

/// Byte-pair encoding by ranks: of all adjacent parts, the two whose concatenation has the lowest rank become one, the
/// leftmost of equals first, until no concatenation is a token. A piece that is a token as a whole is that token, even
/// where merging would not get there. Keeps its working memory between pieces; an object serves one thread at a time.
///
/// Cost: n lookups for n bytes and, for pieces above `short_piece` bytes, a heap: O(n log n) time, at most about 60
/// bytes per byte.
class BpeMerger {
 public:
  /// Up to this many bytes repeated scanning is the faster way.
  static constexpr size short_piece = 48;

  /// Appends the ids of `piece` to `out`. Throws invalid_argument, with `out` as it was, where a byte of the piece is
  /// no token (a vocabulary of all 256 single bytes encodes everything), or where it is 2 GiB or longer.
  void encode(const RankTable& ranks, std::string_view piece, std::vector<id>& out) {
    if (piece.empty()) return;
    detail::require(piece.size() < (size{1} << 31), "BpeMerger::encode", "piece", piece.size(), "below 2 GiB");
    const std::uint32_t whole = ranks.find(piece);
    if (whole != RankTable::none) return out.push_back(static_cast<id>(whole));
    for (const char& byte : piece) {
      detail::require(ranks.find({&byte, 1}) != RankTable::none, "BpeMerger::encode", "piece", "a byte without token",
                      "bytes that are tokens");
    }
    if (piece.size() <= short_piece)
      merge_short(ranks, piece, out);
    else
      merge_long(ranks, piece, out);
  }

 private:
  static void append(const RankTable& ranks, std::string_view part, std::vector<id>& out) {
    out.push_back(static_cast<id>(ranks.find(part)));
  }

  static void merge_short(const RankTable& ranks, std::string_view piece, std::vector<id>& out) {
    std::uint32_t begin[short_piece + 1];  // of each part; one more at the end
    std::uint32_t joined[short_piece];     // rank of part i joined with part i + 1
    size parts = piece.size();
    for (size i = 0; i <= parts; ++i) begin[i] = static_cast<std::uint32_t>(i);
    const auto join = [&](size i) {
      return i + 1 < parts ? ranks.find(piece.substr(begin[i], begin[i + 2] - begin[i])) : RankTable::none;
    };
    for (size i = 0; i < parts; ++i) joined[i] = join(i);
    for (;;) {
      size best = 0;
      for (size i = 1; i + 1 < parts; ++i) best = joined[i] < joined[best] ? i : best;
      if (joined[best] == RankTable::none) break;
      --parts;
      for (size i = best + 1; i < parts; ++i) joined[i] = joined[i + 1];
      for (size i = best + 1; i <= parts; ++i) begin[i] = begin[i + 1];
      joined[best] = join(best);
      if (best > 0) joined[best - 1] = join(best - 1);
    }
    for (size i = 0; i < parts; ++i) append(ranks, piece.substr(begin[i], begin[i + 1] - begin[i]), out);
  }

  /// A pair that could become one part, as rank << 32 | where it begins: the order in which pairs are joined. It is
  /// outdated where `joined_` has another rank there by now.
  using Candidate = std::uint64_t;

  /// Finds out what the part at `begin` makes with the one behind it; none for the last part.
  std::uint32_t join(const RankTable& ranks, std::string_view piece, std::uint32_t begin) {
    const std::uint32_t middle = next_[begin];
    joined_[begin] = middle == piece.size() ? RankTable::none : ranks.find(piece.substr(begin, next_[middle] - begin));
    return joined_[begin];
  }

  void consider(const RankTable& ranks, std::string_view piece, std::uint32_t begin) {
    const std::uint32_t rank = join(ranks, piece, begin);
    if (rank == RankTable::none) return;
    heap_.push_back(Candidate{rank} << 32 | begin);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  /// Sorts the first candidates, which come in the order of their places, by rank: two stable passes of 12 bits.
  void sort_first() {
    static_assert(RankTable::max_tokens <= size{1} << 24);
    for (const int shift : {32, 44}) {
      std::uint32_t starts[4097] = {};
      for (const Candidate c : first_) ++starts[(c >> shift & 4095u) + 1];
      for (size digit = 0; digit < 4096; ++digit) starts[digit + 1] += starts[digit];
      sorted_.resize(first_.size());
      for (const Candidate c : first_) sorted_[starts[c >> shift & 4095u]++] = c;
      first_.swap(sorted_);
    }
  }

  void merge_long(const RankTable& ranks, std::string_view piece, std::vector<id>& out) {
    const auto n = static_cast<std::uint32_t>(piece.size());
    next_.resize(n);
    joined_.resize(n);
    previous_.resize(n + size{1});
    heap_.clear();
    first_.clear();
    for (std::uint32_t i = 0; i < n; ++i) next_[i] = i + 1, previous_[i + size{1}] = i;
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::uint32_t rank = join(ranks, piece, i);
      if (rank != RankTable::none) first_.push_back(Candidate{rank} << 32 | i);
    }
    sort_first();
    for (size at = 0; at < first_.size() || !heap_.empty();) {
      // The pairs of single bytes are sorted once; only those that merging makes need a heap.
      Candidate best;
      if (heap_.empty() || (at < first_.size() && first_[at] < heap_.front())) {
        best = first_[at++];
      } else {
        best = heap_.front();
        std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
        heap_.pop_back();
      }
      const auto begin = static_cast<std::uint32_t>(best);
      if (joined_[begin] != best >> 32) continue;
      const std::uint32_t middle = next_[begin], end = next_[middle];
      next_[begin] = end;
      joined_[middle] = RankTable::none;
      previous_[end] = begin;
      consider(ranks, piece, begin);
      if (begin > 0) consider(ranks, piece, previous_[begin]);
    }
    for (std::uint32_t i = 0; i < n; i = next_[i]) append(ranks, piece.substr(i, next_[i] - i), out);
    if (n > kept) *this = BpeMerger();
  }

  static constexpr size kept = size{1} << 18;  // a longer piece's memory is given back

  std::vector<std::uint32_t> next_, previous_;  // [bytes]: where the next and the previous part begin
  std::vector<std::uint32_t> joined_;           // [bytes]: rank of the part there joined with the next
  std::vector<Candidate> first_, sorted_, heap_;
};

}  // namespace k3
