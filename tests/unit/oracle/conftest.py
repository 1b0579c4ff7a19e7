"""Fixtures of the oracle's unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_sglang import FakeServer, fake_server
from oracle_runs import OPTIONS, Record

from q4kit import provenance
from q4kit.oracle import measure
from q4kit.oracle.plan import Options
from q4kit.oracle.recording import Recording
from q4kit.server.client import Client


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as state:
        yield state


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.base_url, timeout_s=20) as opened:
        yield opened


@pytest.fixture(autouse=True)
def known_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the fake server a model and a device: what it cannot tell would never count as equal."""
    real = provenance.collect
    runs = iter(range(10_000))

    def collect(*args, **kwargs):
        block = real(*args, **kwargs)
        block["model"] = {"name": "fake", "config_sha256": "c", "weights": "w", "dtype": "float32", "vocab_size": 512}
        block["device"] = {"kind": "cpu", "name": "fake"}
        block["time"] = f"2026-01-01T00:00:{next(runs):04d}"
        block["server_started"] = "2026-01-01T00:00:00"
        return block

    monkeypatch.setattr(provenance, "collect", collect)


@pytest.fixture
def record(client: Client, server: FakeServer) -> Record:
    """Return a function that records the fake server, `like` another recording or afresh."""

    def run(
        like: Recording | None = None, *, noise: float = 0.0, run: int = 0, options: Options = OPTIONS
    ) -> Recording:
        server.noise, server.run = noise, run
        target = measure.like(client, like) if like else measure.new_recording(client, options=options)
        measure.run(client, target)
        return target

    return run
