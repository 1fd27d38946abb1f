// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include <k3/core/types.hpp>

// Operations on very many rows, and on extents of nothing.
namespace k3::test {

/// Every operation on `rows` rows in one call, and on blocks of `block` rows: those with other bits, and those whose
/// results do not depend on the call at all. One line an operation; the number of operations in `operations`.
std::vector<std::string> faults_of_many_rows(size rows, size block, size& operations);

/// A call with an extent of 0, and what became of it: "nothing" where it put nothing on the stream, "zeros" where it
/// gave zeros, "refused: operation/argument", or what else.
struct EmptyCall {
  std::string name, outcome;
};
std::vector<EmptyCall> empty_calls();

}  // namespace k3::test
