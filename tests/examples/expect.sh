# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# What the tests of programs share: sourced with `program` and `scratch` set; counts `checks` and `failures`.
program=${program:?} scratch=${scratch:?} failures=0 checks=0

# expect STATUS WORDS ARGUMENT...: the program ends with STATUS within a minute, and standard error has WORDS.
expect() {
  local status=$1 words=$2 got
  shift 2
  timeout 60 "$program" "$@" >"$scratch/out" 2>"$scratch/err" </dev/null
  got=$?
  checks=$((checks + 1))
  if [ "$got" != "$status" ] || { [ -n "$words" ] && ! grep -qF -- "$words" "$scratch/err"; }; then
    echo "${program##*/} $*: exit $got, expected $status with \"$words\"; it said: $(tail -n 1 "$scratch/err")"
    failures=$((failures + 1))
  fi
}
# same WHAT GOT WANT
same() {
  checks=$((checks + 1))
  if [ "$2" != "$3" ]; then
    echo "$1: got $2, expected $3"
    failures=$((failures + 1))
  fi
}
