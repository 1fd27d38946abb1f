// SPDX-License-Identifier: Apache-2.0
#include "cuda/row_ops_device.hpp"

#include <k3/cuda/argmax.cuh>
#include <k3/cuda/attnres_norm.cuh>
#include <k3/cuda/embed_tokens.cuh>
#include <k3/cuda/rms_norm.cuh>
#include <k3/cuda/sigmoid_topk.cuh>

#include "cuda/device_rows.cuh"
#include "support/thrown_by.hpp"

namespace k3::test {
namespace {

/// f(AnyVector) of a weight on the device in the type that the call asks for.
template <class F>
void with_weight(const RowCall& call, const std::vector<float>& values, F&& f) {
  const Layout layout{call.shift, 0};
  if (call.bf16_weight) {
    const DeviceRows<bf16> rows(1, values.size(), values, layout);
    f(AnyVector<MemorySpace::device>(rows.row()));
  } else {
    const DeviceRows<float> rows(1, values.size(), values, layout);
    f(AnyVector<MemorySpace::device>(rows.row()));
  }
}

template <class X, class Out>
std::vector<float> rms_norm_typed(const RowCall& call, size rows, size count, const std::vector<float>& x,
                                  const std::vector<float>& weight, float eps, bool in_place) {
  const Layout layout{call.shift, call.gap};
  DeviceRows<X> from(rows, count, x, layout);
  const DeviceRows<Out> to(rows, count, layout);
  std::vector<float> result;
  with_weight(call, weight, [&](const auto& w) {
    run_on_stream(
        call.replays,
        [&](const gpu& exec) {
          if (in_place)
            rms_norm(exec, from.view(), w, eps, from.view());
          else
            rms_norm(exec, from.view(), w, eps, to.view());
        },
        [&] { from.set(x); });
    result = in_place ? from.get() : to.get();
  });
  return result;
}

template <class T>
MixResult attnres_norm_typed(const RowCall& call, const MixCase& c) {
  const Layout layout{call.shift, call.gap};
  const DeviceRows<T> stored(c.stored * c.rows, c.hidden, c.snapshots, layout),
      running(c.rows, c.hidden, c.running, layout);
  const DeviceRows<T> out(c.rows, c.hidden, layout);
  const DeviceRows<float> mixed(c.rows, c.hidden, layout), probs(c.rows, c.stored + 1, layout);
  DeviceView<T, 3> snapshots{stored.view().data, {c.stored, c.rows, c.hidden}, {}};
  snapshots.strides[2] = 1, snapshots.strides[1] = c.hidden + call.gap,
  snapshots.strides[0] = c.rows * (c.hidden + call.gap);
  with_weight(call, c.res_norm, [&](const auto& res_norm) {
    with_weight(call, c.res_proj, [&](const auto& res_proj) {
      with_weight(call, c.norm, [&](const auto& norm) {
        run_on_stream(
            call.replays,
            [&](const gpu& exec) {
              attnres_norm(exec, snapshots, running.view(), res_norm, res_proj, c.res_eps, norm, c.norm_eps, out.view(),
                           c.only_out ? AttnResNormOptions{c.mix, {}, {}, c.before_product}
                                      : AttnResNormOptions{c.mix, mixed.view(), probs.view(), c.before_product});
            },
            [] {});
      });
    });
  });
  return {out.get(), mixed.get(), probs.get()};
}

template <class Entry, class Out>
EmbedResult embed_typed(const RowCall& call, const std::vector<id>& ids, size vocab, size hidden,
                        const std::vector<float>& table) {
  const DeviceBuffer<id> tokens(ids);
  const DeviceRows<Entry> entries(vocab, hidden, table, Layout{call.shift, 0});
  const DeviceRows<Out> out(ids.size(), hidden, Layout{call.shift, call.gap});
  const DeviceBuffer<unsigned> status(ids.size());
  run_on_stream(
      call.replays,
      [&](const gpu& exec) {
        embed_tokens(exec, tokens.view(ids.size()), entries.view(), out.view(), {}, status.view(ids.size()));
      },
      [] {});
  return {out.get(), status.to_vector()};
}

}  // namespace

std::vector<float> device_rms_norm(const RowCall& call, size rows, size count, const std::vector<float>& x,
                                   const std::vector<float>& weight, float eps, bool in_place, bool float_x) {
  if (!call.is_bf16) return rms_norm_typed<float, float>(call, rows, count, x, weight, eps, in_place);
  return float_x ? rms_norm_typed<float, bf16>(call, rows, count, x, weight, eps, false)
                 : rms_norm_typed<bf16, bf16>(call, rows, count, x, weight, eps, in_place);
}

MixResult device_attnres_norm(const RowCall& call, const MixCase& c) {
  return call.is_bf16 ? attnres_norm_typed<bf16>(call, c) : attnres_norm_typed<float>(call, c);
}

IdsResult device_argmax(const RowCall& call, size rows, size count, const std::vector<float>& logits) {
  const DeviceRows<float> from(rows, count, logits, Layout{call.shift, call.gap});
  DeviceBuffer<id> ids(std::vector<id>(rows + 1, 12345));
  const DeviceBuffer<unsigned> status(rows + 1);
  DeviceArgmaxWorkspace workspace(rows);
  run_on_stream(
      call.replays,
      [&](const gpu& exec) {
        argmax(exec, from.view(), workspace, ids.view(rows + 1).slice(0, 0, rows),
               status.view(rows + 1).slice(0, 0, rows));
      },
      [] {});
  std::vector<id> result = ids.to_vector();
  if (result.back() != 12345) throw std::runtime_error("argmax: written past the last row");
  result.pop_back();
  std::vector<unsigned> words = status.to_vector();
  words.pop_back();
  return {result, words};
}

EmbedResult device_embed(const RowCall& call, const std::vector<id>& ids, size vocab, size hidden,
                         const std::vector<float>& table) {
  if (call.is_bf16)
    return call.bf16_weight ? embed_typed<bf16, bf16>(call, ids, vocab, hidden, table)
                            : embed_typed<float, bf16>(call, ids, vocab, hidden, table);
  return call.bf16_weight ? embed_typed<bf16, float>(call, ids, vocab, hidden, table)
                          : embed_typed<float, float>(call, ids, vocab, hidden, table);
}

namespace {

/// Calls with one wrong argument each.
struct Refusals {
  const DeviceBuffer<float> memory{64};
  const DeviceBuffer<double> doubles{64};
  const DeviceBuffer<id> ids{8};
  const DeviceBuffer<unsigned> words{8};
  DeviceArgmaxWorkspace workspace{1};
  const gpu exec{};
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const DeviceView<float, 2> none{nullptr, {2, 4}, {4, 1}};
  std::vector<std::string> found;

  template <class Work>
  void add(Work&& work) {
    found.push_back(thrown_by(work));
  }
  DeviceView<float, 2> m(size first, size rows, size columns) const {
    return device_view(memory.data() + first, rows, columns);
  }
  DeviceView<float, 1> v(size count) const { return device_view(memory.data(), count); }
  DeviceView<const id, 1> slots(size rows) const { return ids.view(8).slice(0, 4, rows); }

  void of_norms() {
    const auto norm = [&](const auto& weight, float eps, const auto& out) {
      add([&] { rms_norm(exec, m(0, 2, 4), weight, eps, out); });
    };
    norm(v(5), 1e-5f, m(8, 2, 4));
    norm(v(4), 1e-5f, m(8, 2, 5));
    norm(device_view(doubles.data(), 4), 1e-5f, m(8, 2, 4));
    norm(AnyVector<MemorySpace::device>{}, 1e-5f, m(8, 2, 4));
    for (const float eps : {-1e-5f, nan, infinity}) norm(v(4), eps, m(8, 2, 4));
    norm(v(4), 1e-5f, none);
    add([&] { rms_norm(exec, none, v(4), 1e-5f, m(8, 2, 4)); });
  }

  void of_embeddings() {
    using Table = AnyMatrix<MemorySpace::device>;
    const auto embed = [&](const Table& table, const auto& out, size slot_rows, size status_rows) {
      add([&] { embed_tokens(exec, ids.view(2), table, out, slots(slot_rows), words.view(status_rows)); });
    };
    const auto codes = reinterpret_cast<const unsigned char*>(memory.data());
    const Mxfp4Matrix<MemorySpace::device> packed{device_view(codes, 2, 16), device_view(codes + 32, 2, 1)};
    embed(m(0, 5, 4), m(32, 2, 3), 2, 2);
    embed({}, m(32, 2, 4), 2, 2);
    embed(packed, m(0, 2, 32), 2, 2);
    embed(device_view(doubles.data(), 5, 4), m(32, 2, 4), 2, 2);
    embed(m(0, 5, 4), m(32, 3, 4), 2, 2);
    embed(m(0, 5, 4), m(32, 2, 4), 3, 2);
    embed(m(0, 5, 4), m(32, 2, 4), 2, 3);
  }

  void of_choices() {
    const auto choose = [&](const auto& logits, size rows, size status_rows) {
      add([&] { argmax(exec, logits, workspace, ids.view(rows), words.view(status_rows)); });
    };
    choose(m(0, 2, 4), 2, 2);
    choose(m(0, 1, 0), 1, 1);
    choose(m(0, 1, 4), 2, 1);
    choose(m(0, 1, 4), 1, 2);
    choose(none, 2, 2);
  }

  struct Mix {
    size snapshots = 2, rows = 2, res_norm = 4, res_proj = 4, norm = 4, out = 4, mixed = 4, probs = 3;
    float res_eps = 1e-5f, norm_eps = 1e-5f, mix = 1.0f;
  };
  void mix(const Mix& c) {
    add([&] {
      const AttnResNormOptions options{c.mix, m(40, 2, c.mixed), m(48, 2, c.probs)};
      attnres_norm(exec, device_view(memory.data(), c.snapshots, size{2}, size{4}), m(16, c.rows, 4), v(c.res_norm),
                   v(c.res_proj), c.res_eps, v(c.norm), c.norm_eps, m(32, c.rows, c.out), options);
    });
  }
  void of_mixtures() {
    mix({.res_norm = 5});
    mix({.res_proj = 3});
    mix({.norm = 3});
    for (const float eps : {-1.0f, nan, infinity}) mix({.res_eps = eps}), mix({.norm_eps = eps});
    for (const float part : {2.0f, -0.5f, nan}) mix({.mix = part});
    mix({.rows = 1});
    mix({.out = 3});
    mix({.mixed = 3});
    mix({.probs = 2});
    mix({.snapshots = 256});
    add([&] {
      attnres_norm(exec, device_view(memory.data(), 2, 2, 0), m(16, 2, 0), v(0), v(0), 1e-5f, v(0), 1e-5f, m(32, 2, 0));
    });
  }

  struct Route {
    size experts = 4, bias = 4, k = 2, ids = 2, weights = 2, slots = 2, status = 2;
    float scale = 1.0f;
  };
  void route(const Route& c) {
    add([&] {
      sigmoid_topk(exec, m(0, 2, c.experts), device_view(memory.data() + 8, c.bias), c.k, true, c.scale,
                   ids.view(2, c.ids), m(16, 2, c.weights), slots(c.slots), words.view(c.status));
    });
  }
  void of_routings() {
    route({.experts = 0});
    route({.bias = 5});
    route({.k = 0});
    route({.k = 5});
    for (const float scale : {infinity, -infinity, nan}) route({.scale = scale});
    route({.ids = 1});
    route({.weights = 3});
    route({.slots = 3});
    route({.status = 1});
    add([&] {
      sigmoid_topk(exec, m(0, 2, 4), device_view(doubles.data(), 4), 2, true, 1.0f, ids.view(2, 2), m(16, 2, 2));
    });
  }
};

}  // namespace

std::vector<std::string> device_row_refusals() {
  Refusals refusals;
  refusals.of_norms();
  refusals.of_embeddings();
  refusals.of_choices();
  refusals.of_mixtures();
  refusals.of_routings();
  return refusals.found;
}

std::vector<size> device_empty_launches() {
  const DeviceBuffer<float> memory(64);
  const DeviceBuffer<id> ids(8);
  DeviceArgmaxWorkspace workspace(1);
  const Stream stream;
  const gpu exec{stream};
  const auto m = [&](size first, size rows, size columns) { return device_view(memory.data() + first, rows, columns); };
  const auto v = [&](size count) { return device_view(memory.data() + 56, count); };
  const auto launches = [&](auto&& work) {
    cudaGraph_t graph = captured(stream, work);
    std::size_t count = 0;
    detail::check_cuda("device_empty_launches", "cudaGraphGetNodes", cudaGraphGetNodes(graph, nullptr, &count));
    detail::check_cuda("device_empty_launches", "cudaGraphDestroy", cudaGraphDestroy(graph));
    detail::check_launch("device_empty_launches");
    return size{count};
  };
  const auto norm = [&](size rows, size columns) {
    return launches([&] { rms_norm(exec, m(0, rows, columns), v(columns), 1e-5f, m(16, rows, columns)); });
  };
  const auto embed = [&](size rows, size hidden) {
    return launches([&] {
      embed_tokens(exec, ids.view(rows), AnyMatrix<MemorySpace::device>(m(0, 5, hidden)), m(32, rows, hidden));
    });
  };
  return {norm(0, 4),
          norm(2, 0),
          embed(0, 4),
          embed(2, 0),
          launches([&] { argmax(exec, m(0, 0, 4), workspace, ids.view(0)); }),
          launches([&] {
            attnres_norm(exec, device_view(memory.data(), 2, 0, 4), m(16, 0, 4), v(4), v(4), 1e-5f, v(4), 1e-5f,
                         m(32, 0, 4));
          }),
          launches([&] { sigmoid_topk(exec, m(0, 0, 4), v(4), 2, true, 1.0f, ids.view(0, 2), m(16, 0, 2)); }),
          norm(1, 4)};
}

namespace {

template <class Work>
std::string overlap(Work&& work) {
  try {
    work();
    detail::check_cuda("test", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  } catch (const invalid_argument& e) {
    return e.operation() + ": " + e.argument() + " " + e.found();
  }
  return "accepted";
}

/// Two rows of four floats, and what else calls take, at any place of one memory.
struct Overlaps {
  DeviceBuffer<float> memory{256};
  const gpu exec{};

  DeviceView<float, 2> matrix(size at) const { return device_view(memory.data() + at, 2, 4); }
  DeviceView<float, 1> vector(size at) const { return device_view(memory.data() + at, 4); }
  template <class T = id>
  DeviceView<T, 1> words(size at) const {
    return device_view(reinterpret_cast<T*>(memory.data() + at), 2);
  }
  std::string norm(size x, size weight, size out) const {
    return overlap([&] { rms_norm(exec, matrix(x), vector(weight), 1e-5f, matrix(out)); });
  }
  /// Snapshots at 0, the running stream at 16, weights at 24, 28, 32.
  std::string mix(size out, size mixed, size probs) const {
    const auto snapshots = device_view(memory.data(), 2, 2, 4);
    const AttnResNormOptions options{1.0f, matrix(mixed), device_view(memory.data() + probs, 2, 3)};
    return overlap([&] {
      attnres_norm(exec, snapshots, matrix(16), vector(24), vector(28), 1e-5f, vector(32), 1e-5f, matrix(out), options);
    });
  }
  /// Logits at 0.
  std::string choose(size ids, size status) const {
    DeviceArgmaxWorkspace work(2);
    return overlap([&] { argmax(exec, matrix(0), work, words(ids), words<unsigned>(status)); });
  }
  /// Ids at 0, the table at 4, slots at 60.
  std::string embed(size out, size status) const {
    return overlap([&] {
      embed_tokens(exec, words(0), AnyMatrix<MemorySpace::device>(matrix(4)), matrix(out), words(60),
                   words<unsigned>(status));
    });
  }
  /// Logits at 0, the bias at 8, slots at 12; two of four are chosen.
  std::string route(size ids, size weights, size status) const {
    const auto chosen = device_view(reinterpret_cast<id*>(memory.data() + ids), 2, 2);
    return overlap([&] {
      sigmoid_topk(exec, matrix(0), vector(8), 2, true, 1.0f, chosen, device_view(memory.data() + weights, 2, 2),
                   words(12), words<unsigned>(status));
    });
  }
};

}  // namespace

std::vector<std::string> device_row_overlaps() {
  const Overlaps o;
  DeviceView<float, 2> left = o.matrix(0), right = o.matrix(4);  // columns of one matrix
  left.strides[0] = right.strides[0] = 8;
  const auto half = device_view(reinterpret_cast<bf16*>(o.memory.data()), 2, 4);
  return {o.norm(0, 8, 0),
          overlap([&] { rms_norm(o.exec, left, o.vector(32), 1e-5f, right); }),
          o.norm(0, 8, 1),
          o.norm(0, 8, 11),
          overlap([&] { rms_norm(o.exec, o.matrix(0), o.vector(32), 1e-5f, half); }),
          o.mix(40, 48, 56),
          o.mix(15, 48, 56),
          o.mix(17, 48, 56),
          o.mix(9, 48, 56),
          o.mix(27, 48, 56),
          o.mix(31, 48, 56),
          o.mix(35, 48, 56),
          o.mix(40, 16, 56),
          o.mix(40, 40, 56),
          o.mix(40, 48, 10),
          o.mix(40, 48, 55),
          o.choose(8, 10),
          o.choose(7, 10),
          o.choose(8, 0),
          o.choose(8, 9),
          o.embed(16, 32),
          o.embed(1, 32),
          o.embed(55, 32),
          o.embed(11, 32),
          o.embed(16, 23),
          o.route(16, 20, 24),
          o.route(7, 20, 24),
          o.route(11, 20, 24),
          o.route(13, 20, 24),
          o.route(16, 19, 24),
          o.route(16, 4, 24),
          o.route(16, 20, 12)};
}

}  // namespace k3::test
