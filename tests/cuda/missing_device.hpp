// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace k3::test {

/// Whether this program has kernels for the GPU it runs on; it is built so that it has none.
bool has_kernels();

/// What each operation does whose kernels are missing, one line for each that does anything but throw cuda_error for
/// that reason, leaving no error behind; the names of all in `operations`.
std::vector<std::string> faults_of_missing_kernels(std::vector<std::string>& operations);

}  // namespace k3::test
