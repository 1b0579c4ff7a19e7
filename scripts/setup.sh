#!/usr/bin/env bash
# Make the environment: the pinned SGLang with its own pins, the series applied to it and verified, the tools.
#
# usage: scripts/setup.sh [--cpu|--gpu] [--test] [VENV]
#
#   --cpu    do not look for a GPU; the real server then runs on the CPU platform (cpu_platform/)
#   --gpu    check first for an NVIDIA driver that can run CUDA 13 wheels (>= 580)
#            default: --gpu when nvidia-smi answers, else --cpu
#   --test   also install what the tests need (pytest, hypothesis, auto-round, linters)
#   VENV     where the environment goes; default .venv at the repository root
#
# Takes 3 to 13 minutes and 11 GB of disk the first time (the CUDA build of torch 2.14.1 is what SGLang 0.5.23
# pins, and it imports on a machine without a GPU); a few seconds when everything is already there.
# Environment: PYTHON=/path/to/python chooses the interpreter (3.11, 3.12 or 3.13).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

mode="" with_tests=0 venv="$ROOT/.venv"
while [ $# -gt 0 ]; do
  case "$1" in
    --cpu | --gpu) mode="${1#--}" ;;
    --test) with_tests=1 ;;
    -h | --help) help_from "$0"; exit 0 ;;
    -*) printf 'error: unknown option %s\nremedy: scripts/setup.sh --help\n' "$1" >&2; exit 2 ;;
    *) venv="$1" ;;
  esac
  shift
done
if [ -z "$mode" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then mode=gpu; else mode=cpu; fi
fi
started=$SECONDS

command -v git >/dev/null || die "git is not installed" "the series is applied with git am; install git"
if [ "$mode" = gpu ]; then
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) ||
    die "nvidia-smi does not answer" "install the NVIDIA driver, or use --cpu"
  [ "${driver%%.*}" -ge 580 ] 2>/dev/null ||
    die "NVIDIA driver ${driver:-unknown}; the pinned torch is a CUDA 13 build and needs 580 or newer" "update the driver"
fi

py="$venv/bin/python"
if [ ! -x "$py" ]; then
  base_python=$(pick_python)
  [ "$(free_gb "$(dirname "$venv")")" -ge 14 ] ||
    die "$(free_gb "$(dirname "$venv")") GB free for $venv; 14 GB are needed" "free some space or name another VENV"
  say "creating $venv with $base_python"
  "$base_python" -m venv "$venv"
fi
venv="$(cd "$venv" && pwd)" py="$venv/bin/python"

# The stamp holds what was installed; an environment with the test packages serves a wish without them, too.
stamp="$venv/.q4head-setup"
have=$(cat "$stamp" 2>/dev/null || true)
if [ "$have" != "$(stamp_of 1)" ] && { [ "$with_tests" = 1 ] || [ "$have" != "$(stamp_of 0)" ]; }; then
  rm -f "$stamp"
  say "installing sglang==$PIN with its own pins (11 GB, about 3 minutes)"
  "$py" -m pip install -q --upgrade "pip>=25"
  "$py" -m pip install -q -c "$ROOT/scripts/constraints.txt" "sglang==$PIN"
  extras=plot
  [ "$with_tests" = 0 ] || extras=plot,test,dev
  say "installing the tools ($extras) and the CPU platform, which does nothing unless SGLANG_PLATFORM=cpu_ref"
  "$py" -m pip install -q -c "$ROOT/scripts/constraints.txt" -e "${ROOT}[$extras]"
  "$py" -m pip install -q --no-deps -e "$ROOT/cpu_platform"
  stamp_of "$with_tests" >"$stamp"
else
  say "packages are already as wanted in $venv"
fi

say "applying the series to the installed package"
"$py" "$ROOT/tools/series.py" apply --installed --python "$py"
"$py" "$ROOT/tools/series.py" status --installed --python "$py" || [ $? -eq 11 ]

say "done in $((SECONDS - started)) s: $venv ($(du -sm "$venv" | cut -f1) MB, mode $mode)"
