"""What the rows of ``python -m bench stock`` shall reach, where a target was set for such a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.stock_run import Account, Entry, unevenness

__all__ = ["NODE_LIMIT_MS", "Shape", "targets"]

Shape = tuple[int, int, int]
"""Contenders, processes, nodes."""
Verdict = dict[str, Any]

NODE_LIMIT_MS = 50
"""How long a RedLock waits for a node, if not told otherwise."""
PEER = "python-redis-lock"

# By shape: at least so many times the rate of one alone, for leases passed on locally and by compare-and-set.
ALONE: Mapping[Shape, tuple[float, float]] = {
    (100, 1, 1): (1.0, 0.85),
    (100, 1, 5): (1.4, 0.95),
    (100, 4, 5): (1.2, 0.75),
}


def targets(
    entry: Entry,
    shape: Shape,
    stopped: bool,
    done: Sequence[Account],
    others: Mapping[str, Sequence[Account]],
) -> list[Verdict]:
    """The targets of a row, judged by the medians over the passes.

    Args:
        others: the runs of other rows by library; of redbolt's, of the one alone.
    """
    if entry.library != "redbolt" or entry.alone or not done:
        return []
    if stopped:
        gap_ms = median(each.gap_ns for each in done) / 1e6
        return [_at_most(3 * NODE_LIMIT_MS, "longest gap ms", gap_ms)]
    options = dict(entry.options)
    if options.get("engine") != "native" or not options.get("local_queue", True):
        return []
    verdicts = []
    if shape in ALONE:
        bound = ALONE[shape][0 if options.get("renewed") else 1]
        if (times := _times_faster(done, others.get("redbolt", ()))) is not None:
            verdicts.append(_at_least(bound, "x alone", times))
    if shape[:2] == (100, 1):
        verdicts.append(_at_most(1.1, "at half-way", _median(done, lambda one: unevenness(one.half_way))))
    if shape == (100, 4, 5):
        p99_ms = _median(done, lambda one: one.wait_p99_ns) / 1e6
        verdicts.append(_at_most(120, "p99 wait ms", p99_ms))
        verdicts.append(_at_least(0.6, "processes min/max", _median(done, lambda one: one.process_share)))
    if shape == (100, 10, 1) and (times := _times_faster(done, others.get(PEER, ()))) is not None:
        verdicts.append(_at_least(3, f"x {PEER}", times))
    if shape in ((100, 4, 5), (100, 10, 1)):
        verdicts.append(_at_most(0, "starved", max(each.starved for each in done)))
    return verdicts


def _median(done: Sequence[Account], measure: Callable[[Account], float]) -> float:
    return median(map(measure, done))


def _times_faster(mine: Sequence[Account], others: Sequence[Account]) -> float | None:
    if len(others) != len(mine) or not all(other.rate for other in others):
        return None
    return median(a.rate / b.rate for a, b in zip(mine, others, strict=True))


def _at_least(bound: float, what: str, measured: float) -> Verdict:
    return {"target": f"{what} >= {bound:g}", "measured": measured, "met": measured >= bound}


def _at_most(bound: float, what: str, measured: float) -> Verdict:
    return {"target": f"{what} <= {bound:g}", "measured": measured, "met": measured <= bound}
