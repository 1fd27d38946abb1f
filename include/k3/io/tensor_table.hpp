// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <k3/core/bf16.hpp>
#include <k3/core/error.hpp>
#include <k3/io/printable.hpp>

namespace k3 {

/// The element types of the safetensors format whose elements are whole bytes.
enum class DType : std::uint8_t {
  boolean,
  u8,
  i8,
  f8_e5m2,
  f8_e4m3,
  f8_e8m0,
  i16,
  u16,
  f16,
  bf16,
  i32,
  u32,
  f32,
  c64,
  f64,
  i64,
  u64
};

namespace detail {

struct DTypeFacts {
  std::string_view name;
  size bytes;
};

inline constexpr DTypeFacts dtype_facts[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
                                             {"F8_E8M0", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},     {"BF16", 2},
                                             {"I32", 4},     {"U32", 4}, {"F32", 4}, {"C64", 8},     {"F64", 8},
                                             {"I64", 8},     {"U64", 8}};
inline constexpr size dtype_count = sizeof(dtype_facts) / sizeof(dtype_facts[0]);
static_assert(dtype_count == static_cast<size>(DType::u64) + 1);

}  // namespace detail

/// The format's name of a type: "BF16", "F8_E8M0".
constexpr std::string_view dtype_name(DType type) { return detail::dtype_facts[static_cast<size>(type)].name; }

/// Bytes of one element.
constexpr size dtype_bytes(DType type) { return detail::dtype_facts[static_cast<size>(type)].bytes; }

/// Whether memory holding `type` may be read as T. Bytes (std::uint8_t) also read the 8-bit float types, whose codecs
/// take codes: F8_E8M0 is how some checkpoints store MXFP4 scales.
template <class T>
constexpr bool holds(DType type) {
  if constexpr (std::is_same_v<T, float>)
    return type == DType::f32;
  else if constexpr (std::is_same_v<T, double>)
    return type == DType::f64;
  else if constexpr (std::is_same_v<T, bf16>)
    return type == DType::bf16;
  else if constexpr (std::is_same_v<T, std::uint8_t>)
    return type == DType::u8 || type == DType::f8_e8m0 || type == DType::f8_e4m3 || type == DType::f8_e5m2;
  else if constexpr (std::is_same_v<T, std::int8_t>)
    return type == DType::i8;
  else if constexpr (std::is_same_v<T, std::int16_t>)
    return type == DType::i16;
  else if constexpr (std::is_same_v<T, std::uint16_t>)
    return type == DType::u16;
  else if constexpr (std::is_same_v<T, std::int32_t>)
    return type == DType::i32;
  else if constexpr (std::is_same_v<T, std::uint32_t>)
    return type == DType::u32;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return type == DType::i64;
  else if constexpr (std::is_same_v<T, std::uint64_t>)
    return type == DType::u64;
  else
    return false;
}

/// Dimensions a tensor of a file can have at most.
inline constexpr size max_tensor_rank = 8;

/// One tensor of a set of files. `name` and `shape` point into the set that listed it and live as long as that does.
struct TensorInfo {
  static constexpr std::uint64_t unplaced = ~std::uint64_t{0};

  std::string_view name;
  std::span<const size> shape;     // outermost first; empty for a scalar
  std::uint64_t begin = unplaced;  // bytes [begin, end) of the file, counted from its start
  std::uint64_t end = unplaced;
  std::uint32_t file = 0;  // position in the set's list of files
  DType dtype = DType::u8;

  size bytes() const { return end - begin; }
  size elements() const { return bytes() / dtype_bytes(dtype); }
};

namespace detail {

/// Throws format_error for a NUL byte in JSON text, which the parser would take for its end.
inline void refuse_nul(const std::string& path, const std::string& subject, std::string_view text,
                       std::uint64_t offset = 0) {
  if (const size at = text.find('\0'); at != text.npos)
    throw format_error(path, subject, "is not valid JSON: a NUL byte", offset + at);
}

inline std::string shape_text(std::span<const size> shape) {
  std::string text = "[";
  for (size d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

/// Elements of a shape times the bytes of one, or false where that passes 2^64 (a zero extent does not excuse the
/// others).
inline bool shape_bytes(std::span<const size> shape, DType dtype, size& result) {
  size product = dtype_bytes(dtype);
  bool empty = false;
  for (const size extent : shape) {
    if (extent == 0) {
      empty = true;
      continue;
    }
    if (product > ~size{0} / extent) return false;
    product *= extent;
  }
  result = empty ? 0 : product;
  return true;
}

/// Tensors by position and by name. About 56 bytes, the name, 8 bytes per dimension and 8 to 16 bytes of hash table
/// each: 497,220 tensors of the released checkpoint take 83 MB. Names and shapes lie in blocks that never move.
class TensorTable {
 public:
  static constexpr std::uint32_t absent = ~std::uint32_t{0};

  std::vector<TensorInfo> tensors;

  std::uint32_t find(std::string_view name) const {
    if (slots_.empty()) return absent;
    return slots_[slot_of(name, hash(name))].index;
  }

  /// Adds a tensor that has no place yet. The name must be new.
  std::uint32_t insert(std::string_view name, std::uint32_t file) {
    if (tensors.size() == absent) throw error("safetensors: more than 4294967295 tensors");
    if (2 * (tensors.size() + 1) > slots_.size()) grow();
    const auto index = static_cast<std::uint32_t>(tensors.size());
    TensorInfo tensor;
    tensor.name = {copy(name.data(), name.size(), 1), name.size()};
    tensor.file = file;
    tensors.push_back(tensor);
    slots_[slot_of(name, hash(name))] = {hash(name), index};
    return index;
  }

  void set_shape(TensorInfo& tensor, std::span<const size> shape) {
    const char* const memory = copy(reinterpret_cast<const char*>(shape.data()), shape.size_bytes(), alignof(size));
    tensor.shape = {reinterpret_cast<const size*>(memory), shape.size()};
  }

 private:
  struct Slot {
    std::uint32_t hash = 0;
    std::uint32_t index = absent;
  };

  static std::uint32_t hash(std::string_view name) {
    return static_cast<std::uint32_t>(std::hash<std::string_view>{}(name));
  }

  // The slot of `name`, or the free one where it belongs. At most half of the slots are taken.
  size slot_of(std::string_view name, std::uint32_t name_hash) const {
    size at = name_hash & (slots_.size() - 1);
    while (slots_[at].index != absent && (slots_[at].hash != name_hash || tensors[slots_[at].index].name != name))
      at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  void grow() {
    std::vector<Slot> old(slots_.empty() ? 64 : 2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.index == absent) continue;
      size at = slot.hash & (slots_.size() - 1);
      while (slots_[at].index != absent) at = (at + 1) & (slots_.size() - 1);
      slots_[at] = slot;
    }
  }

  const char* copy(const char* source, size bytes, size alignment) {
    constexpr size block = size{1} << 16;
    used_ = (used_ + alignment - 1) / alignment * alignment;
    if (blocks_.empty() || used_ > capacity_ || bytes > capacity_ - used_) {
      capacity_ = larger(block, bytes);
      blocks_.push_back(std::make_unique<char[]>(capacity_));
      used_ = 0;
    }
    char* const target = blocks_.back().get() + used_;
    std::copy_n(source, bytes, target);
    used_ += bytes;
    return target;
  }

  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<char[]>> blocks_;
  size used_ = 0, capacity_ = 0;
};

}  // namespace detail
}  // namespace k3
