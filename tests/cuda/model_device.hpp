// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include <k3/model/k3_cpu_model.hpp>

// What becomes of models and caches that are moved to the device.
namespace k3::test {

/// K3DeviceModel::plan.
size planned(const K3CpuModel& model);

/// The error text of a DeviceBuffer of so many bytes.
std::string refuse_buffer(size bytes);

/// The error text of a decoder for so many rows, all with logits.
std::string refuse_decoder(const K3CpuModel& model, size rows);

/// The error text of a model that needs more memory than there is; the plan's bytes in `needed`.
std::string refuse_too_large(const K3CpuModel& model, size& needed);

/// The error text of routed experts that need more memory than there is, placed behind the rest of the model.
std::string refuse_too_large_experts(const K3CpuModel& model, size& needed);

/// The error text of a cache that needs more memory than there is, and the bytes that are not free again afterwards.
std::string refuse_cache(const K3CpuModel& model, size slots, size capacity, size& lost);

/// What is wrong with a model after it was moved to the device; empty for nothing.
std::string fault_of_moved_model(const K3CpuModel& model);

size free_bytes();
size total_bytes();

/// Page-locked memory, for StreamingOptions::allocate.
std::shared_ptr<std::byte> pinned(size bytes);

/// How many of `bytes` bytes are wrong on the device after a DeviceUpload through a reader that adds 1 to each; where
/// `fails`, its third read throws std::runtime_error. In pieces from odd addresses on.
size wrong_after_upload(size bytes, bool fails);

/// What the CUDA runtime would blame the next launch for; empty for nothing.
std::string left_behind();

}  // namespace k3::test
