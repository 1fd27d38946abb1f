// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/bf16.hpp>

#include "support/compare.hpp"

namespace k3::test {

/// Random numbers, rounded where they are to be bf16.
inline std::vector<float> numbers(std::size_t count, unsigned seed, bool is_bf16, double scale = 1.0) {
  std::vector<float> values = converted<float>(random_normal(count, seed, scale));
  if (is_bf16)
    for (float& value : values) value = static_cast<float>(bf16(value));
  return values;
}

}  // namespace k3::test
