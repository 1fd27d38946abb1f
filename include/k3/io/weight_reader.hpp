// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <system_error>

#include <k3/io/safetensors_set.hpp>

namespace k3 {

/// Reads weights that lie in a checkpoint's file maps from the files themselves: faster than touching the maps for the
/// first time, and a file that has become shorter, or a drive that fails, is a format_error instead of the end of the
/// process. For K3DeviceModel's `read`. What lies elsewhere is copied. Several threads may use it at once.
class WeightReader {
 public:
  explicit WeightReader(std::shared_ptr<const Safetensors> files) : files_(std::move(files)) {}

  void operator()(const void* from, size bytes, std::byte* to) const {
    const auto at = reinterpret_cast<std::uintptr_t>(from);
    for (const MappedFile& file : files_->files()) {
      const auto begin = reinterpret_cast<std::uintptr_t>(file.data());
      if (at < begin || at - begin >= file.bytes() || file.bytes() - (at - begin) < bytes) continue;
      const size first = at - begin;
      const MappedFile::ReadEnd stopped = file.read(first, first + bytes, to);
      if (stopped.at == first + bytes) return;
      throw format_error(file.path(), "",
                         stopped.code == 0 ? "the file ends here, though it was longer when it was opened"
                                           : "cannot be read: " + std::generic_category().message(stopped.code),
                         stopped.at);
    }
    std::memcpy(to, from, bytes);
  }

 private:
  std::shared_ptr<const Safetensors> files_;
};

}  // namespace k3
