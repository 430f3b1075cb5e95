"""Locks whose leases are renewed, and what tells whether they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redbolt.lease import Lease

from .clients import SLACK, eventually, raw
from .line import AnyLock
from .waiting import NAME, Place

__all__ = [
    "LIMIT",
    "Witness",
    "age",
    "count",
    "is_young",
    "lease_of",
    "lives",
    "once_more",
    "renewed",
    "witnesses",
]

LIMIT = 2.0 * SLACK
"""Seconds that a node may take, where slowness is not the point."""


def renewed(place: Place, timeout: float | None = None, **options: Any) -> AnyLock:
    """A lock whose leases are renewed, 30 seconds each unless told otherwise."""
    options = {"renew": True, "node_timeout": LIMIT, **options}
    return place.lock(timeout=timeout, **options)  # type: ignore[arg-type]


def lease_of(lock: AnyLock) -> Lease:
    lease = lock.lease
    assert lease is not None
    return lease


def count(lock: AnyLock | Lease) -> int:
    """How often a lease was renewed."""
    renewal = (lock if isinstance(lock, Lease) else lease_of(lock)).renewal
    assert renewal is not None
    return renewal.renewed


def once_more(lock: AnyLock | Lease, then: int) -> None:
    """Wait for the renewal with this number, and that nothing of it is under way any more."""
    eventually(lambda: count(lock) >= then, what=f"renewal number {then}")
    renewal = (lock if isinstance(lock, Lease) else lease_of(lock)).renewal
    assert renewal is not None
    eventually(lambda: not renewal.busy)


def age(place: Place, name: str = NAME, ttl_ms: int = 12_000) -> None:
    """Let the keys be as old as the library takes them for: the clock of the servers cannot be moved."""
    found = [raw(server, "PEXPIRE", name, ttl_ms) for server in place.servers]
    assert sum(found) > len(found) // 2


def lives(place: Place, name: str = NAME) -> list[int]:
    return [raw(server, "PTTL", name) for server in place.servers]


def is_young(place: Place, name: str = NAME, lease: float = 30) -> bool:
    """Whether the key has its full life again, on a quorum: a node to which the agent connects just now may
    be too late for a renewal.
    """
    found = sorted(lives(place, name))
    assert found[-1] <= lease * 1000
    assert found[len(found) // 2] > (lease - 1 * SLACK) * 1000, found
    return True


class Witness:
    """A lock that is held and renewed, and was due at the same time as those that are not to be renewed."""

    def __init__(self, place: Place, timeout: float | None = None) -> None:
        self.lock = renewed(place, timeout, name="witness")
        self._seen = 0
        assert self.lock.acquire()

    def sees_a_renewal(self) -> None:
        """Wait until it was renewed: whatever else was due at that time was renewed before, or with it."""
        self._seen += 1
        once_more(self.lock, self._seen)

    def close(self) -> None:
        self.lock.release()


@contextmanager
def witnesses(place: Place) -> Iterator[Callable[..., Witness]]:
    """Makes some: ``make(timeout)``."""
    made: list[Witness] = []

    def make(timeout: float | None = None) -> Witness:
        made.append(Witness(place, timeout))
        return made[-1]

    yield make
    for one in made:
        one.close()
