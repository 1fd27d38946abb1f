// SPDX-License-Identifier: Apache-2.0
// The tokenizer at the released size: loading 163,584 ranks, encoding prose and inputs meant to be slow, one thread.
// Usage: bench_host_tokenizer [--json] [TOKENIZER_DIR [TEXT_FILE]]; without a folder the vocabulary is made up.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include <k3/io/tokenizer.hpp>
#include <k3/io/tokenizer_writer.hpp>

#include "harness.hpp"

namespace {

using Text = std::pair<const char*, std::string>;

std::string repeated(const std::string& text, std::size_t bytes) {
  std::string result;
  while (result.size() < bytes) result += text;
  return result;
}

/// A few megabytes of each kind; all but the first two are the worst that rules and merging can be given.
std::vector<Text> texts(const std::string& prose) {
  constexpr std::size_t size = std::size_t{2} << 20;
  std::mt19937 random(1);
  std::string bytes, letters, han;
  while (bytes.size() < size) bytes += static_cast<char>(random() & 255u);
  while (letters.size() < size) letters += static_cast<char>('a' + random() % 26);
  while (han.size() < size) {
    const unsigned code = 0x4E00 + static_cast<unsigned>(random() % 0x5000);
    for (const unsigned part : {0xE0 | code >> 12, 0x80 | (code >> 6 & 63), 0x80 | (code & 63)})
      han += static_cast<char>(part);
  }
  return {{"prose", repeated(prose, size)},
          {"code", repeated("for (int i = 0; i < 10; ++i) {\n    total += values[i] * 3.14159;  // sum\n}\n", size)},
          {"Han, random", han},
          {"one letter", std::string(size, 'a')},
          {"random letters", letters},
          {"spaces", std::string(size, ' ')},
          {"line ends", std::string(size, '\n')},
          {"punctuation", repeated("!?.,;:", size)},
          {"digits", repeated("0123456789", size)},
          {"combining marks", repeated("\xCC\x81", size)},
          {"upper, then lower", repeated("AAAAAAAAAAAAAAAAa", size)},
          {"no UTF-8", std::string(size, '\xFF')},
          {"random bytes", bytes},
          {"control strings", repeated("<|open|><|ope", size)}};
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

int main(int argc, char** argv) try {
  bool json = false;
  std::vector<std::string> paths;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--json")
      json = true;
    else
      paths.emplace_back(argv[i]);
  }
  std::string folder = paths.empty() ? "" : paths[0];
  std::string prose = paths.size() > 1 ? read(paths[1]) : "";
  if (prose.empty())
    prose =
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of "
        "a "
        "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, "
        "this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful "
        "property of some one or other of their daughters.\n\n\"My dear Mr. Bennet,\" said his lady to him one day, ";
  const std::string made_up = (std::filesystem::temp_directory_path() / "k3-bench-tokenizer").string();
  if (folder.empty()) {
    folder = made_up;
    std::filesystem::create_directories(folder);
    std::ofstream(folder + "/tiktoken.model", std::ios::binary) << k3::tiktoken_text(k3::made_up_vocabulary(163584));
    std::ofstream(folder + "/tokenizer_config.json") << k3::tokenizer_config_text(k3::kimi_k3_specials(163584));
  }
  const k3::bench::Timing load = k3::bench::measure(2, 50, [&](int) { k3::Tokenizer::from_directory(folder); });
  const k3::Tokenizer tokenizer = k3::Tokenizer::from_directory(folder);
  if (folder == made_up) std::filesystem::remove_all(folder);
  if (json)
    std::printf("{\"ranks\": %zu, \"load_ms\": %.2f, \"results\": [", tokenizer.rank_count(), load.median_us * 1e-3);
  else
    std::printf("%zu ranks, loaded in %.1f ms\n%-20s %10s %10s %10s\n", tokenizer.rank_count(), load.median_us * 1e-3,
                "text", "MB/s", "bytes", "tokens");
  bool first = true;
  for (const Text& entry : texts(prose)) {
    const char* const name = entry.first;
    const std::string& text = entry.second;
    std::size_t tokens = 0;
    const bool controls = std::string(name) == "control strings";
    const k3::bench::Timing time = k3::bench::measure(1, 20, [&](int) {
      tokens = tokenizer.encode(text, controls ? k3::Specials::markup : k3::Specials::plain).size();
    });
    const double speed = static_cast<double>(text.size()) / time.median_us;
    if (json)
      std::printf("%s\n{\"text\": \"%s\", \"mb_per_s\": %.2f, \"bytes\": %zu, \"tokens\": %zu}", first ? "" : ",", name,
                  speed, text.size(), tokens);
    else
      std::printf("%-20s %10.2f %10zu %10zu\n", name, speed, text.size(), tokens);
    std::fflush(stdout);
    first = false;
  }
  if (json) std::printf("]}\n");
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "bench_host_tokenizer: %s\n", problem.what());
  return 1;
}
