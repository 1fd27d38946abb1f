#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the fuzz targets: see --help.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

usage() {
  cat <<'END'
usage: tests/fuzz/run.sh [--replay] [--build-dir DIR] [--keep DIR] [--jobs N] [SECONDS] [TARGET]...

Builds the targets of tests/fuzz with libFuzzer and the address and undefined-behaviour sanitizers (clang++) and runs
each for SECONDS (60) from the corpus in tests/fuzz/corpus, as many at once as there are processors. Closes with
`N passed, N failed`.

  --replay         with any compiler (CXX): only the corpus, each input also cut short and changed
  --build-dir DIR  build there (build-fuzz)
  --keep DIR       start from, and keep new inputs in, DIR/TARGET
  --jobs N         run N at once
END
}

replay=no build=build-fuzz keep='' seconds=60 jobs=$(nproc)
targets=()
while [ $# -gt 0 ]; do
  case $1 in
    --replay) replay=yes ;;
    --build-dir | --keep | --jobs)
      [ $# -gt 1 ] || { usage >&2; exit 2; }
      case $1 in
        --build-dir) build=$2 ;;
        --keep) keep=$2 ;;
        --jobs) jobs=$2 ;;
      esac
      shift ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) if [[ $1 =~ ^[0-9]+$ ]]; then seconds=$1; else targets+=("$1"); fi ;;
  esac
  shift
done
[[ $jobs =~ ^[1-9][0-9]*$ ]] || { usage >&2; exit 2; }
if [ ${#targets[@]} = 0 ]; then
  for folder in tests/fuzz/corpus/*/; do targets+=("$(basename "$folder")"); done
fi

mkdir -p "$build"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
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

# Says what a target said, in one piece, and leaves a file behind for its result.
run() {  # target
  local result=failed
  if { if [ $replay = yes ]; then replay "$1"; else fuzz "$1"; fi; } >"$scratch/$1.said" 2>&1; then result=passed; fi
  cat "$scratch/$1.said"
  if [ $result = failed ]; then echo "FAILED: $1"; fi
  : >"$scratch/$1.$result"
}

running=0
for target in "${targets[@]}"; do
  if [ "$running" -ge "$jobs" ]; then
    wait -n
    running=$((running - 1))
  fi
  run "$target" &
  running=$((running + 1))
done
wait
passed=0
for target in "${targets[@]}"; do if [ -e "$scratch/$target.passed" ]; then passed=$((passed + 1)); fi; done
failed=$((${#targets[@]} - passed))
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
