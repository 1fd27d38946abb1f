// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include <k3/core/types.hpp>

namespace k3 {

/// Base of everything the library throws.
class error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A call that cannot be carried out: `operation: argument is FOUND, expected EXPECTED`.
/// What the arguments show is checked before anything changes, so such a call had no effect.
class invalid_argument : public error {
 public:
  invalid_argument(const std::string& operation, const std::string& argument, const std::string& found,
                   const std::string& expected)
      : error(operation + ": " + argument + " is " + found + ", expected " + expected),
        operation_(operation),
        argument_(argument),
        found_(found),
        expected_(expected) {}

  const std::string& operation() const noexcept { return operation_; }
  const std::string& argument() const noexcept { return argument_; }
  const std::string& found() const noexcept { return found_; }
  const std::string& expected() const noexcept { return expected_; }

 private:
  std::string operation_, argument_, found_, expected_;
};

/// A file or a byte blob that is not what its format says: `path: tensor: what (at byte N)`.
class format_error : public error {
 public:
  static constexpr std::uint64_t no_offset = ~std::uint64_t{0};

  format_error(const std::string& path, const std::string& tensor, const std::string& what,
               std::uint64_t offset = no_offset)
      : error(path + ": " + (tensor.empty() ? "" : tensor + ": ") + what +
              (offset == no_offset ? "" : " (at byte " + std::to_string(offset) + ")")),
        path_(path),
        tensor_(tensor),
        offset_(offset) {}

  const std::string& path() const noexcept { return path_; }
  const std::string& tensor() const noexcept { return tensor_; }
  std::uint64_t offset() const noexcept { return offset_; }

 private:
  std::string path_, tensor_;
  std::uint64_t offset_;
};

/// Memory that the system would not give: `operation: what needs N bytes, more than the system gives`.
class out_of_memory : public error {
 public:
  out_of_memory(const std::string& operation, const std::string& what, std::uint64_t needed)
      : error(operation + ": " + what + " needs " + std::to_string(needed) + " bytes, more than the system gives"),
        operation_(operation),
        needed_(needed) {}

  const std::string& operation() const noexcept { return operation_; }
  std::uint64_t needed() const noexcept { return needed_; }  ///< bytes of everything named, not only of what failed

 private:
  std::string operation_;
  std::uint64_t needed_;
};

/// A CUDA call that failed: `operation: call failed: description (code)`.
class cuda_error : public error {
 public:
  cuda_error(const std::string& operation, const std::string& call, int code, const std::string& description)
      : error(operation + ": " + call + " failed: " + description + " (" + std::to_string(code) + ")"),
        operation_(operation),
        call_(call),
        code_(code) {}

  const std::string& operation() const noexcept { return operation_; }
  const std::string& call() const noexcept { return call_; }
  int code() const noexcept { return code_; }

 private:
  std::string operation_, call_;
  int code_;
};

namespace detail {

inline std::string text_of(const char* value) { return value; }
inline std::string text_of(const std::string& value) { return value; }
inline std::string text_of(bool value) { return value ? "true" : "false"; }
template <class T>
  requires std::is_arithmetic_v<T>
std::string text_of(T value) {
  return std::to_string(value);
}
template <class Make>
  requires std::is_invocable_r_v<std::string, Make>
std::string text_of(const Make& make) {
  return make();
}

/// Throws invalid_argument unless `condition` holds. The texts are only made when it does not; one that has to be put
/// together is given as a function, since these checks run before every token and must not allocate.
template <class Found, class Expected>
void require(bool condition, const char* operation, const char* argument, const Found& found,
             const Expected& expected) {
  if (!condition) throw invalid_argument(operation, argument, text_of(found), text_of(expected));
}

/// a * b, or invalid_argument where the product does not fit 64 bits.
inline size checked_product(const char* operation, const char* argument, size a, size b) {
  require(a == 0 || b <= ~size{0} / a, operation, argument, "too large", "a product below 2^64");
  return a * b;
}

/// rows * width, the length of a vector of T; invalid_argument where so many bytes pass half the address space.
template <class T>
size checked_length(const char* operation, size rows, size width) {
  require(
      rows == 0 || width <= (~size{0} >> 1) / sizeof(T) / rows, operation, "its size",
      [&] { return std::to_string(rows) + " * " + std::to_string(width) + " elements"; }, "below 2^63 bytes");
  return rows * width;
}

}  // namespace detail
}  // namespace k3
