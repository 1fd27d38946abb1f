// SPDX-License-Identifier: Apache-2.0
// The trained model that the examples ship: its texts, its logits, its likelihood of a passage it has not seen.

#include <cmath>
#include <fstream>
#include <iterator>

#include <k3/io/tokenizer.hpp>

#include "model/more_geometries.hpp"
#include "support/fixture.hpp"

using namespace k3;
using namespace k3::test;

namespace {

const K3CpuModel& austen() {
  static const K3CpuModel model = from_pretrained(austen_path());
  return model;
}
const nlohmann::json& expected() {
  static const nlohmann::json values = read_json_file(austen_path("expected.json"));
  return values;
}
const Tokenizer& tokenizer() {
  static const Tokenizer one = Tokenizer::from_directory(austen_path());
  return one;
}

std::vector<id> heldout_tokens() {
  std::ifstream file(austen_path("heldout.txt"), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return tokenizer().encode(text);
}

/// Mean negative log likelihood of tokens 1 to n-1, the first values, and how often the arg-max is the next arg-max of
/// `best`.
template <class P>
struct Likelihood {
  double mean = 0;
  std::vector<double> first;
  std::vector<id> best;
};

template <class P>
Likelihood<P> likelihood(const std::vector<id>& tokens) {
  constexpr size rows = 64;
  Decoder<P> decoder(host{}, austen(), rows, rows);
  HybridCache<P> cache = decoder.make_cache(1, tokens.size());
  Likelihood<P> result;
  const std::vector<id> slots(rows, 0);
  std::vector<size> positions(rows), wanted(rows);
  for (size done = 0; done < tokens.size(); done += rows) {
    const size now = std::min(rows, tokens.size() - done);
    for (size row = 0; row < now; ++row) {
      positions[row] = done + row;
      wanted[row] = row;
    }
    decoder.forward(cache, {view(tokens).slice(0, done, now), view(slots.data(), now),
                            view(static_cast<const size*>(positions.data()), now),
                            view(static_cast<const size*>(wanted.data()), now)});
    for (size row = 0; row < now && done + row + 1 < tokens.size(); ++row) {
      const std::vector<double> logits = elements(decoder.logits()[row]);
      double largest = logits[0], sum = 0;
      for (const double logit : logits) largest = std::max(largest, logit);
      for (const double logit : logits) sum += std::exp(logit - largest);
      const double nll = largest + std::log(sum) - logits[static_cast<size>(tokens[done + row + 1])];
      result.mean += nll / static_cast<double>(tokens.size() - 1);
      if (result.first.size() < 32) result.first.push_back(nll);
      result.best.push_back(decoder.argmax(row));
    }
  }
  return result;
}

/// Texts and logits with run-time geometry, and the same bits with compile-time geometry.
template <class P>
void check_prompts() {
  Decoder<P, austen_9l::Decoder> fixed(host{}, austen(), {}, 32, 1);
  for (const nlohmann::json& prompt : expected()["prompts"]) {
    const std::vector<id> ids = prompt["ids"], generated = prompt["generated"];
    INFO(P::name << ": " << prompt["text"].get<std::string>().substr(0, 60));
    CHECK(tokenizer().encode(prompt["text"].get<std::string>()) == ids);
    const auto result = greedy_decode<P>(host{}, austen(), ids, {generated.size(), {}, true});
    CHECK(result.tokens == generated);
    CHECK(tokenizer().decode(result.tokens) == prompt["generated_text"].get<std::string>());
    const double tolerance = std::is_same_v<P, Fp64> ? 1e-6 : 2e-4;
    check(compare(result.logits.front(), prompt["first_logits"].get<std::vector<double>>(), tolerance, 0, true));
    check(compare(result.logits.back(), prompt["last_logits"].get<std::vector<double>>(), tolerance, 0, true));
    HybridCache<P> cache = fixed.make_cache(1, ids.size() + generated.size());
    const auto by_fixed = greedy_decode(fixed, cache, 0, view(ids), {generated.size(), {}, true});
    CHECK(by_fixed.tokens == generated);
    REQUIRE(by_fixed.logits.size() == result.logits.size());
    for (size row = 0; row < result.logits.size(); ++row) {
      INFO("compile-time geometry, row " << row);
      check(same_bits(by_fixed.logits[row], result.logits[row]));
    }
  }
}

}  // namespace

TEST_CASE("austen: texts and logits in float") { check_prompts<Fp32>(); }
TEST_CASE("austen: texts and logits in double") { check_prompts<Fp64>(); }

TEST_CASE("austen: likelihood of the held-out passage") {
  const std::vector<id> tokens = heldout_tokens();
  const nlohmann::json& heldout = expected()["heldout"];
  REQUIRE(tokens.size() == heldout["tokens"].get<size>());
  CHECK(std::vector<id>(tokens.begin(), tokens.begin() + 32) == heldout["first_ids"].get<std::vector<id>>());
  CHECK(std::vector<id>(tokens.end() - 32, tokens.end()) == heldout["last_ids"].get<std::vector<id>>());
  const double reference = heldout["mean_nll"];
  const auto fp64 = likelihood<Fp64>(tokens);
  const auto fp32 = likelihood<Fp32>(tokens);
  const auto bf16 = likelihood<Bf16>(tokens);
  size same = 0;
  for (size i = 0; i < fp64.best.size(); ++i) same += bf16.best[i] == fp64.best[i];
  const double share = static_cast<double>(same) / static_cast<double>(fp64.best.size());
  INFO("mean nll: reference " << reference << ", fp64 " << fp64.mean << ", fp32 " << fp32.mean << ", bf16 " << bf16.mean
                              << "; bf16 arg-maxes equal to fp64's " << share);
  CHECK(std::abs(fp64.mean - reference) <= 1e-6 * reference);
  CHECK(std::abs(fp32.mean - reference) <= 1e-6 * reference);
  CHECK(std::abs(bf16.mean - reference) <= 5e-3 * reference);
  CHECK(share >= 0.95);
  check(compare(fp64.first, heldout["first_nll"].get<std::vector<double>>(), 0, 1e-5));
  // What the device's tests, which have no tokenizer and no double, are given of this passage.
  const nlohmann::json given = read_json_file(data_path("austen_heldout.json"));
  CHECK(given["ids"].get<std::vector<id>>() == tokens);
  CHECK(given["argmax_fp64"].get<std::vector<id>>() == fp64.best);
}
