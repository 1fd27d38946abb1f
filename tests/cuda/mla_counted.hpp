// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>

#include "cuda/mla_inputs.hpp"

// Problems for mla_attend alone whose answer in double is cheap at any length.
namespace k3::test {

/// Positions hold one of a few rows, at random, so the answer need only count them. Besides, for each watched head of a
/// row one position holds a row of its own which takes about half of this head's weight: at the ends of the context, of
/// tiles and of 64 equal parts, and anywhere. One position that is not read, or is read twice, is seen so.
struct MlaCounted {
  static constexpr size common = 61;

  MlaAttendInputs in;
  std::vector<size> heads;                // watched
  std::vector<std::vector<double>> want;  // [rows * heads.size()]: [latent]

  /// Pages lie scattered over `pages` of them, or over as many as are needed. Every `step`-th head is watched.
  MlaCounted(const MlaConfig& g, const std::vector<size>& lengths, std::uint32_t seed, size page_size, size pages = 0,
             size step = 1)
      : random_(seed), scale_(mla_score_scale<double>(mla_qk_head_dim(g))) {
    const size rows = lengths.size(), width = mla_cache_width(g);
    in.g = g, in.slots = rows, in.page_size = page_size, in.page_count = 1;
    in.blocks = (*std::max_element(lengths.begin(), lengths.end()) + page_size - 1) / page_size;
    for (const size length : lengths) in.page_count += (length + page_size - 1) / page_size;
    in.page_count = std::max(in.page_count, pages);
    in.which.assign(in.page_count * page_size, MlaAttendInputs::nothing);
    in.table.assign(rows * in.blocks, 0);
    const double spread = 1 / (scale_ * std::sqrt(static_cast<double>(width)));  // scores of about 1
    in.q = numbers(rows * g.heads * width, seed, spread);
    in.distinct = numbers(common * width, seed + 1);
    for (size head = 0; head < g.heads; head += step) heads.push_back(head);
    scatter(lengths);
    for (size row = 0; row < rows; ++row) fill(row, lengths[row]);
  }

  /// The worst relative L2 error of a head's [latent] in rows [first, ..) of the problem, which are all of `got`.
  Comparison compare_rows(const std::vector<float>& got, size first, size rows) const {
    Comparison result;
    const size latent = in.g.kv_lora_rank;
    for (size row = 0; row < rows; ++row)
      for (size i = 0; i < heads.size(); ++i) {
        const auto at = got.begin() + static_cast<std::ptrdiff_t>((row * in.g.heads + heads[i]) * latent);
        const std::vector<double> mine(at, at + static_cast<std::ptrdiff_t>(latent));
        const auto& answer = want[(first + row) * heads.size() + i];
        double error = relative_l2(mine, answer);
        if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
        if (error <= result.worst) continue;
        result.worst = error;
        std::ostringstream text;
        text << "worst relative L2 error " << error << " in row " << row << " of " << in.position[first + row] + 1
             << " positions, head " << heads[i] << ": first element " << mine[0] << ", want " << answer[0];
        result.text = text.str();
      }
    return result;
  }

 private:
  /// Pages in an order that goes back and forth.
  void scatter(const std::vector<size>& lengths) {
    size stride = in.page_count * 5 / 8 + 1, next = 0;
    while (std::gcd(stride, in.page_count) != 1) ++stride;
    for (size row = 0; row < lengths.size(); ++row) {
      in.slot.push_back(static_cast<id>(row)), in.position.push_back(lengths[row] - 1);
      for (size b = 0; b * in.page_size < lengths[row]; ++b, next = (next + stride) % in.page_count)
        in.table[row * in.blocks + b] = static_cast<id>(next);
    }
  }
  std::uint16_t& at(size row, size position) {
    const size page = static_cast<size>(in.table[row * in.blocks + position / in.page_size]);
    return in.which[page * in.page_size + position % in.page_size];
  }
  double score(const float* query, const float* key) const {
    double sum = 0;
    for (size i = 0; i < mla_cache_width(in.g); ++i) sum += static_cast<double>(query[i]) * static_cast<double>(key[i]);
    return sum * scale_;
  }
  const float* distinct(size n) const { return &in.distinct[n * mla_cache_width(in.g)]; }
  const float* query(size row, size head) const { return &in.q[(row * in.g.heads + head) * mla_cache_width(in.g)]; }

  /// A position that holds no row of its own yet.
  size place(size row, size number, size length) {
    const size tiles = (length + 63) / 64, part = (tiles + 63) / 64 * 64;
    const size start = (number / 5 * in.slots + row) % 64 * part;  // all of them are met where there are enough rows
    for (size kind = number < 2 ? number : 2 + number % 5;; kind = 6) {
      const size any = random_() % length, tile = any / 64 * 64;
      const size chosen = std::array<size, 7>{0, length - 1, tile, tile + 63, start, start + part - 1, any}[kind];
      if (chosen < length && at(row, chosen) < common) return chosen;
    }
  }

  void fill(size row, size length) {
    std::vector<size> count(common);
    for (size p = 0; p < length; ++p) {
      const size n = random_() % common;
      at(row, p) = static_cast<std::uint16_t>(n), ++count[n];
    }
    const size width = mla_cache_width(in.g), first = in.distinct.size() / width;
    for (size i = 0; i < heads.size() && i < length; ++i) {
      const float* const q = query(row, heads[i]);
      double sum = 0, square = score(q, q);
      for (size n = 0; n < common; ++n) sum += static_cast<double>(count[n]) * std::exp(score(q, distinct(n)));
      std::vector<float> own = numbers(width, static_cast<std::uint32_t>(random_()));
      const double more = (std::log(sum) - score(q, own.data())) / square;
      for (size c = 0; c < width; ++c)
        own[c] = static_cast<float>(bf16(static_cast<double>(own[c]) + more * static_cast<double>(q[c])));
      std::uint16_t& there = at(row, place(row, i, length));
      --count[there];
      there = static_cast<std::uint16_t>(in.distinct.size() / width);
      in.distinct.insert(in.distinct.end(), own.begin(), own.end());
    }
    count.resize(in.distinct.size() / width - first + common, 1);
    for (const size head : heads) answer(row, head, count, first);
  }
  /// count: of the common rows, and of those from `first` on.
  void answer(size row, size head, const std::vector<size>& count, size first) {
    std::vector<double> mean(in.g.kv_lora_rank);
    double total = 0;
    for (size n = 0; n < count.size(); ++n) {
      const float* const values = distinct(n < common ? n : first + n - common);
      const double weight = static_cast<double>(count[n]) * std::exp(score(query(row, head), values));
      total += weight;
      for (size c = 0; c < mean.size(); ++c) mean[c] += weight * static_cast<double>(values[c]);
    }
    for (double& value : mean) value /= total;
    want.push_back(std::move(mean));
  }

  std::mt19937 random_;
  double scale_;
};

/// Rows [first, first + count) of a problem, with the same cache.
inline MlaAttendInputs rows_of(const MlaAttendInputs& in, size first, size count) {
  MlaAttendInputs result = in;
  const size each = in.g.heads * mla_cache_width(in.g);
  const auto cut = [&](auto& all, size width) {
    all.erase(all.begin() + static_cast<std::ptrdiff_t>((first + count) * width), all.end());
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(first * width));
  };
  cut(result.q, each), cut(result.slot, 1), cut(result.position, 1);
  return result;
}

}  // namespace k3::test
