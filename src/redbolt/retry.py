"""How a waiting acquire spaces its tries."""

from __future__ import annotations

import random
from dataclasses import dataclass

from redbolt._arguments import check_tries, seconds

__all__ = ["Retry"]

_random = (
    random.Random()
)  # seeded by the operating system; a program's random.seed() must not align its workers


@dataclass(frozen=True, slots=True)
class Retry:
    """A policy of tries, for ``Lock(..., retry=)``. Immutable.

    Args:
        count: how many tries in all, the first included; None (the default) for as many as the waiting time
            allows.
        delay: seconds between two tries, default 0.1; with ``backoff``, the upper bound of the first pause.
        backoff: None (the default) for a fixed delay. A factor from 1: the upper bound grows by it with
            each pause, and each pause is drawn evenly from 0 to its bound ("full jitter").
        max_delay: with ``backoff``, the seconds that the bound never exceeds, default 5.

    Raises:
        ValueError, TypeError: a value is out of its range or of a wrong type.
    """

    count: int | None = None
    delay: float = 0.1
    backoff: float | None = None
    max_delay: float = 5.0

    def __post_init__(self) -> None:
        if self.count is not None:
            check_tries(self.count, "count")
        seconds(self.delay, "delay", zero=True)
        seconds(self.max_delay, "max_delay")
        if self.backoff is not None and seconds(self.backoff, "backoff") < 1:
            raise ValueError(f"backoff must be at least 1, not {self.backoff}")

    def pause(self, tries: int) -> float:
        """Seconds to wait after the given number of tries."""
        if self.backoff is None:
            return self.delay
        try:
            bound = min(self.max_delay, self.delay * float(self.backoff) ** (tries - 1))
        except OverflowError:
            bound = self.max_delay
        return _random.uniform(0, bound)


def jitter(bound: float) -> float:
    """Seconds drawn evenly from 0 to ``bound``."""
    return _random.uniform(0, bound)
