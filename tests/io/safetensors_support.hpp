// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the safetensors tests share: a scratch folder, files made byte by byte, and the error that a call throws.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <k3/core/error.hpp>

#include "support/catch.hpp"

namespace k3::test {

/// A new empty folder that is removed at the end.
struct ScratchFolder {
  std::string path;

  explicit ScratchFolder(const std::filesystem::path& parent = std::filesystem::temp_directory_path()) {
    std::string name = (parent / "k3-test-XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }

  std::string operator/(const std::string& name) const { return path + "/" + name; }

  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : std::filesystem::directory_iterator(path))
      result.push_back(entry.path().filename().string());
    return result;
  }
};

inline void write_file(const std::string& path, const std::string& content) {
  std::ofstream stream(path, std::ios::binary);
  stream.write(content.data(), static_cast<std::streamsize>(content.size()));
  stream.close();
  REQUIRE(stream.good());
}

inline std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  REQUIRE(stream.good());
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

/// Bytes that differ from place to place and from seed to seed.
inline std::vector<std::uint8_t> pattern(size bytes, unsigned seed) {
  std::vector<std::uint8_t> result(bytes);
  for (size i = 0; i < bytes; ++i) result[i] = static_cast<std::uint8_t>((i * 37 + seed * 11 + 5) & 255u);
  return result;
}

/// The eight bytes that tell a header's length.
inline std::string length_bytes(std::uint64_t length) {
  std::string result;
  for (int i = 0; i < 8; ++i) result += static_cast<char>(length >> (8 * i) & 255u);
  return result;
}

/// A safetensors file: length, header, then `data_bytes` bytes 0, 1, 2, ...
inline std::string file_content(const std::string& header, size data_bytes) {
  std::string content = length_bytes(header.size()) + header;
  for (size i = 0; i < data_bytes; ++i) content += static_cast<char>(i & 255u);
  return content;
}

/// `"name":{...}` of one tensor.
inline std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                         const std::string& range) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + range + "}";
}

/// What a call that must throw E threw; a failure if it returns or throws something else.
template <class E, class Call>
E thrown(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const E& problem) {
    return problem;
  } catch (const std::exception& other) {
    FAIL("threw another type: " << other.what());
  }
  FAIL("nothing was thrown");
  std::abort();
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace k3::test
