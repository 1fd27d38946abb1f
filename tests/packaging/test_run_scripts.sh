#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What examples/run.sh and tests/run.sh do before they build: they name and install what is missing, and configure a
# build folder that is new, in use, broken or somebody else's.
# shellcheck source=tests/packaging/common.sh
. "$(dirname "$0")/common.sh"

# A machine of stand-ins: the programs of a base system, and those named in $have; apt-get records what it is asked.
machine=$scratch/machine
stand_in() {  # name, body
  printf '#!%s\n%s\n' "$BASH" "$2" >"$machine/$1"
  chmod +x "$machine/$1"
}
new_machine() {
  local program
  rm -rf "$machine"
  mkdir "$machine"
  for program in bash dirname cat sort head grep id env rm ls sed; do
    ln -s "$(command -v "$program")" "$machine/$program"
  done
}
on_machine() { env -u CXX PATH="$machine" "$BASH" "$@" >"$scratch/said" 2>&1 </dev/null; }
said() { grep -qF -- "$1" "$scratch/said" || fail "not said: $1
$(cat "$scratch/said")"; }

# Nothing there, and nothing to be installed.
everything='g++ meson ninja-build pkg-config nlohmann-json3-dev libonig-dev libcli11-dev'
new_machine
for script in examples tests; do
  if on_machine "$root/$script/run.sh" --no-install; then fail "$script/run.sh succeeded without a compiler"; fi
  said "missing: $everything"
done
said 'libcli11-dev catch2 cmake'

# Without apt the packages are named; without root and sudo the command is.
if on_machine "$root/examples/run.sh"; then fail "succeeded without apt"; fi
said 'There is no apt here'
stand_in apt-get 'exit 1'
rm "$machine/id"
stand_in id 'echo 1000'
if on_machine "$root/examples/run.sh"; then fail "succeeded without root"; fi
said "As root: apt-get install $everything"

# Exactly what is missing is asked for, through sudo here; an installation that brings nothing is noticed.
stand_in sudo 'exec "$@"'
stand_in apt-get "echo \"\$*\" >>'$scratch/asked'"
if on_machine "$root/tests/run.sh"; then fail "succeeded although apt-get installed nothing"; fi
said 'still missing after the installation'
grep -qx -- "install -y -qq --no-install-recommends $everything catch2 cmake" "$scratch/asked" ||
  fail "apt-get was asked: $(cat "$scratch/asked")"

# A Meson that is too old counts as missing, one that is new enough does not.
new_machine
stand_in meson 'echo 0.61.2'
if on_machine "$root/tests/run.sh" --no-install; then fail "succeeded with Meson 0.61"; fi
said 'missing: g++ meson ninja-build'
stand_in meson 'echo 1.10.0'
if on_machine "$root/tests/run.sh" --no-install; then fail "succeeded without a compiler"; fi
said 'missing: g++ ninja-build'

# Usage errors.
for arguments in '--unknown' 'text ten' 'text 1 2'; do
  read -r -a words <<<"$arguments"
  status=0
  "$root/examples/run.sh" "${words[@]}" >/dev/null 2>&1 || status=$?
  [ $status = 2 ] || fail "examples/run.sh $arguments: exit $status, not 2"
done

# From here on with the real programs, where all is there.
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"
k3_find_missing catch2 cmake
[ ${#k3_missing[@]} = 0 ] || fail "missing on this machine, or not recognised: ${k3_missing[*]}"
(
  cmake() { return 1; }
  k3_find_missing catch2 cmake
  [ "${k3_missing[*]}" = cmake ]
) || fail "it was not noticed that there is no cmake"
configure() { k3_configure "$root" "$build" -Dcuda=disabled -Dtests=disabled -Dexamples=disabled; }
configured() {
  (configure) >"$scratch/said" 2>&1 || fail "$1: $(cat "$scratch/said")"
  [ -f "$build/build.ninja" ] || fail "$1"
}

build="$scratch/new folder/build"
configured 'a new folder'
touch "$build/kept"
configured 'a folder in use'
[ -f "$build/kept" ] || fail "a folder in use was thrown away"
echo broken >"$build/meson-private/coredata.dat"
sed 's/^cuda .*/no_such_option = 1/' "$build/meson-private/cmd_line.txt" >"$scratch/cmd_line.txt"
cp "$scratch/cmd_line.txt" "$build/meson-private/cmd_line.txt"
configured 'a broken folder'
said 'cannot be used again'
rm "$build/build.ninja"
configured 'a half-made folder'
build=$scratch/empty
mkdir "$build"
configured 'an empty folder'
build=$scratch/precious
mkdir "$build"
touch "$build/file"
if (configure) >"$scratch/said" 2>&1; then fail "a folder of somebody else's was used"; fi
said 'no Meson build folder'
[ -f "$build/file" ] || fail "a folder of somebody else's was removed"
echo "both scripts find, install and configure"
