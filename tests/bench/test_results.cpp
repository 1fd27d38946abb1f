// SPDX-License-Identifier: Apache-2.0
// The results file of the device benchmarks: rows of several programs are merged, and what is written is read again.

#include "../../bench/cuda_results.hpp"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "support/catch.hpp"

namespace {

using k3::size;
using k3::bench::List;
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
    for (const Row& row : rows) file.put(row);
    file.write("a GPU", ceilings);
  }
};

}  // namespace

TEST_CASE("results of several programs are merged into one file") {
  const Scratch scratch;
  const auto head = [](size batch, double us, double percent) {
    return Row{List::results, "lm_head", batch, 0, us, 2, 2348810240.0, percent};
  };
  scratch.merge({4400, 4000}, {head(8, 600, 88.97), head(1, 550, 97.06)});
  scratch.merge({4500, 3900}, {{List::independent, "mla_attention", 1, 4096, 20, 0.5, 4718592.0, 5.7},
                               {List::products, "q, alone", 1, 0, 40, 0.5, 176160768.0, 97.87},
                               head(8, 575, 90.78)});
  const std::string text = text_of(scratch.name);
  INFO(text);

  // The last program's ceilings; a row keeps the percent of its own program's.
  CHECK(text.find("\"gpu\": \"a GPU\"") != std::string::npos);
  CHECK(text.find("\"read_ceiling_GBps\": 4500.0, \"copy_GBps\": 3900.0, \"rows\": [") != std::string::npos);
  const std::string head_8 =
      "{\"op\": \"lm_head\", \"batch\": 8, \"context\": null, \"us\": 575.000, \"us_spread\": 2.000, "
      "\"bytes\": 2348810240, \"GBps\": 4084.9, \"percent\": 90.78},\n";
  const std::string head_1 =
      "{\"op\": \"lm_head\", \"batch\": 1, \"context\": null, \"us\": 550.000, \"us_spread\": 2.000, "
      "\"bytes\": 2348810240, \"GBps\": 4270.6, \"percent\": 97.06}\n]";
  const std::string others =
      ", \"default\": [\n{\"op\": \"mla_attention\", \"batch\": 1, \"context\": 4096, \"us\": 20.000, \"us_spread\": "
      "0.500, "
      "\"bytes\": 4718592, \"GBps\": 235.9, \"percent\": 5.70}\n], \"products\": [\n"
      "{\"op\": \"q, alone\", \"batch\": 1, \"context\": null, \"us\": 40.000, \"us_spread\": 0.500, "
      "\"bytes\": 176160768, \"GBps\": 4404.0, \"percent\": 97.87}\n]}\n";
  CHECK(text.find("[\n" + head_8 + head_1 + others) != std::string::npos);

  scratch.merge({4500, 3900}, {});
  const std::string again = text_of(scratch.name);
  CHECK(again.substr(again.find("\"read")) == text.substr(text.find("\"read")));
}

TEST_CASE("attention is measured against the larger of its two limits") {
  const Row row{List::results, "mla_attention", 8, 32768, 100, 1, 8.0 * 32768 * 1152, 0};
  const auto same = [](double got, double want) { return std::abs(got - want) < 1e-9 * want; };
  CHECK(same(k3::bench::limit_us(row, 4450), 2.0 * 96 * 1088 * 8 * 32768 / 750e6));
  CHECK(same(k3::bench::limit_us(row, 3000), 8.0 * 32768 * 1152 / 3000 * 1e-3));
  CHECK(same(k3::bench::limit_us({List::results, "kda_fused", 8, 0, 100, 1, 1e6, 0}, 4000), 0.25));
}

TEST_CASE("a results file that cannot be written is an error") {
  const ResultsFile file("no-such-folder/results.json");
  CHECK_THROWS_AS(file.write("a GPU", {}), k3::invalid_argument);
}
