// SPDX-License-Identifier: Apache-2.0
// k3 make-checkpoint: a checkpoint of random weights in the released layout.

#include <cstdio>
#include <filesystem>

#include <k3/io/checkpoint_writer.hpp>

#include "../progress.hpp"
#include "tool.hpp"

namespace {

struct Arguments {
  std::string out, like, seed_text = "1", shards_text = "0";
  /// Sizes that are not the member's own: option, text, what it sets.
  struct Size {
    const char* option;
    const char* what;
    std::optional<std::string> text;
  };
  Size sizes[10] = {{"--layers", "layers; the last is always MLA", {}},
                    {"--experts", "routed experts a layer", {}},
                    {"--top-k", "experts chosen for a token", {}},
                    {"--hidden", "hidden size", {}},
                    {"--width", "width of an expert", {}},
                    {"--latent", "latent width that experts work on", {}},
                    {"--dense", "width of the dense layers", {}},
                    {"--heads", "heads of both mixers", {}},
                    {"--vocab", "vocabulary, reserved ids included", {}},
                    {"--shared", "shared experts", {}}};
  std::optional<std::string> tokenizer;
  bool vision = false, hollow = false;
};

/// The folder to write to, made where it is not there. Unless it is kept, what has been made goes again.
class OutputFolder {
 public:
  /// Throws format_error where the folder cannot be made, or is there and not empty.
  explicit OutputFolder(const std::string& folder) : folder_(folder) {
    namespace fs = std::filesystem;
    if (folder.empty()) throw UsageError("OUT: needs the name of a folder");
    std::error_code problem;
    if (k3::detail::exists(folder)) {
      if (!fs::is_directory(folder, problem) || !fs::is_empty(folder, problem) || problem)
        throw k3::format_error(folder, "", "exists and is not an empty folder; nothing is ever overwritten");
      return;
    }
    fs::path part;
    for (const fs::path& name : fs::path(folder)) {
      part /= name;
      if (!name.empty() && fs::create_directory(part, problem)) made_.push_back(part);
    }
    std::error_code other;
    if (fs::is_directory(folder, other)) return;
    undo();
    throw k3::format_error(folder, "", "the folder cannot be made" + (problem ? ": " + problem.message() : ""));
  }
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;
  ~OutputFolder() {
    if (!kept_) undo();
  }
  void keep() { kept_ = true; }

 private:
  static bool of_a_checkpoint(std::string name) {
    if (name.ends_with(".part")) name.resize(name.size() - 5);
    for (const char* known : {"model.safetensors.index.json", "tiktoken.model", "tokenizer_config.json",
                              "generation_config.json", "config.json"})
      if (name == known) return true;
    return name.starts_with("model-") && name.ends_with(".safetensors");
  }

  /// Folders go only where nothing else has come into them.
  void undo() noexcept {
    try {
      namespace fs = std::filesystem;
      std::error_code problem;
      std::vector<fs::path> files;
      for (fs::directory_iterator entry(folder_, problem), end; !problem && entry != end; entry.increment(problem))
        if (of_a_checkpoint(entry->path().filename().string())) files.push_back(entry->path());
      for (const fs::path& file : files) fs::remove(file, problem);
      for (; !made_.empty(); made_.pop_back()) fs::remove(made_.back(), problem);
    } catch (const std::exception&) {  // no memory for a list of names
    }
  }

  std::string folder_;
  std::vector<std::filesystem::path> made_;
  bool kept_ = false;
};

void set_size(k3::FamilyMember& member, const std::string& option, std::size_t value) {
  k3::K3Config& c = member.config;
  if (value == 0 && option != "--layers" && option != "--shared") throw UsageError(option + ": at least 1");
  if (option == "--layers") {
    if (value < 2 || value > 10000) throw UsageError("--layers: from 2, a KDA and an MLA layer, to 10000");
    c.mixers = k3::detail::family_mixers(value);
    c.first_k_dense_replace = std::min(c.first_k_dense_replace, value);
  }
  if (option == "--experts") c.moe.n_routed = value;
  if (option == "--top-k") c.moe.top_k = value;
  if (option == "--hidden") c.hidden_size = c.moe.hidden = value;
  if (option == "--width") c.moe.expert_hidden = value;
  if (option == "--latent") {
    if (c.moe.latent == 0) throw UsageError("--latent: this member of the family has none");
    c.moe.latent = value;
  }
  if (option == "--dense") c.intermediate_size = value;
  if (option == "--heads") {
    c.kda.heads = c.mla.heads = value;
    if (member.form.a_log_length > 0) member.form.a_log_length = std::max(member.form.a_log_length, value);
  }
  if (option == "--vocab") c.vocab_size = value;
  if (option == "--shared") c.moe.n_shared = value;
}

/// Bytes of all tensors; sizes that are too large for 64 bits are told so.
double bytes_of(const k3::RandomCheckpoint& what) {
  double sum = 0;
  k3::for_each_planned_tensor(what.config, what.form, [&](const k3::PlannedTensor& tensor) {
    double bytes = static_cast<double>(k3::dtype_bytes(tensor.dtype));
    for (const std::size_t extent : tensor.shape) bytes *= static_cast<double>(extent);
    sum += bytes;
  });
  return sum;
}

void check_experts(const k3::RandomCheckpoint& what) {
  const k3::LatentMoeConfig& moe = what.config.moe;
  const std::size_t layers = what.config.mixers.size() - what.config.first_k_dense_replace;
  constexpr std::size_t most = std::size_t{1} << 20;
  if (layers == 0) return;
  if (moe.top_k > moe.n_routed)
    throw UsageError("--top-k: " + std::to_string(moe.top_k) + " of only " + std::to_string(moe.n_routed) +
                     " experts (--experts)");
  if (moe.n_routed > most / layers)
    throw UsageError("--experts: " + std::to_string(moe.n_routed) + " in each of " + std::to_string(layers) +
                     " layers are more than " + std::to_string(most) + " in all");
  const auto whole_groups = [](const std::string& option, std::size_t width) {
    if (width % k3::mxfp4_group > 0)
      throw UsageError(option + ": " + std::to_string(width) + " is not a multiple of 32, as MXFP4 needs");
  };
  if (!what.form.mxfp4) return;
  whole_groups("--width", moe.expert_hidden);
  whole_groups(moe.latent > 0 ? "--latent" : "--hidden", k3::moe_expert_width(moe));
}

/// What the library would refuse, in the words of the options.
void check_sizes(const k3::RandomCheckpoint& what) {
  check_experts(what);
  const std::size_t vocabulary = what.config.vocab_size, most = (std::size_t{1} << 23) + 256;
  if (what.tokenizer_folder.empty() && (vocabulary < 512 || vocabulary > most))
    throw UsageError("--vocab: the made-up tokenizer has from 512 ids (256 bytes, 256 reserved) to " +
                     std::to_string(most));
  constexpr double largest = 4e18;  // bytes that a file system can count
  if (const double bytes = bytes_of(what); bytes > largest) {
    char text[40];
    std::snprintf(text, sizeof text, "%.1e", bytes);
    throw UsageError("these sizes make " + std::string(text) + " bytes of tensors, more than can be written");
  }
}

k3::RandomCheckpoint wanted(const Arguments& a) {
  k3::FamilyMember member = k3::family_member(a.like);
  bool top_k_given = false;
  for (const Arguments::Size& size : a.sizes) {
    if (!size.text) continue;
    top_k_given = top_k_given || std::string(size.option) == "--top-k";
    set_size(member, size.option, parse_number(size.option, *size.text, 0x7fffffff));
  }
  // Fewer experts than are chosen: all of them are.
  if (!top_k_given) member.config.moe.top_k = std::min(member.config.moe.top_k, member.config.moe.n_routed);
  k3::RandomCheckpoint what{member.config, member.form};
  what.seed = parse_number("--seed", a.seed_text, ~std::uint64_t{0});
  what.shards = parse_number("--shards", a.shards_text, 99999);
  what.vision = a.vision;
  what.hollow = a.hollow;
  if (a.tokenizer && a.tokenizer->empty()) throw UsageError("--tokenizer: needs a folder");
  what.tokenizer_folder = a.tokenizer.value_or("");
  check_sizes(what);
  return what;
}

/// A refusal of the library that no option was checked for.
UsageError in_own_words(const k3::RandomCheckpoint& what, const k3::invalid_argument& problem) {
  if (problem.argument() == "the tokenizer's ids")
    return UsageError("--tokenizer: " + what.tokenizer_folder + " has " + problem.found() +
                      " ids, more than the model (--vocab " + problem.found() + " makes room for them)");
  std::string argument = problem.argument();
  if (const std::size_t dot = argument.find('.'); dot != argument.npos) argument.erase(0, dot + 1);
  return UsageError("these sizes make no model: " + argument + " is " + problem.found() + ", expected " +
                    problem.expected());
}

int run(const Arguments& a) {
  const k3::RandomCheckpoint what = wanted(a);
  catch_interrupt();
  OutputFolder folder(a.out);
  const Stopwatch watch;
  Progress progress("writing, MB");
  std::uint64_t bytes = 0;
  bool whole = false;
  try {
    whole = k3::write_random_checkpoint(a.out, what, [&](std::uint64_t done, std::uint64_t total) {
      bytes = total;
      progress(done >> 20, total >> 20);
      return !interrupted();
    });
  } catch (const k3::invalid_argument& problem) {
    throw in_own_words(what, problem);
  }
  stop_if_interrupted();
  if (!whole) throw k3::error(a.out + ": was not written");
  folder.keep();
  if (a.hollow) bytes = k3::planned_census(what.config, what.form).total_bytes();
  const double megabytes = static_cast<double>(bytes) / 1e6, seconds = watch.seconds();
  if (a.hollow)
    std::fprintf(stderr, "%s: hollow files, in place of %.3f MB of tensors\n", a.out.c_str(), megabytes);
  else
    std::fprintf(stderr, "%s: %.3f MB of tensors in %.1f s, %.0f MB/s\n", a.out.c_str(), megabytes, seconds,
                 megabytes / seconds);
  return 0;
}

}  // namespace

Command describe_make_checkpoint(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("make-checkpoint", "Writes a checkpoint of random weights in the released layout");
  const auto a = std::make_shared<Arguments>();
  command->add_option("OUT", a->out, "the folder to write: new or empty")->required();
  command->add_option("--like", a->like, "the member of the family whose config and layout it gets")
      ->required()
      ->check(CLI::IsMember(
          {"kimi-k3", "kimi-k3-0.40b", "kimi-k3-0.40b-mxfp4", "kimi-k3-tiny-random", "kimi-linear-48b", "tiny"}));
  for (Arguments::Size& size : a->sizes) command->add_option(size.option, size.text, size.what)->type_name("N");
  command->add_option("--seed", a->seed_text, "of the weights; the same seed gives the same bytes")
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--shards", a->shards_text,
                   "files of about equal size; 0: one a layer and one for the rest, as released")
      ->type_name("N")
      ->capture_default_str();
  command
      ->add_option("--tokenizer", a->tokenizer, "folder to copy the tokenizer's files from, instead of a made-up one")
      ->type_name("DIR");
  command->add_flag("--vision", a->vision,
                    "two more files of stand-ins for the vision tower and its projector (0.9 GB)");
  command->add_flag(
      "--hollow", a->hollow,
      "files of the right length without weights, which take no room: for trying out how they are opened");
  return [a] { return run(*a); };
}
