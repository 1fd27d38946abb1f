#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Outputs shown in the documentation are what the programs print: see outputs.py. Called with the source root;
# K3_EXAMPLES is the folder of the example programs.
set -euo pipefail
if [ ! -x "${K3_EXAMPLES-}/continue_text" ]; then
  echo "the examples are not built"
  exit 77
fi
if [ -n "${K3_COMPILERS-}" ]; then export CXX=${K3_COMPILERS%%$'\n'*}; fi
exec python3 "$(dirname "$0")/outputs.py" "$1" "$K3_EXAMPLES"
