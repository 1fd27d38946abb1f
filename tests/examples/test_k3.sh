#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The program k3: makes checkpoints of every member of the family, inspects and decodes them; exit status, what goes
# where, the forms of its output. Called with the source root; K3_EXAMPLES is the folder of the built programs.
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

# has WHAT WORDS: the last run's standard output has WORDS.
has() {
  checks=$((checks + 1))
  if ! grep -qF -- "$2" "$scratch/out"; then
    echo "$1: no \"$2\" in the output"
    failures=$((failures + 1))
  fi
}

# Mistakes in the call.
expect 2 'subcommand'
expect 2 '"--frob" is no subcommand' --frob
expect 2 '"bogus" is no subcommand' bogus
for threads in 0x10 +1 4097; do
  expect 2 "--threads: \"$threads\" is not a number from 0 to 4096" generate "$model" --ids 1 "--threads=$threads"
done
expect 2 '--host-memory' generate "$model" --ids 1 --host-memory ''
expect 2 '--max-new: a reply needs' chat "$model" --max-new 0
expect 2 '--frob' inspect "$model" --frob
expect 2 'MODEL_DIR' inspect
expect 2 '--gpus: at least 1' inspect "$model" --gpus 0
same --version "$("$program" --version)" "k3 $(sed -n "s/^  version: '\(.*\)',/\1/p" "$1/meson.build")"
expect 2 '--ids: 2048 is outside the vocabulary of 2048' generate "$model" --ids 5,2048 --max-new 1
expect 2 '--context: "x"' inspect "$model" --context x
expect 2 'one of --prompt, --prompt-file, --ids and --messages' generate "$model"
expect 2 'one of --prompt, --prompt-file, --ids and --messages' generate "$model" --prompt a --ids 1
expect 2 '--chat and --markup need --prompt' generate "$model" --ids 1 --chat
expect 2 'exclude each other' generate "$model" --prompt a --chat --markup
expect 2 '--no-think needs --chat' generate "$model" --prompt a --no-think
expect 2 '--max-new: "-1"' generate "$model" --prompt a --max-new=-1
expect 2 'the prompt is empty' generate "$model" --prompt ''
expect 2 'max_position_embeddings' generate "$model" --prompt a --max-new 4096
expect 2 'has no tokenizer' generate "$1/tests/data/k3-tiny-5l" --prompt a
expect 2 '--like' make-checkpoint "$scratch/x" --like kimi-k4
expect 2 '--batch: at least 1' inspect "$model" --batch 0
expect 2 'at most 2^40 positions' inspect "$model" --context 4294967296 --batch 1048576
# A closed standard input is no file that the program opens later; a wrong environment is told before anything else.
"$program" chat "$model" <&- >"$scratch/out" 2>"$scratch/err"
same 'exit status of chat with a closed input' "$?" 1
same 'what chat says of a closed input' "$(tail -n 1 "$scratch/err")" 'k3: standard input cannot be read'
"$program" generate "$model" --prompt a --max-new 1 >&- 2>"$scratch/err"
same 'exit status of generate with a closed output' "$?" 1
K3_ATTNRES_MIX=x "$program" generate /nonexistent --ids 1 >"$scratch/out" 2>"$scratch/err"
same 'a wrong environment' "$(grep -c K3_ATTNRES_MIX "$scratch/err")" 1
# A key that nobody knows is named.
mkdir "$scratch/strange" && cp "$model"/*.safetensors "$model"/*.json "$scratch/strange"
sed -i '0,/{/s//{"brand_new": 3,/' "$scratch/strange/config.json"
expect 0 'config.json: brand_new is a key that was not read' generate "$scratch/strange" --ids 1 --max-new 1
expect 0 '' inspect "$scratch/strange"
has 'inspect with an unknown key' 'config.json: brand_new is a key that was not read'
# Mistakes in files.
expect 1 'is not a folder' inspect /nonexistent
expect 1 'is not a folder' generate /etc/passwd --prompt a
expect 1 'cannot be opened' generate "$model" --messages /nonexistent
expect 1 'has no tokenizer' chat "$1/tests/data/k3-tiny-5l"
echo '[{"role":"user","content":3}]' >"$scratch/bad.json"
expect 1 '[0].content: is a value of type number' generate "$model" --messages "$scratch/bad.json"
"$program" inspect "$model" >/dev/full 2>"$scratch/err"
same 'exit status with a full output' "$?" 1
"$program" generate "$model" --prompt a --max-new 50 >/dev/full 2>"$scratch/err"
same 'exit status of generate with a full output' "$?" 1

# Every member of the family at reduced size: made, looked at, decoded, by k3 and by greedy_decode alike.
small=(--layers 5 --experts 6 --hidden 64 --width 32 --dense 96 --heads 2 --vocab 768)
for like in kimi-k3 kimi-k3-0.40b kimi-k3-0.40b-mxfp4 kimi-k3-tiny-random kimi-linear-48b tiny; do
  sizes=("${small[@]}")
  [ $like = kimi-linear-48b ] || sizes+=(--latent 32)
  made=$scratch/$like
  expect 0 'MB of tensors' make-checkpoint "$made" --like "$like" "${sizes[@]}"
  expect 1 'nothing is ever overwritten' make-checkpoint "$made" --like "$like" "${sizes[@]}"
  expect 0 '' inspect "$made"
  has "inspect of $like" 'layer map (K KDA, M MLA; d dense, e experts): Kd Ke Ke Me Me'
  same "differences in $like" "$(grep -c differs "$scratch/out")" 0
  same "files of $like" "$(find "$made" -name 'model-*' | wc -l)" 6
  expect 0 'stopped at' generate "$made" --ids 5,6,7 --max-new 6 --eos none --json
  tokens=$("$K3_EXAMPLES/greedy_decode" "$made" --ids 5,6,7 --max-new 6 --eos none --json 2>/dev/null |
    sed 's/.*"tokens":\[\(.*\)\],"stop.*/\1/')
  same "number of tokens of $like" "$(tr ',' '\n' <<<"$tokens" | wc -l)" 6
  expect 0 'stopped at' generate "$made" --prompt 'the rat' --max-new 4
  # Experts read on demand: the same tokens, down to the floor.
  "$program" generate "$made" --ids 5,6,7,8 --max-new 12 --eos none 2>/dev/null >"$scratch/mapped"
  expect 1 '--host-memory 1K is below the floor of ' generate "$made" --ids 5 --host-memory 1K
  floor=$(sed -n 's/.* (\([0-9]*\) bytes), the .* experts that one token uses in one layer$/\1/p' "$scratch/err")
  rounded=$(sed -n 's/.*the floor of \([0-9]*[KM]\{0,1\}\) .*/\1/p' "$scratch/err")
  expect 0 '' inspect "$made"
  has "the floor in inspect of $like" "least --host-memory: $rounded ("
  for memory in 0 $((floor - 1)); do
    expect 1 "--host-memory $memory is below the floor of $rounded ($floor bytes), the" \
      generate "$made" --ids 5 --host-memory "$memory"
    same "lines on a budget of $memory" "$(wc -l <"$scratch/err"), $(wc -c <"$scratch/out")" '1, 0'
    expect 1 "--host-memory $memory is below the floor of $rounded ($floor bytes), the" \
      chat "$made" --host-memory "$memory"
  done
  for memory in "$floor" "$rounded" 1G auto; do
    expect 0 'hit rate' generate "$made" --ids 5,6,7,8 --max-new 12 --eos none --host-memory "$memory"
    same "tokens of $like with --host-memory $memory" "$(cat "$scratch/out")" "$(cat "$scratch/mapped")"
  done
done
expect 0 '' generate "$model" --prompt a --max-new 3 --host-memory 1M --json
has 'statistics of streaming' '"expert_hit_rate":'
expect 0 'hit rate' chat "$model" --host-memory 1M
printf 'a\nb\nc\n' | "$program" chat "$model" --max-new 1 --json >"$scratch/out" 2>/dev/null
has 'replies of one token have no rate' '"new_tokens":3,'
has 'replies of one token have no rate' '"tokens_per_second":0.00,'
expect 1 '--host-memory 1K is below the floor of 58K (59136 bytes)' generate "$model" --prompt a --host-memory 1K
# What a token uses in all layers is told from what it uses in one.
expect 0 '' inspect "$model"
has 'what a token uses' 'one token uses 470,016 bytes of experts, 58,752 in each of 8 layers'
has 'the floor' 'least --host-memory: 58K (59,136 bytes), the 4 experts of one token in one layer'
expect 2 '--host-memory: "8X" is not a number of bytes' generate "$model" --prompt a --host-memory 8X
expect 2 '--gpu-memory: only with --backend cuda' generate "$model" --prompt a --gpu-memory 1G
expect 2 '--host-memory: "G" is not' generate "$model" --prompt a --host-memory G
expect 0 '' make-checkpoint "$scratch/one" --like tiny --shards 1 --tokenizer "$model" --vocab 2048
same 'a copied vocabulary' "$(cmp "$scratch/one/tiktoken.model" "$model/tiktoken.model" && echo same)" same
expect 0 'hollow files, in place of 7940.610 MB of tensors' make-checkpoint "$scratch/hollow" --like kimi-k3 \
  --layers 2 --experts 4 --vision --hollow
expect 0 '' inspect "$scratch/hollow" --gpus 8 --batch 4 --context 1000
has 'inspect with a vision tower' 'passed over'
has 'memory' 'on each of 8 GPUs'

# The released model at its true size, without its weights: the published numbers.
expect 0 '' make-checkpoint "$scratch/full" --like kimi-k3 --vision --hollow
expect 0 '' inspect "$scratch/full" --context 1000 --batch 2 --json
python3 - "$scratch/out" <<'END' || failures=$((failures + 1))
import json, sys
got = json.load(open(sys.argv[1]))
assert got["files"] == 96 and got["vision"] == {"tensors": 168, "bytes": 894717952}, got
assert got["found"] == got["expected"] and got["found"]["U8"]["tensors"] == 494592, got
memory = got["memory"]
assert memory["trunk"] == 1559965606912 - 1446456066048 and memory["experts"] == 1446456066048, memory
assert memory["one_expert"] == 17547264 and memory["experts_of_token"] == 16 * 92 * 17547264, memory
assert memory["least_host_memory"] == 16 * (17547264 + 64), memory  # each on a multiple of 64 bytes
assert memory["kda_states"] == 2 * (434110464 + 15261696) and memory["mla_latents"] == 2 * 1000 * 27648, memory
END

# A conversation that the model has no positions for is not told to ask for more.
cp -r "$scratch/tiny" "$scratch/short"
sed -i 's/"max_position_embeddings": *[0-9]*/"max_position_embeddings": 50/' "$scratch/short/config.json"
printf 'a\nb\nc\n' | "$program" chat "$scratch/short" >/dev/null 2>"$scratch/err"
same 'what is said of a full model' "$(tail -n 1 "$scratch/err")" \
  'k3: the context of 50 tokens is full, all the positions that the model has'

# A safetensors file that is not the model's is named; decoding does without it.
cp -r "$scratch/tiny" "$scratch/stray"
cp "$scratch/stray/model-00001-of-00006.safetensors" "$scratch/stray/model-00001-of-00002.safetensors"
expect 0 '' inspect "$scratch/stray"
has 'a stray file' 'wrong: model-00001-of-00002.safetensors is a safetensors file, but not one of this model'
expect 0 '' inspect "$scratch/stray" --json
has 'a stray file in JSON' '"stray_safetensors":["model-00001-of-00002.safetensors"]'
expect 0 '' generate "$scratch/stray" --ids 1 --max-new 1

# The tokenizer's own limit is shown, and what goes past it is warned of.
cp -r "$scratch/tiny" "$scratch/limited"
sed -i 's/^{/{"model_max_length": 7,/' "$scratch/limited/tokenizer_config.json"
expect 0 '' inspect "$scratch/limited"
has 'the limit' '(model_max_length of the tokenizer 7)'
expect 0 'k3: up to 8 tokens, above model_max_length of tokenizer_config.json, 7' \
  generate "$scratch/limited" --ids 1,2 --max-new 6
expect 0 '' generate "$scratch/limited" --ids 1,2 --max-new 5
same 'no warning at the limit' "$(grep -c model_max_length "$scratch/err")" 0

# The first thing that is wrong, by file, tensor and byte.
cp -r "$scratch/tiny" "$scratch/cut"
truncate -s -1 "$scratch/cut/model-00003-of-00006.safetensors"
expect 1 'model-00003-of-00006.safetensors: ' inspect "$scratch/cut"
has 'geometry of a damaged checkpoint' 'hidden 64'
same 'files of a damaged checkpoint that are passed over' "$(grep -c 'passed over: model-' "$scratch/out")" 0
expect 0 '' inspect "$scratch/tiny" --json
cp "$scratch/out" "$scratch/whole.json"
expect 1 'end beyond the file' inspect "$scratch/cut" --json
python3 - "$scratch/out" "$scratch/whole.json" <<'END' || failures=$((failures + 1))
import json, sys
got, whole = (json.load(open(name)) for name in sys.argv[1:])
assert got["expected"] == whole["expected"], (got["expected"], whole["expected"])
assert got["problem"]["file"].endswith("model-00003-of-00006.safetensors"), got["problem"]
assert got["problem"]["tensor"].startswith("language_model.model.layers.2."), got["problem"]
assert isinstance(got["problem"]["byte"], int) and "found" not in got and got["expected"]["U8"]["tensors"] == 4 * 6 * 6
END
# A configuration that asks for more experts than can be counted in the time.
cp -r "$scratch/tiny" "$scratch/vast"
sed -i 's/"num_experts": *[0-9]*/"num_experts": 2000000000/' "$scratch/vast/config.json"
begin=$SECONDS
expect 1 'expected [2000000000, ' inspect "$scratch/vast"
expect 1 'expected [2000000000, ' inspect "$scratch/vast" --json
same 'whether a vast configuration is refused at once' "$((SECONDS - begin < 20))" 1
cp -r "$scratch/tiny" "$scratch/unknown"
sed -i 's/layers\.1\.input_layernorm/layers.1.input_layernerm/' "$scratch/unknown/"model*
expect 1 'layers.1.input_layernorm.weight: is missing' inspect "$scratch/unknown"
has 'census of a checkpoint with a strange tensor' 'BF16'
rm "$scratch/cut/model-00002-of-00006.safetensors"
expect 1 'there is no such file' inspect "$scratch/cut"
expect 1 'there is no such file' generate "$scratch/cut" --ids 1
expect 0 '' inspect "$model" --json
python3 - "$scratch/out" <<'END' || failures=$((failures + 1))
import json, sys
got = json.load(open(sys.argv[1]))
assert got["problem"] is None and got["found"] == got["expected"] and got["files"] == 3, got
parts = ("trunk", "experts", "kda_states", "mla_latents", "workspace")
assert got["memory"]["all"] == sum(got["memory"][part] for part in parts)
assert "train" in got["other_files"]
END

# Text, replies and their forms.
prompt='It is a truth universally acknowledged'
expect 0 'stopped at the requested length' generate "$model" --prompt "$prompt" --max-new 20
expected=$("$K3_EXAMPLES/greedy_decode" "$model" --prompt "$prompt" --max-new 20 2>/dev/null)
same 'text' "$(cat "$scratch/out")" "$expected"
expect 0 'stopped at an end token' generate "$model" --prompt "$prompt" --max-new 200 --eos 1794,44,261,13
expect 0 '' generate "$model" --prompt Hello --chat --max-new 30 --json
expect 0 '' generate "$model" --prompt Hello --chat --max-new 30
same 'first line of a reply' "$(head -n 1 "$scratch/out")" '<think>'
expect 0 '' generate "$model" --prompt Hello --chat --no-think --max-new 30
same 'thinking in a reply without' "$(grep -c '<think>' "$scratch/out")" 0
echo '{"thinking":false,"messages":[{"role":"user","content":"Hello"}]}' >"$scratch/chat.json"
cp "$scratch/out" "$scratch/by-prompt"
expect 0 '' generate "$model" --messages "$scratch/chat.json" --max-new 30
same 'the same conversation as JSON' "$(cat "$scratch/out")" "$(cat "$scratch/by-prompt")"
python3 - "$program" "$model" "$scratch/tiny" <<'END' || failures=$((failures + 1))
import json, os, pty, select, signal, subprocess, sys, time
program, model, tiny = sys.argv[1:4]
try:
    for end in os.openpty():
        os.close(end)
except OSError as problem:
    sys.exit(f"this system gives no terminals to test with, which needs a devpts mounted at /dev/pts: {problem}")

def run(*arguments, stdin=b""):
    return subprocess.run([program, *arguments], input=stdin, capture_output=True, timeout=60, check=False)

# JSON lines: pieces, then statistics; every byte of output is UTF-8 although the model writes broken characters.
for arguments in (["--prompt", "x"], ["--prompt", "x", "--chat"], ["--prompt", "<|open|>x<|sep|>", "--markup"]):
    got = run("generate", tiny, *arguments, "--max-new", "200", "--eos", "none", "--json")
    lines = [json.loads(line) for line in got.stdout.decode("utf-8").splitlines()]
    assert all(set(line) == {"part", "text"} for line in lines[:-1]), lines
    assert lines[-1]["stop"] == "max_new" and lines[-1]["new_tokens"] == 200, lines[-1]
    assert not got.stdout.count(b"\x1b")
    run("generate", tiny, *arguments, "--max-new", "200", "--eos", "none").stdout.decode("utf-8")

# A conversation: two turns, the second knows the first; a full context is an error.
got = run("chat", model, "--max-new", "10", "--context", "400", stdin=b"Hello\n\nAgain")
assert got.returncode == 0 and got.stdout.decode().count("<think>") == 2, got
assert b"20 new tokens" in got.stderr, got.stderr
alone = run("chat", model, "--max-new", "10", stdin=b"Again\n").stdout
assert got.stdout.decode().endswith(alone.decode()) is False, "the second turn does not know the first"
got = run("chat", model, "--max-new", "10", "--context", "40", stdin=b"Hello\n" * 9)
assert got.returncode == 1 and b"context of 40 tokens is full" in got.stderr, got
got = run("chat", model, "--context", "200", "--json", stdin=b"Hello\nAgain\n")
lines = [json.loads(line) for line in got.stdout.splitlines()]
assert got.returncode == 1 and lines[-1]["stop"] == "context", got
assert [line["stop"] for line in lines if "turn" in line] == ["context"], got
got = run("inspect", model)
assert b"end tokens: 1794, 1793 ([EOS] of the tokenizer)\n" in got.stdout and b"gate above -5," in got.stdout, got
got = run("chat", model, "--system", "Be brief.", "--no-think", "--max-new", "5", "--json", stdin=b"a\nb\n")
lines = [json.loads(line) for line in got.stdout.splitlines()]
assert lines[-1]["new_tokens"] == 10 and lines[-1]["stop"] == "input", got
assert [line["turn"] for line in lines if "turn" in line] == [1, 2], got

# Ctrl-C: the token that is being made is finished, statistics are printed, status 130.
for command in (["generate", model, "--prompt", "Mr. Darcy", "--max-new", "3000", "--eos", "none"], ["chat", model]):
    child = subprocess.Popen([program, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stderr.readline()
    time.sleep(0.4)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 130, (command, child.returncode, err)
    assert b"new tokens" in err, err
    out.decode("utf-8")
    if command[0] == "generate":
        assert b"Ctrl-C" in err and len(out) > 10, (out, err)

# On a terminal thinking is dimmed and bars are drawn; elsewhere neither.
def terminal(*arguments, environment=None):
    child, handle = pty.fork()
    if child == 0:
        os.environ.pop("CI", None)
        os.execv(program, [program, *arguments])
    got = b""
    while True:
        try:
            part = os.read(handle, 65536)
        except OSError:
            break
        if not part:
            break
        got += part
    os.waitpid(child, 0)
    return got

long_prompt = "Mr. Darcy was a man. " * 100
seen = terminal("generate", model, "--prompt", long_prompt, "--chat", "--max-new", "5")
assert b"\x1b[2m" in seen and b"\x1b[22m" in seen, seen[-500:]
assert b"opening [" in seen and b"prompt [" in seen, seen[:500]
plain = run("generate", model, "--prompt", long_prompt, "--chat", "--max-new", "5")
assert b"\x1b" not in plain.stdout + plain.stderr and b"[=" not in plain.stderr, plain
END
checks=$((checks + 3))

echo "$checks checks, $failures failed"
[ "$failures" = 0 ]
