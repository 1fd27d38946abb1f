// SPDX-License-Identifier: Apache-2.0
// Several continuations of one beginning, which is computed once: prefix reuse. Usage: snapshot [MODEL_DIR]
#include <iostream>

#include <k3/io/checkpoint.hpp>
#include <k3/io/tokenizer.hpp>
#include <k3/model/greedy_decode.hpp>

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : "examples/data/austen";
  const k3::K3CpuModel model = k3::from_pretrained(folder);
  const k3::Tokenizer tokenizer = k3::Tokenizer::from_directory(folder);
  const std::vector<k3::id> prefix = tokenizer.encode("It is a truth universally acknowledged, that");
  const std::vector<std::string> endings{" a single man", " Emma", " no one"};
  std::vector<k3::GreedyResult<float>> results;

  // example-begin snapshot
  k3::Decoder<k3::Fp32> decoder(k3::host{}, model);
  k3::HybridCache<k3::Fp32> cache = decoder.make_cache(1, 256);  // one sequence of up to 256 positions
  k3::prefill(decoder, cache, 0, k3::view(prefix));
  const k3::CacheSnapshot<k3::Fp32> kept = cache.snapshot(0);

  for (const std::string& ending : endings) {
    const std::vector<k3::id> more = tokenizer.encode(ending);
    cache.restore(0, kept);
    results.push_back(k3::greedy_decode(decoder, cache, 0, k3::view(more), {.max_new = 12, .keep_logits = true}));
    std::cout << "..." << ending << "|" << tokenizer.decode(results.back().tokens) << "\n";
  }
  // example-end snapshot

  // The same from the start: not only these tokens, all logits must agree bit for bit.
  bool same = true;
  for (std::size_t i = 0; i < endings.size(); ++i) {
    const std::vector<k3::id> more = tokenizer.encode(endings[i]);
    std::vector<k3::id> whole = prefix;
    whole.insert(whole.end(), more.begin(), more.end());
    const auto fresh = k3::greedy_decode(k3::host{}, model, whole, {.max_new = 12, .keep_logits = true});
    same = same && fresh.tokens == results[i].tokens && fresh.logits == results[i].logits;
  }
  std::cout << prefix.size() << " tokens computed once, kept in " << kept.to_bytes().size()
            << " bytes; against decoding from the start: " << (same ? "the same bits" : "DIFFERENT") << "\n";
  return same ? 0 : 1;
} catch (const std::exception& problem) {
  std::cerr << "snapshot: " << problem.what() << "\n";
  return 1;
}
