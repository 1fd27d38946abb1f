#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ctrl-C where k3 is not yet decoding: it ends soon, with 130, says nothing and leaves nothing. Called with the source
# root; K3_EXAMPLES is the folder of the built programs, K3_FAKE_GPU_PROGRAM is k3 with a stand-in for a GPU.
set -uo pipefail
if [ ! -x "${K3_EXAMPLES-}/k3" ]; then
  echo "k3 is not built"
  exit 77
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$K3_EXAMPLES/k3" make-checkpoint "$scratch/full" --like kimi-k3 --layers 24 --hollow 2>/dev/null || exit 1
python3 - "$K3_EXAMPLES/k3" "${K3_FAKE_GPU_PROGRAM-}" "$1/examples/data/austen" "$scratch" <<'END_OF_PROGRAM'
import fcntl, os, pathlib, re, select, signal, subprocess, sys, time
program, fake, austen, scratch = sys.argv[1:5]
full = scratch + "/full"
failures = 0
environment = {name: value for name, value in os.environ.items() if name != "CI"}

def wait_for(what, child, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        assert child.poll() is None, f"{child.args} has ended with {child.returncode}: {child.communicate()}"
        assert time.monotonic() < end, f"{child.args}: waited in vain"
        time.sleep(0.001)

def catches(child):
    """Whether Ctrl-C is already caught: before, it just ends the process."""
    def caught():
        text = pathlib.Path(f"/proc/{child.pid}/status").read_text()
        return int(re.search(r"SigCgt:\s*(\w+)", text).group(1), 16) >> (signal.SIGINT - 1) & 1
    return caught

def interrupted(arguments, *, run=program, ready=None, stdin=subprocess.DEVNULL, said=rb"", written=rb"", faults=None,
                seconds=20):
    """Starts k3, waits until Ctrl-C is caught and `ready(child)` is true, presses it; what was said must match."""
    global failures
    child = subprocess.Popen([run, *arguments], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             env={**environment, **(faults or {})})
    try:
        wait_for(catches(child), child)
        if ready:
            wait_for(lambda: ready(child), child)
        begin = time.monotonic()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
        took = time.monotonic() - begin
        problems = []
        if child.returncode != 130:
            problems.append(f"status {child.returncode}")
        if not re.fullmatch(said, err):
            problems.append(f"said {err!r}")
        if not re.fullmatch(written, out):
            problems.append(f"wrote {out[-200:]!r}")
        if took > seconds:
            problems.append(f"took {took:.1f} s")
        if problems:
            failures += 1
            print(f"k3 {' '.join(arguments)}: {', '.join(problems)}")
    finally:
        child.kill()

# Opening: at once, and when a third of the time has passed that it takes.
begin = time.monotonic()
subprocess.run([program, "inspect", full], capture_output=True, check=True)
third = (time.monotonic() - begin) / 3
for command in (["generate", full, "--ids", "1", "--max-new", "1"], ["chat", full], ["inspect", full],
                ["inspect", full, "--json"], ["generate", full, "--ids", "1", "--host-memory", "1G"],
                ["chat", full, "--host-memory", "1G"]):
    interrupted(command)
    interrupted(command, ready=lambda child, begin=time.monotonic(): time.monotonic() - begin > third)

# Waiting for a text.
fifo = scratch + "/fifo"
os.mkfifo(fifo)
for command in (["generate", austen, "--prompt-file"], ["chat", austen, "--prompt-file"],
                ["chat", austen, "--system-file"], ["generate", austen, "--messages"]):
    interrupted([*command, fifo])
    interrupted([*command, "-"], stdin=subprocess.PIPE)

# Moving to the GPU, without and with experts that are streamed.
layers = rb"\d+ layers: [^\n]*\nlayer map [^\n]*\n"
def after_layers(child):
    return select.select([child.stderr], [], [], 0)[0]
if fake:
    for command in (["generate", austen, "--ids", "1"], ["chat", austen], ["chat", austen, "--gpu-memory", "1M"]):
        interrupted([*command, "--backend", "cuda"], run=fake, ready=after_layers, said=layers,
                    faults={"K3_FAKE_GPU": "slow"}, seconds=5)

# A reader that does not read: the write that waits for it ends.
def pipe_is_full(child):
    fcntl.fcntl(child.stdout, 1031, 4096)  # F_SETPIPE_SZ
    return pathlib.Path(f"/proc/{child.pid}/wchan").read_text() in ("pipe_write", "anon_pipe_write")
command = ["generate", austen, "--ids", "5", "--max-new", "4000", "--eos", "none", "--json"]
try:
    interrupted(command, ready=pipe_is_full, said=layers + rb"([^\n]*\n)?", written=rb"(?s).*", seconds=5)
except (OSError, AssertionError) as problem:
    print("note: a full pipe was not tried:", problem)

# make-checkpoint: nothing is left of it, and what was there stays.
for number, arguments in enumerate((["--like", "kimi-linear-48b", "--layers", "4", "--experts", "24", "--vocab", "999"],
                                    ["--like", "kimi-k3", "--layers", "24", "--hollow"])):
    there = pathlib.Path(scratch, f"there{number}")
    (there / "empty").mkdir(parents=True)
    for out in ("new/a/b", "empty", "fresh"):
        begun = lambda child, out=out: any((there / out).glob("*.part"))
        # Hollow files are looked at only when all of them are made.
        interrupted(["make-checkpoint", str(there / out), *arguments], ready=begun, seconds=60)
        left = sorted(str(path.relative_to(there)) for path in there.rglob("*"))
        if left != ["empty"]:
            failures += 1
            print(f"make-checkpoint {out} {' '.join(arguments)} leaves {left}")

# On a terminal the bar is erased, and no line is left half written.
try:
    terminal, end = os.openpty()
except OSError as problem:
    sys.exit(f"this system gives no terminals to test with, which needs a devpts mounted at /dev/pts: {problem}")
child = subprocess.Popen([program, "generate", full, "--ids", "1"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                         stderr=end, env=environment)
os.close(end)
said = b""
while b"opening [" not in said:
    said += os.read(terminal, 1)
child.send_signal(signal.SIGINT)
try:
    while part := os.read(terminal, 65536):
        said += part
except OSError:  # the other end is closed
    pass
if child.wait(60) != 130 or not re.fullmatch(rb"(\ropening \[[= ]*\] \d+/\d+)+\r\x1b\[K", said):
    failures += 1
    print(f"on a terminal: status {child.returncode}, {said[-300:]!r}")
print(f"{failures} failed")
sys.exit(failures > 0)
END_OF_PROGRAM
