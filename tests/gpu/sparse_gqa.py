#!/usr/bin/env python3
"""The pin's sparse GQA decode on a GPU against a float32 grouped-query reference, on the model's shape.

24 query heads, 2 KV heads, head dim 256, 2,051 selected positions a sequence, bf16, batch 1 and 4. Three routes of
SGLang to the same output, each on K and V of a paged pool with shuffled slots:

* ``packed``: selected rows gathered into a scratch, then the Triton kernel (``sparse_gqa_packed_decode_triton``);
* ``paged``: the Triton kernel that reads the pool in place (``sparse_gqa_paged_prefill_triton``), one query a sequence;
* ``flash``: the same scratch, then the flash attention function that CUDA servers resolve (left out, with the reason,
  where no flash attention package can be imported).

Each with K and V in bf16 and in fp8 e4m3 (unscaled, as QSA stores them), and on sequences of 1 to 5 tokens.

Limits: largest error 1e-3, mean 1e-4 (published for an earlier fallback kernel: 9.8e-4 and 7.7e-5). A control with the
query heads of the two groups interleaved must miss them. ``--self-check`` runs the Triton routes in Triton's
interpreter on a CPU, in float16. One JSON line a case; exit 1 if one does not hold, 4 without a CUDA device.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

HEADS, KV_HEADS, HEAD_DIM, SELECTED = 24, 2, 256, 2051
SCALE = HEAD_DIM**-0.5
MAX_ERROR, MEAN_ERROR = 1e-3, 1e-4
SHORT, SHORT_ERROR = (1, 2, 3, 5), 0.03
"""Sequences of a few tokens: their outputs are as large as the values themselves, where a bf16 has steps of 0.016."""
CONTEXTS = {1: (40_000,), 4: (SELECTED, 40_000, 9_001, 2_600)}
"""Batch -> tokens of each sequence; a sequence shorter than SELECTED selects all of its tokens."""


@dataclass(frozen=True)
class Case:
    """One decode step: queries, the KV pool, where each sequence's tokens are in it, and what it selected."""

    q: torch.Tensor
    """[batch, HEADS, HEAD_DIM]."""
    k: torch.Tensor
    """[slots, KV_HEADS, HEAD_DIM], as `v`."""
    v: torch.Tensor
    slot_table: torch.Tensor
    """[batch, longest] int32: the pool slot of each position."""
    positions: torch.Tensor
    """[batch, SELECTED] int32, ascending, -1 after the last one."""
    lengths: torch.Tensor
    """[batch] int32: tokens of each sequence."""

    @property
    def counts(self) -> torch.Tensor:
        """Selected positions of each sequence, int32 [batch]."""
        return (self.positions >= 0).sum(1, dtype=torch.int32)

    @property
    def starts(self) -> torch.Tensor:
        """First row of each sequence in a packed copy, and the end, int32 [batch + 1]."""
        return torch.nn.functional.pad(self.counts.cumsum(0, dtype=torch.int32), (1, 0))


def make_case(
    contexts: tuple[int, ...], selected: int, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Case:
    """Return random values; the slots are a random permutation, so a route that takes positions for slots fails."""
    generator = torch.Generator().manual_seed(seed)
    batch, longest, total = len(contexts), max(contexts), sum(contexts)
    q = torch.randn(batch, HEADS, HEAD_DIM, generator=generator)
    k, v = (torch.randn(total + 1, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    slots = torch.randperm(total, generator=generator).add(1).split(list(contexts))
    table = torch.zeros(batch, longest, dtype=torch.int32)
    positions = torch.full((batch, selected), -1, dtype=torch.int32)
    for row, (length, mine) in enumerate(zip(contexts, slots, strict=True)):
        table[row, :length] = mine.int()
        take = min(length, selected)
        chosen = torch.randperm(length, generator=generator)[:take].sort().values
        positions[row, :take] = chosen.int()
    lengths = torch.tensor(contexts, dtype=torch.int32)
    values = [t.to(dtype) for t in (q, k, v)]
    return Case(*(t.to(device) for t in (*values, table, positions, lengths)))


def reference(case: Case, interleaved: bool = False) -> torch.Tensor:
    """Return float32 grouped-query attention over the selected positions, [batch, HEADS, HEAD_DIM].

    Query head h reads KV head h // (HEADS / KV_HEADS); `interleaved` reads h % KV_HEADS instead, as a control.
    """
    out = torch.empty(case.q.shape, dtype=torch.float32, device=case.q.device)
    heads = torch.arange(HEADS, device=case.q.device)
    kv_head = heads % KV_HEADS if interleaved else heads // (HEADS // KV_HEADS)
    for row in range(case.q.shape[0]):
        chosen = case.positions[row][case.positions[row] >= 0].long()
        slots = case.slot_table[row][chosen].long()
        k, v = (t.float()[slots][:, kv_head] for t in (case.k, case.v))
        scores = (case.q[row].float().unsqueeze(0) * k).sum(-1) * SCALE
        out[row] = (scores.softmax(0).unsqueeze(-1) * v).sum(0)
    return out


def errors(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Return the largest and the mean absolute error."""
    difference = (out.float().reshape(expected.shape) - expected).abs()
    return difference.max().item(), difference.mean().item()


def verdict(largest: float, mean: float, short: bool = False) -> bool:
    """Return whether the errors are within the limits; NaN is not."""
    return largest <= SHORT_ERROR if short else largest <= MAX_ERROR and mean <= MEAN_ERROR


def pack(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return packed K, packed V, starts and counts, by the pin's own kernels, as its decode path calls them."""
    from sglang.srt.layers.attention.qsa import sparse_attn

    batch, selected = case.positions.shape
    counts = torch.empty(batch, dtype=torch.int32, device=case.q.device)
    starts = torch.empty(batch + 1, dtype=torch.int32, device=case.q.device)
    sparse_attn.qwen_sparse_fa2_cu_seqlens_triton(case.lengths, case.positions, counts, starts, batch, selected)
    packed = [torch.empty(batch * selected, KV_HEADS, HEAD_DIM, dtype=case.q.dtype, device=case.q.device)
              for _ in range(2)]  # fmt: skip
    sparse_attn.qwen_sparse_kv_extraction_compact_triton(
        case.k, case.v, case.slot_table, torch.arange(batch, dtype=torch.int64, device=case.q.device),
        case.positions, case.lengths, starts, *packed, batch, selected,
    )  # fmt: skip
    return packed[0], packed[1], starts, counts


def packed_route(case: Case) -> Callable[[], torch.Tensor]:
    """Gather, then the Triton decode kernel."""
    from sglang.srt.layers.attention.qsa.sparse_attn import sparse_gqa_packed_decode_triton

    batch, selected = case.positions.shape
    device = case.q.device
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device)
    columns = torch.arange(selected, dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        k, v, starts, counts = pack(case)
        relative = columns.expand(batch, -1).masked_fill(columns >= counts[:, None], -1).contiguous()
        return sparse_gqa_packed_decode_triton(case.q, k, v, relative, cu_q, starts, counts, SCALE)

    return run


def paged_route(case: Case) -> Callable[[], torch.Tensor]:
    """The Triton kernel on the pool itself. Its length bounds the selected columns it reads, so it gets the counts."""
    from sglang.srt.layers.attention.qsa.sparse_attn import sparse_gqa_paged_prefill_triton

    cu_q = torch.arange(case.q.shape[0] + 1, dtype=torch.int32, device=case.q.device)

    def run() -> torch.Tensor:
        return sparse_gqa_paged_prefill_triton(
            case.q, case.k, case.v, case.slot_table, case.positions, cu_q, case.lengths, SCALE, max_q=1
        )

    return run


def flash_route(case: Case) -> Callable[[], torch.Tensor]:
    """Gather, then flash attention; ImportError or RuntimeError where there is none."""
    from sglang.srt.layers.attention.qwen_sparse_attn_backend import _resolve_flash_attn_varlen_func

    flash = _resolve_flash_attn_varlen_func()
    batch, selected = case.positions.shape
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=case.q.device)

    def run() -> torch.Tensor:
        k, v, starts, _ = pack(case)
        return flash(
            q=case.q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=starts, max_seqlen_q=1, max_seqlen_k=selected,
            softmax_scale=SCALE, causal=True,
        )  # fmt: skip

    return run


ROUTES = {"packed": packed_route, "paged": paged_route, "flash": flash_route}


def median_us(run: Callable[[], object], repeats: int = 50) -> float:
    """Return the median time of `run` on the GPU, microseconds, launches included."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def cases(device: str, batches: dict[int, tuple[int, ...]], selected: int, timed: bool) -> Iterator[dict[str, Any]]:
    """Yield one record a route, batch and dtype of the pool, and the control of each."""
    # Triton's interpreter has neither bf16 constants nor fp8.
    kinds = {"float16": torch.float16} if device == "cpu" else {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
    for contexts in (*batches.values(), SHORT):
        base = make_case(contexts, selected, device, torch.float16 if device == "cpu" else torch.bfloat16)
        short = contexts is SHORT
        for kv, dtype in kinds.items():
            case = replace(base, k=base.k.to(dtype), v=base.v.to(dtype))
            expected, wrong = reference(case), reference(case, interleaved=True)
            for name, route in ROUTES.items():
                if name == "flash" and device == "cpu":
                    continue
                record: dict[str, Any] = {"case": name, "kv": kv, "batch": len(contexts), "contexts": contexts}
                try:
                    run = route(case)
                except (ImportError, RuntimeError) as error:
                    yield {**record, "left_out": str(error).splitlines()[0], "ok": name == "flash"}
                    continue
                try:
                    largest, mean = errors(run(), expected)
                except Exception as error:  # the other routes are still of interest
                    yield {**record, "error": repr(error)[:500], "ok": False}
                    continue
                record |= {"max_error": largest, "mean_error": mean, "ok": verdict(largest, mean, short)}
                if timed:
                    record["median_us"] = round(median_us(run), 1)
                yield record
                control = errors(run(), wrong)
                yield {**record, "case": f"{name}: control, groups interleaved", "max_error": control[0],
                       "mean_error": control[1], "ok": not verdict(*control, short)}  # fmt: skip


def use_interpreter() -> None:
    """Let Triton's kernels run in its interpreter; before anything imports them."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.cuda.get_device_name = functools.partial(lambda device=None: "interpreter")


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every case holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the cases there too")
    parser.add_argument("--self-check", action="store_true", help="Triton's interpreter on the CPU")
    args = parser.parse_args(argv)
    if args.self_check:
        use_interpreter()
        batches: dict[int, tuple[int, ...]] = {1: (2500,), 4: (SELECTED, 2600, 2100, 1300)}
    elif torch.cuda.is_available():
        batches = CONTEXTS
    else:
        print("error: needs an NVIDIA GPU: torch.cuda.is_available() is False", file=sys.stderr)
        print("remedy: run it on one, or check the kernels in the interpreter with --self-check", file=sys.stderr)
        return 4
    results = []
    for result in cases("cpu" if args.self_check else "cuda", batches, SELECTED, timed=not args.self_check):
        print(json.dumps(result), flush=True)
        results.append(result)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
