// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <k3/core/types.hpp>

namespace k3::test {

struct ReleasedRow {
  id token, slot;
  size position;
};

struct ReleasedRun {
  std::vector<float> stream, logits;  // [R, hidden], [R, vocab]
  std::vector<id> argmax;             // [R]
  std::vector<unsigned> status;       // [R]
};

/// Sampled elements of a product's result, and what they are in double with the same rounding points.
struct SampledProduct {
  std::string name;
  std::vector<double> got, want;
};

/// Embedding, three layers (KDA and dense, KDA and experts, MLA and experts) and head of the released sizes in bf16, on
/// made-up weights; of 896 experts a few exist, under all the ids. Nine sequences with a past: its states are the same
/// before every run.
class ReleasedModel {
 public:
  static constexpr size hidden = 7168, vocab = 163840, capacity = 70016, most_rows = 9;

  virtual ~ReleasedModel() = default;
  /// `replays`: the pass is captured, and replayed that often.
  virtual ReleasedRun run(const std::vector<ReleasedRow>& rows, bool fixed_geometry, int replays = 0) = 0;
  /// Every operation by itself on all rows: those whose results are not all finite, or all zero.
  virtual std::vector<std::string> faults_of_operations() = 0;
  /// projections, linear_add, dense_mlp and dense_mlp_add on `rows` rows, of which a few are sampled, in all of `rows`.
  virtual std::vector<SampledProduct> sampled_products(const std::vector<size>& rows) = 0;
  /// Of a pass of these rows, for row `which`, whose token is one of the first few: the stream behind layer 0 (KDA and
  /// dense), which the host computes in double from the same embedding and state, and sampled logits, which it computes
  /// from the device's normed rows.
  virtual std::vector<SampledProduct> first_layer_and_head(const std::vector<ReleasedRow>& rows, size which) = 0;
};

std::unique_ptr<ReleasedModel> make_released_model();

}  // namespace k3::test
