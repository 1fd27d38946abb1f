// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <k3/core/view.hpp>
#include <k3/io/mapped_file.hpp>
#include <k3/io/safetensors_header.hpp>
#include <k3/io/tensor_table.hpp>

namespace k3 {
namespace detail {

/// The bytes of a file that read_safetensors_header looks at, not through the map: no page of it is touched, and a
/// drive that fails is an error.
inline std::vector<std::byte> read_head(const MappedFile& file) {
  std::vector<std::byte> head(smaller<size>(file.bytes(), 8));
  file.read_all(0, head.size(), head.data());
  if (head.size() < 8) return head;
  const std::uint64_t length = header_length(head.data());
  if (length > file.bytes() - 8 || length > max_safetensors_header) return head;  // refused without a look at the rest
  head.resize(8 + length);
  file.read_all(8, head.size(), head.data() + 8);
  return head;
}

}  // namespace detail

/// The tensors of one safetensors file or of a checkpoint's whole set of them, in memory maps. Opening reads the
/// headers and no tensor data. Everything handed out (TensorInfo, data, views) lives as long as this object; moving it
/// keeps all valid.
///
///     const k3::Safetensors file = k3::open_safetensors("model.safetensors");
///     const k3::TensorInfo& tensor = file.at("model.norm.weight");
///     k3::HostView<const float, 1> weight = file.view<float, 1>(tensor);
class Safetensors {
 public:
  /// Maps `paths`, in this order. `table` lists what an index promised, with `Listing::from_index`, or is empty.
  /// For the open functions; checks all that they document but what concerns the index's own text.
  Safetensors(std::string path, const std::vector<std::string>& paths, detail::TensorTable table,
              detail::Listing listing)
      : path_(std::move(path)), table_(std::move(table)) {
    files_.reserve(paths.size());
    for (const std::string& name : paths) files_.emplace_back(name);
    for (std::uint32_t file = 0; file < files_.size(); ++file) {
      const std::vector<std::byte> head = detail::read_head(files_[file]);
      detail::read_safetensors_header(paths, file, head.data(), files_[file].bytes(), listing, table_);
    }
    for (const TensorInfo& tensor : table_.tensors) {
      if (tensor.end == TensorInfo::unplaced)
        throw format_error(paths[tensor.file], detail::printable(tensor.name), "is in the index, but not in this file");
      total_bytes_ += tensor.bytes();
    }
  }

  /// The file or folder that was opened.
  const std::string& path() const { return path_; }

  /// All tensors, in the order of the index or, without one, of the headers.
  const std::vector<TensorInfo>& tensors() const { return table_.tensors; }

  /// The tensor of this name, or null.
  const TensorInfo* find(std::string_view name) const {
    const std::uint32_t index = table_.find(name);
    return index == detail::TensorTable::absent ? nullptr : &table_.tensors[index];
  }

  /// The tensor of this name. Throws format_error where there is none.
  const TensorInfo& at(std::string_view name) const {
    const TensorInfo* const tensor = find(name);
    if (tensor == nullptr) throw format_error(path_, detail::printable(name), "there is no such tensor");
    return *tensor;
  }

  /// Bytes of all tensors together.
  std::uint64_t total_bytes() const { return total_bytes_; }

  /// The maps, by TensorInfo::file.
  const std::vector<MappedFile>& files() const { return files_; }

  /// The file in which a tensor lies.
  const std::string& path(const TensorInfo& tensor) const { return files_[tensor.file].path(); }

  /// First byte of a tensor's data. The format aligns nothing: see `aligned`.
  const std::byte* data(const TensorInfo& tensor) const { return files_[tensor.file].data() + tensor.begin; }

  /// Whether a tensor's data may be read as T in place, as far as its address is concerned.
  template <class T>
  bool aligned(const TensorInfo& tensor) const {
    return reinterpret_cast<std::uintptr_t>(data(tensor)) % alignof(T) == 0;
  }

  /// The data in place. Throws format_error where the tensor is not of a type that `holds<T>`, has another rank, or is
  /// not aligned for T (then it must be copied out bytewise).
  template <class T, size Rank>
  HostView<const T, Rank> view(const TensorInfo& tensor) const {
    if (!holds<T>(tensor.dtype))
      fail(tensor, "has dtype " + std::string(dtype_name(tensor.dtype)) + ", another is needed");
    if (tensor.shape.size() != Rank)
      fail(tensor,
           "has shape " + detail::shape_text(tensor.shape) + ", expected " + std::to_string(Rank) + " dimensions");
    if (!aligned<T>(tensor)) fail(tensor, "is not aligned for its type");
    HostView<const T, Rank> result{reinterpret_cast<const T*>(data(tensor)), {}, {}};
    size stride = 1;
    for (size d = Rank; d-- > 0;) {
      result.extents[d] = tensor.shape[d];
      result.strides[d] = stride;
      stride *= tensor.shape[d];
    }
    return result;
  }

  /// Asks the system to read a tensor ahead. A hint.
  void prefetch(const TensorInfo& tensor) const { files_[tensor.file].prefetch(tensor.begin, tensor.end); }

  /// Says that a tensor is read by itself, as an expert is: its neighbours need not be read along. A hint.
  void expect_random(const TensorInfo& tensor) const { files_[tensor.file].expect_random(tensor.begin, tensor.end); }

  /// Whether all files are as they were when they were opened; see MappedFile.
  bool still_whole() const {
    for (const MappedFile& file : files_)
      if (!file.still_whole()) return false;
    return true;
  }

  /// Throws format_error, naming file and byte, unless all files are still whole. To be asked between a pass through a
  /// model and handing out its token, by programs that called `catch_lost_pages`. Cost: one system call a file.
  void require_whole() const {
    for (const MappedFile& file : files_) file.require_whole();
  }

 private:
  [[noreturn]] void fail(const TensorInfo& tensor, const std::string& what) const {
    throw format_error(path(tensor), detail::printable(tensor.name), what, tensor.begin);
  }

  std::string path_;
  std::vector<MappedFile> files_;
  detail::TensorTable table_;
  std::uint64_t total_bytes_ = 0;
};

/// Opens one safetensors file. The format: 8 bytes header length (little-endian, at most `max_safetensors_header`), a
/// JSON header that starts with '{' and may be padded with spaces, the data.
/// Throws format_error, with path, tensor and byte where known, unless every entry has exactly a known dtype, a shape
/// of at most 8 dimensions and data_offsets, no key comes twice, each range has the bytes that dtype and shape ask for,
/// and the ranges fill the rest of the file without gap or overlap. Nothing is allocated by what a field claims.
/// Tensors without elements are allowed; types smaller than a byte are not.
inline Safetensors open_safetensors(const std::string& path) {
  return Safetensors(path, {path}, {}, detail::Listing::from_headers);
}

}  // namespace k3
