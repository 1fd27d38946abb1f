// SPDX-License-Identifier: Apache-2.0
// Lists the tensors of a checkpoint folder or of one safetensors file. Usage: inspect_safetensors [PATH [PREFIX]]
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>

#include <k3/io/safetensors_set.hpp>

int main(int argc, char** argv) try {
  const std::string path = argc > 1 ? argv[1] : "examples/data/austen", prefix = argc > 2 ? argv[2] : "";
  // example-begin inspect_safetensors
  const k3::Safetensors set =
      std::filesystem::is_directory(path) ? k3::open_safetensors_set(path) : k3::open_safetensors(path);
  for (const k3::TensorInfo& tensor : set.tensors()) {
    if (!tensor.name.starts_with(prefix)) continue;
    std::string shape;
    for (const std::size_t extent : tensor.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(extent);
    std::printf("%-8s [%s] %s\n", std::string(k3::dtype_name(tensor.dtype)).c_str(), shape.c_str(),
                std::string(tensor.name).c_str());
  }
  // example-end inspect_safetensors

  struct Sum {
    std::size_t tensors = 0, bytes = 0;
  };
  std::map<std::string, Sum> by_type;
  bool whole = true;
  std::size_t bytes = 0;
  for (const k3::TensorInfo& tensor : set.tensors()) {
    Sum& sum = by_type[std::string(k3::dtype_name(tensor.dtype))];
    std::size_t elements = 1;
    for (const std::size_t extent : tensor.shape) elements *= extent;
    whole = whole && elements * k3::dtype_bytes(tensor.dtype) == tensor.bytes();
    ++sum.tensors, sum.bytes += tensor.bytes(), bytes += tensor.bytes();
  }
  for (const auto& [type, sum] : by_type)
    std::printf("%zu tensors of type %s, %zu bytes\n", sum.tensors, type.c_str(), sum.bytes);
  std::printf("%zu tensors, %zu bytes in %zu file(s)\n", set.tensors().size(), bytes, set.files().size());
  return whole && bytes == set.total_bytes() ? 0 : 1;
} catch (const k3::error& problem) {
  std::fprintf(stderr, "inspect_safetensors: %s\n", problem.what());
  return 1;
}
