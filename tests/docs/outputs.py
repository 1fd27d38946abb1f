# SPDX-License-Identifier: Apache-2.0
"""outputs.py ROOT PROGRAMS: the outputs shown in the README and in docs/ are what the example programs in the folder
PROGRAMS print, and the commands marked `sh run` succeed in a folder with include/ and examples/."""
import difflib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True
from doc_blocks import blocks, pages  # noqa: E402


def check_output(root, programs, block):
    name, *arguments = shlex.split(block.source[len("output="):])
    result = subprocess.run([str(programs / name), *arguments], cwd=root, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return f"{name} ended with {result.returncode}: {result.stderr}"
    if result.stdout == block.text:
        return None
    shown, printed = block.text.splitlines(), result.stdout.splitlines()
    return "\n".join(difflib.unified_diff(shown, printed, "page", name, lineterm=""))


def check_commands(root, block):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("include", "kernels", "examples", "tests"):
            (Path(folder) / name).symlink_to(root / name)
        # The pages say g++; another compiler of the build stands in where there is none.
        stand_in = 'g++() { $CXX "$@"; }\n' if not shutil.which("g++") and os.environ.get("CXX") else ""
        command = ["bash", "-euc", stand_in + block.text]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return f"ended with {result.returncode}: {result.stdout}{result.stderr}" if result.returncode != 0 else None


def main():
    root, programs = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    count = failed = 0
    for path in pages(root):
        for block in blocks(path):
            if block.source.startswith("output="):
                problem = check_output(root, programs, block)
            elif block.info == "sh run":
                problem = check_commands(root, block)
            else:
                continue
            count += 1
            if problem:
                failed += 1
                print(f"{block}: {problem}")
    print(f"{count} blocks run, {failed} problems")
    return 1 if failed or count == 0 else 0


sys.exit(main())
