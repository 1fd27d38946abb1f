// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <k3/io/safetensors_header.hpp>

namespace k3 {

/// How a header is laid out. With `pad` it is filled up with spaces so that the data begin at a multiple of 8 bytes;
/// `extra_spaces` more follow (a test uses one to get odd addresses). A `hollow` file is not given its data: it gets
/// its full length, reads as zeros and takes no room on most disks.
struct SafetensorsOptions {
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  bool pad = true;
  size extra_spaces = 0;
  bool hollow = false;
};

namespace detail {

/// A file that appears under its name when it is whole: written as NAME.part, renamed by `commit`, removed otherwise.
class PartFile {
 public:
  explicit PartFile(std::string path) : path_(std::move(path)), part_(path_ + ".part") {
    stream_.reset(std::fopen(part_.c_str(), "wb"));
    if (!stream_) fail("cannot be written: ");
  }
  PartFile(PartFile&& other) noexcept
      : path_(std::move(other.path_)), part_(std::exchange(other.part_, {})), stream_(std::move(other.stream_)) {}
  PartFile& operator=(PartFile&&) = delete;
  ~PartFile() {
    if (!part_.empty()) std::remove(part_.c_str());
  }

  const std::string& path() const { return path_; }

  void write(const void* data, size bytes) {
    require_sound();
    errno = 0;
    if (bytes > 0 && std::fwrite(data, 1, bytes, stream_.get()) != bytes) fail("cannot be written: ");
  }

  /// Makes the file longer, to `bytes`, by zeros that are not written.
  void extend(std::uint64_t bytes) {
    require_sound();
    errno = 0;
    if (std::fflush(stream_.get()) != 0 || ::ftruncate(::fileno(stream_.get()), static_cast<off_t>(bytes)) != 0)
      fail("cannot be written: ");
  }

  /// All bytes handed over to the system; the file still has its temporary name.
  void close() {
    require_sound();
    errno = 0;
    if (stream_ && std::fclose(stream_.release()) != 0) fail("cannot be written: ");
  }

  void commit() {
    close();
    if (std::rename(part_.c_str(), path_.c_str()) != 0) fail("cannot be given its name: ");
    part_.clear();
  }

 private:
  struct Close {
    void operator()(std::FILE* stream) const { std::fclose(stream); }
  };

  // After a failed write nothing is known of the content, so the file never gets its name.
  void require_sound() const {
    if (broken_) throw format_error(path_, "", "cannot be written: an earlier write failed");
  }

  [[noreturn]] void fail(const char* what) {
    broken_ = true;
    throw format_error(path_, "", what + std::generic_category().message(errno == 0 ? EIO : errno));
  }

  std::string path_, part_;
  std::unique_ptr<std::FILE, Close> stream_;
  bool broken_ = false;
};

}  // namespace detail

/// Writes one safetensors file without holding its data: declare every tensor, then write each in the declared order,
/// in one piece or several, then finish. The file gets its name in `finish`; a writer that is destroyed before leaves
/// nothing.
/// Throws format_error (path, the system's reason) for what cannot be written, and invalid_argument for wrong use: a
/// name declared twice, not valid UTF-8 or "__metadata__", data out of order, too many or too few bytes.
class SafetensorsWriter {
 public:
  explicit SafetensorsWriter(std::string path, SafetensorsOptions options = {})
      : file_(std::move(path)), options_(std::move(options)) {}

  const std::string& path() const { return file_.path(); }

  /// Bytes of the tensors declared so far.
  std::uint64_t total_bytes() const { return tensors_.empty() ? 0 : tensors_.back().end; }

  void declare(const std::string& name, DType dtype, std::vector<size> shape) {
    require(!started_, name, "declared after the first write", "a declaration before");
    require(name != "__metadata__", name, "reserved", "another name");
    require(shape.size() <= max_tensor_rank, name, "of rank " + std::to_string(shape.size()), "at most rank 8");
    size bytes = 0;
    require(detail::shape_bytes(shape, dtype, bytes) && bytes <= ~size{0} - total_bytes(), name, "too large",
            "below 2^64");
    std::string key = quoted(name);
    require(positions_.emplace(name, tensors_.size()).second, name, "declared twice", "declared once");
    const std::uint64_t begin = total_bytes();
    tensors_.push_back({name, std::move(key), dtype, std::move(shape), begin, begin + bytes});
  }

  /// The next bytes of the tensor `name`, `bytes` of them at `data`.
  void write(const std::string& name, const void* data, size bytes) {
    const auto position = positions_.find(name);
    require(position != positions_.end(), name, "not declared", "a declared tensor");
    start();
    skip_finished(position->second);
    require(next_ >= position->second, name, "written when there are only " + progress(), "the declared order");
    require(next_ == position->second, name, "written again after " + detail::printable(tensors_[next_].name),
            "the declared order");
    const Declared& tensor = tensors_[next_];
    require(bytes <= tensor.end - written_, name, std::to_string(written_ - tensor.begin + bytes) + " bytes",
            "at most " + std::to_string(tensor.end - tensor.begin));
    file_.write(data, bytes);
    written_ += bytes;
  }

  /// Checks that all was written and hands it over; the file still has a temporary name.
  void close() {
    start();
    if (options_.hollow) {
      if (written_ < total_bytes()) file_.extend(header_bytes_ + total_bytes());
      written_ = total_bytes();
    } else if (!tensors_.empty()) {
      skip_finished(tensors_.size() - 1);
      require(written_ == total_bytes(), tensors_[next_].name, progress(), "all of them");
    }
    file_.close();
  }

  /// As `close`, and gives the file its name, replacing an older one.
  void finish() {
    close();
    file_.commit();
  }

 private:
  struct Declared {
    std::string name, key;
    DType dtype;
    std::vector<size> shape;
    std::uint64_t begin, end;
  };

  void require(bool condition, const std::string& name, const std::string& found, const std::string& expected) const {
    if (!condition)
      throw invalid_argument("SafetensorsWriter", file_.path() + ": " + detail::printable(name), found, expected);
  }

  std::string quoted(const std::string& text) const {
    try {
      return nlohmann::json(text).dump();
    } catch (const nlohmann::json::exception&) {
      throw invalid_argument("SafetensorsWriter", file_.path() + ": " + detail::printable(text), "not UTF-8", "UTF-8");
    }
  }

  std::string progress() const {
    const Declared& tensor = tensors_[next_];
    return std::to_string(written_ - tensor.begin) + " of " + std::to_string(tensor.end - tensor.begin) + " bytes of " +
           detail::printable(tensor.name);
  }

  // Moves on, at most to tensor `last`, over those that have all their bytes, as those without elements always have.
  void skip_finished(size last) {
    while (next_ < last && written_ == tensors_[next_].end) ++next_;
  }

  void start() {
    if (started_) return;
    std::string header = "{";
    if (!options_.metadata.empty()) {
      header += "\"__metadata__\":{";
      for (const auto& [key, value] : options_.metadata)
        header += (header.back() == '{' ? "" : ",") + quoted(key) + ":" + quoted(value);
      header += "}";
    }
    for (const Declared& tensor : tensors_) {
      header += (header.size() == 1 ? "" : ",") + tensor.key + ":{\"dtype\":\"" +
                std::string(dtype_name(tensor.dtype)) + "\",\"shape\":[";
      for (size d = 0; d < tensor.shape.size(); ++d) header += (d ? "," : "") + std::to_string(tensor.shape[d]);
      header += "],\"data_offsets\":[" + std::to_string(tensor.begin) + "," + std::to_string(tensor.end) + "]}";
    }
    header += "}";
    if (options_.pad) header.resize((header.size() + 7) / 8 * 8, ' ');
    header.append(options_.extra_spaces, ' ');
    require(header.size() <= max_safetensors_header, "the header", std::to_string(header.size()) + " bytes long",
            "at most " + std::to_string(max_safetensors_header));
    started_ = true;
    unsigned char length[8];
    for (unsigned i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(std::uint64_t{header.size()} >> 8 * i);
    file_.write(length, sizeof(length));
    file_.write(header.data(), header.size());
    header_bytes_ = sizeof(length) + header.size();
  }

  detail::PartFile file_;
  SafetensorsOptions options_;
  std::vector<Declared> tensors_;
  std::unordered_map<std::string, size> positions_;
  bool started_ = false;
  size next_ = 0;
  std::uint64_t written_ = 0, header_bytes_ = 0;
};

/// Writes a checkpoint folder: `model-00001-of-00003.safetensors` and so on, and the index. Use as SafetensorsWriter;
/// a new shard begins where the next tensor would take the current one beyond `max_shard_bytes` (one at least goes into
/// each), and at `next_shard`. All files get their names in `finish`, the index last.
class SafetensorsSetWriter {
 public:
  explicit SafetensorsSetWriter(std::string folder, std::uint64_t max_shard_bytes = ~std::uint64_t{0},
                                SafetensorsOptions options = {})
      : folder_(std::move(folder)), max_shard_bytes_(max_shard_bytes), options_(std::move(options)) {}

  void declare(const std::string& name, DType dtype, std::vector<size> shape) {
    if (!shards_.empty())
      throw invalid_argument(operation, name, "declared after the first write", "a declaration before");
    size bytes = 0;
    if (!detail::shape_bytes(shape, dtype, bytes)) throw invalid_argument(operation, name, "too large", "below 2^64");
    if (!shard_of_.emplace(name, 0).second) throw invalid_argument(operation, name, "declared twice", "declared once");
    const bool full = !plan_.empty() && (shard_bytes_ >= max_shard_bytes_ || bytes > max_shard_bytes_ - shard_bytes_);
    if (plan_.empty() || full || fresh_) {
      plan_.emplace_back();
      shard_bytes_ = 0;
      fresh_ = false;
    }
    plan_.back().push_back({name, dtype, std::move(shape)});
    shard_of_[name] = plan_.size() - 1;
    shard_bytes_ += bytes;
  }

  /// The next tensor declared begins a new shard.
  void next_shard() { fresh_ = true; }

  void write(const std::string& name, const void* data, size bytes) {
    const auto shard = shard_of_.find(name);
    if (shard == shard_of_.end()) throw invalid_argument(operation, name, "not declared", "a declared tensor");
    advance(shard->second + 1);
    if (shard->second + 1 < shards_.size())
      throw invalid_argument(operation, name, "written after a tensor of a later shard", "the declared order");
    shards_.back().write(name, data, bytes);
  }

  void finish() {
    if (plan_.empty()) throw invalid_argument(operation, folder_, "a set without tensors", "at least one");
    advance(plan_.size());
    shards_.back().close();
    nlohmann::json map = nlohmann::json::object();
    std::uint64_t total = 0;
    for (const auto& [name, shard] : shard_of_) map[name] = file_name(shard);
    for (const SafetensorsWriter& shard : shards_) total += shard.total_bytes();
    const std::string text =
        nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}}.dump(1) + "\n";
    detail::PartFile index(folder_ + "/model.safetensors.index.json");
    index.write(text.data(), text.size());
    index.close();
    for (SafetensorsWriter& shard : shards_) shard.finish();
    index.commit();
  }

 private:
  static constexpr const char* operation = "SafetensorsSetWriter";
  struct Planned {
    std::string name;
    DType dtype;
    std::vector<size> shape;
  };

  std::string file_name(size shard) const {
    const auto five = [](size number) {
      const std::string digits = std::to_string(number);
      return std::string(5 - detail::smaller<size>(5, digits.size()), '0') + digits;
    };
    return "model-" + five(shard + 1) + "-of-" + five(plan_.size()) + ".safetensors";
  }

  // The number of shards is part of their names, so the first is made after the last declaration; one is open at a
  // time.
  void advance(size count) {
    while (shards_.size() < count) {
      if (!shards_.empty()) shards_.back().close();
      const size shard = shards_.size();
      SafetensorsWriter writer(folder_ + "/" + file_name(shard), options_);
      for (const Planned& tensor : plan_[shard]) writer.declare(tensor.name, tensor.dtype, tensor.shape);
      shards_.push_back(std::move(writer));
    }
  }

  std::string folder_;
  std::uint64_t max_shard_bytes_;
  SafetensorsOptions options_;
  std::vector<std::vector<Planned>> plan_;
  std::unordered_map<std::string, size> shard_of_;
  std::vector<SafetensorsWriter> shards_;
  std::uint64_t shard_bytes_ = 0;
  bool fresh_ = false;
};

}  // namespace k3
