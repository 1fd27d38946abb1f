// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <k3/core/error.hpp>

namespace k3::test {

/// "operation/argument" of the invalid_argument that `f` throws.
template <class F>
std::string thrown_by(F&& f) {
  try {
    f();
  } catch (const invalid_argument& e) {
    return e.operation() + "/" + e.argument();
  }
  return "nothing thrown";
}

}  // namespace k3::test
