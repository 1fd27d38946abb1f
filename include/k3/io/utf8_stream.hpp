// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <string>
#include <string_view>

#include <k3/core/types.hpp>

namespace k3 {
namespace detail {

/// What stands at the start of a byte string.
enum class Utf8Kind {
  valid,    ///< one whole, well-formed sequence
  cut_off,  ///< the bytes end inside a sequence that is well-formed so far
  invalid   ///< bytes that no well-formed sequence begins with
};

/// One step through UTF-8. An invalid step has the length of the longest start of a sequence found there (at least 1),
/// so one U+FFFD per step is what Unicode recommends for replacement.
struct Utf8Step {
  Utf8Kind kind;
  size length;    // bytes
  char32_t code;  // of a valid step
};

/// The step at the start of `bytes`, which must not be empty. Overlong forms, surrogates and values above U+10FFFF are
/// invalid.
inline Utf8Step utf8_step(std::string_view bytes) {
  const auto at = [&](size i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned lead = at(0);
  if (lead < 0x80) return {Utf8Kind::valid, 1, static_cast<char32_t>(lead)};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Kind::invalid, 1, 0};
  const size length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // Only the second byte has narrower limits after some leads.
  unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  unsigned code = lead & (0xFFu >> (length + 1));
  for (size i = 1; i < length; ++i, low = 0x80, high = 0xBF) {
    if (i == bytes.size()) return {Utf8Kind::cut_off, i, 0};
    if (at(i) < low || at(i) > high) return {Utf8Kind::invalid, i, 0};
    code = code << 6 | (at(i) & 0x3Fu);
  }
  return {Utf8Kind::valid, length, static_cast<char32_t>(code)};
}

/// Length of the ASCII text that `bytes` begins with.
inline size ascii_prefix(std::string_view bytes) {
  size i = 0;
  for (std::uint64_t word; i + sizeof word <= bytes.size(); i += sizeof word) {
    std::memcpy(&word, bytes.data() + i, sizeof word);
    if (word & 0x8080808080808080u) break;
  }
  while (i < bytes.size() && static_cast<unsigned char>(bytes[i]) < 0x80) ++i;
  return i;
}

/// Length of the well-formed UTF-8 that `bytes` begins with.
inline size valid_prefix(std::string_view bytes) {
  size i = 0;
  while (i < bytes.size()) {
    i += ascii_prefix(bytes.substr(i));
    if (i == bytes.size()) break;
    const Utf8Step step = utf8_step(bytes.substr(i));
    if (step.kind != Utf8Kind::valid) break;
    i += step.length;
  }
  return i;
}

}  // namespace detail

/// Turns token bytes into text as they arrive: a token may end inside a character, its text then waits for the next
/// one.
///
/// What `push` returns is always whole, well-formed UTF-8. Bytes that belong to no character become U+FFFD, one for
/// each longest start of a sequence, as Unicode recommends and web browsers do. The texts put together do not depend on
/// where the bytes were cut. Holds at most 3 bytes; time linear in the input.
class Utf8Stream {
 public:
  /// The characters that `bytes` completes, after what earlier calls left waiting.
  std::string push(std::string_view bytes) {
    const std::string joined = waiting_.append(bytes);
    waiting_.clear();
    std::string text;
    text.reserve(joined.size());
    std::string_view rest = joined;
    while (!rest.empty()) {
      const size whole = detail::valid_prefix(rest);
      text.append(rest.substr(0, whole));
      rest.remove_prefix(whole);
      if (rest.empty()) break;
      const detail::Utf8Step step = detail::utf8_step(rest);
      if (step.kind == detail::Utf8Kind::cut_off) {
        waiting_ = rest;
        break;
      }
      text += replacement;
      rest.remove_prefix(step.length);
    }
    return text;
  }

  /// Ends the text: U+FFFD if a character was left unfinished, nothing otherwise. The stream can then be used again.
  std::string flush() {
    const bool unfinished = !waiting_.empty();
    waiting_.clear();
    return unfinished ? replacement : "";
  }

  /// Bytes of an unfinished character, 0 to 3.
  size pending() const noexcept { return waiting_.size(); }

 private:
  static constexpr const char* replacement = "\xEF\xBF\xBD";  // U+FFFD
  std::string waiting_;
};

/// All of `bytes` as text: Utf8Stream with everything pushed at once.
inline std::string to_text(std::string_view bytes) {
  Utf8Stream stream;
  std::string text = stream.push(bytes);
  return text += stream.flush();
}

}  // namespace k3
