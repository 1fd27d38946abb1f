// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/cuda/mla_decode_token.cuh>

namespace k3 {

namespace detail {

template <mla_device_real T>
using mla_precision = std::conditional_t<std::same_as<T, bf16>, Bf16, Fp32>;

/// A copy in device memory of a host vector or matrix whose rows may lie apart.
template <class V>
auto mla_upload(const V& from) {
  using T = typename V::value_type;
  std::vector<T> dense;
  dense.reserve(from.elements());
  if constexpr (V::rank == 1) {
    for (size i = 0; i < from.extents[0]; ++i) dense.push_back(from[i]);
  } else {
    for (size i = 0; i < from.extents[0]; ++i) dense.insert(dense.end(), from[i].data, from[i].data + from.extents[1]);
  }
  return DeviceBuffer<T>(dense);
}

template <class T>
DeviceView<const T, 1> mla_vector(const DeviceBuffer<T>& buffer) {
  return buffer.view(buffer.count());
}
template <class T>
DeviceView<const T, 2> mla_matrix(const DeviceBuffer<T>& buffer, size rows, size columns) {
  return buffer.view(rows, columns);
}

}  // namespace detail

/// `mla_decode_token` on the device for operands in host memory and a cache that stays on the device: copies q, kv_a,
/// the weights and gate there and `out` back, and waits. A convenience that allocates; a decode step calls
/// mla_decode_token with everything resident. Shapes and errors as the host's; a row whose slot or position is not in
/// the cache is refused.
template <mla_geometry G, host_tensor<2> Q, host_tensor<2> KvA, class Norm, class KvB, host_tensor<2> Gate,
          index_view Slots, index_view Positions, class T, writable_host_tensor<2> Out>
void launch_k3_mla_decode_token_on_device(const gpu& exec, G geometry, const Q& q, const KvA& kv_a,
                                          const Norm& kv_a_norm, const KvB& kv_b, const Gate& gate, const Slots& slots,
                                          const Positions& positions, MlaDeviceKv<T>& kv, const Out& out) {
  constexpr const char* operation = "launch_k3_mla_decode_token";
  const size rows = slots.extents[0], n = mla_v_width(geometry);
  detail::mla_check_geometry(geometry, operation);
  detail::require_shape(operation, "q", q, rows, mla_q_width(geometry));
  detail::require_shape(operation, "kv_a", kv_a, rows, mla_cache_width(geometry));
  detail::require_weight(operation, "kv_a_layernorm", kv_a_norm, geometry.kv_lora_rank);
  detail::check_kv_b(operation, geometry, kv_b);
  detail::require_shape(operation, "slots", slots, rows);
  detail::require_shape(operation, "positions", positions, rows);
  detail::require_shape(operation, "out", out, rows, n);
  if (gate.data) detail::require_shape(operation, "gate", gate, rows, n);
  detail::require_disjoint(operation, "out", out, "q", q, "kv_a", kv_a, "kv_a_layernorm", kv_a_norm, "kv_b", kv_b,
                           "gate", gate, "slots", slots, "positions", positions);
  std::vector<id> ids(rows);
  std::vector<size> at(rows);
  for (size r = 0; r < rows; ++r) {
    ids[r] = static_cast<id>(slots[r]);
    if (ids[r] == pad_slot) continue;
    at[r] = static_cast<size>(positions[r]);
    detail::require(ids[r] >= 0 && static_cast<size>(ids[r]) < kv.slots(), operation, "slots", ids[r],
                    "pad_slot or a slot");
    detail::require(at[r] < kv.capacity(), operation, "positions", at[r], "below the capacity (cache full)");
    size earlier = r;
    while (earlier > 0 && ids[earlier - 1] != ids[r]) --earlier;
    detail::require(earlier == 0 || at[r] == at[earlier - 1] + 1, operation, "positions", at[r],
                    "one more than the slot's row before it");
  }
  if (rows == 0) return;
  detail::with_typed(kv_a_norm, [&](const auto& norm) {
    detail::with_typed(kv_b, [&](const auto& weight) {
      const auto q_there = detail::mla_upload(q), kv_a_there = detail::mla_upload(kv_a);
      const auto norm_there = detail::mla_upload(norm);
      const auto kv_b_there = detail::mla_upload(weight);
      const auto gate_there = detail::mla_upload(gate);
      const DeviceBuffer<id> ids_there(ids);
      const DeviceBuffer<size> at_there(at);
      DeviceBuffer<T> result(rows * n);
      const MlaDeviceWorkspace<detail::mla_precision<T>> workspace(geometry, rows, kv.capacity());
      DeviceView<const T, 2> gates{};
      if (gate.data) gates = detail::mla_matrix(gate_there, rows, n);
      mla_decode_token(exec, geometry, detail::mla_matrix(q_there, rows, q.extents[1]),
                       detail::mla_matrix(kv_a_there, rows, kv_a.extents[1]), detail::mla_vector(norm_there),
                       detail::mla_matrix(kv_b_there, weight.extents[0], weight.extents[1]), gates,
                       detail::mla_vector(ids_there), detail::mla_vector(at_there), kv.view(), workspace,
                       result.view(rows, n));
      detail::check_cuda(operation, "cudaStreamSynchronize", cudaStreamSynchronize(exec.stream));
      const std::vector<T> values = result.to_vector();
      for (size r = 0; r < rows; ++r)
        for (size i = 0; i < n; ++i) out(r, i) = values[r * n + i];
    });
  });
}

/// As above for a cache in host memory: its rows up to each row's position are copied to the device and the new ones
/// back.
template <mla_geometry G, host_tensor<2> Q, host_tensor<2> KvA, class Norm, class KvB, host_tensor<2> Gate,
          index_view Slots, index_view Positions, class T, writable_host_tensor<2> Out>
void launch_k3_mla_decode_token(const gpu& exec, G geometry, const Q& q, const KvA& kv_a, const Norm& kv_a_norm,
                                const KvB& kv_b, const Gate& gate, const Slots& slots, const Positions& positions,
                                MlaKv<T>& kv, const Out& out) {
  detail::require_shape("launch_k3_mla_decode_token", "slots", slots, slots.extents[0]);
  detail::require_shape("launch_k3_mla_decode_token", "positions", positions, slots.extents[0]);
  MlaDeviceKv<T> resident(geometry, kv.slots(), kv.capacity());
  const auto each_row = [&](auto&& f) {
    for (size r = 0; r < slots.extents[0]; ++r) {
      const size slot = static_cast<size>(slots[r]), position = static_cast<size>(positions[r]);
      if (static_cast<id>(slots[r]) != pad_slot && slot < kv.slots() && position < kv.capacity()) f(slot, position + 1);
    }
  };
  each_row([&](size slot, size count) { resident.upload(slot, kv, slot, count, exec.stream); });
  launch_k3_mla_decode_token_on_device(exec, geometry, q, kv_a, kv_a_norm, kv_b, gate, slots, positions, resident, out);
  each_row([&](size slot, size count) { resident.download(slot, kv, slot, count, exec.stream); });
}

}  // namespace k3
