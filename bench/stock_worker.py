"""One process of contenders for ``python -m bench stock``: ``python -m bench.stock_worker``.

It is a program, so that a library can also be measured in an environment of its own, or in another language.
What it reads and writes are lines:

1. It reads its job, a JSON object; see `Job`.
2. It makes its contenders and locks, warms them up on keys of their own, and writes ``{"ready": true}``, or
   ``{"missing": "why"}`` where the library is not there.
3. It reads a moment (nanoseconds of CLOCK_MONOTONIC); then all contenders start.
4. It writes its result: ``sales`` and ``waits``, per contender the moments of its sales, and how long it
   waited for the lock before each (nanoseconds, all its tries); ``gave_up`` and ``unreleased``, how often an
   acquire ended without the lock, and a release with an error. Where the library counts them also ``tries``
   and ``grants``, of the queue of its waiters by the network; and ``notes``, if there is something to know.

It ends at once when its standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from array import array
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.contenders import LIBRARIES, WARM_UP, Holder, Library, Lines, Unfit, granted, warm_up

__all__ = ["Job", "Market", "Shelf", "Tally", "contend", "tries_and_grants"]


class Shelf(Protocol):
    """Where the stock is."""

    def left(self) -> int: ...
    def put(self, left: int) -> None: ...


@dataclass(frozen=True)
class Job:
    """What a process has to do.

    Attributes:
        library: a name in `bench.contenders.LIBRARIES`.
        options: what that library wants to know besides.
        urls: the nodes of the lock; the stock is on the first.
        key: the lock. Keys that begin with it are used for warming up.
        stock: the key of the stock.
        contenders: how many threads.
        most: how many sales one contender makes at most.
        seconds: the time in which it must be done.
    """

    library: str
    options: dict[str, Any]
    urls: list[str]
    key: str
    stock: str
    contenders: int
    most: int
    seconds: float


@dataclass
class Market:
    """What the contenders of a process share: until when to go on, and whether one found the shelf empty."""

    until_ns: int
    most: int
    closed: threading.Event = field(default_factory=threading.Event)

    def open(self) -> bool:
        return not self.closed.is_set() and time.monotonic_ns() < self.until_ns


@dataclass
class Tally:
    """What one contender did."""

    sold_ns: array[int] = field(default_factory=lambda: array("q"))
    wait_ns: array[int] = field(default_factory=lambda: array("q"))
    gave_up: int = 0
    unreleased: int = 0


def contend(lock: Holder, library: Library, shelf: Shelf, market: Market) -> Tally:
    """Take one piece after the other off the shelf under the lock, until it is empty or the time is over."""
    tally = Tally()
    clock = time.monotonic_ns
    asked_ns = clock()
    while market.open() and len(tally.sold_ns) < market.most:
        if not granted(lock, library):
            tally.gave_up += 1
            continue
        waited_ns = clock() - asked_ns
        try:
            left = shelf.left()
            if left > 0:
                shelf.put(left - 1)
                tally.sold_ns.append(clock())
                tally.wait_ns.append(waited_ns)
            else:
                market.closed.set()
        finally:
            try:
                lock.release()
            except library.unreleased:
                tally.unreleased += 1
        asked_ns = clock()
    return tally


def tries_and_grants(locks: Iterable[Holder]) -> dict[str, int]:
    """How often the waiters tried by the network, and were granted; nothing where no queue counts that.

    The locks of a name share their queue.
    """
    queues = {id(queue): queue for queue in (getattr(lock, "_queue", None) for lock in locks)}
    counting = [queue for queue in queues.values() if hasattr(queue, "tries") and hasattr(queue, "grants")]
    if not counting:
        return {}
    return {name: sum(getattr(queue, name) for queue in counting) for name in ("tries", "grants")}


class _RedisShelf:
    """The stock in a key, by redis-py for every library."""

    def __init__(self, url: str, key: str) -> None:
        import redis

        self._client = redis.Redis.from_url(url)
        self._key = key

    def left(self) -> int:
        value = self._client.get(self._key)
        if not isinstance(value, bytes):
            raise RuntimeError(f"the stock is gone from the server: {value!r}")
        return int(value)

    def put(self, left: int) -> None:
        self._client.set(self._key, left)


# ---- the process ----


def main() -> None:
    lines = Lines()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes where the errors go

    def tell(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=out, flush=True)

    job = Job(**json.loads(lines.next()))
    try:
        library = LIBRARIES[job.library](job.urls, job.options)
        shelf = _RedisShelf(job.urls[0], job.stock)
    except (ImportError, Unfit) as error:
        tell({"missing": str(error)})
        return

    market = Market(0, job.most)
    warm = threading.Barrier(job.contenders + 1)
    start = threading.Event()
    locks: list[Holder] = []

    def one(number: int) -> Tally:
        try:
            warm_up(library.lock(f"{job.key}:{number}"), library)
            shelf.left()
            lock = library.lock(job.key)
            locks.append(lock)
            warm.wait(2 * WARM_UP)
            start.wait()
            return contend(lock, library, shelf, market)
        except BaseException:
            market.closed.set()  # the others need not go on
            warm.abort()
            raise

    with ThreadPoolExecutor(job.contenders) as pool:
        tallies = [pool.submit(one, number) for number in range(job.contenders)]
        try:
            warm.wait(2 * WARM_UP)
            tell({"ready": True})
            start_ns = int(lines.next())
            market.until_ns = start_ns + int(job.seconds * 1e9)
            gc.collect()
            gc.disable()
            time.sleep(max(0.0, (start_ns - time.monotonic_ns()) / 1e9))
        except threading.BrokenBarrierError:
            pass  # a contender says why
        start.set()
        causes = [tally.exception() for tally in tallies]
        for cause in causes:
            if cause and not isinstance(cause, threading.BrokenBarrierError):
                raise cause
    done = [tally.result() for tally in tallies]
    tell(
        {
            "sales": [list(tally.sold_ns) for tally in done],
            "waits": [list(tally.wait_ns) for tally in done],
            "gave_up": sum(tally.gave_up for tally in done),
            "unreleased": sum(tally.unreleased for tally in done),
            "notes": sorted(library.notes),
            **tries_and_grants(locks),
        }
    )


if __name__ == "__main__":
    main()
