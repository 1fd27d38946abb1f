// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include <k3/model/ablation.hpp>
#include <k3/model/decoder_batch.hpp>
#include <k3/model/k3_cpu_model.hpp>

namespace k3::test {

/// A device decoder and its cache behind plain functions, for test files that the CUDA compiler does not see.
class DeviceRunner {
 public:
  virtual ~DeviceRunner() = default;
  virtual void forward(const DecoderBatch& batch) = 0;
  virtual std::vector<float> logits() = 0;
  virtual RowStatus status(size index) = 0;
  virtual id argmax(size index) = 0;
  virtual size position(size slot) = 0;
  virtual RowStatus slot_status(size slot) = 0;
  virtual void reset(size slot) = 0;
  virtual std::vector<unsigned char> to_bytes(size slot) = 0;
  virtual void from_bytes(size slot, const std::vector<unsigned char>& bytes) = 0;
  virtual void mark() = 0;           ///< takes a rollback point of slot 0
  virtual void back_to_mark() = 0;
  virtual void spoil_mark() = 0;     ///< takes a KDA layer out of the point
  virtual void new_cache() = 0;      ///< the decoder goes on with a fresh cache; the old one is gone
  virtual std::vector<float> logits_row(size index) = 0;
};

struct RunnerOptions {
  bool half = false;  ///< bf16 instead of float
  size slots = 1, capacity = 64, max_rows = 32, max_logit_rows = 1;
  Ablation ablation{};
  bool graphs = true;                    ///< a stream of its own; without one steps are not captured
  bool kda_on_host = false, mla_on_host = false;
};

std::unique_ptr<DeviceRunner> make_device_runner(const K3CpuModel& model, const RunnerOptions& options);

/// The error text of a model that needs more memory than there is; the plan's bytes in `needed`.
std::string refuse_too_large(const K3CpuModel& model, size& needed);

}  // namespace k3::test
