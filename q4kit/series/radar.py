"""Trying the series on another released version: how much work the next base would be."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from q4kit.series import analysis, manifest, wheel
from q4kit.series.analysis import PatchVerdict
from q4kit.series.base import PREFIX
from q4kit.series.blobs import blob_id
from q4kit.series.manifest import Series
from q4kit.series.wheel import Progress, silent


@dataclass(frozen=True)
class Radar:
    """One version: a verdict a patch, and for a conflict the earlier conflicts it may only follow from."""

    version: str
    wheel: str
    sha256: str
    patches: tuple[PatchVerdict, ...]
    follows: tuple[tuple[str, ...], ...]
    same_files: int
    """Touched files that are byte for byte as in the pin."""
    files: int

    @property
    def ok(self) -> bool:
        """Whether every patch fits or is contained."""
        return analysis.first_bad(self.patches) is None


def radar(
    version: str,
    *,
    series: Series | None = None,
    cache: Path | None = None,
    python: str = sys.executable,
    progress: Progress = silent,
) -> Radar:
    """Return how the series fits a released version, fetched by pip (``newest``: the newest release)."""
    series = series or manifest.load()
    if version == "newest":
        version = wheel.newest(series.base.package)
        progress(f"the newest release is {version}")
    tag = wheel.python_tag(python)
    folder = (cache or wheel.cache_dir()) / "wheels" / version / tag
    found = sorted(folder.glob("*.whl"))
    path = found[-1] if found else wheel.download(series.base.package, version, tag, folder, progress)
    return on_wheel(series, version, path)


def on_wheel(series: Series, version: str, path: Path) -> Radar:
    """Return how the series fits the files of a wheel."""
    contents: dict[str, bytes] = {}
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        for touched in series.touched:
            if (name := touched.removeprefix(f"{PREFIX}/")) in names:
                contents[touched] = archive.read(name)
    verdicts = tuple(analysis.analyse(series, contents))
    same = sum(
        (blob_id(contents[p]) if p in contents else None) == (entry.blob if entry else None)
        for p, entry in series.base.files.items()
    )
    follows = _follows(series, verdicts)
    return Radar(version, path.name, wheel.sha256(path), verdicts, follows, same, len(series.touched))


def _follows(series: Series, verdicts: tuple[PatchVerdict, ...]) -> tuple[tuple[str, ...], ...]:
    """Return, for each conflict, the earlier conflicting patches that share a file with it or that it depends on."""
    result: list[tuple[str, ...]] = []
    bad: list[int] = []
    for i, verdict in enumerate(verdicts):
        if verdict.verdict != "conflict":
            result.append(())
            continue
        mine = series.entries[i]
        earlier = (series.entries[j] for j in bad)
        result.append(tuple(e.file[:4] for e in earlier if e.file in mine.depends or set(e.files) & set(mine.files)))
        bad.append(i)
    return tuple(result)
