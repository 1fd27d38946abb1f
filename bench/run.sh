#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs every benchmark of the GPU, or of the host: see --help.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() {
  cat <<'END'
usage: bench/run.sh [--host] [--quick] [--run] [--build-dir DIR] [--output FILE] [--arch 90a] [NAME]...

Builds bench/cuda_*.cu with nvcc and g++ alone, as many at once as there are processors, runs them one after the other
and writes bench/results/h200.json. Then `python3 bench/report.py`, on any machine, makes plots and docs/performance.md
of it. Nothing is written where a program fails (wrong results are a failure) or measures a read ceiling below 4.3 TB/s.
NAME: only this program (moe, linear, step, ...); its rows replace those that FILE has. Closes with the seconds it took.

  --host         the processor's benchmarks, bench/host_*.cpp, into bench/results/host.json; needs g++ alone
  --quick        fewer batches and repetitions; report.py wants all
  --run          run what DIR has, built before
  --output FILE  write there
END
}

kind=cuda quick=() compile=yes build=build-bench output='' arch=90a names=()
while [ $# -gt 0 ]; do
  case $1 in
    --host) kind=host ;;
    --quick) quick=(--quick) ;;
    --run) compile=no ;;
    --build-dir | --output | --arch)
      [ $# -gt 1 ] || { usage >&2; exit 2; }
      case $1 in
        --build-dir) build=$2 ;;
        --output) output=$2 ;;
        --arch) arch=$2 ;;
      esac
      shift ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) names+=("$1") ;;
  esac
  shift
done
some=${#names[@]}
if [ "$some" = 0 ]; then
  for file in bench/"$kind"_*.c*; do
    case $file in *.cu | *.cpp) ;; *) continue ;; esac
    if grep -q '#include <k3/io/' "$file"; then continue; fi  # needs more than a compiler
    name=${file##*/"$kind"_}
    names+=("${name%.*}")
  done
fi
if [ $kind = cuda ]; then output=${output:-bench/results/h200.json}; else output=${output:-bench/results/host.json}; fi
[ -x /usr/local/cuda/bin/nvcc ] && PATH=$PATH:/usr/local/cuda/bin

compile() {  # name
  local program=$build/bench_${kind}_$1 flags=(-std=c++20 -O3 -Iinclude -Ikernels)
  if [ $kind = host ]; then
    "${CXX:-g++}" "${flags[@]}" -fopenmp "bench/host_$1.cpp" -o "$program"
  else
    nvcc "${flags[@]}" "-gencode=arch=compute_$arch,code=sm_$arch" "bench/cuda_$1.cu" -o "$program"
  fi >"$build/bench_${kind}_$1.log" 2>&1
}

mkdir -p "$build" "$(dirname "$output")" || exit 1
builders=() failed=0
for name in "${names[@]}"; do
  if [ $compile = no ]; then continue; fi
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  compile "$name" &
  builders+=($!)
done
for i in "${!builders[@]}"; do
  if ! wait "${builders[$i]}"; then
    echo "${names[$i]}: the build failed"
    head -n 20 "$build/bench_${kind}_${names[$i]}.log"
    failed=1
  fi
done
[ $failed = 0 ] || exit 1
echo "built ${#builders[@]} programs in $SECONDS s"

fresh=$build/$kind.json
rm -f "$fresh"
if [ "$some" != 0 ] && [ -f "$output" ]; then cp "$output" "$fresh"; fi
measuring=$SECONDS
for name in "${names[@]}"; do
  printf '\n== %s (%s s)\n' "$name" "$SECONDS"
  if ! "$build/bench_${kind}_$name" "${quick[@]}" --json "$fresh"; then
    echo "$name failed"
    failed=1
  elif [ $kind = cuda ]; then
    ceiling=$(sed -n 's/.*"read_ceiling_GBps": \([0-9]*\).*/\1/p' "$fresh")
    if [ "${ceiling:-0}" -lt 4300 ]; then
      echo "$name: the read ceiling, ${ceiling:-0} GB/s, is below 4300 GB/s: this run does not count"
      failed=1
    fi
  fi
done
printf '\n%s s, of which %s s to build\n' "$SECONDS" "$measuring"
[ $failed = 0 ] || exit 1
if [ ! -f "$fresh" ]; then
  echo "no results were written"
  exit 1
fi
mv "$fresh" "$output" && echo "wrote $output"
