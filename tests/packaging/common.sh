# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What the packaging tests share. They are called with the source root, and build outside of it.
set -euo pipefail
# shellcheck disable=SC2034  # read by the tests
root=$1
austen=$root/examples/data/austen

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -n "${K3_COMPILERS-}" ]; then export CXX=${K3_COMPILERS%%$'\n'*}; fi

fail() {
  printf '%s\n' "$*"
  exit 1
}

skip() {
  printf '%s\n' "$*"
  exit 77
}

# quietly COMMAND...: its output is printed only where it fails.
quietly() {
  "$@" >"$scratch/output" 2>&1 && return 0
  cat "$scratch/output"
  fail "failed: $*"
}

# Headers below k3/ of these folders, those that are there.
k3_headers() {
  local folder
  for folder; do
    if [ -d "$folder/k3" ]; then (cd "$folder" && find k3 -name '*.hpp' -o -name '*.cuh'); fi
  done | sort
}

# install_k3 PREFIX: installs into one place and moves it to PREFIX, since an installation must survive that.
install_k3() {
  quietly meson setup "$scratch/build" "$root" --prefix=/opt/k3 \
    -Dcuda=disabled -Dtests=disabled -Dexamples=disabled -Dbench=disabled
  quietly env DESTDIR="$scratch/stage" meson install -C "$scratch/build"
  mkdir -p "$(dirname "$1")"
  mv "$scratch/stage/opt/k3" "$1"
  [ "$(k3_headers "$root/include" "$root/kernels")" = "$(k3_headers "$1/include")" ] ||
    fail "the installed headers are not those of include/k3 and kernels/k3"
}

# Whether a program makes threads with OpenMP.
threaded() {
  nm -D "$1" | grep -E 'GOMP_parallel|__kmpc_fork_call' >/dev/null
}

# The programs of the consumers, run and checked.
check_programs() {  # folder
  local said
  said=$("$1/rms_norm") || fail "rms_norm computed something else: $said"
  threaded "$1/rms_norm" || fail "rms_norm was built without the threads that it asks for"
  [ -x "$1/tokens" ] || fail "the program of k3-io was not built"
  said=$("$1/tokens" "$austen" 'It is a truth universally acknowledged') || fail "tokens failed: $said"
}
