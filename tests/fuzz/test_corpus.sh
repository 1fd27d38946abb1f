#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every fuzz target over its kept corpus, under the sanitizers, without libFuzzer. Called with the source root; the
# first of K3_COMPILERS compiles.
set -euo pipefail
if [ -n "${K3_COMPILERS-}" ]; then export CXX=${K3_COMPILERS%%$'\n'*}; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$1/tests/fuzz/run.sh" --replay --build-dir "$scratch"
