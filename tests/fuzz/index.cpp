// SPDX-License-Identifier: Apache-2.0
// model.safetensors.index.json.

#include <k3/io/safetensors_set.hpp>

#include "fuzz.hpp"

void run_one(std::string_view input) {
  try {
    const k3::detail::Index index = k3::detail::IndexReader("index", input).read();
    require_property(!index.table.tensors.empty() && !index.shards.empty(), "an index names a tensor and a file");
    for (const k3::TensorInfo& tensor : index.table.tensors)
      require_property(tensor.file < index.shards.size(), "a tensor lies in a listed file");
    for (const std::string& shard : index.shards)
      require_property(!shard.empty() && shard.find('/') == shard.npos && shard != "..", "a file lies in the folder");
  } catch (const k3::format_error&) {
  }
}
