// SPDX-License-Identifier: Apache-2.0
// Catch2 2 brings its main function as a macro; Catch2 3 as a library, and this file is then not built.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
