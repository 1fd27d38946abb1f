// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <k3/kernels/linear.cuh>

// What becomes of products that lie in shared memory by token and row: a lane takes four neighbouring rows of a token.
namespace k3::kernel {

/// Four neighbouring rows of outputs, less at the end; in one access where their addresses allow it.
struct LinearFour {
  unsigned char* at = nullptr;
  size stride = 0;  ///< bytes
  unsigned count = 0;
  bool is_float = false, at_once = false;

  __device__ __forceinline__ LinearFour(const LinearRows& rows, unsigned row, unsigned end, bool wide)
      : at(static_cast<unsigned char*>(rows.data) + size{row} * (wide ? 4 : 2)),
        stride(rows.stride * (wide ? 4 : 2)),
        count(detail::smaller(end - row, 4u)),
        is_float(wide),
        at_once(count == 4 && (reinterpret_cast<size>(at) | stride) % (wide ? 16 : 8) == 0) {}

  __device__ __forceinline__ float4 get(size token) const {
    float4 v{};
    const unsigned char* const from = at + token * stride;
    if (is_float) {
      if (at_once) return *reinterpret_cast<const float4*>(from);
      each(v, [&](float& to, unsigned i) { to = reinterpret_cast<const float*>(from)[i]; });
    } else if (at_once) {
      const uint2 pairs = *reinterpret_cast<const uint2*>(from);
      v = {low_of(pairs.x), high_of(pairs.x), low_of(pairs.y), high_of(pairs.y)};
    } else {
      each(v, [&](float& to, unsigned i) { to = float(reinterpret_cast<const bf16*>(from)[i]); });
    }
    return v;
  }
  __device__ __forceinline__ void put(size token, float4 v) const {
    unsigned char* const to = at + token * stride;
    if (is_float) {
      if (at_once)
        *reinterpret_cast<float4*>(to) = v;
      else
        each(v, [&](float value, unsigned i) { reinterpret_cast<float*>(to)[i] = value; });
    } else if (at_once) {
      *reinterpret_cast<uint2*>(to) = {bf16_pair(v.x, v.y), bf16_pair(v.z, v.w)};
    } else {
      each(v, [&](float value, unsigned i) { reinterpret_cast<bf16*>(to)[i] = bf16(value); });
    }
  }

 private:
  template <class Work>
  __device__ __forceinline__ void each(float4& v, Work&& work) const {
    if (count > 0) work(v.x, 0u);
    if (count > 1) work(v.y, 1u);
    if (count > 2) work(v.z, 2u);
    if (count > 3) work(v.w, 3u);
  }
};

/// A lane's part of what becomes of a unit of 16 rows of weights: of segments of one kind.
template <LinearKind Kind>
struct LinearUnit {
  static constexpr bool glu = Kind == LinearKind::glu;
  static constexpr unsigned rows = glu ? 8 : 16, lane_tokens = 32 / (rows / 4);  ///< tokens that a warp takes at once
  const LinearSegment& s;
  const LinearArguments<bf16>& a;
  unsigned own, row;  ///< of the unit, and of the matrix
  LinearFour out, other, part, snapshot;

  __device__ __forceinline__ LinearUnit(const LinearArguments<bf16>& arguments, const LinearSegment& segment,
                                        unsigned unit)
      : s(segment),
        a(arguments),
        own(threadIdx.x % (rows / 4) * 4),
        row(unit * rows + own),
        out(s.out, row, s.rows, s.float_out),
        other(a.add.other, row, s.rows, s.float_out),
        part(a.add.part, row, s.rows, s.float_out),
        snapshot(a.add.snapshot, row, s.rows, s.float_out) {}

  /// `Tokens` tokens from `first` on; `value(token, row)` gives the products of four rows of the unit, token from 0 on.
  template <unsigned Tokens, class Value>
  __device__ __forceinline__ void finish(unsigned first, Value&& value) const {
    if (row >= s.rows) return;
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned i = 0; i < (Tokens + lane_tokens - 1) / lane_tokens; ++i) {
      const unsigned t = i * lane_tokens + lane / (rows / 4);
      if (t >= Tokens || first + t >= a.tokens) break;
      const float4 v = value(t, own);
      if constexpr (Kind == LinearKind::store)
        out.put(first + t, v);
      else if constexpr (glu)
        activate(first + t, v, value(t, own + 8));
      else
        add(first + t, v);
    }
  }

 private:
  template <class Work>
  __device__ __forceinline__ static float4 map(float4 a, float4 b, Work&& work) {
    return {work(a.x, b.x), work(a.y, b.y), work(a.z, b.z), work(a.w, b.w)};
  }
  __device__ __forceinline__ float rounded(float v) const { return linear_rounded(v, s.float_out); }

  __device__ __forceinline__ void activate(size token, float4 gate, float4 up) const {
    if (s.float_out)
      out.put(token, map(gate, up, [&](float g, float u) { return s.glu(g, u); }));
    else
      out.put(token, map(gate, up, [&](float g, float u) { return s.glu.rounded_soon(rounded(g), rounded(u)); }));
  }
  /// As linear_finish says it.
  __device__ __forceinline__ void add(size token, float4 v) const {
    v = map(v, v, [&](float p, float) { return rounded(p); });
    if (a.add.other.data) v = map(v, other.get(token), [&](float p, float o) { return rounded(p + o); });
    if (a.add.part.data) part.put(token, v);
    const float4 before = out.get(token);
    if (a.add.snapshot.data) snapshot.put(token, before);
    out.put(token, a.add.replace ? v : map(before, v, [](float b, float p) { return b + p; }));
  }
};

/// work(LinearUnit) for the kind of the unit's segment.
template <class Work>
__device__ __forceinline__ void with_unit(const LinearArguments<bf16>& a, unsigned unit, Work&& work) {
  const LinearSegment& s = a.segment[find_segment(a, unit)];
  if (s.kind == LinearKind::store)
    work(LinearUnit<LinearKind::store>(a, s, unit));
  else if (s.kind == LinearKind::glu)
    work(LinearUnit<LinearKind::glu>(a, s, unit));
  else
    work(LinearUnit<LinearKind::add>(a, s, unit));
}

}  // namespace k3::kernel
