// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <k3/core/any_view.hpp>

namespace k3::detail {

/// Throws invalid_argument unless a weight, typed or of run-time type, is there and has exactly these extents.
template <class Weight, class... Extent>
void require_weight(const char* operation, const char* argument, const Weight& weight, Extent... extent) {
  if constexpr (view_traits<Weight>::value || requires { weight.packed; }) {
    require_shape(operation, argument, weight, static_cast<size>(extent)...);
  } else {
    const size expected[] = {static_cast<size>(extent)...};
    require_shape(operation, argument, weight, expected);
  }
}

/// Rows of a weight matrix of any kind.
template <class Weight>
size weight_rows(const Weight& weight) {
  if constexpr (requires { weight.rows(); })
    return weight.rows();
  else
    return weight.extent(0);
}

}  // namespace k3::detail
