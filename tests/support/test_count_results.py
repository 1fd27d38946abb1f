# SPDX-License-Identifier: Apache-2.0
"""Tests of count_results.py, on lines as Meson and Catch2 (2.13 and 3) write them."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.dont_write_bytecode = True
from count_results import catch_counts, counts, main  # noqa: E402


def line(result, stdout="", count="cases"):
    return {"name": "x", "result": result, "stdout": stdout, "env": {"K3_TEST_COUNTS": count}}


CASES = [
    (line("OK", "All tests passed (1 assertion in 1 test case)\n\n"), (1, 0, 0)),
    (line("OK", "All tests passed (1234 assertions in 17 test cases)\n"), (17, 0, 0)),
    (line("FAIL", "test cases: 3 | 1 passed | 2 failed\nassertions: 9 | 7 passed | 2 failed\n"), (1, 2, 0)),
    (line("FAIL", "test cases:  12 |  11 passed |  1 failed\n"), (11, 1, 0)),
    (line("OK", "test cases: 4 | 3 passed | 1 skipped\n"), (3, 0, 1)),
    (line("OK", "test cases: 2 | 1 passed | 1 failed as expected\n"), (2, 0, 0)),
    (line("OK", "test cases: 1 | 1 failed\n", count=""), (1, 0, 0)),
    (line("FAIL", "All tests passed (1 assertion in 1 test case)\nERROR: LeakSanitizer\n"), (1, 1, 0)),
    (line("FAIL", "Segmentation fault\n"), (0, 1, 0)),
    (line("TIMEOUT"), (0, 1, 0)),
    (line("OK", "No tests ran\n"), (0, 1, 0)),
    (line("SKIP", "no cmake\n", count=""), (0, 0, 1)),
    (line("FAIL", count=""), (0, 1, 0)),
]

wrong = [(test, want, counts(test)) for test, want in CASES if counts(test) != want]
for test, want, got in wrong:
    print(f"{test}: got {got}, want {want}")
assert catch_counts("nothing") is None
assert main("/no/such/testlog.json") == 1, "no test at all must fail"
sys.exit(1 if wrong else 0)
