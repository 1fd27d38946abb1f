#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every header compiles on its own, warnings being errors, with the compiler of this build (test_two_units.sh has the
# others). OpenMP is off here and on in the other tests.
# shellcheck source=tests/headers/common.sh
. "$(dirname "$0")/common.sh"
root=$1

# Prints the first lines of what the compiler says about each header that it refuses.
refused() {  # root, compiler
  local jobs
  jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
  # shellcheck disable=SC2016  # expanded by the inner shell
  { headers "$1"; headers "$1" io; } | compiler=$2 xargs -P "$jobs" -I '{}' bash -c '
    header=$1
    shift
    printf "#include <%s>\n" "$header" | $compiler "$@" -fsyntax-only -x c++ - 2>&1 |
      awk -v header="$header" "{ if (NR == 1) print header \":\"; if (NR <= 15) print }"
  ' one '{}' "${strict_flags[@]}" -I"$1/include" ${include_flags[@]+"${include_flags[@]}"}
}

compiler=$(compilers | head -n 1)
said=$(refused "$root" "$compiler")
[ -z "$said" ] || fail "$said"

# A header that leans on another's includes must be seen.
mkdir -p "$scratch/include/k3"
printf '#pragma once\ninline std::string planted() { return {}; }\n' >"$scratch/include/k3/planted.hpp"
[ -n "$(refused "$scratch" "$compiler")" ] || fail "a planted fault was not seen"
count=$({ headers "$root"; headers "$root" io; } | wc -l)
echo "$count headers compiled alone with $compiler"
have_nvcc || exit 0

nvcc_refused() {  # root
  # shellcheck disable=SC2016  # expanded by the inner shell
  device_headers "$1" | xargs -P "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)" -I '{}' bash -c '
    . "$1"
    printf "#include <%s>\n" "$3" | { nvcc_reads "$2" 2>&1 || echo refused; } |
      awk -v header="$3" "NF && NR <= 15 { print header \": \" \$0 }"
  ' one "$(dirname "$0")/common.sh" "$1" '{}'
}
said=$(nvcc_refused "$root")
[ -z "$said" ] || fail "$said"
rm "$scratch/include/k3/planted.hpp"
printf '#pragma once\ninline std::string planted() { return {}; }\n' >"$scratch/include/k3/planted.cuh"
mkdir -p "$scratch/kernels"
[ -n "$(nvcc_refused "$scratch")" ] || fail "a planted fault was not seen by nvcc"
echo "$(device_headers "$root" | wc -l) headers compiled alone with nvcc"
