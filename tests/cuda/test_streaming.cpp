// SPDX-License-Identifier: Apache-2.0
// Experts that come to the device when they are needed: the bits of the resident decoder at every budget, and what a
// source that fails does.

#include <filesystem>
#include <random>

#include <k3/model/synthetic.hpp>

#include "cuda/decoder_device.hpp"
#include "cuda/device_test.hpp"
#include "cuda/model_device.hpp"
#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

/// Logits of all wanted rows of all passes, and the caches afterwards.
struct Passes {
  std::vector<float> logits;
  std::vector<std::vector<unsigned char>> caches;
};

/// `sequences` prompts of different lengths together in one pass (where only few launches are wanted, of one token),
/// then steps of one token each.
Passes decode(DeviceRunner& runner, size sequences, size steps, size vocab) {
  Passes result;
  std::vector<size> position(sequences, 0);
  const auto pass = [&](size longest) {
    std::vector<id> tokens, slots;
    std::vector<size> positions, wanted;
    for (size s = 0; s < sequences; ++s) {
      const size count = longest == 1 ? 1 : longest + s;
      for (size i = 0; i < count; ++i) {
        tokens.push_back(static_cast<id>((13 * s + 7 * position[s] * position[s] + position[s] + 1) % vocab));
        slots.push_back(static_cast<id>(s));
        positions.push_back(position[s]++);
      }
      wanted.push_back(tokens.size() - 1);
    }
    tokens.push_back(-3), slots.push_back(pad_slot), positions.push_back(0);
    runner.forward({view(tokens), view(slots), view(positions), view(wanted)});
    const std::vector<float> logits = runner.logits();
    result.logits.insert(result.logits.end(), logits.begin(), logits.end());
  };
  pass(small_only() ? 1 : 5);
  for (size i = 0; i < steps; ++i) pass(1);
  for (size s = 0; s < sequences; ++s) result.caches.push_back(runner.to_bytes(static_cast<id>(s)));
  return result;
}

/// The budget below which streaming is refused, from what the refusal says.
size floor_of(const K3CpuModel& model, RunnerOptions options) {
  options.expert_memory = 0;
  try {
    make_device_runner(model, options);
  } catch (const invalid_argument& problem) {
    const std::string text = problem.what(), before = "at least ";
    INFO(text);
    const size at = text.find(before);
    REQUIRE(at != text.npos);
    return std::stoull(text.substr(at + before.size()));
  }
  FAIL("no budget is not refused");
  return 0;
}

size experts_of(const K3CpuModel& model) {
  size count = 0;
  for (const LayerWeights& layer : model.weights.layers) count += layer.experts ? layer.experts->size() : 0;
  return count;
}

/// The bits of a resident decoder of `model` from decoders that stream from `source`, the same model, at every budget.
void check_budgets(const K3CpuModel& model, const K3CpuModel& source, bool half, size sequences, size steps) {
  RunnerOptions options;
  options.half = half, options.slots = options.max_logit_rows = sequences, options.max_rows = 48;
  const size vocab = model.config.vocab_size;
  const Passes expected = decode(*make_device_runner(model, options), sequences, steps, vocab);
  const size floor = floor_of(source, options), slot = floor / model.config.moe.top_k, all = experts_of(source) * slot;
  for (const size memory : {floor, floor + slot - 1, all / 2, all - 1, all}) {
    if (memory < floor || (small_only() && memory != floor)) continue;
    CAPTURE(memory, floor, all, half, sequences);
    options.expert_memory = memory;
    auto runner = make_device_runner(source, options);
    const DeviceRunner::Cache empty = runner->cache();
    CHECK(empty.slots == (memory == all ? 0 : memory / slot));
    const Passes got = decode(*runner, sequences, steps, vocab);
    check(same_bits(got.logits, expected.logits));
    CHECK((got.caches == expected.caches));
    const DeviceRunner::Cache used = runner->cache();
    CHECK((memory == all || used.misses > 0));
    CHECK(used.bytes_copied <= used.misses * used.slot_bytes);
    if (memory == all - 1) CHECK(used.hits > 0);
  }
}

/// Experts of MXFP4 in memory, with sizes that have a packed layout.
K3CpuModel packable_model() {
  K3CpuModel model = synthetic_model(
      k3::detail::twin_pattern(64, 96, 64, {2, 32, 4, -5.0f, true}, {2, 32, 32, 32, 32, 32, true, true, 1e-6f},
                               {64, 256, 256, 12, 3, 1, {}, true, true, 1.0f}),
      0.5f);
  struct Bytes {
    std::shared_ptr<const void> before;
    std::vector<std::vector<std::uint8_t>> all;
  };
  auto bytes = std::make_shared<Bytes>();
  bytes->before = model.storage;
  unsigned seed = 1;
  const auto random = [&](size count, unsigned from, unsigned values) {
    std::vector<std::uint8_t> result(count);
    for (std::uint8_t& value : result) {
      seed = seed * 1664525u + 1013904223u;
      value = static_cast<std::uint8_t>(from + (seed >> 16) % values);
    }
    bytes->all.push_back(std::move(result));
    return bytes->all.back().data();
  };
  for (LayerWeights& layer : model.weights.layers) {
    if (!layer.experts) continue;
    std::vector<ExpertWeights> experts(layer.experts->size());
    for (ExpertWeights& expert : experts)
      for (AnyMatrix<>* matrix : {&expert.w1, &expert.w3, &expert.w2}) {
        const std::uint8_t* const codes = random(256 * 128, 0, 256);
        *matrix = Mxfp4Matrix<>{view(codes, 256, 128), view(random(256 * 8, 119, 4), 256, 8)};
      }
    layer.experts = std::make_shared<ResidentExperts>(std::move(experts));
  }
  model.storage = bytes;
  return model;
}

/// Another source, one of whose reads fails.
class FailingSource final : public ExpertSource {
 public:
  FailingSource(std::shared_ptr<const ExpertSource> inner, std::shared_ptr<int> reads_left)
      : inner_(std::move(inner)), reads_left_(std::move(reads_left)) {}
  k3::size size() const override { return inner_->size(); }
  ExpertWeights operator[](k3::size expert) const override { return (*inner_)[expert]; }
  void need(const k3::size* experts, k3::size count) const noexcept override { inner_->need(experts, count); }
  ExpertWeights acquire(k3::size expert) const override {
    if ((*reads_left_)-- == 0) throw format_error("drive", "expert", "cannot be read", expert);
    return inner_->acquire(expert);
  }
  void release(k3::size expert) const noexcept override { inner_->release(expert); }

 private:
  std::shared_ptr<const ExpertSource> inner_;
  std::shared_ptr<int> reads_left_;
};

}  // namespace

TEST_CASE("device streaming: the bits of the resident decoder at every budget, alone and in a batch") {
  std::vector<std::string> folders;
  for (const char* name : fixture_names) folders.push_back(data_path(name));
  folders.push_back(austen_path());
  for (const std::string& folder : folders) {
    if (small_only() && folder != folders[0]) continue;
    INFO(folder);
    const K3CpuModel model = from_pretrained(folder);
    // Through a window of page-locked memory; and from the file maps.
    const StreamedModel streamed = stream_pretrained(folder, {.readers = 3, .window = 8, .allocate = pinned});
    for (const bool half : {false, true})
      for (const size sequences : all_or_few<size>({1, 4}, {2})) {
        if (small_only() && !half) continue;
        check_budgets(model, streamed.model, half, sequences, small_only() ? 1 : 6);
      }
    if (!small_only()) check_budgets(model, model, true, 4, 3);
  }
}

TEST_CASE("device streaming: experts that are repacked on their way") {
  const K3CpuModel model = packable_model();
  for (const bool half : {false, true})
    if (half || !small_only()) check_budgets(model, model, half, small_only() ? 2 : 4, small_only() ? 1 : 12);
}

TEST_CASE("device streaming: a budget below the experts of one token is refused with the floor") {
  const Fixture& f = fixture("k3-tiny-5l");
  const size floor = floor_of(f.model, {});
  RunnerOptions options;
  options.expert_memory = floor - 1;
  CHECK_THROWS_AS(make_device_runner(f.model, options), invalid_argument);
  options.expert_memory = floor;
  CHECK(make_device_runner(f.model, options)->cache().slots == f.model.config.moe.top_k);
}

TEST_CASE(
    "device streaming: a read that fails ends the pass; its sequences take no tokens, and then all is as before") {
  const Fixture& f = fixture("k3-tiny-5l");
  const auto left = std::make_shared<int>(-1);
  K3CpuModel model = f.model;
  for (LayerWeights& layer : model.weights.layers)
    if (layer.experts) layer.experts = std::make_shared<FailingSource>(layer.experts, left);
  for (const bool half : {false, true}) {
    if (small_only() && !half) continue;
    RunnerOptions options;
    options.half = half, options.slots = options.max_logit_rows = 3, options.max_rows = 48;
    const size floor = floor_of(model, options);
    const size vocab = model.config.vocab_size;
    const Passes expected = decode(*make_device_runner(f.model, options), 3, 2, vocab);
    for (const size memory : {floor, 4 * floor})
      for (const int reads : {0, 1, 5, 17}) {
        if (small_only() && (reads != 5 || memory != floor)) continue;
        CAPTURE(half, memory, reads);
        options.expert_memory = memory;
        *left = -1;
        auto runner = make_device_runner(model, options);
        *left = reads;
        CHECK_THROWS_AS(decode(*runner, 3, 2, vocab), format_error);
        CHECK(runner->slot_status(0) == RowStatus::interrupted);
        const std::vector<id> one = {1}, slot = {0};
        const std::vector<size> position = {runner->position(0)};
        CHECK_THROWS_AS(runner->forward({view(one), view(slot), view(position), {}}), invalid_argument);
        *left = -1;
        for (size s = 0; s < 3; ++s) runner->reset(s);
        const Passes got = decode(*runner, 3, 2, vocab);
        check(same_bits(got.logits, expected.logits));
        CHECK((got.caches == expected.caches));
      }
  }
  CHECK(left_behind().empty());
}

TEST_CASE("device streaming: a file that is cut while it is open ends decoding with its place") {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("k3_streaming_" + std::to_string(std::random_device{}()));
  fs::copy(data_path("k3-tiny-5l"), folder);
  {
    const StreamedModel streamed = stream_pretrained(folder.string(), {.readers = 2, .window = 8, .allocate = pinned});
    RunnerOptions options;
    const auto size_of_slots = floor_of(streamed.model, options);
    options.expert_memory = size_of_slots;
    auto runner = make_device_runner(streamed.model, options);
    const std::vector<id> prompt = fixture("k3-tiny-5l").ids(1);
    feed(*runner, 0, prompt, 0, 2, true);
    CHECK(runner->status(0) == RowStatus::ok);
    // Nothing but experts is read any more: all files may go.
    for (const auto& entry : fs::directory_iterator(folder))
      if (entry.path().extension() == ".safetensors") fs::resize_file(entry.path(), 4096);
    std::string said;
    try {
      for (size i = 2; i < 6; ++i) feed(*runner, 0, prompt, i, 1, true);
    } catch (const format_error& problem) {
      said = problem.what();
    }
    INFO(said);
    CHECK(said.find("the file ends here") != said.npos);
    CHECK(said.find(".experts.") != said.npos);
    CHECK(runner->slot_status(0) == RowStatus::interrupted);
  }
  fs::remove_all(folder);
}

TEST_CASE("device upload: many threads bring the same bytes as one, and what a read throws") {
  for (const size bytes : {size{0}, size{5}, size{3} << 20, (size{40} << 20) + 123}) {
    if (small_only() && bytes == size{3} << 20) continue;
    CAPTURE(bytes);
    CHECK(wrong_after_upload(bytes, false) == 0);
  }
  CHECK_THROWS_AS(wrong_after_upload(size{40} << 20, true), std::runtime_error);
  CHECK(left_behind().empty());
}
