// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/geometry/latent_moe_config.hpp>

// Products on the device, from host vectors to host vectors. Numbers are floats here; those of a bf16 tensor are
// rounded on the way.
namespace k3::test {

struct ProductMatrix {
  std::vector<float> weight, up{};  // [rows, columns]; `up` makes it a gated projection
  size rows = 0;
  bool bf16_weight = true, bf16_out = true;
  GluConfig glu{};
};

struct ProductCase {
  size tokens = 0, columns = 0;
  std::vector<float> x{};  // [tokens, columns]
  bool bf16_x = true;
  size shift = 0, gap = 0;  // of every pointer, and between the rows of x and out
  int replays = 0;          // of a graph; 0: a direct call
};

/// All matrices in one launch; out [tokens, rows] of each.
std::vector<std::vector<float>> device_projections(const ProductCase& c, const std::vector<ProductMatrix>& matrices);
/// One matrix by `linear`.
std::vector<float> device_linear(const ProductCase& c, const ProductMatrix& matrix);

struct AddResult {
  std::vector<float> stream, part, snapshot;
};
/// `linear_add` on a stream of x's type; `other` may be empty. Graph replays start from the given stream each time.
AddResult device_linear_add(const ProductCase& c, const ProductMatrix& matrix, const std::vector<float>& stream,
                            const std::vector<float>& other, bool replace);

/// Gate and up as given by `gated`, down [n, width]; out [tokens, n].
std::vector<float> device_dense_mlp(const ProductCase& c, const ProductMatrix& gated, const ProductMatrix& down);

/// "operation/argument" of what bad calls are refused for.
std::vector<std::string> device_linear_refusals();

}  // namespace k3::test
