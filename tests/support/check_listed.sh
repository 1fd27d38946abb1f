#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_listed.sh TESTS_DIR FILE...: fails where a test_*.cpp or test_*.sh below TESTS_DIR is not one of the FILEs,
# which would never run.
set -euo pipefail
tests=$1
shift

unlisted() {  # folder
  comm -23 <(cd "$1" && find . -name 'test_*.cpp' -o -name 'test_*.sh' | sed 's|^\./||' | sort) \
    <(printf '%s\n' "${@:2}" | sort)
}

left=$(unlisted "$tests" "$@")
if [ -n "$left" ]; then
  printf 'not listed in tests/meson.build: %s\n' "$left"
  exit 1
fi

# The check itself must be able to fail.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/room"
touch "$scratch/room/test_planted.cpp"
[ "$(unlisted "$scratch" "$@")" = room/test_planted.cpp ] || { echo "a planted unlisted file was not noticed"; exit 1; }
echo "all test files are listed"
