#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two translation units that include every header compile without a warning and link into one program, with every compiler
# there is: nothing is defined twice.
# shellcheck source=tests/headers/common.sh
. "$(dirname "$0")/common.sh"
root=$1

# Compiles the headers of stdin into two objects and links them.
links() {  # root, compiler
  local root=$1 compiler=$2 unit
  sed 's|.*|#include <&>|' >"$scratch/all.hpp"
  printf '#include "all.hpp"\nint other();\nint other() { return 0; }\n' >"$scratch/one.cpp"
  printf '#include "all.hpp"\nint other();\nint main() { return other(); }\n' >"$scratch/two.cpp"
  for unit in one two; do
    # shellcheck disable=SC2086  # a compiler may come with arguments
    $compiler "${strict_flags[@]}" -O0 -I"$root/include" ${include_flags[@]+"${include_flags[@]}"} -c "$scratch/$unit.cpp" \
      -o "$scratch/$unit.o" || return 1
  done
  # shellcheck disable=SC2086
  $compiler "$scratch/one.o" "$scratch/two.o" -o "$scratch/program" $libraries
}

planted=$scratch/planted
mkdir -p "$planted/include/k3"
echo 'int not_inline(); int not_inline() { return 1; }' >"$planted/include/k3/planted.hpp"
libraries=$(pkg-config --libs oniguruma 2>/dev/null || echo -lonig)
while IFS= read -r compiler; do
  { headers "$root"; headers "$root" io; } | links "$root" "$compiler" || fail "$compiler: two units with all headers do not link"
  "$scratch/program"
  if echo k3/planted.hpp | links "$planted" "$compiler" 2>/dev/null; then fail "a planted double definition was not seen"; fi
done < <(compilers)
echo "two units with all headers link"
