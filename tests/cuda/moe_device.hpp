// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/core/any_view.hpp>
#include <k3/geometry/latent_moe_config.hpp>

// The router and the routed experts on the device for tests that a plain C++ compiler builds: host vectors in and out.
namespace k3::test {

struct RouterInputs {
  size rows = 0, experts = 0, k = 0;
  bool renormalize = true;
  float scale = 1;
  std::vector<float> logits, bias;
  std::vector<id> slots;  ///< empty: none given
};

struct RouterOutputs {
  std::vector<id> ids;
  std::vector<float> weights;
  std::vector<unsigned> status;
};

struct MoeDeviceOptions {
  size shift = 0;            ///< elements by which every pointer but the weights' is moved off its allocation
  size extra_stride = 0;     ///< elements between the rows of all matrices but the weights
  size misaligned = 0;       ///< bytes by which the weights are moved off a multiple of 16
  bool bf16_bias = false;    ///< of the router
  bool graph = false;        ///< captured once, replayed three times
  bool launch_name = false;  ///< through launch_k3_latent_moe_experts
  int calls = 1;             ///< on the same inputs
  bool in_place = false;     ///< out is latent
  bool packed = false;       ///< experts are repacked first; fails where they have no packed layout
  bool restored = false;     ///< and brought back
  bool cached = false;       ///< the table begins empty, and its entries are set, and set again, before the call
};

RouterOutputs sigmoid_topk_on_device(const RouterInputs& in, const MoeDeviceOptions& options = {});

/// The three matrices w1, w3, w2 of an expert as bytes, with the scales of MXFP4.
struct ExpertBytes {
  std::vector<unsigned char> data[3], scale[3];
  bool absent = false;
};

template <class X>
struct MoeInputs {
  LatentMoeConfig g;
  size rows = 0;
  ElementType type = ElementType::mxfp4;
  std::vector<ExpertBytes> experts;
  std::vector<X> latent;
  std::vector<id> ids;
  std::vector<float> weights;
  std::vector<id> slots;         ///< empty: none given
  std::vector<unsigned> status;  ///< before the call; empty: all 0
  bool with_status = true;
};

template <class X>
struct MoeOutputs {
  std::vector<X> out;
  std::vector<unsigned> status;
  std::vector<size> expert_rows;
};

template <class X>
MoeOutputs<X> mix_experts_on_device(const MoeInputs<X>& in, const MoeDeviceOptions& options = {});

/// The memory of one MXFP4 expert of those sizes after repack_experts, and after the way back. Empty where it has no
/// packed layout.
struct RepackedExpert {
  ExpertBytes packed, restored;
};
RepackedExpert repack_on_device(const LatentMoeConfig& g, const ExpertBytes& expert, size misaligned = 0);

/// thrown_by a call with one wrong argument, by name of the case.
std::string moe_refused_argument(const std::string& wrong);

}  // namespace k3::test
