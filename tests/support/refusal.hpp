// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include <k3/core/error.hpp>

#include "support/catch.hpp"

namespace k3::test {

/// Checks that `call` throws invalid_argument for `operation` and an argument that starts with `argument`.
template <class Call>
void check_refused(const char* operation, const std::string& argument, Call&& call) {
  INFO(operation << " should refuse " << argument);
  try {
    call();
    CHECK(false);
  } catch (const invalid_argument& e) {
    INFO(e.what());
    CHECK(e.operation() == operation);
    CHECK(e.argument().substr(0, argument.size()) == argument);
  }
}

}  // namespace k3::test
