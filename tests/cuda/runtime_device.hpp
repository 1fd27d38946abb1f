// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/model/k3_cpu_model.hpp>

// How the operations behave as users of the CUDA runtime. Each function returns what is wrong, one line an operation.
namespace k3::test {

/// The operations, by name.
std::vector<std::string> operations();

/// Calls with no rows: what they put on a stream, and what error they leave behind.
std::vector<std::string> faults_of_empty_calls();

/// Calls on a non-blocking stream that is busy and gets the operands only after that, while another stream is being
/// captured: results that are not those of a call alone; with `timed`, calls that waited.
std::vector<std::string> faults_of_order(bool timed);

/// Calls in a capture: what they cannot do there, calls that put nothing on the stream, or several kernels where one is
/// promised, and replays whose result is not that of a direct call.
std::vector<std::string> faults_of_capture();

/// Calls in a capture that something else then breaks off with an exception: an error that is not that one, errors left
/// behind, a stream that is not free again, and a next call that fails.
std::vector<std::string> faults_of_abandoned_captures();

/// Calls on a stream whose capture has become invalid: other errors than CUDA's for that, errors left behind for the
/// next call, and a next call that fails.
std::vector<std::string> faults_of_errors();

/// What a decoder's pass puts on its stream besides kernels: more than ids, slots and positions going to the device and
/// arg-max and status words coming back.
std::vector<std::string> faults_of_pass_nodes(const K3CpuModel& model);

/// A decoder's pass in which an operation of the last layer throws, a `step` that is being captured or a pass that is
/// launched directly: an error that is not the first one, a stream that is not free again, sequences that are not
/// marked or that are marked without need, and results after a reset that are not a sound decoder's.
std::vector<std::string> faults_of_broken_pass(const K3CpuModel& model, bool step);

/// Streams, buffers, states, caches, tables, workspaces and a model that were moved from, and what they went to.
std::vector<std::string> faults_of_moved_from(const K3CpuModel& model);

}  // namespace k3::test
