#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The CMake consumer, with k3 installed and then moved.
# shellcheck source=tests/packaging/common.sh
. "$(dirname "$0")/common.sh"
command -v cmake >/dev/null 2>&1 || skip "cmake is not installed"

install_k3 "$scratch/moved here"
cp -R "$root/examples/consumers" "$scratch/consumers"
quietly cmake -G Ninja -S "$scratch/consumers/cmake" -B "$scratch/out" -DCMAKE_PREFIX_PATH="$scratch/moved here"
quietly cmake --build "$scratch/out"
check_programs "$scratch/out"

# Requests that this version cannot serve are refused, with and without the component that is there.
for request in '0.2' '1.0' '0.1 COMPONENTS nothing'; do
  sed "s|find_package(k3 0.1 REQUIRED)|find_package(k3 $request REQUIRED)|" \
    "$root/examples/consumers/cmake/CMakeLists.txt" >"$scratch/consumers/cmake/CMakeLists.txt"
  if cmake -G Ninja -S "$scratch/consumers/cmake" -B "$scratch/refused" -DCMAKE_PREFIX_PATH="$scratch/moved here" \
    >"$scratch/output" 2>&1; then
    fail "find_package(k3 $request) should have failed"
  fi
  rm -rf "$scratch/refused"
done
sed "s|find_package(k3 0.1 REQUIRED)|find_package(k3 0.1.0 REQUIRED COMPONENTS io)|" \
  "$root/examples/consumers/cmake/CMakeLists.txt" >"$scratch/consumers/cmake/CMakeLists.txt"
quietly cmake -G Ninja -S "$scratch/consumers/cmake" -B "$scratch/out2" -DCMAKE_PREFIX_PATH="$scratch/moved here"
echo "built and run with k3::k3 and k3::io"
