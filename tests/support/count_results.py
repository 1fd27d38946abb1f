# SPDX-License-Identifier: Apache-2.0
"""count_results.py TESTLOG: counts what a `meson test` run did and closes with `N passed, N failed`.

TESTLOG is Meson's testlog.json, one JSON object a line. A program with K3_TEST_COUNTS=cases in its environment counts
with its test cases, read from the summary that Catch2 prints; anything else counts as one. Exit 0 only where something
passed and nothing failed.
"""

import json
import re
import sys

ALL_PASSED = re.compile(r"^All tests passed \(\d+ assertions? in (\d+) test cases?\)$", re.MULTILINE)
SOME_FAILED = re.compile(r"^test cases: +(\d+)((?: +\| +\d+ [a-z ]+)*)$", re.MULTILINE)


def catch_counts(output):
    """(passed, failed, skipped) of one Catch2 program, or None where it printed no summary."""
    found = ALL_PASSED.findall(output)
    if found:
        return int(found[-1]), 0, 0
    found = SOME_FAILED.findall(output)
    if not found:
        return None
    parts = {name.strip(): int(count) for count, name in re.findall(r"\| +(\d+) ([a-z ]+)", found[-1][1])}
    failed, skipped = parts.get("failed", 0), parts.get("skipped", 0)
    return int(found[-1][0]) - failed - skipped, failed, skipped


def counts(test):
    """(passed, failed, skipped) of one line of the log."""
    good = test["result"] in ("OK", "EXPECTEDFAIL")
    if test["result"] == "SKIP":
        return 0, 0, 1
    if test["env"].get("K3_TEST_COUNTS") != "cases":
        return (1, 0, 0) if good else (0, 1, 0)
    cases = catch_counts(test.get("stdout") or "")
    if cases is None or sum(cases) == 0:
        return 0, 1, 0  # it crashed before the summary, or ran nothing
    passed, failed, skipped = cases
    if not good and failed == 0:
        failed = 1  # all cases passed, and then it crashed, leaked or was stopped
    return passed, failed, skipped


def main(path):
    total = [0, 0, 0]
    notes, failures, skips = [], [], []
    try:
        with open(path, encoding="utf-8", errors="replace") as log:
            tests = [json.loads(line) for line in log if line.strip()]
    except FileNotFoundError:
        tests = []
    for test in tests:
        passed, failed, skipped = counts(test)
        total = [a + b for a, b in zip(total, (passed, failed, skipped))]
        output = test.get("stdout") or ""
        notes += re.findall(r"^note: .*$", output, re.MULTILINE)
        if failed:
            failures.append(test["name"])
        if test["result"] == "SKIP":
            skips.append(test["name"] + ": " + (output.strip().splitlines() or ["no reason given"])[-1])
        elif skipped:
            skips.append(f"{test['name']}: {skipped} test cases")
    for note in notes:
        print(note)
    for skip in skips:
        print("skipped", skip)
    for failure in failures:
        print("failed", failure)
    if total[0] + total[1] == 0:
        print("no test ran")
    print(f"{total[0]} passed, {total[1]} failed")
    return 0 if total[0] > 0 and total[1] == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
