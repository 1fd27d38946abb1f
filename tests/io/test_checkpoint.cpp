// SPDX-License-Identifier: Apache-2.0
#include <k3/io/checkpoint.hpp>

#include <cmath>
#include <limits>
#include <thread>

#include "support/catch.hpp"
#include "support/data.hpp"
#include "support/mutable_checkpoint.hpp"

#include <k3/model/greedy_decode.hpp>

using namespace k3;
using k3::test::CheckpointFiles;
using k3::test::contains;
using k3::test::MutableCheckpoint;
using k3::test::ScratchFolder;
using k3::test::StoredTensor;
using k3::test::thrown;

namespace {

const std::string P = "language_model.model.";

nlohmann::json prompt_of(const std::string& fixture) {
  return nlohmann::json::parse(test::read_file(test::data_path(fixture) + "/expected.json"))["prompts"][1];
}

/// The model must give the reference tokens of the fixture that it was made from.
void check_decodes(const K3CpuModel& model, const std::string& fixture) {
  check(model);
  const nlohmann::json prompt = prompt_of(fixture);
  CHECK(greedy_decode<Fp32>(host{}, model, prompt["ids"].get<std::vector<id>>(), {16}).tokens ==
        prompt["generated"].get<std::vector<id>>());
}

K3CpuModel reopened(const MutableCheckpoint& checkpoint, CheckpointFiles files = CheckpointFiles::indexed) {
  const ScratchFolder folder;
  checkpoint.write(folder, files);
  return from_pretrained(folder.path);  // the maps outlive the files' names
}

void check_refused(const MutableCheckpoint& checkpoint, const std::string& tensor, const std::string& part) {
  const ScratchFolder folder;
  checkpoint.write(folder);
  const format_error problem = thrown<format_error>([&] { from_pretrained(folder.path); });
  INFO(problem.what());
  CHECK(problem.path().starts_with(folder.path));
  CHECK(problem.tensor() == tensor);
  CHECK(contains(problem.what(), part));
}

const detail::CheckpointStorage& storage_of(const K3CpuModel& model) {
  return *static_cast<const detail::CheckpointStorage*>(model.storage.get());
}

/// f(name without prefix, address, type) for every weight of a model, experts too.
template <class F>
void for_each_weight(const K3CpuModel& model, F&& f) {
  DecoderWeights weights = model.weights;
  const auto one = [&](const std::string& name, const auto& weight, const auto&, WeightRole) {
    f(name, weight.data, weight.type);
  };
  for_each_model_weight(model.config, weights, one);
  for (LayerWeights& layer : weights.layers) {
    for_each_layer_weight(model.config, layer.spec, layer, one);
    for (size e = 0; layer.experts && e < layer.experts->size(); ++e) {
      const ExpertWeights expert = (*layer.experts)[e];
      const std::string prefix = expert_prefix(layer.spec.index, e);
      const std::pair<const char*, AnyMatrix<>> parts[] = {{"w1", expert.w1}, {"w3", expert.w3}, {"w2", expert.w2}};
      for (const auto& [name, matrix] : parts) {
        const bool packed = matrix.type == ElementType::mxfp4;
        f(prefix + name + (packed ? ".weight_packed" : ".weight"), matrix.data, matrix.type);
        if (packed) f(prefix + name + ".weight_scale", matrix.scale, matrix.type);
      }
    }
  }
}

std::string without_wrapper(const std::string& name) {
  return name.starts_with("language_model.") ? name.substr(15) : name;
}

/// `values` as the bytes of another type, rounded.
template <class T>
std::string bytes_of(const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  for (size i = 0; i < values.size(); ++i) {
    const T value = static_cast<T>(values[i]);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

std::vector<float> values_of(const StoredTensor& tensor) {
  std::vector<float> values;
  const size width = tensor.dtype == "F32" ? 4 : 2;
  for (size i = 0; i < tensor.bytes.size(); i += width) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, tensor.bytes.data() + i, width);
    if (width == 2) bits <<= 16;
    values.push_back(__builtin_bit_cast(float, bits));
  }
  return values;
}

/// A file of these tensors whose data are a hole of zeros: it takes no room on disk.
void write_hollow(const ScratchFolder& folder, const MutableCheckpoint& checkpoint) {
  test::write_file(folder / "config.json", checkpoint.config.dump());
  nlohmann::ordered_json header;
  std::uint64_t end = 0;
  for (const StoredTensor& tensor : checkpoint.tensors) {
    std::uint64_t bytes = tensor.dtype == "F32" ? 4 : tensor.dtype == "BF16" ? 2 : 1;
    for (const size extent : tensor.shape) bytes *= extent;
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  test::write_file(folder / "model.safetensors", test::length_bytes(text.size()) + text);
  std::filesystem::resize_file(folder / "model.safetensors", 8 + text.size() + end);
}

/// Bytes of a file's map that are in this process's memory.
size resident_bytes(const std::string& path) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  size total = 0;
  while (std::getline(maps, line)) {
    const bool begins = line.find('-') < line.find(' ') && line.find(':') > line.find(' ');
    if (begins) inside = line.ends_with(path);
    if (inside && line.starts_with("Rss:")) total += 1024 * std::stoull(line.substr(4));
  }
  return total;
}

}  // namespace

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
  std::vector<StoredTensor> tensors;
  for (const StoredTensor& packed : checkpoint.tensors) {
    if (packed.name.ends_with(".weight_scale")) continue;
    tensors.push_back(packed);
    if (!packed.name.ends_with(".weight_packed")) continue;
    const std::string name = packed.name.substr(0, packed.name.size() - 7);
    const StoredTensor& scale = checkpoint.at(name + "_scale");
    std::vector<float> values;
    for (size i = 0; i < 2 * packed.bytes.size(); ++i) {
      const auto byte = static_cast<unsigned char>(packed.bytes[i / 2]);
      const auto code = static_cast<std::uint8_t>(i % 2 == 0 ? byte & 15 : byte >> 4);
      values.push_back(e2m1_value(code) * e8m0_value(static_cast<std::uint8_t>(scale.bytes[i / 32])));
    }
    tensors.back() = {name, "F32", {packed.shape[0], 2 * packed.shape[1]}, bytes_of<float>(values), packed.shard};
  }
  checkpoint.tensors = tensors;
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
    check_refused(checkpoint, name, "has shape [3], expected [4], or longer with zeros");
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

TEST_CASE("checkpoint: generation_config.json adds its end tokens", "[checkpoint]") {
  MutableCheckpoint checkpoint("k3-tiny-5l");
  checkpoint.generation = nlohmann::json{{"eos_token_id", {90, 91, 3}}, {"max_length", 7}};
  CHECK(reopened(checkpoint).config.eos_token_ids == std::vector<id>{3, 90, 91});
  checkpoint.generation = nlohmann::json{{"eos_token_id", 96}};
  check_refused(checkpoint, "eos_token_id", "is 96, expected ids below vocab_size, 96");
  checkpoint.generation = nlohmann::json::array();
  check_refused(checkpoint, "", "is [], expected an object of settings");
}
