#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs every test: see --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"

usage() {
  cat <<'END'
usage: tests/run.sh [--no-install] [--build-dir DIR] [--suite NAME]... [--no-suite NAME]... [-DOPTION=VALUE]...

Installs with apt what is missing, configures and builds in build/ (or DIR), runs every test, and closes with the line
`N passed, N failed`; exits 0 only where something passed and nothing failed.

  --no-install      only name what is missing; exit 1 if anything is
  --build-dir DIR   build there
  --suite NAME      run only this suite: catch, support, headers, packaging, or a folder of tests/
  --no-suite NAME   leave this suite out
  -DOPTION=VALUE    a Meson option, such as -Db_sanitize=address
END
}

install=yes
build=$root/build
selection=()
options=()
while [ $# -gt 0 ]; do
  case $1 in
    --no-install) install=no ;;
    --build-dir | --suite | --no-suite)
      [ $# -gt 1 ] || { usage >&2; exit 2; }
      if [ "$1" = --build-dir ]; then build=$2; else selection+=("$1" "$2"); fi
      shift ;;
    -D?*=*) options+=("$1") ;;
    -h | --help) usage; exit 0 ;;
    *) echo "tests/run.sh: unknown argument: $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

k3_require "$install" catch2 cmake
k3_configure "$root" "$build" -Dtests=enabled -Dexamples=enabled ${options[@]+"${options[@]}"}
meson compile -C "$build" || {
  echo "the build failed: see above"
  echo "0 passed, 1 failed"
  exit 1
}

log=$build/meson-logs/testlog.json
rm -f "$log"
# The library reads these; the tests set them where they want them.
unset K3_ATTNRES_MIX K3_FORCE_EXPERT K3_CUDA_KDA K3_CUDA_MLA
# Threads that wait for each other must not spin on processors that other tests need.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-passive}
# Its exit status repeats what the count below says.
meson test -C "$build" --no-rebuild --print-errorlogs ${selection[@]+"${selection[@]}"} || true
exec python3 "$root/tests/support/count_results.py" "$log"
