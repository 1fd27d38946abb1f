// SPDX-License-Identifier: Apache-2.0
// Inside the device decoder: in float every inner value of the references; in bf16 each layer on the references' own
// stream against the host's bf16, and the trained model's likelihood of a passage it has not seen.

#include <map>
#include <set>

#include "cuda/decoder_device.hpp"
#include "cuda/device_test.hpp"
#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

using Values = std::map<std::string, std::vector<double>>;

std::string tensor_name(const std::string& part, size layer) {
  const bool once = part == "embed" || part == "final_hidden" || part == "output_attn_res_probs";
  return once ? part : "layer" + std::to_string(layer) + "." + part;
}

/// A batch of `rows` tokens of slot 0, all logits wanted.
struct Rows {
  std::vector<id> tokens, slots;
  std::vector<size> positions, wanted;
  Rows(const std::vector<id>& ids, size first, size rows) : slots(rows, 0) {
    for (size row = 0; row < rows; ++row) {
      tokens.push_back(ids[first + row]);
      positions.push_back(first + row);
      wanted.push_back(row);
    }
  }
  DecoderBatch batch() const { return {view(tokens), view(slots), view(positions), view(wanted)}; }
};

/// What the cache of a sequence holds, by the references' names.
template <class P>
void add_cache(const Fixture& f, const std::vector<unsigned char>& bytes, Values& seen) {
  const CacheSnapshot<P> snapshot = CacheSnapshot<P>::from_bytes(bytes.data(), bytes.size());
  const size lora = f.model.config.mla.kv_lora_rank, width = lora + f.model.config.mla.qk_rope_head_dim;
  for (size layer = 0; layer < snapshot.layers.size(); ++layer) {
    const std::string prefix = "layer" + std::to_string(layer) + ".";
    const LayerSnapshot<P>& from = snapshot.layers[layer];
    for (const auto value : from.recurrent) seen[prefix + "kda_state"].push_back(static_cast<double>(value));
    for (const auto value : from.conv) seen[prefix + "conv_state"].push_back(static_cast<double>(value));
    for (size i = 0; i < from.latents.size(); ++i)
      seen[prefix + (i % width < lora ? "mla_latent" : "mla_k_rope")].push_back(static_cast<double>(from.latents[i]));
  }
}

/// The inner values of the third prompt, `rows` tokens a pass. Bound: measured 1.3e-5 of a tensor's largest element.
void check_inner_values(const Fixture& f, size rows) {
  const std::vector<id> ids = f.ids(2);
  RunnerOptions options;
  options.max_rows = options.max_logit_rows = rows;
  auto runner = make_device_runner(f.model, options);
  Values seen;
  for (size done = 0; done < ids.size(); done += rows) {
    const Rows part(ids, done, std::min(rows, ids.size() - done));
    runner->forward(part.batch(), [&](const std::string& name, size layer, std::vector<float>& values) {
      auto& to = seen[tensor_name(name, layer)];
      to.insert(to.end(), values.begin(), values.end());
    });
    const std::vector<float> logits = runner->logits();
    seen["logits"].insert(seen["logits"].end(), logits.begin(), logits.end());
  }
  seen["output_mixed"] = seen["layer" + std::to_string(f.model.graph.layers.size()) + ".mixed"];
  add_cache<Fp32>(f, runner->to_bytes(0), seen);
  size compared = 0;
  for (const TensorInfo& tensor : f.inner->tensors()) {
    const std::string name(tensor.name);
    if (name == "prompt_ids") continue;
    INFO(f.name << ", " << rows << " rows a pass: " << name);
    REQUIRE(seen.count(name) == 1);
    check(compare(seen[name], f.values(name), 4e-5, 0, true));
    ++compared;
  }
  CHECK(compared > 25);
}

double relative_l2(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (size i = 0; i < got.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

/// How far apart the scores of the last chosen expert and the first one that was not are, for each row of logits.
std::vector<double> selection_gaps(const AnyVector<>& bias, size k, const std::vector<double>& logits) {
  const size experts = bias.extent(0);
  std::vector<double> gaps;
  detail::with_typed(bias, [&](const auto& b) {
    for (size row = 0; row < logits.size() / experts; ++row) {
      std::vector<double> scores;
      for (size e = 0; e < experts; ++e)
        scores.push_back(1 / (1 + std::exp(-logits[row * experts + e])) + static_cast<double>(b(e)));
      std::sort(scores.begin(), scores.end(), std::greater<>());
      gaps.push_back(k < experts ? scores[k - 1] - scores[k] : 1.0);
    }
  });
  return gaps;
}

/// Every layer in bf16 on the reference's stream, on the device and on the host. Rows whose experts differ where the
/// choice is that close are left out of what follows the choice. Bounds: measured 3.9e-3 for a sublayer's
/// output, 2.4e-3 for the stream behind a layer. Returns the number of tensors compared.
size check_bf16_layers(const Fixture& f) {
  const std::vector<id> ids = f.ids(2);
  const size rows = ids.size(), hidden = f.model.config.hidden_size;
  const Rows all(ids, 0, rows);
  std::map<size, std::vector<double>> references;  // by layer: the stream behind it
  for (size layer = 0; layer < f.model.graph.layers.size(); ++layer)
    references[layer] = f.values("layer" + std::to_string(layer) + ".residual");

  Values want, got;
  Decoder<Bf16> decoder(host{1}, f.model, rows, rows);
  HybridCache<Bf16> cache = decoder.make_cache(1, rows);
  decoder.forward(cache, all.batch(), [&](const char* part, size layer, const auto& values) {
    const std::string name = tensor_name(part, layer);
    want[name] = elements(values);
    if constexpr (std::is_same_v<decltype(values.data), bf16*>)
      if (std::string(part) == "residual")
        for (size i = 0; i < rows * hidden; ++i) values.data[i] = bf16(references[layer][i]);
  });
  RunnerOptions options;
  options.half = true;
  options.max_rows = options.max_logit_rows = rows;
  auto runner = make_device_runner(f.model, options);
  runner->forward(all.batch(), [&](const std::string& part, size layer, std::vector<float>& values) {
    got[tensor_name(part, layer)].assign(values.begin(), values.end());
    if (part == "residual")
      for (size i = 0; i < values.size(); ++i) values[i] = static_cast<float>(references[layer][i]);
  });

  size compared = 0;
  for (const K3LayerSpec& layer : f.model.graph.layers) {
    const std::string prefix = "layer" + std::to_string(layer.index) + ".";
    std::set<size> skipped;
    if (layer.mlp == MlpKind::LatentMoe) {
      const size k = f.model.config.moe.top_k;
      const std::vector<double>&mine = got[prefix + "topk_ids"], &theirs = want[prefix + "topk_ids"];
      const std::vector<double> gaps = selection_gaps(f.model.weights.layers[layer.index].moe.e_score_correction_bias,
                                                      k, want[prefix + "router_logits"]);
      REQUIRE(mine.size() == rows * k);
      for (size row = 0; row < rows; ++row) {
        const auto chosen = [&](const std::vector<double>& ids_of) {
          return std::set<double>(ids_of.begin() + static_cast<std::ptrdiff_t>(row * k),
                                  ids_of.begin() + static_cast<std::ptrdiff_t>((row + 1) * k));
        };
        if (chosen(mine) == chosen(theirs)) continue;
        INFO(f.name << " " << prefix << " row " << row << ": other experts at a gap of " << gaps[row]);
        CHECK(gaps[row] <= 1e-2);
        skipped.insert(row);
      }
      CHECK(skipped.size() * 10 <= rows);
    }
    for (const char* part : {"attn_out", "ffn_out", "residual"}) {
      const std::vector<double>&mine = got[prefix + part], &theirs = want[prefix + part];
      REQUIRE(mine.size() == theirs.size());
      std::vector<double> a, b;
      for (size row = 0; row < rows; ++row) {
        if (skipped.count(row) && std::string(part) != "attn_out") continue;
        a.insert(a.end(), mine.begin() + static_cast<std::ptrdiff_t>(row * hidden),
                 mine.begin() + static_cast<std::ptrdiff_t>((row + 1) * hidden));
        b.insert(b.end(), theirs.begin() + static_cast<std::ptrdiff_t>(row * hidden),
                 theirs.begin() + static_cast<std::ptrdiff_t>((row + 1) * hidden));
      }
      const double error = relative_l2(a, b);
      INFO(f.name << " " << prefix << part << ": relative L2 error " << error);
      CHECK(error <= (std::string(part) == "residual" ? 4e-3 : 5e-3));
      ++compared;
    }
  }
  return compared;
}

}  // namespace

TEST_CASE("device decoder: every inner value of the references in float") {
  for (const char* name : fixture_names) {
    if (small_only() && std::string(name) != "k3-tiny-5l") continue;
    for (const size rows : {size{32}, size{1}, size{7}}) {
      if (small_only() && rows != 32) continue;
      check_inner_values(fixture(name), rows);
    }
  }
}

TEST_CASE("device decoder: each layer in bf16 on the references' stream agrees with the host's") {
  for (const char* name : fixture_names) {
    if (small_only() && std::string(name) != "k3-tiny-5l") continue;
    const Fixture& f = fixture(name);
    CHECK(check_bf16_layers(f) == 3 * f.model.graph.layers.size());
  }
}

namespace {

/// Mean negative log-likelihood of tokens 1 to n-1, and the most likely token behind each of them.
struct Likelihood {
  double mean = 0;
  std::vector<id> best;
};

Likelihood device_likelihood(const K3CpuModel& model, const std::vector<id>& tokens, bool half) {
  const size vocab = model.config.vocab_size;
  RunnerOptions options;
  options.half = half, options.capacity = tokens.size(), options.max_rows = options.max_logit_rows = 64;
  auto runner = make_device_runner(model, options);
  Likelihood result;
  for (size done = 0; done < tokens.size(); done += options.max_rows) {
    const size now = std::min(options.max_rows, tokens.size() - done);
    runner->forward(Rows(tokens, done, now).batch());
    const std::vector<float> logits = runner->logits();
    for (size row = 0; row < now && done + row + 1 < tokens.size(); ++row) {
      const auto at = [&](size i) { return static_cast<double>(logits[row * vocab + i]); };
      double largest = at(0), sum = 0;
      for (size i = 1; i < vocab; ++i) largest = std::max(largest, at(i));
      for (size i = 0; i < vocab; ++i) sum += std::exp(at(i) - largest);
      result.mean += (largest + std::log(sum) - at(static_cast<size>(tokens[done + row + 1]))) /
                     static_cast<double>(tokens.size() - 1);
      result.best.push_back(runner->argmax(row));
    }
  }
  return result;
}

}  // namespace

TEST_CASE("device decoder: the trained model's texts in float") {
  if (small_only()) return;
  const K3CpuModel model = from_pretrained(austen_path());
  const nlohmann::json expected = read_json_file(austen_path("expected.json"));
  for (const nlohmann::json& prompt : expected["prompts"]) {
    const std::vector<id> ids = prompt["ids"], generated = prompt["generated"];
    const size count = generated.size();
    RunnerOptions options;
    options.capacity = ids.size() + generated.size() + 1;
    auto runner = make_device_runner(model, options);
    const Run run = greedy(*runner, ids, count, 32);
    INFO("prompt of " << ids.size() << " tokens");
    CHECK(run.tokens == std::vector<id>(generated.begin(), generated.begin() + static_cast<std::ptrdiff_t>(count)));
    check(compare(run.logits[0], prompt["first_logits"].get<std::vector<double>>(), 1e-4, 0, true));
  }
}

TEST_CASE("device decoder: the trained model's likelihood of the held-out passage, in float and bf16") {
  if (small_only()) return;
  const K3CpuModel model = from_pretrained(austen_path());
  const nlohmann::json reference = read_json_file(austen_path("expected.json"))["heldout"];
  const nlohmann::json passage = read_json_file(data_path("austen_heldout.json"));
  const std::vector<id> tokens = passage["ids"], best = passage["argmax_fp64"];
  REQUIRE(tokens.size() == reference["tokens"].get<size>());
  CHECK(std::vector<id>(tokens.begin(), tokens.begin() + 32) == reference["first_ids"].get<std::vector<id>>());
  CHECK(std::vector<id>(tokens.end() - 32, tokens.end()) == reference["last_ids"].get<std::vector<id>>());
  const double mean = reference["mean_nll"];
  for (const bool half : {false, true}) {
    const Likelihood got = device_likelihood(model, tokens, half);
    REQUIRE(got.best.size() == best.size());
    size same = 0;
    for (size i = 0; i < best.size(); ++i) same += got.best[i] == best[i];
    const double share = static_cast<double>(same) / static_cast<double>(best.size());
    INFO((half ? "bf16" : "float") << ": mean nll " << got.mean << " for " << mean << ", equal arg-maxes " << share);
    // Measured: float 3e-8 and all of them, bf16 1.9e-4 and 99.3 %; 5e-3 and 95 % are what bf16 must keep.
    CHECK(std::abs(got.mean - mean) <= (half ? 1e-3 : 1e-6) * mean);
    CHECK(share >= (half ? 0.98 : 0.999));
  }
}
