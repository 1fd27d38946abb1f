// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <k3/core/config.hpp>

namespace k3 {

/// Counts, extents and offsets. 64 bits: caches of a million positions and 896 experts pass 2^32 elements.
using size = std::size_t;

/// Token ids and expert ids, signed as in the checkpoint's index tensors so that -1 can be recognised and refused.
using id = std::int32_t;

namespace detail {

/// A size of memory that its object owns: 0 once the object was moved from, as the memory is gone then.
class OwnedSize {
 public:
  constexpr OwnedSize(size value = 0) : value_(value) {}
  constexpr OwnedSize(const OwnedSize&) = default;
  constexpr OwnedSize& operator=(const OwnedSize&) = default;
  constexpr OwnedSize(OwnedSize&& other) noexcept : value_(other.value_) { other.value_ = 0; }
  constexpr OwnedSize& operator=(OwnedSize&& other) noexcept {
    const size value = other.value_;
    other.value_ = 0;
    value_ = value;
    return *this;
  }
  constexpr operator size() const { return value_; }

 private:
  size value_;
};

}  // namespace detail

/// The slot of a padding row: the row is computed by nobody and touches no state.
inline constexpr id pad_slot = -1;

namespace detail {

// Not std::min and std::max: those are no device functions, and a consumer may have macros of these names.
template <class T>
K3_HOST_DEVICE constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
K3_HOST_DEVICE constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

}  // namespace detail
}  // namespace k3
