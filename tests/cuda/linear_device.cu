// SPDX-License-Identifier: Apache-2.0
#include "cuda/linear_device.hpp"

#include <memory>
#include <variant>

#include <k3/cuda/dense_mlp.cuh>

#include "cuda/device_rows.cuh"
#include "support/thrown_by.hpp"

namespace k3::test {
namespace {

Layout layout_of(const ProductCase& c) { return {c.shift, c.gap}; }

using Rows = std::variant<DeviceRows<float>, DeviceRows<bf16>>;

Rows rows_of(bool is_bf16, size rows, size columns, Layout layout) {
  if (is_bf16) return DeviceRows<bf16>(rows, columns, layout);
  return DeviceRows<float>(rows, columns, layout);
}
Rows rows_of(bool is_bf16, size rows, size columns, const std::vector<float>& values, Layout layout) {
  Rows result = rows_of(is_bf16, rows, columns, layout);
  std::visit([&](auto& r) { r.set(values); }, result);
  return result;
}
AnyMatrix<MemorySpace::device> matrix_of(const Rows& rows) {
  return std::visit([](const auto& r) { return AnyMatrix<MemorySpace::device>(r.view()); }, rows);
}
std::vector<float> values_of(const Rows& rows) {
  return std::visit([](const auto& r) { return r.get(); }, rows);
}

/// A weight matrix on the device; matrices have no gaps.
struct Weights {
  Rows weight, up;
  Weights(const ProductCase& c, const ProductMatrix& m)
      : weight(rows_of(m.bf16_weight, m.rows, c.columns, m.weight, {c.shift, 0})),
        up(m.up.empty() ? rows_of(m.bf16_weight, 0, 0, Layout{})
                        : rows_of(m.bf16_weight, m.rows, c.columns, m.up, {c.shift, 0})) {}
};

Projection projection_of(const ProductMatrix& m, const Weights& w, const Rows& out) {
  return std::visit(
      [&](const auto& o) {
        return m.up.empty() ? projection(matrix_of(w.weight), o.view())
                            : gated_projection(m.glu, matrix_of(w.weight), matrix_of(w.up), o.view());
      },
      out);
}

void call_projections(const gpu& exec, const Rows& x, const std::vector<Projection>& list) {
  std::visit(
      [&](const auto& typed) {
        detail::run_projections(exec, "projections", detail::read_only(typed.view()), list.data(), list.size());
      },
      x);
}

}  // namespace

std::vector<std::vector<float>> device_projections(const ProductCase& c, const std::vector<ProductMatrix>& matrices) {
  const Rows x = rows_of(c.bf16_x, c.tokens, c.columns, c.x, layout_of(c));
  std::vector<Weights> weights;
  std::vector<Rows> outs;
  std::vector<Projection> list;
  for (const ProductMatrix& m : matrices) {
    weights.emplace_back(c, m);
    outs.push_back(rows_of(m.bf16_out, c.tokens, m.rows, layout_of(c)));
    list.push_back(projection_of(m, weights.back(), outs.back()));
  }
  run_on_stream(c.replays, [&](const gpu& exec) { call_projections(exec, x, list); }, [] {});
  std::vector<std::vector<float>> results;
  for (const Rows& out : outs) results.push_back(values_of(out));
  return results;
}

std::vector<float> device_linear(const ProductCase& c, const ProductMatrix& m) {
  const Rows x = rows_of(c.bf16_x, c.tokens, c.columns, c.x, layout_of(c));
  const Weights w(c, m);
  const Rows out = rows_of(m.bf16_out, c.tokens, m.rows, layout_of(c));
  run_on_stream(
      c.replays,
      [&](const gpu& exec) {
        std::visit([&](const auto& from, const auto& to) { linear(exec, from.view(), matrix_of(w.weight), to.view()); },
                   x, out);
      },
      [] {});
  return values_of(out);
}

namespace {

template <class T>
AddResult linear_add_typed(const ProductCase& c, const ProductMatrix& m, const std::vector<float>& stream,
                           const std::vector<float>& other, bool replace) {
  const DeviceRows<T> x(c.tokens, c.columns, c.x, layout_of(c));
  const Weights w(c, m);
  DeviceRows<T> sum(c.tokens, m.rows, stream, layout_of(c));
  const DeviceRows<T> part(c.tokens, m.rows, layout_of(c)), snapshot(c.tokens, m.rows, layout_of(c));
  DeviceRows<T> second(c.tokens, m.rows, layout_of(c));
  LinearAddOptions<T> options;
  options.replace = replace, options.part = part.view(), options.snapshot = snapshot.view();
  if (!other.empty()) second.set(other), options.other = second.view();
  run_on_stream(
      c.replays, [&](const gpu& exec) { linear_add(exec, x.view(), matrix_of(w.weight), sum.view(), options); },
      [&] { sum.set(stream); });
  return {sum.get(), part.get(), snapshot.get()};
}

template <precision P>
std::vector<float> dense_mlp_typed(const ProductCase& c, const ProductMatrix& gated, const ProductMatrix& down) {
  using T = typename P::activation;
  const DeviceRows<T> x(c.tokens, c.columns, c.x, layout_of(c));
  const Weights w(c, gated);
  const Rows last = rows_of(down.bf16_weight, down.rows, gated.rows, down.weight, {c.shift, 0});
  const DeviceRows<T> out(c.tokens, down.rows, layout_of(c));
  DeviceMlpWorkspace<P> workspace(gated.rows, c.tokens);
  run_on_stream(
      c.replays,
      [&](const gpu& exec) {
        dense_mlp(exec, gated.glu, x.view(), matrix_of(w.weight), matrix_of(w.up), matrix_of(last), workspace,
                  out.view());
      },
      [] {});
  return out.get();
}

}  // namespace

AddResult device_linear_add(const ProductCase& c, const ProductMatrix& m, const std::vector<float>& stream,
                            const std::vector<float>& other, bool replace) {
  return c.bf16_x ? linear_add_typed<bf16>(c, m, stream, other, replace)
                  : linear_add_typed<float>(c, m, stream, other, replace);
}

std::vector<float> device_dense_mlp(const ProductCase& c, const ProductMatrix& gated, const ProductMatrix& down) {
  return c.bf16_x ? dense_mlp_typed<Bf16>(c, gated, down) : dense_mlp_typed<Fp32>(c, gated, down);
}

std::vector<std::string> device_linear_refusals() {
  DeviceBuffer<bf16> memory(64);
  DeviceBuffer<double> doubles(64);
  const auto m = [&](size first, size rows, size columns) { return device_view(memory.data() + first, rows, columns); };
  const gpu exec{};
  DeviceMlpWorkspace<Bf16> workspace(2, 1);
  LinearAddOptions<bf16> narrow;
  narrow.other = m(48, 2, 1);
  LinearAddOptions<bf16> part_in_stream, snapshot_in_other;
  part_in_stream.part = m(34, 2, 3);
  snapshot_in_other.other = m(40, 2, 3), snapshot_in_other.snapshot = m(43, 2, 3);
  const GluConfig no_cap{GluConfig::Kind::situ, 0.0f, 25.0f};
  return {thrown_by([&] { linear(exec, m(0, 2, 4), m(8, 3, 5), m(32, 2, 3)); }),
          thrown_by([&] { linear(exec, m(0, 2, 4), m(8, 3, 4), m(32, 3, 3)); }),
          thrown_by([&] { linear(exec, m(0, 2, 4), device_view(doubles.data(), 3, 4), m(32, 2, 3)); }),
          thrown_by([&] { linear(exec, m(0, 2, 4), m(8, 3, 4), m(1, 2, 3)); }),
          thrown_by([&] { linear(exec, m(0, 2, 4), AnyMatrix<MemorySpace::device>{}, m(32, 2, 3)); }),
          thrown_by([&] { linear_add(exec, m(0, 2, 4), m(8, 3, 4), m(32, 2, 3), narrow); }),
          thrown_by([&] { gated_projection(no_cap, m(8, 3, 4), m(20, 3, 4), m(32, 2, 3)); }), thrown_by([&] {
            dense_mlp(exec, GluConfig{}, m(0, 2, 4), m(8, 2, 4), m(16, 2, 4), m(24, 4, 2), workspace, m(32, 2, 4));
          }),
          thrown_by([&] {
            dense_mlp(exec, GluConfig{}, m(0, 1, 4), m(8, 2, 4), m(16, 2, 4), m(24, 4, 3), workspace, m(40, 1, 4));
          }),
          // What is written shares memory with something else.
          thrown_by([&] { linear(exec, m(0, 2, 4), m(8, 3, 4), m(19, 2, 3)); }), thrown_by([&] {
            projections(exec, m(0, 2, 4), {projection(m(8, 3, 4), m(32, 2, 3)), projection(m(20, 3, 4), m(37, 2, 3))});
          }),
          thrown_by([&] {
            projections(exec, m(0, 2, 4), {projection(m(8, 3, 4), m(31, 2, 3)), projection(m(20, 3, 4), m(40, 2, 3))});
          }),
          thrown_by([&] { linear_add(exec, m(0, 2, 4), m(8, 3, 4), m(7, 2, 3)); }),
          thrown_by([&] { linear_add(exec, m(0, 2, 4), m(8, 3, 4), m(32, 2, 3), part_in_stream); }),
          thrown_by([&] { linear_add(exec, m(0, 2, 4), m(8, 3, 4), m(32, 2, 3), snapshot_in_other); }), thrown_by([&] {
            dense_mlp(exec, GluConfig{}, m(0, 1, 4), m(8, 2, 4), m(16, 2, 4), m(24, 4, 2), workspace, m(2, 1, 4));
          }),
          thrown_by([&] {
            dense_mlp(exec, GluConfig{}, m(0, 1, 4), m(8, 2, 4), m(16, 2, 4), m(24, 4, 2), workspace, m(31, 1, 4));
          }),
          thrown_by([&] {
            dense_mlp_add(exec, GluConfig{}, m(0, 1, 4), m(8, 2, 4), m(16, 2, 4), m(24, 3, 2), workspace, m(36, 1, 3),
                          LinearAddOptions<bf16>{false, {}, m(36, 1, 3), {}});
          }),
          thrown_by([&] {
            dense_mlp_add(exec, GluConfig{}, m(0, 1, 4), m(8, 2, 4), m(16, 2, 4), m(24, 3, 2), workspace, m(36, 1, 3),
                          LinearAddOptions<bf16>{false, {}, m(13, 1, 3), {}});
          }),
          thrown_by([&] {
            dense_mlp_add(exec, GluConfig{}, m(0, 1, 4), m(8, 2, 4), m(16, 2, 4), m(24, 3, 2), workspace, m(36, 1, 3),
                          LinearAddOptions<bf16>{false, {}, {}, m(1, 1, 3)});
          })};
}

}  // namespace k3::test
