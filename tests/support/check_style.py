# SPDX-License-Identifier: Apache-2.0
"""check_style.py ROOT: fails where a source file has a line over 120 columns, a tab, a blank at a line's end, no
newline at its end or no SPDX line among its first three, or where a C++ file has more than 400 lines. Lines of pages
may be longer. In a git checkout only files that git tracks are looked at."""

import pathlib
import subprocess
import sys
import tempfile

COLUMNS, LINES = 120, 400
CPP = {".hpp", ".cpp", ".cuh", ".cu"}
SOURCES = CPP | {".py", ".sh", ".md", ".in", ".wrap", ".build", ".gp"}
NAMES = {".clang-format", "run", "CMakeLists.txt", "meson_options.txt"}
FOLDERS = ("include", "kernels", "examples", "tests", "bench", "docs", ".ci")
DATA = ("tests/data/", "bench/results/")
# Code for a GPU, benchmarks and build files: checked for everything but the lengths of lines and files.
LENGTH_EXEMPT = ("bench/", "tests/cuda/", "kernels/", "meson.build", "meson_options.txt", ".ci/run")
LENGTH_EXEMPT_SUFFIXES = {".cu", ".cuh"}


def problems(path, name):
    """What is wrong with the file `path`, called `name` from the root of the project."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = text.split("\n")
    exempt = name.startswith(LENGTH_EXEMPT) or path.suffix in LENGTH_EXEMPT_SUFFIXES
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
        yield f"{name}: no SPDX line"
    if not text.endswith("\n"):
        yield f"{name}: no newline at its end"
    if path.suffix in CPP and len(lines) - 1 > LINES and not exempt:
        yield f"{name}: {len(lines) - 1} lines, more than {LINES}"
    for number, line in enumerate(lines, 1):
        if "\t" in line or "\r" in line:
            yield f"{name}:{number}: a tab or a carriage return"
        if line != line.rstrip(" \t"):
            yield f"{name}:{number}: a blank at its end"
        if len(line) > COLUMNS and not exempt and path.suffix != ".md":
            yield f"{name}:{number}: {len(line)} columns, more than {COLUMNS}"


def tracked(root):
    """What git tracks below `root`; None where `root` is no checkout of its own or git cannot tell."""
    if not (root / ".git").exists():
        return None
    try:
        listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return [root / name for name in listed.decode().split("\0") if name]


def candidates(root):
    folders = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
    found = tracked(root)
    return [*root.iterdir(), *folders] if found is None else found


def sources(root):
    """The project's own source files below `root`, with their names."""
    for path in sorted(candidates(root)):
        name = path.relative_to(root).as_posix()
        if path.is_file() and not name.startswith(DATA) and (path.suffix in SOURCES or path.name in NAMES):
            yield path, name


def check(root):
    found = [problem for path, name in sources(root) for problem in problems(path, name)]
    return len(list(sources(root))), found


def self_test():
    """The check must be able to fail: a file without fault, and one for each fault."""
    spdx = "// SPDX-License-Identifier: Apache-2.0\n"
    wide = "// " + "ü" * (COLUMNS - 3)
    planted = {
        "good.hpp": (spdx + wide + "\n", 0),
        "wide.hpp": (spdx + wide + "x\n", 1),
        "tab.py": ("#" + spdx[2:] + "\tpass\n", 1),
        "blank.sh": ("#!/bin/sh\n#" + spdx[2:] + "true \n", 1),
        "windows.cpp": (spdx + "int a;\r\n", 1),
        "newline.cpp": (spdx + "int a;", 1),
        "spdx.cpp": ("int a;\n", 1),
        "long.cpp": (spdx + "int a;\n" * LINES, 1),
        "wide.cu": (spdx + wide + "x\n", 0),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (text, faults) in planted.items():
            path = pathlib.Path(folder) / name
            path.write_bytes(text.encode())
            found = list(problems(path, name))
            assert len(found) == faults, (name, found)
        files_seen, found = check(pathlib.Path(folder))
        assert files_seen == len(planted) and len(found) == sum(faults for _, faults in planted.values()), found
        # The same as a checkout that tracks two of them.
        git = ["git", "-C", folder]
        try:
            subprocess.run([*git, "init", "-q"], capture_output=True, check=True)
            subprocess.run([*git, "add", "good.hpp", "tab.py"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return
        files_seen, found = check(pathlib.Path(folder))
        assert files_seen == 2 and len(found) == 1, found


self_test()
files, all_found = check(pathlib.Path(sys.argv[1]))
assert files > 0, "no source file was found"
for each in all_found:
    print(each)
print(f"{files} files, {len(all_found)} problems")
sys.exit(1 if all_found else 0)
