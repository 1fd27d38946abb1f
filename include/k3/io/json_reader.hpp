// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <iterator>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include <k3/io/tensor_table.hpp>

namespace k3::detail {

/// Characters that remember how far they have been read, so that an error can say where.
struct TracedCharacters {
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at = nullptr;
  const char** reached = nullptr;

  reference operator*() const { return *at; }
  TracedCharacters& operator++() {
    *reached = ++at;
    return *this;
  }
  TracedCharacters operator++(int) {
    const TracedCharacters before = *this;
    ++*this;
    return before;
  }
  bool operator==(const TracedCharacters& other) const { return at == other.at; }
  bool operator!=(const TracedCharacters& other) const { return at != other.at; }
};

/// Base of the readers of JSON files with a fixed form: it takes events, keeps no tree, sees every key that comes
/// twice, and refuses what the derived reader does not override with `expected X, found Y (at byte N)`. The parser
/// below does not recurse: depth costs it one bit a level.
class JsonReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  /// `text` lies `offset` bytes into the file `path`.
  JsonReader(const std::string& path, std::string_view text, std::uint64_t offset)
      : path_(path), text_(text), offset_(offset), reached_(text.data()) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool value) override { unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { unexpected("the number " + std::to_string(value)); }
  bool number_unsigned(number_unsigned_t value) override { unexpected("the number " + std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { unexpected("the number " + printable(text)); }
  bool string(string_t& text) override { unexpected("the string \"" + printable(text) + "\""); }
  bool binary(binary_t&) override { unexpected("binary data"); }
  bool start_object(std::size_t) override { unexpected("an object"); }
  bool start_array(std::size_t) override { unexpected("an array"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& problem) override {
    std::string_view what = problem.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    if (const size bracket = what.find("] "); bracket != what.npos) what.remove_prefix(bracket + 2);
    if (const size colon = what.find(": "); what.starts_with("parse error") && colon != what.npos)
      what.remove_prefix(colon + 2);
    throw format_error(path_, subject(), "invalid JSON: " + printable(what), offset_ + larger<size>(position, 1) - 1);
  }

 protected:
  /// What may stand here, and the tensor in question ("" for none).
  virtual std::string expected() const = 0;
  virtual std::string subject() const = 0;

  [[noreturn]] void unexpected(const std::string& found) const { fail("expected " + expected() + ", found " + found); }

  /// Reports the last byte read.
  [[noreturn]] void fail(const std::string& what) const {
    const auto read = static_cast<std::uint64_t>(reached_ - text_.data());
    throw format_error(path_, subject(), what, offset_ + larger<std::uint64_t>(read, 1) - 1);
  }

  const std::string& path() const { return path_; }

  /// Called by the derived class, with itself: the parser then calls it without going through the base.
  template <class Reader>
  void parse(Reader& reader) {
    refuse_nul(path_, "", text_, offset_);
    const TracedCharacters first{text_.data(), &reached_};
    const TracedCharacters last{text_.data() + text_.size(), &reached_};
    nlohmann::json::sax_parse(first, last, &reader);
  }

 private:
  const std::string& path_;
  std::string_view text_;
  std::uint64_t offset_;
  const char* reached_;
};

}  // namespace k3::detail
