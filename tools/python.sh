#!/bin/sh
# `sh tools/python.sh FILE ARGUMENT…`: runs FILE with a Python that can make environments, or says in one sentence
# what to install. PYTHON names one to use.
set -u
OLDEST=11
NEWEST=14 # the newest for which constraints.txt has wheels

fail() {
  echo "gpurun: $*" >&2
  exit 1
}

# 0: usable, 2: another version, 3: without venv
check() {
  "$1" -c "
import sys
sys.exit(0 if (3, $OLDEST) <= sys.version_info[:2] <= (3, $NEWEST) else 2)" 2>/dev/null || return 2
  "$1" -c "import ensurepip, venv" 2>/dev/null || return 3
}

# The command that installs packages of the distribution, for whoever runs this.
install() {
  command -v apt-get >/dev/null || { echo "install $1 with your system's package manager"; return; }
  if [ "$(id -u)" = 0 ]; then
    echo "apt-get update && apt-get install $1"
  elif command -v sudo >/dev/null; then
    echo "sudo apt-get update && sudo apt-get install $1"
  else
    echo "ask an administrator for: apt-get install $1"
  fi
}

[ "$(uname -s)" = Linux ] || fail "needs Linux; this is $(uname -s)"
without_venv=
for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
  command -v "$name" >/dev/null || continue
  check "$name"
  case $? in
    0) exec "$name" "$@" ;;
    3) without_venv=${without_venv:-$name} ;;
  esac
done

range="Python 3.$OLDEST to 3.$NEWEST"
if [ -n "$without_venv" ]; then
  package=python$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
  fail "$without_venv can't make virtual environments: $(install "$package")"
elif [ -n "${PYTHON:-}" ]; then
  fail "PYTHON=$PYTHON is not $range"
elif command -v python3 >/dev/null; then
  fail "needs $range, and python3 is $(python3 -V 2>&1): install another and name it, \`make PYTHON=python3.$NEWEST\`"
else
  fail "needs $range: $(install python3-venv)"
fi
