// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/ops/mla_kv.hpp>
#include <k3/ops/rms_norm.hpp>

namespace k3 {

namespace detail {

template <mla_geometry G, class KvA, class Weight, class Slots, class Positions, class T>
void check_mla_append(const char* operation, G g, const KvA& kv_a, const Weight& weight, double norm_eps,
                      const Slots& slots, const Positions& positions, const MlaKvView<T>& kv) {
  require_nope(g, operation);
  check_mla_kv(operation, g, kv);
  require_shape(operation, "kv_a", kv_a, slots.extents[0], mla_cache_width(g));
  require_weight(operation, "kv_a_layernorm", weight, g.kv_lora_rank);
  require_norm_eps(operation, "norm_eps", norm_eps);
  require_shape(operation, "positions", positions, slots.extents[0]);
  check_mla_rows(operation, slots, positions, kv, [&](size position) { return position / kv.page_size; });
  require_disjoint(operation, "kv.pages", kv.pages, "kv_a", kv_a, "kv_a_layernorm", weight, "slots", slots, "positions",
                   positions, "kv.block_table", kv.block_table);
}

}  // namespace detail

/// Writes the cache rows of new tokens: latent = RMSNorm(kv_a[:, :kv_lora], weight, norm_eps), rounded once to the
/// cache's type, then kv_a[:, kv_lora:], the key part shared by all heads, neither normed nor rotated.
/// Shapes: kv_a [R, kv_lora + rope], weight [kv_lora], slots [R], positions [R]; row r goes to position positions[r] of
/// slot slots[r]; a row of pad_slot writes nothing. Throws invalid_argument, with the cache unchanged, on shapes that
/// do not fit, a slot or position outside the cache ("cache full"), rows of one slot that do not follow each other, a
/// block table that names no page, overlapping memory, and `mla_use_nope` false.
/// Accuracy: <= 6e-7 relative to double for float. Source: `kv_a_proj_with_mqa`, `kv_a_layernorm`.
template <mla_geometry G, host_tensor<2> KvA, class Weight, index_view Slots, index_view Positions, real T>
void mla_append(const host& exec, G geometry, const KvA& kv_a, const Weight& weight,
                accumulator_t<typename KvA::value_type> norm_eps, const Slots& slots, const Positions& positions,
                const MlaKvView<T>& kv) {
  using Acc = accumulator_t<typename KvA::value_type>;
  detail::check_mla_append("mla_append", geometry, kv_a, weight, norm_eps, slots, positions, kv);
  const size rows = slots.extents[0], latent = geometry.kv_lora_rank, width = mla_cache_width(geometry);
  detail::with_typed(weight, [&](const auto& w) {
    detail::parallel_chunks(exec, rows, 1, rows * width * 16, [&](size first, size last) {
      for (size r = first; r < last; ++r) {
        if (slots[r] == pad_slot) continue;
        const auto* from = &kv_a(r, 0);
        T* to = kv.row(static_cast<size>(slots[r]), static_cast<size>(positions[r]));
        detail::rms_norm_row<Acc>(from, w.data, norm_eps, to, latent);
        for (size i = latent; i < width; ++i) to[i] = static_cast<T>(from[i]);
      }
    });
  });
}

}  // namespace k3
