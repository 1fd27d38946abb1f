// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/core/bf16.hpp>
#include <k3/geometry/kda_config.hpp>

// KDA on the device for tests that a plain C++ compiler builds: host vectors in, host vectors out.
namespace k3::test {

/// A batch with its state; X is the activation type. `gate`, `a_log`, `dt_bias`, `o_norm` are the fused form's, which reads
/// z; the other form reads log_decay and beta_float.
template <class X>
struct KdaDeviceInputs {
  KdaConfig g;
  size rows = 0, slots = 0;
  std::vector<X> x, z, beta, gate;
  std::vector<float> conv, log_decay, beta_float, a_log, dt_bias, o_norm, state;
  std::vector<X> window;
  std::vector<id> slot;
  float norm_eps = 1e-5f;
};

struct KdaDeviceOptions {
  bool static_geometry = false;   ///< kimi_k3::Kda or tiny::Kda, whichever has the sizes
  bool bf16_weights = false;      ///< all weights rounded to bf16
  size shift = 0;                 ///< elements by which every pointer is moved off its allocation
  size extra_stride = 0;          ///< elements between the rows of x, z, gate, log_decay and out
  int calls = 1;                  ///< steps on the same inputs
  bool graph = false;             ///< captured once and replayed `calls` times
  bool busy_stream = false;       ///< a long kernel before, and the copies after, on the same stream
};

template <class Out, class Window>
struct KdaDeviceOutputs {
  std::vector<Out> out;
  std::vector<float> state;
  std::vector<Window> window;
  std::vector<unsigned> status;
};

template <class X>
KdaDeviceOutputs<float, X> kda_token_on_device(const KdaDeviceInputs<X>& in, const KdaDeviceOptions& options = {});
template <class X>
KdaDeviceOutputs<X, X> kda_fused_on_device(const KdaDeviceInputs<X>& in, const KdaDeviceOptions& options = {});
/// The launch_k3_* form; `resident` keeps the state on the device.
template <class X>
KdaDeviceOutputs<float, X> kda_launched(const KdaDeviceInputs<X>& in, bool resident);

/// Uploads random bytes to a slot of a KdaDeviceState, reads them back, resets a slot; empty, or what went wrong.
std::string kda_device_state_faults();

/// The argument that a call with one wrong argument is refused for, by name of the case; "accepted" where it is not.
std::string kda_refused_argument(const std::string& wrong);

}  // namespace k3::test
