// SPDX-License-Identifier: Apache-2.0
// Batches that a device decoder cannot take: refused by name before anything changes, and the decoder goes on.

#include <limits>

#include "cuda/decoder_device.hpp"
#include "cuda/model_device.hpp"
#include "cuda/small_model.hpp"
#include "support/thrown_by.hpp"

using namespace k3;
using namespace k3::test;

namespace {

constexpr size slots = 3, capacity = 8, max_rows = 6, max_logit_rows = 4;

struct Batch {
  std::vector<id> tokens, slots;
  std::vector<size> positions, wanted;
  DecoderBatch view_of() const { return {view(tokens), view(slots), view(positions), view(wanted)}; }
};

/// A batch that is refused, and the argument that is named for it.
struct Refused {
  const char* why;
  Batch batch;
  std::string argument;
};

/// Slot 0 stands at position 3, slot 1 at 7 of 8, slot 2 at 0; `vocab` ids.
std::vector<Refused> refused_batches(id vocab) {
  const std::vector<size> none;
  return {
      {"an id below zero", {{1, -1}, {0, 2}, {3, 0}, {0, 1}}, "tokens[1]"},
      {"an id that is the vocabulary's size", {{1, vocab}, {0, 2}, {3, 0}, {0, 1}}, "tokens[1]"},
      {"the largest id there is", {{2147483647}, {0}, {3}, {0}}, "tokens[0]"},
      {"a slot below the padding's", {{1, 1}, {0, -2}, {3, 0}, {0, 1}}, "slots[1]"},
      {"a slot that is the number of slots", {{1, 1}, {0, 3}, {3, 0}, {0, 1}}, "slots[1]"},
      {"a position in front of the next", {{1}, {0}, {2}, {0}}, "positions[0]"},
      {"a position behind the next", {{1, 1}, {2, 0}, {0, 4}, {0, 1}}, "positions[1]"},
      {"a position far out", {{1}, {0}, {~size{0}}, {0}}, "positions[0]"},
      {"two tokens with the same position", {{1, 2}, {0, 0}, {3, 3}, none}, "positions[1]"},
      {"a token more than the cache holds", {{1, 2}, {1, 1}, {7, 8}, {1}}, "positions[1]"},
      {"rows of a sequence apart", {{1, 2, 3}, {0, 2, 0}, {3, 0, 4}, none}, "slots[2]"},
      {"more rows than a pass takes",
       {{1, 2, 3, 4, 5, 6, 7}, {2, 2, 2, 2, 2, 2, 2}, {0, 1, 2, 3, 4, 5, 6}, none},
       "tokens"},
      {"no rows", {{}, {}, {}, none}, "tokens"},
      {"more logits than a pass gives",
       {{1, 2, 3, 4, 5}, {2, 2, 2, 2, 2}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4}},
       "logit_rows"},
      {"logits of a row that is not there", {{1}, {0}, {3}, {1}}, "logit_rows[0]"},
      {"logits out of order", {{1, 2}, {0, 0}, {3, 4}, {1, 0}}, "logit_rows[1]"},
      {"fewer slots than tokens", {{1, 2}, {0}, {3, 4}, none}, "slots"},
      {"fewer positions than tokens", {{1, 2}, {0, 0}, {3}, none}, "positions"},
  };
}

/// A runner whose slots stand at 3, 7 and 0; the last pass wanted one row.
std::unique_ptr<DeviceRunner> started(const K3CpuModel& model, bool half, bool graphs) {
  RunnerOptions options;
  options.half = half, options.graphs = graphs, options.slots = slots, options.capacity = capacity;
  options.max_rows = max_rows, options.max_logit_rows = max_logit_rows;
  auto runner = make_device_runner(model, options);
  feed(*runner, 1, {3, 1, 4, 1, 5, 9}, 0, 6, false);
  feed(*runner, 0, {2, 7, 1}, 0, 3, false);
  feed(*runner, 1, {3, 1, 4, 1, 5, 9, 2}, 6, 1, true);
  return runner;
}

std::vector<std::vector<unsigned char>> bytes_of(DeviceRunner& runner) {
  std::vector<std::vector<unsigned char>> all;
  for (size slot = 0; slot < slots; ++slot) all.push_back(runner.to_bytes(slot));
  return all;
}

}  // namespace

TEST_CASE("device decoder: bad ids, slots, positions and full caches are refused by name and change nothing") {
  const Subject subject = subjects(0).front();
  const id vocab = static_cast<id>(subject.model->config.vocab_size);
  for (const bool half : all_or_few<bool>({false, true}, {true}))
    for (const bool graphs : all_or_few<bool>({true, false}, {true})) {
      auto runner = started(*subject.model, half, graphs), untouched = started(*subject.model, half, graphs);
      const auto before = bytes_of(*runner);
      const std::vector<float> logits = runner->logits();
      for (const Refused& bad : refused_batches(vocab)) {
        INFO(bad.why << (half ? ", bf16" : ", float") << (graphs ? "" : ", uncaptured"));
        CHECK(thrown_by([&] { runner->forward(bad.batch.view_of()); }) == "Decoder::forward/" + bad.argument);
        CHECK(left_behind().empty());
        for (size slot = 0; slot < slots; ++slot) CHECK(runner->slot_status(slot) == RowStatus::ok);
        // The pass before it still has its results.
        check(same_bits(runner->logits(), logits));
        CHECK(runner->argmax(0) == untouched->argmax(0));
      }
      CHECK(runner->position(0) == 3);
      CHECK(runner->position(1) == 7);
      CHECK(runner->position(2) == 0);
      CHECK((bytes_of(*runner) == before));
      const auto longer = [&] {
        const Batch one{{1}, {0}, {0}, {0}};
        runner->forward_into_cache(one.view_of(), capacity + 1);
      };
      CHECK(thrown_by(longer) == "DeviceDecoder::forward/the cache's capacity");

      // Both go on alike: a step of all sequences, which fills slot 1's cache, and one of those that have room.
      for (DeviceRunner* one : {runner.get(), untouched.get()}) {
        const Batch all{{5, 6, 7}, {1, 2, 0}, {7, 0, 3}, {0, 1, 2}},
            rest{{8, 3, 9}, {2, pad_slot, 0}, {1, 5, 4}, {0, 1, 2}};
        one->forward(all.view_of());
        one->forward(rest.view_of());
      }
      check(same_bits(runner->logits(), untouched->logits()));
      CHECK((bytes_of(*runner) == bytes_of(*untouched)));
      const Batch full{{1}, {1}, {8}, {0}};
      CHECK(thrown_by([&] { runner->forward(full.view_of()); }) == "Decoder::forward/positions[0]");
      CHECK(runner->position(1) == capacity);
      CHECK(runner->slot_status(1) == RowStatus::ok);
      // Reset, the full sequence begins again.
      runner->reset(1);
      feed(*runner, 1, {3, 1}, 0, 2, true);
      CHECK(runner->status(0) == RowStatus::ok);
    }
}

TEST_CASE("device decoder: sizes and ablations that cannot be are refused by name when it is made") {
  const Subject subject = subjects(0).front();
  const auto refused = [&](auto&& change) {
    RunnerOptions options;
    change(options);
    return thrown_by([&] { make_device_runner(*subject.model, options); });
  };
  const auto refused_fault = [&](auto&& change) {
    return refused([&](RunnerOptions& options) { change(options.ablation); });
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(refused([](RunnerOptions& o) { o.max_rows = 0; }) == "DeviceDecoder/max_rows");
  CHECK(refused([](RunnerOptions& o) { o.max_rows = size{1} << 31; }) == "DeviceDecoder/max_rows");
  CHECK(refused([](RunnerOptions& o) { o.max_logit_rows = 0; }) == "DeviceDecoder/max_logit_rows");
  CHECK(refused([](RunnerOptions& o) { o.max_logit_rows = o.max_rows + 1; }) == "DeviceDecoder/max_logit_rows");
  CHECK(refused([](RunnerOptions& o) { o.slots = 0; }) == "HybridCache/slots");
  CHECK(refused([](RunnerOptions& o) { o.capacity = 0; }) == "MlaDeviceWorkspace/capacity");
  for (const float mix : {-0.5f, 1.5f, nan})
    CHECK(refused_fault([&](Ablation& a) { a.attnres_mix = mix; }) == "DeviceDecoder/ablation.attnres_mix");
  CHECK(refused_fault([&](Ablation& a) { a.force_expert = subject.model->config.moe.n_routed; }) ==
        "DeviceDecoder/ablation.force_expert");
  CHECK(refused_fault([&](Ablation& a) { a.skip_layer = subject.model->graph.layers.size(); }) ==
        "DeviceDecoder/ablation.skip_layer");
  CHECK(refused_fault([](Ablation& a) { a.o_proj_tp = 2; }) == "DeviceDecoder/ablation.o_proj_tp");
  CHECK(left_behind().empty());
}

TEST_CASE("device decoder: rows and indices that are not there are refused, results stay") {
  const Subject subject = subjects(0).front();
  auto runner = started(*subject.model, true, true);
  const std::vector<float> logits = runner->logits();
  CHECK(thrown_by([&] { runner->logits_row(1); }) == "DeviceDecoder::logits_row/index");
  CHECK(thrown_by([&] { runner->status(1); }) == "DeviceDecoder::status/index");
  CHECK(thrown_by([&] { runner->argmax(~size{0}); }) == "DeviceDecoder::status/index");
  CHECK(thrown_by([&] { runner->reset(slots); }) != "nothing thrown");
  CHECK(thrown_by([&] { runner->to_bytes(slots); }) != "nothing thrown");
  CHECK(thrown_by([&] { runner->from_bytes(slots, runner->to_bytes(0)); }) != "nothing thrown");
  check(same_bits(runner->logits(), logits));
  CHECK(runner->position(0) == 3);
}
