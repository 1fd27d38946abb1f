// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <k3/io/json_reader.hpp>
#include <k3/io/tensor_table.hpp>

namespace k3 {

/// Longest header that is read, in bytes: the format's own limit. The released shards have 0.8 MB.
inline constexpr std::uint64_t max_safetensors_header = 100'000'000;

namespace detail {

/// Which tensors a header may add to the table.
enum class Listing { from_headers, from_index };

/// Reads one header into a table: `{"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}`, with
/// offsets counted from `data_begin`. Each entry is checked by itself here, all together by `require_contiguous`.
class HeaderReader final : public JsonReader {
 public:
  HeaderReader(const std::vector<std::string>& paths, std::uint32_t file, std::string_view text,
               std::uint64_t data_begin, std::uint64_t file_bytes, Listing listing, TensorTable& table)
      : JsonReader(paths[file], text, 8),
        paths_(paths),
        file_(file),
        data_begin_(data_begin),
        file_bytes_(file_bytes),
        listing_(listing),
        table_(table) {}

  void read() { parse(*this); }

  /// Table positions of the header's tensors, in its order.
  std::vector<std::uint32_t>& found() { return found_; }

  bool start_object(std::size_t) override {
    switch (place_) {
      case Place::start: place_ = Place::top; return true;
      case Place::entry_start: place_ = Place::entry; return true;
      case Place::metadata_start: place_ = Place::metadata; return true;
      default: unexpected("an object");
    }
  }

  bool key(string_t& name) override {
    if (place_ == Place::entry) {
      start_field(name);
    } else if (place_ == Place::metadata) {
      if (!metadata_.insert(name).second) fail("the key \"" + printable(name) + "\" of __metadata__ comes twice");
      place_ = Place::metadata_value;
    } else if (name == "__metadata__") {
      if (std::exchange(has_metadata_, true)) fail("__metadata__ comes twice");
      place_ = Place::metadata_start;
    } else {
      name_ = name;
      index_ = claim();
      fields_ = 0;
      place_ = Place::entry_start;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::entry) finish_entry();
    name_.clear();
    place_ = place_ == Place::top ? Place::done : Place::top;
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::metadata_value) {
      place_ = Place::metadata;
    } else if (place_ == Place::dtype) {
      read_dtype(text);
      place_ = Place::entry;
    } else {
      unexpected("the string \"" + printable(text) + "\"");
    }
    return true;
  }

  bool start_array(std::size_t) override {
    count_ = 0;
    switch (place_) {
      case Place::shape_start: place_ = Place::shape; return true;
      case Place::offsets_start: place_ = Place::offsets; return true;
      default: unexpected("an array");
    }
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::shape) {
      if (count_ == max_tensor_rank) fail("shape has more than " + std::to_string(max_tensor_rank) + " dimensions");
      shape_[count_++] = value;
    } else if (place_ == Place::offsets && count_ < 2) {
      offsets_[count_++] = value;
    } else {
      unexpected("the number " + std::to_string(value));
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::shape)
      rank_ = count_;
    else if (count_ != 2)
      fail("data_offsets has " + std::to_string(count_) + " numbers, expected 2");
    place_ = Place::entry;
    return true;
  }

 private:
  enum class Place {
    start,
    top,
    entry_start,
    entry,
    dtype,
    shape_start,
    shape,
    offsets_start,
    offsets,
    metadata_start,
    metadata,
    metadata_value,
    done
  };
  enum Field : unsigned { has_dtype = 1, has_shape = 2, has_offsets = 4 };

  std::string subject() const override { return printable(name_); }

  std::string expected() const override {
    switch (place_) {
      case Place::start: return "an object that lists the tensors";
      case Place::entry_start: return "an object with dtype, shape and data_offsets";
      case Place::dtype: return "dtype to be a string";
      case Place::shape_start: return "shape to be a list";
      case Place::shape: return "shape to hold whole numbers below 2^64";
      case Place::offsets_start: return "data_offsets to be a list";
      case Place::offsets: return "data_offsets to hold two whole numbers below 2^64";
      case Place::metadata_start: return "__metadata__ to be an object";
      case Place::metadata_value: return "__metadata__ to hold strings only";
      default: return "a key";
    }
  }

  std::uint32_t claim() {
    const std::uint32_t index = table_.find(name_);
    if (index == TensorTable::absent) {
      if (listing_ == Listing::from_index) fail("is in this file, but not in the index");
      found_.push_back(table_.insert(name_, file_));
      return found_.back();
    }
    const TensorInfo& known = table_.tensors[index];
    if (known.file != file_)
      fail((listing_ == Listing::from_index ? "is in this file, but the index places it in " : "is already in ") +
           paths_[known.file]);
    if (listing_ == Listing::from_headers || known.end != TensorInfo::unplaced) fail("comes twice in the header");
    found_.push_back(index);
    return index;
  }

  void start_field(const std::string& name) {
    unsigned field = 0;
    if (name == "dtype") field = has_dtype;
    if (name == "shape") field = has_shape;
    if (name == "data_offsets") field = has_offsets;
    if (field == 0) fail("unknown field \"" + printable(name) + "\"");
    if ((fields_ & field) != 0) fail(name + " comes twice");
    fields_ |= field;
    place_ = field == has_dtype ? Place::dtype : field == has_shape ? Place::shape_start : Place::offsets_start;
  }

  void read_dtype(std::string_view text) {
    for (size type = 0; type < dtype_count; ++type) {
      if (dtype_facts[type].name != text) continue;
      dtype_ = static_cast<DType>(type);
      return;
    }
    const bool sub_byte = text == "F4" || text == "F6_E2M3" || text == "F6_E3M2";
    fail((sub_byte ? "dtype is not supported (elements smaller than a byte): " : "unknown dtype: ") + printable(text));
  }

  void finish_entry() {
    if ((fields_ & has_dtype) == 0) fail("has no dtype");
    if ((fields_ & has_shape) == 0) fail("has no shape");
    if ((fields_ & has_offsets) == 0) fail("has no data_offsets");
    const std::span<const size> shape(shape_, rank_);
    const std::string range = "[" + std::to_string(offsets_[0]) + ", " + std::to_string(offsets_[1]) + ")";
    if (offsets_[0] > offsets_[1]) fail("data_offsets " + range + " end before they begin");
    if (offsets_[1] > file_bytes_ - data_begin_)
      fail("data_offsets " + range + " end beyond the file, which holds " + std::to_string(file_bytes_ - data_begin_) +
           " data bytes");
    size bytes = 0;
    if (!shape_bytes(shape, dtype_, bytes)) fail("shape " + shape_text(shape) + " is too large");
    if (bytes != offsets_[1] - offsets_[0])
      fail("data_offsets " + range + " hold " + std::to_string(offsets_[1] - offsets_[0]) + " bytes, but " +
           std::string(dtype_name(dtype_)) + " " + shape_text(shape) + " needs " + std::to_string(bytes));
    TensorInfo& tensor = table_.tensors[index_];
    tensor.dtype = dtype_;
    tensor.begin = data_begin_ + offsets_[0];
    tensor.end = data_begin_ + offsets_[1];
    table_.set_shape(tensor, shape);
  }

  const std::vector<std::string>& paths_;
  const std::uint32_t file_;
  const std::uint64_t data_begin_, file_bytes_;
  const Listing listing_;
  TensorTable& table_;
  std::vector<std::uint32_t> found_;
  std::set<std::string> metadata_;
  bool has_metadata_ = false;

  Place place_ = Place::start;
  std::string name_;
  std::uint32_t index_ = 0;
  unsigned fields_ = 0;
  DType dtype_ = DType::u8;
  size shape_[max_tensor_rank] = {}, rank_ = 0, count_ = 0;
  std::uint64_t offsets_[2] = {};
};

/// Throws unless the tensors `found` of a file fill its bytes [data_begin, file_bytes) without gaps and overlaps.
inline void require_contiguous(const std::string& path, const TensorTable& table, std::vector<std::uint32_t>& found,
                               std::uint64_t data_begin, std::uint64_t file_bytes) {
  const auto before = [&](std::uint32_t a, std::uint32_t b) {
    const TensorInfo &x = table.tensors[a], &y = table.tensors[b];
    return x.begin != y.begin ? x.begin < y.begin : x.end < y.end;
  };
  if (!std::is_sorted(found.begin(), found.end(), before)) std::sort(found.begin(), found.end(), before);
  std::uint64_t reached = data_begin;
  const TensorInfo* last = nullptr;
  for (const std::uint32_t index : found) {
    const TensorInfo& tensor = table.tensors[index];
    if (tensor.begin > reached)
      throw format_error(path, printable(tensor.name),
                         "a gap of " + std::to_string(tensor.begin - reached) + " bytes lies before its data", reached);
    if (tensor.begin < reached)
      throw format_error(path, printable(tensor.name), "its data overlap those of " + printable(last->name),
                         tensor.begin);
    reached = tensor.end;
    last = &tensor;
  }
  if (reached != file_bytes)
    throw format_error(path, last ? printable(last->name) : "",
                       std::to_string(file_bytes - reached) + " bytes follow the data of the last tensor", reached);
}

/// What the first 8 bytes of a file say.
inline std::uint64_t header_length(const std::byte* data) {
  std::uint64_t length = 0;
  for (unsigned i = 0; i < 8; ++i) length |= std::to_integer<std::uint64_t>(data[i]) << 8 * i;
  return length;
}

/// Adds the tensors of file number `file`, whose content is `data`, to the table. Touches the header's bytes only.
/// Returns where the data begin.
inline std::uint64_t read_safetensors_header(const std::vector<std::string>& paths, std::uint32_t file,
                                             const std::byte* data, std::uint64_t file_bytes, Listing listing,
                                             TensorTable& table) {
  const std::string& path = paths[file];
  if (file_bytes < 8)
    throw format_error(path, "", "has " + std::to_string(file_bytes) + " bytes, too few for a header's length", 0);
  const std::uint64_t length = header_length(data);
  if (length > file_bytes - 8)
    throw format_error(path, "",
                       "header length is " + std::to_string(length) + ", but the file has only " +
                           std::to_string(file_bytes - 8) + " bytes after it",
                       0);
  if (length > max_safetensors_header)
    throw format_error(path, "",
                       "header length is " + std::to_string(length) + ", more than the limit of " +
                           std::to_string(max_safetensors_header),
                       0);
  std::string_view text(reinterpret_cast<const char*>(data) + 8, length);
  if (text.empty() || text.front() != '{') throw format_error(path, "", "the header does not start with '{'", 8);
  text = text.substr(0, text.find_last_not_of(' ') + 1);
  if (text.back() != '}')
    throw format_error(path, "", "the header does not end with '}' and spaces", 8 + text.size() - 1);

  HeaderReader reader(paths, file, text, 8 + length, file_bytes, listing, table);
  reader.read();
  require_contiguous(path, table, reader.found(), 8 + length, file_bytes);
  return 8 + length;
}

}  // namespace detail
}  // namespace k3
