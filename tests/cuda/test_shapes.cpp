// SPDX-License-Identifier: Apache-2.0
// Every operation of the device on more rows than a grid's second dimension has, and extents of 0.

#include <map>

#include "cuda/device_test.hpp"
#include "cuda/shapes_device.hpp"
#include "support/compare.hpp"

using namespace k3;
using namespace k3::test;

TEST_CASE("device case 73: 65,536 rows, and 70,000, have the bits of blocks of 1,000") {
  for (const size rows : all_or_few<size>({65536, 70000}, {70})) {
    INFO(rows << " rows");
    size operations = 0;
    for (const std::string& fault : faults_of_many_rows(rows, small_only() ? 32 : 1000, operations)) FAIL_CHECK(fault);
    CHECK(operations >= 18);
  }
}

TEST_CASE("device case 76: extents of 0 give nothing, zeros or an argument's error, and leave none behind") {
  const std::map<std::string, std::string> expected = {
      {"embed_tokens, rows of no width", "nothing"},
      {"rms_norm, rows of no width", "nothing"},
      {"attnres_norm, rows of no width", "refused: attnres_norm/running's width"},
      {"argmax of no logits", "refused: argmax/the number of logits"},
      {"sigmoid_topk of no experts", "refused: sigmoid_topk/the number of experts"},
      {"sigmoid_topk, none chosen", "refused: sigmoid_topk/k"},
      {"linear, no outputs", "nothing"},
      {"linear of no columns", "zeros"},
      {"projections, none", "nothing"},
      {"projections, one of no outputs", "nothing"},
      {"linear_add, no outputs", "nothing"},
      {"dense_mlp, no outputs", "nothing"},
      {"dense_mlp of no width", "zeros"},
      {"experts, none chosen", "refused: ExpertTable/geometry.top_k"},
      {"no experts", "refused: ExpertTable/geometry.n_routed"},
      {"KDA, no heads", "refused: KdaDeviceState/geometry.heads"},
      {"MLA, no heads", "refused: MlaDeviceWorkspace/geometry.heads"},
      {"KDA, no slots", "nothing"},
      {"MLA, no slots", "refused: MlaDeviceKv/slots"},
      {"buffer of nothing", "nothing"},
  };
  const std::vector<EmptyCall> calls = empty_calls();
  CHECK(calls.size() == expected.size());
  for (const EmptyCall& call : calls) {
    INFO(call.name);
    REQUIRE(expected.count(call.name) == 1);
    CHECK(call.outcome == expected.at(call.name));
  }
}
