#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Code shown in the documentation is code that is compiled: see snippets.py. Called with the source root.
set -euo pipefail
exec python3 "$(dirname "$0")/snippets.py" "$1"
