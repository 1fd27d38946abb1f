// SPDX-License-Identifier: Apache-2.0
// Experts that are read on demand into a bounded memory: the same bits at every budget, and what a file that fails
// does.

#include <atomic>
#include <cstdlib>
#include <new>

#include <k3/io/weight_reader.hpp>

#include "io/checkpoint_support.hpp"

// Memory taken with an alignment, as the slots are.
static std::atomic<std::size_t> slot_memory_taken{0};
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto step = static_cast<std::size_t>(alignment);
  slot_memory_taken += bytes;
  void* const memory = std::aligned_alloc(step, (bytes + step - 1) / step * step);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }

using namespace k3;
using namespace k3::test;

namespace {

struct Decoded {
  std::vector<id> tokens;
  std::vector<std::vector<float>> logits;

  bool operator==(const Decoded&) const = default;
};

/// Prompt in batches of up to 32 rows, then token by token.
Decoded decode(const K3CpuModel& model, const std::vector<id>& prompt, size max_new, size rows = 32) {
  Decoder<Fp32> decoder(host{2}, model, rows, 1);
  HybridCache<Fp32> cache = decoder.make_cache(1, prompt.size() + max_new);
  auto result = greedy_decode(decoder, cache, 0, view(prompt), {max_new, {}, true}, [](id) {});
  return {result.tokens, result.logits};
}

std::vector<id> long_prompt(const K3CpuModel& model, size count) {
  std::vector<id> prompt;
  for (size i = 0; i < count; ++i) prompt.push_back(static_cast<id>((i * i * 7 + 3 * i + 1) % model.config.vocab_size));
  return prompt;
}

size moe_layers(const K3CpuModel& model) {
  size count = 0;
  for (const LayerWeights& layer : model.weights.layers) count += layer.spec.mlp == MlpKind::LatentMoe;
  return count;
}

/// Bytes of an expert's slot and of all experts, from the library.
struct Sizes {
  size slot, floor, slots_of_all;
};
Sizes sizes_of(const std::string& folder) {
  const StreamedModel all = stream_pretrained(folder, {.memory = size{1} << 30, .readers = 1});
  return {all.experts->slot_bytes(), all.experts->floor(), all.experts->slots()};
}

}  // namespace

TEST_CASE("streaming: the same bits at every budget", "[streaming]") {
  const std::string folder = GENERATE(test::data_path("k3-tiny-13l"), test::austen_path());
  const int readers = GENERATE(1, 5);
  const size read_bytes = readers == 1 ? size{1} << 20 : 300;
  CAPTURE(folder);
  const K3CpuModel resident = from_pretrained(folder);
  const std::vector<id> prompt = long_prompt(resident, 40);
  const Decoded expected = decode(resident, prompt, 12);
  const Sizes sizes = sizes_of(folder);
  const LatentMoeConfig moe = resident.config.moe;
  CHECK(sizes.floor == moe.top_k * sizes.slot);
  CHECK(sizes.slots_of_all == moe_layers(resident) * moe.n_routed);
  const size all = sizes.slots_of_all * sizes.slot;
  for (const size memory : {sizes.floor, sizes.floor + 1, sizes.floor + sizes.slot, all / 2, all, 2 * all}) {
    CAPTURE(memory, readers, read_bytes);
    const StreamedModel streamed = stream_pretrained(folder, {memory, readers, read_bytes});
    check(streamed.model);
    CHECK(streamed.experts->memory() == std::min(memory / sizes.slot, sizes.slots_of_all) * sizes.slot);
    CHECK((decode(streamed.model, prompt, 12) == expected));
    const StreamingStatistics first = streamed.experts->statistics();
    CHECK(first.misses > 0);
    CHECK(first.bytes_read >= first.misses * (sizes.slot - 2 * detail::ExpertFileLayout::alignment * 6));
    if (memory >= all) {
      // Everything has its place: nothing is read twice.
      CHECK(first.misses <= sizes.slots_of_all);
      CHECK((decode(streamed.model, prompt, 12) == expected));
      CHECK(streamed.experts->statistics().misses == first.misses);
      CHECK(streamed.experts->statistics().bytes_read == first.bytes_read);
    }
  }
}

TEST_CASE("streaming: odd addresses, plain matrices and experts in another order", "[streaming]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const bool plain = GENERATE(false, true), reversed = GENERATE(false, true);
  checkpoint.extra_spaces = GENERATE(0u, 1u, 3u);
  CAPTURE(plain, reversed, checkpoint.extra_spaces);
  if (plain) unpack_experts(checkpoint);
  if (reversed) std::reverse(checkpoint.tensors.begin(), checkpoint.tensors.end());
  const ScratchFolder folder;
  checkpoint.write(folder);
  const Sizes sizes = sizes_of(folder.path);
  const StreamedModel streamed = stream_pretrained(folder.path, {sizes.floor});
  CHECK(storage_of(streamed.model).copies.size() < 200);  // of the trunk's: experts are never copied on opening
  check_decodes(streamed.model, "k3-tiny-5l");
}

TEST_CASE("streaming: a budget below the experts of one token is refused with the floor", "[streaming]") {
  const std::string folder = test::data_path("k3-tiny-13l");
  const Sizes sizes = sizes_of(folder);
  for (const size memory : {size{0}, sizes.floor - 1}) {
    const auto problem = thrown<invalid_argument>([&] { stream_pretrained(folder, {memory}); });
    INFO(problem.what());
    CHECK(problem.operation() == "StreamedExperts");
    CHECK(problem.argument() == "memory");
    CHECK(contains(problem.what(), "at least " + std::to_string(sizes.floor) + " bytes"));
  }
  CHECK_THROWS_AS(stream_pretrained(folder, {sizes.floor, 0}), invalid_argument);
  CHECK_THROWS_AS(stream_pretrained(folder, {sizes.floor, 1, 0}), invalid_argument);
}

namespace {

/// k3-tiny-5l with the experts of the last layer in a file of their own, so that it can be cut while the rest, which is
/// mapped, stays.
MutableCheckpoint with_expert_shard() {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const size shard = checkpoint.shard_count();
  for (StoredTensor& tensor : checkpoint.tensors)
    if (contains(tensor.name, "layers.4.block_sparse_moe.experts.")) tensor.shard = shard;
  return checkpoint;
}

}  // namespace

TEST_CASE("streaming: a file that is cut while it is open ends decoding with its place", "[streaming]") {
  const MutableCheckpoint checkpoint = with_expert_shard();
  const ScratchFolder folder;
  checkpoint.write(folder);
  const Sizes sizes = sizes_of(folder.path);
  const std::string cut = folder / checkpoint.shard_name(checkpoint.shard_count() - 1);
  const bool all = GENERATE(false, true);
  const StreamedModel streamed = stream_pretrained(folder.path, {all ? size{1} << 30 : sizes.floor});
  const std::vector<id> prompt = prompt_of("k3-tiny-5l")["ids"].get<std::vector<id>>();
  const std::uintmax_t whole = std::filesystem::file_size(cut);
  const std::string content = test::read_file(cut);
  Decoder<Fp32> decoder(host{1}, streamed.model, 8, 1);
  std::filesystem::resize_file(cut, whole / 64);
  for (int attempt = 0; attempt < 2; ++attempt) {
    HybridCache<Fp32> cache = decoder.make_cache(1, 64);
    const auto problem = thrown<format_error>([&] { prefill(decoder, cache, 0, view(prompt)); });
    INFO(problem.what());
    CHECK(problem.path() == cut);
    CHECK(contains(problem.tensor(), "layers.4.block_sparse_moe.experts."));
    CHECK(problem.offset() >= whole / 64);
    CHECK(problem.offset() < whole);
    CHECK(contains(problem.what(), "the file ends here"));
  }
  // Whole again, it goes on as if nothing had happened, once each read that failed ahead of its use has said so.
  test::write_file(cut, content);
  const ExpertSource& experts = *streamed.model.weights.layers[4].experts;
  for (size e = 0; e < experts.size(); ++e) {
    try {
      static_cast<void>(experts[e]);
    } catch (const format_error&) {
    }
  }
  check_decodes(streamed.model, "k3-tiny-5l");
}

TEST_CASE("streaming: an expert in many short reads by several threads, each through the same slot", "[streaming]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const bool reversed = GENERATE(false, true);
  if (reversed) std::reverse(checkpoint.tensors.begin(), checkpoint.tensors.end());
  const ScratchFolder folder;
  checkpoint.write(folder);
  const K3CpuModel resident = from_pretrained(folder.path);
  for (const int readers : {1, 4}) {
    const StreamedModel streamed = stream_pretrained(folder.path, {.readers = readers, .read_bytes = 64, .window = 1});
    for (const LayerWeights& layer : streamed.model.weights.layers)
      for (size e = 0; layer.experts && e < layer.experts->size(); ++e) {
        CAPTURE(reversed, readers, layer.spec.index, e);
        const ExpertWeights expected = (*resident.weights.layers[layer.spec.index].experts)[e];
        const ExpertWeights got = layer.experts->acquire(e);
        const auto same = [](const AnyMatrix<>& g, const AnyMatrix<>& w) {
          const size codes = g.extents[0] * g.extents[1] / 2;
          return std::memcmp(g.data, w.data, codes) == 0 && std::memcmp(g.scale, w.scale, codes / 16) == 0;
        };
        CHECK((same(got.w1, expected.w1) && same(got.w3, expected.w3) && same(got.w2, expected.w2)));
        layer.experts->release(e);
      }
  }
}

TEST_CASE("streaming: one of an expert's many reads fails", "[streaming]") {
  const MutableCheckpoint checkpoint = with_expert_shard();
  const ScratchFolder folder;
  checkpoint.write(folder);
  const std::string cut = folder / checkpoint.shard_name(checkpoint.shard_count() - 1);
  const std::string content = test::read_file(cut);
  const StreamedModel streamed = stream_pretrained(folder.path, {.readers = 3, .read_bytes = 64, .window = 2});
  const ExpertSource& experts = *streamed.model.weights.layers[4].experts;
  std::filesystem::resize_file(cut, content.size() / 64);
  for (size e = 0; e < 4; ++e) {
    const auto problem = thrown<format_error>([&] { experts.acquire(e); });
    CHECK(contains(problem.what(), "the file ends here"));
    CHECK(contains(problem.tensor(), "experts." + std::to_string(e) + "."));
  }
  test::write_file(cut, content);
  for (size e = 0; e < 4; ++e) CHECK_NOTHROW(experts[e]);  // nothing is left of the failures
  check_decodes(streamed.model, "k3-tiny-5l");
}

TEST_CASE("streaming: scale byte 255 is refused when the expert is read", "[streaming]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const std::string name = P + "layers.2.block_sparse_moe.experts.5.w1.weight_scale";
  checkpoint.at(name).bytes[7] = '\xff';
  const ScratchFolder folder;
  checkpoint.write(folder);
  const size read_bytes = GENERATE(size{64}, size{1} << 20);  // other reads of the expert, which succeed, come later
  const StreamedModel streamed = stream_pretrained(folder.path, {sizes_of(folder.path).floor, 2, read_bytes});
  const ExpertSource& experts = *streamed.model.weights.layers[2].experts;
  const TensorInfo& tensor = storage_of(streamed.model).files->at(name);
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto problem = thrown<format_error>([&] { static_cast<void>(experts[5]); });
    INFO(problem.what());
    CHECK(problem.tensor() == name);
    CHECK(problem.offset() == tensor.begin + 7);
    CHECK(contains(problem.what(), "scale byte 255"));
  }
  CHECK_NOTHROW(experts[4]);
}

TEST_CASE("streaming: an expert in use stays, the least used goes", "[streaming]") {
  const std::string folder = test::data_path("k3-tiny-13l");
  const Sizes sizes = sizes_of(folder);
  const size k = sizes.floor / sizes.slot;
  REQUIRE(k >= 2);
  const StreamedModel streamed = stream_pretrained(folder, {sizes.floor + sizes.slot});
  const ExpertSource& experts = *streamed.model.weights.layers[1].experts;
  REQUIRE(experts.size() > 2 * k + 1);
  const auto misses = [&] { return streamed.experts->statistics().misses; };
  const auto hits = [&] { return streamed.experts->statistics().hits; };
  const ExpertWeights held = experts.acquire(0);
  const std::string bytes(static_cast<const char*>(held.w1.data), 64);
  for (int i = 0; i < 3; ++i) static_cast<void>(experts[1]);
  for (size e = 2; e < experts.size(); ++e) static_cast<void>(experts[e]);
  CHECK(bytes == std::string(static_cast<const char*>(held.w1.data), 64));
  CHECK(misses() == experts.size());
  CHECK(hits() == 2);
  CHECK(experts[0].w1.data == held.w1.data);
  static_cast<void>(experts[1]);  // used often
  CHECK(hits() == 4);
  CHECK(misses() == experts.size());
  static_cast<void>(experts[2]);  // went long ago
  CHECK(misses() == experts.size() + 1);
  experts.release(0);
  // Announced: read ahead, and not thrown out by each other, nor by what is used less.
  std::vector<size> ids;
  for (size i = 0; i < k; ++i) ids.push_back(k + i);
  const std::uint64_t before = misses();
  experts.need(ids.data(), ids.size());
  for (const size e : ids) {
    experts.acquire(e);
    experts.release(e);
  }
  CHECK(misses() <= before + k);
  CHECK(misses() + hits() == experts.size() + 5 + k);
}

TEST_CASE("streaming: uses count less with time", "[streaming]") {
  detail::UseCounts uses(3, 8);
  for (int i = 0; i < 4; ++i) uses.use(0);
  for (int i = 0; i < 8; ++i) uses.use(1);
  CHECK(uses[1] > 2 * uses[0]);
  for (int i = 0; i < 8; ++i) uses.use(2);
  CHECK(std::abs(uses[2] / uses[1] - 2) < 1e-12);
  for (int i = 0; i < 5000; ++i) uses.use(2);  // past where weights are scaled down
  CHECK(uses[2] == uses[2]);
  CHECK(uses[0] < 1e-90);
}

TEST_CASE("streaming: a window of few slots, in memory that somebody else gives", "[streaming]") {
  const std::string folder = test::data_path("k3-tiny-13l");
  const K3CpuModel resident = from_pretrained(folder);
  const std::vector<id> prompt = long_prompt(resident, 12);
  const Decoded expected = decode(resident, prompt, 4);
  std::vector<std::byte> memory;
  const auto give = [&](size bytes) {
    memory.resize(bytes + 64);
    const size ahead = 64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
    return std::shared_ptr<std::byte>(memory.data() + ahead, [](std::byte*) {});
  };
  for (const size window : {size{1}, size{2}, size{7}}) {
    CAPTURE(window);
    const size before = slot_memory_taken;
    const StreamedModel streamed = stream_pretrained(folder, {.readers = 3, .window = window, .allocate = give});
    CHECK(slot_memory_taken == before);
    CHECK(streamed.experts->slots() == window);
    CHECK(memory.size() == window * streamed.experts->slot_bytes() + 64);
    CHECK((decode(streamed.model, prompt, 4) == expected));
  }
  const auto nothing = [](size) { return std::shared_ptr<std::byte>(); };
  const auto problem = thrown<invalid_argument>([&] { stream_pretrained(folder, {.window = 3, .allocate = nothing}); });
  CHECK(problem.argument() == "memory");
}

TEST_CASE("streaming: the rest of the model through its reader, and a file that has become shorter", "[streaming]") {
  const ScratchFolder folder;
  const MutableCheckpoint checkpoint("k3-tiny-5l");
  checkpoint.write(folder);
  const auto files = std::make_shared<const Safetensors>(open_safetensors_set(folder.path));
  const WeightReader read(files);
  const MappedFile& file = files->files()[0];
  std::vector<std::byte> got(300), here(300, std::byte{7});
  read(file.data() + 1001, got.size(), got.data());
  CHECK(std::memcmp(got.data(), file.data() + 1001, got.size()) == 0);
  read(here.data(), got.size(), got.data());
  CHECK((got == here));
  std::filesystem::resize_file(file.path(), 1100);
  const auto problem = thrown<format_error>([&] { read(file.data() + 1001, got.size(), got.data()); });
  INFO(problem.what());
  CHECK(problem.path() == file.path());
  CHECK(problem.offset() == 1100);
  CHECK(contains(problem.what(), "the file ends here"));
}

TEST_CASE("streaming: several decoders share one budget", "[streaming]") {
  const std::string folder = test::data_path("k3-tiny-13l");
  const K3CpuModel resident = from_pretrained(folder);
  const std::vector<id> prompt = long_prompt(resident, 24);
  const Decoded expected = decode(resident, prompt, 6);
  const Sizes sizes = sizes_of(folder);
  for (const size memory : {sizes.floor, 9 * sizes.floor}) {
    CAPTURE(memory);
    const StreamedModel streamed = stream_pretrained(folder, {memory, 3});
    std::vector<Decoded> got(4);
    std::vector<std::thread> threads;
    for (Decoded& one : got) threads.emplace_back([&] { one = decode(streamed.model, prompt, 6); });
    for (std::thread& thread : threads) thread.join();
    for (const Decoded& one : got) CHECK((one == expected));
  }
}

TEST_CASE("streaming: experts are never mapped into memory", "[streaming]") {
  const ScratchFolder folder;
  const MutableCheckpoint checkpoint = with_expert_shard();
  checkpoint.write(folder);
  const std::string shard = folder / checkpoint.shard_name(checkpoint.shard_count() - 1);
  const size floor = sizes_of(folder.path).floor, before = slot_memory_taken;
  const StreamedModel streamed = stream_pretrained(folder.path, {floor});
  CHECK(slot_memory_taken - before == floor);
  const size opened = resident_bytes(shard);  // pages around the header
  check_decodes(streamed.model, "k3-tiny-5l");
  CHECK(resident_bytes(shard) == opened);
  // Whatever is asked for lies in that memory.
  std::uintptr_t first = ~std::uintptr_t{0}, last = 0;
  for_each_weight(streamed.model, [&](const std::string& name, const void* data, ElementType) {
    if (!contains(name, ".experts.")) return;
    first = std::min(first, reinterpret_cast<std::uintptr_t>(data));
    last = std::max(last, reinterpret_cast<std::uintptr_t>(data));
  });
  CHECK(last - first < floor);
  const K3CpuModel mapped = from_pretrained(folder.path);
  check_decodes(mapped, "k3-tiny-5l");
  CHECK(resident_bytes(shard) > opened + (16 << 10));  // what the check above would show otherwise
}
