// SPDX-License-Identifier: Apache-2.0

#include "text_input.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include <k3/core/error.hpp>
#include <k3/io/utf8_stream.hpp>

#include "tool.hpp"

namespace {

/// A file that is being read; standard input stays open.
class InputFile {
 public:
  explicit InputFile(const std::string& path) : name_(input_name(path)), owned_(path != "-") {
    // A pipe is waited for until somebody writes to it, or until Ctrl-C.
    while (owned_ && (file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC)) < 0) {
      if (errno != EINTR) fail("cannot be opened: ", errno);
      stop_if_interrupted();
    }
  }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  ~InputFile() {
    if (owned_) ::close(file_);
  }

  /// 0 at the end.
  std::size_t read(char* to, std::size_t most) const {
    for (;;) {
      const ssize_t count = ::read(file_, to, most);
      const int code = errno;
      stop_if_interrupted();
      if (count >= 0) return static_cast<std::size_t>(count);
      if (code != EINTR) fail("cannot be read: ", code);
    }
  }
  const std::string& name() const { return name_; }

 private:
  [[noreturn]] void fail(const char* what, int code) const {
    throw k3::format_error(name_, "", what + std::generic_category().message(code));
  }

  std::string name_;
  bool owned_;
  int file_ = STDIN_FILENO;
};

}  // namespace

std::string read_input(const std::string& path, std::uint64_t limit) {
  const InputFile file(path);
  std::string text;
  char part[65536];
  while (const std::size_t count = file.read(part, sizeof part)) {
    text.append(part, count);
    if (text.size() > limit)
      throw k3::format_error(file.name(), "",
                             "has more than " + std::to_string(limit >> 20) + " MB, the longest that is read");
  }
  return text;
}

std::string read_text(const std::string& path) {
  std::string text = read_input(path, longest_text);
  require_utf8(input_name(path), text);
  if (text.empty() || text.back() != '\n') return text;
  text.pop_back();
  if (!text.empty() && text.back() == '\r') text.pop_back();
  return text;
}

void require_utf8(const std::string& what, std::string_view text) {
  const std::size_t valid = k3::detail::valid_prefix(text);
  if (valid < text.size()) throw k3::format_error(what, "", "is not UTF-8", valid);
}
