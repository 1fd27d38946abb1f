// SPDX-License-Identifier: Apache-2.0
// The results file of the device benchmarks: rows of several programs are merged, and what is written is read again.

#include "../../bench/cuda_results.hpp"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "support/catch.hpp"

namespace {

using k3::bench::ResultsFile;
using k3::bench::Row;

std::string text_of(const std::string& name) {
  std::ifstream in(name);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

/// A results file that is gone afterwards.
struct Scratch {
  std::string name = "k3-test-results-" + std::to_string(std::time(nullptr)) + ".json";
  ~Scratch() { std::remove(name.c_str()); }

  void merge(const k3::bench::Ceilings& ceilings, const std::vector<Row>& rows) const {
    ResultsFile file(name);
    file.raise(ceilings);
    for (const Row& row : rows) file.put(row);
    file.write("a GPU");
  }
};

}  // namespace

TEST_CASE("results of several programs are merged into one file") {
  const Scratch scratch;
  scratch.merge({4400, 4000}, {{"lm_head", 8, 0, 600, 3, 2348810240.0},
                               {"lm_head", 1, 0, 550, 2, 2348810240.0},
                               {"anything else", 1, 0, 1, 0, 1}});
  scratch.merge({4500, 3900}, {{"moe_experts", 1, 0, 72.5, 0.5, 280756224.0}, {"lm_head", 8, 0, 575, 4, 2348810240.0}});
  const std::string text = text_of(scratch.name);
  INFO(text);

  // The larger ceilings; percents are of them, whichever program measured.
  CHECK(text.find("\"gpu\": \"a GPU\"") != std::string::npos);
  CHECK(text.find("\"read_ceiling_GBps\": 4500.0, \"copy_GBps\": 4000.0") != std::string::npos);
  const std::string experts =
      "{\"op\": \"moe_experts\", \"batch\": 1, \"context\": null, \"us\": 72.500, \"us_spread\": 0.500, "
      "\"bytes\": 280756224, \"GBps\": 3872.5, \"percent\": 86.06},\n";
  const std::string head_1 =
      "{\"op\": \"lm_head\", \"batch\": 1, \"context\": null, \"us\": 550.000, \"us_spread\": 2.000, "
      "\"bytes\": 2348810240, \"GBps\": 4270.6, \"percent\": 94.90},\n";
  const std::string head_8 =
      "{\"op\": \"lm_head\", \"batch\": 8, \"context\": null, \"us\": 575.000, \"us_spread\": 4.000, "
      "\"bytes\": 2348810240, \"GBps\": 4084.9, \"percent\": 90.78}\n]}\n";
  CHECK(text.find("[\n" + experts + head_1 + head_8) != std::string::npos);
  CHECK(text.find("anything else") == std::string::npos);

  scratch.merge({}, {});
  const std::string again = text_of(scratch.name);
  CHECK(again.substr(again.find("\"read")) == text.substr(text.find("\"read")));
}

TEST_CASE("attention is measured against the larger of its two limits") {
  const Row row{"mla_attention", 8, 32768, 100, 1, 8.0 * 32768 * 1152};
  const auto same = [](double got, double want) { return std::abs(got - want) < 1e-9 * want; };
  CHECK(same(k3::bench::limit_us(row, 4450), 2.0 * 96 * 1088 * 8 * 32768 / 750e6));
  CHECK(same(k3::bench::limit_us(row, 3000), 8.0 * 32768 * 1152 / 3000 * 1e-3));
  CHECK(same(k3::bench::limit_us({"kda_fused", 8, 0, 100, 1, 1e6}, 4000), 0.25));
}

TEST_CASE("a results file that cannot be written is an error") {
  const ResultsFile file("no-such-folder/results.json");
  CHECK_THROWS_AS(file.write("a GPU"), k3::invalid_argument);
}
