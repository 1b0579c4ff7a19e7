"""Hold GPU memory in another process so that a given amount stays free: a big card takes the size of a small one.

Run as `python -m q4kit.gate.ballast FREE_GIB` with a pipe as stdin. One JSON line on stdout says what is held and
what is free; end of file on stdin ends the process, so it never outlives its owner.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from q4kit.errors import EnvironmentFault, UsageError

GIB = 2**30
_CHUNK = GIB // 2
_START_TIMEOUT_S = 120.0
TOLERANCE_GIB = 0.6
"""How far from the target the free memory may end, GiB: one block."""


class Ballast:
    """The holding process of one GPU, named as in CUDA_VISIBLE_DEVICES. Use as a context manager."""

    def __init__(self, python: str, free_gib: float, gpu: str) -> None:
        if free_gib <= 0:
            raise UsageError(f"--ballast-free-gib {free_gib}: must be above 0", remedy="for example 24")
        self.free_gib, self.gpu = free_gib, gpu
        self.report: dict[str, Any] = {}
        self._command = [python, "-m", "q4kit.gate.ballast", str(free_gib)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": self.gpu},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            self.report = json.loads(line)
        except ValueError:
            _, said = self._process.communicate(timeout=_START_TIMEOUT_S)
            self._process = None
            raise EnvironmentFault(
                f"the ballast of GPU {self.gpu} did not start: {said.strip()[-400:] or 'no output'}",
                remedy="--ballast-free-gib needs torch with CUDA and a GPU",
            ) from None
        check_held(self.report, self.free_gib, self.__exit__)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._process is not None:
            self._process.communicate(timeout=_START_TIMEOUT_S)  # closes stdin, which ends it
            self._process = None


def check_held(report: dict[str, Any], free_gib: float, release: Any = lambda: None) -> None:
    """Raise EnvironmentFault unless the free memory is what was asked for, within one block."""
    found = float(report["free_gib"])
    if abs(found - free_gib) > TOLERANCE_GIB:
        release()
        raise EnvironmentFault(
            f"{found:.1f} GiB of GPU memory are free with a ballast of {report['held_gib']:.1f} GiB, "
            f"expected {free_gib:g}",
            remedy="another process uses this GPU, or it is smaller than that: end it, or ask for less",
        )


def hold(free_gib: float) -> int:
    """Take memory until `free_gib` are left, say so, and keep it until stdin ends. Return 0."""
    import torch

    torch.empty(1, device="cuda")  # the context itself takes memory
    blocks = []
    while torch.cuda.mem_get_info()[0] - free_gib * GIB >= _CHUNK:
        blocks.append(torch.empty(_CHUNK, dtype=torch.uint8, device="cuda"))
    report = {"held_gib": len(blocks) * _CHUNK / GIB, "free_gib": torch.cuda.mem_get_info()[0] / GIB}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(hold(float(sys.argv[1])))
