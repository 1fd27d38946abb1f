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

rm "$scratch/consumers/meson/subprojects/k3"
install_k3 "$scratch/moved"
export PKG_CONFIG_PATH=$scratch/moved/share/pkgconfig
quietly meson setup "$scratch/with installed" "$scratch/consumers/meson" --wrap-mode=nofallback
quietly meson compile -C "$scratch/with installed"
check_programs "$scratch/with installed"
echo "built and run with k3 as a subproject and installed"
