"""What the programs of contenders have in common: the libraries' locks, and what their parent says.

They run in many environments, so nothing but the standard library is imported before it is needed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["LIBRARIES", "WARM_UP", "Holder", "Library", "Lines", "Unfit", "granted", "warm_up"]

LEASE = 10
WARM_UP = 60  # seconds


class Unfit(Exception):
    """The library that is installed cannot do what a row wants."""


class Holder(Protocol):
    """A lock as the contenders use it: a blocking acquire that may give up, and a release."""

    def acquire(self) -> bool: ...
    def release(self) -> None: ...


@dataclass(frozen=True)
class Library:
    """How a library makes a contender's lock; the errors of one that was not got, and of one not released.

    ``notes`` fills with what is to be known about the locks made.
    """

    lock: Callable[[str], Holder]
    unavailable: tuple[type[Exception], ...] = ()
    unreleased: tuple[type[Exception], ...] = ()
    notes: set[str] = field(default_factory=set)


def granted(lock: Holder, library: Library) -> bool:
    """One acquire; it may have given up."""
    try:
        return lock.acquire()
    except library.unavailable:
        return False


def warm_up(lock: Holder, library: Library) -> None:
    """Have the connections made: one cycle of a lock that nobody else wants."""
    until = time.monotonic() + WARM_UP
    while not granted(lock, library):
        if time.monotonic() > until:
            raise TimeoutError(f"a lock that nobody else wants was not granted in {WARM_UP} s")
    try:
        lock.release()
    except library.unreleased:
        pass


# ---- the libraries, each used the way its users use it ----

Urls = Sequence[str]
Options = dict[str, Any]


class _NoLock:
    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _no_lock(urls: Urls, options: Options) -> Library:
    return Library(lambda key: _NoLock())


def _redbolt(urls: Urls, options: Options) -> Library:
    """A lock object per contender; they share the engine.

    The option ``engine`` forces one, ``local_queue`` False has each contender wait for itself, and
    ``renewed`` has the lease renewed.
    """
    import inspect

    import redbolt

    engine = options.get("engine")
    redbolt.engine(engine)  # a forced one that is not there: ImportError
    make: Any = redbolt.Lock if len(urls) == 1 else redbolt.RedLock
    known = inspect.signature(make).parameters
    more = {}
    if not options.get("local_queue", True):
        if "local_queue" not in known:
            raise Unfit("this redbolt knows no local_queue")
        more["local_queue"] = False
    notes: set[str] = set()
    if options.get("renewed"):
        if "renew" in known:
            more["renew"] = True
        else:
            notes.add("this redbolt knows no renewed leases: they are fixed")

    def lock(key: str) -> Holder:
        made: Holder = make(urls[0] if len(urls) == 1 else urls, key, timeout=LEASE, engine=engine, **more)
        return made

    return Library(lock, (redbolt.NodesUnavailable,), (redbolt.LockError,), notes)


def _redis_py(urls: Urls, options: Options) -> Library:
    """A lock object per contender, on one client."""
    import redis
    from redis.exceptions import LockError

    client = redis.Redis.from_url(urls[0])
    return Library(lambda key: client.lock(key, timeout=LEASE), (), (LockError,))


def _python_redis_lock(urls: Urls, options: Options) -> Library:
    """A lock object per contender, on one client."""
    import redis
    import redis_lock  # type: ignore[import-not-found]

    client = redis.Redis.from_url(urls[0])
    return Library(lambda key: redis_lock.Lock(client, key, expire=LEASE), (), (redis_lock.NotAcquired,))


class _RedlockPyLock:
    def __init__(self, manager: Any, key: str) -> None:
        self._manager = manager
        self._key = key

    def acquire(self) -> bool:
        self._held = self._manager.lock(self._key, LEASE * 1000)
        return self._held is not False

    def release(self) -> None:
        self._manager.unlock(self._held)


def _redlock_py(urls: Urls, options: Options) -> Library:
    """One manager for all contenders. It tries three times, and then gives up."""
    from redlock import MultipleRedlockException, Redlock

    manager = Redlock([*urls])
    errors = (MultipleRedlockException,)
    return Library(lambda key: _RedlockPyLock(manager, key), errors, errors)


class _RedlockNgLock:
    def __init__(self, manager: Any, key: str) -> None:
        self._manager = manager
        self._key = key

    def acquire(self) -> bool:
        self._held = self._manager.acquire(self._key, LEASE * 1000, blocking=True)
        return self._held is not None

    def release(self) -> None:
        self._manager.release(self._held)


def _redlock_ng(urls: Urls, options: Options) -> Library:
    """One manager for all contenders. Its module is called as redlock-py's is."""
    from redlock import Redlock

    manager = Redlock([*urls])
    return Library(lambda key: _RedlockNgLock(manager, key))


def _pottery(urls: Urls, options: Options) -> Library:
    """A lock object per contender, on the same clients."""
    import pottery  # type: ignore[import-not-found]
    import redis

    masters = {redis.Redis.from_url(url) for url in urls}

    def lock(key: str) -> Holder:
        made: Holder = pottery.Redlock(key=key, masters=masters, auto_release_time=LEASE)
        return made

    return Library(
        lock, (pottery.QuorumNotAchieved, pottery.QuorumIsImpossible), (pottery.ReleaseUnlockedLock,)
    )


LIBRARIES: dict[str, Callable[[Urls, Options], Library]] = {
    "none": _no_lock,
    "redbolt": _redbolt,
    "redis-py": _redis_py,
    "python-redis-lock": _python_redis_lock,
    "redlock-py": _redlock_py,
    "redlock-ng": _redlock_ng,
    "pottery": _pottery,
}


# ---- the process ----


class Lines:
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
