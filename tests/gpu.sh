#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs every GPU test on a machine with an NVIDIA GPU, nvcc, g++ and Catch2: see --help.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

usage() {
  cat <<'END'
usage: tests/gpu.sh [--digest | --build | --run] [--quick] [--arch 90a | --ptx 80] [--build-dir DIR] [NAME]...

Builds tests/cuda and the examples for CUDA, runs every program, compares what greedy_decode prints with --backend cuda
with what it prints on the host, then runs the tests again at small shapes under compute-sanitizer's four tools (and
`released`, at the released sizes, under memcheck), writes tests/gpu-last-run.json, and closes with the line
`N passed, N failed`. A case that does nothing is named and counts as neither. NAME: only this test program (kda, ...).
Some programs run once more, at small shapes, from PTX for compute capability 8.0 (kda_ptx, ...), which the driver
compiles for the GPU at hand: nothing that only newer code has may then be used.

  --digest   print the digest of the sources that a run is valid for, and nothing else
  --build    build and link the programs, run none; counts the programs
  --run      run what --build has left in DIR, possibly on another machine; refused where the sources have changed since
  --quick    no sanitizers, no record
  --arch     what to compile for; with --ptx all is compiled as those programs are, for this compute capability

With a NAME or --ptx there is no record either: the last one stays. Without a GPU the programs are built, and their
cases counted as skipped. The headers and libraries of greedy_decode (nlohmann-json, CLI11, Oniguruma) and Catch2 are
also looked for in the folders of CPATH and LIBRARY_PATH.
END
}

# All files that a run's results depend on, and this script.
greedy_sources=(greedy_decode.cpp engine.cpp engine.hpp cuda_backend.hpp command_line.hpp progress.hpp)
digest() {
  {
    find include kernels tests/cuda tests/support tests/data examples/data -type f ! -name '*.pyc' -print0
    find tests bench examples -type f \( -name '*.cu' -o -name '*.cuh' \) ! -path 'tests/cuda/*' -print0
    printf '%s\0' tests/gpu.sh "${greedy_sources[@]/#/examples/}" examples/tiny_model.hpp
  } | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

# Interrupted or not, the script leaves nothing running. What it starts runs in the background, since a signal is only
# seen between commands or in `wait`.
descendants() {
  cat /proc/[0-9]*/status 2>/dev/null | awk -v top=$$ '
    /^Pid:/ { pid = $2 }
    /^PPid:/ { parent[pid] = $2 }
    END {
      for (each in parent) {
        for (up = parent[each]; up in parent && up != top; up = parent[up]) {}
        if (up == top) print each
      }
    }'
}
stop() {
  local left
  trap - EXIT
  left=$(descendants)
  # shellcheck disable=SC2086
  kill $left 2>/dev/null
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
attended() {
  "$@" &
  wait "$!"
}

run=yes compile=yes quick=no arch=90a ptx='' build=build-gpu
names=() examples=()
while [ $# -gt 0 ]; do
  case $1 in
    --digest) digest; exit 0 ;;
    --build) run=no ;;
    --run) compile=no ;;
    --quick) quick=yes ;;
    --arch) arch=$2; shift ;;
    --ptx) ptx=$2; shift ;;
    --build-dir) build=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) names+=("$1") ;;
  esac
  shift
done
some=${#names[@]}
if [ "$some" = 0 ]; then
  examples=(rms_norm tiny_decoder)
  for file in tests/cuda/test_*.cpp; do
    name=${file##*/test_}
    names+=("${name%.cpp}")
  done
  if [ -z "$ptx" ]; then names+=(target_ptx moe_ptx moe_packed_ptx kda_ptx mla_ptx linear_ptx row_ops_ptx); fi
fi

mkdir -p "$build"
flags=(-std=c++20 -O2 -Iinclude -Ikernels -Itests)
device_flags=(-diag-suppress 1675 -Xcompiler -fopenmp)
code_for() {  # name of a program or of its half
  if [ "${1%_ptx}" != "$1" ]; then printf -- '-gencode=arch=compute_80,code=compute_80'
  elif [[ $1 = missing* ]]; then printf -- '-gencode=arch=compute_%s,code=sm_%s' "$other_arch" "$other_arch"
  elif [ -n "$ptx" ]; then printf -- '-gencode=arch=compute_%s,code=compute_%s' "$ptx" "$ptx"
  else printf -- '-gencode=arch=compute_%s,code=sm_%s' "$arch" "$arch"
  fi
}
# An architecture whose code does not run on a GPU of this one, for the test of kernels that are not there.
other_arch=120
if [[ $arch = 12* ]]; then other_arch=80; fi
if [ "$compile" = no ]; then
  catch=()
elif echo '#include <catch2/catch_all.hpp>' | g++ -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
  catch=(-lCatch2Main -lCatch2)
else
  attended g++ -std=c++20 -c tests/support/catch_main.cpp -o "$build/catch_main.o" || exit 1
  catch=("$build/catch_main.o")
fi

# The device halves of a program: those whose headers it includes, as the program compiled.
halves() {
  local base=${1%_ptx}
  sed -nE 's|^#include "cuda/([a-z_]+)_device.hpp"$|\1'"${1#"$base"}|p" "tests/cuda/test_$base.cpp" | sort -u
}
device_half() {
  nvcc "${flags[@]}" "${device_flags[@]}" "$(code_for "$1")" -c "tests/cuda/${1%_ptx}_device.cu" \
    -o "$build/$1_device.o" >"$build/$1_device.log" 2>&1
}
host_half() {
  g++ "${flags[@]}" -fopenmp -c "tests/cuda/test_$1.cpp" -o "$build/test_$1.o" >"$build/test_$1.log" 2>&1
}
example() {
  nvcc "${flags[@]}" "${device_flags[@]}" "$(code_for "$1")" "examples/$1.cu" -o "$build/$1" >"$build/$1.log" 2>&1
}
# greedy_decode needs libraries that nothing else here does: without them it is left out, and said so.
greedy_absent=$build/greedy_decode.absent
greedy_log=$build/greedy_decode.log
greedy_part() {  # source
  local compiler=(g++ "${flags[@]}" -fopenmp)
  if [[ $1 = *.cu ]]; then compiler=(nvcc "${flags[@]}" "${device_flags[@]}" "$(code_for greedy)"); fi
  "${compiler[@]}" -c "examples/$1" -o "$build/greedy_$1.o" >"$build/greedy_$1.log" 2>&1
}
greedy_parts=(cuda_backend.cu greedy_decode.cpp engine.cpp)
greedy_headers() {
  local header absent=()
  rm -f "$greedy_absent"
  for header in nlohmann/json.hpp CLI/CLI.hpp oniguruma.h; do
    echo "#include <$header>" | g++ -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || absent+=("$header")
  done
  if [ ${#absent[@]} = 0 ]; then return; fi
  echo "greedy_decode is left out: no ${absent[*]} (install them, or name their folders in CPATH)" |
    tee "$greedy_absent"
  return 1
}
link_greedy() {
  local part objects=()
  for part in "${greedy_parts[@]}"; do objects+=("$build/greedy_$part.o"); done
  nvcc "${objects[@]}" -lonig -lgomp -o "$build/greedy_decode" >"$greedy_log" 2>&1
}
link_program() {
  local objects=() half
  for half in $(halves "$1"); do objects+=("$build/${half}_device.o"); done
  nvcc "$build/test_${1%_ptx}.o" "${objects[@]}" "${catch[@]}" -lgomp -o "$build/test_$1" >"$build/test_$1.link" 2>&1
}

# The cases of a log with durations, as JSON: a case has failed where an assertion has since the case before it, and is
# skipped where it has none.
cases() {
  awk '/FAILED:|terminated|fatal error/ { bad = 1 }
       /^No assertions in test case/ { none = 1 }
       /^ *[0-9.]+ s: / {
         sub(/^ *[0-9.]+ s: /, ""); gsub(/["\\]/, "\\\\&")
         if (!($0 in result)) names[++count] = $0
         if (!($0 in result) || bad) result[$0] = bad ? "failed" : none ? "skipped" : "passed"
         bad = none = 0
       }
       END {
         for (i = 1; i <= count; ++i)
           printf "%s{\"name\":\"%s\",\"result\":\"%s\"}", (i > 1 ? "," : ""), names[i], result[names[i]]
       }' "$1"
}

# Whether a sanitizer's log ends without a finding; other logs have none.
clean() { ! grep -q '= COMPUTE-SANITIZER' "$1" || grep -qE 'SUMMARY: 0 (errors|hazards)' "$1"; }
# Adds the cases of a Catch2 log to the counts. Those without assertions, which -w NoAssertions makes Catch2 count as
# failed, count as nothing.
passed=0 failed=0 results=()
count() {  # name log status
  local line good=0 bad=0 none more=
  line=$(grep -E '^(All tests passed|test cases:)' "$2" | tail -n 1)
  if [[ $line =~ in\ ([0-9]+)\ test\ case ]]; then good=${BASH_REMATCH[1]}
  elif [[ $line =~ ^test\ cases: ]]; then
    [[ $line =~ ([0-9]+)\ passed ]] && good=${BASH_REMATCH[1]}
    [[ $line =~ ([0-9]+)\ failed ]] && bad=${BASH_REMATCH[1]}
  fi
  none=$(grep -c '^No assertions in test case' "$2")
  if [ "$none" -gt "$bad" ]; then none=$bad; fi
  bad=$((bad - none))
  if [ "$3" != 0 ] && [ "$bad" = 0 ] && ! { [ "$none" -gt 0 ] && [ "$3" -lt 124 ] && clean "$2"; }; then bad=1; fi
  if [ "$good" = 0 ] && [ "$bad" = 0 ]; then bad=1; fi
  if [ "$none" -gt 0 ]; then more=", $none did nothing"; fi
  passed=$((passed + good)) failed=$((failed + bad))
  results+=("{\"test\":\"$1\",\"passed\":$good,\"failed\":$bad,\"cases\":[$(cases "$2")]}")
  printf '%-28s %s passed, %s failed%s\n' "$1" "$good" "$bad" "$more"
  if [ "$none" -gt 0 ]; then sed -n "s/^No assertions in test case/  nothing is checked by/p" "$2"; fi
}

built() {  # name, program, logs...
  if [ -x "$2" ]; then
    passed=$((passed + 1))
    return
  fi
  echo "$1: the build failed"
  grep -hE 'error|Error|cannot' "${@:3}" | head -n 20
  failed=$((failed + 1))
}
# As many compilers at once as there are processors, the slow device halves first.
start() {
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  "$@" &
}
build_all() {
  local name half all_halves all_bases logs
  rm -f "$build/digest"
  all_halves=$(for name in "${names[@]}"; do halves "$name"; done | sort -u)
  for half in $all_halves; do rm -f "$build/${half}_device.o"; done
  for half in $all_halves; do start device_half "$half"; done
  all_bases=$(printf '%s\n' "${names[@]%_ptx}" | sort -u)
  for name in "${names[@]}"; do rm -f "$build/test_$name"; done
  for name in $all_bases; do rm -f "$build/test_$name.o"; done
  for name in $all_bases; do start host_half "$name"; done
  for name in ${examples[@]+"${examples[@]}"}; do rm -f "$build/$name"; start example "$name"; done
  if [ "$some" = 0 ]; then
    rm -f "$build/greedy_decode" "$build"/greedy_*.o
    if greedy_headers; then for name in "${greedy_parts[@]}"; do start greedy_part "$name"; done; fi
  fi
  wait
  for name in "${names[@]}"; do start link_program "$name"; done
  if [ -f "$build/greedy_engine.cpp.o" ]; then start link_greedy; fi
  wait
  for name in "${names[@]}"; do
    logs=("$build/test_${name%_ptx}.log" "$build/test_$name.link")
    for half in $(halves "$name"); do logs+=("$build/${half}_device.log"); done
    built "$name" "$build/test_$name" "${logs[@]}"
  done
  for name in ${examples[@]+"${examples[@]}"}; do built "examples/$name" "$build/$name" "$build/$name.log"; done
  if [ "$some" = 0 ] && [ ! -f "$greedy_absent" ]; then
    built examples/greedy_decode "$build/greedy_decode" "$build"/greedy_*.log
  fi
  digest >"$build/digest"
}
if [ "$compile" = yes ]; then
  build_all
elif [ "$(cat "$build/digest" 2>/dev/null)" != "$(digest)" ]; then
  echo "$build was not built from these sources: tests/gpu.sh --build"
  exit 1
fi
# The names of a program's cases to a file. Catch2 2 exits with their number, Catch2 3 does not know the first option.
list_cases() {  # program file
  attended timeout 60 "$1" --list-test-names-only >"$2" 2>/dev/null || [ -s "$2" ] ||
    attended timeout 60 "$1" --list-tests --verbosity quiet >"$2" 2>/dev/null
}
# Without a GPU the programs are built, and what they hold is counted as skipped.
has_gpu() {
  attended nvidia-smi --list-gpus >"$build/gpus" 2>/dev/null
  grep -q '^GPU' "$build/gpus"
}
if [ "$run" = yes ] && ! has_gpu; then
  echo 'no GPU here: the programs are not run'
  run=no
fi
if [ "$run" = no ]; then
  cases=0
  for name in "${names[@]}"; do
    if [ ! -x "$build/test_$name" ]; then continue; fi
    list_cases "$build/test_$name" "$build/test_$name.cases"
    held=$(grep -c . "$build/test_$name.cases")
    cases=$((cases + held))
    if [ "$held" = 0 ]; then
      echo "$name: no test cases"
      failed=$((failed + 1))
    fi
  done
  echo "$cases test cases in ${#names[@]} programs skipped"
  echo "$passed passed, $failed failed"
  [ "$failed" = 0 ] && [ "$passed" -gt 0 ]
  exit
fi
passed=0 failed=0
run_program() {  # name, environment...
  env "${@:2}" timeout 300 "$build/test_$1" -d yes -w NoAssertions >"$build/$1.run" 2>&1
}
report() {  # name status
  count "$1" "$build/$1.run" "$2"
  if [ "$2" != 0 ]; then grep -vE '^(-+|\.+|=+|)$' "$build/$1.run" | head -n "${K3_GPU_LINES:-60}"; fi
}
# These run at once, behind the others, which look at how much memory is free: the driver spends seconds on compiling
# each of those from PTX, and the host computes for most of the time of the rest.
together=() processes=()
for name in "${names[@]}"; do
  case $name in
    *_ptx | linear | mla | kda_bits | row_ops) together+=("$name") ;;
    *)
      attended run_program "$name"
      report "$name" "$?"
      ;;
  esac
done
for name in ${together[@]+"${together[@]}"}; do
  if [ "${name%_ptx}" = "$name" ]; then
    run_program "$name" OMP_NUM_THREADS=4 &
  else
    run_program "$name" K3_GPU_SMALL=1 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive &
  fi
  processes+=("$!")
done
for i in "${!together[@]}"; do
  wait "${processes[$i]}"
  report "${together[$i]}" "$?"
done
# An example has no cases: its exit status is the result.
run_example() {  # name, environment...
  local log="$build/$1.run" status
  attended env "${@:2}" timeout 60 "$build/$1" >"$log" 2>&1
  status=$?
  if [ "$status" = 0 ]; then echo 'All tests passed (1 assertion in 1 test case)' >>"$log"; fi
  count "examples/$*" "$log" "$status"
  if [ "$status" != 0 ]; then cat "$log"; fi
}
for name in ${examples[@]+"${examples[@]}"}; do run_example "$name"; done
if [ ${#examples[@]} != 0 ]; then
  run_example tiny_decoder K3_CUDA_KDA=0
  run_example tiny_decoder K3_CUDA_MLA=0
fi
# What greedy_decode prints on the GPU must be what it prints on the host: prompt, tokens and why it stopped. In bf16
# other tokens will do, for rounding may turn them.
greedy_run() {  # backend, precision, model, ids, environment...
  attended env "LD_LIBRARY_PATH=${LIBRARY_PATH-}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "${@:5}" timeout 120 \
    "$build/greedy_decode" "$3" --ids "$4" --max-new 24 --json --backend "$1" --precision "$2" >"$log.$1" \
    2>>"$log.errors"
}
compare_greedy() {
  local log=$build/greedy_decode.run model ids answer how on_host on_gpu good=0 bad=0
  : >"$log" && : >"$log.errors"
  for model in tests/data/k3-tiny-5l tests/data/k3-tiny-13l tests/data/kimi-linear-5l examples/data/austen; do
    for ids in 5,17,33,2 7,1,60,60,3,44,21,9,9,50,2,31; do
      answer='^\{"prompt":\['$ids'\],"tokens":\[[0-9,]+\],'
      greedy_run host fp32 "$model" "$ids"
      on_host=$(<"$log.host")
      for how in fp32 bf16 K3_CUDA_KDA=0 K3_CUDA_MLA=0; do
        if [ "$how" != fp32 ] && [ "$ids" != 5,17,33,2 ]; then continue; fi
        case $how in
          fp32 | bf16) greedy_run cuda "$how" "$model" "$ids" ;;
          *) greedy_run cuda fp32 "$model" "$ids" "$how" ;;
        esac
        on_gpu=$(<"$log.cuda")
        if [[ $on_host =~ $answer && $on_gpu =~ $answer && ($how = bf16 || $on_gpu = "$on_host") ]]; then
          good=$((good + 1))
        else
          bad=$((bad + 1))
          printf 'FAILED:\nhost: %s\ncuda: %s\n' "$on_host" "$on_gpu" >>"$log"
        fi
        echo "0 s: ${model##*/} from $ids with $how" >>"$log"
      done
    done
  done
  echo "test cases: $((good + bad)) | $good passed | $bad failed" >>"$log"
  count examples/greedy_decode "$log" "$bad"
  if [ "$bad" != 0 ]; then grep -v '^0 s: ' "$log" | cut -c 1-400; tail -n 5 "$log.errors"; fi
}
if [ "$some" = 0 ]; then
  if [ -f "$greedy_absent" ]; then cat "$greedy_absent"; else compare_greedy; fi
fi
if [ "$quick" = no ]; then
  # Programs on one GPU take turns, and each of their thousands of launches waits for its turn: four at once are faster
  # than more. The slow ones first.
  sanitize() {  # name tool
    local options=(--error-exitcode 9) begin=$SECONDS
    # KDA has more barriers in shared memory than the tool counts unless told to, at the price of memory a launch.
    if [[ $1/$2 = kda*/synccheck ]]; then options+=(--num-cuda-barriers 4096); fi
    # This program makes CUDA refuse calls on purpose.
    if [ "$1" = runtime ] && [ "$2" = memcheck ]; then options+=(--report-api-errors no); fi
    K3_GPU_SMALL=1 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive timeout -k 5 300 \
      compute-sanitizer --tool "$2" "${options[@]}" "$build/test_$1" -d yes -w NoAssertions \
      >"$build/$1.$2" 2>&1
    echo "$? $((SECONDS - begin))" >"$build/$1.$2.status"
  }
  slow=(streaming runtime mla decoder decoder_batch moe linear gates) runs=() begin=$SECONDS
  at_once=$(($(nproc) < 4 ? $(nproc) : 4))
  for tool in racecheck initcheck memcheck synccheck; do
    for name in "${slow[@]}" "${names[@]}"; do
      # The released sizes are too much for the other tools, a missing kernel runs nowhere, and kernels from PTX take
      # long to compile.
      case $name/$tool in
        released/memcheck) ;;
        released/* | missing/* | *_ptx/*) continue ;;
      esac
      if [[ " ${names[*]} " != *" $name "* ]] || [[ " ${runs[*]-} " = *" $name/$tool "* ]]; then continue; fi
      runs+=("$name/$tool")
    done
  done
  for each in "${runs[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
    sanitize "${each%/*}" "${each#*/}" &
  done
  wait
  for each in "${runs[@]}"; do
    name=${each%/*} tool=${each#*/}
    read -r status seconds <"$build/$name.$tool.status"
    count "$each" "$build/$name.$tool" "$status"
    printf '%28s %s s\n' '' "$seconds"
    if [ "$status" != 0 ]; then grep -E '=====|FAILED|error' "$build/$name.$tool" | head -n 12; fi
  done
  echo "sanitizers: $((SECONDS - begin)) s"
fi
if [ "$quick" = no ] && [ "$some" = 0 ] && [ -z "$ptx" ]; then
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
