// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <k3/core/error.hpp>

// Rows of results of the device benchmarks and the JSON file they are merged into.
namespace k3::bench {

/// The machine's own limits, in GB/s (10^9 bytes): a plain read, and a copy on the device counting read and write.
struct Ceilings {
  double read = 0, copy = 0;
};

/// One row of the results; context 0 means that it plays no part.
struct Row {
  std::string op;
  size batch, context;
  double us, us_spread, bytes;
};

/// The names that results may have in the JSON file, in its order.
inline constexpr const char* op_names[] = {"moe_experts",   "kda_fused",     "mla_attention", "attnres_norm",
                                           "dense_kda",     "dense_mla",     "dense_moe",     "lm_head",
                                           "layer_kda_moe", "layer_mla_moe", "step_depth_cut"};

/// Least microseconds of the mathematics: attention of 96 heads reads 576 numbers a position and adds up 512, at 750
/// TFLOP/s. All else is bound by its bytes.
inline double math_limit_us(const std::string& op, size batch, size context) {
  return op == "mla_attention" ? 2.0 * 96 * (576 + 512) * static_cast<double>(context * batch) / 750e6 : 0;
}
inline double limit_us(const Row& row, double read_ceiling) {
  return std::max(row.bytes / read_ceiling * 1e-3, math_limit_us(row.op, row.batch, row.context));
}

/// The results file: ceilings and one row a line. What several programs write is merged: the larger ceilings stay, a
/// row of the same operation, batch and context is replaced.
class ResultsFile {
 public:
  explicit ResultsFile(const std::string& name) : name_(name) {
    std::ifstream in(name);
    for (std::string line; std::getline(in, line);) {
      double read = 0, copied = 0;
      const char* found = std::strstr(line.c_str(), "\"read_ceiling_GBps\"");
      if (found && std::sscanf(found, "\"read_ceiling_GBps\": %lf, \"copy_GBps\": %lf", &read, &copied) == 2)
        raise({read, copied});
      char op[64] = "", context[32] = "";
      Row row{};
      if (std::sscanf(line.c_str(),
                      "{\"op\": \"%63[^\"]\", \"batch\": %zu, \"context\": %31[^,], \"us\": %lf, \"us_spread\": %lf, "
                      "\"bytes\": %lf",
                      op, &row.batch, context, &row.us, &row.us_spread, &row.bytes) != 6)
        continue;
      row.op = op;
      row.context = static_cast<size>(std::strtoull(context, nullptr, 10));
      put(row);
    }
  }

  void raise(const Ceilings& c) {
    ceilings_.read = std::max(ceilings_.read, c.read);
    ceilings_.copy = std::max(ceilings_.copy, c.copy);
  }
  void put(const Row& row) {
    if (order(row) >= std::size(op_names)) return;
    const auto same = [&](const Row& r) { return key(r) == key(row); };
    rows_.erase(std::remove_if(rows_.begin(), rows_.end(), same), rows_.end());
    rows_.insert(
        std::upper_bound(rows_.begin(), rows_.end(), row, [](const Row& a, const Row& b) { return key(a) < key(b); }),
        row);
  }

  void write(const char* gpu_name) const {
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
    std::FILE* out = std::fopen((name_ + ".part").c_str(), "w");
    if (!out) throw invalid_argument("bench", "--json", name_, "a file that can be written");
    std::fprintf(out,
                 "{\"gpu\": \"%s\", \"date\": \"%s\", \"read_ceiling_GBps\": %.1f, \"copy_GBps\": %.1f, \"rows\": [",
                 gpu_name, date, ceilings_.read, ceilings_.copy);
    for (size i = 0; i < rows_.size(); ++i) {
      const Row& r = rows_[i];
      std::fprintf(out,
                   "%s\n{\"op\": \"%s\", \"batch\": %zu, \"context\": %s, \"us\": %.3f, \"us_spread\": %.3f, "
                   "\"bytes\": %.0f, \"GBps\": %.1f, \"percent\": %.2f}",
                   i ? "," : "", r.op.c_str(), r.batch, r.context ? std::to_string(r.context).c_str() : "null", r.us,
                   r.us_spread, r.bytes, r.bytes / r.us * 1e-3, 100 * limit_us(r, ceilings_.read) / r.us);
    }
    std::fprintf(out, "\n]}\n");
    if (std::fclose(out) != 0 || std::rename((name_ + ".part").c_str(), name_.c_str()) != 0)
      throw invalid_argument("bench", "--json", name_, "a file that can be written");
  }

 private:
  static size order(const Row& row) {
    size at = 0;
    while (at < std::size(op_names) && row.op != op_names[at]) ++at;
    return at;
  }
  static std::vector<size> key(const Row& row) { return {order(row), row.context, row.batch}; }

  std::string name_;
  Ceilings ceilings_;
  std::vector<Row> rows_;
};

}  // namespace k3::bench
