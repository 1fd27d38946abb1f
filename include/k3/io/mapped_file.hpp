// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include <k3/core/error.hpp>
#include <k3/io/lost_pages.hpp>

namespace k3 {

/// A whole file as read-only memory. Nothing is read until it is touched, and pages can be dropped and read again, so a
/// file far larger than the memory can be mapped. Move-only; the address survives a move.
/// The size is the one at opening. Touching a page that the file has lost since then, or that the drive cannot read,
/// ends the process (SIGBUS), or after `catch_lost_pages()` reads zeros: ask `require_whole()` before results are
/// handed out.
class MappedFile {
 public:
  MappedFile() = default;

  /// Throws format_error (path and the system's reason) unless this is a regular file that can be opened and mapped.
  explicit MappedFile(const std::string& path) : path_(path) {
    // Opening a FIFO must not wait for its other end; regular files ignore the flag.
    file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file_ < 0) fail("cannot be opened: ", errno);
    struct stat status{};
    if (::fstat(file_, &status) != 0) fail("cannot be examined: ", errno);
    if (!S_ISREG(status.st_mode)) fail("is not a regular file", 0);
    bytes_ = static_cast<size>(status.st_size);
    written_ = status.st_mtim;
    changed_ = status.st_ctim;
    if (bytes_ == 0) return;
    void* const map = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file_, 0);
    if (map == MAP_FAILED) fail("cannot be mapped: ", errno);
    data_ = static_cast<const std::byte*>(map);
    record_ = detail::record_map(data_, bytes_);
  }

  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    MappedFile(std::move(other)).swap(*this);
    return *this;
  }
  ~MappedFile() { close(); }

  const std::string& path() const noexcept { return path_; }
  const std::byte* data() const noexcept { return data_; }
  size bytes() const noexcept { return bytes_; }

  /// Where reading ended, and the system's error number, or 0 at the end of the file.
  struct ReadEnd {
    size at;
    int code;
  };

  /// Copies bytes [begin, end) to `to`, from the file and not through the map: safe where others may truncate it.
  ReadEnd read(size begin, size end, std::byte* to) const noexcept {
    while (begin < end) {
      const ssize_t count = ::pread(file_, to, end - begin, static_cast<off_t>(begin));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return {begin, count < 0 ? errno : 0};
      begin += static_cast<size>(count);
      to += count;
    }
    return {begin, 0};
  }

  /// As `read`; throws format_error, with the byte, where the file ends or cannot be read.
  void read_all(size begin, size end, std::byte* to) const {
    const ReadEnd stopped = read(begin, end, to);
    if (stopped.at == end) return;
    throw format_error(
        path_, "", stopped.code == 0 ? ends_early : "cannot be read: " + std::generic_category().message(stopped.code),
        stopped.at);
  }

  /// The whole content, by `read_all`.
  std::string text() const {
    std::string result(bytes_, '\0');
    read_all(0, bytes_, reinterpret_cast<std::byte*>(result.data()));
    return result;
  }

  /// Says that `read` will be asked for pieces here and there: each is then fetched in one go instead of by guessing
  /// what comes next, which fails with several threads. A hint; it does not concern the map.
  void expect_random_reads() const noexcept {
    if (file_ >= 0) ::posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);
  }

  /// Whether the file has the size it was mapped with, has not been written to since, and could be read so far. The
  /// system's own time of change counts, which no program can put back; so another mode, owner, name or number of links
  /// is a change too. A change within the same tick of the file system's clock (some ms) as the last before opening
  /// cannot be told.
  bool still_whole() const noexcept {
    if (file_ < 0) return true;
    struct stat status{};
    return (record_ == nullptr || record_->lost.load() == detail::MapRecord::none) && ::fstat(file_, &status) == 0 &&
           static_cast<size>(status.st_size) == bytes_ && same(status.st_mtim, written_) &&
           same(status.st_ctim, changed_);
  }

  /// Throws format_error, with the byte where it is known, unless the file is still whole. Cost: one system call.
  void require_whole() const {
    if (still_whole()) return;
    struct stat status{};
    const bool known = ::fstat(file_, &status) == 0;
    if (known && static_cast<size>(status.st_size) < bytes_)
      throw format_error(path_, "", ends_early, static_cast<size>(status.st_size));
    if (record_ != nullptr && record_->lost.load() != detail::MapRecord::none)
      throw format_error(path_, "", "cannot be read", record_->lost.load());
    throw format_error(path_, "", "has changed since it was opened");
  }

  /// Asks the system to read bytes [begin, end) ahead, without waiting for it. A hint: it cannot fail.
  void prefetch(size begin, size end) const noexcept { advise(begin, end, MADV_WILLNEED); }

  /// Says that bytes [begin, end) will be read here and there, so that reading around a page is wasted. A hint.
  void expect_random(size begin, size end) const noexcept { advise(begin, end, MADV_RANDOM); }

  /// Says that bytes [begin, end) are not needed for now: they stop counting as this process's memory and are read
  /// again when touched. A hint.
  void release(size begin, size end) const noexcept { advise(begin, end, MADV_DONTNEED); }

 private:
  static constexpr const char* ends_early = "the file ends here, though it was longer when it was opened";

  [[noreturn]] void fail(const char* what, int code) {
    close();
    throw format_error(path_, "", code == 0 ? std::string(what) : what + std::generic_category().message(code));
  }

  static bool same(const timespec& a, const timespec& b) noexcept {
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
  }

  void close() noexcept {
    detail::forget_map(record_);
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), bytes_);
    if (file_ >= 0) ::close(file_);
    data_ = nullptr;
    record_ = nullptr;
    file_ = -1;
  }

  void swap(MappedFile& other) noexcept {
    path_.swap(other.path_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(file_, other.file_);
    std::swap(written_, other.written_);
    std::swap(changed_, other.changed_);
    std::swap(record_, other.record_);
  }

  void advise(size begin, size end, int advice) const noexcept {
    end = detail::smaller(end, bytes_);
    if (begin >= end) return;
    begin -= begin % static_cast<size>(::sysconf(_SC_PAGESIZE));
    ::madvise(const_cast<std::byte*>(data_) + begin, end - begin, advice);
  }

  std::string path_;
  const std::byte* data_ = nullptr;
  size bytes_ = 0;
  int file_ = -1;
  timespec written_{}, changed_{};
  detail::MapRecord* record_ = nullptr;
};

static_assert(sizeof(size) == 8, "k3/io maps files larger than a 32-bit address space");

}  // namespace k3
