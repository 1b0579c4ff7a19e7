"""tests/gpu/run_all.sh: lists without a GPU, skips with the reason, continues where it was, and tells the outcome.

A stand-in for the Python of a GPU machine reports the GPU and answers for the scripts; the shell script is real.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[1] / "gpu"
STAND_IN = """#!/bin/sh
case $1 in
  -c) [ -z "$GPU_GIB" ] && exit 1; echo "$GPU_GIB"; exit 0 ;;
  */summarise.py | */inputs.py) exec {python} "$@" ;;
  */make_tiny_model.py)
    [ -n "$NO_MODEL" ] && exit 1
    mkdir -p "$2" && echo '{{}}' > "$2/config.json" && shift 2 && echo "$@" > "$MADE"; exit 0 ;;
esac
echo "$@" >> "$CALLS"
echo '{{"case": "one", "ok": true}}'
echo "a line that is no case"
echo "{{\\"case\\": \\"two\\", \\"ok\\": $OK}}"
[ "$OK" = true ]
"""
AWK = """#!/bin/bash
exec {awk} "${{@/#\\/proc\\/meminfo/{meminfo}}}"
"""
"""Shows the script a machine with 64 GiB of memory, whichever this is."""
DF = """#!/bin/sh
echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
echo "/dev/stand-in 999999999 0 $(($DISK_GIB * 1048576)) 1% /"
"""
"""Shows the script a disk with DISK_GIB free, whatever this machine has left."""
PARSE_ONLY = """
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
def only(*args, **more):
    parse(*args, **more)
    raise SystemExit(0)
argparse.ArgumentParser.parse_args = only
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script up to and with the reading of its arguments."""


class Machine:
    """A folder for results, a patched tree, and the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.out, self.tree, self.calls = folder / "out", folder / "tree", folder / "calls"
        self.made = folder / "made"
        """The options of the last checkpoint that was made."""
        (self.tree / "sglang").mkdir(parents=True)
        (self.tree / "sglang" / "version.py").touch()
        self.python = folder / "python"
        self.python.write_text(STAND_IN.format(python=sys.executable))
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)
        (folder / "meminfo").write_text(f"MemAvailable: {64 << 20} kB\n")
        self.bin = folder / "bin"
        self.bin.mkdir()
        meminfo = str(folder / "meminfo").replace("/", "\\/")
        (self.bin / "awk").write_text(AWK.format(awk=shutil.which("awk"), meminfo=meminfo))
        (self.bin / "df").write_text(DF)
        for tool in self.bin.iterdir():
            tool.chmod(0o755)

    def run(
        self, *args: str, gpu_gib: str = "140.5", disk_gib: int = 200, ok: str = "true", no_model: str = ""
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHON": str(self.python),
            "GPU_GIB": gpu_gib,
            "DISK_GIB": str(disk_gib),
            "OK": ok,
            "NO_MODEL": no_model,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "MADE": str(self.made),
        }
        return subprocess.run([GPU / "run_all.sh", *args], capture_output=True, text=True, env=environment, timeout=120)

    def step(self, *more: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.out), "--patched", str(self.tree), "--only", "bcg_outputs", *more, **how)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def listed(machine: Machine) -> dict[str, list[str]]:
    """Return what --list says of each step."""
    done = machine.run("--list", gpu_gib="")
    assert done.returncode == 0
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[1:]}


def script_of(step: str) -> str:
    """Return the script that a step runs."""
    return re.sub("^(matrix|ple_nvme)_.*", r"\1", step)


def test_the_list_names_every_script_and_needs_no_gpu(machine: Machine) -> None:
    scripts = {path.stem for path in GPU.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    steps = listed(machine)
    assert {script_of(name) for name in steps} == scripts - {"inputs", "summarise"}
    assert {row[-1] for row in steps.values()} == {"yes"}
    mid = {"matrix_mid", "matrix_speed", "ple_faults", "ple_nvme_bits", "ple_nvme_speed", "ple_soak"}
    assert {name for name, row in steps.items() if row[3] == "mid"} == mid
    assert {name for name, row in steps.items() if row[3] == "mid-mtp"} == {"ple_nvme_mtp"}
    assert all(float(number) >= 0 for row in steps.values() for number in row[:3])


def test_the_units_test_runs_every_script_but_the_matrix(machine: Machine) -> None:
    text = (GPU / "test_units.py").read_text()
    assert {script_of(name) for name in listed(machine) if f'"{script_of(name)}"' not in text} == {"matrix"}


def test_without_a_gpu_every_step_is_skipped_with_the_reason(machine: Machine) -> None:
    done = machine.run(str(machine.out), "--patched", str(machine.tree), gpu_gib="")
    assert done.returncode == 4
    rows = done.stdout.splitlines()[2:]
    assert len(rows) == len(machine.run("--list").stdout.splitlines()) - 1
    assert all("skipped: " in row and "finds no NVIDIA GPU" in row for row in rows)
    assert not machine.calls.exists()


def test_a_gpu_too_small_is_named(machine: Machine) -> None:
    done = machine.step(gpu_gib="1.4")
    assert (done.returncode, "skipped: GPU has 1 GiB, needs 2" in done.stdout) == (4, True)


def test_a_disk_too_full_is_named(machine: Machine) -> None:
    done = machine.run(str(machine.out), "--patched", str(machine.tree), "--only", "ple_soak", disk_gib=5)
    assert (done.returncode, "skipped: 5 GiB of disk free in OUT, needs 12" in done.stdout) == (4, True)


def test_a_step_that_holds_is_not_run_again_unless_asked(machine: Machine) -> None:
    first = machine.step()
    assert first.returncode == 0, first.stderr
    assert "| bcg_outputs | holds | 2/2 |" in first.stdout
    assert first.stdout == (machine.out / "table.md").read_text()
    assert machine.step().stdout == first.stdout
    assert len(machine.calls.read_text().splitlines()) == 1
    machine.step("--again")
    assert len(machine.calls.read_text().splitlines()) == 2


def test_again_forgets_what_the_cells_of_a_step_measured(machine: Machine) -> None:
    record = machine.out / "ple_nvme_bits" / "pinned-full.json"
    record.parent.mkdir(parents=True)
    for more, kept in (([], True), (["--again"], False)):
        record.write_text("{}")
        machine.run(str(machine.out), "--patched", str(machine.tree), "--only", "ple_nvme_bits", *more)
        assert record.exists() is kept


def test_a_step_that_fails_is_told_and_run_again(machine: Machine) -> None:
    done = machine.step(ok="false")
    assert done.returncode == 1
    assert "| bcg_outputs | FAILS | 1/2 |" in done.stdout
    assert machine.step().returncode == 0
    assert len(machine.calls.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("step", "arguments"),
    [
        ("ple_step_breakdown", "ple_step_breakdown.py --folder OUT"),
        ("ple_memop", "ple_memop.py --folder OUT"),
        ("full_table", "full_table.py OUT/full_table --patched TREE"),
        ("fp8_kv_prompts", "fp8_kv_prompts.py OUT/fp8_kv_prompts --model OUT/models/gpu --patched TREE"),
        (
            "ple_nvme_bits",
            "ple_nvme.py OUT/ple_nvme_bits --model OUT/models/mid --patched TREE --jobs 1 --answers-only --repeatable",
        ),
        (
            "ple_nvme_mtp",
            "ple_nvme.py OUT/ple_nvme_mtp --model OUT/models/mid-mtp --patched TREE --jobs 1 --mtp --answers-only "
            "--repeatable --hash-rows 0",
        ),
        (
            "ple_nvme_speed",
            "ple_nvme.py OUT/ple_nvme_speed --model OUT/models/mid --patched TREE --jobs 1 --timings-only "
            "--hash-rows 0",
        ),
        (
            "matrix_tiny",
            "matrix.py OUT/matrix_tiny --model OUT/models/gpu --patched TREE --jobs 1 --half-gb 1 --all-gb 1 "
            "--answers-only --repeatable --other-model OUT/models/gpu-other",
        ),
        (
            "matrix_speed",
            "matrix.py OUT/matrix_speed --model OUT/models/mid --patched TREE --jobs 1 --half-gb 2 --timings-only "
            "--only full-pinned half-full-pinned half-full-in-place all-full-pinned paged-experts nvme-full",
        ),
        (
            "ple_faults",
            "ple_faults.py --model OUT/models/mid --patched TREE --log OUT/ple_faults/server.log "
            "--json OUT/ple_faults/record.json --raw OUT/ple_faults/samples.json",
        ),
        (
            "ple_soak",
            "ple_soak.py --model OUT/models/mid --patched TREE --seconds 240 --log OUT/ple_soak/server.log "
            "--json OUT/ple_soak/record.json --raw OUT/ple_soak/samples.json",
        ),
    ],
)
def test_a_step_gets_the_arguments_that_its_script_takes(machine: Machine, step: str, arguments: str) -> None:
    done = machine.run(str(machine.out), "--patched", str(machine.tree), "--only", step)
    assert done.returncode == 0, done.stderr
    expected = arguments.replace("OUT", str(machine.out)).replace("TREE", str(machine.tree))
    (call,) = machine.calls.read_text().splitlines()
    assert call == f"{GPU}/{expected}"
    for more, code in (([], 0), (["--frobnicate"], 2)):
        parsed = subprocess.run(
            [sys.executable, "-c", PARSE_ONLY, *call.split(), *more], capture_output=True, text=True, timeout=120
        )
        assert parsed.returncode == code, parsed.stderr


def test_speculation_gets_a_checkpoint_with_a_head_whatever_was_given(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "mid").mkdir()
    (tmp_path / "mid" / "config.json").write_text("{}")
    given = ("--mid", str(tmp_path / "mid"))
    machine.run(str(machine.out), "--patched", str(machine.tree), "--only", "ple_nvme_mtp", *given)
    assert machine.made.read_text() == "--preset mid --mtp-layers 1 --embedding-std 4 --force\n"
    assert f"--model {machine.out}/models/mid-mtp " in machine.calls.read_text()


def test_a_soak_of_another_length_is_another_soak(machine: Machine) -> None:
    def soak(*more: str) -> str:
        return machine.run(str(machine.out), "--patched", str(machine.tree), "--only", "ple_soak", *more).stderr

    soak()
    assert "holds already" in soak("--soak", "240")
    assert "running again" in soak("--soak", "1800")
    assert " --seconds 1800 " in machine.calls.read_text().splitlines()[-1]


def matrix(machine: Machine, *more: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return machine.run(str(machine.out), "--patched", str(machine.tree), "--only", "matrix_tiny", *more, **how)


def test_a_step_runs_again_for_another_tree(machine: Machine) -> None:
    machine.step()
    (machine.tree / "sglang" / "model.py").write_text("x = 1\n")
    again = machine.step()
    assert "bcg_outputs: holds for another tree, model or script: running again" in again.stderr
    assert len(machine.calls.read_text().splitlines()) == 2
    assert "holds already" in machine.step().stderr
    (machine.tree / "sglang" / "__pycache__").mkdir()
    (machine.tree / "sglang" / "__pycache__" / "model.pyc").write_bytes(b"compiled")
    assert "holds already" in machine.step().stderr


def test_an_outcome_without_its_inputs_is_not_trusted(machine: Machine) -> None:
    machine.step()
    (record,) = (machine.out / "steps").glob("*.step")
    record.write_text("name=bcg_outputs\nrc=0\nseconds=1\n")
    assert "running again" in machine.step().stderr


def test_a_matrix_runs_again_for_another_checkpoint_or_stock_tree(machine: Machine, tmp_path: Path) -> None:
    model, stock = tmp_path / "model", tmp_path / "stock"
    model.mkdir()
    (stock / "sglang").mkdir(parents=True)
    (stock / "sglang" / "version.py").touch()
    (model / "config.json").write_text("{}")
    matrix(machine, "--tiny", str(model))
    assert "holds already" in matrix(machine, "--tiny", str(model)).stderr
    (model / "config.json").write_text('{"layers": 2}')
    assert "running again" in matrix(machine, "--tiny", str(model)).stderr
    assert "running again" in matrix(machine, "--tiny", str(model), "--stock", str(stock)).stderr
    call = machine.calls.read_text().splitlines()[-1]
    assert f"--stock {stock} --jobs 1 --half-gb 1 --all-gb 1 " in call
    assert "--other-model" not in call  # the shapes of a given checkpoint are not known


def test_a_checkpoint_that_cannot_be_made_fails_its_step_alone(machine: Machine) -> None:
    done = matrix(machine, no_model="1")
    assert done.returncode == 1
    assert "its checkpoint could not be made" in done.stderr
    assert "| matrix_tiny | environment or server fault | - | " in done.stdout
    assert not machine.calls.exists()
    assert matrix(machine).returncode == 0
    assert (machine.out / "models" / "gpu" / "config.json").is_file()
    assert (machine.out / "models" / "gpu-other" / "config.json").is_file()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["OUT"], "no --patched"),
        (["OUT", "--patched", "OUT"], "holds no sglang package"),
        (["OUT", "--patched", "TREE", "--only", "nothing"], "no step nothing"),
        (["OUT", "--patched", "TREE", "--tiny", "TREE"], "holds no config.json"),
        (["OUT", "--patched", "TREE", "--soak", "20"], "--soak 20"),
        (["OUT", "--patched", "TREE", "--soak", "half"], "--soak half"),
        (["OUT", "--patched"], "--patched has no value"),
        (["OUT", "--frobnicate"], "unknown argument --frobnicate"),
    ],
)
def test_bad_usage_names_the_thing_and_the_remedy(machine: Machine, args: list[str], message: str) -> None:
    folders = {"OUT": str(machine.out), "TREE": str(machine.tree)}
    done = machine.run(*(folders.get(arg, arg) for arg in args))
    assert done.returncode == 2
    assert message in done.stderr
    assert "remedy: " in done.stderr
    assert not machine.out.exists()
