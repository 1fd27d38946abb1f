# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What the header tests share. They are called with the source root and read K3_COMPILERS, one command a line.
set -euo pipefail

compilers() { printf '%s\n' "${K3_COMPILERS:-c++}"; }

# The flags under which every header must be clean.
# shellcheck disable=SC2034  # read by the tests
strict_flags=(-std=c++20 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
# Where the libraries of k3/io are, if not where the system's are.
# shellcheck disable=SC2034
read -r -a include_flags <<<"$(pkg-config --cflags-only-I nlohmann_json oniguruma 2>/dev/null || true)"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# headers ROOT [io]: the library's headers as they are written in an #include; with `io`, those of k3/io only, else all
# others.
headers() {
  (cd "$1/include" && find k3 -name '*.hpp') |
    if [ "${2-}" = io ]; then grep '^k3/io/'; else grep -v '^k3/io/'; fi | sort
}

# Headers that the library takes from elsewhere, as lines of code. <omp.h> is left out: nothing here has OpenMP on.
foreign_includes() {  # root
  find "$1/include/k3" -name '*.hpp' -exec grep -h '^ *#include <' {} + | grep -v -e '<k3/' -e '<omp.h>' | sort -u |
    sed -E 's|^ *#include (<[^>]*>).*|#if __has_include(\1)\n#include \1\n#endif|'
}

# The CUDA half of the header tests runs where there is a CUDA compiler.
have_nvcc() { command -v nvcc >/dev/null; }

# The headers for CUDA sources, launching and kernels; those that are there.
device_headers() {  # root
  local folder
  for folder in include kernels; do
    if [ -d "$1/$folder/k3" ]; then (cd "$1/$folder" && find k3 -name '*.cuh'); fi
  done | sort
}

# Compiles a CUDA source from stdin for the device, which reads the host's code too, and keeps nothing.
nvcc_reads() {  # root, arguments
  nvcc -std=c++20 -arch=compute_90a -I"$1/include" -I"$1/kernels" "${@:2}" -ptx -x cu - -o /dev/null
}

fail() {
  printf '%s\n' "$*"
  exit 1
}
