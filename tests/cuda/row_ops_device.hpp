// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/core/types.hpp>

// Row-wise operations on the device, from host vectors to host vectors. Numbers are floats here; those of a bf16 tensor
// are rounded on the way.
namespace k3::test {

/// How a call is made: `shift` and `gap` as in linear_device.hpp, `replays` of a graph (0: a direct call).
struct RowCall {
  bool is_bf16 = true, bf16_weight = true;
  size shift = 0, gap = 0;
  int replays = 0;
};

/// RMSNorm of x [rows, count]; `in_place` writes over x, `float_x` reads floats whatever the type of the result.
std::vector<float> device_rms_norm(const RowCall& call, size rows, size count, const std::vector<float>& x,
                                   const std::vector<float>& weight, float eps, bool in_place = false,
                                   bool float_x = false);

struct MixCase {
  size stored = 0, rows = 0, hidden = 0;
  std::vector<float> snapshots{}, running{};  // [stored, rows, hidden], [rows, hidden]
  std::vector<float> res_norm{}, res_proj{}, norm{};
  float res_eps = 1e-5f, norm_eps = 1e-6f, mix = 1.0f;
  bool only_out = false;        // neither mixed nor probs asked for
  bool before_product = false;  // as in AttnResNormOptions
};
struct MixResult {
  std::vector<float> out, mixed, probs;
};
MixResult device_attnres_norm(const RowCall& call, const MixCase& c);

struct IdsResult {
  std::vector<id> ids;
  std::vector<unsigned> status;
};
IdsResult device_argmax(const RowCall& call, size rows, size count, const std::vector<float>& logits);

struct EmbedResult {
  std::vector<float> out;
  std::vector<unsigned> status;
};
/// `bf16_weight` is the table's type.
EmbedResult device_embed(const RowCall& call, const std::vector<id>& ids, size vocab, size hidden,
                         const std::vector<float>& table);

/// How many kernels calls without work launch: rms_norm of no rows, of rows without elements, embed_tokens of either,
/// argmax, attnres_norm and sigmoid_topk of no rows; last, for comparison, an rms_norm of one row. Throws where one of
/// them leaves an error behind.
std::vector<size> device_empty_launches();

/// "operation/argument" of what bad calls are refused for.
std::vector<std::string> device_row_refusals();

/// "operation: argument overlapping other" of what calls are refused for whose operands share memory; where such a call
/// is taken, "accepted".
std::vector<std::string> device_row_overlaps();

}  // namespace k3::test
