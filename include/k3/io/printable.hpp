// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include <k3/io/utf8_stream.hpp>

namespace k3::detail {

/// Whether a terminal obeys a character, or shows it as nothing or its neighbours in another order: control characters,
/// line and paragraph separators, marks of direction, joiners and tags.
constexpr bool is_unprintable(char32_t code) {
  constexpr char32_t ranges[][2] = {{0x00, 0x1f},     {0x7f, 0x9f},      {0x61c, 0x61c},   {0x180e, 0x180e},
                                    {0x200b, 0x200f}, {0x2028, 0x202e},  {0x2060, 0x206f}, {0xfeff, 0xfeff},
                                    {0xfff9, 0xfffb}, {0xe0000, 0xe007f}};
  for (const auto& range : ranges)
    if (code >= range[0] && code <= range[1]) return true;
  return false;
}

inline std::string escape_code(char32_t code) {
  constexpr char digits[] = "0123456789abcdef";
  std::string result = code < 0x100 ? "\\x" : code < 0x10000 ? "\\u" : "\\U";
  for (int shift = code < 0x100 ? 4 : code < 0x10000 ? 12 : 28; shift >= 0; shift -= 4)
    result += digits[code >> shift & 15u];
  return result;
}

/// Text from a file for an error message: whole characters of at most `limit` bytes in all, then "..." where there is
/// more. Characters that are not to be printed are escaped (`\x1b`, `\u202e`), and so are bytes that are not UTF-8.
inline std::string printable(std::string_view text, size limit = 200) {
  std::string result;
  while (!text.empty()) {
    const Utf8Step step = utf8_step(text);
    const bool valid = step.kind == Utf8Kind::valid;
    const size length = valid ? step.length : 1;
    const std::string shown = !valid                      ? escape_code(static_cast<unsigned char>(text[0]))
                              : is_unprintable(step.code) ? escape_code(step.code)
                                                          : std::string(text.substr(0, length));
    if (result.size() + shown.size() > limit) return result + "...";
    result += shown;
    text.remove_prefix(length);
  }
  return result;
}

/// Whether a file of a checkpoint may have this name, so that it stays in its folder and can be shown: UTF-8 of 1 to
/// 255 bytes, without separators and characters that are not to be printed, and no way up.
inline bool is_plain_file_name(std::string_view name) {
  if (name.empty() || name.size() > 255 || name == "." || name == "..") return false;
  if (name.find_first_of("/\\") != name.npos) return false;
  for (; !name.empty(); name.remove_prefix(utf8_step(name).length)) {
    const Utf8Step step = utf8_step(name);
    if (step.kind != Utf8Kind::valid || is_unprintable(step.code)) return false;
  }
  return true;
}

}  // namespace k3::detail
