"""The miniature decode step is exact, sensitive to every byte it reads, and its helpers judge as they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gpu import step_chain
from tests.gpu.step_chain import HEADS, ROW_BYTES, VOCAB, Chain, FlagGate, first_difference, quantile, write_table


def test_every_byte_of_every_row_moves_the_next_token() -> None:
    chain, rng = Chain.make(), np.random.default_rng(1)
    rows = rng.integers(0, 256, (HEADS, ROW_BYTES), dtype=np.uint8)
    before = chain.next_token(7, rows)
    unmoved = 0
    for head in range(HEADS):
        for byte in range(ROW_BYTES):
            rows[head, byte] ^= 0x40
            unmoved += chain.next_token(7, rows) == before
            rows[head, byte] ^= 0x40
    assert unmoved <= 1  # one in VOCAB may collide
    assert chain.next_token(7, rows) == before


def test_sums_stay_exact_in_64_bits_at_the_largest_values() -> None:
    chain = Chain.make()
    exact = max((VOCAB - 1) * int(m) + int(o) for m, o in zip(chain.multipliers, chain.offsets, strict=True))
    assert exact < 2**63
    assert 255 * int(chain.weights.sum()) + 31 * VOCAB < 2**63
    ids = chain.ids(VOCAB - 1, 320_001_536)
    expected = [
        ((VOCAB - 1) * int(m) + int(o)) % 320_001_536 for m, o in zip(chain.multipliers, chain.offsets, strict=True)
    ]
    assert ids.tolist() == expected


def test_run_is_next_token_repeated_and_a_changed_row_changes_the_rest(tmp_path: Path) -> None:
    table = write_table(tmp_path, 5000)
    chain = Chain.make()
    tokens = chain.run(table, 50)
    assert tokens[1] == chain.next_token(int(tokens[0]), table[chain.ids(int(tokens[0]), 5000)])
    changed = np.array(table)
    changed[chain.ids(int(tokens[19]), 5000)[3]] ^= 1
    different = first_difference(tokens, chain.run(changed, 50))
    assert different is not None
    assert different <= 20


def test_table_has_its_size_and_no_repeated_block(tmp_path: Path) -> None:
    rows = 2 * (1 << 20) // ROW_BYTES + 11
    table = write_table(tmp_path, rows)
    assert (tmp_path / "table.bin").stat().st_size == rows * ROW_BYTES
    block = (1 << 20) // ROW_BYTES
    assert not (table[:block] == table[block : 2 * block]).all(1).any()
    assert len(np.unique(table[:block], axis=0)) == block


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.51, 3), (0.95, 4), (1.0, 4), (0.01, 1)])
def test_quantile_is_a_value_of_the_sample(share: float, expected: float) -> None:
    assert quantile([4, 2, 1, 3], share) == expected


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 0.0), ([1.0], 1.1)])
def test_quantile_refuses_what_it_cannot_answer(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile(values, share)


def test_first_difference_counts_a_missing_step() -> None:
    tokens = np.array([1, 2, 3])
    assert first_difference(tokens, tokens) is None
    assert first_difference(tokens, np.array([1, 9, 3])) == 1
    assert first_difference(tokens, tokens[:2]) == 2


def test_a_step_is_released_once_and_in_order() -> None:
    gate = FlagGate()
    assert gate.claim(0)
    assert not gate.claim(0)
    assert gate.claim(1)
    assert not gate.claim(0)
    with pytest.raises(ValueError, match="step 3 is to be released before step 2"):
        gate.claim(3)


@pytest.mark.parametrize("script", ["ple_memop", "ple_step_breakdown"])
def test_without_a_gpu_the_scripts_say_so_and_exit_4(script: str) -> None:
    pytest.importorskip("torch")
    path = Path(step_chain.__file__).with_name(f"{script}.py")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 4
    assert "needs an NVIDIA GPU" in done.stderr
