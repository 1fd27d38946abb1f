// SPDX-License-Identifier: Apache-2.0
#pragma once
// Catch2 2.13 (one header) or 3 (many): the tests use what both have.

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif
