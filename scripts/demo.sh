#!/usr/bin/env bash
# The main job, end to end, on a tiny random Qwen4-Exp: apply the series to the pinned SGLang, serve stock and patched with
# the real server, ask its chat route, compare stock and patched with the logprob oracle, plant a fault and see it caught,
# run needle and bench, write a report.
#
# usage: scripts/demo.sh [OUT]
#
#   OUT   folder of the results, default .cache/demo; the report is OUT/report.md. OUT/results and OUT/faulty are made
#         anew, so a folder with files that the demo did not make is refused
#
# Environment: VENV chooses the environment (default .venv; made by scripts/setup.sh when it is not there).
# Needs no GPU. 6 to 8 minutes on 2 cores, plus the setup. Exits 0 only if the oracle says EQUIVALENT for stock against
# patched and DIFFERENT for the planted fault.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

case "${1:-}" in
  -h | --help) help_from "$0"; exit 0 ;;
  -*) printf 'error: unknown option %s\nremedy: scripts/demo.sh --help\n' "$1" >&2; exit 2 ;;
esac
out="${1:-$ROOT/.cache/demo}"
marker=.q4-demo

# usage: ours DIR   whether the demo may remove DIR/results and DIR/faulty: it is new, or the demo made what is in it
ours() {
  [ -e "$1" ] || return 0
  [ -d "$1" ] || return 1
  [ -n "$(ls -A "$1")" ] && [ ! -e "$1/$marker" ] || return 0
  [ "$(cd "$1" && pwd -P)" != "$(cd "$ROOT" && pwd -P)/.cache/demo" ] || return 0
  # Folders of the demo before it had a marker: nothing but its own names, and the first file it writes.
  [ -z "$(find "$1/" -mindepth 1 -maxdepth 1 ! -name model ! -name results ! -name faulty ! -name report.md)" ] || return 1
  [ -f "$1/results/series.json" ] || { [ ! -e "$1/results" ] && [ ! -e "$1/faulty" ]; }
}

if ! ours "$out"; then
  printf 'error: %s holds files that the demo did not make, and it would remove its results and faulty\n' "$out" >&2
  printf 'remedy: name a new folder, or an empty one\n' >&2
  exit 2
fi
venv="${VENV:-$ROOT/.venv}"
"$ROOT/scripts/setup.sh" --cpu "$venv"
py="$venv/bin/python"
started=$SECONDS
mkdir -p "$out"
out="$(cd "$out" && pwd)"
touch "$out/$marker"
rm -rf "${out:?}/results" "${out:?}/faulty" && mkdir "$out/results"
cd "$ROOT"

"$py" tools/series.py status --installed --python "$py" --json >"$out/results/series.json" || [ $? -eq 11 ]

say "a tiny random Qwen4-Exp checkpoint, the stock tree beside it, and a copy with one weight disturbed"
[ -f "$out/model/config.json" ] || "$py" tools/make_tiny_model.py "$out/model" --preset mini
stock="$("$py" tools/series.py tree --to 0 --python "$py" --json | "$py" -c 'import json, sys; print(json.load(sys.stdin)["path"])')"
"$py" tools/perturb_checkpoint.py "$out/model" "$out/faulty" --tensor 'layers\.0\.linear_attn\.out_proj\.weight$' \
  --relative 0.02 | tee "$out/results/fault.json"

r="$out/results"
serve=("$py" tools/with_server.py)

say "1/3 stock: record the reference twice; the two give the noise floor"
"${serve[@]}" --model "$out/model" --pythonpath "$stock/python" --log "$r/stock.log" \
  --run "'$py' tools/logprob_diff.py record --base-url \$Q4_BASE_URL --prompts ids --out '$r/before.jsonl.gz'" \
  --run "'$py' tools/logprob_diff.py record --base-url \$Q4_BASE_URL --like '$r/before.jsonl.gz' --out '$r/again.jsonl.gz'"
"$py" tools/logprob_diff.py floor "$r/before.jsonl.gz" "$r/again.jsonl.gz" --out "$r/floor.jsonl.gz" --json "$r/floor.json"

disk=(-- --ple-offload-embedding --ple-offload-backend nvme)
say "2/3 patched, with the n-gram table on disk: chat smoke test, oracle, needle, bench"
set +e
"${serve[@]}" --model "$out/model" --log "$r/patched.log" --keep-going \
  --run "'$py' tools/chat_smoke.py --base-url \$Q4_BASE_URL --json '$r/chat.json'; echo \$? >'$r/chat.exit'" \
  --run "'$py' tools/logprob_diff.py compare '$r/before.jsonl.gz' --base-url \$Q4_BASE_URL --floor '$r/floor.jsonl.gz' --json '$r/oracle.json'; echo \$? >'$r/oracle.exit'" \
  --run "'$py' tools/needle_test.py --base-url \$Q4_BASE_URL --lengths 2048 --grid 3 --expect none --json '$r/needle.json' --md '$r/needle.md'; echo \$? >'$r/needle.exit'" \
  --run "'$py' tools/bench_speed.py run --base-url \$Q4_BASE_URL --contexts 101 421 --tokens 64 --repeats 3 --text words --json '$r/bench.json' --md '$r/bench.md'; echo \$? >'$r/bench.exit'" "${disk[@]}"

say "3/3 the planted fault: the oracle must see it"
"${serve[@]}" --model "$out/faulty" --log "$r/faulty.log" --keep-going \
  --run "'$py' tools/logprob_diff.py compare '$r/before.jsonl.gz' --base-url \$Q4_BASE_URL --floor '$r/floor.jsonl.gz' --vary model.weights --json '$r/fault-oracle.json'; echo \$? >'$r/fault-oracle.exit'" "${disk[@]}"
set -e

say "report after $((SECONDS - started)) s: $out/report.md"
"$py" tools/demo_report.py "$r" --out "$out/report.md"
