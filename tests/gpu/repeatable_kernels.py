#!/usr/bin/env python3
"""Show which of the model's kernels repeat their bits on this GPU: the evidence behind tests/gpu/repeatable.

One JSON line a kernel: distinct results of --repeats calls with the same inputs, alone and beside work on a second
stream. `expected` says what the sources promise: "repeats" must hold and is judged; "may vary" (fused_hc_mix adds with
fp32 atomics from two rows on, fast_topk collects in the order of arrival from 513 blocks on) is reported. Of fast_topk
the set must repeat and hold exactly the largest scores, whatever their order, where none tie for the last place. What
tests/gpu/repeatable puts in its place must choose the same set there, repeat with ties, and do so from a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.repeatable.sitecustomize import exact_topk

REPEATS = 20
TOPK = 512
ROWS = (1, 2, 5, 16)
KEYS = (512, 513, 750, 8192, 65_536)
HC, HIDDEN, LOW_RANK = 4, 2048, 320
"""Streams of the hyper connection, their width, rank of its mix: the published model's."""


def distinct(run: Callable[[], torch.Tensor], repeats: int, beside: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Return how many different results `repeats` calls gave, and how far they are apart at most."""
    results = []
    for _ in range(repeats):
        beside()
        results.append(run().detach().clone())
    if results[0].is_cuda:
        torch.cuda.synchronize()
    keys = {result.cpu().contiguous().view(torch.uint8).numpy().tobytes() for result in results}
    apart = max((result.double() - results[0].double()).abs().max().item() for result in results)
    return {"distinct": len(keys), "of": repeats, "max_abs": apart}


def missing(got: torch.Tensor, scores: torch.Tensor) -> int:
    """Return how many of the largest scores' indices `got` [rows, TOPK] lacks; -1 in it is padding."""
    want = scores.topk(min(TOPK, scores.shape[1]), dim=1).indices
    return sum(len(set(w) - set(g)) for g, w in zip(got.tolist(), want.tolist(), strict=True))


def tied(scores: torch.Tensor) -> torch.Tensor:
    """Return of each row of scores whether its TOPK-th largest equals the next one: bool [rows]."""
    if scores.shape[1] <= TOPK:
        return torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    last = scores.topk(TOPK + 1, dim=1).values[:, TOPK - 1 :]
    return last[:, 0] == last[:, 1]


def with_ties(scores: torch.Tensor) -> torch.Tensor:
    """Return scores of which all but the TOPK // 2 largest of a row are equal."""
    return scores.clamp_min(scores.topk(TOPK // 2, dim=1).values[:, -1:])


def by_definition(scores: torch.Tensor) -> torch.Tensor:
    """Return the indices of the largest scores, of equal ones the first, ascending and -1 last: int32 [rows, TOPK]."""
    first = scores.sort(dim=1, descending=True, stable=True).indices[:, :TOPK].sort(dim=1).values
    return torch.nn.functional.pad(first, (0, TOPK - first.shape[1]), value=-1).int()


def ascending(chosen: torch.Tensor) -> torch.Tensor:
    """Return what a kernel chose, each row in ascending order, padding (-1) last."""
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(chosen < 0, last, chosen).sort(dim=1).values
    return torch.where(ordered == last, -1, ordered).int()


def replacement(
    exact: Callable[[torch.Tensor], torch.Tensor],
    stock: Callable[[torch.Tensor], torch.Tensor],
    scores: torch.Tensor,
    repeats: int,
    beside: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Return what is counted of `exact`, which replaces `stock`, on `scores` [rows, keys] and on the same with ties.

    unlike_stock: rows in which no score ties for the last place and whose set is another.
    wrong: rows of either that are not by_definition.
    tied: rows of those with ties that tie for the last place, all of them where there are more than TOPK.
    alone, busy: `distinct` with ties.
    """
    ties = with_ties(scores)
    unlike = (exact(scores) != ascending(stock(scores))).any(dim=1) & ~tied(scores)
    wrong = [(exact(some) != by_definition(some)).any(dim=1).sum() for some in (scores, ties)]
    return {
        "unlike_stock": int(unlike.sum()),
        "wrong": int(sum(wrong)),
        "tied": int(tied(ties).sum()),
        "alone": distinct(lambda: exact(ties), repeats),
        "busy": distinct(lambda: exact(ties), repeats, beside),
    }


def judge_replacement(name: str, rows: int, keys: int, counts: dict[str, Any]) -> dict[str, Any]:
    """Return the case of a replacement: it fails on any difference, and where its scores did not tie.

    A "graph" among the counts says whether a CUDA graph gave the bits of the call.
    """
    good = counts["unlike_stock"] == counts["wrong"] == 0 and counts.get("graph", True)
    good = good and all(counts[leg]["distinct"] == 1 for leg in ("alone", "busy"))
    return {"case": name, **counts, "ok": good and counts["tied"] == (rows if keys > TOPK else 0)}


def captured(run: Callable[[torch.Tensor], torch.Tensor], scores: torch.Tensor) -> bool:
    """Return whether a CUDA graph captured on other scores gives, replayed on `scores`, what `run` gives."""
    given = torch.zeros_like(scores)
    run(given)  # what a first call sets up is no part of a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(given)
    given.copy_(scores)
    graph.replay()
    return torch.equal(out, run(scores))


def judge(name: str, expected: str, counts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the case of one kernel: it fails only where it must repeat and does not."""
    repeats = all(count["distinct"] == 1 for count in counts.values())
    return {"case": name, "expected": expected, "repeats": repeats, **counts, "ok": repeats or expected == "may vary"}


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every kernel that must repeat does, and fast_topk chooses the largest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args(argv)

    from sglang.kernels.ops.attention.fast_topk import fast_topk
    from sglang.kernels.ops.gemm.hc_mix import fused_hc_mix

    torch.manual_seed(0)
    side, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    good = True

    def other_work() -> None:
        with torch.cuda.stream(side):
            for _ in range(3):
                noise @ noise

    def say(case: dict[str, Any]) -> None:
        nonlocal good
        good &= case["ok"]
        print(json.dumps(case), flush=True)

    def check(name: str, expected: str, run: Callable[[], torch.Tensor]) -> None:
        say(judge(name, expected, {"alone": distinct(run, args.repeats),
                                   "busy": distinct(run, args.repeats, other_work)}))  # fmt: skip

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    down, up = rand(LOW_RANK, HC * HIDDEN, scale=0.02), rand(HC * HIDDEN, LOW_RANK, scale=0.05)
    for rows in ROWS:
        x = rand(rows, HC * HIDDEN)
        check(f"fused_hc_mix rows={rows}", "may vary", lambda x=x: fused_hc_mix(x, down, up, HC, HIDDEN))
    for keys in KEYS:
        # As the indexer makes them: a sum over 16 heads of relu(q.k).
        scores = sum(torch.randn(8, keys, device="cuda").clamp_min(0) for _ in range(16))
        lengths = torch.full((8,), keys, dtype=torch.int32, device="cuda")

        def run(scores: Any = scores, lengths: torch.Tensor = lengths) -> torch.Tensor:
            return fast_topk(scores, lengths, topk=TOPK)

        def exact(scores: torch.Tensor, lengths: torch.Tensor = lengths) -> torch.Tensor:
            return exact_topk(scores, lengths, TOPK)

        check(f"fast_topk order keys={keys}", "repeats" if keys <= TOPK else "may vary", run)
        check(f"fast_topk set keys={keys}", "repeats", lambda run=run: run().sort(dim=1).values)
        lacks = missing(run(), scores)
        say({"case": f"fast_topk exact keys={keys}", "missing": lacks, "of": 8 * TOPK, "ok": lacks == 0})
        counts = replacement(exact, run, scores, args.repeats, other_work) | {"graph": captured(exact, scores)}
        say(judge_replacement(f"fast_topk replaced keys={keys}", len(scores), keys, counts))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
