// SPDX-License-Identifier: Apache-2.0
// k3 inspect: what a checkpoint is, what it holds, what it needs, and the first thing that is wrong with it.

#include <cinttypes>
#include <cstdio>

#include <k3/io/config_writer.hpp>

#include "memory.hpp"
#include "tool.hpp"

namespace {

using nlohmann::ordered_json;

struct Arguments {
  std::string model, context_text = "4096", batch_text = "1", gpus_text = "1";
  MemoryQuestion how;
  bool json = false;
};

/// All that could be found out before something was wrong.
struct Findings {
  std::optional<k3::K3Config> config;
  k3::CheckpointForm form;
  bool opened = false;
  k3::TensorCensus found, vision;
  std::size_t files = 0;
  std::uint64_t expert_tensors = 0;
  std::vector<std::string> others;  ///< files of the folder that are no part of the text model
  std::vector<std::string> strays;  ///< safetensors files that are not the model's
  std::optional<k3::id> tokenizer_end;
  std::optional<std::size_t> tokenizer_limit;
  std::uint64_t floor = 0;  ///< of --host-memory; 0: no experts, or not known
  std::optional<k3::format_error> problem;

  /// Whether what the configuration asks for can be counted: a hostile one may name any number of experts.
  bool countable() const {
    constexpr std::uint64_t most_experts = std::uint64_t{1} << 20;  // of all layers; the released model has 82,432
    return config && k3::K3Graph::from_config(*config).layers.size() * config->moe.n_routed <= most_experts;
  }
};

/// What the tensors' names and shapes say about the form they are stored in.
k3::CheckpointForm form_of(const k3::Safetensors& set) {
  k3::CheckpointForm form{false, false, 0};
  for (const k3::TensorInfo& tensor : set.tensors()) {
    form.wrapped = form.wrapped || tensor.name.starts_with("language_model.");
    form.mxfp4 = form.mxfp4 || tensor.name.ends_with(".weight_packed");
    if (tensor.name.ends_with(".A_log") && tensor.shape.size() == 1) form.a_log_length = tensor.shape[0];
  }
  return form;
}

/// The same of the files that can be opened by themselves, where not all can.
k3::CheckpointForm form_of_parts(const std::string& folder) {
  k3::CheckpointForm form{false, false, 0};
  std::error_code problem;
  for (std::filesystem::directory_iterator entry(folder, problem), end; !problem && entry != end;
       entry.increment(problem)) {
    if (entry->path().extension() != ".safetensors") continue;
    try {
      const k3::CheckpointForm part = form_of(k3::open_safetensors(entry->path().string()));
      form.wrapped = form.wrapped || part.wrapped;
      form.mxfp4 = form.mxfp4 || part.mxfp4;
      if (part.a_log_length > 0) form.a_log_length = part.a_log_length;
    } catch (const k3::error&) {
    }
  }
  return form;
}

/// Files that a checkpoint's folder may hold beside its tensors and settings.
bool known_extra(const std::string& name) {
  for (const char* end : {".py", ".md", ".txt", ".png", ".jpg", ".jpeg", ".svg", ".pdf", ".jinja"})
    if (name.ends_with(end)) return true;
  for (const char* known :
       {"preprocessor_config.json", "tokenizer_config.json", "tiktoken.model", "generation_config.json", "config.json",
        "model.safetensors.index.json", "LICENSE", "THIRD_PARTY_NOTICES", ".gitattributes"})
    if (name == known) return true;
  return name.starts_with("LICENSE") || name.starts_with(".cache");
}

void look_at_folder(const std::string& folder, const k3::Safetensors* set, Findings& findings) {
  if (set) findings.strays = k3::stray_safetensors(*set);
  std::error_code problem;
  for (std::filesystem::directory_iterator entry(folder, problem), end; !problem && entry != end;
       entry.increment(problem)) {
    const std::string name = entry->path().filename().string();
    // Those that are not the model's are told by themselves; where the files could not be opened together, which of
    // them are is not known.
    if (name.ends_with(".safetensors")) continue;
    if (!known_extra(name)) findings.others.push_back(name);
  }
  std::sort(findings.others.begin(), findings.others.end());
}

Findings look(const std::string& folder) {
  Findings findings;
  if (!std::filesystem::is_directory(folder)) throw k3::format_error(folder, "", "is not a folder that can be read");
  std::shared_ptr<const k3::Safetensors> set;
  try {
    set = std::make_shared<const k3::Safetensors>(k3::open_safetensors_set(folder));
    stop_if_interrupted();
    findings.opened = true;
    findings.files = set->files().size();
    findings.form = form_of(*set);
    for (const k3::TensorInfo& tensor : set->tensors()) {
      (k3::detail::is_vision_tensor(tensor) ? findings.vision : findings.found).add(tensor.dtype, tensor.bytes());
      findings.expert_tensors += tensor.name.find(".experts.") != tensor.name.npos;
    }
    k3::StreamingOptions streaming;  // which tells the floor
    streaming.readers = 1;
    streaming.window = 1;
    const k3::StreamedModel streamed =
        k3::stream_pretrained(folder, set, streaming, [](std::size_t, std::size_t) { stop_if_interrupted(); });
    findings.config = streamed.model.config;
    if (streamed.experts) findings.floor = streamed.experts->floor();
    if (const auto tokenizer = find_tokenizer(folder)) {
      findings.tokenizer_end = tokenizer->special_id("[EOS]");
      findings.tokenizer_limit = tokenizer->model_max_length();
    }
  } catch (const k3::format_error& problem) {
    findings.problem = problem;
    if (!findings.opened) findings.form = form_of_parts(folder);
    // The settings are worth telling all the same, if they can be read.
    try {
      if (!findings.config) findings.config = k3::read_config(folder);
    } catch (const k3::error&) {
    }
  }
  look_at_folder(folder, set.get(), findings);
  return findings;
}

std::string grouped(std::uint64_t value) {
  std::string text = std::to_string(value);
  for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
  return text;
}

std::string short_text(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
  return text;
}

void print_geometry(const k3::K3Config& c, const Findings& findings) {
  const std::optional<k3::id>& tokenizer_end = findings.tokenizer_end;
  const k3::K3Graph graph = k3::K3Graph::from_config(c);
  std::printf("%s, %zu layers: %zu KDA, %zu MLA; %zu dense, %zu with experts\n",
              c.attn_res_block_size > 0 ? "Kimi K3" : "Kimi-Linear", graph.layers.size(), graph.kda_count(),
              graph.mla_count(), c.first_k_dense_replace, graph.layers.size() - c.first_k_dense_replace);
  std::printf("layer map (K KDA, M MLA; d dense, e experts): %s\n", layer_map(graph).c_str());
  std::printf("hidden %zu, dense %zu, vocabulary %zu, positions %zu", c.hidden_size, c.intermediate_size, c.vocab_size,
              c.max_position_embeddings);
  if (findings.tokenizer_limit) std::printf(" (model_max_length of the tokenizer %zu)", *findings.tokenizer_limit);
  std::printf("\n");
  std::printf("KDA: %zu heads of %zu, convolution %zu, gate %s, output gate %s\n", c.kda.heads, c.kda.head_dim,
              c.kda.conv_kernel,
              c.kda.gate_lower_bound ? ("above " + short_text(*c.kda.gate_lower_bound)).c_str() : "unbounded",
              c.kda.use_full_rank_gate ? "of full rank" : "of low rank");
  std::printf("MLA: %zu heads of %zu + %zu, values %zu, ranks %zu and %zu, %s output gate\n", c.mla.heads,
              c.mla.qk_nope_head_dim, c.mla.qk_rope_head_dim, c.mla.v_head_dim, c.mla.q_lora_rank, c.mla.kv_lora_rank,
              c.mla.mla_use_output_gate ? "an" : "no");
  std::printf("experts: %zu, %zu chosen, %zu shared, width %zu on %s %zu, scale %g, %s\n", c.moe.n_routed, c.moe.top_k,
              c.moe.n_shared, c.moe.expert_hidden, c.moe.latent > 0 ? "a latent of" : "hidden",
              k3::moe_expert_width(c.moe), static_cast<double>(c.moe.routed_scaling_factor),
              c.moe.activation.kind == k3::GluConfig::Kind::situ ? "SiTU" : "SiLU");
  if (c.attn_res_block_size > 0) std::printf("Attention Residuals: blocks of %zu layers\n", c.attn_res_block_size);
  std::string ends;
  for (const k3::id token : c.eos_token_ids) ends += (ends.empty() ? "" : ", ") + std::to_string(token);
  if (tokenizer_end) ends += (ends.empty() ? "" : ", ") + std::to_string(*tokenizer_end) + " ([EOS] of the tokenizer)";
  std::printf("end tokens: %s\n", ends.empty() ? "none" : ends.c_str());
  for (const std::string& key : c.unread_keys) std::printf("config.json: %s is a key that was not read\n", key.c_str());
}

void print_census(const Findings& f, const k3::TensorCensus& expected) {
  std::printf("\n%-10s %12s %22s %12s %22s\n", "tensors", f.opened ? "found" : "", f.opened ? "bytes" : "", "expected",
              "bytes");
  const auto line = [&](const char* name, std::uint64_t n, std::uint64_t bytes, std::uint64_t wanted,
                        std::uint64_t wanted_bytes) {
    std::printf("%-10s %12s %22s %12s %22s%s\n", name, f.opened ? grouped(n).c_str() : "",
                f.opened ? grouped(bytes).c_str() : "", grouped(wanted).c_str(), grouped(wanted_bytes).c_str(),
                f.opened && (n != wanted || bytes != wanted_bytes) ? "  differs" : "");
  };
  for (std::size_t type = 0; type < k3::detail::dtype_count; ++type)
    if (f.found.tensors[type] + expected.tensors[type] > 0)
      line(std::string(k3::dtype_name(static_cast<k3::DType>(type))).c_str(), f.found.tensors[type],
           f.found.bytes[type], expected.tensors[type], expected.bytes[type]);
  line("all", f.found.total_tensors(), f.found.total_bytes(), expected.total_tensors(), expected.total_bytes());
  if (f.vision.total_tensors() > 0)
    std::printf("%-10s %12s %22s  passed over\n", "vision", grouped(f.vision.total_tensors()).c_str(),
                grouped(f.vision.total_bytes()).c_str());
  if (f.opened) std::printf("in %zu file%s\n", f.files, f.files == 1 ? "" : "s");
}

void print_memory(const MemoryNeed& need, const MemoryQuestion& how, const Findings& findings) {
  std::printf("\nmemory for %zu sequence%s of %zu tokens in %s, bytes%s\n", how.batch, how.batch == 1 ? "" : "s",
              how.context, how.precision.c_str(),
              how.gpus > 1 ? (" on each of " + std::to_string(how.gpus) + " GPUs").c_str() : "");
  const std::pair<const char*, std::uint64_t> lines[] = {{"trunk", need.trunk},
                                                         {"experts", need.experts},
                                                         {"KDA states", need.kda},
                                                         {"MLA latents", need.mla},
                                                         {"workspace, about", need.workspace},
                                                         {"all", need.total()}};
  for (const auto& [name, bytes] : lines) std::printf("%-20s %22s\n", name, grouped(bytes).c_str());
  if (need.one_expert == 0) return;
  const std::size_t layers = findings.config->mixers.size() - findings.config->first_k_dense_replace;
  std::printf("\nan expert has %s bytes; one token uses %s bytes of experts", grouped(need.one_expert).c_str(),
              grouped(need.experts_of_token).c_str());
  if (layers > 1) std::printf(", %s in each of %zu layers", grouped(need.experts_of_token / layers).c_str(), layers);
  std::printf("\n");
  if (findings.floor > 0)
    std::printf("least --host-memory: %s (%s bytes), the %zu experts of one token in one layer\n",
                option_bytes(findings.floor).c_str(), grouped(findings.floor).c_str(), findings.config->moe.top_k);
}

ordered_json census_json(const k3::TensorCensus& census) {
  ordered_json result = ordered_json::object();
  for (std::size_t type = 0; type < k3::detail::dtype_count; ++type)
    if (census.tensors[type] > 0)
      result[std::string(k3::dtype_name(static_cast<k3::DType>(type)))] = {{"tensors", census.tensors[type]},
                                                                           {"bytes", census.bytes[type]}};
  return result;
}

ordered_json to_json(const Findings& f, const MemoryQuestion& how) {
  ordered_json result;
  result["config"] = nullptr;
  if (f.config) {
    result["config"] = k3::config_to_json(*f.config, {false, f.form.mxfp4, 0});
    result["layers"] = layer_map(k3::K3Graph::from_config(*f.config));
    result["unread_keys"] = f.config->unread_keys;
  }
  if (f.countable()) {
    const MemoryNeed need = memory_need(*f.config, f.form, how);
    result["expected"] = census_json(k3::planned_census(*f.config, f.form));
    result["memory"] = {{"context", how.context},
                        {"batch", how.batch},
                        {"gpus", how.gpus},
                        {"precision", how.precision},
                        {"trunk", need.trunk},
                        {"experts", need.experts},
                        {"kda_states", need.kda},
                        {"mla_latents", need.mla},
                        {"workspace", need.workspace},
                        {"all", need.total()},
                        {"one_expert", need.one_expert},
                        {"experts_of_token", need.experts_of_token}};
    if (f.floor > 0) result["memory"]["least_host_memory"] = f.floor;
  }
  if (f.opened) {
    result["found"] = census_json(f.found);
    result["vision"] = {{"tensors", f.vision.total_tensors()}, {"bytes", f.vision.total_bytes()}};
    result["files"] = f.files;
  }
  result["other_files"] = f.others;
  result["stray_safetensors"] = f.strays;
  result["model_max_length"] = nullptr;
  if (f.tokenizer_limit) result["model_max_length"] = *f.tokenizer_limit;
  result["problem"] = nullptr;
  if (f.problem) {
    result["problem"] = {
        {"what", f.problem->what()}, {"file", f.problem->path()}, {"tensor", f.problem->tensor()}, {"byte", nullptr}};
    if (f.problem->offset() != k3::format_error::no_offset) result["problem"]["byte"] = f.problem->offset();
  }
  return result;
}

int run(Arguments& a) {
  a.how.context = parse_number("--context", a.context_text, std::uint64_t{1} << 32);
  a.how.batch = parse_number("--batch", a.batch_text, 1 << 20);
  a.how.gpus = parse_number("--gpus", a.gpus_text, 4096);
  if (a.how.gpus == 0) throw UsageError("--gpus: at least 1");
  if (a.how.batch == 0) throw UsageError("--batch: at least 1");
  // So that no number of bytes wraps.
  if (a.how.context > (std::uint64_t{1} << 40) / a.how.batch)
    throw UsageError("--context and --batch: at most 2^40 positions");
  catch_interrupt();
  const Findings findings = look(a.model);
  stop_if_interrupted();
  const bool counts = findings.config && findings.countable();
  const k3::TensorCensus expected =
      counts && !a.json ? k3::planned_census(*findings.config, findings.form) : k3::TensorCensus{};
  const std::string json =
      a.json ? to_json(findings, a.how).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) : "";
  stop_if_interrupted();  // from here on all is said
  if (a.json) {
    std::cout << json << std::endl;
  } else if (findings.config) {
    print_geometry(*findings.config, findings);
    if (counts) {
      print_census(findings, expected);
      print_memory(memory_need(*findings.config, findings.form, a.how), a.how, findings);
    }
    for (const std::string& name : findings.others)
      std::printf("passed over: %s\n", k3::detail::printable(name).c_str());
  }
  if (!a.json)
    for (const std::string& name : findings.strays)
      std::printf("wrong: %s is a safetensors file, but not one of this model's; it is not read\n",
                  k3::detail::printable(name).c_str());
  std::fflush(stdout);
  if (std::ferror(stdout)) throw k3::error("standard output cannot be written");
  require_output();
  if (findings.problem) throw *findings.problem;
  return 0;
}

}  // namespace

Command describe_inspect(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("inspect", "What a checkpoint is, what it holds and needs, and what is wrong with it");
  const auto a = std::make_shared<Arguments>();
  command->add_option("MODEL_DIR", a->model, "folder with config.json and the safetensors files")->required();
  command->add_option("--context", a->context_text, "tokens of a sequence, for the memory needed")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--batch", a->batch_text, "sequences at once")->type_name("N")->capture_default_str();
  command->add_option("--gpus", a->gpus_text, "GPUs to spread the model over")->type_name("N")->capture_default_str();
  command->add_option("--precision", a->how.precision, "fp32, fp64 or bf16: activations and caches")
      ->check(CLI::IsMember({"fp32", "fp64", "bf16"}))
      ->capture_default_str();
  command->add_flag("--json", a->json, "print one JSON object");
  return [a] { return run(*a); };
}
