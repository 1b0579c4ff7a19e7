# Shared by the scripts in this folder: messages, the repository root, the environment's Python.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PIN=0.5.23

say() { printf '\n== %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$1" >&2
  [ $# -lt 2 ] || printf 'remedy: %s\n' "$2" >&2
  exit 4
}

# usage: help_from FILE   print the header comment of a script as its help text
help_from() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$1"; }

# usage: pick_python   print a Python that the pinned wheels exist for
pick_python() {
  local py candidates=(python3.12 python3.11 python3.13 python3)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for py in "${candidates[@]}"; do
    if "$py" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$py"
      return 0
    fi
  done
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13 with venv" \
    "name another one, or leave PYTHON unset to look for one"
  die "no Python 3.11, 3.12 or 3.13 with venv found" \
    "install one (Debian: apt-get install python3-venv) or set PYTHON=/path/to/python"
}

free_gb() { df -Pk "$1" | awk 'NR == 2 { printf "%d", $4 / 1048576 }'; }

# usage: stamp_of WITH_TESTS   print the hash of everything that decides what setup.sh installs
stamp_of() {
  {
    printf '%s\n' "$PIN" "$1"
    cat "$ROOT/pyproject.toml" "$ROOT/cpu_platform/pyproject.toml" "$ROOT/scripts/constraints.txt"
  } | sha256sum | cut -d' ' -f1
}
