#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The Meson consumer, with k3 as a subproject and with k3 installed.
# shellcheck source=tests/packaging/common.sh
. "$(dirname "$0")/common.sh"

cp -R "$root/examples/consumers" "$scratch/consumers"
ln -s "$root" "$scratch/consumers/meson/subprojects/k3"
# k3 makes errors of warnings for itself only: a consumer with a warning still builds.
echo 'static int unused_in_a_consumer = 1;' >>"$scratch/consumers/rms_norm.cpp"
quietly meson setup "$scratch/with subproject" "$scratch/consumers/meson" --wrap-mode=nodownload
quietly meson compile -C "$scratch/with subproject"
check_programs "$scratch/with subproject"
targets=$(meson introspect --targets "$scratch/with subproject" | grep -o '"name": "[^"]*"' | sort | paste -sd ' ')
[ "$targets" = '"name": "rms_norm" "name": "tokens"' ] || fail "as a subproject k3 brings targets of its own: $targets"

# k3 brings no OpenMP of its own, as little as an installed one does.
sed -i "s/dependencies: \\[k3, openmp\\]/dependencies: k3/" "$scratch/consumers/meson/meson.build"
quietly meson setup "$scratch/serial" "$scratch/consumers/meson" --wrap-mode=nodownload
quietly meson compile -C "$scratch/serial" rms_norm
if threaded "$scratch/serial/rms_norm"; then fail "as a subproject k3 brings OpenMP with it"; fi
cp "$root/examples/consumers/meson/meson.build" "$scratch/consumers/meson/meson.build"

# A consumer whose standard is too old is told that it is the consumer's.
sed -i "s/cpp_std=c++20/cpp_std=c++17/" "$scratch/consumers/meson/meson.build"
if meson setup "$scratch/old" "$scratch/consumers/meson" --wrap-mode=nodownload >"$scratch/output" 2>&1; then
  [ "$(printf '%s\n' 1.3.0 "$(meson --version)" | sort -V | head -n 1)" = 1.3.0 ] ||
    fail "a consumer in C++17 was configured"
else
  grep 'ERROR' "$scratch/output" | grep -q 'k3 needs C++20 or newer in the project that uses it' ||
    fail "the error does not say whose standard is too old: $(cat "$scratch/output")"
fi
cp "$root/examples/consumers/meson/meson.build" "$scratch/consumers/meson/meson.build"

rm "$scratch/consumers/meson/subprojects/k3"
install_k3 "$scratch/moved"
export PKG_CONFIG_PATH=$scratch/moved/share/pkgconfig
quietly meson setup "$scratch/with installed" "$scratch/consumers/meson" --wrap-mode=nofallback
quietly meson compile -C "$scratch/with installed"
check_programs "$scratch/with installed"
echo "built and run with k3 as a subproject and installed"
