"""Runs rows in short interleaved slices, and the statistics over them."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

__all__ = [
    "LEASE",
    "LEASE_MS",
    "Holder",
    "Plan",
    "Row",
    "Slice",
    "cycles",
    "figures",
    "interleave",
    "order",
    "percentile",
    "quiet",
    "ratios",
    "summary",
]

LEASE = 10
LEASE_MS = LEASE * 1000


@dataclass(frozen=True)
class Slice:
    """What one row did in one go: how long each cycle took, and cycles per second over all its threads."""

    took_ns: array[int]
    rate: float


class Row(Protocol):
    """Something that runs lock cycles."""

    name: str

    def run(self, seconds: float, limit: int) -> Slice:
        """Run cycles for so long, at most so many."""

    def close(self) -> None:
        """Give up all connections."""


class Holder(Protocol):
    """A lock as all peers offer it, or are made to."""

    def acquire(self, *, blocking: bool) -> bool: ...
    def release(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How many passes, and how long a slice is: in seconds, and at most in cycles."""

    passes: int
    seconds: float
    limit: int = sys.maxsize


def cycles(lock: Holder, seconds: float, limit: int) -> Slice:
    """Take and give back a lock that nobody else wants: the same loop for every Python row."""
    acquire, release, clock = lock.acquire, lock.release, perf_counter_ns
    took_ns = array("q")
    add = took_ns.append
    begin = now = clock()
    end = begin + int(seconds * 1e9)
    while now < end and limit > 0:
        limit -= 1
        start = clock()
        granted = acquire(blocking=False)
        release()
        now = clock()
        if granted is not True:
            raise RuntimeError(f"{lock!r} was not granted")
        add(now - start)
    return Slice(took_ns, len(took_ns) / (now - begin) * 1e9)


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def order(rows: Sequence[Row], number: int) -> list[Row]:
    """Whose turn it is in which order: rotated in every pass, and back to front in every second."""
    first = number % len(rows)
    turned = [*rows[first:], *rows[:first]]
    return turned[::-1] if number % 2 else turned


def interleave(rows: Sequence[Row], plan: Plan, step: Callable[[], None]) -> dict[str, list[Slice]]:
    """Give each row one slice per pass; the slices of a pass before the first are only for warming up."""
    slices: dict[str, list[Slice]] = {row.name: [] for row in rows}
    for number in range(-1, plan.passes):
        for row in order(rows, number):
            with quiet():
                done = row.run(plan.seconds, plan.limit)
            if number >= 0:
                slices[row.name].append(done)
            step()
    return slices


def percentile(ordered: Sequence[int], percent: float) -> int:
    """The smallest value that at least so many per cent of the values do not exceed (nearest rank)."""
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def figures(slices: Sequence[Slice]) -> dict[str, float]:
    """Percentiles in microseconds over all cycles of all passes."""
    ordered = sorted(itertools.chain.from_iterable(done.took_ns for done in slices))
    return {
        "cycles": len(ordered),
        "p50_us": percentile(ordered, 50) / 1e3,
        "p99_us": percentile(ordered, 99) / 1e3,
        "p999_us": percentile(ordered, 99.9) / 1e3,
        "worst_us": ordered[-1] / 1e3,
    }


def p50(done: Slice) -> float:
    return statistics.median(done.took_ns)


def rate(done: Slice) -> float:
    return done.rate


def ratios(
    above: Sequence[Slice], below: Sequence[Slice], measure: Callable[[Slice], float] = p50
) -> list[float]:
    """Pass by pass, the measure of one row over the measure of another."""
    return [measure(a) / measure(b) for a, b in zip(above, below, strict=True)]


def summary(values: Sequence[float]) -> dict[str, Any]:
    """The median over the passes, the middle half, and all values."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return {
        "median": statistics.median(ordered),
        "low": ordered[quarter],
        "high": ordered[-1 - quarter],
        "per_pass": list(values),
    }
