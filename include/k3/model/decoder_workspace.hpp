// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include <k3/geometry/decoder_geometry.hpp>
#include <k3/model/kda_layer.hpp>
#include <k3/model/mla_layer.hpp>
#include <k3/ops/dense_mlp.hpp>
#include <k3/ops/latent_moe_forward.hpp>

namespace k3 {

/// All memory of a decoder's forward pass for up to `max_rows` rows, allocated once. Parts that the graph does not have
/// take none. Per row and in elements about: (snapshots + 5) * hidden, 9 * H*D, top_k * (latent + 2 * expert_hidden),
/// and a vocabulary for each row with logits.
template <precision P>
struct DecoderWorkspace {
  using Activation = typename P::activation;
  using Accumulator = typename P::accumulator;

  template <decoder_geometry G>
  DecoderWorkspace(G g, const K3Graph& graph, size max_rows, size max_logit_rows)
      : tokens(length<id>(max_rows, 1)),
        slots(max_rows),
        positions(length<size>(max_rows, 1)),
        logit_rows(length<size>(max_logit_rows, 1)),
        status(max_rows),
        fault_layer(length<size>(max_rows, 1)),
        logit_status(max_logit_rows),
        argmax(max_logit_rows),
        snapshot_count(k3::snapshot_count(graph.layers.size(), g.attn_res_block_size)),
        stream(length<Activation>(max_rows, g.hidden)),
        snapshots(length<Activation>(stream.size(), snapshot_count)),
        normed(stream.size()),
        part(stream.size()),
        head_input(length<Activation>(max_logit_rows, g.hidden)),
        mixed(g.attn_res_block_size > 0 ? length<Accumulator>(max_rows, g.hidden) : 0),
        probs(length<Accumulator>(max_rows, snapshot_count + 1)),
        logits(length<Accumulator>(max_logit_rows, g.vocab)) {
    bool dense = false;
    for (const K3LayerSpec& layer : graph.layers) dense = dense || layer.mlp == MlpKind::Dense;
    if (graph.kda_count() > 0) kda.emplace(g.kda, max_rows);
    if (graph.mla_count() > 0) mla.emplace(g.mla, max_rows);
    if (dense) mlp.emplace(size{g.dense_intermediate}, max_rows);
    if (!graph.layers.empty() && graph.layers.back().mlp == MlpKind::LatentMoe) moe.emplace(g.moe, max_rows);
  }

  std::vector<id> tokens, slots;
  std::vector<size> positions, logit_rows;
  std::vector<RowStatus> status;
  std::vector<size> fault_layer;  // where a row's status was found; no_layer where it is ok
  std::vector<RowStatus> logit_status;
  std::vector<id> argmax;
  size snapshot_count;
  std::vector<Activation> stream;      // [R, hidden], the running sum
  std::vector<Activation> snapshots;   // [snapshots, max_rows, hidden]
  std::vector<Activation> normed;      // [R, hidden], input of a sublayer
  std::vector<Activation> part;        // [R, hidden], output of a sublayer
  std::vector<Activation> head_input;  // [logit rows, hidden]
  std::vector<Accumulator> mixed;      // [R, hidden], unrounded mixture
  std::vector<Accumulator> probs;      // [R, sources]
  std::vector<Accumulator> logits;     // [logit rows, vocab]
  std::optional<KdaWorkspace<P>> kda;
  std::optional<MlaLayerWorkspace<P>> mla;
  std::optional<MlpWorkspace<P>> mlp;
  std::optional<MoeWorkspace<P>> moe;

 private:
  template <class T>
  static size length(size rows, size width) {
    return detail::checked_length<T>("DecoderWorkspace", rows, width);
  }
};

}  // namespace k3
