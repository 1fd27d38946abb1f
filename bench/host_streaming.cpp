// SPDX-License-Identifier: Apache-2.0
// Streaming of experts: bytes per second through StreamedExperts against plain large reads of the same files, cold
// where the system lets go of cached pages, and warm; decoding fully cached against decoding from the file maps; hit
// rates.
//   host_streaming MODEL_DIR [readers [bytes of a read]]

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <k3/io/checkpoint.hpp>
#include <k3/model/greedy_decode.hpp>

#include "streaming_files.hpp"

namespace {

using namespace k3;
using namespace k3::bench;

/// Every expert of every layer once, in the way a decoder asks: top_k announced, then used in turn; GB/s.
double streamed_reads(const std::string& folder, const StreamingOptions& options, bool cold) {
  const StreamedModel streamed = stream_pretrained(folder, options);
  const size k = streamed.model.config.moe.top_k;
  const auto* const storage = static_cast<const detail::CheckpointStorage*>(streamed.model.storage.get());
  // The slots' pages are there before the clock runs, as they are after the first tokens of a decoder.
  const auto pass = [&] {
    for (const LayerWeights& layer : streamed.model.weights.layers)
      for (size e = 0; layer.experts && e < layer.experts->size(); e += k) {
        std::vector<size> ids;
        for (size i = e; i < detail::smaller(e + k, layer.experts->size()); ++i) ids.push_back(i);
        layer.experts->need(ids.data(), ids.size());
        for (const size id : ids) {
          layer.experts->acquire(id);
          layer.experts->release(id);
        }
      }
  };
  pass();
  if (cold) drop_cached_pages(*storage->files);
  const std::uint64_t before = streamed.experts->statistics().bytes_read;
  const double seconds = seconds_of(pass);
  return static_cast<double>(streamed.experts->statistics().bytes_read - before) / seconds / 1e9;
}

/// Seconds for `count` tokens after a first few: the median of five runs.
double token_seconds(const K3CpuModel& model, size count, int threads) {
  std::vector<double> times;
  Decoder<Fp32> decoder(host{threads}, model, 8, 1);
  for (int run = 0; run < 6; ++run) {
    HybridCache<Fp32> cache = decoder.make_cache(1, count + 8);
    const std::vector<id> prompt{1, 2, 3, 4};
    prefill(decoder, cache, 0, view(prompt));
    const double seconds =
        seconds_of([&] { greedy_decode(decoder, cache, 0, view(prompt), {count, {}, false}, [](id) {}); });
    if (run > 0) times.push_back(seconds / static_cast<double>(count));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s MODEL_DIR [readers [bytes of a read]]\n", argv[0]);
    return 2;
  }
  const std::string folder = argv[1];
  const int readers = argc > 2 ? std::atoi(argv[2]) : StreamingOptions{}.readers;
  const size read_bytes = argc > 3 ? static_cast<size>(std::atoll(argv[3])) : StreamingOptions{}.read_bytes;
  constexpr size everything = ~size{0} >> 1;
  const K3CpuModel mapped = from_pretrained(folder);
  const auto& files = *static_cast<const detail::CheckpointStorage*>(mapped.storage.get())->files;
  const StreamedModel all = stream_pretrained(folder, {everything, readers, read_bytes});
  const size slot = all.experts->slot_bytes(), floor = all.experts->floor(), slots = all.experts->slots();
  std::printf("%zu experts of %.2f MB, %.1f MB in all; floor %.2f MB; %d readers of %zu bytes\n", slots,
              static_cast<double>(slot) / 1e6, static_cast<double>(all.experts->memory()) / 1e6,
              static_cast<double>(floor) / 1e6, readers, read_bytes);
  for (const bool cold : {true, false}) {
    double best_plain = 0, best_streamed = 0;
    for (int run = 0; run < 3; ++run) {
      if (cold) drop_cached_pages(files);
      best_plain = (std::max)(best_plain, plain_reads(files, readers));
      best_streamed = (std::max)(best_streamed, streamed_reads(folder, {2 * floor, readers, read_bytes}, cold));
    }
    std::printf("%s: plain reads %.2f GB/s, experts %.2f GB/s, %.0f %%\n",
                cold ? "after POSIX_FADV_DONTNEED" : "files in the page cache", best_plain, best_streamed,
                100 * best_streamed / best_plain);
  }
  const size count = slot > (size{1} << 20) ? 8 : 64;
  const double resident = token_seconds(mapped, count, 1), cached = token_seconds(all.model, count, 1);
  std::printf("one thread: mapped %.1f us a token, streamed with all in memory %.1f us, %.1f %% as fast\n",
              1e6 * resident, 1e6 * cached, 100 * resident / cached);
  for (const size share : {size{50}, size{25}, size{10}, size{0}}) {
    const size memory = detail::larger(floor, slots * share / 100 * slot);
    const StreamedModel streamed = stream_pretrained(folder, {memory, readers, read_bytes});
    const double seconds = token_seconds(streamed.model, count, 1);
    std::printf("%3zu %% of the experts (%zu slots): %.1f us a token, hit rate %.1f %%\n", share,
                streamed.experts->slots(), 1e6 * seconds, 100 * streamed.experts->statistics().hit_rate());
  }
}
