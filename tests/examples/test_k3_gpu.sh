#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What k3 says where a GPU is not there or has no room, with a stand-in for one, and with the real backend where k3 has
# it. Called with the source root; K3_EXAMPLES is the folder of the built programs, K3_FAKE_GPU_PROGRAM is k3 with the
# stand-in.
set -uo pipefail
if [ ! -x "${K3_FAKE_GPU_PROGRAM-}" ]; then
  echo "k3 is not built with a stand-in for a GPU"
  exit 77
fi
program=$K3_FAKE_GPU_PROGRAM
model=$1/examples/data/austen
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/expect.sh"
on_gpu=("$model" --backend cuda)
some=("${on_gpu[@]}" --ids 5 --max-new 3)

expect 0 'stopped at' generate "${some[@]}"
expect 2 'takes no --threads' generate "${some[@]}" --threads 2
# The floor, in the option's name and units; what is named is enough.
for memory in 0 1K 39999; do
  words="--gpu-memory $memory is below the floor of 40K (40000 bytes), the 4 experts that one token uses in one layer"
  expect 1 "$words" generate "${some[@]}" --gpu-memory "$memory"
  expect 1 "$words" chat "${on_gpu[@]}" --gpu-memory "$memory"
done
for memory in 40K 40000 auto; do expect 0 'stopped at' generate "${some[@]}" --gpu-memory "$memory"; done
expect 1 '--host-memory 1K is below the floor of 58K' generate "${some[@]}" --host-memory 1K
expect 2 '--gpu-memory: "1X" is not a number of bytes' generate "${some[@]}" --gpu-memory 1X
export K3_FAKE_GPU=small
for given in '' auto; do
  expect 1 '--gpu-memory auto: the 512 that are left for experts are below the floor of 40K (40000 bytes)' \
    generate "${some[@]}" ${given:+--gpu-memory "$given"}
done
export K3_FAKE_GPU=unlocked
expect 1 'room for 6 experts: the system does not give that much page-locked memory' generate "${some[@]}"
expect 1 '--host-memory 1M: the system does not give that much page-locked memory' \
  generate "${some[@]}" --host-memory 1M
# No GPU: said at once, whatever else there is to say.
export K3_FAKE_GPU=none
for command in generate chat; do
  for folder in "$model" /nonexistent; do
    arguments=(--backend cuda)
    [ "$command" = chat ] || arguments+=(--ids 5)
    expect 1 'k3: --backend cuda: the fake GPU is not there; --backend host needs none' \
      "$command" "$folder" "${arguments[@]}"
    same "lines of $command without a GPU" "$(wc -l <"$scratch/err"), $(wc -c <"$scratch/out")" '1, 0'
  done
done
unset K3_FAKE_GPU

# The real backend, with no GPU that it can see.
export CUDA_VISIBLE_DEVICES=-1
for name in k3 greedy_decode; do
  program=$K3_EXAMPLES/$name
  grep -qa cudaStreamCreate "$program" || continue
  arguments=("${some[@]}")
  [ $name = greedy_decode ] || arguments=(generate "${some[@]}")
  expect 1 "$name: --backend cuda: " "${arguments[@]}"
  same "what $name says without a GPU" "$(grep -c 'no NVIDIA .*; --backend host needs none$' "$scratch/err")" 1
done

echo "$checks checks, $failures failed"
[ "$failures" = 0 ]
