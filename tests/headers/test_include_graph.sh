#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Data flows one way: checks every #include of include/ and kernels/ against the rooms of the library, looks for cycles
# between files, and for headers from outside that a room must not need.
# shellcheck source=tests/headers/common.sh
. "$(dirname "$0")/common.sh"
root=$1

# room: the rooms whose headers it may include, beside its own and version.hpp.
rooms='
core:
geometry: core
formula: core geometry
ops: core geometry formula
model: core geometry formula ops
io: core geometry formula ops model
kernels: core geometry formula
cuda: core geometry formula ops model kernels
k3.hpp: core geometry formula ops model
k3.cuh: core geometry formula ops model cuda k3.hpp
version.hpp:
'

# `file included-file` for every #include, both below include/ or kernels/; what is not of k3 keeps its brackets.
edges() {  # root
  local folder
  for folder in include kernels; do
    [ -d "$1/$folder/k3" ] || continue
    (cd "$1/$folder" && grep -rHE '^ *# *include' --include='*.hpp' --include='*.cuh' k3) |
      sed -E 's|^([^:]+):[[:space:]]*#[[:space:]]*include[[:space:]]*([<"][^>"]*[>"]).*|\1 \2|; s|<(k3/[^>]*)>|\1|'
  done
}

# One line for each edge that the rooms forbid.
violations() {  # root
  edges "$1" | awk -v rooms="$rooms" '
    function room(path) { split(path, part, "/"); return part[2] }
    BEGIN {
      count = split(rooms, line, "\n")
      for (i = 1; i <= count; ++i) {
        if (split(line[i], half, ":") < 1 || half[1] == "") continue
        known[half[1]] = 1
        allowed[half[1], half[1]] = allowed[half[1], "version.hpp"] = 1
        words = split(half[2], word, " ")
        for (j = 1; j <= words; ++j) allowed[half[1], word[j]] = 1
      }
    }
    {
      from = room($1)
      if (!(from in known)) print $1 ": its folder is no room of the library"
      else if ($2 ~ /^"/) print $1 ": includes " $2 "; write <k3/...>"
      else if ($2 ~ /^k3\//) { if (!((from, room($2)) in allowed)) print $1 ": " from " must not know " $2 }
      else if (from == "io") {
        if ($2 !~ /^<([a-z_0-9]+|nlohmann\/json\.hpp|oniguruma\.h|fcntl\.h|unistd\.h|sys\/[a-z]+\.h)>$/)
          print $1 ": io must not need " $2
      }
      else if (from == "cuda" || from == "kernels" || from == "k3.cuh") next
      else if ($2 ~ /^<(span|ranges|regex|functional|filesystem|iostream|sstream)>$/)
        print $1 ": " $2 " compiles too slowly for a core header"
      else if ($2 !~ /^<([a-z_0-9]+|immintrin\.h|omp\.h)>$/) print $1 ": needs " $2 " beside the standard library"
    }'
  edges "$1" | awk '$2 ~ /^k3\// { print $1, $2 }' | { tsort 2>&1 >/dev/null || true; } | sed 's|^tsort: |cycle: |'
}

# Planted faults: each must be seen.
plant() {  # file, line, what must be said
  local copy=$scratch/planted
  rm -rf "$copy"
  mkdir "$copy"
  cp -R "$root/include" "$copy"
  mkdir -p "$(dirname "$copy/include/$1")"
  printf '%s\n' "$2" >>"$copy/include/$1"
  grep -qF "$3" <<<"$(violations "$copy")" || fail "a planted fault was not seen: $2 in $1"
}

found=$(violations "$root")
[ -z "$found" ] || fail "$found"
plant k3/core/types.hpp '#include <k3/ops/linear.hpp>' 'core must not know k3/ops/linear.hpp'
plant k3/ops/linear.hpp '#include <k3/io/tokenizer.hpp>' 'ops must not know k3/io/tokenizer.hpp'
plant k3/core/types.hpp '#include <nlohmann/json.hpp>' 'needs <nlohmann/json.hpp>'
plant k3/core/types.hpp '#include "view.hpp"' 'write <k3/...>'
plant k3/core/config.hpp '#include <k3/core/types.hpp>' 'cycle: '
plant k3/elsewhere/x.hpp '#include <vector>' 'no room'
echo "$(edges "$root" | wc -l) includes checked"
