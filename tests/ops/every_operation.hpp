// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every operation of the host as a call whose arguments lie where the caller says.

#include <cstring>
#include <functional>
#include <set>

#include <k3/k3.hpp>

#include "support/compare.hpp"

namespace k3::test {

using Bytes = std::vector<unsigned char>;
using Memory = std::vector<unsigned char*>;  // where each argument lies

/// An argument with its value; for one that is written, the names of those which may be the same memory.
struct Argument {
  std::string name;
  Bytes value;
  size element;
  bool written = false;
  std::set<std::string> may_be{};
};

struct Operation {
  std::string name;
  std::vector<Argument> arguments;
  std::function<void(const Memory&)> call;
};

template <class T>
Argument argument(const char* name, const std::vector<T>& values) {
  Argument result{name, Bytes(values.size() * sizeof(T)), sizeof(T)};
  std::memcpy(result.value.data(), values.data(), result.value.size());
  return result;
}

inline Argument floats(const char* name, size count) {
  const auto seed = static_cast<std::uint32_t>(count + 131 * std::strlen(name) + static_cast<size>(name[0]));
  return argument(name, converted<float>(random_normal(count, seed)));
}
inline Argument ids(const char* name, std::vector<id> values) { return argument(name, values); }
inline Argument bytes(const char* name, size count) { return argument(name, std::vector<std::uint8_t>(count, 0x73)); }

inline Argument written(Argument a, std::set<std::string> may_be = {}) {
  a.written = true;
  a.may_be = std::move(may_be);
  return a;
}

template <class T = float, class... Extent>
auto in(const unsigned char* memory, Extent... extent) {
  return view(reinterpret_cast<const T*>(memory), static_cast<size>(extent)...);
}
/// Where an output lies whose rows are to share memory, and whether it had rows that could.
inline const unsigned char* squeezed = nullptr;
inline bool squeezable = false;

template <class T = float, class... Extent>
auto out(unsigned char* memory, Extent... extent) {
  auto result = view(reinterpret_cast<T*>(memory), static_cast<size>(extent)...);
  for (size d = 0; memory == squeezed && d + 1 < sizeof...(extent); ++d)
    if (result.extents[d] > 1) {
      squeezable = true;
      result.strides[d] -= 1;
      break;
    }
  return result;
}

inline const host exec{1};

inline std::vector<Operation> row_operations() {
  return {
      {"rms_norm",
       {floats("x", 24), floats("weight", 8), written(floats("out", 24), {"x"})},
       [](const Memory& m) { rms_norm(exec, in(m[0], 3, 8), in(m[1], 8), 1e-5f, out(m[2], 3, 8)); }},
      {"argmax",
       {floats("logits", 24), written(ids("ids", {0, 0, 0}))},
       [](const Memory& m) { argmax(exec, in(m[0], 3, 8), out<id>(m[1], 3)); }},
      {"embed_tokens",
       {ids("ids", {1, 0, 2}), floats("table", 24), written(floats("out", 24))},
       [](const Memory& m) { embed_tokens(exec, in<id>(m[0], 3), AnyMatrix<>(in(m[1], 3, 8)), out(m[2], 3, 8)); }},
      {"situ_glu_vec",
       {floats("gate", 24), floats("up", 24), written(floats("out", 24), {"gate", "up"})},
       [](const Memory& m) { situ_glu_vec(exec, GluConfig{}, in(m[0], 3, 8), in(m[1], 3, 8), out(m[2], 3, 8)); }},
      {"sigmoid_topk",
       {floats("logits", 24), floats("bias", 8), written(ids("ids", {0, 0, 0, 0, 0, 0})),
        written(floats("weights", 6))},
       [](const Memory& m) {
         sigmoid_topk(exec, in(m[0], 3, 8), in(m[1], 8), 2, true, 1.0f, out<id>(m[2], 3, 2), out(m[3], 3, 2));
       }},
      {"attnres_blend",
       {floats("skip", 24), floats("mixed", 24), written(floats("out", 24), {"skip", "mixed"})},
       [](const Memory& m) { attnres_blend(exec, in(m[0], 3, 8), in(m[1], 3, 8), 0.25f, out(m[2], 3, 8)); }},
      {"attnres_softmax_mix",
       {floats("snapshots", 48), floats("running", 24), floats("norm_weight", 8), floats("proj_weight", 8),
        written(floats("out", 24)), written(floats("probs", 9))},
       [](const Memory& m) {
         attnres_softmax_mix(exec, in(m[0], 2, 3, 8), in(m[1], 3, 8), in(m[2], 8), AnyMatrix<>(in(m[3], 1, 8)), 1e-5f,
                             out(m[4], 3, 8), out(m[5], 3, 3));
       }},
      {"attnres_mix",
       {floats("snapshots", 48), floats("running", 24), floats("norm_weight", 8), floats("proj_weight", 8),
        written(floats("out", 24)), written(floats("probs", 9))},
       [](const Memory& m) {
         attnres_mix(exec, in(m[0], 2, 3, 8), in(m[1], 3, 8), in(m[2], 8), in(m[3], 8), 1e-5f, 0.5f, out(m[4], 3, 8),
                     out(m[5], 3, 3));
       }},
  };
}

inline std::vector<Operation> product_operations() {
  return {
      {"linear",
       {floats("x", 24), floats("weight", 40), written(floats("out", 15))},
       [](const Memory& m) { linear(exec, in(m[0], 3, 8), AnyMatrix<>(in(m[1], 5, 8)), out(m[2], 3, 5)); }},
      {"linear_transposed",
       {floats("x", 15), floats("weight", 40), written(floats("out", 24))},
       [](const Memory& m) { linear_transposed(exec, in(m[0], 3, 5), in(m[1], 5, 8), out(m[2], 3, 8)); }},
      {"dequantize_mxfp4",
       {bytes("weight", 96), bytes("weight", 6), written(floats("out", 192))},
       [](const Memory& m) {
         const Mxfp4Matrix<> weight{in<std::uint8_t>(m[0], 3, 32), in<std::uint8_t>(m[1], 3, 2)};
         dequantize_mxfp4(exec, weight, out(m[2], 3, 64));
       }},
      {"linear",
       {floats("x", 128), bytes("weight", 96), bytes("weight", 6), written(floats("out", 6))},
       [](const Memory& m) {
         const Mxfp4Matrix<> weight{in<std::uint8_t>(m[1], 3, 32), in<std::uint8_t>(m[2], 3, 2)};
         linear(exec, in(m[0], 2, 64), AnyMatrix<>(weight), out(m[3], 2, 3));
       }},
      {"quantize_mxfp4",
       {floats("x", 192), written(bytes("packed", 96)), written(bytes("scale", 6))},
       [](const Memory& m) {
         quantize_mxfp4(exec, in(m[0], 3, 64), out<std::uint8_t>(m[1], 3, 32), out<std::uint8_t>(m[2], 3, 2));
       }},
      {"dense_mlp",
       {floats("x", 24), floats("gate_proj", 40), floats("up_proj", 40), floats("down_proj", 40),
        written(floats("out", 24), {"x"})},
       [](const Memory& m) {
         MlpWorkspace<Fp32> workspace(5, 3);
         dense_mlp(exec, GluConfig{}, in(m[0], 3, 8), AnyMatrix<>(in(m[1], 5, 8)), in(m[2], 5, 8), in(m[3], 8, 5),
                   workspace, out(m[4], 3, 8));
       }},
  };
}

inline std::vector<Operation> moe_operations() {
  static constexpr LatentMoeConfig g{8, 4, 5, 3, 2, 1, {}, true, true, 1.0f};
  return {
      {"mix_routed_experts",
       {floats("latent", 24), ids("ids", {0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0}), floats("weights", 12),
        ids("slots", {0, 1, 2, 3, 4, 5}), floats("an expert's w1", 20), floats("an expert's w3", 20),
        floats("an expert's w2", 20), written(floats("out", 24), {"latent"})},
       [](const Memory& m) {
         MoeWorkspace<Fp32> workspace(g, 6);
         const ExpertWeights expert{in(m[4], 5, 4), in(m[5], 5, 4), in(m[6], 4, 5)};
         mix_routed_experts(exec, g, in(m[0], 6, 4), in<id>(m[1], 6, 2), in(m[2], 6, 2),
                            std::vector<ExpertWeights>{expert, expert, expert}, workspace, out(m[7], 6, 4),
                            in<id>(m[3], 6));
       }},
      {"latent_moe_forward",
       {floats("x", 48), floats("gate", 24), floats("e_score_correction_bias", 3),
        floats("routed_expert_down_proj", 32), floats("routed_expert_norm", 4), floats("routed_expert_up_proj", 32),
        floats("shared_experts.gate_proj", 40), floats("shared_experts.up_proj", 40),
        floats("shared_experts.down_proj", 40), ids("slots", {0, 1, 2, 3, 4, 5}), floats("an expert's w2", 20),
        written(floats("out", 48), {"x"}), written(bytes("status", 6))},
       [](const Memory& m) {
         MoeWorkspace<Fp32> workspace(g, 6);
         static const std::vector<float> other(20, 0.25f);
         const ExpertWeights expert{view(other, 5, 4), view(other, 5, 4), in(m[10], 4, 5)};
         const LatentMoeWeights weights{in(m[1], 3, 8), in(m[2], 3),
                                        in(m[3], 4, 8), in(m[4], 4),
                                        in(m[5], 8, 4), {in(m[6], 5, 8), in(m[7], 5, 8), in(m[8], 8, 5)}};
         latent_moe_forward(exec, g, in(m[0], 6, 8), weights, std::vector<ExpertWeights>{expert, expert, expert}, 1e-5f,
                            workspace, out(m[11], 6, 8), {{}, in<id>(m[9], 6), out<RowStatus>(m[12], 6)});
       }},
  };
}

inline std::vector<Operation> kda_operations() {
  static constexpr KdaConfig g{2, 4, 4, -5.0f, true};
  return {
      {"short_conv",
       {floats("x", 24), floats("weight", 32), ids("slots", {0, 0, 1}), written(floats("window", 48)),
        written(floats("out", 24))},
       [](const Memory& m) {
         short_conv(exec, in(m[0], 3, 8), AnyMatrix<>(in(m[1], 8, 4)), in<id>(m[2], 3), out(m[3], 2, 8, 3),
                    out(m[4], 3, 8));
       }},
      {"kda_gate",
       {floats("z", 24), floats("A_log", 2), floats("dt_bias", 8), written(floats("log_decay", 24), {"z"})},
       [](const Memory& m) {
         kda_gate(exec, g, in(m[0], 3, 8), in(m[1], 2), AnyVector<>(in(m[2], 8)), -5.0f, out(m[3], 3, 8));
       }},
      {"gated_rms_norm",
       {floats("core", 24), floats("gate", 24), floats("weight", 4), written(floats("out", 24), {"core", "gate"})},
       [](const Memory& m) {
         gated_rms_norm(exec, g, in(m[0], 3, 8), in(m[1], 3, 8), in(m[2], 4), 1e-5f, out(m[3], 3, 8));
       }},
      {"kda_decode_token",
       {floats("x_qkv", 72), floats("conv.q", 32), floats("conv.k", 32), floats("conv.v", 32),
        argument("log_decay", std::vector<float>(24, -0.5f)), floats("beta", 6), ids("slots", {0, 0, 1}),
        written(floats("state.recurrent", 64)), written(floats("state.conv", 144)), written(floats("out", 24))},
       [](const Memory& m) {
         const KdaConvWeights<AnyMatrix<>> conv{in(m[1], 8, 4), in(m[2], 8, 4), in(m[3], 8, 4)};
         const KdaStateView<float, float> state{out(m[7], 2, 2, 4, 4), out(m[8], 2, 24, 3)};
         kda_decode_token(exec, g, in(m[0], 3, 24), conv, in(m[4], 3, 8), in(m[5], 3, 2), in<id>(m[6], 3), state,
                          out(m[9], 3, 8));
       }},
  };
}

inline std::vector<Operation> mla_operations() {
  static constexpr MlaConfig g{2, 4, 2, 3, 0, 6, true, true, 1e-6f};
  const auto cache = [](unsigned char* pages, const unsigned char* table) {
    return MlaKvView<float>{out(pages, 4, 2, 8), in<id>(table, 2, 2), 2};
  };
  const Argument pages = floats("kv.pages", 64), table = ids("kv.block_table", {0, 1, 2, 3});
  const Argument slots = ids("slots", {0, 0, 1}), positions = ids("positions", {0, 1, 0});
  return {
      {"mla_append",
       {floats("kv_a", 24), floats("kv_a_layernorm", 6), slots, positions, table, written(pages)},
       [=](const Memory& m) {
         mla_append(exec, g, in(m[0], 3, 8), in(m[1], 6), 1e-6f, in<id>(m[2], 3), in<id>(m[3], 3), cache(m[5], m[4]));
       }},
      {"mla_absorb_query",
       {floats("q", 36), floats("kv_b", 84), written(floats("q_latent", 48))},
       [](const Memory& m) {
         mla_absorb_query(exec, g, in(m[0], 3, 12), AnyMatrix<>(in(m[1], 14, 6)), out(m[2], 3, 2, 8));
       }},
      {"mla_attend",
       {floats("q_latent", 48), pages, table, slots, positions, written(floats("o_latent", 36))},
       [=](const Memory& m) {
         mla_attend(exec, g, in(m[0], 3, 2, 8), cache(m[1], m[2]), in<id>(m[3], 3), in<id>(m[4], 3),
                    out(m[5], 3, 2, 6));
       }},
      {"mla_expand_values",
       {floats("o_latent", 36), floats("kv_b", 84), written(floats("out", 18))},
       [](const Memory& m) { mla_expand_values(exec, g, in(m[0], 3, 2, 6), in(m[1], 14, 6), out(m[2], 3, 6)); }},
      {"mla_output_gate",
       {floats("x", 18), floats("gate", 18), written(floats("out", 18), {"x", "gate"})},
       [](const Memory& m) { mla_output_gate(exec, in(m[0], 3, 6), in(m[1], 3, 6), out(m[2], 3, 6)); }},
      {"mla_decode_token",
       {floats("q", 36), floats("kv_a", 24), floats("kv_a_layernorm", 6), floats("kv_b", 84), floats("gate", 18), slots,
        positions, table, written(pages), written(floats("out", 18))},
       [=](const Memory& m) {
         MlaWorkspace<float> workspace(g, 3);
         mla_decode_token(exec, g, in(m[0], 3, 12), in(m[1], 3, 8), in(m[2], 6), AnyMatrix<>(in(m[3], 14, 6)),
                          in(m[4], 3, 6), in<id>(m[5], 3), in<id>(m[6], 3), cache(m[8], m[7]), workspace,
                          out(m[9], 3, 6));
       }},
      {"mla_decode_token",
       {floats("q", 12), floats("k", 12), floats("v", 6), floats("g", 6), written(floats("out", 6))},
       [](const Memory& m) {
         MlaExpandedKv<float> kv(g, 2);
         mla_decode_token(exec, g, in(m[0], 12), in(m[1], 12), in(m[2], 6), in(m[3], 6), kv, 0, 1e4, out(m[4], 6));
       }},
      {"gated_mla_attend",
       {floats("q", 36), floats("k", 36), floats("v", 18), floats("g", 18), written(floats("out", 18))},
       [](const Memory& m) {
         gated_mla_attend(exec, g, in(m[0], 3, 12), in(m[1], 3, 12), in(m[2], 3, 6), in(m[3], 3, 6), 0, 1e4,
                          out(m[4], 3, 6));
       }},
  };
}

}  // namespace k3::test
