"""Speed over context as a PNG. matplotlib is optional (`pip install q4kit[plot]`)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from q4kit.bench.summary import PointSummary
from q4kit.errors import EnvironmentFault
from q4kit.stats.intervals import MeanInterval


def speed_png(points: Sequence[PointSummary], title: str) -> bytes:
    """Return a PNG of prefill and decode rate (tok/s) over context length (tokens), with t intervals."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault(
            "a plot needs matplotlib", remedy="pip install 'q4kit[plot]', or leave --plot out"
        ) from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    for place, (name, unit) in enumerate(
        (("prefill", "prompt tokens / TTFT"), ("decode", "tokens after the first chunk"))
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        for kind in dict.fromkeys(p.kind for p in points):
            chosen = [(p.context, getattr(p, name)) for p in points if p.kind == kind and getattr(p, name)]
            if not chosen:
                continue
            xs = [c for c, _ in chosen]
            ys = [i.mean for _, i in chosen]
            axes.errorbar(xs, ys, yerr=bars([i for _, i in chosen]), marker="o", capsize=3, label=kind)
        axes.set(xscale="log", xlabel="context, tokens", ylabel="tok/s", title=f"{name} ({unit})")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def bars(intervals: Sequence[MeanInterval]) -> tuple[list[float], list[float]]:
    """Return the lengths of the error bars below and above the means; 0 for one sample, which has no interval."""
    bounded = [(i.mean - i.low, i.high - i.mean) if math.isfinite(i.low) else (0.0, 0.0) for i in intervals]
    return [below for below, _ in bounded], [above for _, above in bounded]
