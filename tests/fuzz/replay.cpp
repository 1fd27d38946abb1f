// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target over files, without libFuzzer. Usage: TARGET FILE_OR_FOLDER...
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);

int main(int argc, char** argv) {
  std::size_t count = 0;
  const auto one = [&](const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(content.data()), content.size());
    // Every input also cut short, and with a byte changed: what a fuzzer would try first.
    for (std::size_t part = 1; part < 8; ++part) {
      const std::string cut = content.substr(0, content.size() * part / 8);
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(cut.data()), cut.size());
      if (content.empty()) continue;
      std::string changed = content;
      changed[content.size() * part / 8] = static_cast<char>(changed[content.size() * part / 8] ^ (1 << part));
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(changed.data()), changed.size());
    }
    ++count;
  };
  for (int i = 1; i < argc; ++i) {
    if (!std::filesystem::is_directory(argv[i]))
      one(argv[i]);
    else
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) one(entry.path());
  }
  std::printf("%zu inputs\n", count);
  return count > 0 ? 0 : 1;
}
