// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <k3/model/decoder_batch.hpp>

#include "support/differences.hpp"

namespace k3::test {

/// Inner values of a pass, row-major, by name.
using Values = std::map<std::string, std::vector<double>>;

/// What the references call the inner value that a decoder's observer sees as `part`.
inline std::string tensor_name(const std::string& part, size layer) {
  const bool once = part == "embed" || part == "final_hidden" || part == "output_attn_res_probs";
  return once ? part : "layer" + std::to_string(layer) + "." + part;
}

/// A batch of `rows` tokens of slot 0, all logits wanted.
struct TokenRows {
  std::vector<id> tokens, slots;
  std::vector<size> positions, wanted;
  TokenRows(const std::vector<id>& ids, size first, size rows) : slots(rows, 0) {
    for (size row = 0; row < rows; ++row) {
      tokens.push_back(ids[first + row]);
      positions.push_back(first + row);
      wanted.push_back(row);
    }
  }
  DecoderBatch batch() const { return {view(tokens), view(slots), view(positions), view(wanted)}; }
};

/// How likely tokens were, each after those before it.
struct Likelihood {
  double mean = 0;       ///< mean negative log-likelihood
  std::vector<id> best;  ///< the most likely token in each place

  /// Adds rows of logits and the token that came after each.
  template <class Logits>
  void add(const Logits& logits, size vocab, const id* next, size rows) {
    for (size row = 0; row < rows; ++row) {
      const auto at = [&](size i) { return static_cast<double>(logits[row * vocab + i]); };
      double sum = 0;
      size best_id = 0;
      for (size i = 1; i < vocab; ++i)
        if (at(i) > at(best_id)) best_id = i;
      for (size i = 0; i < vocab; ++i) sum += std::exp(at(i) - at(best_id));
      const double nll = at(best_id) + std::log(sum) - at(static_cast<size>(next[row]));
      best.push_back(static_cast<id>(best_id));
      mean += (nll - mean) / static_cast<double>(best.size());
    }
  }
  /// The share of places in which both have the same most likely token.
  double agreement(const std::vector<id>& other) const {
    size same = 0;
    for (size i = 0; i < best.size() && i < other.size(); ++i) same += best[i] == other[i];
    return best.size() == other.size() ? static_cast<double>(same) / static_cast<double>(best.size()) : 0;
  }
};

}  // namespace k3::test
