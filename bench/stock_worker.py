"""One process of contenders for ``python -m bench stock``: ``python -m bench.stock_worker``.

It is a program, so that a library can also be measured in an environment of its own, or in another language.
What it reads and writes are lines:

1. It reads its job, a JSON object; see `Job`.
2. It makes its contenders and locks, warms them up on keys of their own, and writes ``{"ready": true}``, or
   ``{"missing": "why"}`` where the library is not there.
3. It reads a moment (nanoseconds of CLOCK_MONOTONIC); then all contenders start.
4. It writes its result: ``sales`` and ``waits``, per contender the moments of its sales, and how long it
   waited for the lock before each (nanoseconds, all its tries); ``gave_up`` and ``unreleased``, how often an
   acquire ended without the lock, and a release with an error.

It ends at once when its standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["LIBRARIES", "Holder", "Job", "Library", "Market", "Shelf", "Tally", "contend"]

LEASE = 10
WARM_UP = 60  # seconds


class Holder(Protocol):
    """A lock as the contenders use it: a blocking acquire that may give up, and a release."""

    def acquire(self) -> bool: ...
    def release(self) -> None: ...


class Shelf(Protocol):
    """Where the stock is."""

    def left(self) -> int: ...
    def put(self, left: int) -> None: ...


@dataclass(frozen=True)
class Job:
    """What a process has to do.

    Attributes:
        library: a name in `LIBRARIES`.
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


@dataclass(frozen=True)
class Library:
    """How a library makes a contender's lock; the errors of one that was not got, and of one not released."""

    lock: Callable[[str], Holder]
    unavailable: tuple[type[Exception], ...] = ()
    unreleased: tuple[type[Exception], ...] = ()


def contend(lock: Holder, library: Library, shelf: Shelf, market: Market) -> Tally:
    """Take one piece after the other off the shelf under the lock, until it is empty or the time is over."""
    tally = Tally()
    clock = time.monotonic_ns
    asked_ns = clock()
    while market.open() and len(tally.sold_ns) < market.most:
        try:
            granted = lock.acquire()
        except library.unavailable:
            granted = False
        if not granted:
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


# ---- the libraries, each used the way its users use it ----


class _NoLock:
    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _no_lock(job: Job) -> Library:
    return Library(lambda key: _NoLock())


def _redbolt(job: Job) -> Library:
    """A lock object per contender; they share the engine. The option ``engine`` forces one."""
    import redbolt

    engine = job.options.get("engine")
    redbolt.engine(engine)  # a forced one that is not there: ImportError

    def lock(key: str) -> Holder:
        if len(job.urls) == 1:
            return redbolt.Lock(job.urls[0], key, timeout=LEASE, engine=engine)
        return redbolt.RedLock(job.urls, key, timeout=LEASE, engine=engine)

    return Library(lock, (redbolt.NodesUnavailable,), (redbolt.LockError,))


def _redis_py(job: Job) -> Library:
    """A lock object per contender, on one client."""
    import redis
    from redis.exceptions import LockError

    client = redis.Redis.from_url(job.urls[0])
    return Library(lambda key: client.lock(key, timeout=LEASE), (), (LockError,))


class _RedlockPyLock:
    def __init__(self, manager: Any, key: str) -> None:
        self._manager = manager
        self._key = key

    def acquire(self) -> bool:
        self._held = self._manager.lock(self._key, LEASE * 1000)
        return self._held is not False

    def release(self) -> None:
        self._manager.unlock(self._held)


def _redlock_py(job: Job) -> Library:
    """One manager for all contenders. It tries three times, and then gives up."""
    from redlock import MultipleRedlockException, Redlock

    manager = Redlock(job.urls)
    errors = (MultipleRedlockException,)
    return Library(lambda key: _RedlockPyLock(manager, key), errors, errors)


LIBRARIES: dict[str, Callable[[Job], Library]] = {
    "none": _no_lock,
    "redbolt": _redbolt,
    "redis-py": _redis_py,
    "redlock-py": _redlock_py,
}


# ---- the process ----


class _Lines:
    """Lines from the parent. When there can be no more, the process ends, whatever it is doing."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._arrived = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        rest = b""
        while data := os.read(0, 65536):
            *lines, rest = (rest + data).split(b"\n")
            with self._arrived:
                self._lines += lines
                self._arrived.notify()
        os._exit(1)

    def next(self) -> bytes:
        with self._arrived:
            self._arrived.wait_for(lambda: self._lines)
            return self._lines.pop(0)


def _warm_up(lock: Holder, library: Library, shelf: Shelf) -> None:
    """Have the connections made: one cycle of a lock that nobody else wants."""
    until = time.monotonic() + WARM_UP
    while True:
        try:
            if lock.acquire():
                break
        except library.unavailable:
            pass
        if time.monotonic() > until:
            raise TimeoutError(f"a lock that nobody else wants was not granted in {WARM_UP} s")
    shelf.left()
    try:
        lock.release()
    except library.unreleased:
        pass


def main() -> None:
    lines = _Lines()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes where the errors go

    def tell(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=out, flush=True)

    job = Job(**json.loads(lines.next()))
    try:
        library = LIBRARIES[job.library](job)
        shelf = _RedisShelf(job.urls[0], job.stock)
    except ImportError as error:
        tell({"missing": str(error)})
        return

    market = Market(0, job.most)
    warm = threading.Barrier(job.contenders + 1)
    start = threading.Event()

    def one(number: int) -> Tally:
        try:
            _warm_up(library.lock(f"{job.key}:{number}"), library, shelf)
            lock = library.lock(job.key)
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
        }
    )


if __name__ == "__main__":
    main()
