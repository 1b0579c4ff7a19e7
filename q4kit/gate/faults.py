"""Planted faults against the real server: what the oracle says, beside the fixed rule of the first series."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from q4kit import exit_codes, provenance
from q4kit.errors import UsageError
from q4kit.gate import store, trees
from q4kit.gate.plan import COMMON_ARGS, Plant
from q4kit.gate.run import Progress
from q4kit.oracle import align, judge, measure
from q4kit.oracle import floor as floors
from q4kit.oracle import recording as recordings
from q4kit.oracle.floor import Floor
from q4kit.oracle.judge import Comparison
from q4kit.oracle.plan import Options
from q4kit.oracle.recording import Recording
from q4kit.oracle.summary import SEED_MAX, SEED_MEAN
from q4kit.perturb import KINDS, Kind, perturb
from q4kit.report import Report, Table
from q4kit.series import Series
from q4kit.server.client import Client
from q4kit.server.launch import CPU_ENV, launch

FOLDER = Path(__file__).resolve().parents[2] / "data" / "faults"
OPTIONS = Options(scored=450, decode_tokens=76, max_prompt_tokens=300)
"""450 positions a leg, as the fixed rule asks for, on prompts short enough for a CPU."""


SCHEMA = "q4kit.oracle_faults/1"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
FLOOR_RUNS = floors.ADVISED_RUNS
"""Runs of the undamaged model that make the floor, each in a server of its own, the reference among them."""
_TAKEN = re.compile(r"reference|restart(-\d+)?")
"""Names of the recordings that every folder holds."""


@dataclass(frozen=True)
class Fault:
    """One fault: a tensor changed in a copy of the checkpoint, or a patch on the served code."""

    name: str
    what: str
    tensor: str = ""
    kind: Kind = "noise"
    relative: float = 0.05
    rows: tuple[int, int] | None = None
    patch: Path | None = None

    def settings(self) -> dict[str, Any]:
        """Return what decides its recording: the words about it do not."""
        return {
            "tensor": self.tensor,
            "kind": self.kind,
            "relative": self.relative,
            "rows": self.rows and list(self.rows),
            "patch": None if self.patch is None else provenance.sha256_file(self.patch),
        }


@dataclass(frozen=True)
class Found:
    """What both rules say about one fault."""

    fault: Fault
    comparison: Comparison

    @property
    def seed_sees(self) -> bool:
        """Whether the fixed rule, which has a prefill leg only, rejects it."""
        return not self.comparison.legs["prefill"].seed_holds

    @property
    def seed_sees_decode(self) -> bool:
        """Whether the same two thresholds would reject it if they were given the decode leg."""
        leg = self.comparison.legs.get("decode")
        return leg is None or not leg.seed_holds


def read_faults(path: Path) -> tuple[Fault, ...]:
    """Return the faults of a file; raises UsageError naming what is wrong."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
        faults: list[Fault] = []
        for entry in entries:
            name = str(entry.get("name"))
            if not _NAME.fullmatch(name) or _TAKEN.fullmatch(name) or name in (fault.name for fault in faults):
                raise ValueError(
                    f"name {name!r}: expected letters, digits, - and _, used once, no reference, restart or restart-N"
                )
            if ("tensor" in entry) == ("patch" in entry):
                raise ValueError(f"{entry.get('name')}: give tensor or patch, one of the two")
            if entry.get("kind", "noise") not in KINDS:
                raise ValueError(f"{entry.get('name')}: kind {entry['kind']!r}, expected one of {', '.join(KINDS)}")
            rows = entry.pop("rows", None)
            patch = entry.pop("patch", None)
            fault = Fault(**entry, rows=(rows[0], rows[1]) if rows else None)
            faults.append(replace(fault, patch=path.parent / patch) if patch else fault)
        return tuple(faults)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{path}: {error}", remedy="see data/faults/faults.toml") from error


class Bench:
    """Records the pin on one model, and the pin with each fault, into a folder; what is there is not measured again."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        series: Series,
        python: str,
        progress: Progress,
        *,
        floor_runs: int = FLOOR_RUNS,
    ) -> None:
        self.folder, self.model, self.series, self.python, self.progress = folder, model, series, python, progress
        if floor_runs < floors.MIN_RUNS:
            raise UsageError(
                f"{floor_runs} runs for the floor: at least {floors.MIN_RUNS}, {floors.ADVISED_RUNS} are advised"
            )
        self.floor_runs = floor_runs
        self._tree: Path | None = None

    def reference(self) -> Recording:
        """Return the recording of the undamaged model."""
        return self._recorded("reference", self.model, None, None)

    def floor(self, reference: Recording) -> Floor:
        """Return the floor: the reference and one run after each further restart."""
        names = ["restart", *(f"restart-{number}" for number in range(2, self.floor_runs))]
        return floors.build([reference, *(self._recorded(name, self.model, None, reference) for name in names)])

    def provenance(self, found: Sequence[Found]) -> dict[str, Any]:
        """Return what was measured with what: the reference's block in full, of each fault what may differ."""
        reference = self.reference()
        return provenance.collect(None, tool="oracle_faults") | {
            "reference": reference.provenance,
            "floor": self.floor(reference).runs,
            "faults": {
                each.fault.name: {
                    name: recorded.get(name) for name in ("time", "server_started", "sglang", "series", "model")
                }
                for each in found
                for recorded in [recordings.read(self._path(each.fault.name)).provenance]
            },
        }

    def damaged(self, fault: Fault, reference: Recording) -> Recording:
        """Return the recording with one fault in place."""
        if fault.patch is not None or self._path(fault.name).exists():
            return self._recorded(fault.name, self.model, fault.patch, reference)
        with tempfile.TemporaryDirectory(prefix=".model-", dir=self.folder) as scratch:
            copy = Path(scratch) / f"model-{fault.name}"
            perturb(self.model, copy, tensor=fault.tensor, relative=fault.relative, kind=fault.kind, rows=fault.rows)
            return self._recorded(fault.name, copy, None, reference)

    @contextmanager
    def opened(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Hold the folder, and remove the tree at the end.

        Raises UsageError when it holds recordings of another model, base, oracle plan or definition of a fault.
        """
        with store.locked(self.folder, "oracle_faults"):
            self._check_settings(faults)
            try:
                yield
            finally:
                self.close()

    def _check_settings(self, faults: Sequence[Fault]) -> None:
        path = self.folder / "oracle_faults.json"
        known = sorted(self.folder.glob("*.jsonl.gz"))
        if known and not path.exists():
            raise UsageError(
                f"{self.folder}: {known[0].name} is there, and no {path.name} that says what it was recorded with",
                remedy="name a new folder",
            )
        store.check_settings(
            path,
            {
                "schema": SCHEMA,
                "model": provenance.weights_fingerprint(self.model),
                "model_config": provenance.sha256_file(self.model / "config.json"),
                "tree": self.series.base.tree,
                "server_args": list(COMMON_ARGS),
                "oracle": asdict(OPTIONS),
            },
        )
        for fault in faults:
            definition = self.folder / f"{fault.name}.fault.json"
            if not self._path(fault.name).exists():
                definition.unlink(missing_ok=True)
            store.check_settings(definition, fault.settings())

    def close(self) -> None:
        """Remove the tree."""
        if self._tree is not None:
            trees.remove_tree(self._tree, self.series, self.python)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl.gz"

    def _recorded(self, name: str, model: Path, patch: Path | None, like: Recording | None) -> Recording:
        path = self._path(name)
        if path.exists():
            return recordings.read(path)
        if self._tree is None:
            env = {**os.environ, **CPU_ENV}
            self._tree = trees.open_tree(self.folder / "tree", self.series, self.python, env, self.progress)
        plant = Plant(patch, 0, "") if patch is not None else None
        self.progress(f"{name}: starting the server")
        with (
            trees.at_prefix(self._tree, self.series, 0, plant) as pythonpath,
            launch(
                model,
                python=self.python,
                pythonpath=pythonpath,
                extra_args=COMMON_ARGS,
                log_path=self.folder / f"{name}.log",
                timeout_s=600,
            ) as server,
            Client(server.base_url) as client,
        ):
            self.progress(f"{name}: recording")
            if like is None:
                recording = measure.new_recording(client, options=OPTIONS, source="ids", tool="oracle_faults")
            else:
                recording = measure.like(client, like, tool="oracle_faults")
            measure.run(client, recording)
        recordings.write(recording, path)
        return recording


def find(bench: Bench, faults: Sequence[Fault]) -> list[Found]:
    """Return what is found for each fault, measuring what is missing."""
    found = []
    with bench.opened(faults):
        reference = bench.reference()
        floor = bench.floor(reference)
        for fault in faults:
            candidate = bench.damaged(fault, reference)
            align.check_plans(reference, candidate, vary=["model.weights"])
            found.append(Found(fault, judge.compare(reference, candidate, floor)))
            bench.progress(f"{fault.name}: {found[-1].comparison.verdict}")
    return found


def report(model: str, found: Sequence[Found], block: Mapping[str, Any] | None = None) -> Report:
    """Return the table: HOLDS when the oracle sees every fault and the fixed rule none.

    Args:
        block: of `Bench.provenance`.
    """
    table = Table(
        ["fault", "prefill mean", "prefill max", "fixed rule", "decode mean", "decode max", "diverged", "oracle"],
        notes=[f"Fixed rule: mean <= {SEED_MEAN} and max <= {SEED_MAX} nats over the prefill leg."],
    )
    for each in found:
        legs = each.comparison.legs
        prefill, decode = legs["prefill"], legs["decode"]
        table.add(
            each.fault.name, prefill.mean.value, prefill.maximum, "DIFFERENT" if each.seed_sees else "fine",
            decode.mean.value, decode.maximum, len(decode.divergences), each.comparison.verdict,
        )  # fmt: skip
    return Report(
        "oracle_faults",
        verdict="HOLDS" if holds(found) else "DOES NOT HOLD",
        evidence=f"{sum(not f.seed_sees for f in found)} of {len(found)} faults pass the fixed rule, "
        f"{sum(f.comparison.verdict == judge.DIFFERENT for f in found)} are DIFFERENT to the oracle",
        facts=[("model", model), *((f"fault {f.fault.name}", f.fault.what) for f in found)],
        blocks=[table, *(f"{f.fault.name}: {f.comparison.evidence}" for f in found)],
        data={
            "faults": [
                {
                    "name": f.fault.name,
                    "what": f.fault.what,
                    "verdict": f.comparison.verdict,
                    "evidence": f.comparison.evidence,
                    "seed_rule": "DIFFERENT" if f.seed_sees else "fine",
                    "seed_rule_on_decode": "DIFFERENT" if f.seed_sees_decode else "fine",
                    "legs": {
                        name: {
                            "positions": leg.positions,
                            "changed": leg.nonzero,
                            "lost": leg.lost,
                            "diverged": len(leg.divergences),
                            "mean": leg.mean.value,
                            "max": leg.maximum,
                        }
                        for name, leg in f.comparison.legs.items()
                    },
                }
                for f in found
            ],
            "provenance": dict(block or {}),
        },
    )


def holds(found: Sequence[Found]) -> bool:
    """Return whether the oracle saw every fault and the fixed rule none."""
    return bool(found) and all(f.comparison.verdict == judge.DIFFERENT and not f.seed_sees for f in found)


def exit_code(found: Sequence[Found]) -> int:
    """Return 0 when it holds, else 1."""
    return exit_codes.HOLDS if holds(found) else exit_codes.NEGATIVE
