# SPDX-License-Identifier: Apache-2.0
"""What the two tests of the documentation read: the Markdown files of the project and the fenced blocks in them.

The words after a block's language say where its text comes from:
  ```cpp example=NAME   the lines between `// example-begin NAME` and `// example-end NAME` of one examples/*.cpp
  ```cpp include/k3/... pieces of that file in its order, `// ...` where something is left out; white space is free
  ```text output=NAME ARGUMENTS   what the example program NAME prints
  ```sh run             commands for a folder that has include/ and examples/, run by bash
Other blocks are formulae and commands that no test reads; C++ always says where it comes from.
"""
import re
from pathlib import Path


class Block:
    def __init__(self, path, line, info, text):
        self.path, self.line, self.info, self.text = path, line, info, text
        self.language, _, self.source = info.partition(" ")

    def __str__(self):
        return f"{self.path}:{self.line}"


def pages(root):
    root = Path(root)
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted((root / "examples").rglob("*.md"))]
    return [path for path in found if path.is_file()]


def blocks(path):
    result, start, info, lines = [], 0, None, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if info is None and (opening := re.match(r"```(.*)$", line)):
            start, info, lines = number, opening.group(1).strip(), []
        elif info is not None and line.startswith("```"):
            result.append(Block(path, start, info, "\n".join(lines) + "\n"))
            info = None
        elif info is not None:
            lines.append(line)
    if info is not None:
        result.append(Block(path, start, "unclosed", ""))
    return result
