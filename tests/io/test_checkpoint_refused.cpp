// SPDX-License-Identifier: Apache-2.0
// Checkpoints whose tensors or config do not fit: refused by the name of the tensor or key.
#include "io/checkpoint_support.hpp"

using namespace k3;
using namespace k3::test;

TEST_CASE("checkpoint: the forms of A_log", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const std::string name = P + "layers.1.self_attn.A_log";
  StoredTensor& a_log = checkpoint.at(name);
  REQUIRE(a_log.shape == std::vector<size>{16});
  const std::string padded = a_log.bytes;
  const auto form = [&](std::vector<size> shape, const std::string& bytes, const char* dtype = "F32") {
    a_log.shape = std::move(shape);
    a_log.bytes = bytes;
    a_log.dtype = dtype;
  };
  const auto entry = [&](size index, float value) {
    std::string bytes = padded;
    std::memcpy(bytes.data() + 4 * index, &value, 4);
    return bytes;
  };
  SECTION("accepted") {
    form({4}, padded.substr(0, 16));
    check_decodes(reopened(checkpoint), "k3-tiny-5l");
    form({1, 1, 4, 1}, padded.substr(0, 16));
    check_decodes(reopened(checkpoint), "k3-tiny-5l");
    form({16}, entry(9, -0.0f));
    check_decodes(reopened(checkpoint), "k3-tiny-5l");
    checkpoint.extra_spaces = 1;
    check_decodes(reopened(checkpoint), "k3-tiny-5l");
  }
  SECTION("refused") {
    for (const float value : {1.0f, -1e-40f, std::numeric_limits<float>::infinity(), std::nanf("")}) {
      for (const size index : {4u, 9u, 15u}) {
        CAPTURE(value, index);
        form({16}, entry(index, value));
        const ScratchFolder folder;
        checkpoint.write(folder);
        const format_error problem = thrown<format_error>([&] { from_pretrained(folder.path); });
        INFO(problem.what());
        CHECK(problem.tensor() == name);
        CHECK(
            contains(problem.what(), "entry " + std::to_string(index) + ", of the padding after 4 heads, is not zero"));
        const Safetensors files = open_safetensors_set(folder.path);
        CHECK(problem.path() == files.path(files.at(name)));
        CHECK(problem.offset() == files.at(name).begin + 4 * index);
      }
    }
    form({3}, padded.substr(0, 12));
    check_refused(checkpoint, name, "has shape [3], expected [4], or [16] with zeros after the heads");
    for (const size length : {size{5}, size{15}, size{17}, size{32}}) {
      form({length}, padded + padded);
      a_log.bytes.resize(4 * length);
      check_refused(checkpoint, name, "has shape [" + std::to_string(length) + "], expected [4], or [16] with zeros");
    }
    for (const std::vector<size>& shape :
         std::vector<std::vector<size>>{{4, 4}, {1, 16}, {1, 1, 16, 1}, {4, 1, 4, 1}, {1, 1, 1, 16}}) {
      form(shape, padded);
      check_refused(checkpoint, name, "has shape " + detail::shape_text(shape) + ", expected [4]");
    }
    form({1, 1, 1, 4}, padded.substr(0, 16));
    check_refused(checkpoint, name, "has shape [1, 1, 1, 4], expected [4]");
    form({}, padded.substr(0, 4));
    check_refused(checkpoint, name, "has shape [], expected [4]");
    form({16}, std::string(32, '\0'), "BF16");
    check_refused(checkpoint, name, "is padded and of type BF16, expected F32");
    form({16}, std::string(64, '\0'), "I32");
    check_refused(checkpoint, name, "is padded and of type I32, expected F32");
    form({4}, std::string(16, '\0'), "I32");
    check_refused(checkpoint, name, "has type I32, expected BF16, F32 or F64");
  }
}

TEST_CASE("checkpoint: tensors that are not the text model's", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const auto added = [&](const std::string& name, const std::string& like) {
    MutableCheckpoint result = checkpoint;
    StoredTensor tensor = result.at(like);
    tensor.name = name;
    result.tensors.push_back(tensor);
    return result;
  };
  const std::string norm = P + "norm.weight", unknown = "is not a tensor of this model";
  check_decodes(reopened(added("vision_tower.blocks.0.norm_res_proj.weight", norm)), "k3-tiny-5l");
  check_decodes(reopened(added("mm_projector.routed_expert_down_proj.weight", norm)), "k3-tiny-5l");
  for (const std::string& name :
       {std::string("surprise"), P + "surprise.weight", P + "norm.bias", P + "layers.5.input_layernorm.weight",
        P + "layers.00.input_layernorm.weight", P + "layers.0.self_attn.q_proj.bias", P + "layers.0.mlp.gate.weight",
        P + "layers.3.self_attn.q_proj.weight", std::string("model.norm.weight"), std::string("vision_tower"),
        P + "vision_tower.norm.weight", P + "layers.0.self_attn.g_a_proj.weight"}) {
    CAPTURE(name);
    check_refused(added(name, norm), name, unknown);
  }
  const std::string expert = P + "layers.2.block_sparse_moe.experts.";
  check_refused(added(expert + "8.w1.weight_packed", expert + "0.w1.weight_packed"), expert + "8.w1.weight_packed",
                unknown);
  check_refused(added(expert + "0.w1.weight", norm), expert + "0.w1.weight", unknown);
  check_refused(added(expert + "0.w4.weight_scale", norm), expert + "0.w4.weight_scale", unknown);
  check_refused(added(expert + "0.w1.weight_shape", norm), expert + "0.w1.weight_shape", unknown);
  check_refused(added(expert + "-1.w1.weight_packed", norm), expert + "-1.w1.weight_packed", unknown);
  check_refused(added(expert + "00.w1.weight_packed", norm), expert + "00.w1.weight_packed", unknown);
}

TEST_CASE("checkpoint: packed experts need their settings", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  checkpoint.config["text_config"].erase("quantization_config");
  check_refused(checkpoint, "quantization_config", "since the files hold packed experts");
}

TEST_CASE("checkpoint: codes and scales come in pairs", "[checkpoint]") {
  const std::string name = P + "layers.4.block_sparse_moe.experts.7.w2";
  MutableCheckpoint no_scale("k3-tiny-5l"), no_codes("k3-tiny-5l"), neither("k3-tiny-5l");
  no_scale.remove(name + ".weight_scale");
  check_refused(no_scale, name + ".weight_packed",
                "has no model.layers.4.block_sparse_moe.experts.7.w2.weight_scale beside it");
  no_codes.remove(name + ".weight_packed");
  check_refused(no_codes, name + ".weight_scale",
                "has no model.layers.4.block_sparse_moe.experts.7.w2.weight_packed beside it");
  neither.remove(name + ".weight_scale");
  neither.remove(name + ".weight_packed");
  check_refused(neither, name + ".weight", "is missing");
}

TEST_CASE("checkpoint: a shape must be the right one, not only the right count", "[checkpoint]") {
  const auto reshaped = [](const std::string& name, std::vector<size> shape) {
    MutableCheckpoint checkpoint("k3-tiny-5l");
    checkpoint.at(name).shape = std::move(shape);
    return checkpoint;
  };
  const auto refused = [&](const std::string& name, const std::vector<size>& shape, const std::string& expected) {
    CAPTURE(name);
    check_refused(reshaped(name, shape), name, "has shape " + detail::shape_text(shape) + ", expected " + expected);
  };
  const std::string layer = P + "layers.1.", moe = layer + "block_sparse_moe.";
  refused(P + "embed_tokens.weight", {64, 96}, "[96, 64]");  // transposed
  refused(P + "embed_tokens.weight", {96 * 64}, "[96, 64]");
  refused(P + "embed_tokens.weight", {1, 96, 64}, "[96, 64]");
  refused(layer + "self_attn.f_a_proj.weight", {64, 16}, "[16, 64]");
  refused(moe + "gate.weight", {64, 8}, "[8, 64]");
  refused(moe + "experts.0.w1.weight_packed", {16, 32}, "[32, 16]");
  refused(moe + "experts.0.w1.weight_scale", {1, 32}, "[32, 1]");
  refused(moe + "experts.0.w1.weight_scale", {32}, "[32, 1]");
  refused(layer + "self_attn.q_conv1d.weight", {64, 4}, "[64, 1, 4]");
  refused(layer + "self_attn.q_conv1d.weight", {1, 64, 4}, "[64, 1, 4]");
  refused(layer + "self_attn.q_conv1d.weight", {64, 4, 1}, "[64, 1, 4]");
  // Vectors are stored flat, except the score weights, which may be rows.
  for (const char* norm : {"input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"}) {
    refused(layer + norm + ".weight", {1, 64}, "[64]");
    refused(layer + norm + ".weight", {64, 1}, "[64]");
  }
  refused(layer + "self_attn.dt_bias", {4, 16}, "[64]");
  refused(layer + "self_attn.o_norm.weight", {1, 16}, "[16]");
  refused(moe + "gate.e_score_correction_bias", {1, 8}, "[8]");
  for (const std::string& name :
       {layer + "self_attention_res_proj.weight", layer + "mlp_res_proj.weight", P + "output_attn_res_proj.weight"}) {
    refused(name, {64, 1}, "[1, 64]");
    refused(name, {1, 1, 64}, "[1, 64]");
    check_decodes(reopened(reshaped(name, {64})), "k3-tiny-5l");
  }
}

TEST_CASE("checkpoint: dense tensors of another type", "[checkpoint]") {
  const std::string name = GENERATE(P + "norm.weight", P + "layers.0.mlp.up_proj.weight",
                                    P + "layers.1.self_attn.q_proj.weight", P + "layers.4.self_attn.kv_b_proj.weight");
  for (const char* type : {"F16", "I16", "U16"}) {
    MutableCheckpoint checkpoint("k3-tiny-5l");
    checkpoint.at(name).dtype = type;
    check_refused(checkpoint, name, std::string("has type ") + type + ", expected BF16, F32 or F64");
  }
  MutableCheckpoint checkpoint("k3-tiny-5l");
  StoredTensor& tensor = checkpoint.at(name);
  tensor.dtype = "I8";
  tensor.bytes.resize(tensor.bytes.size() / 2);
  check_refused(checkpoint, name, "has type I8, expected BF16, F32 or F64");
}

TEST_CASE("checkpoint: a config that is not this checkpoint's", "[checkpoint]") {
  const auto refused = [](const char* key, const nlohmann::json& value, const std::string& tensor) {
    CAPTURE(key, value.dump());
    MutableCheckpoint checkpoint("k3-tiny-5l");
    checkpoint.text()[key] = value;
    const ScratchFolder folder;
    checkpoint.write(folder);
    const format_error problem = thrown<format_error>([&] { from_pretrained(folder.path); });
    INFO(problem.what());
    CHECK(problem.tensor() == tensor);
  };
  refused("vocab_size", 97, P + "embed_tokens.weight");
  refused("hidden_size", 65, P + "embed_tokens.weight");
  refused("num_experts", 9, P + "layers.1.block_sparse_moe.gate.weight");
  refused("num_experts", 2147483647, P + "layers.1.block_sparse_moe.gate.weight");
  refused("num_shared_experts", 1, P + "layers.1.block_sparse_moe.shared_experts.gate_proj.weight");
  refused("num_shared_experts", 0, P + "layers.1.block_sparse_moe.shared_experts.down_proj.weight");
  refused("routed_expert_hidden_size", 64, P + "layers.1.block_sparse_moe.routed_expert_down_proj.weight");
  refused("routed_expert_hidden_size", nullptr, "routed_expert_hidden_size");
  refused("latent_moe_use_norm", false, P + "layers.1.block_sparse_moe.routed_expert_norm.weight");
  refused("first_k_dense_replace", 0, P + "layers.0.block_sparse_moe.gate.weight");
  refused("first_k_dense_replace", 2, P + "layers.1.mlp.gate_proj.weight");
  refused("intermediate_size", 95, P + "layers.0.mlp.gate_proj.weight");
  refused("q_lora_rank", nullptr, P + "layers.3.self_attn.q_proj.weight");
  refused("mla_use_output_gate", false, P + "layers.3.self_attn.g_proj.weight");
  refused("hidden_act", "silu", "hidden_act");
  refused("attn_res_block_size", nullptr, "attn_res_block_size");  // case 56
}

TEST_CASE("checkpoint: no memory is taken for what a config only claims", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const size claimed = 2147483647;
  checkpoint.text()["num_experts"] = claimed;
  for (StoredTensor& tensor : checkpoint.tensors)
    if (contains(tensor.name, "block_sparse_moe.gate.")) tensor.shape[0] = claimed;  // 280 GB of holes
  const ScratchFolder folder;
  write_hollow(folder, checkpoint);
  const format_error problem = thrown<format_error>([&] { from_pretrained(folder.path); });
  CHECK(problem.tensor() == P + "layers.1.block_sparse_moe.experts.8.w1.weight");
}
