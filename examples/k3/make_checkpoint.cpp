// SPDX-License-Identifier: Apache-2.0
// k3 make-checkpoint: a checkpoint of random weights in the released layout.

#include <cstdio>

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
  std::string tokenizer;
  bool vision = false, hollow = false;
};

void set_size(k3::FamilyMember& member, const std::string& option, std::size_t value) {
  k3::K3Config& c = member.config;
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
  what.tokenizer_folder = a.tokenizer;
  return what;
}

int run(const Arguments& a) {
  const k3::RandomCheckpoint what = wanted(a);
  catch_interrupt();
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
    throw UsageError(problem.what());
  }
  if (!whole) return interrupted_status;
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
  for (Arguments::Size& size : a->sizes) command->add_option(size.option, size.text, size.what);
  command->add_option("--seed", a->seed_text, "of the weights; the same seed gives the same bytes")
      ->capture_default_str();
  command
      ->add_option("--shards", a->shards_text,
                   "files of about equal size; 0: one a layer and one for the rest, as released")
      ->capture_default_str();
  command->add_option("--tokenizer", a->tokenizer,
                      "folder to copy the tokenizer's files from, instead of a made-up one");
  command->add_flag("--vision", a->vision,
                    "two more files of stand-ins for the vision tower and its projector (0.9 GB)");
  command->add_flag(
      "--hollow", a->hollow,
      "files of the right length without weights, which take no room: for trying out how they are opened");
  return [a] { return run(*a); };
}
