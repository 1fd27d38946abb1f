#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# greedy_decode while one of its files is cut: exit status 1, one line that names the file, and no wrong text. Called
# with the source root; K3_EXAMPLES is the folder of the built programs.
set -uo pipefail
if [ ! -x "${K3_EXAMPLES-}/greedy_decode" ]; then
  echo "greedy_decode is not built"
  exit 77
fi
program=$K3_EXAMPLES/greedy_decode
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0
decode() { "$program" "$scratch/model" --prompt 'It was' --max-new 1500 --eos none --threads 1; }

fresh() { rm -rf "$scratch/model" && cp -r "$1/examples/data/austen" "$scratch/model"; }

fresh "$1"
decode >"$scratch/whole" 2>/dev/null
for left in 0 4096 half last; do
  fresh "$1"
  rm -f "$scratch/out"
  decode >"$scratch/out" 2>"$scratch/err" &
  child=$!
  until [ -s "$scratch/out" ] || ! kill -0 "$child" 2>/dev/null; do sleep 0.002; done
  file=$(find "$scratch/model" -name '*.safetensors' | sort | head -n 1)
  bytes=$(stat -c %s "$file")
  case $left in
    half) size=$((bytes / 2)) ;;
    last) size=$((bytes - 1)) ;;
    *) size=$left ;;
  esac
  truncate -s "$size" "$file"
  wait "$child"
  status=$?
  written=$(stat -c %s "$scratch/out")
  if [ "$status" = 0 ]; then
    echo "cut to $left: the program had finished before"
    failures=$((failures + 1))
  elif [ "$status" != 1 ] || [ "$(grep -c "^greedy_decode: .*$(basename "$file")" "$scratch/err")" != 1 ]; then
    echo "cut to $left: exit status $status, and on standard error:"
    cat "$scratch/err"
    failures=$((failures + 1))
  elif ! cmp -s -n "$written" "$scratch/out" "$scratch/whole"; then
    echo "cut to $left: other text than from the whole file"
    failures=$((failures + 1))
  else
    echo "cut to $left: stopped after $written bytes: $(tail -n 1 "$scratch/err")"
  fi
done
[ "$failures" = 0 ]
