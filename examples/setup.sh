# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What examples/run.sh and tests/run.sh share: finding and installing what a build needs, and configuring it.

# k3_compiles COMPILER SOURCE [FLAG...]: whether SOURCE compiles and links.
k3_compiles() {
  local compiler=$1 source=$2
  shift 2
  # shellcheck disable=SC2086  # a compiler may come with arguments: CXX="ccache g++"
  printf '%s\n' "$source" 'int main() {}' | $compiler -std=c++20 -x c++ - -o /dev/null "$@" >/dev/null 2>&1
}

# Sets CXX to the first compiler that takes C++20; a CXX of the caller's is the only candidate.
k3_find_compiler() {
  local compiler source='#include <concepts>'$'\n''template <std::integral T> struct Needs20 {};'
  local candidates=(c++ g++ clang++)
  [ -z "${CXX-}" ] || candidates=("$CXX")
  for compiler in "${candidates[@]}"; do
    if k3_compiles "$compiler" "$source"; then
      export CXX=$compiler
      return 0
    fi
  done
  return 1
}

k3_meson_is_new_enough() {
  local version
  version=$(meson --version 2>/dev/null) || return 1
  [ "$(printf '%s\n' 1.0.0 "$version" | sort -V | head -n 1)" = 1.0.0 ]
}

# k3_has_header HEADER PKG_CONFIG_NAME [FLAG...]: whether the header is found, where pkg-config says or by itself.
k3_has_header() {
  local header=$1 flags=()
  read -r -a flags <<<"$(pkg-config --cflags "$2" 2>/dev/null || true)"
  shift 2
  k3_compiles "${CXX:-c++}" "#if !__has_include(<$header>)"$'\n#error\n#endif' ${flags[@]+"${flags[@]}"} "$@"
}

# Puts into k3_missing the Debian packages of what is not there. Programs and headers are tried, whoever installed them.
k3_find_missing() {  # [catch2] [cmake]
  local package
  k3_missing=()
  k3_find_compiler || k3_missing+=(g++)
  k3_meson_is_new_enough || k3_missing+=(meson)
  ninja --version >/dev/null 2>&1 || k3_missing+=(ninja-build)
  pkg-config --version >/dev/null 2>&1 || k3_missing+=(pkg-config)
  if [ ${#k3_missing[@]} -gt 0 ] && [ "${k3_missing[0]}" = g++ ]; then
    # Headers cannot be tried yet. They are after the compiler is installed, and apt skips what it has.
    k3_missing_by_package "$@"
    return
  fi
  k3_has_header nlohmann/json.hpp nlohmann_json || k3_missing+=(nlohmann-json3-dev)
  k3_has_header oniguruma.h oniguruma -lonig || k3_missing+=(libonig-dev)
  k3_has_header CLI/CLI.hpp CLI11 || k3_missing+=(libcli11-dev)
  for package in "$@"; do
    case $package in
      catch2)
        k3_has_header catch2/catch.hpp catch2 || k3_has_header catch2/catch_all.hpp catch2 || k3_missing+=(catch2) ;;
      cmake) cmake --version >/dev/null 2>&1 || k3_missing+=(cmake) ;;
    esac
  done
}

# The same for what comes after the compiler where there is none to try headers with: by the packages' own word.
k3_missing_by_package() {  # [catch2] [cmake]
  local package
  for package in nlohmann-json3-dev libonig-dev libcli11-dev "$@"; do
    dpkg -s "$package" 2>/dev/null | grep -q '^Status: .* installed$' || k3_missing+=("$package")
  done
}

# k3_require yes|no [catch2] [cmake]: names what is missing and, with yes, installs exactly that; ends the script where
# it cannot.
k3_require() {
  local install=$1 as_root=()
  shift
  k3_find_missing "$@"
  [ ${#k3_missing[@]} -gt 0 ] || return 0
  echo "missing: ${k3_missing[*]}"
  if [ -n "${CXX-}" ] && [ "${k3_missing[0]}" = g++ ]; then
    echo "(CXX=$CXX compiles no C++20 program)"
  fi
  [ "$install" = yes ] || exit 1
  if ! command -v apt-get >/dev/null 2>&1; then
    echo "There is no apt here: install these packages (Debian's names) or what matches them, and run this again." >&2
    exit 1
  fi
  if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null 2>&1; then
      echo "As root: apt-get install ${k3_missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  echo "installing them with apt"
  ${as_root[@]+"${as_root[@]}"} apt-get -qq update </dev/null ||
    echo "apt-get update failed; trying the lists as they are" >&2
  ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${k3_missing[@]}" </dev/null || {
    echo "apt-get could not install: ${k3_missing[*]}" >&2
    exit 1
  }
  hash -r
  k3_find_missing "$@"
  if [ ${#k3_missing[@]} -gt 0 ]; then
    echo "still missing after the installation: ${k3_missing[*]} (C++20 and Meson 1.0 are the oldest that will do)" >&2
    exit 1
  fi
}

# k3_configure ROOT BUILD [OPTION...]: a configured BUILD. One that is there is used again with the options added; one
# that cannot be (moved, half made, of another Meson) is made anew.
k3_configure() {
  local root=$1 build=$2
  shift 2
  if [ -e "$build/meson-private/coredata.dat" ] && [ -e "$build/build.ninja" ]; then
    if meson setup --reconfigure "$build" "$root" "$@"; then return 0; fi
    echo "$build cannot be used again (see above); it is made anew, with the default options." >&2
  fi
  if [ -e "$build" ]; then
    if [ -n "$(ls -A "$build")" ] && [ ! -d "$build/meson-private" ] && [ ! -d "$build/meson-info" ]; then
      echo "$build is there and no Meson build folder: move it away and run this again." >&2
      exit 1
    fi
    rm -rf "$build"
  fi
  # A warning of a compiler newer than those tried must not keep anybody from the result.
  meson setup "$build" "$root" -Dwerror=false "$@" || {
    echo "the build could not be configured: see above, and $build/meson-logs/meson-log.txt" >&2
    exit 1
  }
}
