// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/execution.hpp>
#include <k3/formula/mla.hpp>
#include <k3/ops/mla_avx512.hpp>
#include <k3/ops/mla_kv.hpp>
#include <k3/ops/reduce.hpp>

namespace k3 {

namespace detail {

/// Positions whose scores are taken together. A block is fixed by its positions alone, so that no page size, capacity,
/// batch or thread count changes a bit.
inline constexpr size mla_block = 64;
/// Heads that one thread takes through the cache together; the scores of a block for all of them stay on the stack.
inline constexpr size mla_group_heads = 16;

/// The readable products: see MlaAvx2 for what they are. One head and one cached row at a time.
struct MlaPlain {
  static constexpr size score_heads = 1, score_rows = 1, value_heads = 1, value_columns = 256;

  template <class Acc, class Q, class T>
  static void scores(const Q* const (&q)[1], const T* const (&rows)[1], size width, Acc (&out)[1][1]) {
    out[0][0] = lane_sum<Acc>(width, [&](size i) { return static_cast<Acc>(q[0][i]) * static_cast<Acc>(rows[0][i]); });
  }
  template <class Acc, class T>
  static void values(const Acc* const (&weights)[1], const Acc (&rescale)[1], const T* const* rows, size count,
                     size first, size last, Acc* const (&out)[1]) {
    Acc* sum = out[0];
    for (size c = first; c < last; ++c) sum[c] = rescale[0] == 0 ? Acc(0) : sum[c] * rescale[0];
    for (size j = 0; j < count; ++j) {
      const Acc weight = weights[0][j];
      const T* row = rows[j];
      for (size c = first; c < last; ++c) sum[c] += weight * static_cast<Acc>(row[c]);
    }
  }
};

/// A few heads of one query row on their way through the cache.
template <class Acc, class Q>
struct MlaHeads {
  size count = 0;
  const Q* query[mla_group_heads];  // [kv_lora + rope]
  Acc* out[mla_group_heads];        // [kv_lora]
  SoftmaxState<Acc> softmax[mla_group_heads];
  Acc rescale[mla_group_heads];             // of what `out` holds so far; 0: of nothing
  Acc weights[mla_group_heads][mla_block];  // first the scores of a block, then their weights
};

/// weights[h][j] = scale * query[h] . rows[j]. Missing heads and rows of a tile repeat the last one.
template <class Kernel, class Acc, class Q, class T>
void mla_block_scores(MlaHeads<Acc, Q>& heads, const T* const* rows, size count, size width, Acc scale) {
  constexpr size heads_tile = Kernel::score_heads, rows_tile = Kernel::score_rows;
  for (size j = 0; j < count; j += rows_tile) {
    const T* row[rows_tile];
    for (size i = 0; i < rows_tile; ++i) row[i] = rows[smaller(j + i, count - 1)];
    for (size h = 0; h < heads.count; h += heads_tile) {
      const Q* query[heads_tile];
      for (size i = 0; i < heads_tile; ++i) query[i] = heads.query[smaller(h + i, heads.count - 1)];
      Acc score[heads_tile][rows_tile];
      Kernel::scores(query, row, width, score);
      for (size a = 0; a < heads_tile && h + a < heads.count; ++a)
        for (size b = 0; b < rows_tile && j + b < count; ++b) heads.weights[h + a][j + b] = score[a][b] * scale;
    }
  }
}

/// Scores to weights e^(score - largest so far), rounded to the query's type for the value product but not for the sum.
template <class Acc, class Q>
void mla_block_softmax(MlaHeads<Acc, Q>& heads, size count) {
  for (size h = 0; h < heads.count; ++h) {
    Acc* weight = heads.weights[h];
    SoftmaxState<Acc>& softmax = heads.softmax[h];
    Acc largest = softmax.max, sum = 0;
    for (size j = 0; j < count; ++j) largest = larger(largest, weight[j]);
    for (size j = 0; j < count; ++j) {
      const Acc value = std::exp(weight[j] - largest);
      sum += value;
      weight[j] = static_cast<Acc>(static_cast<Q>(value));
    }
    heads.rescale[h] = softmax_rescale(softmax.max, largest);
    softmax.sum = softmax.sum * heads.rescale[h] + sum;
    softmax.max = largest;
  }
}

/// out[h] = out[h] * rescale[h] + sum over j of weights[h][j] * rows[j][:columns]. A slice of columns stays in the L1
/// cache while all heads use it. Missing heads of a tile repeat the last one.
template <class Kernel, class Acc, class Q, class T>
void mla_block_values(const MlaHeads<Acc, Q>& heads, const T* const* rows, size count, size columns) {
  constexpr size tile = Kernel::value_heads;
  for (size c = 0; c < columns; c += Kernel::value_columns)
    for (size h = 0; h < heads.count; h += tile) {
      const Acc* weights[tile];
      Acc rescale[tile];
      Acc* out[tile];
      for (size i = 0; i < tile; ++i) {
        const size head = smaller(h + i, heads.count - 1);
        weights[i] = heads.weights[head];
        rescale[i] = heads.rescale[head];
        out[i] = heads.out[head];
      }
      Kernel::values(weights, rescale, rows, count, c, smaller(c + Kernel::value_columns, columns), out);
    }
}

/// Attention of `heads` over the positions [0, length) of a slot.
template <class Kernel, class Acc, class Q, class T>
void mla_attend_heads(MlaHeads<Acc, Q>& heads, const MlaKvView<T>& kv, size slot, size length, size latent, size width,
                      Acc scale) {
  for (size first = 0; first < length; first += mla_block) {
    const size count = smaller(mla_block, length - first);
    const T* rows[mla_block];
    for (size j = 0; j < count; ++j) rows[j] = kv.row(slot, first + j);
    mla_block_scores<Kernel>(heads, rows, count, width, scale);
    mla_block_softmax(heads, count);
    mla_block_values<Kernel>(heads, rows, count, latent);
  }
  for (size h = 0; h < heads.count; ++h)
    for (size i = 0; i < latent; ++i) heads.out[h][i] /= heads.softmax[h].sum;
}

/// Heads of one row [first, last): attention, or zeros for a padding row.
template <class Kernel, mla_geometry G, class Q, class T, class Slots, class Positions, class Out>
void mla_attend_row(G g, const Q& q_latent, const MlaKvView<T>& kv, const Slots& slots, const Positions& positions,
                    const Out& out, size r, size first, size last) {
  using Acc = typename Out::value_type;
  const size latent = g.kv_lora_rank;
  if (slots[r] == pad_slot) {
    for (size h = first; h < last; ++h)
      for (size i = 0; i < latent; ++i) out(r, h, i) = 0;
    return;
  }
  MlaHeads<Acc, typename Q::value_type> heads;
  heads.count = last - first;
  for (size h = first; h < last; ++h) {
    heads.query[h - first] = &q_latent(r, h, 0);
    heads.out[h - first] = &out(r, h, 0);
  }
  mla_attend_heads<Kernel>(heads, kv, static_cast<size>(slots[r]), static_cast<size>(positions[r]) + 1, latent,
                           mla_cache_width(g), mla_score_scale<Acc>(mla_qk_head_dim(g)));
}

/// All rows. The work is cut by row and group of heads; heads never meet, so the cut is free to follow the threads.
template <mla_geometry G, class Q, class T, class Slots, class Positions, class Out>
void mla_attend_rows(const host& exec, G g, const Q& q_latent, const MlaKvView<T>& kv, const Slots& slots,
                     const Positions& positions, const Out& out) {
  const size rows = slots.extents[0], per_thread = rows * g.heads / static_cast<size>(thread_count(exec));
  const size group = smaller(mla_group_heads, larger(size{4}, per_thread / 4 * 4));
  const size groups = (g.heads + group - 1) / group;
  size cached = 0;
  for (size r = 0; r < rows; ++r) cached += slots[r] == pad_slot ? 0 : static_cast<size>(positions[r]) + 1;
  const size bytes = cached * groups * mla_cache_width(g) * sizeof(T);
  const Isa isa = exec.isa > best_isa() ? best_isa() : exec.isa;
  parallel_chunks(exec, rows * groups, 1, bytes, [&](size first, size last) {
    for (size i = first; i < last; ++i) {
      // Long rows meet short ones, so that equal chunks are about equal work in a prompt of ascending positions.
      const size at = i % 2 == 0 ? i / 2 : rows * groups - 1 - i / 2;
      const size r = at / groups, head = at % groups * group, end = smaller(head + group, size{g.heads});
#if K3_X86_64
      if constexpr (std::is_same_v<typename Out::value_type, float> && !std::is_same_v<T, const double>) {
        if (isa == Isa::avx512) {
          mla_attend_row<MlaAvx512>(g, q_latent, kv, slots, positions, out, r, head, end);
          continue;
        }
        if (isa == Isa::avx2) {
          mla_attend_row<MlaAvx2>(g, q_latent, kv, slots, positions, out, r, head, end);
          continue;
        }
      }
#endif
      mla_attend_row<MlaPlain>(g, q_latent, kv, slots, positions, out, r, head, end);
    }
  });
  static_cast<void>(isa);
}

}  // namespace detail

/// Absorbed attention over a latent cache: row r sees the rows s = 0..positions[r] of slot slots[r], each c_s | kpe_s,
///   o_latent = sum_s p_s c_s,   p = softmax_s(q_latent . (c_s | kpe_s) / sqrt(nope + rope)),
/// by an online softmax over blocks of 64 positions with its statistics in the accumulator type; for bf16 queries the
/// weights e^(score - running max) are rounded before the value product. Later rows of the cache are never read.
/// Shapes: q_latent [R, heads, kv_lora + rope], slots [R], positions [R], o_latent [R, heads, kv_lora] in the
/// accumulator type; a row of pad_slot gives zeros. Throws invalid_argument as mla_append does.
/// No other row, page size, capacity or thread count changes a bit; Isa::avx2 and Isa::avx512 give the same ones.
/// Cost: 2 heads (2 kv_lora + rope) FLOPs a position; its row is read once per group of up to 16 heads.
/// Accuracy: that of mla_decode_token. Source: the absorbed form of DeepSeek-V2's MLA.
template <mla_geometry G, host_tensor<3> Q, class T, index_view Slots, index_view Positions,
          writable_host_tensor<3> Out>
  requires std::same_as<typename Out::value_type, accumulator_t<typename Q::value_type>>
void mla_attend(const host& exec, G geometry, const Q& q_latent, const MlaKvView<T>& kv, const Slots& slots,
                const Positions& positions, const Out& o_latent) {
  const size rows = slots.extents[0];
  detail::require_nope(geometry, "mla_attend");
  detail::check_mla_kv("mla_attend", geometry, kv);
  detail::require_shape("mla_attend", "q_latent", q_latent, rows, geometry.heads, mla_cache_width(geometry));
  detail::require_shape("mla_attend", "o_latent", o_latent, rows, geometry.heads, geometry.kv_lora_rank);
  detail::check_mla_rows("mla_attend", slots, positions, kv, [](size) { return size{0}; });
  detail::require_disjoint("mla_attend", "o_latent", o_latent, "q_latent", q_latent, "kv.pages", kv.pages, "slots",
                           slots, "positions", positions, "kv.block_table", kv.block_table);
  detail::mla_attend_rows(exec, geometry, q_latent, MlaKvView<const T>{kv.pages, kv.block_table, kv.page_size}, slots,
                          positions, o_latent);
}

}  // namespace k3
