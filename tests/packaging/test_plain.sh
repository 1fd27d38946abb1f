#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A consumer with nothing but -Iinclude, with every compiler there is, with and without optimisation.
# shellcheck source=tests/packaging/common.sh
. "$(dirname "$0")/common.sh"

while IFS= read -r compiler; do
  for level in -O0 -O2; do
    # shellcheck disable=SC2086  # a compiler may come with arguments
    quietly $compiler -std=c++20 $level -Wall -Wextra -Werror -I"$root/include" \
      "$root/examples/consumers/rms_norm.cpp" -o "$scratch/rms_norm"
    "$scratch/rms_norm" >/dev/null || fail "$compiler $level: wrong result"
  done
  # shellcheck disable=SC2086
  if said=$($compiler -std=c++17 -I"$root/include" -fsyntax-only "$root/examples/consumers/rms_norm.cpp" 2>&1); then
    fail "$compiler: C++17 should be refused"
  fi
  grep -q 'k3 needs C++20' <<<"$said" || fail "$compiler: C++17 is refused without naming C++20"
done <<<"${K3_COMPILERS:-c++}"
echo "built and run with -Iinclude by: ${K3_COMPILERS//$'\n'/ }"
