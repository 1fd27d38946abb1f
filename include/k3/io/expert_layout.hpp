// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/io/checkpoint_experts.hpp>

namespace k3::detail {

/// How an expert's tensors lie in a block of memory that is read from the files: tensors that are neighbours in a file
/// stay neighbours and are one range, so that the released layout, where all six are, is one large read.
class ExpertFileLayout {
 public:
  struct Tensor {
    const TensorInfo* info;
    size offset;  // in the block
  };
  struct Range {
    std::uint32_t file;
    std::uint64_t begin, end;  // in the file
    size offset;               // in the block
  };

  static constexpr size alignment = 64;

  explicit ExpertFileLayout(const BoundExpert& expert) {
    for (size i = 0; i < 3; ++i) {
      tensors_[tensor_count_++] = {expert.data[i], 0};
      if (expert.scale[i]) tensors_[tensor_count_++] = {expert.scale[i], 0};
    }
    std::sort(tensors_, tensors_ + tensor_count_, [](const Tensor& a, const Tensor& b) {
      return a.info->file != b.info->file ? a.info->file < b.info->file : a.info->begin < b.info->begin;
    });
    for (size i = 0; i < tensor_count_; ++i) place(tensors_[i]);
  }

  /// Bytes of the block.
  size bytes() const { return bytes_; }
  const Range* begin() const { return ranges_; }
  const Range* end() const { return ranges_ + range_count_; }

  /// The tensor in a block at `block`.
  const std::byte* at(const std::byte* block, const TensorInfo* tensor) const {
    for (size i = 0; i < tensor_count_; ++i)
      if (tensors_[i].info == tensor) return block + tensors_[i].offset;
    return nullptr;
  }

  /// The tensor of a file in which byte `at` lies, for messages; null where it is none of this expert's.
  const TensorInfo* tensor_at(std::uint32_t file, std::uint64_t at) const {
    for (size i = 0; i < tensor_count_; ++i) {
      const TensorInfo* const info = tensors_[i].info;
      if (info->file == file && info->begin <= at && at < info->end) return info;
    }
    return nullptr;
  }

 private:
  // A range begins at the address, modulo the alignment, that it has in the file's map, so that what lies aligned there
  // does here; a tensor that does not is a range of its own at an aligned address.
  void place(Tensor& tensor) {
    const TensorInfo& info = *tensor.info;
    const bool aligned = info.begin % dtype_bytes(info.dtype) == 0;
    if (range_count_ > 0 && aligned) {
      Range& last = ranges_[range_count_ - 1];
      const bool as_in_file = last.begin % alignment == last.offset % alignment;
      if (last.file == info.file && last.end == info.begin && as_in_file) {
        tensor.offset = bytes_;
        last.end = info.end;
        bytes_ += info.bytes();
        return;
      }
    }
    bytes_ = (bytes_ + alignment - 1) / alignment * alignment + (aligned ? info.begin % alignment : 0);
    tensor.offset = bytes_;
    ranges_[range_count_++] = {info.file, info.begin, info.end, bytes_};
    bytes_ += info.bytes();
  }

  Tensor tensors_[6] = {};
  Range ranges_[6] = {};
  size tensor_count_ = 0, range_count_ = 0, bytes_ = 0;
};

}  // namespace k3::detail
