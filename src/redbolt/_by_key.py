"""Locks without an object of their own: by key and token, for `Locker` and the manager style of `RedLock`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from redbolt._clock import now_ns
from redbolt._drive import Target, run
from redbolt._engine import Engine, Votes
from redbolt._judge import GRANTED, REFUSED, drift_ns
from redbolt._programs import DROP, EXTEND
from redbolt._queue import Queue, Waiter
from redbolt._steps.acquire import acquire, unavailable
from redbolt._steps.release import release
from redbolt.lease import Lease
from redbolt.retry import Retry

__all__ = ["ByKey"]

T = TypeVar("T")


class ByKey:
    """Takes, lengthens and gives back plain keys on the nodes of an engine. It remembers nothing."""

    def __init__(self, engine: Engine, quorum: int, limit_ns: int, drift_factor: float) -> None:
        self._engine = engine
        self._quorum = quorum
        self._limit_ns = limit_ns
        self._drift_factor = drift_factor

    def _target(self, key: bytes, lease_ms: int) -> Target:
        return Target(key, lease_ms, self._quorum, drift_ns(lease_ms, self._drift_factor), self._limit_ns)

    def take(self, key: bytes, lease_ms: int, retry: Retry, result: Callable[[Votes | None], T]) -> T:
        """Take a lock, and return what ``result`` makes of it: of the votes of the granted try, or of None
        if it stayed taken.

        An interrupt during ``result`` still takes the lock back; the caller should return at once what it
        made.

        Raises:
            NodesUnavailable, SetupError: no quorum of nodes could be reached by the last try.
        """
        engine, target = self._engine, self._target(key, lease_ms)
        votes = engine.votes()
        mine: list[Votes] = [votes]
        try:
            if engine.attempt(votes, *target.arguments(None)):
                return result(votes)

            def granted(votes: Votes | Lease) -> None:
                assert not isinstance(votes, Lease)  # nobody hands anything on here
                mine.append(votes)

            waiter = Waiter(target, engine.gate(), willing=False)
            steps = acquire(
                engine, target, Queue(engine), waiter, votes, None, retry, "polling", votes.started_ns, None,
                granted,
            )  # fmt: skip
            return result(mine[-1] if run(steps, engine) else None)
        except BaseException:
            # An interrupt may come at any moment, also between the grant and the return.
            for votes in mine:
                if votes.verdict == GRANTED:
                    target.take_back(engine, votes.token, votes.touched)
            raise

    def give_back(self, key: bytes, token: bytes) -> bool:
        """Release a lock; False if its token was nowhere.

        Raises:
            ReleaseUnconfirmed: no quorum of nodes confirmed it in time.
        """
        engine, target = self._engine, self._target(key, 0)
        votes = engine.votes()
        engine.round(votes, DROP, key, (token,), self._quorum, self._limit_ns)
        if votes.verdict != GRANTED:
            run(release(engine, target, (DROP, (token,)), -1, votes, votes.started_ns), engine)
            return True  # an earlier one may have done it
        return votes.hits > 0

    def prolong(self, key: bytes, token: bytes, length_ms: int) -> bool:
        """Give a lock a new life, from now on; False if it is not the token's any more.

        Raises:
            NodesUnavailable, SetupError: too few nodes answered.
        """
        engine, target = self._engine, self._target(key, length_ms)
        votes = engine.votes()
        engine.round(votes, EXTEND, key, (token, b"%d" % length_ms), self._quorum, self._limit_ns)
        if votes.verdict not in (GRANTED, REFUSED):
            raise unavailable(engine, votes, target, "cannot extend")
        if votes.verdict == GRANTED and now_ns() < votes.started_ns + length_ms * 1_000_000 - target.drift_ns:
            return True
        if votes.touched:  # it is lost, so no node shall keep what it has of it for that long
            target.take_back(engine, token, votes.touched)
        return False
