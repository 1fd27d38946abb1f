// SPDX-License-Identifier: Apache-2.0
// Checkpoints larger than the memory that a GPU has for them: loading, and experts that are read on demand, against
// plain reads of the same files and copies from page-locked memory in the same run; decoding with the cache at 100, 50
// and 10 % and at the floor, whose tokens must be the same, and again where the cache has all that the tokens need.
//   cuda_streaming MODEL_DIR... [--cold] [--rates] [--tokens N] [--readers N] [--read-bytes N] [--window N] [--json
//   FILE]

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>

#include <k3/io/checkpoint.hpp>
#include <k3/io/weight_reader.hpp>
#include <k3/k3.cuh>

#include "streaming_files.hpp"

namespace {

using namespace k3;
using namespace k3::bench;

using Json = nlohmann::ordered_json;

struct Arguments {
  std::vector<std::string> folders;
  std::string json;
  bool cold = false, rates = false;
  size tokens = 32, read_bytes = StreamingOptions{}.read_bytes;
  size window = 6;
  int readers = StreamingOptions{}.readers;
};

/// Copies of 16 MB from page-locked memory one behind the other; GB/s.
double copy_rate() {
  constexpr size block = size{16} << 20, count = 64;
  const auto from = pinned_memory(4 * block);
  const DeviceBuffer<std::byte> to(4 * block);
  const DeviceStream stream;
  std::memset(from.get(), 1, 4 * block);
  double best = 0;
  for (int run = 0; run < 4; ++run) {
    const double seconds = seconds_of([&] {
      for (size i = 0; i < count; ++i)
        detail::check_cuda("bench", "copy",
                           cudaMemcpyAsync(to.data() + i % 4 * block, from.get() + i % 4 * block, block,
                                           cudaMemcpyHostToDevice, stream));
      stream.finish();
    });
    best = (std::max)(best, static_cast<double>(count * block) / seconds / 1e9);
  }
  return best;
}

struct Opened {
  std::shared_ptr<const Safetensors> files;
  StreamedModel streamed;
};
Opened open(const Arguments& a, const std::string& folder) {
  Opened opened;
  opened.files = std::make_shared<const Safetensors>(open_safetensors_set(folder));
  StreamingOptions options;
  options.readers = a.readers, options.read_bytes = a.read_bytes;
  options.window = a.window, options.allocate = pinned_memory;
  opened.streamed = stream_pretrained(folder, opened.files, options);
  return opened;
}

/// Every expert of every layer once, as a decoder asks: one token's at a time, through the smallest cache; GB/s.
double expert_rate(const K3CpuModel& model, const ExpertSource* cold_before, const Safetensors& files) {
  const DeviceStream stream;
  const size routed = model.config.moe.n_routed, k = model.config.moe.top_k, layers = model.weights.layers.size();
  std::vector<ExpertTable> tables(layers);
  std::vector<ExpertTable*> named(layers);
  size slot = 0;
  for (size i = 0; i < layers; ++i) {
    if (!model.weights.layers[i].experts) continue;
    named[i] = &tables[i];
    slot = detail::planned_bytes((*model.weights.layers[i].experts)[0]);
  }
  ExpertCache cache(model, named, 2 * k * slot);
  const gpu exec{stream};
  const auto pass = [&](size most) {
    std::vector<size> ids;
    for (size i = 0; i < layers; ++i)
      for (size e = 0; named[i] && e < detail::smaller(most, routed); e += k) {
        ids.clear();
        for (size j = e; j < detail::smaller(e + k, routed); ++j) ids.push_back(j);
        cache.fetch(exec, i, ids).end();
      }
    stream.finish();
  };
  pass(4 * k);
  if (cold_before) drop_cached_pages(files);
  const std::uint64_t before = cache.statistics().bytes_copied;
  const double seconds = seconds_of([&] { pass(routed); });
  return static_cast<double>(cache.statistics().bytes_copied - before) / seconds / 1e9;
}

struct Decoded {
  std::vector<id> tokens, again_tokens;
  double first = 0, per_second = 0, again = 0, bytes_per_second = 0, hit_rate = 0, trunk_rate = 0, experts_rate = 0;
  size slots = 0;
};

/// Loads the model, gives its experts `memory` bytes and decodes; where `again`, twice, so that the second time what
/// the tokens need is there as far as the cache has room.
Decoded decode(const Opened& opened, size memory, size count, bool again) {
  const K3CpuModel& model = opened.streamed.model;
  const DeviceStream stream;
  Decoded result;
  std::unique_ptr<K3DeviceModel> there;
  const double load = seconds_of([&] {
    there = std::make_unique<K3DeviceModel>(WithoutExperts{}, model, NoUploadProgress{}, WeightReader(opened.files));
  });
  result.trunk_rate = static_cast<double>(there->bytes()) / load / 1e9;
  DeviceDecoder<Bf16> decoder(gpu{stream}, *there, 256, 8);
  auto cache = decoder.make_cache(2, 256);
  const double experts = seconds_of([&] { there->place_experts(memory); });
  if (!there->expert_cache())
    result.experts_rate = static_cast<double>(K3DeviceModel::plan_experts(model)) / experts / 1e9;
  const std::vector<id> prompt{11, 7, 5, 3};
  const auto copied = [&] {
    return there->expert_cache() ? static_cast<double>(there->expert_cache()->statistics().bytes_copied) : 0.0;
  };
  const auto run = [&](id slot, std::vector<id>& tokens) {
    const auto start = std::chrono::steady_clock::now();
    auto first = start, last = start;
    double bytes = 0, bytes_end = 0;
    greedy_decode(decoder, cache, slot, view(prompt), {count, {}, false}, [&](id token) {
      last = std::chrono::steady_clock::now();
      bytes_end = copied();
      // Clocks start behind the second token: the first step is captured, kernels are loaded.
      if (tokens.size() == 1) first = last, bytes = bytes_end;
      tokens.push_back(token);
      if (result.first == 0) result.first = std::chrono::duration<double>(last - start).count();
    });
    const double seconds = std::chrono::duration<double>(last - first).count();
    if (slot == 0) result.bytes_per_second = (bytes_end - bytes) / seconds / 1e9;
    return static_cast<double>(count - 2) / seconds;
  };
  result.per_second = run(0, result.tokens);
  if (there->expert_cache()) {
    result.slots = there->expert_cache()->slots();
    result.hit_rate = there->expert_cache()->statistics().hit_rate();
  }
  if (again) result.again = run(1, result.again_tokens);
  return result;
}

double rounded(double value) { return std::round(100 * value) / 100; }

/// Reads, copies and experts on their way to the GPU.
Json rates(const Arguments& a, const Opened& opened) {
  const K3CpuModel& model = opened.streamed.model;
  Json result;
  const double copies = copy_rate();
  if (a.cold) {
    drop_cached_pages(*opened.files);
    const double plain = plain_reads(*opened.files, a.readers);
    const double experts = expert_rate(model, model.weights.layers.back().experts.get(), *opened.files);
    std::printf("pages dropped before: plain reads %.2f GB/s, experts to the GPU %.2f GB/s, %.0f %%\n", plain, experts,
                100 * experts / plain);
    result["dropped_before"] = {{"plain_reads_GBps", rounded(plain)}, {"experts_GBps", rounded(experts)}};
  }
  double plain = 0, experts = 0;
  for (int run = 0; run < 3; ++run) plain = (std::max)(plain, plain_reads(*opened.files, a.readers));
  for (int run = 0; run < 2; ++run) experts = (std::max)(experts, expert_rate(model, nullptr, *opened.files));
  std::printf(
      "files in host memory: copies %.1f GB/s, plain reads %.1f GB/s, experts to the GPU %.1f GB/s: %.0f %% of "
      "the copies, %.0f %% of the plain reads\n",
      copies, plain, experts, 100 * experts / copies, 100 * experts / plain);
  std::fflush(stdout);
  result["copies_GBps"] = rounded(copies);
  result["plain_reads_GBps"] = rounded(plain);
  result["experts_GBps"] = rounded(experts);
  return result;
}

/// Loading and decoding at several sizes of the cache; whether all gave the same tokens.
bool decodes(const Arguments& a, const Opened& opened, size experts, Json& result) {
  const K3CpuModel& model = opened.streamed.model;
  const size all = K3DeviceModel::plan_experts(model), slot = all / experts, floor = model.config.moe.top_k * slot;
  const double copies = result["copies_GBps"];
  std::printf(
      "cache | slots | tokens/s | first token, ms | experts, GB/s | of copies | found there | again, tokens/s\n");
  std::vector<id> expected;
  bool same = true;
  for (const size memory : {all, all - slot, all / 2, all / 10, floor}) {
    const Decoded d = decode(opened, (std::max)(memory, floor), a.tokens, memory == all || memory == all - slot);
    if (expected.empty()) expected = d.tokens;
    const bool equal = d.tokens == expected && (d.again == 0 || d.again_tokens == expected);
    same = same && equal;
    if (d.experts_rate > 0)
      std::printf("  loaded: all but the experts %.1f GB/s, %.1f GB of experts %.1f GB/s\n", d.trunk_rate,
                  static_cast<double>(all) / 1e9, d.experts_rate);
    const double share = 100 * static_cast<double>(memory) / static_cast<double>(all);
    std::printf("%5.1f %% | %zu | %.1f | %.1f | %.1f | %.0f %% | %.1f %% | %.1f%s\n", share, d.slots, d.per_second,
                1e3 * d.first, d.bytes_per_second, 100 * d.bytes_per_second / copies, 100 * d.hit_rate, d.again,
                equal ? "" : " OTHER TOKENS");
    std::fflush(stdout);
    Json row{{"cache_percent", rounded(share)},
             {"slots", d.slots},
             {"tokens_per_s", rounded(d.per_second)},
             {"first_token_ms", rounded(1e3 * d.first)},
             {"experts_GBps", rounded(d.bytes_per_second)},
             {"found_percent", rounded(100 * d.hit_rate)},
             {"again_tokens_per_s", rounded(d.again)},
             {"trunk_loaded_GBps", rounded(d.trunk_rate)},
             {"experts_loaded_GBps", rounded(d.experts_rate)},
             {"same_tokens", equal}};
    result["decoding"].push_back(row);
  }
  return same;
}

bool run(const Arguments& a, const std::string& folder, Json& result) {
  const Opened opened = open(a, folder);
  const K3CpuModel& model = opened.streamed.model;
  size experts = 0, bytes = 0;
  for (const LayerWeights& layer : model.weights.layers) experts += layer.experts ? layer.experts->size() : 0;
  for (const MappedFile& file : opened.files->files()) bytes += file.bytes();
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  const double megabytes = static_cast<double>(opened.streamed.experts->slot_bytes()) / 1e6;
  std::printf(
      "%zu layers, %.1f GB in %zu files, %zu experts of %.2f MB; window on the host %.0f MB; %d readers of %zu "
      "bytes\n",
      model.weights.layers.size(), gigabytes, opened.files->files().size(), experts, megabytes,
      static_cast<double>(opened.streamed.experts->memory()) / 1e6, a.readers, a.read_bytes);
  result = rates(a, opened);
  result["layers"] = model.weights.layers.size();
  result["GB"] = rounded(gigabytes);
  result["experts"] = experts;
  result["expert_MB"] = rounded(megabytes);
  return a.rates || decodes(a, opened, experts, result);
}

/// All of them; whether every one gave the same tokens at every size.
bool run(const Arguments& a) {
  cudaDeviceProp device{};
  detail::check_cuda("bench", "cudaGetDeviceProperties", cudaGetDeviceProperties(&device, 0));
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  Json all{{"gpu", device.name}, {"date", date}, {"tokens", a.tokens}};
  bool same = true;
  for (const std::string& folder : a.folders) {
    Json& one = all["checkpoints"].emplace_back();
    same = run(a, folder, one) && same;
  }
  if (!a.json.empty()) std::ofstream(a.json) << all.dump(1) << '\n';
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto number = [&] { return i + 1 < argc ? std::atoll(argv[++i]) : 0; };
    if (option == "--cold")
      a.cold = true;
    else if (option == "--rates")
      a.rates = true;
    else if (option == "--tokens")
      a.tokens = static_cast<size>(number());
    else if (option == "--readers")
      a.readers = static_cast<int>(number());
    else if (option == "--window")
      a.window = static_cast<size>(number());
    else if (option == "--read-bytes")
      a.read_bytes = static_cast<size>(number());
    else if (option == "--json" && i + 1 < argc)
      a.json = argv[++i];
    else
      a.folders.push_back(option);
  }
  if (a.folders.empty() || a.tokens < 3) {
    std::fprintf(stderr,
                 "usage: %s MODEL_DIR... [--cold] [--rates] [--tokens N] [--readers N] [--read-bytes N] [--window N] "
                 "[--json FILE]\n",
                 argv[0]);
    return 2;
  }
  try {
    return run(a) ? 0 : 1;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
}
