#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# <k3/k3.hpp> reaches every header that needs no library, and none of k3/io, and compiles in less than two seconds.
# shellcheck source=tests/headers/common.sh
. "$(dirname "$0")/common.sh"
root=$1
compiler=$(compilers | head -n 1)

# Headers of k3 that the umbrella reaches.
reached() {  # root
  # shellcheck disable=SC2086  # a compiler may come with arguments
  echo '#include <k3/k3.hpp>' | (cd "$1/include" && $compiler -std=c++20 -I. -MM -x c++ -) | tr ' ' '\n' |
    sed -n 's|^\(\./\)\{0,1\}\(k3/.*\.hpp\)$|\2|p' | sort
}

# Of io/streamed_experts.hpp and cuda/expert_cache.cuh alone.
internal=k3/model/use_counts.hpp
forgotten() { comm -13 <(reached "$1") <(headers "$1") | sed "\\|^$internal\$|d"; }

left=$(forgotten "$root")
[ -z "$left" ] || fail "not reached by <k3/k3.hpp>:
$left"
if reached "$root" | grep '^k3/io/'; then fail "<k3/k3.hpp> must not need k3/io"; fi

cp -R "$root/include" "$scratch/include"
echo '#pragma once' >"$scratch/include/k3/core/planted.hpp"
[ "$(forgotten "$scratch")" = k3/core/planted.hpp ] || fail "a planted header was not missed"

# Processor time, the best of three: other tests run beside this one.
echo '#include <k3/k3.hpp>' >"$scratch/unit.cpp"
compile() {
  # shellcheck disable=SC2086
  $compiler -std=c++20 -O0 -I"$root/include" -c "$scratch/unit.cpp" -o "$scratch/unit.o"
}
TIMEFORMAT='%3U %3S'
best=$(for _ in 1 2 3; do { time compile; } 2>&1 | awk '{ printf "%.2f\n", $1 + $2 }'; done | sort -n | head -n 1)
echo "a unit with only <k3/k3.hpp> compiles in $best s without optimisation with $compiler"
awk -v best="$best" 'BEGIN { exit !(best < 2) }' || fail "that is not less than 2 s"

have_nvcc || exit 0

# <k3/k3.cuh> reaches these, and all that <k3/k3.hpp> reaches.
nvcc_reached() {  # root
  echo '#include <k3/k3.cuh>' | nvcc -std=c++20 -I"$1/include" -I"$1/kernels" -M -x cu - | tr ' ' '\n' |
    sed -nE 's#^.*/(include|kernels)/(k3/.*\.(hpp|cuh))$#\2#p' | sort -u
}
nvcc_forgotten() { comm -13 <(nvcc_reached "$1") <({ headers "$1"; device_headers "$1"; } | sort); }

left=$(nvcc_forgotten "$root")
[ -z "$left" ] || fail "not reached by <k3/k3.cuh>:
$left"
rm "$scratch/include/k3/core/planted.hpp"
cp -R "$root/kernels" "$scratch/kernels"
echo '#pragma once' >"$scratch/kernels/k3/kernels/planted.cuh"
[ "$(nvcc_forgotten "$scratch")" = k3/kernels/planted.cuh ] || fail "a planted header was not missed by <k3/k3.cuh>"
echo "<k3/k3.cuh> reaches every header"
