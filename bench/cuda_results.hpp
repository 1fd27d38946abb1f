// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include <k3/core/error.hpp>

// Rows of results of the device benchmarks and the JSON file they are merged into; report.py knows which rows it needs.
namespace k3::bench {

/// The machine's own limits, in GB/s (10^9 bytes): a plain read, and a copy on the device counting read and write.
struct Ceilings {
  double read = 0, copy = 0;
};

/// What a row of the file is: a result of the eleven operations in the mode that targets mean, the same in the default
/// mode (a row's bits do not depend on its batch), or one of the products that a layer's are the sum of.
enum class List { none, results, independent, products };
inline constexpr const char* list_names[] = {"", "rows", "default", "products"};

/// One row of the results; context 0 means that it plays no part, percent is of the ceiling of its own program's run.
struct Row {
  List list;
  std::string op;
  size batch, context;
  double us, us_spread, bytes, percent;
};

/// Least microseconds of the mathematics: attention of 96 heads reads 576 numbers a position and adds up 512, at 750
/// TFLOP/s. All else is bound by its bytes.
inline double math_limit_us(const std::string& op, size batch, size context) {
  return op == "mla_attention" ? 2.0 * 96 * (576 + 512) * static_cast<double>(context * batch) / 750e6 : 0;
}
inline double limit_us(const Row& row, double read_ceiling) {
  return std::max(row.bytes / read_ceiling * 1e-3, math_limit_us(row.op, row.batch, row.context));
}

/// The results file: ceilings and, in three lists, one row a line. What several programs write is merged: a row of the
/// same operation, batch and context is replaced, the others stay as they are; the ceilings are the last program's.
class ResultsFile {
 public:
  explicit ResultsFile(const std::string& name) : name_(name) {
    std::ifstream in(name);
    List list = List::none;
    for (std::string line; std::getline(in, line);) {
      char op[64] = "", context[32] = "";
      Row row{};
      if (std::sscanf(line.c_str(),
                      "{\"op\": \"%63[^\"]\", \"batch\": %zu, \"context\": %31[^,], \"us\": %lf, \"us_spread\": %lf, "
                      "\"bytes\": %lf, \"GBps\": %*f, \"percent\": %lf",
                      op, &row.batch, context, &row.us, &row.us_spread, &row.bytes, &row.percent) == 7) {
        row.op = op, row.list = list;
        row.context = static_cast<size>(std::strtoull(context, nullptr, 10));
        rows_.push_back(row);
      }
      for (const List each : {List::results, List::independent, List::products})
        if (line.find(std::string("\"") + list_names[static_cast<int>(each)] + "\": [") != std::string::npos)
          list = each;
    }
  }

  void put(const Row& row) {
    for (Row& r : rows_)
      if (r.list == row.list && r.op == row.op && r.batch == row.batch && r.context == row.context) {
        r = row;
        return;
      }
    rows_.push_back(row);
  }

  void write(const char* gpu_name, const Ceilings& ceilings) const {
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    std::FILE* out = std::fopen((name_ + ".part").c_str(), "w");
    if (!out) throw invalid_argument("bench", "--json", name_, "a file that can be written");
    std::fprintf(out, "{\"gpu\": \"%s\", \"date\": \"%s\", \"read_ceiling_GBps\": %.1f, \"copy_GBps\": %.1f", gpu_name,
                 date, ceilings.read, ceilings.copy);
    for (const List list : {List::results, List::independent, List::products}) {
      std::fprintf(out, ", \"%s\": [", list_names[static_cast<int>(list)]);
      const char* between = "";
      for (const Row& r : rows_) {
        if (r.list != list) continue;
        std::fprintf(out,
                     "%s\n{\"op\": \"%s\", \"batch\": %zu, \"context\": %s, \"us\": %.3f, \"us_spread\": %.3f, "
                     "\"bytes\": %.0f, \"GBps\": %.1f, \"percent\": %.2f}",
                     between, r.op.c_str(), r.batch, r.context ? std::to_string(r.context).c_str() : "null", r.us,
                     r.us_spread, r.bytes, r.bytes / r.us * 1e-3, r.percent);
        between = ",";
      }
      std::fprintf(out, "\n]");
    }
    std::fprintf(out, "}\n");
    if (std::fclose(out) != 0 || std::rename((name_ + ".part").c_str(), name_.c_str()) != 0)
      throw invalid_argument("bench", "--json", name_, "a file that can be written");
  }

 private:
  std::string name_;
  std::vector<Row> rows_;
};

}  // namespace k3::bench
