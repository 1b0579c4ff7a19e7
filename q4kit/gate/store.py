"""The folder of a gate run: one JSON a prefix, raw recordings beside it, and the settings they belong to."""

from __future__ import annotations

import gzip
import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from q4kit import locks, provenance, report
from q4kit.errors import UsageError
from q4kit.gate.plan import Config, Outcome
from q4kit.oracle import floor as floors
from q4kit.oracle import recording as recordings
from q4kit.oracle.floor import Floor
from q4kit.oracle.recording import Recording
from q4kit.series import Series

SCHEMA = "q4kit.gate/1"


@dataclass(frozen=True)
class Record:
    """What happened at one prefix.

    Attributes:
        tree: git tree id of the touched files, which is what was served; commit messages are not part of it.
        planted: sha256 of the planted patch, empty without one.
        outcome: served, failed (with `stage` and `reason`), or argument (an argument comes with a later patch).
        speed: per context: prompt tokens, mean prefill and decode rate in tokens per second, samples of each. Empty
            for a served prefix whose recording was made but whose time was up.
        rss_gib: sum of the server processes' resident memory when the measurements were done.
        peak_rss_gib: sum of each process's own peak: an upper bound on the peak of the sum.
        gpu_gib: GPU memory that its end gave back, with every other server of its wave paused.
        gpu: the GPU that it was on, empty on CPU.
        sharing: servers of its wave that were on that GPU (on CPU: that were in its wave), itself included.
        seconds: from the start of its wave to this record.
    """

    prefix: int
    tree: str
    planted: str
    outcome: Outcome
    stage: str = ""
    reason: str = ""
    boot_s: float | None = None
    rss_gib: float | None = None
    peak_rss_gib: float | None = None
    gpu_gib: float | None = None
    speed: tuple[dict[str, Any], ...] = ()
    gpu: str = ""
    sharing: int = 1
    seconds: float = 0.0
    time: str = ""

    @property
    def timed(self) -> bool:
        """Whether nothing is left to measure."""
        return self.outcome != "served" or bool(self.speed)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "speed": list(self.speed)}


def tree_id(series: Series, prefix: int) -> str:
    """Return what identifies a prefix: the id of its touched files, or of the pin."""
    return series.entries[prefix - 1].tree_after if prefix else series.base.tree


def planted_hash(config: Config, prefix: int) -> str:
    """Return the hash of the patch that is planted at a prefix, empty without one."""
    return config.plant.sha256 if config.plant is not None and prefix >= config.plant.at else ""


def settings(config: Config) -> dict[str, Any]:
    """Return what must be equal between two calls on one folder."""
    return {
        "schema": SCHEMA,
        "model": provenance.weights_fingerprint(config.model),
        "model_config": provenance.sha256_file(config.model / "config.json"),
        "device": config.device,
        "server_args": config.arguments(),
        "oracle": asdict(config.oracle),
        "bench": {"contexts": list(config.bench.contexts), "tokens": config.bench.tokens, "n": config.bench.repeats},
        "ballast_free_gib": config.free_gib,
        "plant": None if config.plant is None else {"sha256": config.plant.sha256, "at": config.plant.at},
    }


def locked(folder: Path, what: str) -> AbstractContextManager[None]:
    """Hold a folder of results, made if need be; a second process (`what` names it) raises EnvironmentFault."""
    return locks.exclusive(folder, f"{folder}: another {what} works here", "wait for it, or name another folder")


def check_settings(path: Path, wanted: dict[str, Any]) -> None:
    """Write settings where there are none yet; raise UsageError when there are others."""
    if not path.exists():
        report.write_json(path, wanted)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        unlike = [name for name in wanted if found.get(name) != json.loads(report.dump_json(wanted[name]))]
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path}: no settings ({error!r})", remedy="name a new folder") from error
    if unlike:
        name = unlike[0]
        raise UsageError(
            f"{path}: measured with another {name}: {found.get(name)!r}, now {wanted[name]!r}",
            remedy="name a new folder: results of two settings do not mix",
        )


class Store:
    """Reads and writes one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tree(self, number: int) -> Path:
        """Return the work tree of the n-th server of a wave, from 0; not a result."""
        return self.folder / (f"tree-{number + 1}" if number else "tree")

    def trees(self) -> list[Path]:
        """Return the work trees that are there, with what may be left of one."""
        return sorted({path.with_suffix("") for path in self.folder.glob("tree*.made-here")})

    def log(self, name: str) -> Path:
        """Return the path of a server log: `prefix-0007`, `floor-1`."""
        return self.folder / f"{name}.log"

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder; a second gate on it is refused."""
        return locked(self.folder, "gate")

    def check_settings(self, wanted: dict[str, Any]) -> None:
        """Keep the settings of a new folder; raise UsageError when a used one has others."""
        check_settings(self.folder / "gate.json", wanted)

    def read(self, prefix: int) -> Record | None:
        """Return a prefix's record, None when there is none."""
        path = self._record(prefix)
        if not path.exists():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("schema") != SCHEMA:
                raise ValueError("schema")
            return Record(**{**data, "speed": tuple(data["speed"])})
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: not a gate record ({error!r})", remedy="remove it to measure again") from error

    def write(self, record: Record) -> None:
        report.write_json(self._record(record.prefix), record.to_json())

    def _record(self, prefix: int) -> Path:
        return self.folder / f"prefix-{prefix:04d}.json"

    def oracle(self, prefix: int) -> Path:
        """Return the path of a prefix's oracle recording."""
        return self.folder / f"prefix-{prefix:04d}.oracle.jsonl.gz"

    def recording(self, prefix: int) -> Recording:
        return recordings.read(self.oracle(prefix))

    def floor_run(self, reference: int, number: int) -> Path:
        """Return the path of a floor run at the reference prefix; 0 is the repeat on the reference's own server."""
        return self.folder / f"floor-{reference:04d}-run-{number}.jsonl.gz"

    def floor_runs(self, reference: int) -> list[Path]:
        """Return the recordings made beside a reference prefix, in order."""
        return sorted(self.folder.glob(f"floor-{reference:04d}-run-*.jsonl.gz"))

    def floor(self, reference: int) -> Floor | None:
        """Return the floor of a reference prefix and its runs; None without a run beside it."""
        runs = [recordings.read(path) for path in self.floor_runs(reference)]
        return floors.build([self.recording(reference), *runs]) if runs else None

    def write_samples(self, prefix: int, samples: dict[str, Any]) -> None:
        """Keep the raw samples of the bench."""
        content = report.dump_json(samples).encode()
        report.write_atomic(self.folder / f"prefix-{prefix:04d}.bench.json.gz", gzip.compress(content, 9, mtime=0))

    def forget(self, prefix: int) -> None:
        """Remove what is kept of a prefix, the floor measured at it included."""
        for path in (self._record(prefix), self.oracle(prefix), *self.floor_runs(prefix)):
            path.unlink(missing_ok=True)
