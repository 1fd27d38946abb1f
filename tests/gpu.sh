#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs every GPU test on a machine with an NVIDIA GPU, nvcc, g++ and Catch2: see --help.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() {
  cat <<'END'
usage: tests/gpu.sh [--digest | --build | --quick] [--arch 90a] [--build-dir DIR] [NAME]...

Builds tests/cuda, runs every program, then each again at small shapes under compute-sanitizer's four tools, writes
tests/gpu-last-run.json, and closes with the line `N passed, N failed`. NAME: only this program (kda, linear, ...).

  --digest   print the digest of the sources that a run is valid for, and nothing else
  --build    build and link the programs, run none; counts the programs
  --quick    no sanitizers, no record
END
}

digest() {
  find include kernels tests/cuda tests/support tests/data examples/data tests/gpu.sh -type f ! -name '*.md' ! -name '*.pyc' -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

run=yes quick=no arch=90a build=build-gpu
names=()
while [ $# -gt 0 ]; do
  case $1 in
    --digest) digest; exit 0 ;;
    --build) run=no ;;
    --quick) quick=yes ;;
    --arch) arch=$2; shift ;;
    --build-dir) build=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) names+=("$1") ;;
  esac
  shift
done
if [ ${#names[@]} = 0 ]; then
  for file in tests/cuda/test_*.cpp; do
    name=${file##*/test_}
    names+=("${name%.cpp}")
  done
fi

mkdir -p "$build"
flags=(-std=c++20 -O2 -Iinclude -Ikernels -Itests)
if echo '#include <catch2/catch_all.hpp>' | g++ -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
  catch=(-lCatch2Main -lCatch2)
else
  g++ -std=c++20 -c tests/support/catch_main.cpp -o "$build/catch_main.o" || exit 1
  catch=("$build/catch_main.o")
fi

# One program: its device half by nvcc, its cases by g++.
build_one() {
  local name=$1
  nvcc "${flags[@]}" "-gencode=arch=compute_$arch,code=sm_$arch" -diag-suppress 1675 -Xcompiler -fopenmp \
    -c "tests/cuda/${name}_device.cu" -o "$build/${name}_device.o" >"$build/$name.log" 2>&1 &
  local device=$!
  g++ "${flags[@]}" -fopenmp -c "tests/cuda/test_$name.cpp" -o "$build/test_$name.o" >"$build/$name.host.log" 2>&1
  local host=$?
  wait "$device" && [ "$host" = 0 ] &&
    nvcc "$build/test_$name.o" "$build/${name}_device.o" "${catch[@]}" -lgomp -o "$build/test_$name" >>"$build/$name.log" 2>&1
}

# Adds the cases of a Catch2 log to the counts.
passed=0 failed=0 results=()
count() {  # name log status
  local line good=0 bad=0
  line=$(grep -E '^(All tests passed|test cases:)' "$2" | tail -n 1)
  if [[ $line =~ in\ ([0-9]+)\ test\ case ]]; then good=${BASH_REMATCH[1]}
  elif [[ $line =~ ^test\ cases: ]]; then
    [[ $line =~ ([0-9]+)\ passed ]] && good=${BASH_REMATCH[1]}
    [[ $line =~ ([0-9]+)\ failed ]] && bad=${BASH_REMATCH[1]}
  fi
  if [ "$3" != 0 ] && [ "$bad" = 0 ]; then bad=1; fi
  if [ "$good" = 0 ] && [ "$bad" = 0 ]; then bad=1; fi
  passed=$((passed + good)) failed=$((failed + bad))
  results+=("{\"test\":\"$1\",\"passed\":$good,\"failed\":$bad}")
  printf '%-28s %s passed, %s failed\n' "$1" "$good" "$bad"
}

# As many programs at once as there are processors.
builders=()
for name in "${names[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  build_one "$name" &
  builders+=($!)
done
for i in "${!names[@]}"; do
  if ! wait "${builders[$i]}"; then
    echo "${names[$i]}: the build failed"
    grep -hE 'error|Error' "$build/${names[$i]}".*log "$build/${names[$i]}.log" | head -n 20
    rm -f "$build/test_${names[$i]}"
    failed=$((failed + 1))
  else
    passed=$((passed + 1))
  fi
done
if [ "$run" = no ]; then
  echo "$passed passed, $failed failed"
  [ "$failed" = 0 ] && [ "$passed" -gt 0 ]
  exit
fi
passed=0 failed=0
for name in "${names[@]}"; do
  log=$build/$name.run
  timeout 300 "$build/test_$name" >"$log" 2>&1
  status=$?
  count "$name" "$log" "$status"
  if [ "$status" != 0 ]; then grep -vE '^(-+|\.+|=+|)$' "$log" | head -n "${K3_GPU_LINES:-60}"; fi
done
if [ "$quick" = no ]; then
  # All at once: they spend their time on the processor, not on the GPU.
  runs=()
  for name in "${names[@]}"; do
    for tool in memcheck racecheck initcheck synccheck; do
      K3_GPU_SMALL=1 timeout 400 compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/test_$name" \
        >"$build/$name.$tool" 2>&1 &
      runs+=("$name $tool $!")
    done
  done
  for run in "${runs[@]}"; do
    read -r name tool process <<<"$run"
    wait "$process"
    status=$?
    count "$name/$tool" "$build/$name.$tool" "$status"
    if [ "$status" != 0 ]; then grep -E '=====|FAILED|error' "$build/$name.$tool" | head -n 12; fi
  done
  {
    printf '{"device":"%s","date":"%s","digest":"%s","passed":%s,"failed":%s,"results":[\n' \
      "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$(digest)" \
      "$passed" "$failed"
    for i in "${!results[@]}"; do printf '%s%s' "${results[$i]}" "$([ "$i" = $((${#results[@]} - 1)) ] || echo ',
')"; done
    printf '\n]}\n'
  } >tests/gpu-last-run.json
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
