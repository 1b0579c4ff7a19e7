"""Tools whose output nobody reads any more, with real pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from q4kit import exit_codes

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(path.name for path in (ROOT / "tools").glob("*.py"))


def into_closed_pipe(*command: str, both: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python with stdout (`both`: and stderr) a pipe whose reading end is closed."""
    read, write = os.pipe()
    os.close(read)
    # Unbuffered, argparse's own handling of a failing write hides the closed pipe, and --help ends with 0.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    try:
        err = write if both else subprocess.PIPE
        return subprocess.run([sys.executable, *command], stdout=write, stderr=err, text=True, env=env, check=False)
    finally:
        os.close(write)


@pytest.mark.parametrize("tool", TOOLS)
def test_help_into_a_closed_pipe_ends_quietly(tool: str) -> None:
    done = into_closed_pipe(str(ROOT / "tools" / tool), "--help")
    assert (done.returncode, done.stderr) == (exit_codes.PIPE_CLOSED, "")


@pytest.mark.parametrize("command", [["budget.py"], ["budget.py", "--json"], ["claims.py", "list"]])
def test_a_report_into_a_closed_pipe_ends_quietly(command: list[str]) -> None:
    done = into_closed_pipe(str(ROOT / "tools" / command[0]), *command[1:])
    assert (done.returncode, done.stderr) == (exit_codes.PIPE_CLOSED, "")


@pytest.mark.parametrize("options", [["-c"], ["-u", "-c"]])
def test_more_than_a_buffer_after_the_reader_left(options: list[str]) -> None:
    """`| head -1` reads one line and goes: the write in the middle fails, not the flush at the end."""
    script = "from q4kit import cli\nraise SystemExit(cli.run(lambda: [print('x' * 99) for _ in range(10**5)] and 0))"
    process = subprocess.Popen([sys.executable, *options, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"x" * 99 + b"\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == exit_codes.PIPE_CLOSED


def test_stderr_into_the_same_closed_pipe(tmp_path: Path) -> None:
    done = into_closed_pipe(str(ROOT / "tools" / "budget.py"), "--model", str(tmp_path / "none"), both=True)
    assert done.returncode == exit_codes.PIPE_CLOSED


def test_a_pipe_that_breaks_elsewhere_is_still_an_error() -> None:
    script = (
        "import os\nfrom q4kit import cli\ndef main():\n    read, write = os.pipe()\n    os.close(read)\n"
        "    os.write(write, b'x')\nraise SystemExit(cli.run(main))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_a_tool_that_is_read_to_the_end_keeps_its_exit_code() -> None:
    command = [sys.executable, str(ROOT / "tools" / "budget.py"), "--vram", "0.001"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == exit_codes.NEGATIVE
    assert "DOES NOT FIT" in done.stdout
