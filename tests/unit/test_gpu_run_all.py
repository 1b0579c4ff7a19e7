"""tests/gpu/run_all.sh: lists without a GPU, skips with the reason, continues where it was, and tells the outcome.

A stand-in for the Python of a GPU machine reports the GPU and answers for the scripts; the shell script is real.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[1] / "gpu"
STAND_IN = """#!/bin/sh
case $1 in
  -c) [ -z "$GPU_GIB" ] && exit 1; echo "$GPU_GIB"; exit 0 ;;
  */summarise.py) exec {python} "$@" ;;
esac
echo "$@" >> "$CALLS"
echo '{{"case": "one", "ok": true}}'
echo "a line that is no case"
echo "{{\\"case\\": \\"two\\", \\"ok\\": $OK}}"
[ "$OK" = true ]
"""


class Machine:
    """A folder for results, a patched tree, and the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.out, self.tree, self.calls = folder / "out", folder / "tree", folder / "calls"
        (self.tree / "sglang").mkdir(parents=True)
        (self.tree / "sglang" / "version.py").touch()
        self.python = folder / "python"
        self.python.write_text(STAND_IN.format(python=sys.executable))
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def run(self, *args: str, gpu_gib: str = "140.5", ok: str = "true") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PYTHON": str(self.python),
            "GPU_GIB": gpu_gib,
            "OK": ok,
            "CALLS": str(self.calls),
        }
        return subprocess.run([GPU / "run_all.sh", *args], capture_output=True, text=True, env=environment, timeout=120)

    def step(self, *more: str, **how: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.out), "--patched", str(self.tree), "--only", "bcg_outputs", *more, **how)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_list_names_every_unit_script_and_needs_no_gpu(machine: Machine) -> None:
    done = machine.run("--list", gpu_gib="")
    assert done.returncode == 0
    listed = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines()[1:]}
    (scripts,) = re.findall(r'parametrize\("script", \[(.*)\]', (GPU / "test_units.py").read_text())
    assert set(re.findall(r"\w+", scripts)) <= set(listed)
    assert {"matrix_tiny", "matrix_mid"} <= set(listed)
    assert set(listed.values()) <= {"yes", "no"}


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


def test_a_step_that_holds_is_not_run_again_unless_asked(machine: Machine) -> None:
    first = machine.step()
    assert first.returncode == 0, first.stderr
    assert "| bcg_outputs | holds | 2/2 |" in first.stdout
    assert first.stdout == (machine.out / "table.md").read_text()
    assert machine.step().stdout == first.stdout
    assert len(machine.calls.read_text().splitlines()) == 1
    machine.step("--again")
    assert len(machine.calls.read_text().splitlines()) == 2


def test_a_step_that_fails_is_told_and_run_again(machine: Machine) -> None:
    done = machine.step(ok="false")
    assert done.returncode == 1
    assert "| bcg_outputs | FAILS | 1/2 |" in done.stdout
    assert machine.step().returncode == 0
    assert len(machine.calls.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["OUT"], "no --patched"),
        (["OUT", "--patched", "OUT"], "holds no sglang package"),
        (["OUT", "--patched", "TREE", "--only", "nothing"], "no step nothing"),
        (["OUT", "--patched", "TREE", "--tiny", "TREE"], "holds no config.json"),
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
