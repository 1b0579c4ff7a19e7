#!/usr/bin/env bash
# Restart the server of scripts/serve.sh in the background, and wait until it is ready.
#
# usage: scripts/restart_server.sh --profile PROFILE [OPTIONS of serve.sh] [-- SGLANG_ARGS]
#
# Made for `tools/logprob_diff.py floor --restart-cmd`. The server that holds RUN_DIR (--run-dir, or .cache/serve/PROFILE)
# is stopped in order, if one runs, wherever it was started; the new one gets the options given here, so give the same
# ones. Its output goes to RUN_DIR/serve.out; scripts/restart_server.sh --stop RUN_DIR only stops it.
#
# Exit codes: 0 ready; 2 usage; 4 the old server did not end; else the code that serve.sh ended with before it was ready.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

STOP_S=180 # a stop lets running requests finish for 60 s

usage() {
  printf 'error: %s\nremedy: scripts/restart_server.sh --help shows the usage\n' "$1" >&2
  exit 2
}

# usage: holder RUN_DIR   print the process that holds the folder's lock (q4kit/locks.py); nothing where none does
holder() {
  local fd pid
  for fd in /proc/[0-9]*/fd/*; do
    if [ "$fd" -ef "$1/lock" ] && grep -qs '^lock:.*FLOCK' "${fd/\/fd\//\/fdinfo\/}"; then
      pid=${fd#/proc/}
      echo "${pid%%/*}"
      return
    fi
  done
}

# usage: stop RUN_DIR   end the server of a run folder in order and wait for it
stop() {
  local pid end=$((SECONDS + STOP_S))
  pid=$(holder "$1")
  if [ -z "$pid" ]; then
    flock -n "$1/lock" true 2>/dev/null || [ ! -e "$1/lock" ] ||
      die "$1 belongs to a server whose process cannot be seen" "stop it by hand: as its user, or where it was started"
    return 0
  fi
  say "stopping process $pid, the server of $1"
  kill -TERM "$pid" || die "process $pid, the server of $1, cannot be stopped" "run this as its user"
  while [ "$(holder "$1")" = "$pid" ]; do
    [ $SECONDS -lt $end ] || die "process $pid did not end within $STOP_S s" "read its output; kill -9 $pid ends it"
    sleep 0.5
  done
}

profile='' run_dir='' previous=''
for word in "$@"; do
  case "$previous" in --profile) profile=$word ;; --run-dir | --stop) run_dir=$word ;; esac
  case "$word" in
    -h | --help) help_from "$0"; exit 0 ;;
    --) break ;;
    --profile=*) profile=${word#*=} ;;
    --run-dir=*) run_dir=${word#*=} ;;
    --dry-run) usage "--dry-run starts nothing: give it to scripts/serve.sh" ;;
  esac
  previous=$word
done
if [ "${1:-}" = --stop ]; then
  [ $# = 2 ] || usage "--stop needs one argument, the run folder"
  stop "$run_dir"
  exit 0
fi
[ -n "$profile" ] || usage "--profile is missing"
run_dir=${run_dir:-$ROOT/.cache/serve/$profile}

stop "$run_dir"
mkdir -p "$run_dir"
out=$run_dir/serve.out
: >"$out" # the last server's "ready:" must be gone before anybody looks
# Detached: neither a closed terminal nor its Ctrl-C ends the server, and no pipe of ours is held open.
nohup setsid "$ROOT/scripts/serve.sh" "$@" >"$out" 2>&1 </dev/null &
server=$!
say "starting process $server; output: $out"
until grep -q '^ready: ' "$out"; do
  if ! kill -0 "$server" 2>/dev/null; then
    code=0
    wait "$server" || code=$?
    tail -n 20 "$out" >&2
    printf 'error: serve.sh ended with %s before it was ready\nremedy: its output is above and in %s\n' "$code" "$out" >&2
    exit $((code ? code : 4))
  fi
  sleep 0.5
done
grep '^ready: ' "$out"
