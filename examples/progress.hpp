// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

/// A line on standard error that shows how far something is. Silent where standard error is no terminal.
class Progress {
 public:
  explicit Progress(std::string what) : what_(std::move(what)), shown_(isatty(STDERR_FILENO) && !std::getenv("CI")) {}
  ~Progress() {
    if (shown_ && drawn_) std::fputs("\r\033[K", stderr);
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void operator()(std::size_t done, std::size_t total) {
    if (!shown_ || total == 0) return;
    constexpr std::size_t width = 30;
    const std::size_t filled = width * done / total;
    const std::string bar = std::string(filled, '=') + std::string(width - filled, ' ');
    std::fprintf(stderr, "\r%s [%s] %zu/%zu", what_.c_str(), bar.c_str(), done, total);
    std::fflush(stderr);
    drawn_ = true;
  }

 private:
  std::string what_;
  bool shown_, drawn_ = false;
};
