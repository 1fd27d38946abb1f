#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Decodes text with the checkpoint that comes along: see --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"

usage() {
  cat <<'END'
usage: examples/run.sh [--no-install] [PROMPT] [N]

Installs with apt what is missing, builds in build/, and continues PROMPT by N tokens (60) with the checkpoint in
examples/data/austen. Text goes to standard output, everything else to standard error.

  --no-install   only name what is missing; exit 1 if anything is
END
}

install=yes
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --no-install) install=no ;;
    -h | --help) usage; exit 0 ;;
    --) shift; arguments+=("$@"); break ;;
    -?*) echo "examples/run.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
prompt=${arguments[0]-It is a truth universally acknowledged, that a single man}
count=${arguments[1]-60}
if [ ${#arguments[@]} -gt 2 ] || ! [[ $count =~ ^[0-9]+$ ]]; then
  usage >&2
  exit 2
fi

build=$root/build
{
  k3_require "$install"
  k3_configure "$root" "$build" -Dexamples=enabled
  meson compile -C "$build" greedy_decode
} >&2
exec "$build/examples/greedy_decode" "$root/examples/data/austen" --prompt "$prompt" --max-new "$count"
