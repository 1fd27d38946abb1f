// SPDX-License-Identifier: Apache-2.0
#pragma once
// A fuzz target is one file with `run_one`. libFuzzer calls it with inputs of its own making; replay.cpp with files.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

/// What the target does with an input. Errors of the library's own types are fine and caught by the target; anything
/// else that is thrown, a crash, a hang or a sanitizer's report is a fault.
void run_one(std::string_view input);

/// Ends the process where a property does not hold.
inline void require_property(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "property violated: %s\n", what);
  std::abort();
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes);
int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  run_one({reinterpret_cast<const char*>(data), bytes});
  return 0;
}
