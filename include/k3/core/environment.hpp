// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <cstdlib>
#include <optional>
#include <string>

#include <k3/core/error.hpp>

namespace k3 {

/// The environment switches, read here and nowhere else, once per process.
/// K3_CUDA_KDA, K3_CUDA_MLA: unset or 1 runs that mixer on the GPU, 0 on the host. K3_ATTNRES_MIX: a number from 0 (no
/// Attention Residuals) to 1 (as trained, the default). K3_FORCE_EXPERT: an expert id that every token is sent to.
struct Environment {
  bool cuda_kda = true;
  bool cuda_mla = true;
  float attnres_mix = 1.0f;
  std::optional<size> force_expert{};
};

namespace detail {

inline bool environment_switch(const char* name) {
  const char* value = std::getenv(name);
  if (!value || std::string(value) == "1") return true;
  require(std::string(value) == "0", "environment", name, value, "0, 1 or unset");
  return false;
}

/// The environment as it is now; throws invalid_argument, naming the variable, for a value it does not know.
inline Environment parse_environment() {
  Environment result;
  result.cuda_kda = environment_switch("K3_CUDA_KDA");
  result.cuda_mla = environment_switch("K3_CUDA_MLA");
  if (const char* value = std::getenv("K3_ATTNRES_MIX")) {
    // strtof alone takes spaces, signs, hexadecimals and numbers too small for a float as well.
    const std::string text = value;
    const bool decimal = text.find_first_not_of("0123456789.eE+-") == text.npos && text.find_first_of("+-") != 0;
    char* end = nullptr;
    errno = 0;
    result.attnres_mix = std::strtof(value, &end);
    require(decimal && end != value && *end == '\0' && errno == 0 && result.attnres_mix <= 1.0f, "environment",
            "K3_ATTNRES_MIX", value, "a number from 0 to 1");
  }
  if (const char* value = std::getenv("K3_FORCE_EXPERT")) {
    char* end = nullptr;
    const unsigned long long expert = std::strtoull(value, &end, 10);
    require(*value >= '0' && *value <= '9' && *end == '\0' && expert < (1ull << 31), "environment", "K3_FORCE_EXPERT",
            value, "an expert id");
    result.force_expert = static_cast<size>(expert);
  }
  return result;
}

}  // namespace detail

/// The environment as it was at the first call. Throws invalid_argument, naming the variable, for an unknown value.
inline const Environment& environment() {
  static const Environment parsed = detail::parse_environment();
  return parsed;
}

/// False where K3_CUDA_KDA=0 asks for KDA on the host.
inline bool cuda_kda_enabled() { return environment().cuda_kda; }
/// False where K3_CUDA_MLA=0 asks for MLA on the host.
inline bool cuda_mla_enabled() { return environment().cuda_mla; }

}  // namespace k3
