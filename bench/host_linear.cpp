// SPDX-License-Identifier: Apache-2.0
// The host's matrix products: bf16 and MXFP4 weights, the transposed product, MLA's absorbed query map; both vector
// versions, one thread and all of them.

#include <k3/ops/mla_decode_token.hpp>

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

/// The transposed product alone, at a size that all threads share.
void run_transposed(bench::Report& report, bench::RotatingPool& pool, const Setting& setting, size batch) {
  constexpr size rows = 7168, columns = 7168;
  std::vector<bf16> x(batch * rows, bf16(0.5f)), out(batch * columns);
  const auto time = bench::measure(report.seconds(0.4), 200, [&](int) {
    linear_transposed(setting.exec, view(x, batch, rows), view(pool.next<bf16>(rows * columns * 2), rows, columns),
                      view(out, batch, columns));
  });
  report.add({"linear_transposed bf16", shape_name({rows, columns}, batch), bench::isa_name(setting.exec.isa),
              setting.exec.threads, time, static_cast<double>(rows * columns * 2), static_cast<double>(rows * columns),
              setting.ceiling});
}

/// As MLA uses it: a [128, 512] block for each of 96 heads, which the threads share. The bytes are half of kv_b's.
void run_absorb(bench::Report& report, bench::RotatingPool& pool, const Setting& setting, size batch) {
  const MlaConfig g = MlaConfig::production();
  const size latent = g.kv_lora_rank, read = g.heads * g.qk_nope_head_dim * latent;
  std::vector<bf16> q(batch * mla_q_width(g), bf16(0.5f)), out(batch * g.heads * mla_cache_width(g));
  const auto time = bench::measure(report.seconds(0.4), 200, [&](int) {
    const bf16* weight = pool.next<bf16>(mla_kv_b_rows(g) * latent * sizeof(bf16));
    mla_absorb_query(setting.exec, g, view(q, batch, mla_q_width(g)), view(weight, mla_kv_b_rows(g), latent),
                     view(out, batch, g.heads, mla_cache_width(g)));
  });
  report.add({"mla_absorb_query bf16", "96x(" + shape_name({g.qk_nope_head_dim, latent}, batch) + ")",
              bench::isa_name(setting.exec.isa), setting.exec.threads, time, static_cast<double>(read * sizeof(bf16)),
              static_cast<double>(read), setting.ceiling});
}

}  // namespace

int main(int argc, char** argv) {
  bench::Report report(argc, argv);
  bench::RotatingPool pool(size{512} << 20);
  for (const int threads : bench::Report::thread_counts()) {
    const double ceiling = bench::read_ceiling(pool, threads);
    report.print_ceiling(threads, ceiling);
    for (const Isa isa : bench::Report::isas(threads, Isa::avx2)) {
      const Setting setting{host{.threads = threads, .isa = isa}, ceiling};
      for (const size batch : sizes{1, 4, 16}) {
        for (const Shape s : {Shape{7168, 7168}, Shape{3072, 3584}}) run_shape(report, pool, setting, s, batch);
        run_transposed(report, pool, setting, batch);
        run_absorb(report, pool, setting, batch);
      }
    }
  }
}
