// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unordered_map>
#include <utility>

#include <k3/core/error.hpp>

namespace k3 {

/// What several tokens in flight keep between the layers of a pass (their Attention Residuals streams, say), each found
/// again by a 64-bit key such as the address of the token's residual row. An entry whose step failed does not stay.
/// References stay valid until their entry is removed or replaced. Not for several threads at a time.
template <class T>
class AttnResHub {
 public:
  /// Stores `value` under `key`, in place of what was there.
  T& insert(std::uint64_t key, T value) { return entries_.insert_or_assign(key, std::move(value)).first->second; }

  /// The entry of `key`, or null.
  T* get(std::uint64_t key) {
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : &found->second;
  }
  const T* get(std::uint64_t key) const {
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : &found->second;
  }

  bool contains(std::uint64_t key) const { return entries_.contains(key); }
  size count() const { return entries_.size(); }

  /// Forgets the entry of `key`; false where there was none.
  bool remove(std::uint64_t key) { return entries_.erase(key) > 0; }

  /// Returns f(entry of `key`). Where f throws, the entry is removed and the exception passed on; where it returns,
  /// removing the entry is the caller's business. Throws invalid_argument where there is no entry.
  template <class F>
  decltype(auto) decode(std::uint64_t key, F&& f) {
    T* entry = get(key);
    detail::require(entry != nullptr, "AttnResHub::decode", "key", key, "a key that is held");
    try {
      return std::forward<F>(f)(*entry);
    } catch (...) {
      remove(key);
      throw;
    }
  }

 private:
  std::unordered_map<std::uint64_t, T> entries_;
};

}  // namespace k3
