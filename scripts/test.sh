#!/usr/bin/env bash
# Run every test that this machine can run.
#
# usage: scripts/test.sh [--quick] [PYTEST_ARGS...]
#
#   --quick   only lints, unit tests and the offline proof of the series (no server, no prefix matrix)
#
# Environment: VENV chooses the environment (default .venv; made by scripts/setup.sh when it is not there).
# Takes about an hour on 2 cores without a GPU; no GPU test runs here (tests/gpu/, by hand). Exits 0 only if everything passed.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

quick=0
case "${1:-}" in
  -h | --help) help_from "$0"; exit 0 ;;
  --quick) quick=1; shift ;;
esac
venv="${VENV:-$ROOT/.venv}"
"$ROOT/scripts/setup.sh" --cpu --test "$venv"
py="$venv/bin/python"
cd "$ROOT"

say "lints"
"$py" -m ruff check .
"$py" -m ruff format --check .
"$py" -m mypy
"$py" -m codespell_lib --skip '.git,.venv,.cache,results,*.patch,data' -L "te,ot,nd,fo,ans,valeu" . || {
  say "codespell found typos" # its own exit code is their number
  exit 1
}
if command -v shellcheck >/dev/null; then shellcheck -x scripts/*.sh .ci/run; fi

if [ "$quick" = 1 ]; then
  say "the series, offline"
  "$py" tools/series.py verify --offline
  exec "$py" -m pytest tests/unit -q "$@"
fi

say "the series: every prefix applied, imported and tested, red on stock and green patched"
"$py" tools/series.py verify --python "$py"

say "quoted numbers against the ledger"
"$py" tools/claims.py check

say "unit and server tests (the patches' own tests ran above, at every prefix)"
exec "$py" -m pytest tests/unit tests/server -q "$@"
