#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The pkg-config consumer, with k3 installed and then moved.
# shellcheck source=tests/packaging/common.sh
. "$(dirname "$0")/common.sh"
command -v pkg-config >/dev/null 2>&1 || skip "pkg-config is not installed"

install_k3 "$scratch/moved"
export PKG_CONFIG_PATH=$scratch/moved/share/pkgconfig
cp -R "$root/examples/consumers" "$scratch/consumers"
quietly "$scratch/consumers/pkgconfig/build.sh"
check_programs "$scratch/consumers/pkgconfig"
version=$(sed -n "s/^  version: '\(.*\)',/\1/p" "$root/meson.build")
[ "$(pkg-config --modversion k3)" = "$version" ] || fail "k3.pc has another version"
case $(pkg-config --cflags k3) in
  *nlohmann* | *onig*) fail "k3 alone must not need the libraries of k3-io" ;;
esac
# shellcheck disable=SC2046  # flags are words
quietly "${CXX:-g++}" -std=c++20 $(pkg-config --cflags k3) "$root/examples/consumers/rms_norm.cpp" -o "$scratch/serial"
if threaded "$scratch/serial"; then fail "k3.pc brings OpenMP with it: the other ways to find k3 do not"; fi
echo "built and run with k3.pc and k3-io.pc"
