# SPDX-License-Identifier: Apache-2.0
"""snippets.py ROOT: every piece of code in the README and in docs/ is that of the file it is said to come from, every
link leads somewhere, and every accuracy bound in a table row stands in a file that the row's last column with links
links to: that of the test where a table says which tests the bounds."""
import re
import sys
import tempfile
import textwrap
from pathlib import Path

sys.dont_write_bytecode = True
from doc_blocks import blocks, pages  # noqa: E402

OUTSIDE = re.compile(r"^[a-z]+:")


def examples(root):
    """The marked regions of the example programs by name; a name used twice has two."""
    regions = {}
    for path in sorted((root / "examples").rglob("*.c*")):
        if path.suffix not in (".cpp", ".cu"):
            continue
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"^ *// example-begin (\S+)\n(.*?)^ *// example-end \1$", text, re.M | re.S):
            regions.setdefault(match.group(1), []).append(textwrap.dedent(match.group(2)))
    return regions


def squeezed(text):
    return re.sub(r"\s+", "", text)


def check_quote(root, block):
    source = root / block.source
    if not source.is_file():
        return f"there is no file {block.source}"
    rest = squeezed(source.read_text(encoding="utf-8"))
    for piece in re.split(r"^ *(?://|#) \.\.\.$", block.text, flags=re.M):
        wanted = squeezed(piece)
        at = rest.find(wanted)
        if at < 0:
            return f"{block.source} does not have, in this order:\n{textwrap.indent(piece.strip(), '    ')}"
        rest = rest[at + len(wanted):]
    return None


def check_block(root, block, regions):
    if block.language == "unclosed":
        return "the block is not closed"
    if block.source.startswith("example="):
        found = regions.get(block.source[len("example="):], [])
        if len(found) != 1:
            return f"{len(found)} examples are marked with this name"
        return None if found[0] == block.text else "differs from the example:\n" + textwrap.indent(found[0], "    ")
    if "/" in block.source and "=" not in block.source:
        return check_quote(root, block)
    return "C++ must say where it comes from" if block.language in ("cpp", "cuda") else None


def prose(path):
    """The page's text outside of blocks, as (line number, line)."""
    inside = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def check_links(path):
    for number, line in prose(path):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            file = target.partition("#")[0]
            if file and not OUTSIDE.match(target) and not (path.parent / file).exists():
                yield f"{path}:{number}: the link {target} leads nowhere"


def check_bounds(path):
    for number, line in prose(path):
        if not line.startswith("|"):
            continue
        cells = [re.findall(r"\]\(([^)\s#]+\.[chp]pp)\)", cell) for cell in re.split(r"(?<!\\)\|", line)]
        files = [path.parent / target for target in next((cell for cell in reversed(cells) if cell), [])]
        text = " ".join(f.read_text(encoding="utf-8") for f in files if f.is_file())
        numbers = set(re.findall(r"\b\d+(?:\.\d+)?e-\d+", text))
        for bound in re.findall(r"\b\d+(?:\.\d+)?e-\d+", line):
            if files and bound not in numbers:
                yield f"{path}:{number}: the bound {bound} is in none of the files that its row's last column links to"


def problems(root):
    regions = examples(root)
    for path in pages(root):
        for block in blocks(path):
            if problem := check_block(root, block, regions):
                yield f"{block}: {problem}"
        yield from check_links(path)
        yield from check_bounds(path)


def check_planted():
    """The checks must be able to fail: a small project in which each of them has something to find."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("docs", "examples"):
            (root / name).mkdir()
        (root / "examples" / "b.cpp").write_text("// <= 1e-7\n")
        (root / "examples" / "a.cpp").write_text("  // example-begin a\n  int a = 1;\n  // example-end a\n// <= 1e-6\n")
        (root / "README.md").write_text("```cpp example=a\nint a = 1;\n```\n"
                                        "```cpp examples/a.cpp\nint   a\n// ...\n1;\n```\n"
                                        "[a](examples/a.cpp)\n| [a](examples/a.cpp) | 1e-6 |\n"
                                        "| [b](examples/b.cpp) | 1e-6 of Σ\\|x\\| | [a](examples/a.cpp) |\n")
        assert list(problems(root)) == [], "a correct page was refused"
        (root / "docs" / "bad.md").write_text("```cpp example=a\nint a = 2;\n```\n"
                                              "```cpp examples/a.cpp\nint b\n```\n```cpp\nx\n```\n"
                                              "[a](nowhere.md)\n| [a](../examples/a.cpp) | 1e-7 |\n"
                                              "| [a](../examples/a.cpp) | 1e-6 | [b](../examples/b.cpp) |\n"
                                              "```cpp example=b\n```\n```\n")
        found = len(list(problems(root)))
        assert found == 8, f"{found} of 8 planted mistakes were noticed"


def main():
    check_planted()
    root = Path(sys.argv[1])
    found = list(problems(root))
    for problem in found:
        print(problem)
    count = sum(1 for path in pages(root) for block in blocks(path) if block.source)
    print(f"{len(pages(root))} pages, {count} blocks with a source, {len(found)} problems")
    return 1 if found or count == 0 else 0


sys.exit(main())
