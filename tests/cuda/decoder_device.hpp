// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include <k3/model/ablation.hpp>
#include <k3/model/decoder_batch.hpp>
#include <k3/model/k3_cpu_model.hpp>

namespace k3::test {

/// Is shown the inner values of a pass, row-major, as Decoder's observer is; what it makes of "residual" or "embed"
/// goes back to the device.
using DeviceWatch = std::function<void(const std::string& part, size layer, std::vector<float>& values)>;

/// A device decoder and its cache behind plain functions, for test files that the CUDA compiler does not see.
class DeviceRunner {
 public:
  virtual ~DeviceRunner() = default;
  virtual void forward(const DecoderBatch& batch) = 0;
  virtual void forward(const DecoderBatch& batch, const DeviceWatch& watch) = 0;
  /// work() in a capture of its stream that has become invalid, which makes every call on the stream fail.
  virtual void in_invalid_capture(const std::function<void()>& work) = 0;
  /// work() while another stream is being captured.
  virtual void beside_capture(const std::function<void()>& work) = 0;
  /// forward() on a stream that is busy, while another stream is being captured; whether it returned before that work
  /// was done.
  virtual bool forward_behind_work(const DecoderBatch& batch) = 0;
  virtual std::vector<float> logits() = 0;
  virtual RowStatus status(size index) = 0;
  virtual id argmax(size index) = 0;
  virtual size position(size slot) = 0;
  virtual RowStatus slot_status(size slot) = 0;
  virtual void reset(size slot) = 0;
  virtual std::vector<unsigned char> to_bytes(size slot) = 0;
  virtual void from_bytes(size slot, const std::vector<unsigned char>& bytes) = 0;
  virtual void mark() = 0;  ///< takes a rollback point of slot 0
  virtual void back_to_mark() = 0;
  virtual void spoil_mark() = 0;  ///< takes a KDA layer out of the point
  virtual void new_cache() = 0;   ///< the decoder goes on with a fresh cache; the old one is gone
  virtual std::vector<float> logits_row(size index) = 0;
  virtual size captured_steps() = 0;
  /// forward() into another cache of this model, of one sequence.
  virtual void forward_into_cache(const DecoderBatch& batch, size capacity) = 0;
  /// What a sequence has in host memory, by layer: nothing for a mixer that runs on the device.
  virtual std::vector<std::vector<float>> host_memory(size slot) = 0;
  /// What streams the experts: slots, bytes of one, and its statistics; slots 0 where they are all on the device.
  struct Cache {
    size slots = 0, slot_bytes = 0, hits = 0, misses = 0, bytes_copied = 0;
  };
  virtual Cache cache() = 0;
};

struct RunnerOptions {
  bool half = false;  ///< bf16 instead of float
  size slots = 1, capacity = 64, max_rows = 32, max_logit_rows = 1;
  Ablation ablation{};
  bool graphs = true;   ///< a stream of its own; without one steps are not captured
  bool legacy = false;  ///< the default stream by CUDA's other name for it
  bool kda_on_host = false, mla_on_host = false;
  bool without_kda = false, without_mla = false;  ///< the device has no weights for that mixer
  std::optional<size> expert_memory{};  ///< stream the experts through so much; none: all on the device from the start
};

std::unique_ptr<DeviceRunner> make_device_runner(const K3CpuModel& model, const RunnerOptions& options);

/// The rows of a pass: `count` tokens of one slot from position `first` on, the last one's logits wanted or none.
inline void feed(DeviceRunner& runner, id slot, const std::vector<id>& tokens, size first, size count, bool wanted) {
  const std::vector<id> slots(count, slot);
  std::vector<size> positions(count);
  for (size i = 0; i < count; ++i) positions[i] = first + i;
  const size last = count - 1;
  runner.forward({view(tokens).slice(0, first, count), view(slots),
                  view(static_cast<const size*>(positions.data()), count), view(&last, wanted ? 1 : 0)});
}

/// The prompt, `rows` tokens a pass, then greedy steps.
struct Run {
  std::vector<id> tokens;
  std::vector<std::vector<float>> logits;
};
inline Run greedy(DeviceRunner& runner, const std::vector<id>& prompt, size count, size rows = 8) {
  Run run;
  for (size done = 0; done < prompt.size();) {
    const size now = detail::smaller(rows, prompt.size() - done);
    feed(runner, 0, prompt, done, now, done + now == prompt.size());
    done += now;
  }
  std::vector<id> sequence = prompt;
  while (true) {
    run.tokens.push_back(runner.argmax(0));
    run.logits.push_back(runner.logits());
    if (run.tokens.size() == count) return run;
    sequence.push_back(run.tokens.back());
    feed(runner, 0, sequence, sequence.size() - 1, 1, true);
  }
}

}  // namespace k3::test
