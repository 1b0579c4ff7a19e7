"""scripts/restart_server.sh: the script and the run folder's lock are real, what serve.sh starts is a stand-in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STAND_IN = """#!{python}
import signal, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from q4kit.serving import run
words = sys.argv[2:]
if "--broken" in words:
    sys.exit("broken on purpose")
run.catch_signals()
try:
    with run.exclusive(Path(words[words.index("--run-dir") + 1])):
        print("\\nready: " + " ".join(words), flush=True)
        time.sleep(300)
except run.StopRequested as stop:
    print(f"stopped by {{stop}}", flush=True)
"""


class Checkout:
    """A copy of scripts/ with an environment whose Python is the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        python = folder / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(STAND_IN.format(python=sys.executable, root=str(ROOT)))
        python.chmod(0o755)
        self.environment = {**os.environ, "VENV": str(folder / "venv")}

    def restart(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "scripts" / "restart_server.sh"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=120, check=False)

    def foreground(self) -> subprocess.Popen[str]:
        command = [self.folder / "scripts" / "serve.sh", "--profile", "tiny", "--run-dir", self.run_dir]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment)
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("ready: "):
            assert line, "the stand-in ended before it was ready"
        return process

    def locked(self) -> bool:
        return subprocess.run(["flock", "-n", self.run_dir / "lock", "true"], check=False).returncode == 1


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path)
    yield made
    made.restart("--stop", made.run_dir)
    assert not made.locked()


def test_it_stops_the_server_of_the_folder_and_starts_one_with_the_same_options(checkout: Checkout) -> None:
    old = checkout.foreground()
    done = checkout.restart("--profile", "tiny", "--run-dir", checkout.run_dir, "--port", 4321)
    assert done.returncode == 0, done.stderr
    assert old.wait(timeout=10) == 0
    assert old.stdout is not None
    assert f"stopped by signal {int(signal.SIGTERM)}" in old.stdout.read()
    assert f"stopping process {old.pid}" in done.stderr
    assert done.stdout == f"ready: --profile tiny --run-dir {checkout.run_dir} --port 4321\n"
    assert checkout.locked()


def test_it_starts_one_where_none_runs_and_restarts_its_own(checkout: Checkout) -> None:
    arguments = ["--profile=tiny", "--run-dir", checkout.run_dir]
    first, second = checkout.restart(*arguments), checkout.restart(*arguments)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "stopping" not in first.stderr
    started = first.stderr.split("starting process ")[1].partition(";")[0]
    assert f"stopping process {started}" in second.stderr
    assert not Path("/proc", started).exists() or Path("/proc", started, "stat").read_text().split()[2] == "Z"


def test_a_server_that_does_not_come_up_is_its_exit_code_with_its_output(checkout: Checkout) -> None:
    start = time.monotonic()
    done = checkout.restart("--profile", "tiny", "--run-dir", checkout.run_dir, "--broken")
    assert done.returncode == 1
    assert "broken on purpose" in done.stderr
    assert "error: serve.sh ended with 1 before it was ready" in done.stderr
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--profile is missing"),
        (["--profile", "tiny", "--dry-run"], "--dry-run starts nothing"),
        (["--stop"], "--stop needs one argument"),
    ],
)
def test_wrong_usage_is_exit_2_and_stops_nothing(checkout: Checkout, arguments: list[str], message: str) -> None:
    old = checkout.foreground()
    done = checkout.restart(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "remedy: " in done.stderr
    assert old.poll() is None
