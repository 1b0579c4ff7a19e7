#!/usr/bin/env bash
# Serve Qwen3.8-Flash-Next on one 24 GB GPU, or a tiny stand-in without one, with the environment of scripts/setup.sh.
#
# usage: scripts/serve.sh --profile 24gb-128ram --model CHECKPOINT [OPTIONS] [-- SGLANG_ARGS]
#        scripts/serve.sh --profile tiny
#        scripts/serve.sh --profile PROFILE ... --dry-run     print checks and command, start nothing
#
#   profiles: 24gb-32ram, 24gb-64ram, 24gb-128ram, tiny; every option and flag: docs/SERVING.md
#
# Environment: VENV chooses the environment (default .venv at the repository root).
# Exits with the server's own code once it served; 1 smoke test, 2 usage, 4 refused or did not come up, 130 interrupted.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

py="${VENV:-$ROOT/.venv}/bin/python"
if [ ! -x "$py" ]; then
  case "${1:-}" in -h | --help) help_from "$0"; exit 0 ;; esac
  die "no environment at ${py%/bin/python}" "scripts/setup.sh makes it; VENV=/path names another one"
fi
exec "$py" "$ROOT/tools/serve.py" "$@"
