"""Heatmap of a needle run as a PNG. matplotlib is optional (`pip install q4kit[plot]`)."""

from __future__ import annotations

import io

from q4kit.errors import EnvironmentFault
from q4kit.needle.summary import Summary


def heatmap_png(summary: Summary, title: str) -> bytes:
    """Return a PNG: retrieval rate (k/n written into each cell) and, where measured, the logprob gain."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault(
            "a heatmap needs matplotlib", remedy="pip install 'q4kit[plot]', or leave --plot out"
        ) from error
    lengths = sorted({c.length for c in summary.cells})
    depths = sorted({c.depth for c in summary.cells if c.depth is not None})
    panels = 2 if summary.logprob_cells else 1
    figure = Figure(figsize=(2.5 + (1.2 * len(lengths) + 3) * panels, 2 + 0.45 * len(depths)), layout="constrained")
    rates = {(c.length, c.depth): (c.found / c.trials if c.trials else float("nan"), f"{c.found}/{c.trials}")
             for c in summary.cells}  # fmt: skip
    gains = {(c.length, c.depth): (c.gain.mean, f"{c.gain.mean:+.2f}") for c in summary.logprob_cells}
    for place, (name, values, limits, colours) in enumerate(
        (
            ("retrieved k/n", rates, (0.0, 1.0), "RdYlGn"),
            ("logprob gain of the code, nats", gains, (None, None), "viridis"),
        )[:panels]
    ):
        axes = figure.add_subplot(1, panels, place + 1)
        grid = [[values.get((n, d), (float("nan"), ""))[0] for n in lengths] for d in depths]
        image = axes.imshow(grid, aspect="auto", cmap=colours, vmin=limits[0], vmax=limits[1])
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                text = values.get((length, depth), (0.0, "-"))[1]
                axes.text(column, row, text, ha="center", va="center", fontsize=8,
                          bbox={"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 1})  # fmt: skip
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
        axes.set(xlabel="prompt length, tokens", ylabel="needle depth", title=name)
        figure.colorbar(image, ax=axes)
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
