// SPDX-License-Identifier: Apache-2.0
// A whole safetensors file: length, header, data.

#include <k3/io/safetensors_header.hpp>

#include "fuzz.hpp"

void run_one(std::string_view input) {
  const std::vector<std::string> paths = {"file"};
  k3::detail::TensorTable table;
  try {
    k3::detail::read_safetensors_header(paths, 0, reinterpret_cast<const std::byte*>(input.data()), input.size(),
                                        k3::detail::Listing::from_headers, table);
  } catch (const k3::format_error&) {
    return;
  }
  std::uint64_t bytes = 0;
  for (const k3::TensorInfo& tensor : table.tensors) {
    require_property(tensor.begin <= tensor.end && tensor.end <= input.size(), "a tensor lies in its file");
    require_property(table.find(tensor.name) != k3::detail::TensorTable::absent, "a tensor is found by its name");
    bytes += tensor.bytes();
  }
  require_property(bytes <= input.size(), "tensors do not overlap");
}
