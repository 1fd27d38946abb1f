// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include <k3/k3.cuh>

#include "cuda/graph.cuh"
#include "cuda/random_model.cuh"
#include "cuda/released_device.hpp"

namespace k3::test {

/// Products of the released sizes on the device, and sampled elements of them on the host in double, rounded where the
/// device rounds: the outputs of the gate and up linears and of the activation.
class ReleasedProducts {
 public:
  static constexpr size most_rows = 128;

  explicit ReleasedProducts(const RandomModel& model)
      : kda_(model.weights.layers[1].kda),
        mlp_(model.weights.layers[0].mlp),
        hidden_(model.config.hidden_size),
        wide_(kda_width(model.config.kda)) {
    fill(x_.data(), x_.count(), 71, 0.0f, 1.7f);
    fill(wide_x_.data(), wide_x_.count(), 72, 0.0f, 1.7f);
    fill(before_.data(), before_.count(), 73, 0.0f, 1.0f);
    const std::vector<double> x = rows_of(x_, hidden_), wide_x = rows_of(wide_x_, wide_);
    before_rows_ = rows_of(before_, hidden_);
    for (const auto* weight : {&kda_.q_proj, &kda_.k_proj, &kda_.g_proj})
      projected_.push_back(products(*weight, channels(wide_), x));
    added_ = products(kda_.o_proj, channels(hidden_), wide_x);
    mlp_out_ = products(mlp_.down_proj, channels(hidden_), activation(x));
  }

  /// All of them on the first `rows` rows.
  void compare(size rows, std::vector<SampledProduct>& results) {
    DeviceBuffer<bf16> out(rows * 3 * wide_);
    const auto wide_out = out.view(rows, 3 * wide_);
    const auto narrow = out.view(rows, hidden_);
    const auto x = view_of(x_, rows, hidden_);
    const gpu exec{stream_};
    const std::string of = " of " + std::to_string(rows) + " rows";
    projections(
        exec, x,
        {projection(kda_.q_proj, wide_out.slice(1, 0, wide_)), projection(kda_.k_proj, wide_out.slice(1, wide_, wide_)),
         projection(kda_.g_proj, wide_out.slice(1, 2 * wide_, wide_))});
    for (size i = 0; i < 3; ++i)
      results.push_back(sampled("projections[" + std::to_string(i) + "]" + of, out, rows, 3 * wide_, i * wide_, wide_,
                                projected_[i], {}));
    put(out, rows);
    linear_add(exec, view_of(wide_x_, rows, wide_), kda_.o_proj, narrow);
    results.push_back(sampled("linear_add" + of, out, rows, hidden_, 0, hidden_, added_, before_rows_));
    dense_mlp(exec, glu(), x, mlp_.gate_proj, mlp_.up_proj, mlp_.down_proj, work_, narrow);
    results.push_back(sampled("dense_mlp" + of, out, rows, hidden_, 0, hidden_, mlp_out_, {}));
    put(out, rows);
    dense_mlp_add(exec, glu(), x, mlp_.gate_proj, mlp_.up_proj, mlp_.down_proj, work_, narrow);
    results.push_back(sampled("dense_mlp_add" + of, out, rows, hidden_, 0, hidden_, mlp_out_, before_rows_));
  }

 private:
  using P = Bf16;
  static constexpr size sampled_rows[] = {0, 5, 32, 127};
  static constexpr size sampled_count = 4;

  GluConfig glu() const { return GluConfig{}; }
  /// Output channels that are looked at: spread over all, the last one among them.
  static std::vector<size> channels(size width) {
    std::vector<size> all;
    for (size i = 1; i <= 61; ++i) all.push_back(width * i / 61 - 1);
    return all;
  }
  static DeviceView<const bf16, 2> view_of(const DeviceBuffer<bf16>& buffer, size rows, size width) {
    return device_view(static_cast<const bf16*>(buffer.data()), rows, width);
  }
  void put(DeviceBuffer<bf16>& out, size rows) {
    stream_.wait();
    detail::check_cuda(
        "test", "copy",
        cudaMemcpyAsync(out.data(), before_.data(), rows * hidden_ * sizeof(bf16), cudaMemcpyDeviceToDevice, stream_));
  }
  /// The sampled rows, [4, width].
  static std::vector<double> rows_of(const DeviceBuffer<bf16>& buffer, size width) {
    std::vector<double> result;
    std::vector<bf16> row(width);
    for (const size r : sampled_rows) {
      buffer.copy_to(row.data(), r * width, width);
      for (const bf16 value : row) result.push_back(static_cast<double>(static_cast<float>(value)));
    }
    return result;
  }
  /// Rows [first, end) of a bf16 weight.
  static std::vector<bf16> fetched(const AnyMatrix<MemorySpace::device>& weight, size first, size end) {
    const size columns = weight.extent(1);
    std::vector<bf16> rows((end - first) * columns);
    detail::check_cuda("test", "copy",
                       cudaMemcpy(rows.data(), static_cast<const bf16*>(weight.data) + first * columns,
                                  rows.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
    return rows;
  }
  /// Products of one weight row with the sampled rows of x, [4].
  static void multiply(const bf16* weight, size columns, const std::vector<double>& x, double* out) {
    double sums[sampled_count] = {};
    for (size c = 0; c < columns; ++c) {
      const double w = static_cast<double>(static_cast<float>(weight[c]));
      for (size r = 0; r < sampled_count; ++r) sums[r] += w * x[r * columns + c];
    }
    for (size r = 0; r < sampled_count; ++r) out[r] = sums[r];
  }
  /// [channels, 4]
  static std::vector<double> products(const AnyMatrix<MemorySpace::device>& weight, const std::vector<size>& rows,
                                      const std::vector<double>& x) {
    std::vector<double> result(rows.size() * sampled_count);
    for (size i = 0; i < rows.size(); ++i)
      multiply(fetched(weight, rows[i], rows[i] + 1).data(), weight.extent(1), x, &result[i * sampled_count]);
    return result;
  }
  static double rounded(double value) { return static_cast<double>(static_cast<float>(bf16(value))); }

  /// SiTU of the gate and up products of the sampled rows, [4, width].
  std::vector<double> activation(const std::vector<double>& x) const {
    const size width = mlp_.gate_proj.extent(0), slab = 4096;
    const double cap = static_cast<double>(glu().beta), linear_cap = static_cast<double>(*glu().linear_beta);
    std::vector<double> result(sampled_count * width);
    for (size first = 0; first < width; first += slab) {
      const size end = detail::smaller(width, first + slab);
      const std::vector<bf16> gates = fetched(mlp_.gate_proj, first, end), ups = fetched(mlp_.up_proj, first, end);
      detail::parallel_chunks(host{}, end - first, 16, gates.size() * 4, [&](size from, size to) {
        for (size j = from; j < to; ++j) {
          double gate[sampled_count], up[sampled_count];
          multiply(&gates[j * hidden_], hidden_, x, gate);
          multiply(&ups[j * hidden_], hidden_, x, up);
          for (size r = 0; r < sampled_count; ++r) {
            const double g = rounded(gate[r]), u = rounded(up[r]);
            result[r * width + first + j] =
                rounded(cap * std::tanh(g / cap) / (1 + std::exp(-g)) * linear_cap * std::tanh(u / linear_cap));
          }
        }
      });
    }
    return result;
  }

  SampledProduct sampled(const std::string& name, const DeviceBuffer<bf16>& out, size rows, size stride, size first,
                         size width, const std::vector<double>& want, const std::vector<double>& plus) {
    stream_.wait();
    SampledProduct result{name, {}, {}};
    const std::vector<size> at = channels(width);
    for (size r = 0; r < sampled_count && sampled_rows[r] < rows; ++r) {
      std::vector<bf16> row(width);
      out.copy_to(row.data(), sampled_rows[r] * stride + first, width);
      for (size i = 0; i < at.size(); ++i) {
        result.got.push_back(static_cast<double>(static_cast<float>(row[at[i]])));
        const double product = want[i * sampled_count + r];
        // The linear's output is rounded before it is added.
        result.want.push_back(plus.empty() ? product : rounded(product) + plus[r * width + at[i]]);
      }
    }
    return result;
  }

  const BasicKdaWeights<MemorySpace::device>& kda_;
  const BasicMlpWeights<MemorySpace::device>& mlp_;
  size hidden_, wide_;
  const Stream stream_;
  DeviceBuffer<bf16> x_{most_rows * hidden_}, wide_x_{most_rows * wide_}, before_{most_rows * hidden_};
  DeviceMlpWorkspace<P> work_{mlp_.gate_proj.extent(0), most_rows};
  std::vector<double> before_rows_, added_, mlp_out_;
  std::vector<std::vector<double>> projected_;
};

}  // namespace k3::test
