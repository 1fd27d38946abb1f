// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/core/bf16.hpp>
#include <k3/geometry/kda_config.hpp>

// KDA on the device for tests that a plain C++ compiler builds: host vectors in, host vectors out.
namespace k3::test {

/// A batch with its state; X is the activation type. The fused form reads z, beta, gate, a_log, dt_bias and o_norm, the
/// other one log_decay and beta_float.
template <class X>
struct KdaDeviceInputs {
  KdaConfig g{};
  size rows = 0, slots = 0;
  std::vector<X> x{}, z{}, beta{}, gate{}, window{};
  std::vector<float> conv{}, log_decay{}, beta_float{}, a_log{}, dt_bias{}, o_norm{}, state{};
  std::vector<id> slot{};
  float norm_eps = 1e-5f;
};

struct KdaDeviceOptions {
  bool static_geometry = false;  ///< kimi_k3::Kda or tiny::Kda, whose sizes the problem must have
  bool bf16_weights = false;     ///< all weights stored as bf16
  size shift = 0;                ///< elements by which every pointer is moved off its allocation
  size gap = 0;                  ///< elements between rows and between slots
  int calls = 1;                 ///< steps on the same inputs
  bool graph = false;            ///< captured once on a stream that does not wait for others, replayed `calls` times
};

/// What a call left. `gaps_kept` is false where something between rows, between slots or around them was written.
template <class Out, class Window>
struct KdaDeviceOutputs {
  std::vector<Out> out{};
  std::vector<float> state{};
  std::vector<Window> window{};
  std::vector<unsigned> status{};
  bool gaps_kept = true;
};

template <class X>
KdaDeviceOutputs<float, X> kda_token_on_device(const KdaDeviceInputs<X>& in, const KdaDeviceOptions& options = {});
template <class X>
KdaDeviceOutputs<X, X> kda_fused_on_device(const KdaDeviceInputs<X>& in, const KdaDeviceOptions& options = {});
/// The launch_k3_* forms; `resident` keeps the state on the device.
template <class X>
KdaDeviceOutputs<float, X> kda_launched(const KdaDeviceInputs<X>& in, bool resident);

/// Sends random states through a KdaDeviceState; empty, or what did not come back as it should.
std::string kda_device_state_fault();

/// thrown_by a call that is wrong in one way (see the .cu).
std::string kda_refused_argument(const std::string& wrong);
/// The same of launch_k3_kda_decode_token.
std::string kda_launch_refused(const std::string& wrong);

}  // namespace k3::test
