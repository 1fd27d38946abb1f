#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Host standards newer than C++20, or with GNU extensions, configure and build, with nvcc too where it is; C++17 stops
# the configuration with one sentence that names C++20.
# shellcheck source=tests/packaging/common.sh
. "$(dirname "$0")/common.sh"

targets=(headers_version)
cuda=disabled
if command -v nvcc >/dev/null 2>&1; then
  cuda=enabled
  targets+=(nvcc_host_headers)
fi
# Meson 1.0 knows no name for C++23, so the flag is given as it is.
for standard in -Dcpp_std=gnu++20 '-Dcpp_std=none -Dcpp_args=-std=gnu++23'; do
  read -r -a options <<<"$standard"
  build=$scratch/${standard##*=}
  quietly meson setup "$build" "$root" "${options[@]}" -Dcuda_std=c++20 -Dcuda=$cuda -Dtests=enabled \
    -Dexamples=disabled -Dbench=disabled -Dbuildtype=debug
  quietly meson compile -C "$build" "${targets[@]}"
  quietly "$build/tests/headers_version"
done

refused() {  # option...
  local said
  if said=$(meson setup "$scratch/refused" "$root" -Dtests=disabled -Dexamples=disabled -Dbench=disabled "$@" \
    2>&1); then
    fail "$* should have stopped the configuration"
  fi
  rm -rf "$scratch/refused"
  grep 'ERROR' <<<"$said" | grep -q 'k3 needs C++20' || fail "$*: no sentence that names C++20:
$said"
}
refused -Dcpp_std=c++17 -Dcuda=disabled
refused -Dcpp_std=gnu++17 -Dcuda=disabled
if [ $cuda = enabled ]; then refused -Dcuda_std=c++17 -Dcuda=enabled; fi
echo "gnu++20 and gnu++23 build (CUDA $cuda), C++17 is refused"
