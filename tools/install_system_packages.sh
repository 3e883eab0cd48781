#!/usr/bin/env bash
# Makes sure of what pip cannot install: a C++20 compiler, the Python headers and venv, and for the tests Catch2 3.
# Usage: install_system_packages.sh PYTHON [catch2]. Installs with apt as root; elsewhere it says what to install.
# On Debian 12 Catch2 3 lives in the backports archive: its entry is derived from the configured one.
set -euo pipefail
python=$1
want=${2:-}

have_compiler() { "${CXX:-g++}" -std=c++20 -x c++ -fsyntax-only - </dev/null 2>/dev/null; }
have_headers() { "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; }
have_venv() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }
have_catch2() {
  local probe found=1
  probe=$(mktemp -d)
  printf 'cmake_minimum_required(VERSION 3.20)\nproject(probe CXX)\nfind_package(Catch2 3 REQUIRED)\n' >"$probe/CMakeLists.txt"
  cmake -S "$probe" -B "$probe/build" >/dev/null 2>&1 && found=0
  rm -rf "$probe"
  return $found
}

missing=()
have_compiler || missing+=(g++)
have_headers || missing+=(python3-dev)
have_venv || missing+=(python3-venv)
if [[ $want == catch2 ]]; then
  have_compiler && have_catch2 || missing+=(catch2)
fi
[[ ${#missing[@]} -eq 0 ]] && exit 0

give_up() {
  echo "Missing on this machine: ${missing[*]} (names of Debian's packages). $1" >&2
  [[ " ${missing[*]} " == *" catch2 "* ]] && echo "catch2 must be version 3: Debian 13, Ubuntu 24.04, or bookworm-backports." >&2
  exit 1
}
command -v apt-get >/dev/null || give_up "There is no apt-get here: please install them by your own package manager."
[[ $(id -u) -eq 0 ]] || give_up "Please run as root: apt-get install ${missing[*]}"

export DEBIAN_FRONTEND=noninteractive
release=()
if [[ " ${missing[*]} " == *" catch2 "* ]]; then
  . /etc/os-release
  sources=/etc/apt/sources.list.d
  if [[ ${ID:-} == debian && ${VERSION_ID:-} == 12 ]]; then
    release=(-t "$VERSION_CODENAME-backports")
    if ! grep -qrs "$VERSION_CODENAME-backports" /etc/apt/sources.list "$sources"; then
      if [[ -e $sources/debian.sources ]]; then
        awk -v suite="$VERSION_CODENAME-backports" \
          'BEGIN { RS = ""; ORS = "\n\n" } !done { sub(/Suites:[^\n]*/, "Suites: " suite); print; done = 1 }' \
          "$sources/debian.sources" >"$sources/backports.sources"
      else
        grep -m 1 "^deb .* $VERSION_CODENAME " /etc/apt/sources.list |
          sed "s/ $VERSION_CODENAME / $VERSION_CODENAME-backports /" >"$sources/backports.list"
      fi
    fi
  fi
fi
echo "Installing ${missing[*]} ..."
apt-get update -q
others=()
for package in "${missing[@]}"; do
  [[ $package == catch2 ]] || others+=("$package")
done
[[ ${#others[@]} -eq 0 ]] || apt-get install -y -q "${others[@]}"
if [[ " ${missing[*]} " == *" catch2 "* ]]; then
  apt-get install -y -q "${release[@]}" catch2
  have_catch2 || give_up "apt's catch2 is too old."
fi
have_compiler || give_up "g++ 11 or newer is needed for C++20."
