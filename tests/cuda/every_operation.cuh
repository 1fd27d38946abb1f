// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include <k3/k3.cuh>

#include "cuda/random_model.cuh"

namespace k3::test {

/// Every operation of the device on operands of a random model's geometry, in bf16, each row a sequence of its own. The
/// operands (not the weights) can be spoilt and put back, so that a call that reads them too early is seen.
class EveryOperation {
 public:
  using P = Bf16;
  struct Call {
    std::string name;
    std::function<void(const gpu&, size rows)> run;
    std::function<std::vector<float>()> result;  ///< of all rows
  };
  std::vector<Call> calls;

  /// Row r stands at position r * (capacity - 1) / rows of its sequence.
  EveryOperation(const RandomModel& model, size rows, size capacity, size stored)
      : g_(decoder_geometry_from(model.config)),
        kda_(model.weights.layers[1].kda),
        mla_(model.weights.layers[2].mla),
        dense_(model.weights.layers[0].mlp),
        layer_(model.weights.layers[2]),
        weights_(model.weights),
        rows_(rows),
        capacity_(capacity),
        stored_(stored),
        argmax_work_(rows),
        mlp_work_(g_.dense_intermediate, rows),
        moe_work_(g_.moe, rows),
        mla_work_(g_.mla, rows, capacity) {
    std::vector<id> slots(rows), tokens(rows), ids;
    std::vector<size> positions(rows);
    for (size row = 0; row < rows; ++row) {
      slots[row] = static_cast<id>(row);
      tokens[row] = static_cast<id>(row * 7 % g_.vocab);
      positions[row] = row * (capacity - 1) / rows;
      for (size k = 0; k < g_.moe.top_k; ++k) ids.push_back(static_cast<id>((3 * k + row) % g_.moe.n_routed));
    }
    slots_ = given(slots), tokens_ = given(tokens), positions_ = given(positions), ids_ = given(ids);
    x_ = numbers<bf16>(rows * g_.hidden);
    row_operations();
    products();
    experts();
    kda();
    latent_attention();
    for (const auto& piece : pieces_) {
      saved_.emplace_back(piece.bytes(), false);
      copy(saved_.back(), piece, nullptr);
    }
    detail::check_cuda("test", "synchronise", cudaDeviceSynchronize());
  }

  size rows() const { return rows_; }
  /// Which row the calls begin with from now on.
  void begin_with(size row) { first_ = row; }
  /// Makes all operands NaN, slots padding and positions impossible; waits.
  void spoil() {
    for (const auto& piece : pieces_)
      detail::check_cuda("test", "memset", cudaMemset(piece.data(), 0xff, piece.bytes()));
    detail::check_cuda("test", "synchronise", cudaDeviceSynchronize());
  }
  /// Puts them back, ordered on the stream.
  void restore(cudaStream_t stream) {
    for (size i = 0; i < pieces_.size(); ++i) copy(pieces_[i], saved_[i], stream);
  }

 private:
  static void copy(const DeviceBuffer<unsigned char>& to, const DeviceBuffer<unsigned char>& from, cudaStream_t s) {
    detail::check_cuda("test", "copy",
                       cudaMemcpyAsync(to.data(), from.data(), to.bytes(), cudaMemcpyDeviceToDevice, s));
  }
  template <class T>
  T* room(size count) {
    pieces_.emplace_back(detail::larger(count, size{1}) * sizeof(T));
    return reinterpret_cast<T*>(pieces_.back().data());
  }
  template <class T>
  T* numbers(size count, float half_width = 1.7f) {
    T* const data = room<T>(count);
    fill(data, count, static_cast<unsigned>(1000 + pieces_.size()), 0.0f, half_width);
    return data;
  }
  template <class T>
  T* given(const std::vector<T>& values) {
    T* const data = room<T>(values.size());
    detail::check_cuda("test", "copy",
                       cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    detail::check_cuda("test", "synchronise", cudaDeviceSynchronize());
    return data;
  }
  template <class T>
  static std::vector<float> fetched(const T* data, size count) {
    std::vector<T> values(count);
    detail::check_cuda("test", "copy", cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    std::vector<float> result;
    for (const T& value : values) result.push_back(static_cast<float>(value));
    return result;
  }
  /// run(exec, rows, out): `width` elements of T a row.
  template <class T, class Run>
  void add(const char* name, size width, Run run) {
    T* const out = room<T>(rows_ * width);
    calls.push_back(
        {name,
         [=, this](const gpu& exec, size rows) { run(exec, rows, device_view(out + first_ * width, rows, width)); },
         [=, this] { return fetched(out, rows_ * width); }});
  }
  /// Rows of memory that holds all of them, from the first row of a call on.
  template <class T>
  DeviceView<const T, 1> part(const T* data, size rows) const {
    return device_view(data + first_, rows);
  }
  template <class T>
  DeviceView<const T, 2> part(const T* data, size rows, size width) const {
    return device_view(data + first_ * width, rows, width);
  }
  template <class T>
  DeviceView<const T, 3> part(const T* data, size rows, size heads, size width) const {
    return device_view(data + first_ * heads * width, rows, heads, width);
  }
  DeviceView<const bf16, 2> x(size rows) const { return part<bf16>(x_, rows, g_.hidden); }
  DeviceView<const id, 1> slots(size rows) const { return part<id>(slots_, rows); }
  DeviceView<const size, 1> positions(size rows) const { return part<size>(positions_, rows); }

  void row_operations() {
    const size hidden = g_.hidden, most = rows_, stored = stored_;
    add<bf16>("embed_tokens", hidden, [this](const gpu& exec, size rows, auto out) {
      embed_tokens(exec, part<id>(tokens_, rows), weights_.embed_tokens, out, slots(rows));
    });
    add<bf16>("rms_norm", hidden, [this](const gpu& exec, size rows, auto out) {
      rms_norm(exec, x(rows), weights_.norm, g_.rms_norm_eps, out);
    });
    const bf16* const snapshots = numbers<bf16>(stored * most * hidden);
    add<bf16>("attnres_norm", hidden, [=, this](const gpu& exec, size rows, auto out) {
      attnres_norm(exec, device_view(snapshots, stored, most, hidden).slice(1, first_, rows), x(rows),
                   weights_.output_attn_res_norm, weights_.output_attn_res_proj, g_.rms_norm_eps, weights_.norm,
                   g_.rms_norm_eps, out);
    });
    const float* const logits = numbers<float>(most * g_.vocab);
    add<id>("argmax", 1, [=, this](const gpu& exec, size rows, auto out) {
      argmax(exec, part(logits, rows, g_.vocab), argmax_work_, device_view(out.data, rows));
    });
  }

  void products() {
    const size hidden = g_.hidden, width = kda_width(g_.kda);
    add<float>("linear", g_.vocab,
               [this](const gpu& exec, size rows, auto out) { linear(exec, x(rows), weights_.lm_head, out); });
    add<bf16>("projections", 3 * width, [=, this](const gpu& exec, size rows, auto out) {
      projections(exec, x(rows),
                  {projection(kda_.q_proj, out.slice(1, 0, width)), projection(kda_.k_proj, out.slice(1, width, width)),
                   projection(kda_.g_proj, out.slice(1, 2 * width, width))});
    });
    const bf16* const wide = numbers<bf16>(rows_ * width);
    add<bf16>("linear_add", hidden, [=, this](const gpu& exec, size rows, auto out) {
      linear_add(exec, part(wide, rows, width), kda_.o_proj, out);
    });
    add<bf16>("dense_mlp", hidden, [this](const gpu& exec, size rows, auto out) {
      dense_mlp(exec, g_.activation, x(rows), dense_.gate_proj, dense_.up_proj, dense_.down_proj, mlp_work_, out);
    });
    add<bf16>("dense_mlp_add", hidden, [this](const gpu& exec, size rows, auto out) {
      dense_mlp_add(exec, g_.activation, x(rows), dense_.gate_proj, dense_.up_proj, dense_.down_proj, mlp_work_, out);
    });
  }

  void experts() {
    const size latent = moe_expert_width(g_.moe), k = g_.moe.top_k, experts = g_.moe.n_routed;
    const float* const logits = numbers<float>(rows_ * experts);
    float* const weights = numbers<float>(rows_ * k);
    add<id>("sigmoid_topk", k, [=, this](const gpu& exec, size rows, auto out) {
      sigmoid_topk(exec, part(logits, rows, experts), layer_.moe.e_score_correction_bias, k, true, 1.0f, out,
                   device_view(weights + first_ * k, rows, k), slots(rows));
    });
    const bf16* const low = numbers<bf16>(rows_ * latent);
    const float* const given_weights = numbers<float>(rows_ * k);
    const auto mix = [=, this](const gpu& exec, size rows, auto out) {
      mix_routed_experts(exec, g_.moe, part(low, rows, latent), part<id>(ids_, rows, k), part(given_weights, rows, k),
                         layer_.experts, moe_work_, out, slots(rows));
    };
    add<bf16>("mix_routed_experts", latent, mix);
    add<bf16>("launch_k3_latent_moe_experts", latent, [=, this](const gpu& exec, size rows, auto out) {
      launch_k3_latent_moe_experts(exec, g_.moe, part(low, rows, latent), part<id>(ids_, rows, k),
                                   part(given_weights, rows, k), layer_.experts, moe_work_, out, slots(rows));
    });
  }

  KdaStateView<float, bf16, MemorySpace::device> state() {
    const KdaConfig g = g_.kda;
    return {device_view(numbers<float>(rows_ * kda_state_elements(g)), rows_, g.heads, g.head_dim, g.head_dim),
            device_view(numbers<bf16>(rows_ * kda_conv_elements(g)), rows_, kda_conv_channels(g), g.conv_kernel - 1)};
  }
  void kda() {
    const KdaConfig g = g_.kda;
    const size width = kda_width(g), channels = kda_conv_channels(g);
    const KdaConvWeights<AnyMatrix<MemorySpace::device>> conv{kda_.q_conv1d, kda_.k_conv1d, kda_.v_conv1d};
    const bf16 *const qkv = numbers<bf16>(rows_ * channels), *const z = numbers<bf16>(rows_ * width),
                      *const beta = numbers<bf16>(rows_ * g.heads), *const gate = numbers<bf16>(rows_ * width);
    float* const decay = room<float>(rows_ * width);
    fill(decay, rows_ * width, 5, -2.0f, 1.0f);
    add<float>("kda_decode_token", width, [=, this, own = state()](const gpu& exec, size rows, auto out) {
      kda_decode_token(exec, g, part(qkv, rows, channels), conv, part<float>(decay, rows, width),
                       part(beta, rows, g.heads), slots(rows), own, out);
    });
    add<bf16>("kda_decode_fused", width, [=, this, own = state()](const gpu& exec, size rows, auto out) {
      kda_decode_fused(exec, g, part(qkv, rows, channels), conv, part(z, rows, width), kda_.A_log, kda_.dt_bias,
                       part(beta, rows, g.heads), part(gate, rows, width), kda_.o_norm, g_.rms_norm_eps, slots(rows),
                       own, out);
    });
  }

  void latent_attention() {
    const MlaConfig g = g_.mla;
    const size width = mla_cache_width(g), values = mla_v_width(g), heads = g.heads, lora = g.kv_lora_rank;
    const bf16 *const q = numbers<bf16>(rows_ * mla_q_width(g)), *const kv_a = numbers<bf16>(rows_ * width),
                      *const gate = numbers<bf16>(rows_ * values),
                      *const absorbed = numbers<bf16>(rows_ * heads * width);
    const float* const latents = numbers<float>(rows_ * heads * lora);
    std::vector<id> table(rows_);
    for (size slot = 0; slot < rows_; ++slot) table[slot] = static_cast<id>(rows_ - 1 - slot);
    const MlaKvView<bf16, MemorySpace::device> kv{
        device_view(numbers<bf16>(rows_ * capacity_ * width), rows_, capacity_, width),
        device_view(static_cast<const id*>(given(table)), rows_, size{1}), capacity_};
    bf16* const pages = kv.pages.data;
    calls.push_back({"mla_append",
                     [=, this](const gpu& exec, size rows) {
                       mla_append(exec, g, part(kv_a, rows, width), mla_.kv_a_layernorm, g.norm_eps, slots(rows),
                                  positions(rows), kv);
                     },
                     [=, this] { return fetched(pages, rows_ * capacity_ * width); }});
    add<bf16>("mla_absorb_query", heads * width, [=, this](const gpu& exec, size rows, auto out) {
      mla_absorb_query(exec, g, part(q, rows, mla_q_width(g)), mla_.kv_b_proj,
                       device_view(out.data, rows, heads, width));
    });
    add<float>("mla_attend", heads * lora, [=, this](const gpu& exec, size rows, auto out) {
      mla_attend(exec, g, part(absorbed, rows, heads, width), kv, slots(rows), positions(rows), mla_work_,
                 device_view(out.data, rows, heads, lora));
    });
    add<bf16>("mla_expand_values", values, [=, this](const gpu& exec, size rows, auto out) {
      mla_expand_values(exec, g, part(latents, rows, heads, lora), mla_.kv_b_proj, out);
    });
    add<bf16>("mla_decode_token", values, [=, this](const gpu& exec, size rows, auto out) {
      mla_decode_token(exec, g, part(q, rows, mla_q_width(g)), part(kv_a, rows, width), mla_.kv_a_layernorm,
                       mla_.kv_b_proj, part(gate, rows, values), slots(rows), positions(rows), kv, mla_work_, out);
    });
  }

  DecoderGeometry g_;
  const BasicKdaWeights<MemorySpace::device>& kda_;
  const BasicMlaWeights<MemorySpace::device>& mla_;
  const BasicMlpWeights<MemorySpace::device>& dense_;
  const DeviceLayerWeights& layer_;
  const DeviceDecoderWeights& weights_;
  size rows_, capacity_, stored_, first_ = 0;
  std::vector<DeviceBuffer<unsigned char>> pieces_, saved_;
  id *slots_ = nullptr, *tokens_ = nullptr, *ids_ = nullptr;
  size* positions_ = nullptr;
  bf16* x_ = nullptr;
  DeviceArgmaxWorkspace argmax_work_;
  DeviceMlpWorkspace<P> mlp_work_;
  MoeDeviceWorkspace<P> moe_work_;
  MlaDeviceWorkspace<P> mla_work_;
};

}  // namespace k3::test
