"""Measuring prefixes in waves: trees, servers, recordings, speeds. What is measured is on disk before the next."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from q4kit import provenance
from q4kit.errors import Q4Error, ServerError
from q4kit.gate import gpu, probe, trees
from q4kit.gate.failures import boot_failure, request_failure
from q4kit.gate.plan import Config, Item, unknown_argument
from q4kit.gate.store import Record, Store, planted_hash, tree_id
from q4kit.gate.wave import Seat, Wave
from q4kit.oracle import recording as recordings
from q4kit.oracle.recording import Recording
from q4kit.series import Series
from q4kit.server.client import Client
from q4kit.server.launch import CPU_ENV, ServerProcess, launch

Progress = Callable[[str], None]
_MIB_PER_GIB = 1024


@dataclass(frozen=True)
class Ran:
    """How a call of the gate ended: whether every chosen prefix has a record and the floor is complete."""

    complete: bool
    left: tuple[int, ...]


class OutOfTimeError(Exception):
    """The budget would not hold for what comes next."""


@dataclass(kw_only=True)
class _Place(Seat):
    """One server of a wave with the record that is being filled in."""

    item: Item
    tree: Path
    record: Record
    fault: Exception | None = None
    """What keeps it from having a result: no patch is to blame. Raised when the wave is over."""
    failed: bool = False

    @property
    def on_its_gpu(self) -> int:
        """Servers on its GPU, itself included; 0 without a GPU."""
        return self.record.sharing if self.record.gpu else 0

    @property
    def asked(self) -> bool:
        """Whether it is up and has answered everything so far."""
        return self.server is not None and self.fault is None and not self.failed


class Gate:
    """Measures the chosen prefixes of a series into a folder."""

    def __init__(
        self,
        config: Config,
        series: Series,
        store: Store,
        progress: Progress,
        *,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        """`began` is what `clock` said when the budget began; now, without it."""
        self.config, self.series, self.store, self.progress, self._clock = config, series, store, progress, clock
        self._began = clock() if began is None else began
        self._longest = self._slowest = 0.0
        self._todo: list[int] = []

    def run(self, *, retry_failed: bool = False) -> Ran:
        """Measure what is not there yet, lowest prefix first, the floor beside the first one that serves."""
        known = (self.store.read(k) for k in self.config.prefixes)
        self._longest = max((record.seconds for record in known if record is not None), default=0.0)
        self._todo = [k for k in self.config.prefixes if not self._kept(k, retry_failed)]
        for prefix in tuple(self._todo):
            if unknown := unknown_argument(self.series, prefix, self.config.arguments()):
                self._write(self._record(Item(prefix), outcome="argument", reason=unknown))
        try:
            while items := self._pending()[: self.config.jobs]:
                self._check_budget()
                places = self._open_trees(len(items))
                self._check_budget()
                self._wave(items, places)
        except OutOfTimeError:
            self.progress(
                f"stopped: of {self.config.budget_s:g} s (--budget) {max(self._left() or 0.0, 0.0):.0f} s are left; "
                f"the longest wave took {self._longest:.0f} s"
            )
            return Ran(False, tuple(self._todo))
        return Ran(True, ())

    # -- what is left to do -----------------------------------------------------------------------

    def _kept(self, prefix: int, retry_failed: bool) -> bool:
        """Return whether a prefix has a whole record of this very content; an outdated one is forgotten."""
        record = self.store.read(prefix)
        if record is None:
            return False
        current = record.tree == tree_id(self.series, prefix) and record.planted == planted_hash(self.config, prefix)
        missing = record.outcome == "served" and not self.store.oracle(prefix).exists()
        if current and not missing and not (retry_failed and record.outcome == "failed"):
            return record.timed
        self.progress(f"prefix {prefix}: measured again ({'its content changed' if not current else 'as asked'})")
        self.store.forget(prefix)
        return False

    def _served(self, prefix: int) -> bool:
        record = self.store.read(prefix)
        return record is not None and record.outcome == "served"

    def _reference(self) -> int | None:
        """Return the lowest chosen prefix that served: the floor's, and the one whose ids all others score."""
        return next((prefix for prefix in self.config.prefixes if self._served(prefix)), None)

    def _pending(self) -> list[Item]:
        """Return the servers that are still to be started, in order.

        The floor's restarts come behind the prefix that is, or is expected to be, the lowest that serves. Should it
        fail they fail with it, and are started again at the next one.
        """
        from_prefix = 0 if self.config.expect is None else self.config.expect.serves_from
        may_serve = (k for k in self.config.prefixes if self._served(k) or (k in self._todo and k >= from_prefix))
        reference = next(may_serve, None)
        items = []
        for prefix in self.config.prefixes:
            if prefix in self._todo:
                items.append(Item(prefix))
            if prefix == reference:
                restarts = range(1, self.config.floor_runs + 1)
                items += [Item(prefix, n) for n in restarts if not self.store.floor_run(prefix, n).exists()]
        return items

    def _check_budget(self) -> None:
        """Raise OutOfTimeError when one more wave would probably not be done within the budget."""
        left = self._left()
        if left is not None and left < self._longest:
            raise OutOfTimeError

    def _left(self) -> float | None:
        """Return what is left of the budget, seconds; None without one."""
        return None if self.config.budget_s is None else self.config.budget_s - (self._clock() - self._began)

    def _open_trees(self, count: int) -> list[Path]:
        """Return one tree a server; all share the files of the first but those that patches touch."""
        env = {**os.environ, **(CPU_ENV if self.config.device == "cpu" else {})}
        opened: list[Path] = []
        for number in range(count):
            like = opened[0] if opened else None
            opened.append(
                trees.open_tree(self.store.tree(number), self.series, self.config.python, env, self.progress, like=like)
            )
        return opened

    # -- one wave ---------------------------------------------------------------------------------

    def _wave(self, items: Sequence[Item], opened: Sequence[Path]) -> None:
        """Start the servers of a wave, record them side by side, time them one by one.

        Every prefix that it finished is on disk, also when another one's machine fault is raised at the end.
        """
        began = self._clock()
        gpus = self.config.gpus or ("",)
        dealt = [gpus[number % len(gpus)] for number in range(len(items))]
        sharing = Counter(dealt)
        places = [
            _Place(
                item=item,
                tree=tree,
                record=self._record(item, outcome="failed", stage="boot", gpu=on, sharing=sharing[on]),
            )
            for item, tree, on in zip(items, opened, dealt, strict=False)
        ]
        if len(items) > 1:
            self.progress(f"starting {', '.join(item.name for item in items)} side by side")
        with ExitStack() as stack, Wave(places) as wave:
            wave.boot(partial(self._boot, stack, began))
            self._record_all(wave, began)
            self._time_all(wave, began)
        self._longest = max(self._longest, self._clock() - began)
        self._raise_fault(places)

    def _raise_fault(self, places: Sequence[_Place]) -> None:
        """Raise what kept a server from having a result: a fault of the machine before the end of the time."""
        reference = self._reference()
        faults = [
            place.fault
            for place in places
            if place.fault is not None and (not place.item.restart or place.item.prefix == reference)
        ]
        for fault in sorted(faults, key=lambda fault: isinstance(fault, OutOfTimeError)):
            raise fault

    def _boot(self, stack: ExitStack, began: float, place: _Place, progress: Any) -> ServerProcess | None:
        """Start a server on its tree. One that does not come up is recorded; None then, and when time is up."""
        path = stack.enter_context(trees.at_prefix(place.tree, self.series, place.item.prefix, self.config.plant))
        start = self._clock()
        try:
            server = self._launch(place, path, progress)
        except OutOfTimeError as error:
            place.fault = error
            return None
        except ServerError as error:
            log = self._log(place.item.name)
            self._failed(place, error, began, partial(boot_failure, place.item.name, error, log, place.on_its_gpu))
            return None
        place.record = replace(place.record, stage="oracle", boot_s=self._clock() - start)
        return server

    def _launch(self, place: _Place, path: Path, progress: Any) -> ServerProcess:
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
                env={"CUDA_VISIBLE_DEVICES": place.record.gpu} if place.record.gpu else None,
                log_path=self.store.log(place.item.name),
                timeout_s=timeout_s,
                device=self.config.device,
                progress=progress,
            )
        except ServerError as error:
            if timeout_s < self.config.timeout_s and str(error).startswith("the server was not healthy after"):
                raise OutOfTimeError from error
            raise

    def _record_all(self, wave: Wave[_Place], began: float) -> None:
        """Record every server of a wave at once, and the reference twice: nothing of it is a time."""
        left = self._left()
        if left is not None and left <= 0:
            for place in wave.seats:
                if place.asked:
                    place.fault = OutOfTimeError()
            return
        stored = self._reference()
        like = None if stored is None else self.store.recording(stored)
        up = [place.item.prefix for place in wave.seats if place.asked and not place.item.restart]
        first = min([*up, *([] if stored is None else [stored])], default=None)
        chosen = [p for p in wave.seats if p.asked and (not p.item.restart or p.item.prefix == first)]
        wave.together(lambda place: self._ask(partial(self._oracle, like, first), place, began), chosen)
        # The one that was to be the reference may have failed meanwhile: the next one is repeated instead.
        left_over = [place for place in chosen if place.asked and not place.item.restart]
        if left_over and (stored is None or left_over[0].item.prefix <= stored):
            place = left_over[0]
            if not self.store.floor_run(place.item.prefix, 0).exists():
                self._ask(self._repeat, place, began)

    def _oracle(self, like: Recording | None, first: int | None, place: _Place, client: Client) -> None:
        """Record one server, and prove that it is its prefix which answered."""
        prefix = place.item.prefix
        if place.item.restart:
            recordings.write(probe.record(client, self.config, like), self.store.floor_run(prefix, place.item.restart))
            self.progress(f"floor: restart {place.item.restart} of {self.config.floor_runs} at prefix {prefix}")
            return
        if self._served(prefix):
            return  # recorded by an earlier call, whose time was up before it was timed
        recording = probe.record(client, self.config, like)
        probe.check_served(recording, self.config, prefix)
        recordings.write(recording, self.store.oracle(prefix))
        if prefix == first:
            self._repeat(place, client)

    def _repeat(self, place: _Place, client: Client) -> None:
        """Record a reference once more on the same server, for the floor."""
        prefix = place.item.prefix
        again = probe.record(client, self.config, self.store.recording(prefix))
        recordings.write(again, self.store.floor_run(prefix, 0))

    def _time_all(self, wave: Wave[_Place], began: float) -> None:
        """Time the servers of a wave one by one, each with the others paused, and write their records.

        Those that the budget has no time for are written without speeds; OutOfTimeError follows.
        """
        prefixes = [place for place in wave.seats if place.asked and not place.item.restart]
        wave.leave([place for place in wave.seats if place not in prefixes])
        for place in prefixes:
            left = self._left()
            if left is not None and left <= self._slowest:
                place.fault = OutOfTimeError()
                self._write(replace(place.record, outcome="served", stage="", seconds=self._clock() - began))
                continue
            start = self._clock()
            place.record = replace(place.record, stage="bench")
            wave.alone(partial(self._ask, self._timed, began=began), place)
            if place.asked:
                before = self._gpu_used_mib(place)
                wave.leave([place])
                after = self._gpu_used_mib(place)
                taken = None if before is None or after is None else (before - after) / _MIB_PER_GIB
                done = replace(place.record, outcome="served", stage="", gpu_gib=taken)
                self._write(replace(done, seconds=self._clock() - began))
            self._slowest = max(self._slowest, self._clock() - start)

    def _timed(self, place: _Place, client: Client) -> None:
        assert place.server is not None
        speed = probe.speed(client, self.config, self.store, place.item.prefix)
        rss, peak = probe.memory(place.server)
        place.record = replace(place.record, speed=speed, rss_gib=rss, peak_rss_gib=peak)

    # -- failures and records -----------------------------------------------------------------------

    def _ask(self, stage: Callable[[_Place, Client], None], place: _Place, began: float) -> None:
        """Run a stage on a server; one that fails it has that as its result, or a fault of the machine."""
        assert place.server is not None
        try:
            with Client(place.server.base_url) as client:
                stage(place, client)
        except ServerError as error:
            status, log = probe.exit_status(place.server), self._log(place.item.name)
            why = partial(request_failure, place.item.name, error, log, place.on_its_gpu, status)
            self._failed(place, error, began, why)

    def _failed(self, place: _Place, error: ServerError, began: float, why: Callable[[], str]) -> None:
        """Write the record of a server that failed; a floor's, and one of which the machine is to blame, has none."""
        place.failed = True
        try:
            reason = why()
        except Q4Error as fault:
            place.fault = fault
            return
        if place.item.restart:
            place.fault = error
            return
        reason = provenance.short_paths(reason)
        self._write(replace(place.record, speed=(), reason=reason, seconds=self._clock() - began))

    def _record(self, item: Item, **fields: Any) -> Record:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        planted = planted_hash(self.config, item.prefix)
        return Record(item.prefix, tree_id(self.series, item.prefix), planted, time=when, **fields)

    def _write(self, record: Record) -> None:
        self.store.write(record)
        if record.timed:
            self._todo.remove(record.prefix)
        said = {"served": f"served after {record.boot_s or 0:.0f} s"}.get(record.outcome, record.reason)
        self.progress(f"prefix {record.prefix}: {said}{'' if record.timed else ', not timed'}")

    def _log(self, name: str) -> str:
        path = self.store.log(name)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _gpu_used_mib(self, place: _Place) -> float | None:
        return gpu.used_mib(place.record.gpu) if place.record.gpu else None
