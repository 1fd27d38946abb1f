// SPDX-License-Identifier: Apache-2.0
// The host's matrix products: bf16 and MXFP4 weights, both vector versions, one thread and all of them.

#include <k3/ops/linear.hpp>

#include "harness.hpp"

namespace {

using namespace k3;

using sizes = std::initializer_list<size>;

struct Shape {
  size rows, columns;
};

std::string shape_name(Shape s, size batch) {
  return std::to_string(s.rows) + "x" + std::to_string(s.columns) + " B=" + std::to_string(batch);
}

struct Setting {
  host exec;
  double ceiling;
};

template <class MakeWeight>
bench::Result time_linear(const bench::Report& report, const char* name, const Setting& setting, Shape s, size batch,
                          double bytes, MakeWeight make) {
  std::vector<bf16> x(batch * s.columns, bf16(0.5f)), out(batch * s.rows);
  const auto time = bench::measure(report.seconds(0.4), 200, [&](int) {
    linear(setting.exec, view(x, batch, s.columns), make(), view(out, batch, s.rows));
  });
  return {name,
          shape_name(s, batch),
          bench::isa_name(setting.exec.isa),
          setting.exec.threads,
          time,
          bytes,
          static_cast<double>(s.rows * s.columns),
          setting.ceiling};
}

void run_shape(bench::Report& report, bench::RotatingPool& pool, const Setting& setting, Shape s, size batch) {
  const size weights = s.rows * s.columns;
  report.add(time_linear(report, "linear bf16", setting, s, batch, static_cast<double>(weights * 2),
                         [&] { return view(pool.next<bf16>(weights * 2), s.rows, s.columns); }));
  report.add(time_linear(report, "linear mxfp4", setting, s, batch, static_cast<double>(weights / 32 * 17), [&] {
    const std::uint8_t* packed = pool.next<std::uint8_t>(weights / 2);
    const std::uint8_t* scale = pool.next<std::uint8_t>(weights / 32);  // bytes 0..127 and 191
    return Mxfp4Matrix<>{view(packed, s.rows, s.columns / 2), view(scale, s.rows, s.columns / 32)};
  }));
}

/// MLA's absorbed map: one product with a [128, 512] block per head, 96 heads, each with its own row of x and out.
void run_absorb(bench::Report& report, bench::RotatingPool& pool, const Setting& setting, size batch) {
  constexpr size heads = 96, rows = 128, columns = 512;
  std::vector<bf16> x(batch * heads * rows, bf16(0.5f)), out(batch * heads * columns);
  const auto time = bench::measure(report.seconds(0.4), 200, [&](int) {
    const bf16* weight = pool.next<bf16>(heads * rows * columns * 2);
    for (size h = 0; h < heads; ++h)
      linear_transposed(setting.exec, View<bf16, 2>{x.data() + h * rows, {batch, rows}, {heads * rows, 1}},
                        view(weight + h * rows * columns, rows, columns),
                        View<bf16, 2>{out.data() + h * columns, {batch, columns}, {heads * columns, 1}});
  });
  report.add({"linear_transposed bf16", "96x(" + shape_name({rows, columns}, batch) + ")",
              bench::isa_name(setting.exec.isa), setting.exec.threads, time,
              static_cast<double>(heads * rows * columns * 2), static_cast<double>(heads * rows * columns),
              setting.ceiling});
}

}  // namespace

int main(int argc, char** argv) {
  bench::Report report(argc, argv);
  bench::RotatingPool pool(size{512} << 20);
  for (const int threads : bench::Report::thread_counts()) {
    const double ceiling = bench::read_ceiling(pool, threads);
    report.ceiling(threads, ceiling);
    for (const Isa isa : bench::Report::isas(threads, Isa::avx2)) {
      const Setting setting{host{.threads = threads, .isa = isa}, ceiling};
      for (const size batch : sizes{1, 4, 16}) {
        for (const Shape s : {Shape{7168, 7168}, Shape{3072, 3584}}) run_shape(report, pool, setting, s, batch);
        run_absorb(report, pool, setting, batch);
      }
    }
  }
}
