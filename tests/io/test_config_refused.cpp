// SPDX-License-Identifier: Apache-2.0
// config.json: layer lists, and what is refused by key and value.
#include "io/config_support.hpp"

#include <sys/stat.h>

using namespace k3;
using namespace k3::test;

TEST_CASE("config: the layer lists (case 61)", "[config]") {
  const std::vector<MixerKind> expected = {kda, kda, kda, mla};
  CHECK(mixers_of(4, {1, 2, 3}, Json::array({4})) == expected);
  CHECK(mixers_of(4, {0, 1, 2}, Json::array({3})) == expected);
  CHECK(mixers_of(4, {2, 3, 1}, Json::array({4})) == expected);
  // Neither list alone tells the base: the largest entry of kda_layers is below the count in both forms.
  CHECK(mixers_of(4, {1, 2}, {3, 4}) == std::vector<MixerKind>{kda, kda, mla, mla});
  CHECK(mixers_of(4, {0, 1}, {2, 3}) == std::vector<MixerKind>{kda, kda, mla, mla});

  check_refusal(lists_refusal(4, {1, 2, 3}, {3, 4}), "full_attn_layers", "layer 3 comes again");
  check_refusal(lists_refusal(4, {1, 2, 2, 3}, Json::array({4})), "kda_layers", "layer 2 comes again");
  check_refusal(lists_refusal(4, {1, 3}, Json::array({4})), "full_attn_layers", "layer 2 in it or in kda_layers");
  check_refusal(lists_refusal(4, {0, 1}, Json::array({3})), "full_attn_layers", "layer 2 in it or in kda_layers");
  check_refusal(lists_refusal(4, {0, 1, 2, 3}, Json::array({4})), "kda_layers", "layers from 1 to 4, not 0");
  check_refusal(lists_refusal(4, {1, 2, 3}, Json::array({5})), "full_attn_layers", "layers from 1 to 4, not 5");
  check_refusal(lists_refusal(4, {1, 2, 3, 5}, Json::array({4})), "kda_layers", "layers from 1 to 4, not 5");
  check_refusal(lists_refusal(4, {1, 2}, Json::array({3})), "full_attn_layers", "layer 0 in it or in kda_layers");
  check_refusal(lists_refusal(4, Json::array(), {1, 2, 3, 4}), "kda_layers", "a list of layers that is not empty");
  check_refusal(lists_refusal(4, {1, 2, 3, 4}, Json::array()), "full_attn_layers",
                "a list of layers that is not empty");
  check_refusal(lists_refusal(4, {1, 2, 4}, Json::array({3})), "full_attn_layers", "the last layer in it");
  check_refusal(lists_refusal(4, {1, 2, -3}, Json::array({4})), "kda_layers", "whole numbers that are not negative");
  check_refusal(lists_refusal(4, {1, 2, 3.0}, Json::array({4})), "kda_layers", "whole numbers");
  check_refusal(lists_refusal(4, {1, 2, 1e300}, Json::array({4})), "kda_layers", "whole numbers");
  check_refusal(lists_refusal(4, {1, 2, "3"}, Json::array({4})), "kda_layers", "whole numbers");
  check_refusal(lists_refusal(4, {1, 2, nullptr}, Json::array({4})), "kda_layers", "whole numbers");
  check_refusal(lists_refusal(4, {1, 2, 18446744073709551615ull}, Json::array({4})), "kda_layers",
                "layers from 1 to 4, not 18446744073709551615");
  check_refusal(lists_refusal(4, 3, Json::array({4})), "kda_layers", "is 3, expected a list");
  check_refusal(lists_refusal(4, {{"a", 1}}, Json::array({4})), "kda_layers", "expected a list");
  check_refusal(lists_refusal(4, nullptr, Json::array({4})), "kda_layers", "is null, expected a list");
  check_refusal(lists_refusal(3, {1, 2, 3}, Json::array({4})), "full_attn_layers", "layers from 1 to 3, not 4");
}

TEST_CASE("config: what is not supported is refused by key and value", "[config]") {
  check_text_refused("num_expert_group", 2, "is 2, expected 1: expert groups are not supported");
  check_text_refused("n_group", 8, "is 8, expected 1");
  check_text_refused("topk_group", 4, "is 4, expected 1");
  check_text_refused("moe_layer_freq", 2, "is 2, expected 1");
  check_text_refused("num_nextn_predict_layers", 1, "is 1, expected 0");
  check_text_refused("moe_router_activation_func", "softmax", "is \"softmax\", expected sigmoid");
  check_text_refused("scoring_func", "softmax", "is \"softmax\", expected sigmoid");
  check_text_refused("topk_method", "greedy", "is \"greedy\", expected noaux_tc");
  check_text_refused("rope_scaling", {{"type", "yarn"}, {"factor", 4}},
                     "is {\"factor\":4,\"type\":\"yarn\"}, expected null");
  check_text_refused("mla_use_nope", false, "is false, expected true");
  for (const char* key : {"attention_bias", "mlp_bias", "use_bias"})
    check_text_refused(key, true, "is true, expected false");
  for (const char* key : {"final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "embedding_scale"})
    check_text_refused(key, 30.0, "is 30.0, expected null or nothing");
  check_text_refused("num_key_value_heads", 2, "is 2, expected num_attention_heads, 8");
  check_text_refused("sliding_window", 16, "is 16, expected null or nothing");
  check_text_refused("swiglu_limit", 7.0, "is 7.0, expected null or nothing");
  check_text_refused("clip_qkv", 8.0, "is 8.0, expected null or nothing");
  for (const char* key : {"residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling"})
    check_text_refused(key, 0.5, "is 0.5, expected 1 or nothing");
  for (const char* key : {"qk_norm", "use_qk_norm"}) check_text_refused(key, true, "is true, expected false");
  for (const char* key : {"router_bias", "moe_router_bias", "o_proj_bias"})
    check_text_refused(key, true, "is true, expected false: linears have no bias");
  check_text_refused("norm_topk_prob", false, "is false, expected true, as moe_renormalize");
  check_text_refused("moe_hidden_act", "gelu", "is \"gelu\", expected hidden_act, situ");
  check_text_refused("partial_rotary_factor", 0.5, "is 0.5, expected 1");
  check_linear_refused("use_qk_l2norm", false, "is false, expected true");
  check_linear_refused("allow_neg_eigval", true, "is true, expected false");
  check_linear_refused("short_conv_bias", true, "is true, expected false");
  check_linear_refused("conv_act", "gelu", "is \"gelu\", expected");
  check_linear_refused("head_dim", 1025, "is 1025, expected at most 1024");
  check_linear_refused("gate_lower_bound", 0.5, "is 0.5, expected a negative number");
  // Neutral values pass.
  Json config = four_layers();
  config["text_config"].update({{"num_expert_group", 1},
                                {"n_group", 1},
                                {"topk_group", 1},
                                {"rope_scaling", nullptr},
                                {"attention_bias", false},
                                {"num_nextn_predict_layers", 0},
                                {"scoring_func", "sigmoid"},
                                {"logit_scale", nullptr},
                                {"sliding_window", nullptr},
                                {"residual_multiplier", 1.0},
                                {"logits_scaling", 1},
                                {"router_bias", false},
                                {"use_expert_bias", true},
                                {"qk_norm", false},
                                {"norm_topk_prob", true},
                                {"moe_hidden_act", "situ"},
                                {"partial_rotary_factor", 1.0},
                                {"num_key_value_heads", nullptr},
                                {"something_new", 5}});
  config["text_config"]["linear_attn_config"].update({{"use_qk_l2norm", true}, {"chunk_size", 64}});
  config["torch_dtype"] = "bfloat16";
  config["another"] = {1};
  // What nobody knew is named; what is known to say nothing is not.
  CHECK(config_from_json(config, file).unread_keys ==
        std::vector<std::string>{"another", "text_config.something_new", "text_config.use_expert_bias",
                                 "text_config.linear_attn_config.chunk_size"});
  config["text_config"].update({{"another", 1}});
  CHECK(config_from_json(config["text_config"], file).unread_keys ==
        std::vector<std::string>{"another", "something_new", "use_expert_bias", "linear_attn_config.chunk_size"});
  for (const Json& released : {kimi_k3_config(), twin_config(), kimi_linear_config()})
    CHECK(config_from_json(released, file).unread_keys.empty());
}

TEST_CASE("config: the quantisation", "[config]") {
  const auto refused = [](const char* where, const char* key, const Json& value, const std::string& part) {
    for (const bool outer : {false, true}) {
      CAPTURE(where, key, value.dump(), outer);
      Json config = kimi_k3_config();
      Json quantization = config["text_config"]["quantization_config"];
      quantization[Json::json_pointer(where)][key] = value;
      if (outer) config["text_config"].erase("quantization_config");
      (outer ? config : config["text_config"])["quantization_config"] = quantization;
      check_refusal(refusal(config), key, part);
    }
  };
  const char* const group = "/config_groups/group_0";
  const char* const weights = "/config_groups/group_0/weights";
  refused("", "quant_method", "gptq", "is \"gptq\", expected compressed-tensors");
  refused("", "format", "nvfp4-pack-quantized", "is \"nvfp4-pack-quantized\", expected mxfp4-pack-quantized");
  refused("", "kv_cache_scheme", {{"num_bits", 8}}, "is {\"num_bits\":8}, expected null");
  refused("", "config_groups", 3, "is 3, expected an object");
  refused("/config_groups", "group_0", nullptr, "is null, expected a value");
  refused("/config_groups", "group_0", 7, "is 7, expected an object");
  refused(group, "format", "pack-quantized", "is \"pack-quantized\", expected mxfp4");
  refused(group, "input_activations", {{"num_bits", 8}}, "expected null");
  refused(group, "output_activations", {{"num_bits", 8}}, "expected null");
  refused(group, "weights", "x", "is \"x\", expected an object");
  refused(weights, "num_bits", 8, "is 8, expected 4");
  refused(weights, "group_size", 16, "is 16, expected 32");
  refused(weights, "type", "int", "is \"int\", expected float");
  refused(weights, "strategy", "channel", "is \"channel\", expected group");
  refused(weights, "symmetric", false, "is false, expected true");
  refused("", "format", 4, "is 4, expected a string");
  check_text_refused("quantization_config", "mxfp4", "is \"mxfp4\", expected an object");
  Json config = kimi_k3_config();
  config["text_config"]["quantization_config"] = {{"quant_method", "compressed-tensors"}};
  const CheckpointHints packed{true, true, true};
  CHECK_NOTHROW(config_from_json(config, file));
  CHECK_NOTHROW(config_from_json(config, file, packed));

  // Packed experts in the files of a config that says nothing of them.
  config["text_config"].erase("quantization_config");
  CHECK_NOTHROW(config_from_json(config, file, {true, true}));
  check_refusal(refusal(config, packed), "quantization_config",
                "is absent, expected the settings of mxfp4-pack-quanti");
  config["text_config"]["quantization_config"] = nullptr;
  check_refusal(refusal(config, packed), "quantization_config", "is null, expected the settings of mxfp4-pack-quanti");
  config["quantization_config"] = {{"quant_method", "compressed-tensors"}};
  CHECK_NOTHROW(config_from_json(config, file, packed));
}

TEST_CASE("config: numbers that cannot be (case 59)", "[config]") {
  check_text_refused("num_hidden_layers", 0, "is 0, expected at least 1");
  check_text_refused("num_hidden_layers", -1, "is -1, expected a number that is not negative");
  check_text_refused("num_hidden_layers", 1000000, "is 1000000, expected at most 10000");
  check_linear_refused("head_dim", 0, "is 0, expected at least 1");
  check_text_refused("num_experts", 0, "is 0, expected at least 1");
  check_text_refused("num_experts_per_token", 9, "is 9, expected at most num_experts, 8");
  check_text_refused("num_experts_per_token", 0, "is 0, expected at least 1");
  check_text_refused("attn_res_block_size", 0, "is 0, expected at least 1");
  check_text_refused("first_k_dense_replace", 5, "is 5, expected at most num_hidden_layers, 4");
  for (const char* key :
       {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_experts",
        "num_experts_per_token", "moe_intermediate_size", "routed_expert_hidden_size", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "v_head_dim", "attn_res_block_size", "max_position_embeddings"}) {
    check_text_refused(key, 0, "is 0, expected at least 1");
    check_text_refused(key, -1, "is -1, expected a number that is not negative");
    check_text_refused(key, std::int64_t{-9223372036854775807}, "expected a number that is not negative");
    check_text_refused(key, 1.5, "is 1.5, expected a whole number");
    check_text_refused(key, 4.0, "is 4.0, expected a whole number");
    check_text_refused(key, 1e300, "is 1e+300, expected a whole number");
    check_text_refused(key, "4", "is \"4\", expected a whole number");
    check_text_refused(key, true, "is true, expected a whole number");
    check_text_refused(key, Json::array({4}), "is [4], expected a whole number");
    check_text_refused(key, std::uint64_t{1} << 31, "is 2147483648, expected a number below 2^31");
    check_text_refused(key, ~std::uint64_t{0}, "expected a number below 2^31");
  }
  for (const char* key : {"qk_rope_head_dim", "first_k_dense_replace", "num_shared_experts", "moe_layer_freq"}) {
    check_text_refused(key, -1, "is -1, expected a number that is not negative");
    check_text_refused(key, "1", "is \"1\", expected a whole number");
    check_text_refused(key, 0.5, "is 0.5, expected a whole number");
  }
  for (const char* key : {"num_heads", "head_dim", "short_conv_kernel_size"}) {
    check_linear_refused(key, 0, "is 0, expected at least 1");
    check_linear_refused(key, -4, "is -4, expected a number that is not negative");
    check_linear_refused(key, "4", "expected a whole number");
    check_linear_refused(key, nullptr, "is null, expected a whole number");
  }
  for (const char* key :
       {"rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor"}) {
    check_text_refused(key, "4.0", "is \"4.0\", expected a number");
    check_text_refused(key, 1e300, "is 1e+300, expected a number of at most 1e30");
    check_text_refused(key, true, "is true, expected a number");
    check_text_refused(key, 0.0, "is 0.0, expected ");
    check_text_refused(key, 1e-300, "is 1e-300, expected ");  // zero as a float
    check_text_refused(key, -1.0, "is -1.0, expected ");
  }
  check_text_refused("rms_norm_eps", 1.0, "expected between 0 and 1");
  check_text_refused("rms_norm_eps", nullptr, "is null, expected a number");
  check_text_refused("activation_situ_beta", nullptr, "is null, expected a number");
  for (const char* key : {"mla_use_nope", "mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize",
                          "attention_bias", "tie_word_embeddings"})
    check_text_refused(key, 1, "is 1, expected true or false");
  check_linear_refused("use_full_rank_gate", "true", "is \"true\", expected true or false");
  check_text_refused("linear_attn_config", Json::array({1}), "is [1], expected an object");
  check_text_refused("linear_attn_config", "none", "is \"none\", expected an object");
  check_text_refused("model_type", 5, "is 5, expected a string");
}

TEST_CASE("config: sizes whose products pass 64 bits", "[config]") {
  Json config = four_layers();
  const int most = 2147483647;
  config["text_config"]["linear_attn_config"].update(
      {{"num_heads", most}, {"head_dim", 1024}, {"short_conv_kernel_size", most}});
  const format_error problem = refusal(config);
  CHECK(contains(problem.what(), "too large, expected a product below 2^64"));
  config = four_layers();
  config["text_config"].update({{"num_attention_heads", most},
                                {"num_key_value_heads", most},
                                {"qk_nope_head_dim", most},
                                {"qk_rope_head_dim", most},
                                {"v_head_dim", most},
                                {"kv_lora_rank", most}});
  CHECK(contains(refusal(config).what(), "a product below 2^64"));
  config = four_layers();
  config["text_config"].update({{"num_experts", most}, {"hidden_size", most}, {"moe_intermediate_size", most}});
  CHECK(contains(refusal(config).what(), "a product below 2^64"));
}

TEST_CASE("config: files that are no config", "[config]") {
  const test::ScratchFolder folder;
  const auto refused = [&](const std::string& content, const std::string& part) {
    for (const char* name : {"config.json", "generation_config.json"}) {
      CAPTURE(name, content.substr(0, 200));
      test::write_file(folder / "config.json", four_layers().dump());
      test::write_file(folder / name, content);
      const auto problem = thrown<format_error>([&] { read_config(folder.path); });
      INFO(problem.what());
      CHECK(problem.path() == folder / name);
      CHECK(contains(problem.what(), part));
      CHECK(std::string(problem.what()).size() < 1000);
      std::filesystem::remove(folder / "generation_config.json");
    }
  };
  refused("", "is empty");
  refused("   ", "is not valid JSON");
  refused("{", "is not valid JSON");
  refused("{}x", "is not valid JSON");
  refused("{\"a\":\"\xff\"}", "is not valid JSON");
  refused("{\"a\":1e999}", "is not valid JSON");
  refused("{\"a\":NaN}", "is not valid JSON");
  refused(std::string("{\0}", 3), "is not valid JSON");
  refused(four_layers().dump() + std::string("\0{\"more\":", 10), "is not valid JSON: a NUL byte");
  refused("{\"a\":\"" + std::string(1000000, 'b'), "is not valid JSON");
  refused("[]", "is [], expected an object of settings");
  refused("null", "is null, expected an object of settings");
  refused("7", "is 7, expected an object of settings");
  refused("[\"" + std::string(300, '7') + "\"]", "..., expected an object of settings");
  refused("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}", "nested more than 64 levels deep");
  refused(std::string(10000000, '['), "nested more than 64 levels deep");
  std::string objects;
  for (int level = 0; level < 1000; ++level) objects += "{\"a\":";
  refused(objects, "nested more than 64 levels deep");
  refused(std::string(20000000, ' '), "has 20000000 bytes, more than the limit of 16777216");
  refused("{\"hidden_size\":1,\"x\":{},\"hidden_size\":1}", "hidden_size: comes twice in the same object");
  refused("{\"a\":[{\"b\":{\"c\":1,\"c\":2}}]}", "c: comes twice in the same object");
  refused("{\"a\":{\"b\":1},\"c\":{\"b\":1},\"\\u0061\":2}", "a: comes twice in the same object");
  const auto position = thrown<format_error>([&] {
    test::write_file(folder / "x", "{\"a\":#}");
    read_json_file(folder / "x");
  });
  CHECK(position.offset() == 5);
}

TEST_CASE("config: the same key in different objects is no repetition", "[config]") {
  const test::ScratchFolder folder;
  test::write_file(folder / "x", R"({"a":{"a":[{"a":1},{"a":2}],"b":{}},"b":{"a":3}})");
  CHECK(read_json_file(folder / "x")["a"]["a"][1]["a"] == 2);
}

TEST_CASE("config: no file, and what is no file", "[config]") {
  const test::ScratchFolder folder;
  CHECK(contains(thrown<format_error>([&] { read_config(folder.path); }).what(), "/config.json: cannot be opened"));
  std::filesystem::create_directory(folder / "config.json");
  CHECK(contains(thrown<format_error>([&] { read_config(folder.path); }).what(), "config.json: is not a regular file"));
  std::filesystem::remove(folder / "config.json");
  REQUIRE(::mkfifo((folder / "config.json").c_str(), 0600) == 0);
  CHECK(contains(thrown<format_error>([&] { read_config(folder.path); }).what(), "config.json: is not a regular file"));
}
