#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The headers define no macro but K3_..., stand a consumer's macros called min and max, and refuse -ffast-math.
# shellcheck source=tests/headers/common.sh
. "$(dirname "$0")/common.sh"
root=$1

# Macros that the headers of stdin define beyond those of the headers that they take from elsewhere.
leaked() {  # root, compiler
  local flags=(-std=c++20 -I"$1/include" ${include_flags[@]+"${include_flags[@]}"})
  foreign_includes "$1" >"$scratch/foreign.cpp"
  { cat "$scratch/foreign.cpp"; sed 's|.*|#include <&>|'; } >"$scratch/all.cpp"
  # shellcheck disable=SC2086  # a compiler may come with arguments
  comm -13 <($2 "${flags[@]}" -dM -E "$scratch/foreign.cpp" | sort) \
    <($2 "${flags[@]}" -dM -E "$scratch/all.cpp" | sort) |
    grep -v '^#define K3_' || true
}

# Compiles the headers of stdin after macros min and max. What they take from elsewhere comes before: it need not stand
# them.
with_min_and_max() {  # root, compiler
  local macros='#define min(a, b) (((a) < (b)) ? (a) : (b))
#define max(a, b) (((a) > (b)) ? (a) : (b))'
  { foreign_includes "$1"; echo "$macros"; sed 's|.*|#include <&>|'; } >"$scratch/minmax.cpp"
  # shellcheck disable=SC2086
  $2 "${strict_flags[@]}" -I"$1/include" ${include_flags[@]+"${include_flags[@]}"} -fsyntax-only "$scratch/minmax.cpp"
}

planted=$scratch/planted
mkdir -p "$planted/include/k3"
printf '%s\n' '#pragma once' '#define PLANTED 1' '#include <algorithm>' \
  'inline int smallest(int a, int b) { return std::min(a, b); }' \
  >"$planted/include/k3/planted.hpp"
while IFS= read -r compiler; do
  for part in '' io; do
    said=$(headers "$root" $part | leaked "$root" "$compiler")
    [ -z "$said" ] || fail "$compiler: macros that are not K3_...:
$said"
    headers "$root" $part | with_min_and_max "$root" "$compiler" ||
      fail "$compiler: a header does not stand macros min and max"
  done
  for flag in -ffast-math -ffinite-math-only; do
    # shellcheck disable=SC2086
    said=$(echo '#include <k3/core/config.hpp>' |
      $compiler -std=c++20 $flag -I"$root/include" -fsyntax-only -x c++ - 2>&1) && fail "$compiler: $flag is accepted"
    grep -q 'compile without -ffast-math' <<<"$said" || fail "$compiler $flag: $said"
  done
  echo k3/planted.hpp | leaked "$planted" "$compiler" | grep -q PLANTED || fail "a planted macro was not seen"
  if echo k3/planted.hpp | with_min_and_max "$planted" "$compiler" 2>/dev/null; then
    fail "a planted std::min was not seen"
  fi
done < <(compilers)
echo "only K3_ macros; min and max may be macros; -ffast-math is refused"
have_nvcc || exit 0

# The same of the headers for CUDA, which also stand a toolkit whose half and bfloat16 operators and conversions are
# off.
if grep -rnE '^ *# *define' "$root/include/k3/cuda" "$root/kernels" --include='*.cuh'; then fail "a macro in a .cuh"; fi
{
  grep -rhE '^ *#include <' "$root/include/k3/cuda" "$root/kernels" --include='*.cuh' | grep -v '<k3/' | sort -u
  foreign_includes "$root"
  printf '#define min(a, b) (((a) < (b)) ? (a) : (b))\n#define max(a, b) (((a) > (b)) ? (a) : (b))\n'
  echo '#include <k3/k3.cuh>'
} | nvcc_reads "$root" || fail "a header for CUDA does not stand macros min and max"
off=()
for type in HALF HALF2 BFLOAT16 BFLOAT162; do
  off+=("-D__CUDA_NO_${type}_OPERATORS__" "-D__CUDA_NO_${type}_CONVERSIONS__")
done
echo '#include <k3/k3.cuh>' | nvcc_reads "$root" "${off[@]}" || fail "a header for CUDA needs the toolkit's operators"
printf '#include <cuda_bf16.h>\n__device__ float planted(__nv_bfloat16 a) { return a + a; }\n' >"$scratch/planted.cu"
if nvcc_reads "$root" "${off[@]}" <"$scratch/planted.cu" 2>/dev/null; then fail "a planted operator was not seen"; fi
echo "the same for CUDA, and the toolkit's operators may be off"
