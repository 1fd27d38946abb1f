// SPDX-License-Identifier: Apache-2.0
// Kernels that a program does not have for its GPU, the KDA, MLA and expert kernels among them: each a cuda_error of
// its first launch, or of making the workspace that asks for it.

#include <algorithm>

#include "cuda/missing_device.hpp"
#include "support/catch.hpp"

using namespace k3::test;

TEST_CASE("a kernel that is missing is a cuda_error where it is first asked for, in a capture too, and nothing else") {
  REQUIRE_FALSE(has_kernels());
  std::vector<std::string> operations;
  for (const std::string& fault : faults_of_missing_kernels(operations)) FAIL_CHECK(fault);
  for (const char* name : {"kda_decode_token", "kda_decode_fused", "MlaDeviceWorkspace", "mla_append",
                           "mla_absorb_query", "mla_attend", "mla_expand_values", "mla_decode_token",
                           "mix_routed_experts", "launch_k3_latent_moe_experts", "linear", "rms_norm"}) {
    INFO(name);
    CHECK(std::count(operations.begin(), operations.end(), name) == 1);
  }
}
