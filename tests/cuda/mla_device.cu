// SPDX-License-Identifier: Apache-2.0
#include "cuda/mla_device.hpp"

#include <k3/cuda/launch_k3_mla_decode_token.cuh>
#include <k3/geometry/presets.hpp>

#include "cuda/device_rows.cuh"
#include "support/thrown_by.hpp"

namespace k3::test {
namespace {

template <class To, class From>
std::vector<To> as(const std::vector<From>& values) {
  std::vector<To> result;
  for (const auto value : values) result.push_back(static_cast<To>(value));
  return result;
}

/// Everything of a call in device memory.
template <class T>
struct Resident {
  using P = detail::mla_precision<T>;
  MlaDeviceInputs in;
  MlaDeviceOptions options;
  size rows, width, page;
  DeviceRows<T> q, kv_a, gate, out;
  DeviceBuffer<T> norm, kv_b, pages;
  DeviceBuffer<float> float_norm, float_kv_b;
  DeviceBuffer<id> slots, table;
  DeviceBuffer<size> positions;
  DeviceBuffer<unsigned> status;
  MlaDeviceWorkspace<P> workspace;

  Resident(const MlaDeviceInputs& inputs, const MlaDeviceOptions& o)
      : in(inputs),
        options(o),
        rows(in.rows()),
        width(mla_cache_width(in.g)),
        page(in.page_size * width),
        q(rows, mla_q_width(in.g), in.q, {o.shift, o.gap}),
        kv_a(rows, width, in.kv_a, {o.shift, o.gap}),
        gate(in.gate.empty() ? 0 : rows, mla_v_width(in.g), in.gate, {o.shift, o.gap}),
        out(rows, mla_v_width(in.g), Layout{o.shift, o.gap}),
        norm(shifted<T>(in.norm)),
        kv_b(shifted<T>(in.kv_b)),
        pages(shifted<T>(in.pages)),
        float_norm(shifted<float>(in.norm)),
        float_kv_b(shifted<float>(in.kv_b)),
        slots(in.slot),
        table(in.table),
        positions(in.position),
        status(rows + 1),
        workspace(in.g, options.step ? options.step : rows, in.blocks * in.page_size) {}

  template <class U>
  DeviceBuffer<U> shifted(const std::vector<float>& values) const {
    std::vector<U> result(options.shift);
    for (const float value : values) result.push_back(U(value));
    return DeviceBuffer<U>(result);
  }
  template <class U, class... Extent>
  DeviceView<const U, sizeof...(Extent)> at(const DeviceBuffer<U>& buffer, Extent... extent) const {
    return device_view(static_cast<const U*>(buffer.data()) + options.shift, extent...);
  }
  MlaKvView<T, MemorySpace::device> kv() const {
    return {device_view(pages.data() + options.shift, in.page_count, in.page_size, width),
            device_view(static_cast<const id*>(table.data()), in.slots, in.blocks), in.page_size};
  }

  template <class G>
  void decode(const gpu& exec, G g) const {
    AnyVector<MemorySpace::device> norm_view(at(norm, in.norm.size()));
    AnyMatrix<MemorySpace::device> kv_b_view(at(kv_b, mla_kv_b_rows(in.g), in.g.kv_lora_rank));
    if (options.float_weights) {
      norm_view = at(float_norm, in.norm.size());
      kv_b_view = at(float_kv_b, mla_kv_b_rows(in.g), in.g.kv_lora_rank);
    }
    const size step = options.step ? options.step : rows;
    for (size first = 0; first < rows || (rows == 0 && first == 0); first += step ? step : 1) {
      const size count = detail::smaller(step, rows - first);
      DeviceView<const T, 2> gates{};
      if (!in.gate.empty()) gates = gate.view().slice(0, first, count);
      DeviceView<unsigned, 1> words{};
      if (options.with_status) words = status.view(rows).slice(0, first, count);
      mla_decode_token(exec, g, q.view().slice(0, first, count), kv_a.view().slice(0, first, count), norm_view,
                       kv_b_view, gates, DeviceView<const id, 1>(slots.view(rows)).slice(0, first, count),
                       DeviceView<const size, 1>(positions.view(rows)).slice(0, first, count), kv(), workspace,
                       out.view().slice(0, first, count), words);
    }
  }
  MlaDeviceOutputs outputs() const {
    auto all = as<float>(pages.to_vector());
    all.erase(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(options.shift));
    auto words = status.to_vector();
    words.pop_back();
    return {out.get(), all, words};
  }
};

}  // namespace

template <class T>
MlaDeviceOutputs mla_on_device(const MlaDeviceInputs& in, const MlaDeviceOptions& options) {
  Resident<T> call(in, options);
  std::vector<T> before = call.pages.to_vector();
  const auto settle = [] { detail::check_cuda("mla_on_device", "cudaDeviceSynchronize", cudaDeviceSynchronize()); };
  const auto restore = [&] {
    call.pages.copy_from(before.data(), 0, before.size());
    settle();  // the stream of the test does not wait for the default one
  };
  settle();
  run_on_stream(
      options.replays, [&](const gpu& exec) { call.decode(gpu{exec.stream, options.independent}, in.g); }, restore);
  return call.outputs();
}
template MlaDeviceOutputs mla_on_device<float>(const MlaDeviceInputs&, const MlaDeviceOptions&);
template MlaDeviceOutputs mla_on_device<bf16>(const MlaDeviceInputs&, const MlaDeviceOptions&);

template <class T>
std::vector<float> mla_absorbed_on_device(const MlaDeviceInputs& in) {
  const Resident<T> call(in, {});
  const DeviceRows<T> out(call.rows, in.g.heads * call.width);
  const Stream stream;
  mla_absorb_query(gpu{stream}, in.g, call.q.view(), call.at(call.kv_b, mla_kv_b_rows(in.g), in.g.kv_lora_rank),
                   device_view(out.view().data, call.rows, in.g.heads, call.width));
  stream.wait();
  return out.get();
}
template std::vector<float> mla_absorbed_on_device<float>(const MlaDeviceInputs&);
template std::vector<float> mla_absorbed_on_device<bf16>(const MlaDeviceInputs&);

template <class T>
std::vector<float> mla_expanded_on_device(const MlaDeviceInputs& in, const std::vector<float>& means) {
  const Resident<T> call(in, {});
  const DeviceBuffer<float> latents(means);
  const Stream stream;
  mla_expand_values(gpu{stream}, in.g,
                    device_view(static_cast<const float*>(latents.data()), call.rows, in.g.heads, in.g.kv_lora_rank),
                    call.at(call.kv_b, mla_kv_b_rows(in.g), in.g.kv_lora_rank), call.out.view());
  stream.wait();
  return call.out.get();
}
template std::vector<float> mla_expanded_on_device<float>(const MlaDeviceInputs&, const std::vector<float>&);
template std::vector<float> mla_expanded_on_device<bf16>(const MlaDeviceInputs&, const std::vector<float>&);

template <class T>
MlaDeviceOutputs mla_launched(const MlaDeviceInputs& in, bool resident) {
  const size rows = in.rows(), width = mla_cache_width(in.g), capacity = in.blocks * in.page_size;
  const auto q = as<T>(in.q), kv_a = as<T>(in.kv_a), norm = as<T>(in.norm), kv_b = as<T>(in.kv_b),
             gate = as<T>(in.gate);
  MlaKv<T> kv(in.g, in.slots, capacity, in.page_size);
  for (size s = 0; s < in.slots; ++s)
    for (size p = 0; p < capacity; ++p)
      for (size i = 0; i < width; ++i)
        kv.row(s, p)[i] =
            T(in.pages[mla_row_offset(in.table[s * in.blocks + p / in.page_size], in.page_size, p, width) + i]);
  std::vector<T> out(rows * mla_v_width(in.g));
  View<const T, 2> gates;
  if (!gate.empty()) gates = view(gate, rows, mla_v_width(in.g));
  const Stream stream;
  const auto launch = [&](auto&& f, auto& cache) {
    f(gpu{stream}, in.g, view(q, rows, mla_q_width(in.g)), view(kv_a, rows, width), view(norm),
      view(kv_b, mla_kv_b_rows(in.g), in.g.kv_lora_rank), gates, view(in.slot), view(in.position), cache,
      view(out, rows, mla_v_width(in.g)));
  };
  if (resident) {
    MlaDeviceKv<T> there(in.g, in.slots, capacity, in.page_size);
    for (size s = 0; s < in.slots; ++s) there.upload(s, kv, s, capacity, stream);
    launch([](auto&&... a) { launch_k3_mla_decode_token_on_device(a...); }, there);
    for (size s = 0; s < in.slots; ++s) there.download(s, kv, s, capacity, stream);
  } else {
    launch([](auto&&... a) { launch_k3_mla_decode_token(a...); }, kv);
  }
  MlaDeviceOutputs result{as<float>(out), in.pages, {}};
  for (size s = 0; s < in.slots; ++s)
    for (size p = 0; p < capacity; ++p)
      for (size i = 0; i < width; ++i)
        result.pages[mla_row_offset(in.table[s * in.blocks + p / in.page_size], in.page_size, p, width) + i] =
            static_cast<float>(kv.row(s, p)[i]);
  return result;
}
template MlaDeviceOutputs mla_launched<float>(const MlaDeviceInputs&, bool);
template MlaDeviceOutputs mla_launched<bf16>(const MlaDeviceInputs&, bool);

namespace {

/// to [rows, width]: row r is from[which[r]], or NaN where that is none.
template <class T>
__global__ void lay_out(const T* from, unsigned count, const std::uint16_t* which, size rows, unsigned width, T* to) {
  for (size row = blockIdx.x; row < rows; row += gridDim.x)
    for (unsigned c = threadIdx.x; c < width; c += blockDim.x)
      to[row * width + c] = which[row] < count ? from[size{which[row]} * width + c] : T(NAN);
}

}  // namespace

template <class T>
MlaAttendOutputs mla_attend_on_device(const MlaAttendInputs& in, bool independent) {
  const size rows = in.slot.size(), width = mla_cache_width(in.g), places = in.page_count * in.page_size;
  const DeviceBuffer<T> q(as<T>(in.q)), distinct(as<T>(in.distinct)), pages(places * width, false);
  const DeviceBuffer<std::uint16_t> which(in.which);
  lay_out<<<detail::grid_size(places, 1), 128>>>(
      static_cast<const T*>(distinct.data()), static_cast<unsigned>(in.distinct.size() / width),
      static_cast<const std::uint16_t*>(which.data()), places, static_cast<unsigned>(width), pages.data());
  detail::check_launch("lay_out");
  const DeviceBuffer<id> table(in.table), slots(in.slot);
  const DeviceBuffer<size> positions(in.position);
  const DeviceBuffer<unsigned> status(rows);
  const DeviceRows<float> out(rows, in.g.heads * in.g.kv_lora_rank);
  const MlaDeviceWorkspace<detail::mla_precision<T>> workspace(in.g, rows, in.blocks * in.page_size);
  detail::check_cuda("mla_attend_on_device", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  const Stream stream;
  mla_attend(gpu{stream, independent}, in.g, device_view(static_cast<const T*>(q.data()), rows, in.g.heads, width),
             MlaKvView<T, MemorySpace::device>{pages.view(in.page_count, in.page_size, width),
                                               device_view(static_cast<const id*>(table.data()), in.slots, in.blocks),
                                               in.page_size},
             device_view(static_cast<const id*>(slots.data()), rows),
             device_view(static_cast<const size*>(positions.data()), rows), workspace,
             device_view(out.view().data, rows, in.g.heads, in.g.kv_lora_rank), status.view(rows));
  stream.wait();
  return {out.get(), status.to_vector()};
}
template MlaAttendOutputs mla_attend_on_device<float>(const MlaAttendInputs&, bool);
template MlaAttendOutputs mla_attend_on_device<bf16>(const MlaAttendInputs&, bool);

std::vector<float> mla_in_far_slot(const MlaDeviceInputs& in, size slots, size slot) {
  MlaDeviceInputs one = in;
  one.slot = {static_cast<id>(slot)}, one.position = {0};
  const Resident<bf16> call(one, {});
  const MlaDeviceKv<bf16> far(in.g, slots, 1);
  const Stream stream;
  const MlaDeviceWorkspace<Bf16> workspace(in.g, 1, 1);
  mla_decode_token(gpu{stream}, in.g, call.q.view(), call.kv_a.view(), call.at(call.norm, in.norm.size()),
                   call.at(call.kv_b, mla_kv_b_rows(in.g), in.g.kv_lora_rank), call.gate.view(), call.slots.view(1),
                   call.positions.view(1), far.view(), workspace, call.out.view(), call.status.view(1));
  stream.wait();
  if (call.status.to_vector()[0] != 0) return {};
  std::vector<bf16> row(far.width());
  far.download(slot, row.data(), 1, stream);
  std::vector<float> result = call.out.get();
  for (const bf16 value : row) result.push_back(static_cast<float>(value));
  return result;
}

std::string mla_device_kv_faults() {
  const MlaConfig g{2, 4, 2, 4, 0, 6, true, true, 1e-6f};
  MlaDeviceKv<bf16> kv(g, 2, 10, 4);  // 3 pages a slot
  if (kv.capacity() != 12 || kv.bytes() != 2 * 12 * 8 * 2) return "sizes";
  const Stream stream;
  kv.set_block_table({5, 1, 3, 0, 4, 2}, stream);
  std::vector<bf16> rows(12 * 8), back(12 * 8);
  for (size i = 0; i < rows.size(); ++i) rows[i] = bf16(static_cast<float>(i) + 0.5f);
  kv.upload(1, rows.data(), 11, stream);
  kv.download(1, back.data(), 12, stream);
  for (size i = 0; i < rows.size(); ++i)
    if (back[i].bits != (i < 11 * 8 ? rows[i].bits : 0)) return "slot 1 differs at " + std::to_string(i);
  kv.download(0, back.data(), 12, stream);
  for (const bf16 value : back)
    if (value.bits != 0) return "slot 0 was touched";
  MlaKv<bf16> host_kv(g, 1, 11, 3);
  kv.download(1, host_kv, 0, 11, stream);
  for (size p = 0; p < 11; ++p)
    for (size i = 0; i < 8; ++i)
      if (host_kv.row(0, p)[i].bits != rows[p * 8 + i].bits) return "a host cache differs";
  kv.upload(0, host_kv, 0, 11, stream);
  kv.download(0, back.data(), 11, stream);
  for (size i = 0; i < 11 * 8; ++i)
    if (back[i].bits != rows[i].bits) return "slot 0 differs";
  kv.set_length(0, 7);
  if (kv.length(0) != 7) return "length";
  kv.reset(0);
  if (kv.length(0) != 0) return "reset";
  const auto refused = [](const char* argument, auto&& work) {
    return thrown_by(work) == std::string("MlaDeviceKv/") + argument;
  };
  if (!refused("slot", [&] { kv.upload(2, rows.data(), 1, stream); })) return "a slot too far";
  if (!refused("length", [&] { kv.upload(0, rows.data(), 13, stream); })) return "rows too many";
  if (!refused("a page", [&] { kv.set_block_table({5, 1, 3, 0, 4, 6}, stream); })) return "a page too far";
  if (!refused("the block table's length", [&] { kv.set_block_table({0}, stream); })) return "a table too short";
  if (!refused("slots", [&] { MlaDeviceKv<bf16>(g, 0, 1); })) return "no slots";
  return "";
}

namespace {

MlaDeviceInputs small_inputs() {
  MlaDeviceInputs in;
  in.g = {2, 4, 2, 4, 8, 6, true, true, 1e-6f};  // tiny::Mla
  in.slots = 2, in.blocks = 1, in.page_size = 4, in.page_count = 2;
  const auto fill = [](size count) {
    std::vector<float> values(count);
    for (size i = 0; i < count; ++i) values[i] = static_cast<float>(i * 7 % 11) / 8 - 0.5f;
    return values;
  };
  in.q = fill(2 * 12), in.kv_a = fill(2 * 8), in.norm = fill(6), in.kv_b = fill(16 * 6), in.gate = fill(2 * 8);
  in.pages = fill(2 * 4 * 8), in.table = {0, 1}, in.slot = {0, 1}, in.position = {2, 3};
  return in;
}

}  // namespace

std::string mla_refused_argument(const std::string& wrong) {
  const Resident<bf16> c(small_inputs(), {});
  MlaConfig g = c.in.g;
  auto q = c.q.view(), kv_a = c.kv_a.view(), gate = c.gate.view(), out = c.out.view();
  auto slots = c.slots.view(2);
  auto positions = c.positions.view(2);
  auto kv = c.kv();
  AnyVector<MemorySpace::device> norm(c.at(c.norm, 6));
  AnyMatrix<MemorySpace::device> kv_b(c.at(c.kv_b, 16, 6));
  const DeviceBuffer<double> doubles(16 * 6);
  MlaDeviceWorkspace<Bf16> workspace(g, 2, 4);
  auto status = c.status.view(2);
  if (wrong == "rotated") g.mla_use_nope = false;
  if (wrong == "q") q = q.slice(1, 0, 11);
  if (wrong == "kv_a") kv_a = kv_a.slice(0, 0, 1);
  if (wrong == "norm") norm = c.at(c.norm, 5);
  if (wrong == "kv_b") kv_b = c.at(c.kv_b, 15, 6);
  if (wrong == "double weights") kv_b = doubles.view(16, 6);
  if (wrong == "no gate") gate = {};
  if (wrong == "positions") positions = positions.slice(0, 0, 1);
  if (wrong == "pages") kv.pages = device_view(c.pages.data(), 2, 4, 7);
  if (wrong == "workspace rows") workspace = MlaDeviceWorkspace<Bf16>(g, 1, 4);
  if (wrong == "workspace capacity") workspace = MlaDeviceWorkspace<Bf16>(g, 2, 3);
  if (wrong == "out") out = out.slice(1, 0, 7);
  if (wrong == "out over gate") out = gate;
  if (wrong == "out over q") out = device_view(c.q.view().data, 2, 8);
  if (wrong == "out over kv_a") out = device_view(c.kv_a.view().data, 2, 8);
  if (wrong == "out over kv_b") out = device_view(c.kv_b.data(), 2, 8);
  if (wrong == "out over pages") out = device_view(c.pages.data(), 2, 8);
  if (wrong == "slots over out") slots = device_view(reinterpret_cast<id*>(out.data), 2);
  if (wrong == "positions over out") positions = device_view(reinterpret_cast<size*>(out.data), 2);
  if (wrong == "pages over kv_b") kv.pages = device_view(c.kv_b.data(), 2, 4, 8);
  if (wrong == "pages over kv_a") kv_a = device_view(c.pages.data(), 2, 8);
  if (wrong == "pages over q") q = device_view(c.pages.data(), 2, 12);
  if (wrong == "pages over gate") gate = device_view(c.pages.data(), 2, 8);
  if (wrong == "pages over table") kv.block_table = device_view(reinterpret_cast<const id*>(c.pages.data()), 2, 1);
  if (wrong == "status over slots") slots = device_view(reinterpret_cast<id*>(status.data), 2);
  if (wrong == "status over out") status = device_view(reinterpret_cast<unsigned*>(out.data), 2);
  if (wrong == "status") status = status.slice(0, 0, 1);
  return thrown_by([&] {
    mla_decode_token(gpu{}, g, q, kv_a, norm, kv_b, gate, slots, positions, kv, workspace, out, status);
    detail::check_cuda("mla_refused_argument", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  });
}

std::string mla_refused_overlap(const std::string& part) {
  const Resident<bf16> c(small_inputs(), {});
  const MlaConfig g = c.in.g;
  const auto slots = c.slots.view(2);
  const auto positions = c.positions.view(2);
  const AnyMatrix<MemorySpace::device> kv_b(c.at(c.kv_b, 16, 6));
  const AnyVector<MemorySpace::device> norm(c.at(c.norm, 6));
  const DeviceView<const bf16, 3> q_latent = c.workspace.q_latent(2);
  const DeviceBuffer<float> means(2 * 2 * 6);
  return thrown_by([&] {
    if (part == "append, status") {
      auto* const words = reinterpret_cast<unsigned*>(c.kv_a.view().data);
      mla_append(gpu{}, g, c.kv_a.view(), norm, 1e-6f, slots, positions, c.kv(), device_view(words, 2));
    } else if (part == "append") {
      mla_append(gpu{}, g, c.kv_a.view(), norm, 1e-6f, slots, positions,
                 MlaKvView<bf16, MemorySpace::device>{device_view(c.norm.data(), 2, 4, 8), c.kv().block_table, 4});
    } else if (part == "absorb") {
      mla_absorb_query(gpu{}, g, c.q.view(), kv_b, device_view(c.kv_b.data(), 2, 2, 8));
    } else if (part == "attend") {
      mla_attend(gpu{}, g, q_latent, c.kv(), slots,
                 DeviceView<const size, 1>(device_view(reinterpret_cast<const size*>(means.data()), 2)), c.workspace,
                 means.view(2, 2, 6));
    } else {
      mla_expand_values(gpu{}, g, DeviceView<const float, 3>(means.view(2, 2, 6)), kv_b,
                        device_view(c.kv_b.data() + 16, 2, 8));
    }
  });
}

std::string mla_launch_refused(const std::string& wrong) {
  MlaDeviceInputs in = small_inputs();
  const auto rows = [&](const char* name, std::vector<float>& values, size count, size columns) {
    auto matrix = view(values.data(), count, wrong == name ? columns - 1 : columns);
    if (wrong == std::string("no ") + name) matrix.data = nullptr;
    return matrix;
  };
  const auto q = rows("q", in.q, 2, 12), kv_a = rows("kv_a", in.kv_a, 2, 8), kv_b = rows("kv_b", in.kv_b, 16, 6),
             gate = rows("gate", in.gate, 2, 8);
  auto norm = view(in.norm);
  if (wrong == "kv_a_layernorm") norm.extents[0] = 5;
  if (wrong == "no kv_a_layernorm") norm.data = nullptr;
  std::vector<float> result(2 * 8);
  auto out = rows("out", result, 2, 8);
  if (wrong == "out over kv_b") out.data = in.kv_b.data() + 5;
  if (wrong == "positions") in.position[1] = 4;
  if (wrong == "positions that do not follow") in.slot = {0, 0}, in.position = {1, 3};
  if (wrong == "slots") in.slot[1] = 2;
  MlaKv<float> kv(in.g, 2, 4);
  return thrown_by([&] {
    launch_k3_mla_decode_token(gpu{}, in.g, q, kv_a, norm, kv_b, gate, view(in.slot), view(in.position), kv, out);
  });
}

bool mla_static_geometry_agrees() {
  const MlaDeviceInputs in = small_inputs();
  const Resident<bf16> a(in, {}), b(in, {});
  const Stream stream;
  a.decode(gpu{stream}, in.g);
  b.decode(gpu{stream}, tiny::Mla{});
  stream.wait();
  return a.out.get() == b.out.get() && mla_config(tiny::Mla{}) == in.g;
}

}  // namespace k3::test
