// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/core/bf16.hpp>
#include <k3/geometry/mla_config.hpp>

// MLA on the device for tests that a plain C++ compiler builds: host vectors in, host vectors out. Numbers are floats
// that the activation type holds exactly.
namespace k3::test {

/// A batch and the paged cache it meets.
struct MlaDeviceInputs {
  MlaConfig g;
  size slots = 1, blocks = 1, page_size = 1, page_count = 1;
  std::vector<float> q, kv_a, norm, kv_b, gate;  // of all rows; gate is empty where there is none
  std::vector<id> slot;
  std::vector<size> position;
  std::vector<float> pages;  // [page_count, page_size, width]
  std::vector<id> table;     // [slots, blocks]

  size rows() const { return slot.size(); }
};

struct MlaDeviceOptions {
  size step = 0;               ///< rows of a call; 0: all in one
  size shift = 0, gap = 0;     ///< elements before each tensor and between its rows
  int replays = 0;             ///< captured once and replayed that often, the cache restored before each
  bool float_weights = false;  ///< norm and kv_b as F32
  bool with_status = true;
  bool independent = true;  ///< of gpu
};

struct MlaDeviceOutputs {
  std::vector<float> out, pages;
  std::vector<unsigned> status;
};

/// mla_decode_token; T is the activation type.
template <class T>
MlaDeviceOutputs mla_on_device(const MlaDeviceInputs& in, const MlaDeviceOptions& options = {});

/// The launch_k3_* form, with a contiguous cache; `resident` keeps it on the device.
template <class T>
MlaDeviceOutputs mla_launched(const MlaDeviceInputs& in, bool resident);

/// mla_absorb_query of the inputs' queries [rows, heads, width], and mla_expand_values of given means [rows, heads,
/// latent] without a gate [rows, heads * v].
template <class T>
std::vector<float> mla_absorbed_on_device(const MlaDeviceInputs& in);
template <class T>
std::vector<float> mla_expanded_on_device(const MlaDeviceInputs& in, const std::vector<float>& means);

/// What mla_attend alone is given. The cache's rows are a few distinct ones.
struct MlaAttendInputs {
  static constexpr std::uint16_t nothing = 0xffff;

  MlaConfig g;
  size slots = 1, blocks = 1, page_size = 1, page_count = 1;
  std::vector<float> q, distinct;    // [rows, heads, width]: absorbed; [n, width]
  std::vector<std::uint16_t> which;  // [page_count, page_size]: among the distinct ones; `nothing`: NaN
  std::vector<id> table, slot;       // [slots, blocks], [rows]
  std::vector<size> position;        // [rows]
};
struct MlaAttendOutputs {
  std::vector<float> out;  // [rows, heads, latent]
  std::vector<unsigned> status;
};
template <class T>
MlaAttendOutputs mla_attend_on_device(const MlaAttendInputs& in, bool independent);

/// One row of the inputs in slot `slot` of an MlaDeviceKv<bf16> of `slots` slots with room for one position.
std::vector<float> mla_in_far_slot(const MlaDeviceInputs& in, size slots, size slot);

/// Moves random rows through an MlaDeviceKv<bf16> of shuffled pages; empty, or what went wrong.
std::string mla_device_kv_faults();

/// thrown_by a call with one wrong argument, by name of the case.
std::string mla_refused_argument(const std::string& wrong);

/// The same for a part ("append", "absorb", "attend", "expand") whose output lies over one of its inputs.
std::string mla_refused_overlap(const std::string& part);

/// thrown_by launch_k3_mla_decode_token with one wrong argument.
std::string mla_launch_refused(const std::string& wrong);

/// Whether a geometry without fields gives the bits of its run-time twin.
bool mla_static_geometry_agrees();

}  // namespace k3::test
