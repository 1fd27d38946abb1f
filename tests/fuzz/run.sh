#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the fuzz targets: see --help.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

usage() {
  cat <<'END'
usage: tests/fuzz/run.sh [--replay] [--build-dir DIR] [--keep DIR] [SECONDS] [TARGET]...

Builds the targets of tests/fuzz with libFuzzer and the address and undefined-behaviour sanitizers (clang++) and runs
each for SECONDS (60) from the corpus in tests/fuzz/corpus, one after the other. Closes with `N passed, N failed`.

  --replay         with any compiler (CXX): only the corpus, each input also cut short and changed
  --build-dir DIR  build there (build-fuzz)
  --keep DIR       start from, and keep new inputs in, DIR/TARGET
END
}

replay=no build=build-fuzz keep='' seconds=60
targets=()
while [ $# -gt 0 ]; do
  case $1 in
    --replay) replay=yes ;;
    --build-dir | --keep)
      [ $# -gt 1 ] || { usage >&2; exit 2; }
      if [ "$1" = --keep ]; then keep=$2; else build=$2; fi
      shift ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) if [[ $1 =~ ^[0-9]+$ ]]; then seconds=$1; else targets+=("$1"); fi ;;
  esac
  shift
done
if [ ${#targets[@]} = 0 ]; then
  for folder in tests/fuzz/corpus/*/; do targets+=("$(basename "$folder")"); done
fi

mkdir -p "$build"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
passed=0 failed=0
flags=(-std=c++20 -g -O1 -Iinclude -Itests/fuzz -fsanitize=address -fsanitize=undefined -fno-sanitize-recover=all)

replay() {  # target
  "${CXX:-g++}" "${flags[@]}" "tests/fuzz/$1.cpp" tests/fuzz/replay.cpp -lonig -o "$build/replay_$1" &&
    "$build/replay_$1" "tests/fuzz/corpus/$1"
}

fuzz() {  # target
  local new=${keep:-$scratch}/$1 words=()
  mkdir -p "$new"
  if [ -f "tests/fuzz/$1.dict" ]; then words=("-dict=tests/fuzz/$1.dict"); fi
  clang++ "${flags[@]}" -fsanitize=fuzzer "tests/fuzz/$1.cpp" -lonig -o "$build/$1" || return 1
  # New inputs go to the first folder; the kept corpus is only read.
  "$build/$1" -max_total_time="$seconds" -max_len=8192 -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$build/$1-" ${words[@]+"${words[@]}"} "$new" "tests/fuzz/corpus/$1" >"$build/$1.log" 2>&1 || {
    tail -n 40 "$build/$1.log"
    return 1
  }
  echo "$1: $(sed -n 's/^stat::number_of_executed_units: *//p' "$build/$1.log") executions in $seconds s"
}

for target in "${targets[@]}"; do
  if if [ $replay = yes ]; then replay "$target"; else fuzz "$target"; fi; then
    passed=$((passed + 1))
  else
    echo "FAILED: $target"
    failed=$((failed + 1))
  fi
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
