#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Texts that k3 reads from files, pipes and standard input, and in the call: the same tokens however they come, UTF-8
# only, of a limited length. Called with the source root; K3_EXAMPLES is the folder of the built programs.
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
text=$scratch/text

# generated ARGUMENT...: what is generated, and the number of prompt tokens.
generated() {
  "$program" generate "$model" "$@" --max-new 20 2>"$scratch/err" &&
    sed -n 's/.*; \([0-9]* prompt tokens\).*/\1/p' "$scratch/err"
}
passage=$'It is a truth\n\n\tuniversally acknowledged, that a na\u00efve man \xf0\x9f\x98\x80 "of" <|open|> $HOME'
want=$(generated --prompt "$passage")
same 'tokens of the passage' "$(tail -n 1 <<<"$want")" '47 prompt tokens'
# The end of the last line is none of the text; another one is.
for end in '' $'\n' $'\r\n'; do
  printf '%s%s' "$passage" "$end" >"$text"
  same 'a prompt from a file' "$(generated --prompt-file "$text")" "$want"
  same 'a prompt from standard input' "$(generated --prompt-file - <"$text")" "$want"
  same 'a prompt from a pipe' "$(head -c 999 "$text" | generated --prompt-file -)" "$want"
  same 'a prompt from a named pipe' "$(generated --prompt-file <(cat "$text"))" "$want"
done
printf '%s\n\n' "$passage" >"$text"
same 'a prompt that ends with a line end' "$(generated --prompt-file "$text")" "$(generated --prompt "$passage"$'\n')"
for option in --chat '--chat --no-think' --markup; do
  # shellcheck disable=SC2086
  same "a file with $option" "$(printf '%s' "$passage" | generated --prompt-file - $option)" \
    "$(generated --prompt "$passage" $option)"
done
# Longer than an argument can be.
for _ in {1..400}; do echo 'Mr. Darcy was a man of whom she had heard something in the neighbourhood there.'; done \
  >"$scratch/words"
for _ in {1..10}; do cat "$scratch/words"; done >"$text"
expect 2 'tokens, above max_position_embeddings, 4096' generate "$model" --prompt-file "$text"
head -c 3000 "$scratch/words" >"$text"
expect 0 'stopped at' generate "$model" --prompt-file "$text" --max-new 1

# Conversations: the same reply from all forms.
turn=$'Hello,\nMr. Darcy'
printf '%s\n' "$turn" >"$text"
printf 'Be\nbrief.\n' >"$scratch/system"
printf '[{"role":"user","content":"Hello,\\nMr. Darcy"}]' >"$scratch/messages"
want=$(generated --prompt "$turn" --chat)
same 'messages from a file' "$(generated --messages "$scratch/messages")" "$want"
same 'messages from standard input' "$(generated --messages - <"$scratch/messages")" "$want"
chatted() { "$program" chat "$model" "$@" --max-new 20 2>/dev/null; }
same 'a first turn from a file' "$(chatted --prompt-file "$text" </dev/null)" "$(head -n -1 <<<"$want")"
same 'a first turn from standard input' "$(chatted --prompt-file - <"$text")" "$(head -n -1 <<<"$want")"
same 'turns after a file' "$(printf 'And\n' | chatted --prompt-file "$text" --json | grep -c '"turn":')" 2
want=$(chatted --system $'Be\nbrief.' --prompt-file "$text" </dev/null)
same 'a system message from a file' "$(chatted --system-file "$scratch/system" --prompt-file - <"$text")" "$want"
same 'a system message from the input' "$(chatted --system-file - --prompt-file "$text" <"$scratch/system")" "$want"

# What is no text. The model need not be there: a mistake in a file is told before it is opened.
nowhere=/nonexistent/model
printf 'ab\xff' >"$text"
expect 1 "k3: $text: is not UTF-8 (at byte 2)" generate "$nowhere" --prompt-file "$text"
expect 1 "k3: $text: is not UTF-8 (at byte 2)" chat "$nowhere" --prompt-file "$text"
expect 1 "k3: $text: is not UTF-8 (at byte 2)" chat "$nowhere" --system-file "$text"
expect 1 'k3: --prompt: is not UTF-8 (at byte 1)' generate "$nowhere" --prompt $'a\xe2\x82'
expect 1 'k3: --system: is not UTF-8 (at byte 0)' chat "$nowhere" --system $'\x80'
for bytes in '\xc0\x80' '\xed\xa0\x80' '\xf4\x90\x80\x80' 'ab\xe2\x82'; do
  # shellcheck disable=SC2059
  printf "$bytes" >"$text"
  expect 1 'is not UTF-8 (at byte ' generate "$nowhere" --prompt-file "$text"
  same "lines on $bytes" "$(wc -l <"$scratch/err"), $(wc -c <"$scratch/out")" '1, 0'
done
printf 'Hello\na\xff\n' | "$program" chat "$model" --max-new 2 >"$scratch/out" 2>"$scratch/err"
same 'exit status of a turn that is no text' "$?" 1
same 'what is said of it' "$(tail -n 1 "$scratch/err")" 'k3: line 2 of standard input: is not UTF-8 (at byte 1)'
expect 2 '--prompt-file: the prompt is empty' generate "$nowhere" --prompt-file /dev/null
echo >"$text"
expect 2 '--prompt-file: the prompt is empty' generate "$nowhere" --prompt-file "$text"
expect 2 '--prompt-file: the prompt is empty' chat "$nowhere" --prompt-file -
expect 1 'k3: /nonexistent: cannot be opened: No such file' generate "$nowhere" --prompt-file /nonexistent
expect 1 'k3: /nonexistent: cannot be opened: No such file' chat "$nowhere" --system-file /nonexistent
expect 1 "k3: $scratch: cannot be read: Is a directory" generate "$nowhere" --prompt-file "$scratch"
"$program" generate "$nowhere" --prompt-file - <&- >"$scratch/out" 2>"$scratch/err"
same 'a closed standard input' "$(cat "$scratch/err")" 'k3: standard input: cannot be read: Bad file descriptor'
expect 2 'only one of them can be standard input' chat "$nowhere" --system-file - --prompt-file -
expect 2 '--system and --system-file exclude' chat "$nowhere" --system a --system-file "$text"
expect 2 'one of --prompt, --prompt-file, --ids and --messages' generate "$nowhere" --prompt a --prompt-file "$text"
expect 2 '--ids: ""' generate "$nowhere" --ids 1,
expect 2 '--eos: "x"' generate "$nowhere" --ids 1 --eos x
echo text >"$text"
expect 2 '--prompt-file: ' generate "$1/tests/data/k3-tiny-5l" --prompt-file "$text"
# 16 MB are read, no more, and of what has no end no more either.
head -c $((16 << 20)) /dev/zero | tr '\0' a >"$text"
expect 2 'tokens, above max_position_embeddings' generate "$model" --prompt-file "$text"
echo >>"$text"
expect 1 "k3: $text: has more than 16 MB, the longest that is read" generate "$nowhere" --prompt-file "$text"
for option in --prompt-file --messages; do
  timeout 60 "$program" generate "$nowhere" $option - </dev/zero >"$scratch/out" 2>"$scratch/err"
  same "exit status of an endless $option" "$?" 1
  same "what is said of it" "$(grep -cE '^k3: standard input: has more than (16|256) MB' "$scratch/err")" 1
done

echo "$checks checks, $failures failed"
[ "$failures" = 0 ]
