#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What k3 make-checkpoint refuses: in the words of its options, and with nothing left behind that it made, or removed
# that it did not. Called with the source root; K3_EXAMPLES is the folder of the built programs.
set -uo pipefail
if [ ! -x "${K3_EXAMPLES-}/k3" ]; then
  echo "k3 is not built"
  exit 77
fi
program=$K3_EXAMPLES/k3
model=$1/examples/data/austen
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/expect.sh"

# refused STATUS WORDS OPTION...: in a folder that is new, below folders that are new, and in one that is there.
refused() {
  local status=$1 words=$2
  shift 2
  mkdir -p "$scratch/there/empty"
  for out in new/a/b new/./c/ new/d/../e there/empty there/fresh; do
    expect "$status" "$words" make-checkpoint "$scratch/$out" "$@"
    same "lines for $* in $out" "$(wc -l <"$scratch/err"), $(wc -c <"$scratch/out")" '1, 0'
    same "internal names for $* in $out" "$(grep -cE 'write_random|made_up_voc|geometry|_size' "$scratch/err")" 0
    same "what is left of $* in $out" "$(cd "$scratch" && find . -mindepth 1 | sort | tr '\n' ' ')" \
      './err ./out ./there ./there/empty '
  done
  rm -r "$scratch/there"
}
tiny=(--like tiny)
refused 2 '--like' --like kimi-k4
for layers in 0 1 10001; do
  refused 2 '--layers: from 2, a KDA and an MLA layer, to 10000' "${tiny[@]}" --layers "$layers"
done
refused 2 '--latent: this member of the family has none' --like kimi-linear-48b --latent 32
refused 2 '--width: 40 is not a multiple of 32, as MXFP4 needs' "${tiny[@]}" --width 40
refused 2 '--latent: 33 is not a multiple of 32' "${tiny[@]}" --latent 33
refused 2 '--top-k: 5 of only 4 experts (--experts)' "${tiny[@]}" --top-k 5
for option in experts top-k hidden width latent dense heads vocab; do
  refused 2 "--$option: at least 1" "${tiny[@]}" "--$option" 0
done
for vocabulary in 300 2147483647; do
  refused 2 '--vocab: the made-up tokenizer has from 512 ids (256 bytes, 256 reserved) to 8388864' \
    "${tiny[@]}" --vocab "$vocabulary"
done
refused 2 '--experts: 2147483647 in each of 3 layers are more than 1048576 in all' "${tiny[@]}" --experts 2147483647
refused 2 'these sizes make 6.5e+20 bytes of tensors' "${tiny[@]}" --hidden 2147483647 --heads 2147483647 --hollow
refused 2 '--seed: "x"' "${tiny[@]}" --seed x
refused 2 '--tokenizer: needs a folder' "${tiny[@]}" --tokenizer ''
refused 2 "--tokenizer: $model has 2048 ids, more than the model (--vocab 2048" "${tiny[@]}" --tokenizer "$model"
# What is only known once the folder has been made.
refused 1 '/nonexistent/tiktoken.model: cannot be opened' "${tiny[@]}" --tokenizer /nonexistent
refused 1 'its disk has only' --like kimi-k3 --layers 2 --dense 2000000000 --vocab 512
mkdir "$scratch/broken"
printf 'IQ== x\n' >"$scratch/broken/tiktoken.model"
cp "$model/tokenizer_config.json" "$scratch/broken"
mv "$scratch/broken" "$scratch-broken"
trap 'rm -rf "$scratch" "$scratch-broken"' EXIT
refused 1 'tiktoken.model: ' "${tiny[@]}" --tokenizer "$scratch-broken"

# A write that fails in the middle: the largest file may have 40 kB, then 200 kB, so that some are whole.
limited() {  # KB ARGUMENT...
  (
    trap '' XFSZ
    ulimit -f "$1"
    exec "$program" "${@:2}" 2>"$scratch/err" >/dev/null
  )
}
for limit in 4 20 200; do
  mkdir "$scratch/kept"
  for out in kept made/below; do
    limited $limit make-checkpoint "$scratch/$out" --like tiny --vocab 16384 --hidden 64 --latent 32
    same "exit status on a disk that is full after $limit KB" "$?" 1
    same "what is said of it" "$(grep -c 'cannot be written' "$scratch/err")" 1
  done
  same "what is left then" "$(cd "$scratch" && find . -mindepth 1 | sort | tr '\n' ' ')" './err ./kept ./out '
  rmdir "$scratch/kept"
done

# What was there stays, even where it looks like a part of a checkpoint.
expect 1 'not an empty folder' make-checkpoint "$1/examples" "${tiny[@]}"
expect 2 'OUT: needs the name of a folder' make-checkpoint '' "${tiny[@]}"
mkdir "$scratch/full" "$scratch/parts"
touch "$scratch/full/config.json" "$scratch/parts/model-00001-of-00002.safetensors.part" "$scratch/file"
for out in full parts file; do
  expect 1 "$scratch/$out: exists and is not an empty folder; nothing is ever overwritten" \
    make-checkpoint "$scratch/$out" "${tiny[@]}"
done
ln -s nowhere "$scratch/dangling"
expect 1 'is not an empty folder' make-checkpoint "$scratch/dangling" "${tiny[@]}"
expect 1 'the folder cannot be made: Not a directory' make-checkpoint "$scratch/file/below" "${tiny[@]}"
same 'files that were there' "$(cd "$scratch" && find . -mindepth 1 ! -name err ! -name out | sort | tr '\n' ' ')" \
  './dangling ./file ./full ./full/config.json ./parts ./parts/model-00001-of-00002.safetensors.part '
expect 0 'MB of tensors' make-checkpoint "$scratch/new/whole/" "${tiny[@]}"
expect 0 '' inspect "$scratch/new/whole"

echo "$checks checks, $failures failed"
[ "$failures" = 0 ]
