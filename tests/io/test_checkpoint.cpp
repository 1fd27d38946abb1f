// SPDX-License-Identifier: Apache-2.0
// Opening a checkpoint: layouts, stored types, heads, experts on demand, and what is read of it.
#include "io/checkpoint_support.hpp"

using namespace k3;
using namespace k3::test;

TEST_CASE("checkpoint: all of the tests open, and the weights stay in the file maps", "[checkpoint]") {
  const std::string folder = GENERATE(test::data_path("k3-tiny-5l"), test::data_path("k3-tiny-13l"),
                                      test::data_path("kimi-linear-5l"), test::austen_path());
  CAPTURE(folder);
  std::vector<std::pair<size, size>> progress;
  const K3CpuModel model = from_pretrained(folder, [&](size done, size all) { progress.emplace_back(done, all); });
  check(model);
  const size layers = model.config.num_hidden_layers();
  REQUIRE(progress.size() == layers);
  for (size i = 0; i < layers; ++i) CHECK(progress[i] == std::pair{i + 1, layers});

  const Safetensors& files = *storage_of(model).files;
  CHECK(storage_of(model).copies.empty());
  size count = 0;
  for_each_weight(model, [&](const std::string& name, const void* data, ElementType type) {
    CAPTURE(name);
    const TensorInfo* tensor = files.find(name);
    if (!tensor) tensor = files.find("language_model." + name);
    REQUIRE(tensor != nullptr);
    CHECK(data == files.data(*tensor));
    CHECK(type == (tensor->dtype == DType::bf16  ? ElementType::bf16
                   : tensor->dtype == DType::f32 ? ElementType::f32
                                                 : ElementType::mxfp4));
    ++count;
  });
  size text = 0;
  for (const TensorInfo& tensor : files.tensors())
    text += !tensor.name.starts_with("vision_tower.") && !tensor.name.starts_with("mm_projector.");
  CHECK(count == text);
}

TEST_CASE("checkpoint: any layout of files, any prefix (case 60)", "[checkpoint]") {
  const std::string fixture = GENERATE("k3-tiny-5l", "kimi-linear-5l");
  const CheckpointFiles files = GENERATE(CheckpointFiles::indexed, CheckpointFiles::bare, CheckpointFiles::single);
  const bool nested = GENERATE(true, false), prefixed = GENERATE(true, false);
  CAPTURE(fixture, static_cast<int>(files), nested, prefixed);
  MutableCheckpoint checkpoint(fixture);
  const nlohmann::json text = checkpoint.text();
  checkpoint.config = nested ? nlohmann::json{{"text_config", text}} : text;
  checkpoint.rename([&](const std::string& name) {
    const std::string bare = without_wrapper(name);
    const bool is_text = bare.starts_with("model.") || bare.starts_with("lm_head.");
    return prefixed && is_text ? "language_model." + bare : bare;
  });
  check_decodes(reopened(checkpoint, files), fixture);
}

TEST_CASE("checkpoint: a head without the prefix of the rest", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  checkpoint.at("language_model.lm_head.weight").name = "lm_head.weight";
  check_decodes(reopened(checkpoint), "k3-tiny-5l");
  StoredTensor both = checkpoint.at("lm_head.weight");
  both.name = "language_model.lm_head.weight";
  checkpoint.tensors.push_back(both);
  check_refused(checkpoint, "lm_head.weight", "is not a tensor of this model");
}

TEST_CASE("checkpoint: data at odd addresses (case 58)", "[checkpoint]") {
  const std::string fixture = GENERATE("k3-tiny-5l", "kimi-linear-5l");
  const size spaces = GENERATE(1u, 2u, 3u);
  CAPTURE(fixture, spaces);
  MutableCheckpoint checkpoint(fixture);
  checkpoint.extra_spaces = spaces;
  const K3CpuModel model = reopened(checkpoint);
  const auto& copies = storage_of(model).copies;
  CHECK_FALSE(copies.empty());
  for_each_weight(model, [&](const std::string& name, const void* data, ElementType type) {
    CAPTURE(name);
    const size alignment = type == ElementType::f32 ? 4 : type == ElementType::bf16 ? 2 : 1;
    CHECK(reinterpret_cast<std::uintptr_t>(data) % alignment == 0);
  });
  size wrong = 0;  // what lies aligned, and bytes, are not copied
  for (const TensorInfo& tensor : storage_of(model).files->tensors())
    wrong += !detail::is_vision_tensor(tensor) && tensor.begin % dtype_bytes(tensor.dtype) != 0;
  CHECK(copies.size() == wrong);
  check_decodes(model, fixture);
}

TEST_CASE("checkpoint: the dense tensors may be F32 or F64", "[checkpoint]") {
  const std::string type = GENERATE("F32", "F64");
  CAPTURE(type);
  MutableCheckpoint checkpoint("k3-tiny-5l");
  for (StoredTensor& tensor : checkpoint.tensors) {
    if (tensor.dtype != "BF16" && tensor.dtype != "F32") continue;
    if (tensor.name.ends_with("A_log")) continue;  // padded ones must be F32
    const std::vector<float> values = values_of(tensor);
    tensor.bytes = type == "F32" ? bytes_of<float>(values) : bytes_of<double>(values);
    tensor.dtype = type;
  }
  check_decodes(reopened(checkpoint), "k3-tiny-5l");
}

TEST_CASE("checkpoint: experts may be plain matrices", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  unpack_experts(checkpoint);
  const K3CpuModel model = reopened(checkpoint);
  CHECK((*model.weights.layers[1].experts)[0].w1.type == ElementType::f32);
  check_decodes(model, "k3-tiny-5l");
  checkpoint.at(P + "layers.1.block_sparse_moe.experts.0.w1.weight").shape = {16, 64};
  check_refused(checkpoint, P + "layers.1.block_sparse_moe.experts.0.w1.weight",
                "has shape [16, 64], expected [32, 32]");
}

TEST_CASE("checkpoint: scales may be marked F8_E8M0 (case 26)", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  for (StoredTensor& tensor : checkpoint.tensors)
    if (tensor.name.ends_with(".weight_scale")) tensor.dtype = "F8_E8M0";
  check_decodes(reopened(checkpoint), "k3-tiny-5l");
  const std::string name = P + "layers.1.block_sparse_moe.experts.0.w1.weight_scale";
  for (const char* wrong : {"I8", "BOOL", "F8_E4M3"}) {
    checkpoint.at(name).dtype = wrong;
    check_refused(checkpoint, name, std::string("has type ") + wrong + ", expected U8 or F8_E8M0");
  }
  checkpoint.at(name).dtype = "U8";
  const std::string packed = P + "layers.1.block_sparse_moe.experts.0.w1.weight_packed";
  checkpoint.at(packed).dtype = "F8_E8M0";
  check_refused(checkpoint, packed, "has type F8_E8M0, expected U8");
}

TEST_CASE("checkpoint: tied and untied heads (case 57)", "[checkpoint]") {
  const std::string head = "language_model.lm_head.weight", embedding = P + "embed_tokens.weight";
  MutableCheckpoint untied("k3-tiny-5l");
  {
    const K3CpuModel model = reopened(untied);
    const Safetensors& files = *storage_of(model).files;
    CHECK(model.weights.lm_head.data == files.data(files.at(head)));
    CHECK(model.weights.embed_tokens.data == files.data(files.at(embedding)));
  }
  untied.remove(head);
  check_refused(untied, head, "is missing");

  const bool outer = GENERATE(true, false), head_too = GENERATE(true, false);
  MutableCheckpoint tied("k3-tiny-5l");
  tied.config.erase("tie_word_embeddings");
  tied.text().erase("tie_word_embeddings");
  (outer ? tied.config : tied.text())["tie_word_embeddings"] = true;
  if (!head_too) tied.remove(head);
  const K3CpuModel model = reopened(tied);
  check(model);
  CHECK(model.weights.lm_head.data == model.weights.embed_tokens.data);
  // The same as an untied one whose head holds the embedding.
  MutableCheckpoint copied("k3-tiny-5l");
  copied.at(head).bytes = copied.at(embedding).bytes;
  const std::vector<id> prompt = {5, 60, 7};
  const GreedyOptions options{8, {}, true};
  const auto got = greedy_decode<Fp32>(host{}, model, prompt, options);
  const auto want = greedy_decode<Fp32>(host{}, reopened(copied), prompt, options);
  CHECK(got.tokens == want.tokens);
  CHECK(got.logits == want.logits);
  CHECK(got.logits !=
        greedy_decode<Fp32>(host{}, from_pretrained(test::data_path("k3-tiny-5l")), prompt, options).logits);
}

TEST_CASE("checkpoint: a NaN scale is found when its expert is first used", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const std::string which = GENERATE("w1", "w2", "w3");
  const std::string name = P + "layers.2.block_sparse_moe.experts.3." + which + ".weight_scale";
  checkpoint.at(name).bytes[13] = '\xff';
  checkpoint.at(name).bytes[31] = '\xff';
  checkpoint.at(P + "layers.2.block_sparse_moe.experts.3.w1.weight_packed").bytes[0] = '\xff';  // a fine code
  const ScratchFolder folder;
  checkpoint.write(folder);
  const K3CpuModel model = from_pretrained(folder.path);
  const ExpertSource& experts = *model.weights.layers[2].experts;
  for (size e = 0; e < experts.size(); ++e)
    if (e != 3) CHECK_NOTHROW(experts[e]);
  for (size layer : {1u, 3u, 4u}) CHECK_NOTHROW((*model.weights.layers[layer].experts)[3]);
  const Safetensors& files = *storage_of(model).files;
  for (int again = 0; again < 2; ++again) {
    const format_error problem = thrown<format_error>([&] { static_cast<void>(experts[3]); });
    INFO(problem.what());
    CHECK(problem.path() == files.path(files.at(name)));
    CHECK(problem.tensor() == name);
    CHECK(problem.offset() == files.at(name).begin + 13);
    CHECK(contains(problem.what(), "scale byte 255 (NaN)"));
  }
  // A decode that routes to it stops with the same error.
  CHECK(contains(thrown<format_error>([&] {
                   for (id token = 0; token < 96; ++token) greedy_decode<Fp32>(host{}, model, {token}, {4});
                 }).what(),
                 name));
}

TEST_CASE("checkpoint: an expert may be asked for by many threads at once", "[checkpoint]") {
  const K3CpuModel model = from_pretrained(test::data_path("k3-tiny-13l"));
  const ExpertSource& experts = *model.weights.layers[1].experts;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (size e = 0; e < experts.size(); ++e) wrong += experts[e].w1.data == nullptr;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("checkpoint: opening reads no expert", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  const size inner = size{1} << 22;  // 204 MB an expert, 6.5 GB of them, in a hole
  checkpoint.text()["moe_intermediate_size"] = inner;
  for (StoredTensor& tensor : checkpoint.tensors) {
    const bool shared = contains(tensor.name, ".shared_experts.");
    if (!shared && !contains(tensor.name, ".experts.")) continue;
    const bool down = contains(tensor.name, ".w2.") || contains(tensor.name, ".down_proj.");
    const bool packed = tensor.name.ends_with("_packed"), scale = tensor.name.ends_with("_scale");
    tensor.shape[down ? 1 : 0] = (shared ? 2 : 1) * (down && packed ? inner / 2 : down && scale ? inner / 32 : inner);
  }
  const ScratchFolder folder;
  write_hollow(folder, checkpoint);
  const K3CpuModel model = from_pretrained(folder.path);
  const size after_opening = resident_bytes(folder / "model.safetensors");
  INFO("resident after opening: " << after_opening << " bytes");
  CHECK(after_opening <= size{4} << 20);
  // That the measure sees what is read: the first use of an expert reads its scales, 3 * 4 MiB.
  CHECK((*model.weights.layers[1].experts)[5].w1.extents[0] == inner);
  const size after_use = resident_bytes(folder / "model.safetensors");
  INFO("resident after the first use of an expert: " << after_use << " bytes");
  CHECK(after_use - after_opening >= size{12} << 20);
  CHECK(after_use - after_opening <= size{24} << 20);
}

TEST_CASE("checkpoint: generation_config.json adds its end tokens", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  checkpoint.generation = nlohmann::json{{"eos_token_id", {90, 91, 3}}, {"max_length", 7}};
  CHECK(reopened(checkpoint).config.eos_token_ids == std::vector<id>{3, 90, 91});
  checkpoint.generation = nlohmann::json{{"eos_token_id", 96}};
  check_refused(checkpoint, "eos_token_id", "is 96, expected ids below vocab_size, 96");
  checkpoint.generation = nlohmann::json::array();
  check_refused(checkpoint, "", "is [], expected an object of settings");
}
