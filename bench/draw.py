"""Draws how long cycles take: ``python draw.py FILE <data.json``, where pins/matplotlib.txt is installed."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np  # type: ignore[import-not-found]
from matplotlib import rc_context  # type: ignore[import-not-found]
from matplotlib.figure import Figure  # type: ignore[import-not-found]
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # type: ignore[import-not-found]

INK, FAINT, GRID = "#1f2328", "#656d76", "#e7eaee"
FLOOR, OURS, PEER = "#8c959f", "#c8452f", "#4878a8"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "svg.hashsalt": "redbolt",
}
ROW, HEAD, FOOT, GAP = 0.46, 1.05, 0.72, 0.9  # inches
WIDTH, LEFT, RIGHT = 10.0, 2.2, 1.75
BINS = 220
FLOOR_ROW = "C floor"


def colour(row: str) -> str:
    if row == FLOOR_ROW:
        return FLOOR
    return OURS if row.startswith("redbolt") else PEER


def shape(log_us: Any, edges: Any) -> Any:
    """The density between the edges, smoothed, its peak at 1."""
    counts, _ = np.histogram(log_us, edges)
    offsets = np.arange(-6, 7)
    kernel = np.exp(-0.5 * (offsets / 1.8) ** 2)
    smooth = np.convolve(counts, kernel, mode="same")
    return smooth / smooth.max()


def panel(axes: Any, data: dict[str, Any]) -> None:
    """One row per name, the fastest on top, each with its density on a logarithmic axis of time."""
    rows = sorted(data["rows"], key=lambda row: row["p50_us"])
    marks = [np.percentile(row["took_ns"], [0.1, 99, 99.9]) / 1e3 for row in rows]
    low = min(mark[0] for mark in marks) / 1.1
    high = max(mark[2] for mark in marks) * 1.15
    edges = np.linspace(np.log10(low), np.log10(high), BINS + 1)
    middles = 10 ** ((edges[1:] + edges[:-1]) / 2)
    beside = axes.get_yaxis_transform()

    for number, (row, (_, p99, p999)) in enumerate(zip(rows, marks, strict=True)):
        base, tint = -number, colour(row["row"])
        ours = tint == OURS
        height = 0.8 * shape(np.log10(np.asarray(row["took_ns"]) / 1e3), edges)
        seen = height > 0.004
        axes.fill_between(middles, base, base + height, where=seen, color=tint, alpha=0.3, lw=0, zorder=3)
        axes.plot(middles[seen], base + height[seen], color=tint, lw=1.1, zorder=4)
        axes.plot([row["p50_us"]] * 2, [base, base + 0.84], color=tint, lw=2.2, zorder=5)
        axes.plot([row["p50_us"], p999], [base, base], color=tint, lw=0.9, zorder=4)
        axes.plot(p99, base, "|", color=tint, ms=9, mew=1.6, zorder=5)
        axes.plot(p999, base, "o", color=tint, ms=4, zorder=5)
        weight = "bold" if ours else "normal"
        text = {"transform": beside, "va": "center", "weight": weight, "color": tint if ours else INK}
        axes.text(-0.015, base + 0.3, row["row"], ha="right", **text)
        axes.text(1.115, base + 0.3, f"{row['p50_us']:,.1f}", ha="right", **text)
        axes.text(1.22, base + 0.3, f"{row['ratio']:.2f}", ha="right", **text)
        if row["row"] == FLOOR_ROW:
            axes.axvline(row["p50_us"], color=FLOOR, lw=1.1, ls=(0, (5, 3)), zorder=2)

    note = {"transform": beside, "va": "center", "ha": "right", "size": 8.5, "color": FAINT}
    axes.text(1.115, 1.12, "median us", **note)
    axes.text(1.22, 1.12, "x floor", **note)
    axes.set_title(data["title"], loc="left", x=0, pad=10, size=11, weight="bold")
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(-len(rows) + 0.75, 1.0)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(duration))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(length=3)
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def duration(us: float, _: int) -> str:
    return f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} us"


def figure(data: dict[str, Any]) -> Any:
    panels = data["panels"]
    heights = [ROW * len(one["rows"]) for one in panels]
    total = HEAD + sum(heights) + GAP * (len(panels) - 1) + 0.55 + FOOT
    drawn = Figure(figsize=(WIDTH, total))
    top = total - HEAD - 0.25
    for one, height in zip(panels, heights, strict=True):
        place = (LEFT / WIDTH, (top - height) / total, (WIDTH - LEFT - RIGHT) / WIDTH, height / total)
        panel(drawn.add_axes(place), one)
        top -= height + GAP

    def say(text: str, inches: float, **how: Any) -> None:
        drawn.text(0.025, 1 - inches / total, text, va="top", **how)

    say("How long one uncontended acquire and release takes", 0.2, size=14, weight="bold")
    say(f"{data['machine']}  |  {data['date']}", 0.52, size=9, color=FAINT)
    redbolt = data["redbolt"].partition(",")[0]  # both engines are shown
    say(f"redbolt {redbolt}  |  {data['python']}  |  {data['servers']}", 0.7, size=9, color=FAINT)
    legend = (
        "Shape: density of the durations, each at its own scale. Thick line: median. Bar: p99. Dot: p99.9. "
        "Dashed: median of the floor,\na C program that sends the same commands over raw sockets. "
        "The ratio is taken within a pass: median over the passes."
    )
    say(legend, total - 0.5, size=8, color=FAINT)
    return drawn


def main(file: str) -> None:
    data = json.load(sys.stdin)
    with rc_context(STYLE):
        figure(data).savefig(file, metadata={"Date": None} if file.endswith(".svg") else None, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
