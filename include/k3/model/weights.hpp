// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <k3/core/any_view.hpp>
#include <k3/geometry/k3_graph.hpp>
#include <k3/ops/latent_moe_forward.hpp>

namespace k3 {

/// Weights of a KDA mixer, named as in the checkpoint. g_proj is there with a full-rank output gate, g_a_proj and
/// g_b_proj without. A_log may be longer than H: what follows the heads is padding and never read.
template <MemorySpace Space>
struct BasicKdaWeights {
  AnyMatrix<Space> q_proj, k_proj, v_proj;        // [H*D, hidden]
  AnyMatrix<Space> q_conv1d, k_conv1d, v_conv1d;  // [H*D, kernel]
  AnyMatrix<Space> f_a_proj, f_b_proj;            // [D, hidden], [H*D, D]
  AnyMatrix<Space> b_proj;                        // [H, hidden]
  AnyMatrix<Space> g_proj, g_a_proj, g_b_proj;    // [H*D, hidden]; [D, hidden], [H*D, D]
  AnyVector<Space> A_log, dt_bias, o_norm;        // [>= H], [H*D], [D]
  AnyMatrix<Space> o_proj;                        // [hidden, H*D]
};
using KdaWeights = BasicKdaWeights<MemorySpace::host>;

/// Weights of an MLA mixer. q_proj is there without a query rank, q_a_proj, q_a_layernorm and q_b_proj with one; g_proj
/// where there is an output gate.
template <MemorySpace Space>
struct BasicMlaWeights {
  AnyMatrix<Space> q_a_proj, q_b_proj, q_proj;     // [q_lora, hidden], [h*(nope+rope), q_lora]; [h*(nope+rope), hidden]
  AnyVector<Space> q_a_layernorm, kv_a_layernorm;  // [q_lora], [kv_lora]
  AnyMatrix<Space> kv_a_proj_with_mqa, kv_b_proj;  // [kv_lora+rope, hidden], [h*(nope+v), kv_lora]
  AnyMatrix<Space> g_proj, o_proj;                 // [h*v, hidden], [hidden, h*v]
};
using MlaWeights = BasicMlaWeights<MemorySpace::host>;

/// A layer's routed experts, wherever they are. `operator[]` may load or check an expert on its first use and throws
/// where that fails; what it returns stays valid until the next expert is asked for, or, where nothing is ever thrown
/// away, as long as the source.
class ExpertSource {
 public:
  virtual ~ExpertSource() = default;
  virtual k3::size size() const = 0;
  virtual ExpertWeights operator[](k3::size expert) const = 0;

  /// Says that these experts will be acquired next, in this order, so that they can be fetched meanwhile. Never throws.
  virtual void need(const k3::size* /*experts*/, k3::size /*count*/) const noexcept {}
  /// As operator[]; what it returns stays valid until it is released. A thread that acquires one expert at a time never
  /// waits for itself.
  virtual ExpertWeights acquire(k3::size expert) const { return (*this)[expert]; }
  virtual void release(k3::size /*expert*/) const noexcept {}
};

/// Experts whose weights lie ready in memory.
class ResidentExperts final : public ExpertSource {
 public:
  explicit ResidentExperts(std::vector<ExpertWeights> experts) : experts_(std::move(experts)) {}
  k3::size size() const override { return experts_.size(); }
  ExpertWeights operator[](k3::size expert) const override { return experts_[expert]; }

 private:
  std::vector<ExpertWeights> experts_;
};

/// One decoder layer. The parts that `spec` does not name are empty, and so are the *_res_* ones without Attention
/// Residuals.
struct LayerWeights {
  K3LayerSpec spec{};
  AnyVector<> input_layernorm, post_attention_layernorm;         // [hidden]
  AnyVector<> self_attention_res_norm, self_attention_res_proj;  // [hidden]
  AnyVector<> mlp_res_norm, mlp_res_proj;                        // [hidden]
  KdaWeights kda{};
  MlaWeights mla{};
  MlpWeights mlp{};
  LatentMoeWeights moe{};
  std::shared_ptr<const ExpertSource> experts{};
};

/// A whole text model's weights: views into memory that somebody else owns.
struct DecoderWeights {
  AnyMatrix<> embed_tokens, lm_head;                       // [vocab, hidden]; the same where they are tied
  AnyVector<> norm;                                        // [hidden]
  AnyVector<> output_attn_res_norm, output_attn_res_proj;  // [hidden]
  std::vector<LayerWeights> layers;
};

/// How a weight stands in a checkpoint file, where that differs from its view.
enum class WeightRole : unsigned char {
  plain,  ///< the view's shape
  row,    ///< a vector stored as [1, n] (or [n])
  conv,   ///< a matrix stored as [n, 1, kernel]
  a_log,  ///< [H], [1, 1, H, 1], or [D] whose entries from H on are zero
};

namespace detail {

template <class Weights, class F>
void for_each_kda_weight(const K3Config& c, Weights& w, const std::string& prefix, F&& f) {
  const size width = kda_width(c.kda), d = c.kda.head_dim;
  f(prefix + "q_proj.weight", w.q_proj, {width, c.hidden_size}, WeightRole::plain);
  f(prefix + "k_proj.weight", w.k_proj, {width, c.hidden_size}, WeightRole::plain);
  f(prefix + "v_proj.weight", w.v_proj, {width, c.hidden_size}, WeightRole::plain);
  f(prefix + "q_conv1d.weight", w.q_conv1d, {width, c.kda.conv_kernel}, WeightRole::conv);
  f(prefix + "k_conv1d.weight", w.k_conv1d, {width, c.kda.conv_kernel}, WeightRole::conv);
  f(prefix + "v_conv1d.weight", w.v_conv1d, {width, c.kda.conv_kernel}, WeightRole::conv);
  f(prefix + "f_a_proj.weight", w.f_a_proj, {d, c.hidden_size}, WeightRole::plain);
  f(prefix + "f_b_proj.weight", w.f_b_proj, {width, d}, WeightRole::plain);
  f(prefix + "b_proj.weight", w.b_proj, {c.kda.heads, c.hidden_size}, WeightRole::plain);
  if (c.kda.use_full_rank_gate) {
    f(prefix + "g_proj.weight", w.g_proj, {width, c.hidden_size}, WeightRole::plain);
  } else {
    f(prefix + "g_a_proj.weight", w.g_a_proj, {d, c.hidden_size}, WeightRole::plain);
    f(prefix + "g_b_proj.weight", w.g_b_proj, {width, d}, WeightRole::plain);
  }
  f(prefix + "A_log", w.A_log, {c.kda.heads}, WeightRole::a_log);
  f(prefix + "dt_bias", w.dt_bias, {width}, WeightRole::plain);
  f(prefix + "o_norm.weight", w.o_norm, {d}, WeightRole::plain);
  f(prefix + "o_proj.weight", w.o_proj, {c.hidden_size, width}, WeightRole::plain);
}

template <class Weights, class F>
void for_each_mla_weight(const K3Config& c, Weights& w, const std::string& prefix, F&& f) {
  const MlaConfig g = c.mla;
  if (g.q_lora_rank > 0) {
    f(prefix + "q_a_proj.weight", w.q_a_proj, {g.q_lora_rank, c.hidden_size}, WeightRole::plain);
    f(prefix + "q_a_layernorm.weight", w.q_a_layernorm, {g.q_lora_rank}, WeightRole::plain);
    f(prefix + "q_b_proj.weight", w.q_b_proj, {mla_q_width(g), g.q_lora_rank}, WeightRole::plain);
  } else {
    f(prefix + "q_proj.weight", w.q_proj, {mla_q_width(g), c.hidden_size}, WeightRole::plain);
  }
  f(prefix + "kv_a_proj_with_mqa.weight", w.kv_a_proj_with_mqa, {mla_cache_width(g), c.hidden_size}, WeightRole::plain);
  f(prefix + "kv_a_layernorm.weight", w.kv_a_layernorm, {g.kv_lora_rank}, WeightRole::plain);
  f(prefix + "kv_b_proj.weight", w.kv_b_proj, {mla_kv_b_rows(g), g.kv_lora_rank}, WeightRole::plain);
  if (g.mla_use_output_gate) f(prefix + "g_proj.weight", w.g_proj, {mla_v_width(g), c.hidden_size}, WeightRole::plain);
  f(prefix + "o_proj.weight", w.o_proj, {c.hidden_size, mla_v_width(g)}, WeightRole::plain);
}

template <class Weights, class F>
void for_each_moe_weight(const K3Config& c, Weights& w, const std::string& prefix, F&& f) {
  const LatentMoeConfig g = c.moe;
  f(prefix + "gate.weight", w.gate, {g.n_routed, g.hidden}, WeightRole::plain);
  f(prefix + "gate.e_score_correction_bias", w.e_score_correction_bias, {g.n_routed}, WeightRole::plain);
  if (g.latent > 0) {
    f(prefix + "routed_expert_down_proj.weight", w.routed_expert_down_proj, {g.latent, g.hidden}, WeightRole::plain);
    if (g.use_norm) f(prefix + "routed_expert_norm.weight", w.routed_expert_norm, {g.latent}, WeightRole::plain);
    f(prefix + "routed_expert_up_proj.weight", w.routed_expert_up_proj, {g.hidden, g.latent}, WeightRole::plain);
  }
  if (g.n_shared > 0) {
    const std::string shared = prefix + "shared_experts.";
    f(shared + "gate_proj.weight", w.shared_experts.gate_proj, {moe_shared_width(g), g.hidden}, WeightRole::plain);
    f(shared + "up_proj.weight", w.shared_experts.up_proj, {moe_shared_width(g), g.hidden}, WeightRole::plain);
    f(shared + "down_proj.weight", w.shared_experts.down_proj, {g.hidden, moe_shared_width(g)}, WeightRole::plain);
  }
}

}  // namespace detail

/// Name of a layer's tensors without the wrapper prefix: `model.layers.N.`.
inline std::string layer_prefix(size layer) { return "model.layers." + std::to_string(layer) + "."; }
/// Name of a routed expert's tensors: `model.layers.N.block_sparse_moe.experts.E.`.
inline std::string expert_prefix(size layer, size expert) {
  return layer_prefix(layer) + "block_sparse_moe.experts." + std::to_string(expert) + ".";
}

/// Calls f(name, weight, shape, role) for every weight of layer `spec` that a model of this config has, but the routed
/// experts: the one place that knows the checkpoint's names and shapes. `f` is called with AnyMatrix and AnyVector
/// members of `layer` and the shape as a C array.
template <class Layer, class F>
void for_each_layer_weight(const K3Config& config, const K3LayerSpec& spec, Layer& layer, F&& f) {
  // The shape comes as a braced list; `call` gives it the rank of the weight.
  const auto call = [&]<size Rank, MemorySpace Space>(const std::string& name, AnyView<Rank, Space>& weight,
                                                      const size(&shape)[Rank],
                                                      WeightRole role) { f(name, weight, shape, role); };
  const std::string prefix = layer_prefix(spec.index);
  const size hidden = config.hidden_size;
  call(prefix + "input_layernorm.weight", layer.input_layernorm, {hidden}, WeightRole::plain);
  call(prefix + "post_attention_layernorm.weight", layer.post_attention_layernorm, {hidden}, WeightRole::plain);
  if (config.attn_res_block_size > 0) {
    call(prefix + "self_attention_res_norm.weight", layer.self_attention_res_norm, {hidden}, WeightRole::plain);
    call(prefix + "self_attention_res_proj.weight", layer.self_attention_res_proj, {hidden}, WeightRole::row);
    call(prefix + "mlp_res_norm.weight", layer.mlp_res_norm, {hidden}, WeightRole::plain);
    call(prefix + "mlp_res_proj.weight", layer.mlp_res_proj, {hidden}, WeightRole::row);
  }
  if (spec.mixer == MixerKind::Kda)
    detail::for_each_kda_weight(config, layer.kda, prefix + "self_attn.", call);
  else
    detail::for_each_mla_weight(config, layer.mla, prefix + "self_attn.", call);
  if (spec.mlp == MlpKind::Dense) {
    const size inner = config.intermediate_size;
    call(prefix + "mlp.gate_proj.weight", layer.mlp.gate_proj, {inner, hidden}, WeightRole::plain);
    call(prefix + "mlp.up_proj.weight", layer.mlp.up_proj, {inner, hidden}, WeightRole::plain);
    call(prefix + "mlp.down_proj.weight", layer.mlp.down_proj, {hidden, inner}, WeightRole::plain);
  } else {
    detail::for_each_moe_weight(config, layer.moe, prefix + "block_sparse_moe.", call);
  }
}

/// As for_each_layer_weight, for the weights that belong to no layer. A tied model has no lm_head of its own.
template <class Weights, class F>
void for_each_model_weight(const K3Config& config, Weights& weights, F&& f) {
  const auto call = [&]<size Rank, MemorySpace Space>(const std::string& name, AnyView<Rank, Space>& weight,
                                                      const size(&shape)[Rank],
                                                      WeightRole role) { f(name, weight, shape, role); };
  const size hidden = config.hidden_size, vocab = config.vocab_size;
  call("model.embed_tokens.weight", weights.embed_tokens, {vocab, hidden}, WeightRole::plain);
  call("model.norm.weight", weights.norm, {hidden}, WeightRole::plain);
  if (config.attn_res_block_size > 0) {
    call("model.output_attn_res_norm.weight", weights.output_attn_res_norm, {hidden}, WeightRole::plain);
    call("model.output_attn_res_proj.weight", weights.output_attn_res_proj, {hidden}, WeightRole::row);
  }
  if (!config.tie_word_embeddings) call("lm_head.weight", weights.lm_head, {vocab, hidden}, WeightRole::plain);
}

}  // namespace k3
