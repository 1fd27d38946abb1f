#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Without a CUDA compiler on the path the default configuration succeeds, builds and runs; asking for CUDA is then an
# error.
# shellcheck source=tests/packaging/common.sh
. "$(dirname "$0")/common.sh"

path=
IFS=: read -r -a folders <<<"$PATH"
for folder in "${folders[@]}"; do
  [ -x "$folder/nvcc" ] || path=$path${path:+:}$folder
done
export PATH=$path
command -v meson >/dev/null 2>&1 || skip "nvcc and meson are in one folder"

quietly meson setup "$scratch/build" "$root" -Dbuildtype=debug
quietly meson compile -C "$scratch/build" headers_version
quietly meson test -C "$scratch/build" --no-rebuild headers/version
if meson setup "$scratch/refused" "$root" -Dcuda=enabled >"$scratch/output" 2>&1; then
  fail "-Dcuda=enabled without nvcc should have stopped the configuration"
fi
grep -q 'nvcc' "$scratch/output" || fail "the error does not name nvcc"
echo "configured, built and run without nvcc"
