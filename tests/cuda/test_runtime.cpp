// SPDX-License-Identifier: Apache-2.0
// The operations and the decoder as users of the CUDA runtime: streams, captures, errors, memory.

#include "cuda/decoder_device.hpp"
#include "cuda/model_device.hpp"
#include "cuda/runtime_device.hpp"
#include "cuda/small_model.hpp"

using namespace k3;
using namespace k3::test;

namespace {

void check_none(const std::vector<std::string>& faults) {
  for (const std::string& fault : faults) FAIL_CHECK(fault);
  CHECK(operations().size() >= 18);
}

K3CpuModel few_launches() { return small_only() ? make_small_model() : synthetic_small(); }

/// One row of slot 0.
struct Token {
  id token, slot = 0;
  size position, row = 0;
  bool wanted;
  Token(id t, size p, bool w = true) : token(t), position(p), wanted(w) {}
  DecoderBatch batch() const {
    return {view(&token, 1), view(&slot, 1), view(&position, 1), view(&row, wanted ? 1 : 0)};
  }
};

}  // namespace

TEST_CASE("device case 76: calls without rows launch nothing and leave no error") {
  check_none(faults_of_empty_calls());
}

TEST_CASE("device case 75: every operation can be captured, and three replays give what a call gives") {
  check_none(faults_of_capture());
}

TEST_CASE("a capture that is broken off by an exception leaves a stream that works") {
  check_none(faults_of_abandoned_captures());
}

TEST_CASE("device case 77: operations are ordered on their stream, beside another stream's capture") {
  check_none(faults_of_order(!small_only()));
}

TEST_CASE("the first CUDA error is the one that is thrown, and none is left for a later call") {
  check_none(faults_of_errors());
}

TEST_CASE("device case 77: so is the decoder's pass, and it waits for nothing") {
  const K3CpuModel model = few_launches();
  for (const bool half : all_or_few<bool>({false, true}, {true})) {
    RunnerOptions options;
    options.half = half;
    auto alone = make_device_runner(model, options), busy = make_device_runner(model, options);
    feed(*alone, 0, {3, 14, 1}, 0, 3, true);
    feed(*busy, 0, {3, 14, 1}, 0, 3, true);
    for (size position = 3; position < (small_only() ? 5 : 6);
         ++position) {  // the first of them is captured, the others are replayed
      const Token step(static_cast<id>(position), position);
      alone->forward(step.batch());
      const bool returned = busy->forward_behind_work(step.batch());
      INFO("position " << position << (half ? ", bf16" : ", float"));
      if (!small_only()) CHECK(returned);
      check(same_bits(busy->logits(), alone->logits()));
    }
    CHECK(busy->to_bytes(0) == alone->to_bytes(0));
  }
}

TEST_CASE("device decoder: between the ids going in and the arg-max coming out a pass has nothing but kernels") {
  const std::vector<std::string> faults = faults_of_pass_nodes(few_launches());
  for (const std::string& fault : faults) FAIL_CHECK(fault);
  CHECK(faults.empty());
}

TEST_CASE("device decoder: a pass that CUDA refuses stops its sequences, and nothing else") {
  const K3CpuModel model = few_launches();
  for (const bool wanted : all_or_few<bool>({true, false}, {true})) {  // a step to be captured; a pass that is not
    RunnerOptions options;
    options.slots = 2;
    auto runner = make_device_runner(model, options);
    feed(*runner, 1, {5, 6}, 0, 2, true);
    const std::vector<unsigned char> other = runner->to_bytes(1);
    feed(*runner, 0, {3, 14, 1}, 0, 3, true);
    const Token step(7, 3, wanted);
    CHECK_THROWS_AS(runner->in_invalid_capture([&] { runner->forward(step.batch()); }), cuda_error);
    CHECK(left_behind().empty());
    CHECK(runner->slot_status(0) == RowStatus::interrupted);
    CHECK_THROWS_AS(runner->forward(step.batch()), invalid_argument);
    CHECK_THROWS_AS(runner->to_bytes(0), invalid_argument);
    CHECK_THROWS_AS(runner->argmax(0), invalid_argument);
    CHECK(runner->slot_status(1) == RowStatus::ok);
    CHECK(runner->to_bytes(1) == other);

    // Reset, it is a sequence like any other.
    auto fresh = make_device_runner(model, options);
    runner->reset(0);
    for (DeviceRunner* one : {runner.get(), fresh.get()}) {
      feed(*one, 0, {3, 14, 1}, 0, 3, true);
      one->forward(Token(7, 3).batch());
    }
    check(same_bits(runner->logits(), fresh->logits()));
  }
}

TEST_CASE("device caches: what CUDA refuses of a reset, a restore or a rollback leaves that sequence interrupted") {
  const K3CpuModel model = few_launches();
  RunnerOptions options;
  options.slots = 2;
  auto runner = make_device_runner(model, options);
  feed(*runner, 1, {5, 6}, 0, 2, true);
  const std::vector<unsigned char> other = runner->to_bytes(1);
  feed(*runner, 0, {3, 14, 1}, 0, 3, true);
  const std::vector<unsigned char> bytes = runner->to_bytes(0);
  const std::pair<const char*, std::function<void()>> calls[] = {{"reset", [&] { runner->reset(0); }},
                                                                 {"restore", [&] { runner->from_bytes(0, bytes); }},
                                                                 {"rollback", [&] { runner->back_to_mark(); }}};
  for (const auto& [name, call] : calls) {
    INFO(name);
    runner->from_bytes(0, bytes);
    runner->mark();
    runner->forward(Token(7, 3).batch());
    REQUIRE(runner->slot_status(0) == RowStatus::ok);
    CHECK_THROWS_AS(runner->in_invalid_capture(call), cuda_error);
    CHECK(left_behind().empty());
    CHECK(runner->slot_status(0) == RowStatus::interrupted);
    CHECK_THROWS_AS(runner->to_bytes(0), invalid_argument);
    CHECK_THROWS_AS(runner->forward(Token(8, runner->position(0)).batch()), invalid_argument);
    CHECK(runner->slot_status(1) == RowStatus::ok);
    CHECK(runner->to_bytes(1) == other);
    // Where CUDA takes it, the same call makes the sequence a good one again.
    call();
    CHECK(runner->slot_status(0) == RowStatus::ok);
    if (std::string(name) == "reset")
      CHECK(runner->position(0) == 0);
    else
      CHECK(runner->to_bytes(0) == bytes);
  }
}

TEST_CASE("device caches: reset, snapshots and rollback work beside another stream's capture") {
  const K3CpuModel model = few_launches();
  auto runner = make_device_runner(model, {});
  feed(*runner, 0, {3, 14, 1}, 0, 3, true);
  const std::vector<unsigned char> bytes = runner->to_bytes(0);
  runner->beside_capture([&] {
    runner->mark();
    runner->forward(Token(7, 3).batch());
    runner->back_to_mark();
    CHECK(runner->to_bytes(0) == bytes);
    runner->reset(0);
    CHECK(runner->position(0) == 0);
    runner->from_bytes(0, bytes);
  });
  CHECK(runner->to_bytes(0) == bytes);
  CHECK(left_behind().empty());
}

TEST_CASE("what was moved from is empty and refused, and what it went to goes on") {
  const std::vector<std::string> faults = faults_of_moved_from(few_launches());
  for (const std::string& fault : faults) FAIL_CHECK(fault);
  CHECK(faults.empty());
}

TEST_CASE("memory that is not there: buffers and decoders say what they need and what is free") {
  constexpr size bytes = size{1} << 50, rows = size{1} << 18, vocab = size{1} << 19;
  const std::string free = " of " + std::to_string(total_bytes()) + " are free";
  const std::string buffer = refuse_buffer(bytes);
  INFO(buffer);
  CHECK(buffer.find("cudaMalloc of " + std::to_string(bytes) + " bytes failed: ") != std::string::npos);
  CHECK(buffer.find(free) != std::string::npos);
  const std::string decoder = refuse_decoder(make_small_model({8, 8, 8, 4, 2, 1, {}, true, true, 1.0f}, vocab), rows);
  INFO(decoder);
  CHECK(decoder.find("DeviceDecoder: a workspace for passes of up to " + std::to_string(rows) + " rows") == 0);
  CHECK(decoder.find("cudaMalloc of " + std::to_string(4 * rows * vocab) + " bytes failed: ") != std::string::npos);
  CHECK(decoder.find(free) != std::string::npos);
  CHECK(left_behind().empty());
}

TEST_CASE("device decoder: an operation that throws in the middle of a pass, captured or not, stops its sequences") {
  const K3CpuModel model = few_launches();
  for (const bool step : all_or_few<bool>({true, false}, {true})) {
    INFO((step ? "a step" : "a pass"));
    const std::vector<std::string> faults = faults_of_broken_pass(model, step);
    for (const std::string& fault : faults) FAIL_CHECK(fault);
    CHECK(faults.empty());
  }
}

TEST_CASE("device decoder: a pass whose observer throws stops its sequences") {
  const K3CpuModel model = few_launches();
  auto runner = make_device_runner(model, {});
  const Token first(3, 0), second(4, 1);
  runner->forward(first.batch());
  const auto watch = [](const std::string& part, size layer, std::vector<float>&) {
    if (part == "attn_out" && layer == 1) throw std::runtime_error("enough");
  };
  CHECK_THROWS_WITH(runner->forward(second.batch(), watch), "enough");
  CHECK(runner->slot_status(0) == RowStatus::interrupted);
  CHECK(runner->position(0) == 1);
  CHECK(runner->status(0) == RowStatus::interrupted);
  CHECK_THROWS_AS(runner->argmax(0), invalid_argument);
  for (const float logit : runner->logits_row(0)) REQUIRE(logit != logit);
}

TEST_CASE("device decoder: an observer changes no bits") {
  const Subject subject = subjects(2).front();
  for (const bool half : all_or_few<bool>({false, true}, {false})) {
    RunnerOptions options;
    options.half = half;
    auto plain = make_device_runner(*subject.model, options), watched = make_device_runner(*subject.model, options);
    size seen = 0;
    const size steps = small_only() ? 1 : 4;
    for (size position = 0; position < steps; ++position) {
      const Token step(subject.prompt[position], position);
      plain->forward(step.batch());
      watched->forward(step.batch(), [&](const std::string&, size, std::vector<float>&) { ++seen; });
      check(same_bits(watched->logits(), plain->logits()));
    }
    CHECK(seen > steps * 5 * subject.model->graph.layers.size());
    CHECK(watched->to_bytes(0) == plain->to_bytes(0));
  }
}

TEST_CASE("device caches: with a mixer on the host they hold and take the same bytes") {
  const Subject subject = subjects(1).front();
  const std::vector<id>&ids = subject.prompt, &generated = subject.generated;
  for (const bool half : all_or_few<bool>({false, true}, {false})) {
    RunnerOptions options, kda, mla;
    options.half = kda.half = mla.half = half;
    kda.kda_on_host = mla.mla_on_host = true;
    auto device = make_device_runner(*subject.model, options);
    feed(*device, 0, ids, 0, ids.size(), true);
    const std::vector<unsigned char> prefix = device->to_bytes(0);
    for (const RunnerOptions& with_host : {kda, mla}) {
      auto mixed = make_device_runner(*subject.model, with_host);
      mixed->from_bytes(0, prefix);
      CHECK(mixed->to_bytes(0) == prefix);
      CHECK(mixed->position(0) == ids.size());
      std::vector<id> sequence = ids;
      for (size i = 0; i < 3; ++i) {
        sequence.push_back(generated[i]);
        feed(*mixed, 0, sequence, sequence.size() - 1, 1, true);
        if (!half) CHECK(mixed->argmax(0) == generated[i + 1]);
      }
      const std::vector<float> once = mixed->logits();
      // What a bad blob, a restored one and a rollback do.
      std::vector<unsigned char> cut = prefix;
      cut.pop_back();
      const std::vector<unsigned char> now = mixed->to_bytes(0);
      CHECK_THROWS_AS(mixed->from_bytes(0, cut), format_error);
      CHECK(mixed->to_bytes(0) == now);
      mixed->from_bytes(0, prefix);
      feed(*mixed, 0, sequence, ids.size(), 2, true);
      mixed->mark();
      for (int again = 0; again < 2; ++again) {
        feed(*mixed, 0, sequence, sequence.size() - 1, 1, true);
        check(same_bits(mixed->logits(), once));
        mixed->back_to_mark();
      }
      mixed->reset(0);
      CHECK(mixed->position(0) == 0);
      feed(*mixed, 0, ids, 0, ids.size(), true);
      if (!half) CHECK(mixed->argmax(0) == generated[0]);
    }
  }
}

TEST_CASE("device model: every weight arrives with its bytes, with progress and as planned") {
  for (const Subject& subject : subjects(0)) {
    INFO(subject.name);
    CHECK(fault_of_moved_model(*subject.model) == "");
  }
}

TEST_CASE("device cache: one that does not fit is refused and leaves nothing allocated") {
  const K3CpuModel model = few_launches();
  REQUIRE(model.graph.mla_count() > 0);
  size lost = 0;
  const std::string refusal = refuse_cache(model, 64, size{1} << 30, lost);
  INFO(refusal);
  const auto needed =
      HybridCache<Fp32>::bytes_needed(model.graph, model.config.kda, model.config.mla, 64, size{1} << 30);
  CHECK(refusal.find("64 sequence(s) of up to 1073741824 positions need " + std::to_string(needed) + " bytes, ") !=
        std::string::npos);
  CHECK(refusal.find(" are free") != std::string::npos);
  if (!small_only()) CHECK(lost == 0);  // under the sanitizers other programs share the GPU
  CHECK(left_behind().empty());
}

TEST_CASE("device decoder: steps take no memory") {
  const Subject subject = subjects(1).front();
  auto runner = make_device_runner(*subject.model, {});
  greedy(*runner, subject.prompt, 2);
  runner->reset(0);
  const size before = free_bytes();
  CHECK(greedy(*runner, subject.prompt, small_only() ? 2 : 16).tokens.back() >= 0);
  if (!small_only()) CHECK(free_bytes() == before);
}
