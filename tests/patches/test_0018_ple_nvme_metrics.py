"""Rows read from storage are counted for Prometheus and logged at an interval."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ple_checkpoints
import pytest
import torch
from ple_checkpoints import loaded, ple_modules
from prometheus_client import REGISTRY
from sglang.srt import runtime_context
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import metrics_reporter
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

LABELS = {"model_name": "tiny", "moe_ep_rank": "0"}
# Where the backend is missing, its model does not start: the fixture shows the fault.
pytestmark = pytest.mark.red_on_stock(setup=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = ple_checkpoints.write(tmp_path_factory.mktemp("model"))
    with loaded(folder, "--ple-offload-backend", "nvme", "--ple-offload-reader", "pread") as model:
        yield model


@pytest.fixture(scope="module")
def collector(model: Any) -> SchedulerMetricsCollector:
    """SGLang's real collector; prometheus_client keeps one of each name a process."""
    return SchedulerMetricsCollector({**LABELS, "moe_ep_rank": 0}, runtime_context.get_server_args())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics_reporter, "time", clock)
    return clock


def reporter(model: Any, collector: Any, clock: Clock, *, exports: bool = True) -> SchedulerMetricsReporter:
    made = object.__new__(SchedulerMetricsReporter)
    made.current_scheduler_metrics_enabled, made.is_stats_logging_rank = exports, True
    made.metrics_collector = collector
    made._ple_read_stats = getattr(model, "ple_read_stats", None)
    made._ple_next_export, made._ple_exported, made._ple_logged = 0.0, {}, (clock.now, {})
    return made


def counter(name: str) -> float:
    return REGISTRY.get_sample_value(f"sglang:ple_{name}_total", LABELS) or 0.0


COUNTS = ("rows", "unique_rows", "resident_rows", "reads", "read_bytes", "read_errors")
ROW_BYTES = 8
"""Four bf16 values."""
TEN_TOKENS = {"rows": 160, "unique_rows": 80, "reads": 80, "read_bytes": 80 * ROW_BYTES}
"""What `read(model, 10)` counts: pread reads each distinct row, wherever its page is."""


def since(before: dict[str, float]) -> dict[str, float]:
    """Return the counters that moved, and by how much."""
    return {name: counter(name) - before[name] for name in COUNTS if counter(name) != before[name]}


def read(model: Any, tokens: int, sequences: int = 1) -> None:
    """Read `tokens` tokens' rows of one table, every row twice."""
    ids = torch.arange(tokens * 8).repeat_interleave(2).reshape(tokens, 16)
    ple_modules(model)[1].ngram_embedding(ids, torch.arange(tokens) % sequences)


@contextmanager
def cut(path: Path) -> Iterator[None]:
    """Take the last byte of a file away, and give it back."""
    stat, last = path.stat(), path.read_bytes()[-1:]
    os.truncate(path, stat.st_size - 1)
    try:
        yield
    finally:
        with path.open("ab") as file:
            file.write(last)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_counters_are_what_was_read(model: Any, collector: Any, clock: Clock) -> None:
    made = reporter(model, collector, clock)
    made.report_ple_reads()
    before, waited = {name: counter(name) for name in COUNTS}, counter("wait_seconds")
    read(model, 10)
    clock.now += 0.5
    made.report_ple_reads()
    assert since(before) == {}, "exported again within a second"
    clock.now += 0.5
    made.report_ple_reads()
    assert since(before) == TEN_TOKENS
    assert counter("wait_seconds") > waited
    assert {name: counter(name) for name in COUNTS} == {name: model.ple_read_stats()[name] for name in COUNTS}


def test_failed_reads_are_counted_as_such_alone(model: Any, collector: Any, clock: Clock) -> None:
    made = reporter(model, collector, clock)
    made.report_ple_reads()
    before = {name: counter(name) for name in COUNTS}
    with cut(Path(ple_modules(model)[1].ngram_embedding.reader.source.files[0].path)):
        read(model, 10, sequences=2)
    assert list(model.take_failed_requests()) == [0, 1]
    clock.now += 1
    made.report_ple_reads()
    assert since(before) == {"read_errors": 3}, "the batch, and each of its two sequences on its own"
    read(model, 10)
    clock.now += 1
    made.report_ple_reads()
    assert since(before) == {"read_errors": 3} | TEN_TOKENS


@pytest.mark.parametrize("fully_idle", [False, True])
def test_the_last_steps_before_a_pause_are_exported_and_logged(
    model: Any,
    collector: Any,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fully_idle: bool,
) -> None:
    """The last batch comes within the second, and no other follows: the idle scheduler reports it."""
    monkeypatch.setenv("SGLANG_QWEN4_PLE_NVME_LOG_INTERVAL_S", "10")
    made = reporter(model, collector, clock)
    made._ple_logged = (clock.now, model.ple_read_stats())
    made.report_ple_reads()
    before = counter("rows")
    read(model, 10)
    clock.now += 0.2
    made.report_ple_reads()
    assert counter("rows") == before, "exported again within a second"
    scheduler = mock.MagicMock(_last_stall_publish_ts=0.0, enable_hicache_storage=False, enable_lmcache=False)
    scheduler.disaggregation_mode = DisaggregationMode.NULL
    scheduler.is_fully_idle.return_value = fully_idle
    scheduler.metrics_reporter.report_ple_reads = made.report_ple_reads
    scheduler.invariant_checker._check_all_pools.return_value = (False, [])
    scheduler.token_to_kv_pool_allocator.verify_byte_accounting.return_value = []
    clock.now += 0.8
    Scheduler.on_idle(scheduler)
    assert counter("rows") - before == 160
    with caplog.at_level(logging.INFO, metrics_reporter.__name__):
        clock.now += 9.0
        Scheduler.on_idle(scheduler)
    (line,) = caplog.messages
    assert "16 rows/s" in line


def test_a_line_is_logged_at_the_interval(
    model: Any, collector: Any, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_QWEN4_PLE_NVME_LOG_INTERVAL_S", "10")
    made = reporter(model, collector, clock, exports=False)
    made._ple_logged = (clock.now, model.ple_read_stats())
    read(model, 10)
    with caplog.at_level(logging.INFO, metrics_reporter.__name__):
        clock.now += 9
        made.report_ple_reads()
        assert not caplog.messages
        clock.now += 1
        made.report_ple_reads()
        (line,) = caplog.messages
        assert "16 rows/s, 50.0% distinct" in line
        assert "0 failed batches" in line
        clock.now += 10
        made.report_ple_reads()
        assert len(caplog.messages) == 1, "nothing was read since"


def test_a_model_without_a_table_on_storage_reports_nothing(collector: Any, clock: Clock) -> None:
    for model in (SimpleNamespace(), SimpleNamespace(ple_read_stats=lambda: None)):
        made = reporter(model, None, clock)
        made.report_ple_reads()
        assert made._ple_read_stats is None
