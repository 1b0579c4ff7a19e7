"""The arithmetic of the bench, its rounds with real files, and what it refuses to call cold."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from q4kit.bench import machine
from q4kit.errors import EnvironmentFault
from q4kit.ple import commands, contenders, disk, fio, measure, render, summary, table

MIB = 1 << 20


def wave(us: float) -> fio.FioRun:
    return fio.FioRun(16, 16e6 / us, us, 2 * us, us)


def bulk(iops: float) -> fio.FioRun:
    return fio.FioRun(64, iops, 1.0, 2.0, 1.0)


def sample(reader: str, rows: int, cache: str, *seconds: float, requests: int | None = None) -> summary.Samples:
    return summary.Samples(reader, rows, cache, list(seconds), cpu_seconds=0.5, requests=requests, mapped_bytes=3 * MIB)


def test_summary_of_known_samples() -> None:
    line = summary.summarise(sample("auto", 16, "cold", 1e-3, 2e-3, 3e-3, requests=48))
    assert (line.batches, line.p50_us, line.mean_us) == (3, pytest.approx(2000), pytest.approx(2000))
    assert line.p95_us == pytest.approx(2900)
    assert line.rows_per_s == pytest.approx(8000)
    assert line.iops == pytest.approx(48 / 6e-3)
    assert line.cpu_us == pytest.approx(0.5 / 3 * 1e6)
    assert line.mapped_mib == 3


def test_ratios_from_known_parts() -> None:
    lines = [
        summary.summarise(sample("auto", 16, "cold", 240e-6)),
        summary.summarise(sample("auto", 32_768, "cold", 0.4096)),
        summary.summarise(sample("auto", 32_768, "warm", 0.002)),
        summary.summarise(sample("memmap", 32_768, "warm", 0.006)),
        summary.summarise(sample("auto", 16, "warm", 20e-6)),
    ]
    ratios = summary.ratios(lines, [wave(190), wave(200), wave(900)], {32: [bulk(50_000)], 64: [bulk(100_000)]})
    assert ratios["step_cold_over_fio"] == pytest.approx(1.2)
    assert ratios["chunk_cold_over_fio"] == pytest.approx(0.8)
    assert ratios["chunk_warm_over_memmap"] == pytest.approx(3.0)
    assert ratios["step_warm_us"] == pytest.approx(20)
    assert ratios["fio_best_iops"] == 100_000
    assert render.meets("step_cold_over_fio", 1.2)
    assert not render.meets("chunk_cold_over_fio", 0.8)


def test_best_depth_is_the_best_median_not_the_best_run() -> None:
    """One lucky run of a depth must not raise the bar, nor one unlucky run lower it."""
    runs = {32: [bulk(90_000), bulk(91_000), bulk(10)], 64: [bulk(200_000), bulk(1), bulk(2)]}
    assert summary.ratios([], [], runs)["fio_best_iops"] == 90_000


def test_what_was_not_measured_has_no_ratio() -> None:
    ratios = summary.ratios([summary.summarise(sample("auto", 16, "cold", 1.0))], [], {})
    assert ratios["step_cold_over_fio"] is None
    assert ratios["chunk_warm_over_memmap"] is None
    text = render.report([], [], {}, ratios, []).text()
    assert "step_cold_over_fio" in text


def test_fio_output_is_read() -> None:
    read = {
        "iops": 1234.5,
        "lat_ns": {"mean": 5000.0, "percentile": {"50.000000": 4000, "99.000000": 9000}},
    }
    text = "fio: a note before the JSON\n" + json.dumps({"jobs": [{"read": read}]})
    assert fio.parse(text, 16) == fio.FioRun(16, 1234.5, 4.0, 9.0, 5.0)


@pytest.mark.skipif(not fio.available(), reason="fio is not installed")
def test_fio_for_real(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(np.random.default_rng(0).bytes(8 * MIB))
    before = path.read_bytes()
    one = fio.random_reads(path, 16, 0.2, wave=True)
    assert one.iops > 0
    assert 0 < one.p50_us <= one.p99_us
    assert path.read_bytes() == before
    with pytest.raises(EnvironmentFault, match="fio failed on gone"):
        fio.random_reads(tmp_path / "gone", 4, 0.1)


def test_random_table_is_made_once_and_again_when_damaged(tmp_path: Path) -> None:
    place = table.random_table(tmp_path, 2 * MIB)
    data = place / "ple_table.bin"
    rows = json.loads((place / "ple.json").read_text())["rows"]
    assert data.stat().st_size == rows * 160
    first, made = data.read_bytes(), data.stat().st_mtime_ns
    assert len(set(first[:4096])) > 200
    assert table.random_table(tmp_path, 2 * MIB) == place
    assert data.stat().st_mtime_ns == made
    data.write_bytes(first[:-1])
    assert table.random_table(tmp_path, 2 * MIB) == place
    assert data.read_bytes() == first


@pytest.mark.parametrize("name", sorted(contenders.BASELINES))
def test_baselines_read_the_rows(tmp_path: Path, name: str) -> None:
    rows = np.random.default_rng(1).integers(0, 256, (500, 160), dtype=np.uint8)
    (tmp_path / "t").write_bytes(rows.tobytes())
    contender = contenders.BASELINES[name](tmp_path / "t", 160)
    ids = np.array([499, 0, 7, 7])
    out = np.zeros((4, 160), dtype=np.uint8)
    contender.read(ids, out)
    got = contender._last if isinstance(contender, contenders.Memmap) else out
    assert (got == rows[ids]).all()
    contender.release()
    contender.close()


def test_rounds_measure_every_cell_and_count(tmp_path: Path) -> None:
    place = table.random_table(tmp_path, 16 * MIB)
    path = place / "ple_table.bin"
    rows = path.stat().st_size // 160
    opened = {name: make(path, 160) for name, make in contenders.BASELINES.items()}
    plan = measure.Plan({16: 3, 300: 1}, 2, 0.1, (), frozenset({("memmap", "cold"), ("threads-16", "warm")}))
    result = measure.run(opened, [path], 160, rows, plan, with_fio=False, seed=1)
    for contender in opened.values():
        contender.close()
    counts = {key: len(s.seconds) for key, s in result.samples.items()}
    assert counts == {
        ("memmap", 16, "cold"): 6,
        ("memmap", 300, "cold"): 1,
        ("threads-16", 16, "cold"): 6,
        ("threads-16", 300, "cold"): 2,
        ("memmap", 16, "warm"): 10,
        ("memmap", 300, "warm"): 10,
        ("threads-16", 16, "warm"): 10,
        ("threads-16", 300, "warm"): 1,
    }
    for (_, _, cache), samples in result.samples.items():
        assert samples.resident, "no series is called cold or warm unseen"
        if cache == "cold":
            assert max(samples.resident) <= measure.MAX_RESIDENT_COLD
        else:
            assert min(samples.resident) >= measure.MIN_RESIDENT_WARM
    assert result.samples["memmap", 300, "warm"].mapped_bytes > 0
    assert not result.partial


def test_a_mapped_table_is_not_called_cold(tmp_path: Path) -> None:
    place = table.random_table(tmp_path, 16 * MIB)
    path = place / "ple_table.bin"
    contender = contenders.SixteenThreads(path, 160)
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as held:
        sum(held[:: mmap.PAGESIZE])
        with pytest.raises(EnvironmentFault, match="still in the page cache") as caught:
            measure.run({"x": contender}, [path], 160, 100, measure.Plan({16: 1}, 1, 0.1, ()), with_fio=False)
    contender.close()
    assert "map the table" in caught.value.remedy


def test_a_table_that_leaves_the_page_cache_is_read_again_before_each_warm_series(tmp_path: Path) -> None:
    place = table.random_table(tmp_path, 16 * MIB)
    path = place / "ple_table.bin"

    class Reclaimed(contenders.SixteenThreads):
        """A machine that takes the pages back after every batch."""

        def read(self, ids: contenders.Ids, out: contenders.Rows) -> None:
            super().read(ids, out)
            shares.append(machine.evict([path]))

    shares: list[float | None] = []
    contender = Reclaimed(path, 160)
    result = measure.run({"x": contender}, [path], 160, 100, measure.Plan({16: 1}, 3, 0.1, ()), with_fio=False)
    contender.close()
    assert max(share for share in shares if share is not None) < measure.MIN_RESIDENT_WARM
    assert len(result.samples["x", 16, "warm"].resident) == 3
    assert min(result.samples["x", 16, "warm"].resident) >= measure.MIN_RESIDENT_WARM


@pytest.mark.parametrize(("stays", "words"), [(0, "no warm figures: only"), (1, "warm rounds ended early: only")])
def test_a_table_that_never_stays_warm_keeps_its_cold_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: int, words: str
) -> None:
    place = table.random_table(tmp_path, 4 * MIB)
    path = place / "ple_table.bin"
    read, calls = machine.warm, []

    def warm(files: Sequence[Path]) -> float | None:
        """Read the table, and give its pages back from the call `stays` on: a machine without room for it."""
        calls.append(read(files))
        return calls[-1] if len(calls) <= stays else machine.evict(files)

    def batches(*arguments: Any) -> summary.Samples:
        samples = measured(*arguments)
        machine.evict([path])
        return samples

    measured = measure._batches
    monkeypatch.setattr(measure.machine, "warm", warm)
    monkeypatch.setattr(measure, "_batches", batches)
    contender = contenders.SixteenThreads(path, 160)
    result = measure.run({"x": contender}, [path], 160, 100, measure.Plan({16: 3}, 2, 0.1, ()), with_fio=False)
    contender.close()
    assert len(result.samples["x", 16, "cold"].seconds) == 6
    assert (("x", 16, "warm") in result.samples) == bool(stays)
    assert not result.partial
    assert "of the table stays in the page cache" in result.to_json()["no_warm"]
    (warning,) = commands.warnings(result)
    assert warning.startswith(words)


def test_a_whole_run_has_no_warning() -> None:
    assert commands.warnings(measure.Measurement()) == []
    assert commands.warnings(measure.Measurement(partial=True)) == ["interrupted: partial"]


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    place = table.random_table(tmp_path, 4 * MIB)
    path = place / "ple_table.bin"

    class Stops(contenders.SixteenThreads):
        left = 2

        def read(self, ids: contenders.Ids, out: contenders.Rows) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            super().read(ids, out)

    contender = Stops(path, 160)
    result = measure.run({"x": contender}, [path], 160, 100, measure.Plan({16: 5}, 1, 0.1, ()), with_fio=False)
    contender.close()
    assert result.partial
    assert result.to_json()["partial"] is True
    assert len(result.samples["x", 16, "cold"].seconds) == 2


def test_mapped_rss_reads_smaps(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "7f00-7f10 r--s 00000000 fe:00 1  /data/ple_table.bin\nRss:  12 kB\nPss: 99 kB\n"
        "7f20-7f30 r--s 00000000 fe:00 2  /data/other.bin\nRss:  50 kB\n"
        "7f40-7f50 r--s 00000000 fe:00 1  /data/ple_table.bin\nRss:  8 kB\n"
    )
    assert measure.mapped_rss(smaps=smaps) == 20 * 1024
    assert measure.mapped_rss(smaps=tmp_path / "gone") == 0


def test_plot_is_a_png() -> None:
    lines = [summary.summarise(sample("auto", n, c, 1e-3)) for n in (16, 256) for c in ("cold", "warm")]
    assert render.png(lines, 1e5, "x").startswith(b"\x89PNG")


def test_disk_description_names_the_filesystem(tmp_path: Path) -> None:
    found = disk.describe(tmp_path)
    assert found["free_bytes"] > 0
    assert found.get("filesystem")
