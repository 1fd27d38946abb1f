// SPDX-License-Identifier: Apache-2.0
#pragma once
// Texts that the user gives: in files, on standard input, in the call.

#include <cstdint>
#include <string>
#include <string_view>

/// Longest text of a prompt or a turn, in bytes: far more than a model has positions for.
inline constexpr std::uint64_t longest_text = std::uint64_t{16} << 20;

/// All of a file, or with "-" of standard input; pipes are read to their end. Throws format_error for what cannot be
/// read or has more than `limit` bytes, and Interrupted after Ctrl-C.
std::string read_input(const std::string& path, std::uint64_t limit);

/// A file's text without the end of its last line. Throws format_error besides where it is not UTF-8.
std::string read_text(const std::string& path);

/// What errors call the file.
inline std::string input_name(const std::string& path) { return path == "-" ? "standard input" : path; }

/// Throws format_error, with the byte, unless `text` is UTF-8; `what` says which text.
void require_utf8(const std::string& what, std::string_view text);
