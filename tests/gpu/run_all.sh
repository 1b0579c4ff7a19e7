#!/usr/bin/env bash
# Runs everything in this folder that proves the series on a GPU, and prints one table at the end.
#
# usage: tests/gpu/run_all.sh OUT --patched DIR [--stock DIR] [--tiny DIR] [--mid DIR] [--soak SECONDS] [--only STEP]... [--again]
#        tests/gpu/run_all.sh --list
#
#   OUT            folder for logs, raw answers and the table (OUT/table.md)
#   --patched DIR  folder with the patched sglang package (what PYTHONPATH would name)
#   --stock DIR    folder with the stock sglang package; without it the matrices leave the stock cells out
#   --tiny DIR     checkpoint of `tools/make_tiny_model.py DIR --preset gpu` (default: made in OUT/models)
#   --mid DIR      checkpoint of `tools/make_tiny_model.py DIR --preset mid` (default: made in OUT/models)
#   --soak SECONDS how long ple_soak loads its server (default 240; 1800 is the whole soak)
#   --only STEP    run this step alone (repeatable)
#   --again        run steps anew that have an outcome already
#   --list         print the steps and what each needs; needs no GPU
#
# Needs one NVIDIA GPU that nothing else uses, a driver for the pinned torch, and a Python (PYTHON=..., default python3)
# with SGLang's requirements and this repository installed (scripts/setup.sh --gpu). A step whose needs the machine does
# not meet is skipped with the reason. A second run of the same OUT continues: steps that hold for the same trees, models
# and scripts are not run again, and the matrices and ple_nvme keep what every cell has answered and timed.
#
# Exit code: 0 every step that ran holds, 1 one does not, 2 bad usage, 4 nothing could run.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
GPU="$ROOT/tests/gpu"
PYTHON="${PYTHON:-python3}"

# name | GPU memory, GiB | free host memory, GiB | free disk in OUT, GiB | model
# Estimates with room to spare: all of it was only ever run on an H200.
STEPS='bcg_outputs|2|2|0|
pinned_exact|2|12|0|
qsa_sync|2|2|0|
fp8_kv|2|2|0|
offload|4|4|0|
sparse_gqa|4|4|0|
repeatable_kernels|2|2|0|
ple_step_breakdown|2|4|1|
ple_memop|4|8|2|
fp8_kv_prompts|20|24|2|tiny
full_table|20|24|1|
matrix_tiny|20|24|2|tiny
matrix_mid|20|32|12|mid
matrix_speed|20|32|12|mid
ple_nvme_bits|20|32|12|mid
ple_nvme_speed|20|32|12|mid
ple_nvme_mtp|20|32|12|mid-mtp
ple_faults|20|24|12|mid
ple_soak|20|24|12|mid'

usage() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
die() { printf 'error: %s\nremedy: %s\n' "$1" "$2" >&2; exit "${3:-2}"; }

list() {
  printf '%-19s %-10s %-10s %-10s %-8s %s\n' step 'GPU GiB' 'host GiB' 'disk GiB' model present
  while IFS='|' read -r name gpu host disk model; do
    printf '%-19s %-10s %-10s %-10s %-8s %s\n' "$name" "$gpu" "$host" "$disk" "${model:--}" \
      "$([ -f "$(script_of "$name")" ] && echo yes || echo no)"
  done <<<"$STEPS"
}

script_of() { case $1 in matrix_*) echo "$GPU/matrix.py" ;; ple_nvme_*) echo "$GPU/ple_nvme.py" ;; *) echo "$GPU/$1.py" ;; esac; }

out='' patched='' stock='' tiny='' mid='' soak=240 again='' only=()
[ $# -gt 0 ] || { usage; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --list) list; exit 0 ;;
    --again) again=1 ;;
    --patched | --stock | --tiny | --mid | --soak | --only)
      [ $# -gt 1 ] || die "$1 has no value" "read $0 --help"
      case $1 in
        --patched) patched=$2 ;;
        --stock) stock=$2 ;;
        --tiny) tiny=$2 ;;
        --mid) mid=$2 ;;
        --soak) soak=$2 ;;
        --only) only+=("$2") ;;
      esac
      shift
      ;;
    -*) die "unknown argument $1" "read $0 --help" ;;
    *) [ -z "$out" ] || die "two folders, $out and $1" "give one OUT"; out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || die "no folder OUT for the results" "read $0 --help"
[ -n "$patched" ] || die "no --patched" "name the folder that holds the patched sglang package"
[[ $soak =~ ^[0-9]+$ && $soak -ge 30 ]] || die "--soak $soak" "give whole seconds, at least 30 (there are too few samples in less)"
for tree in "$patched" ${stock:+"$stock"}; do
  [ -f "$tree/sglang/version.py" ] || die "$tree holds no sglang package" "name the folder that PYTHONPATH would name"
done
for step in ${only[@]+"${only[@]}"}; do
  grep -q "^$step|" <<<"$STEPS" || die "no step $step" "see $0 --list"
done
for model in ${tiny:+"$tiny"} ${mid:+"$mid"}; do
  [ -f "$model/config.json" ] || die "$model holds no config.json" "make it with tools/make_tiny_model.py, or leave it out"
done
mkdir -p "$out/steps"
out="$(cd "$out" && pwd)"
patched="$(cd "$patched" && pwd)"
[ -z "$stock" ] || stock="$(cd "$stock" && pwd)"

# usage: lacks GPU HOST DISK SCRIPT   print what this machine lacks for a step, nothing where it lacks nothing
lacks() {
  [ -f "$4" ] || { echo "$(basename "$4") is not in this checkout"; return; }
  [ -z "$no_gpu" ] || { echo "$no_gpu"; return; }
  awk -v have="$gpu_gib" -v need="$1" 'BEGIN { if (have < need) printf "GPU has %.0f GiB, needs %d", have, need }'
  awk -v need="$2" '/MemAvailable/ { if ($2 / 1048576 < need) printf "%.0f GiB of host memory free, needs %d", $2 / 1048576, need }' /proc/meminfo
  df -Pk "$out" | awk -v need="$3" 'NR == 2 { if ($4 / 1048576 < need) printf "%.0f GiB of disk free in OUT, needs %d", $4 / 1048576, need }'
}

# usage: preset_of NAME, given_of NAME, options_of NAME   the checkpoint of a step and what else decides its outcome
preset_of() { case $1 in ple_nvme_mtp) echo mid-mtp ;; matrix_mid | matrix_speed | ple_nvme_* | ple_faults | ple_soak) echo mid ;; fp8_kv_prompts | matrix_tiny) echo gpu ;; esac; }
given_of() { case $(preset_of "$1") in mid) echo "$mid" ;; gpu) echo "$tiny" ;; esac; } # none has a prediction head
options_of() {
  case $1 in
    # Servers whose bits are compared are slower, so speeds are steps of their own.
    matrix_tiny) echo --half-gb 1 --all-gb 1 --answers-only --repeatable ;; # 1, the smallest budget, takes every weight
    matrix_mid) echo --half-gb 2 --answers-only --repeatable ;;             # 4.5 GiB of routed experts
    matrix_speed) echo --half-gb 2 --timings-only --only full-pinned half-full-pinned half-full-in-place all-full-pinned paged-experts nvme-full ;;
    ple_nvme_bits) echo --answers-only --repeatable ;;
    ple_nvme_mtp) echo --mtp --answers-only --repeatable --hash-rows 0 ;;
    ple_nvme_speed) echo --timings-only --hash-rows 0 ;;
    ple_soak) echo --seconds "$soak" ;;
  esac
}

# usage: model_of NAME   print the folder of a step's checkpoint, made or not
model_of() {
  local given
  given="$(given_of "$1")"
  echo "${given:-$out/models/$(preset_of "$1")}"
}

# usage: other_of NAME   print the folder of the checkpoint whose weights the servers of a step are updated to
other_of() { case $1 in matrix_tiny) [ -n "$tiny" ] || echo "$out/models/gpu-other" ;; esac; }

# usage: make_checkpoint DIR PRESET [OPTION]...   make it unless it is there
make_checkpoint() {
  [ ! -f "$1/config.json" ] || return 0
  mkdir -p "$(dirname "$1")" || return
  "$PYTHON" "$ROOT/tools/make_tiny_model.py" "$1" --preset "${@:2}" --force >&2 || return
  [ -f "$1/config.json" ]
}

# usage: make_model NAME   make what a step serves, unless it is there or the step serves nothing
make_model() {
  local preset
  preset="$(preset_of "$1")"
  [ -n "$preset" ] || return 0
  case $preset in
    mid-mtp) make_checkpoint "$(model_of "$1")" mid --mtp-layers 1 --embedding-std 4 || return ;; # drafts that are accepted
    *) make_checkpoint "$(model_of "$1")" "$preset" || return ;;
  esac
  [ -z "$(other_of "$1")" ] || make_checkpoint "$(other_of "$1")" "$preset" --seed 1
}

# usage: inputs_of NAME   print a hash of all that the outcome of a step belongs to
inputs_of() {
  local paths=("$patched" "$(script_of "$1")")
  [ -z "$(preset_of "$1")" ] || paths+=("$(model_of "$1")")
  case $1 in matrix_*) paths+=(${stock:+"$stock"}) ;; esac
  "$PYTHON" "$GPU/inputs.py" "${paths[@]}" --options="$(options_of "$1")"
}

# usage: command_of NAME   fill `command` with the command line of a step
command_of() {
  local options other
  case $1 in
    fp8_kv_prompts)
      command=("$PYTHON" "$GPU/$1.py" "$out/$1" --model "$(model_of "$1")" --patched "$patched")
      ;;
    matrix_*)
      read -ra options <<<"$(options_of "$1")"
      command=("$PYTHON" "$GPU/matrix.py" "$out/$1" --model "$(model_of "$1")" --patched "$patched"
        ${stock:+--stock "$stock"} --jobs "$jobs" "${options[@]}")
      other="$(other_of "$1")"
      [ -z "$other" ] || command+=(--other-model "$other")
      ;;
    full_table) command=("$PYTHON" "$GPU/$1.py" "$out/$1" --patched "$patched") ;;
    ple_nvme_*)
      read -ra options <<<"$(options_of "$1")"
      command=("$PYTHON" "$GPU/ple_nvme.py" "$out/$1" --model "$(model_of "$1")" --patched "$patched" --jobs "$jobs"
        "${options[@]}")
      ;;
    ple_faults | ple_soak)
      read -ra options <<<"$(options_of "$1")"
      command=("$PYTHON" "$GPU/$1.py" --model "$(model_of "$1")" --patched "$patched" ${options[@]+"${options[@]}"}
        --log "$out/$1/server.log" --json "$out/$1/record.json" --raw "$out/$1/samples.json")
      ;;
    ple_memop | ple_step_breakdown) command=("$PYTHON" "$GPU/$1.py" --folder "$out") ;; # its disk, not that of /tmp
    *) command=("$PYTHON" "$GPU/$1.py") ;;
  esac
}

no_gpu='' gpu_gib=0
if gpu_gib="$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_properties(0).total_memory / 2**30)' 2>/dev/null)"; then
  :
else
  no_gpu="$PYTHON finds no NVIDIA GPU (torch.cuda)"
  gpu_gib=0
fi

# Servers of a matrix that boot side by side: as many as one H200 with 128 GiB of host memory carried.
jobs=1
if awk -v gpu="$gpu_gib" '/MemAvailable/ { exit !(gpu >= 130 && $2 / 1048576 >= 96) }' /proc/meminfo; then jobs=6; fi

number=0
while IFS='|' read -r name gpu host disk model <&3; do
  number=$((number + 1))
  record="$out/steps/$(printf '%02d' "$number")-$name.step"
  if [ ${#only[@]} -gt 0 ] && ! printf '%s\n' "${only[@]}" | grep -qx "$name"; then continue; fi
  if [ -z "$again" ] && [ -f "$record" ] && grep -qx 'rc=0' "$record"; then
    inputs="$(inputs_of "$name")" || inputs=''
    if [ -n "$inputs" ] && grep -qx "inputs=$inputs" "$record"; then
      printf '%s: holds already\n' "$name" >&2
      continue
    fi
    printf '%s: holds for another tree, model or script: running again\n' "$name" >&2
  fi
  reason="$(lacks "$gpu" "$host" "$disk" "$(script_of "$name")")"
  if [ -n "$reason" ]; then
    printf 'name=%s\nskipped=%s\n' "$name" "$reason" >"$record"
    printf '%s: skipped: %s\n' "$name" "$reason" >&2
    continue
  fi
  printf '%s: running, log in %s\n' "$name" "$out/steps/$name.log" >&2
  rm -f "$record" "$out/steps/$name.out"
  [ -z "$again" ] || case $name in matrix_* | ple_nvme_*) rm -rf "${out:?}/$name" ;; esac
  start=$SECONDS rc=0
  if ! make_model "$name" 2>"$out/steps/$name.log"; then
    printf 'name=%s\nrc=4\nseconds=%s\n' "$name" "$((SECONDS - start))" >"$record"
    printf '%s: exit 4: its checkpoint could not be made\n' "$name" >&2
    continue
  fi
  inputs="$(inputs_of "$name")" || inputs='' # before the step: a tree changed meanwhile is not what it began with
  command_of "$name"
  PYTHONPATH="$patched:$ROOT${PYTHONPATH:+:$PYTHONPATH}" "${command[@]}" </dev/null \
    >"$out/steps/$name.out" 2>"$out/steps/$name.log" || rc=$?
  printf 'name=%s\nrc=%s\nseconds=%s\ninputs=%s\n' "$name" "$rc" "$((SECONDS - start))" "$inputs" >"$record"
  printf '%s: exit %s\n' "$name" "$rc" >&2
done 3<<<"$STEPS"

rc=0
"$PYTHON" "$GPU/summarise.py" --steps "$out" >"$out/table.md" || rc=$?
cat "$out/table.md"
exit "$rc"
