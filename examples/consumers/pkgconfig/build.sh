#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# k3 is taken from where pkg-config finds it: PKG_CONFIG_PATH=.../share/pkgconfig ./build.sh
# shellcheck disable=SC2046,SC2086  # flags are words
# -fopenmp gives threads; without it k3 runs on one.
set -eu
cd "$(dirname "$0")"
${CXX:-g++} -std=c++20 -O2 -fopenmp $(pkg-config --cflags k3) ../rms_norm.cpp -o rms_norm $(pkg-config --libs k3)
${CXX:-g++} -std=c++20 -O2 -fopenmp $(pkg-config --cflags k3-io) ../tokens.cpp -o tokens $(pkg-config --libs k3-io)
