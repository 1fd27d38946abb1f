// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <random>

#include <k3/cuda/launch_k3_kda_decode_token.cuh>
#include <k3/geometry/presets.hpp>

#include "cuda/graph.cuh"
#include "cuda/kda_device.hpp"
#include "support/thrown_by.hpp"

namespace k3::test {
namespace {

/// What lies between rows and around them.
template <class T>
constexpr T untouched() {
  if constexpr (std::is_same_v<T, id>)
    return -77;
  else
    return static_cast<T>(1e30f);
}

/// Rows of a tensor in device memory, `shift` elements off the allocation and with `gap` elements between rows.
template <class T>
class Placed {
 public:
  Placed(const std::vector<T>& values, size rows, size shift, size gap)
      : rows_(rows), width_(rows ? values.size() / rows : 0), shift_(shift), stride_(width_ + gap) {
    std::vector<T> all(shift + rows * stride_, untouched<T>());
    for (size r = 0; r < rows; ++r)
      for (size c = 0; c < width_; ++c) all[shift + r * stride_ + c] = values[r * width_ + c];
    buffer_ = DeviceBuffer<T>(all);
  }
  T* data() const { return buffer_.data() ? buffer_.data() + shift_ : nullptr; }
  size stride() const { return stride_; }

  DeviceView<T, 2> matrix(size columns) const {
    DeviceView<T, 2> v = device_view(data(), rows_, columns);
    v.strides[0] = stride_;
    return v;
  }
  std::vector<T> values(bool& gaps_kept) const {
    const std::vector<T> all = buffer_.to_vector();
    std::vector<T> result;
    for (size i = 0; i < all.size(); ++i) {
      const bool inside = i >= shift_ && (i - shift_) % stride_ < width_;
      if (inside)
        result.push_back(all[i]);
      else
        gaps_kept = gaps_kept && static_cast<float>(all[i]) == static_cast<float>(untouched<T>());
    }
    return result;
  }

 private:
  size rows_, width_, shift_, stride_;
  DeviceBuffer<T> buffer_;
};

/// A weight as float or bf16.
class Weight {
 public:
  Weight(const std::vector<float>& values, const KdaDeviceOptions& options)
      : bf16_(options.bf16_weights), shift_(options.shift) {
    std::vector<float> wide(shift_);
    wide.insert(wide.end(), values.begin(), values.end());
    if (bf16_)
      narrow_ = DeviceBuffer<bf16>(std::vector<bf16>(wide.begin(), wide.end()));
    else
      wide_ = DeviceBuffer<float>(wide);
  }
  AnyVector<MemorySpace::device> vector(size count) const { return any(count); }
  AnyMatrix<MemorySpace::device> matrix(size rows, size columns) const { return any(rows, columns); }

 private:
  template <class... Extent>
  AnyView<sizeof...(Extent), MemorySpace::device> any(Extent... extent) const {
    if (bf16_) return device_view(static_cast<const bf16*>(narrow_.data() + shift_), extent...);
    return device_view(static_cast<const float*>(wide_.data() + shift_), extent...);
  }
  bool bf16_;
  size shift_;
  DeviceBuffer<float> wide_;
  DeviceBuffer<bf16> narrow_;
};

/// `step(exec)` as often and in the way the options say.
template <class Step>
void run(const KdaDeviceOptions& options, Step&& step) {
  detail::check_cuda("test", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  const Stream stream;
  if (options.graph)
    replay(stream, options.calls, [&] { step(gpu{stream}); }, [] {});
  else
    for (int i = 0; i < options.calls; ++i) step(gpu{stream});
  stream.wait();
}

template <class F>
void with_geometry(const KdaConfig& g, const KdaDeviceOptions& options, F&& f) {
  if (!options.static_geometry) return f(g);
  if (g.head_dim == kimi_k3::Kda::head_dim && g.heads == kimi_k3::Kda::heads) return f(kimi_k3::Kda{});
  f(tiny::Kda{});
}

/// The memory of a call: the state, and what both forms read.
template <class X, class Out>
struct Memory {
  const KdaDeviceInputs<X>& in;
  size width, channels, held, shift, gap;
  Placed<X> x;
  Placed<float> state;
  Placed<X> window;
  Placed<Out> out;
  Placed<id> slots;
  Weight conv;
  DeviceBuffer<unsigned> status;

  Memory(const KdaDeviceInputs<X>& inputs, const KdaDeviceOptions& o)
      : in(inputs),
        width(kda_width(in.g)),
        channels(kda_conv_channels(in.g)),
        held(in.g.conv_kernel - 1),
        shift(o.shift),
        gap(o.gap),
        x(in.x, in.rows, o.shift, o.gap),
        state(in.state, in.slots, o.shift, o.gap),
        window(in.window, in.slots, o.shift, o.gap),
        out(std::vector<Out>(in.rows * width, static_cast<Out>(7.0f)), in.rows, o.shift, o.gap),
        slots(in.slot, 1, o.shift, 0),
        conv(in.conv, o),
        status(in.rows) {}

  KdaStateView<float, X, MemorySpace::device> view() const {
    KdaStateView<float, X, MemorySpace::device> v{
        device_view(state.data(), in.slots, in.g.heads, in.g.head_dim, in.g.head_dim),
        device_view(window.data(), in.slots, channels, held)};
    v.recurrent.strides[0] = state.stride(), v.conv.strides[0] = window.stride();
    return v;
  }
  DeviceView<const id, 1> ids() const { return device_view(static_cast<const id*>(slots.data()), in.rows); }
  KdaDeviceOutputs<Out, X> outputs() const {
    KdaDeviceOutputs<Out, X> result;
    result.out = out.values(result.gaps_kept), result.state = state.values(result.gaps_kept);
    result.window = window.values(result.gaps_kept), result.status = status.to_vector();
    return result;
  }
};

}  // namespace

template <class X>
KdaDeviceOutputs<float, X> kda_token_on_device(const KdaDeviceInputs<X>& in, const KdaDeviceOptions& options) {
  const Memory<X, float> m(in, options);
  const Placed<float> decay(in.log_decay, in.rows, options.shift, options.gap);
  const Placed<float> beta(in.beta_float, in.rows, options.shift, options.gap);
  with_geometry(in.g, options, [&](auto g) {
    const auto conv = kda_conv_weights(g, m.conv.matrix(m.channels, in.g.conv_kernel));
    run(options, [&](const gpu& exec) {
      kda_decode_token(exec, g, m.x.matrix(m.channels), conv, decay.matrix(m.width), beta.matrix(in.g.heads), m.ids(),
                       m.view(), m.out.matrix(m.width), m.status.view(in.rows));
    });
  });
  return m.outputs();
}

template <class X>
KdaDeviceOutputs<X, X> kda_fused_on_device(const KdaDeviceInputs<X>& in, const KdaDeviceOptions& options) {
  const Memory<X, X> m(in, options);
  const Placed<X> z(in.z, in.rows, options.shift, options.gap), beta(in.beta, in.rows, options.shift, options.gap),
      gate(in.gate, in.rows, options.shift, options.gap);
  const Weight a_log(in.a_log, options), dt_bias(in.dt_bias, options), o_norm(in.o_norm, options);
  with_geometry(in.g, options, [&](auto g) {
    const auto conv = kda_conv_weights(g, m.conv.matrix(m.channels, in.g.conv_kernel));
    run(options, [&](const gpu& exec) {
      kda_decode_fused(exec, g, m.x.matrix(m.channels), conv, z.matrix(m.width), a_log.vector(in.a_log.size()),
                       dt_bias.vector(m.width), beta.matrix(in.g.heads), gate.matrix(m.width),
                       o_norm.vector(in.g.head_dim), in.norm_eps, m.ids(), m.view(), m.out.matrix(m.width),
                       m.status.view(in.rows));
    });
  });
  return m.outputs();
}

template <class X>
KdaDeviceOutputs<float, X> kda_launched(const KdaDeviceInputs<X>& in, bool resident) {
  const size width = kda_width(in.g), channels = kda_conv_channels(in.g), taps = in.g.conv_kernel;
  KdaDeviceOutputs<float, X> result;
  result.out.assign(in.rows * width, 7.0f);
  KdaState<float, X> state(in.g, in.slots);
  std::copy(in.state.begin(), in.state.end(), state.view().recurrent.data);
  std::copy(in.window.begin(), in.window.end(), state.view().conv.data);
  const auto conv = kda_conv_weights(in.g, AnyMatrix<>(view(in.conv.data(), channels, taps)));
  const Stream stream;
  const gpu exec{stream};
  const auto x = view(in.x.data(), in.rows, channels);
  const auto decay = view(in.log_decay.data(), in.rows, width), beta = view(in.beta_float.data(), in.rows, in.g.heads);
  const auto out = view(result.out.data(), in.rows, width);
  if (resident) {
    KdaDeviceState<float, X> on_device(in.g, in.slots);
    for (size slot = 0; slot < in.slots; ++slot) on_device.upload(slot, state, slot, stream);
    launch_k3_kda_decode_token_on_device(exec, in.g, x, conv, decay, beta, view(in.slot), on_device.view(), out);
    for (size slot = 0; slot < in.slots; ++slot) on_device.download(slot, state, slot, stream);
  } else {
    launch_k3_kda_decode_token(exec, in.g, x, conv, decay, beta, view(in.slot), state, out);
  }
  const auto left = state.view();
  result.state.assign(left.recurrent.data, left.recurrent.data + left.recurrent.elements());
  result.window.assign(left.conv.data, left.conv.data + left.conv.elements());
  return result;
}

template KdaDeviceOutputs<float, float> kda_token_on_device(const KdaDeviceInputs<float>&, const KdaDeviceOptions&);
template KdaDeviceOutputs<float, float> kda_fused_on_device(const KdaDeviceInputs<float>&, const KdaDeviceOptions&);
template KdaDeviceOutputs<float, float> kda_launched(const KdaDeviceInputs<float>&, bool);
template KdaDeviceOutputs<float, bf16> kda_token_on_device(const KdaDeviceInputs<bf16>&, const KdaDeviceOptions&);
template KdaDeviceOutputs<bf16, bf16> kda_fused_on_device(const KdaDeviceInputs<bf16>&, const KdaDeviceOptions&);
template KdaDeviceOutputs<float, bf16> kda_launched(const KdaDeviceInputs<bf16>&, bool);

std::string kda_device_state_fault() {
  const KdaConfig g{3, 24, 4};
  const size elements = kda_state_elements(g), taps = kda_conv_elements(g);
  KdaDeviceState<float, bf16> device(g, 3);
  const Stream stream;
  if (device.slots() != 3 || device.bytes() != 3 * (elements * 4 + taps * 2)) return "its size";
  for (float v : device.download(2, stream).recurrent)
    if (v != 0) return "not zero at first";
  std::mt19937 bits(1);
  KdaSlotValues<float, bf16> values{std::vector<float>(elements), std::vector<bf16>(taps)};
  for (float& v : values.recurrent) v = __builtin_bit_cast(float, static_cast<std::uint32_t>(bits()));  // NaNs too
  for (bf16& v : values.conv) v = bf16::from_bits(static_cast<std::uint16_t>(bits()));
  const auto same = [&](const float* recurrent, const bf16* conv) {
    return std::memcmp(recurrent, values.recurrent.data(), elements * 4) == 0 &&
           std::memcmp(conv, values.conv.data(), taps * 2) == 0;
  };
  device.upload(1, values.recurrent, values.conv, stream);
  auto back = device.download(1, stream);
  if (!same(back.recurrent.data(), back.conv.data())) return "bytes of a slot that was uploaded";
  KdaState<float, bf16> host_state(g, 2);
  device.download(1, host_state, 1, stream);
  if (!same(host_state.recurrent(1).data, host_state.conv(1).data)) return "bytes in a host state";
  device.reset(1, stream);
  device.upload(2, host_state, 1, stream);
  back = device.download(2, stream);
  if (!same(back.recurrent.data(), back.conv.data())) return "bytes from a host state";
  for (const size slot : {size{0}, size{1}}) {
    back = device.download(slot, stream);
    for (float v : back.recurrent)
      if (v != 0) return "a slot that was reset, or never used, is not zero";
    for (bf16 v : back.conv)
      if (v.bits != 0) return "a window that was reset, or never used, is not zero";
  }
  if (thrown_by([&] { device.reset(3, stream); }) != "KdaDeviceState/slot") return "slot 3 of 3 accepted";
  const KdaState<float, bf16> other(KdaConfig{3, 24, 3}, 1);
  if (thrown_by([&] { device.upload(0, other, 0, stream); }) != "KdaDeviceState/the host state's geometry")
    return "a state of other sizes accepted";
  return "";
}

std::string kda_refused_argument(const std::string& wrong) {
  const KdaConfig g{2, wrong == "head_dim" ? 1025u : 4u, wrong == "conv_kernel" ? 0u : 4u,
                    wrong == "bound" ? std::optional<float>(1.0f) : std::optional<float>(-5.0f)};
  const size rows = 2, width = 2 * 4;
  const DeviceBuffer<float> pool(4096);
  float* next = pool.data();
  const auto take = [&](const char* name, size r, size c) {
    const bool bad = wrong == name;
    const auto v = device_view(next, r, bad ? c + 1 : c);
    next += 256;
    return v;
  };
  const auto x = take("x_qkv", rows, 3 * width), q = take("conv.q", width, 4), k = take("conv.k", width, 4),
             v = take("conv.v", width, 4), z = take("z", rows, width), beta = take("beta", rows, 2),
             gate = take("gate", rows, width), a_log = take("A_log", 1, wrong == "A_log" ? 0 : 2),
             dt_bias = take("dt_bias", 1, width), o_norm = take("o_norm", 1, 4);
  auto out = take("out", rows, width);
  const DeviceBuffer<id> slots(rows);
  const DeviceBuffer<unsigned> status(rows);
  const KdaDeviceState<float, float> state(g.head_dim == 4 && g.conv_kernel ? g : KdaConfig{2, 4, 4}, 2);
  auto memory = state.view();
  if (wrong == "state.recurrent") memory.recurrent.extents[2] = 3;
  if (wrong == "state.conv") memory.conv.extents[2] = 2;
  DeviceView<unsigned, 1> words = device_view(status.data(), wrong == "status" ? rows + 1 : rows);
  if (wrong == "out over x") out.data = x.data + 1;
  if (wrong == "out over conv") out.data = v.data;
  if (wrong == "out over A_log") out.data = a_log.data;
  if (wrong == "out over dt_bias") out.data = dt_bias.data;
  if (wrong == "out over o_norm") out.data = o_norm.data;
  if (wrong == "state over state") memory.conv.data = memory.recurrent.data + 3;
  if (wrong == "status over out") words.data = reinterpret_cast<unsigned*>(out.data);
  if (wrong == "status over slots") words.data = reinterpret_cast<unsigned*>(slots.data());
  if (wrong == "status over state") words.data = reinterpret_cast<unsigned*>(memory.recurrent.data);
  if (wrong == "out over state") out.data = memory.recurrent.data;
  if (wrong == "out over gate") out.data = gate.data;
  if (wrong == "state over conv") memory.conv.data = k.data;
  const auto flat = [](const auto& m) { return device_view(static_cast<const float*>(m.data), m.extents[1]); };
  using Any = AnyMatrix<MemorySpace::device>;
  Any taps_k = wrong == "f64" ? Any(device_view(reinterpret_cast<double*>(k.data), width, size{4})) : Any(k);
  const float eps = wrong == "norm_eps"             ? -1e-5f
                    : wrong == "norm_eps, NaN"      ? std::numeric_limits<float>::quiet_NaN()
                    : wrong == "norm_eps, infinity" ? std::numeric_limits<float>::infinity()
                                                    : 1e-5f;
  return thrown_by([&] {
    kda_decode_fused(gpu{}, g, x, KdaConvWeights{Any(q), taps_k, Any(v)}, z, flat(a_log), flat(dt_bias), beta, gate,
                     flat(o_norm), eps, device_view(slots.data(), wrong == "slots" ? rows + 1 : rows), memory, out,
                     words);
    detail::check_cuda("test", "cudaDeviceSynchronize", cudaDeviceSynchronize());
  });
}

std::string kda_launch_refused(const std::string& wrong) {
  const KdaConfig g{2, 4, 4};
  const size width = 8;
  std::vector<float> x(2 * 24), taps(8 * 4), decay(2 * 8), beta(2 * 2), result(2 * 8);
  const std::vector<id> slots{0, wrong == "slots" ? 2 : 1};
  KdaState<float, float> state(g, 2);
  const auto rows = [&](const char* name, std::vector<float>& values, size count, size columns) {
    auto matrix = view(values.data(), count, wrong == name ? columns - 1 : columns);
    if (wrong == std::string("no ") + name) matrix.data = nullptr;
    return matrix;
  };
  const auto q = rows("conv.q", taps, width, 4), k = rows("conv.k", taps, width, 4), v = rows("conv.v", taps, width, 4);
  const auto in = rows("x_qkv", x, 2, 24), log_decay = rows("log_decay", decay, 2, width),
             logits = rows("beta", beta, 2, 2);
  auto out = rows("out", result, 2, width);
  if (wrong == "out over x_qkv") out.data = in.data + 3;
  return thrown_by([&] {
    launch_k3_kda_decode_token(gpu{}, g, in, KdaConvWeights{q, k, v}, log_decay, logits, view(slots), state, out);
  });
}

}  // namespace k3::test
