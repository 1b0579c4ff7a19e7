"""Measuring prefixes: tree, server, oracle recording, speed, memory. Everything measured is on disk before the next."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from q4kit import provenance
from q4kit.bench import runner as bench
from q4kit.bench import summary
from q4kit.errors import EnvironmentFault, ServerError
from q4kit.gate import gpu, trees
from q4kit.gate.failures import killed_outside, last_error
from q4kit.gate.plan import Config, unknown_argument
from q4kit.gate.store import Record, Store, planted_hash, tree_id
from q4kit.oracle import measure
from q4kit.oracle import recording as recordings
from q4kit.oracle.recording import Recording
from q4kit.series import Series
from q4kit.server.client import Client
from q4kit.server.launch import CPU_ENV, ServerProcess, _PortTakenError, launch

Progress = Callable[[str], None]
_MIB_PER_GIB = 1024
_END_S = 5.0
"""A server whose request failed is given so long to end: the answer breaks off before its process is gone."""
_LOG_NAME = re.compile(r" \(log: .*\)$")
_KILLED = "something outside killed it: often the kernel, for want of memory (dmesg says so)"
_STATUS = re.compile(r"exited with status (-?\d+)")


@dataclass(frozen=True)
class Ran:
    """How a call of the gate ended: whether every chosen prefix has a record and the floor is complete."""

    complete: bool
    left: tuple[int, ...]


class OutOfTimeError(Exception):
    """The budget would not hold for one more server."""


class Gate:
    """Measures the chosen prefixes of a series into a folder."""

    def __init__(self, config: Config, series: Series, store: Store, progress: Progress) -> None:
        self.config, self.series, self.store, self.progress = config, series, store, progress
        self._began = time.monotonic()
        self._longest = 0.0
        self._tree: Path | None = None

    def run(self, *, retry_failed: bool = False) -> Ran:
        """Measure what is not there yet, lowest prefix first, and the floor after the first one that serves."""
        known = (self.store.read(k) for k in self.config.prefixes)
        self._longest = max((record.seconds for record in known if record is not None), default=0.0)
        todo = [k for k in self.config.prefixes if not self._kept(k, retry_failed)]
        floor_left = self._floor_left()
        if not todo and not floor_left:
            return Ran(True, ())
        if self.config.device == "cuda" and (warning := gpu.several(os.environ.get("CUDA_VISIBLE_DEVICES"))):
            self.progress(f"warning: {warning}")
        try:
            for prefix in self.config.prefixes:
                if prefix in todo:
                    unknown = unknown_argument(self.series, prefix, self.config.arguments())
                    if unknown:
                        self._write(self._record(prefix, outcome="argument", reason=unknown))
                    else:
                        self._timed(partial(self._prefix, prefix))
                    todo.remove(prefix)
                if prefix == self._reference():
                    for number in self._floor_left():
                        self._timed(partial(self._floor_run, number))
        except OutOfTimeError:
            self.progress(
                f"stopped: of {self.config.budget_s:g} s (--budget) {max(self._left() or 0.0, 0.0):.0f} s are left; "
                f"the longest server took {self._longest:.0f} s"
            )
            return Ran(False, tuple(todo))
        return Ran(True, ())

    def _kept(self, prefix: int, retry_failed: bool) -> bool:
        """Return whether a prefix has a record of this very content; an outdated one is forgotten."""
        record = self.store.read(prefix)
        if record is None:
            return False
        current = record.tree == tree_id(self.series, prefix) and record.planted == planted_hash(self.config, prefix)
        missing = record.outcome == "served" and not self.store.oracle(prefix).exists()
        if current and not missing and not (retry_failed and record.outcome == "failed"):
            return True
        self.progress(f"prefix {prefix}: measured again ({'its content changed' if not current else 'as asked'})")
        self.store.forget(prefix)
        return False

    def _reference(self) -> int | None:
        """Return the lowest chosen prefix that served: the floor's, and the one whose ids all others score."""
        for prefix in self.config.prefixes:
            record = self.store.read(prefix)
            if record is not None and record.outcome == "served":
                return prefix
        return None

    def _floor_left(self) -> list[int]:
        """Return the numbers of the floor's restarts that are not recorded yet."""
        reference = self._reference()
        numbers = range(1, self.config.floor_runs + 1)
        return [n for n in numbers if reference is None or not self.store.floor_run(reference, n).exists()]

    def _check_budget(self) -> None:
        """Raise OutOfTimeError when one more server would probably not be done within the budget."""
        left = self._left()
        if left is not None and left < self._longest:
            raise OutOfTimeError

    def _left(self) -> float | None:
        """Return what is left of the budget, seconds; None without one."""
        return None if self.config.budget_s is None else self.config.budget_s - (time.monotonic() - self._began)

    def _timed(self, step: Callable[[Path], None]) -> None:
        """Run a step on the tree, made first if need be, unless the budget would probably be over before its end."""
        self._check_budget()
        if self._tree is None:
            self._tree = self._open_tree()
            self._check_budget()
        begin = time.monotonic()
        step(self._tree)
        self._longest = max(self._longest, time.monotonic() - begin)

    def _open_tree(self) -> Path:
        env = {**os.environ, **(CPU_ENV if self.config.device == "cpu" else {})}
        return trees.open_tree(self.store.tree, self.series, self.config.python, env, self.progress)

    def _record(self, prefix: int, **fields: Any) -> Record:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        return Record(prefix, tree_id(self.series, prefix), planted_hash(self.config, prefix), time=when, **fields)

    def _write(self, record: Record) -> None:
        self.store.write(record)
        said = {"served": f"served after {record.boot_s or 0:.0f} s"}.get(record.outcome, record.reason)
        self.progress(f"prefix {record.prefix}: {said}")

    def _prefix(self, prefix: int, tree: Path) -> None:
        """Serve one prefix and write its record, whatever comes of it but a fault of the machine."""
        began = time.monotonic()
        before = self._gpu_used_mib()
        with trees.at_prefix(tree, self.series, prefix, self.config.plant) as path:
            record = self._served(self._record(prefix, outcome="failed", stage="boot"), path, before)
        record = replace(record, reason=provenance.short_paths(record.reason), seconds=time.monotonic() - began)
        self._write(record)

    def _served(self, record: Record, path: Path, gpu_before: float | None) -> Record:
        """Return the record of a prefix that was started from `path`: with its figures, or with why it failed.

        A fault of the machine, of which no patch can be the cause, raises EnvironmentFault instead.
        """
        prefix, name, start = record.prefix, f"prefix-{record.prefix:04d}", time.monotonic()
        try:
            server = self._launch(name, path)
        except ServerError as error:
            return replace(record, reason=self._boot_failure(name, error))
        with server:
            record = replace(record, stage="oracle", boot_s=time.monotonic() - start)
            try:
                with Client(server.base_url) as client:
                    recording = self._oracle(client, prefix)
                    if self._reference() in (None, prefix):
                        repeat = self._record_like(client, recording)
                        recordings.write(repeat, self.store.floor_run(prefix, 0))
                    record = replace(record, stage="bench")
                    record = replace(record, speed=self._bench(client, prefix))
            except ServerError as error:
                if killed_outside(_status(server), self._log(name)):
                    raise _machine(name, "the server was killed", last_error(self._log(name)), _KILLED) from error
                return replace(record, reason=str(error).splitlines()[0])
            rss, peak = _memory(server)
            now = self._gpu_used_mib()
        taken = None if now is None or gpu_before is None else (now - gpu_before) / _MIB_PER_GIB
        return replace(record, outcome="served", stage="", rss_gib=rss, peak_rss_gib=peak, gpu_gib=taken)

    def _boot_failure(self, name: str, error: ServerError) -> str:
        """Return why a server did not start; EnvironmentFault when that says nothing about its code."""
        log = self._log(name)
        what, last = _LOG_NAME.sub("", str(error).splitlines()[0]), last_error(log)
        if what.startswith("the server was not healthy after"):
            raise _machine(name, what, last, "a busy or slow machine: give it longer with --timeout") from error
        if isinstance(error, _PortTakenError):
            raise _machine(name, what, last, "other programs take the ports: end them") from error
        if what.startswith("cannot start"):
            raise _machine(name, what, "", "name an interpreter that runs: --python") from error
        status = _STATUS.search(what)
        if killed_outside(int(status[1]) if status else None, log):
            raise _machine(name, what, last, _KILLED) from error
        return f"{what}: {last}"

    def _log(self, name: str) -> str:
        path = self.store.log(name)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _gpu_used_mib(self) -> float | None:
        return gpu.used_mib() if self.config.device == "cuda" else None

    def _floor_run(self, number: int, tree: Path) -> None:
        """Start the reference prefix once more and record it."""
        reference = self._reference()
        assert reference is not None
        with (
            trees.at_prefix(tree, self.series, reference, self.config.plant) as path,
            self._launch(f"floor-{number}", path) as server,
            Client(server.base_url) as client,
        ):
            run = self._record_like(client, self.store.recording(reference))
        recordings.write(run, self.store.floor_run(reference, number))
        self.progress(f"floor: restart {number} of {self.config.floor_runs} at prefix {reference}")

    def _launch(self, name: str, path: Path) -> ServerProcess:
        """Start a server; OutOfTimeError when what is left of the budget ends before it is up."""
        left = self._left()
        timeout_s = self.config.timeout_s if left is None else min(self.config.timeout_s, left)
        if timeout_s <= 0:
            raise OutOfTimeError
        try:
            return launch(
                self.config.model,
                python=self.config.python,
                pythonpath=path,
                extra_args=self.config.arguments(),
                log_path=self.store.log(name),
                timeout_s=timeout_s,
                device=self.config.device,
            )
        except ServerError as error:
            if timeout_s < self.config.timeout_s and str(error).startswith("the server was not healthy after"):
                raise OutOfTimeError from error
            raise

    def _oracle(self, client: Client, prefix: int) -> Recording:
        """Record a prefix over the reference's ids, and prove that it is the prefix which answered."""
        reference = self._reference()
        if reference is None:
            recording = measure.new_recording(client, options=self.config.oracle, source="ids", tool="gate")
            measure.run(client, recording)
        else:
            recording = self._record_like(client, self.store.recording(reference))
        self._check_served(recording, prefix)
        recordings.write(recording, self.store.oracle(prefix))
        return recording

    def _record_like(self, client: Client, reference: Recording) -> Recording:
        recording = measure.like(client, reference, tool="gate")
        measure.run(client, recording)
        return recording

    def _check_served(self, recording: Recording, prefix: int) -> None:
        """Raise EnvironmentFault when another SGLang answered than the tree of this prefix."""
        found = recording.provenance.get("series")
        if planted_hash(self.config, prefix):
            return  # the planted file is no state of the series
        if not isinstance(found, dict) or found.get("prefix") != prefix:
            raise EnvironmentFault(
                f"the server's code is series {found!r}, expected prefix {prefix}",
                remedy="something else is in front on PYTHONPATH, or the tree was changed while serving",
            )

    def _bench(self, client: Client, prefix: int) -> tuple[dict[str, Any], ...]:
        result = bench.run_contexts(client, self.config.bench, bench.RunResult())
        self.store.write_samples(
            prefix,
            {
                "provenance": provenance.collect(client, tool="gate"),
                "points": [
                    {"context": p.context, "kind": p.kind.value, "repeats": [r.to_json() for r in p.repeats]}
                    for p in result.points
                ],
            },
        )
        if result.ended is bench.Ended.INTERRUPTED:
            raise KeyboardInterrupt
        if result.ended is bench.Ended.FAULT:
            raise ServerError(result.fault, remedy=result.remedy)
        return tuple(_speed(summary.summarise(point)) for point in result.points)


def _speed(point: summary.PointSummary) -> dict[str, Any]:
    return {
        "context": point.context,
        "tokens": point.tg_name,
        "n": point.valid,
        "prefill_tok_s": point.prefill.mean if point.prefill else None,
        "decode_tok_s": point.decode.mean if point.decode else None,
        "decode_cv": point.decode.cv if point.decode and point.decode.n > 1 else None,
        "refusals": point.refusals,
    }


def _memory(server: ServerProcess) -> tuple[float, float]:
    """Return resident memory of the server's processes and the sum of their peaks, GiB."""
    resident = peak = 0
    main = psutil.Process(server.pid)
    for process in [main, *main.children(recursive=True)]:
        with suppress(psutil.Error, OSError):
            resident += process.memory_info().rss
            peak += peak_rss(Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"))
    return resident / 2**30, peak / 2**30


def _status(server: ServerProcess) -> int | None:
    """Return the exit status of a server whose request failed, None when it goes on running."""
    deadline = time.monotonic() + _END_S
    while server.returncode is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return server.returncode


def _machine(name: str, what: str, last: str, remedy: str) -> EnvironmentFault:
    """Return the fault of a machine, which leaves no record."""
    said = f"; the last line of {name}.log: {last}" if last else ""
    return EnvironmentFault(f"{name}: {what}{said}", remedy=f"{remedy}. Nothing is recorded: the next call tries again")


def peak_rss(status: str) -> int:
    """Return VmHWM of a /proc/PID/status text, bytes; 0 when it has none (a kernel thread, a zombie)."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
