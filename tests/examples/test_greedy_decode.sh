#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The command line of greedy_decode: exit status, what goes where, and the form of its JSON. Called with the source
# root; K3_EXAMPLES is the folder of the built programs.
set -uo pipefail
if [ ! -x "${K3_EXAMPLES-}/greedy_decode" ]; then
  echo "greedy_decode is not built"
  exit 77
fi
program=$K3_EXAMPLES/greedy_decode
model=$1/examples/data/austen
fixture=$1/tests/data/k3-tiny-5l
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/expect.sh"

expect 2 'either --prompt or --ids' "$model" --max-new 1
expect 2 'either --prompt or --ids' "$model" --max-new 1 --prompt a --ids 1
expect 2 '--logits needs --json' "$model" --max-new 1 --ids 1 --logits
expect 2 '--frob' "$model" --max-new 1 --ids 1 --frob
expect 2 '--max-new' "$model" --ids 1
expect 2 '--max-new: ""' "$model" --ids 1 --max-new ''
expect 2 '--ids: ""' "$model" --ids '' --max-new 1
for count in -1 -18446744073709551614 ' 2' +2 0x10 1.5 99999999999999999999 many; do
  expect 2 "--max-new: \"$count\"" "$model" --ids 1 "--max-new=$count"
done
for ids in '1,' '1, 2' +1 -1 1,,2 99999999999; do expect 2 '--ids' "$model" "--ids=$ids" --max-new 1; done
expect 2 '--eos: 99999' "$model" --ids 1 --max-new 1 --eos 99999
expect 2 'max_position_embeddings' "$model" --ids 1 --max-new 4096
expect 2 'has no tokenizer' "$fixture" --prompt a --max-new 1
expect 2 'the prompt is empty' "$model" --prompt '' --max-new 1
expect 2 '--ids: 2048 is outside the vocabulary of 2048' "$model" --ids 5,2048 --max-new 1
expect 1 'is not a folder' /nonexistent --prompt a --max-new 1
expect 1 'is not a folder' /etc/passwd --ids 1 --max-new 1
cp -r "$model" "$scratch/fifo" && rm "$scratch/fifo/tiktoken.model" && mkfifo "$scratch/fifo/tiktoken.model"
expect 1 'is not a regular file' "$scratch/fifo" --prompt a --max-new 1

"$program" "$model" --ids 5,17 --max-new 1000 --eos none >/dev/full 2>"$scratch/err"
same 'exit status with a full output' "$?" 1
same 'what a full output gives' "$(grep -c 'standard output cannot be written' "$scratch/err")" 1
"$program" --help >/dev/full 2>/dev/null
same 'exit status of --help with a full output' "$?" 1
same 'ids of a model without tokenizer' \
  "$("$program" "$fixture" --ids 1,2 --max-new 010 --eos none 2>/dev/null | wc -w)" 10
same 'tokens of --max-new 0' "$("$program" "$model" --ids 5 --max-new 0 --json 2>/dev/null)" \
  '{"prompt":[5],"tokens":[],"stop":"max_new"}'

"$program" "$model" --ids 5,17 --max-new 3 --json --logits 2>/dev/null >"$scratch/json"
python3 - "$scratch/json" <<'END' || failures=$((failures + 1))
import json, sys
text = open(sys.argv[1]).read()
got = json.loads(text)
assert list(got) == ["prompt", "tokens", "stop", "logits"], list(got)
assert text.count("\n") == 1 and got["prompt"] == [5, 17] and got["stop"] == "max_new"
assert len(got["tokens"]) == len(got["logits"]) == 3
for token, row in zip(got["tokens"], got["logits"]):
    assert len(row) == 2048 and max(range(2048), key=row.__getitem__) == token
digits = [len(number.split("e")[0].lstrip("-0.").replace(".", ""))
          for number in text[text.index("[[") + 2:text.index("]]")].replace("],[", ",").split(",")]
assert max(digits) == 9, f"at most {max(digits)} significant digits, not 9"
END
first=$("$program" "$model" --ids 5,17 --max-new 3 --json 2>/dev/null | sed 's/.*"tokens":\[\([0-9]*\),.*/\1/')
same 'a run that meets its end token' \
  "$("$program" "$model" --ids 5,17 --max-new 3 --json --eos "7,$first" 2>/dev/null)" \
  "{\"prompt\":[5,17],\"tokens\":[$first],\"stop\":\"eos\"}"
# An end token is not printed as text; the tokenizer's [EOS] is an end token. Standard error has speed and memory.
same 'text before an end token' "$("$program" "$model" --ids 5,17 --max-new 3 --eos "7,$first" 2>/dev/null)" ''
same 'a text that ends with [EOS]' "$("$program" "$model" --prompt 'THE END' --max-new 9 --json 2>"$scratch/err" |
  sed 's/.*"tokens"/"tokens"/')" '"tokens":[198,1793],"stop":"eos"}'
same 'text before [EOS]' "$("$program" "$model" --prompt 'THE END' --max-new 9 2>/dev/null | od -An -tx1)" ' 0a 0a'
same 'a summary' "$(grep -cE '; 2 new tokens, [0-9.]+ tokens/s; peak memory [0-9.]+ MB; stopped at' "$scratch/err")" 1
same 'what --help says of the exit status' "$("$program" --help | grep -c '^Exit status: 0; 2 .*; 1 ')" 1

# The faults on purpose: other tokens, but for those that are none.
faulty() { env "$@" "$program" "$model" --ids 5,17 --max-new 3 2>/dev/null; }
plain=$(faulty)
same 'the whole mixture' "$(faulty K3_ATTNRES_MIX=1)" "$plain"
for fault in K3_ATTNRES_MIX=0 K3_FORCE_EXPERT=0; do
  got=$(faulty "$fault")
  same "other tokens with $fault" "$([ -n "$got" ] && [ "$got" != "$plain" ] && echo yes)" yes
done

# A program without CUDA says so.
expect 2 '--backend cuda' "$model" --ids 1 --max-new 1 --backend cuda --threads 2
if ! grep -qa cudaStreamCreate "$program"; then
  expect 2 'was built without CUDA' "$model" --ids 1 --max-new 1 --backend cuda
fi

# Threads wait passively unless the environment says otherwise; OpenMP itself tells (where the program has it).
policy() {  # env ARGUMENT...
  OMP_DISPLAY_ENV=true "$@" "$program" "$model" --ids 5 --max-new 0 2>&1 |
    sed -n "s/.*OMP_WAIT_POLICY *= *'*\([A-Za-z]*\).*/\1/p" | tail -n 1
}
if [ -n "$(policy env OMP_WAIT_POLICY=active)" ]; then
  same 'the wait policy' "$(policy env -u OMP_WAIT_POLICY)" PASSIVE
  same 'a wait policy that was given' "$(policy env OMP_WAIT_POLICY=active)" ACTIVE
fi

# On a terminal the bar of opening is erased before anything else is written.
python3 - "$program" "$model" <<'END' || failures=$((failures + 1))
import os, re, subprocess, sys
try:
    terminal, end = os.openpty()
except OSError as problem:
    sys.exit(f"this system gives no terminals to test with, which needs a devpts mounted at /dev/pts: {problem}")
environment = {name: value for name, value in os.environ.items() if name != "CI"}
run = subprocess.Popen([*sys.argv[1:], "--ids", "5", "--max-new", "1"], stdout=subprocess.DEVNULL, stderr=end,
                       env=environment)
os.close(end)
said = b""
try:
    while part := os.read(terminal, 65536):
        said += part
except OSError:  # the other end is closed
    pass
assert run.wait() == 0 and re.search(rb"\d+/\d+\r\x1b\[K\d+ layers:", said), said
END

# A cache that there is no memory for: how much it would need.
cp -r "$model" "$scratch/long"
sed -i 's/"max_position_embeddings": [0-9]*/"max_position_embeddings": 2147483647/' "$scratch/long/config.json"
confined() (
  ulimit -v 4000000
  timeout 60 "$program" "$@" >/dev/null 2>"$scratch/err"
)
if confined --version; then  # a program with a sanitizer does not start in so little
  confined "$scratch/long" --ids 900 --max-new 100000000 --threads 1
  same 'exit status without memory' "$?" 1
  same 'what is said without memory' "$(grep -cE 'up to 100000001 positions needs [0-9]{11,} bytes' "$scratch/err")" 1
fi

echo "$checks checks, $failures failed"
[ "$failures" = 0 ]
