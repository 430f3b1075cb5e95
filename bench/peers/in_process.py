"""The rows of this process, each used the way its users use it: one client, one lock object, made once."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import redis
from redis.utils import HIREDIS_AVAILABLE

import redbolt
from bench.runner import LEASE, LEASE_MS, Holder, Row, Slice, cycles
from redbolt.compat import redis_py

__all__ = ["Redbolt", "RedisPy", "RedlockPy", "Threads"]


class _Python:
    """A row around one lock."""

    def __init__(self, name: str, lock: Holder) -> None:
        self.name = name
        self._lock = lock

    def run(self, seconds: float, limit: int) -> Slice:
        return cycles(self._lock, seconds, limit)

    def close(self) -> None:
        pass


class Redbolt(_Python):
    """One of redbolt's locks, on the engine asked for or on none. All but RedLock live on the first node."""

    makers: Mapping[str, Callable[[Sequence[str], str, str], Holder]] = {
        "Lock": lambda urls, key, engine: redbolt.Lock(urls[0], key, LEASE, engine=engine),
        "RedLock": lambda urls, key, engine: redbolt.RedLock(urls, key, LEASE, engine=engine),
        "ReentrantLock": lambda urls, key, engine: redbolt.ReentrantLock(urls[0], key, LEASE, engine=engine),
        "compat Lock": lambda urls, key, engine: redis_py.Lock(
            redis.Redis.from_url(urls[0]), key, LEASE, engine=engine
        ),
    }

    def __init__(self, what: str, urls: Sequence[str], key: str, engine: str) -> None:
        super().__init__(self.title(what, engine), self.makers[what](urls, key, engine))

    @staticmethod
    def title(what: str, engine: str) -> str:
        return f"redbolt {what}, {engine}"


class RedisPy(_Python):
    """redis-py's own Lock."""

    title = f"redis-py Lock, {'hiredis' if HIREDIS_AVAILABLE else 'without hiredis'}"

    def __init__(self, client: redis.Redis, key: str) -> None:
        self._client = client
        super().__init__(self.title, client.lock(key, timeout=LEASE))

    def close(self) -> None:
        self._client.close()


class RedlockPy(_Python):
    """redlock-py (the module `redlock`)."""

    title = "redlock-py"

    def __init__(self, urls: Sequence[str], key: str) -> None:
        super().__init__(self.title, _RedlockPyHolder(urls, key))


class _RedlockPyHolder:
    def __init__(self, urls: Sequence[str], key: str) -> None:
        from redlock import Redlock

        self._manager = Redlock(list(urls))
        self._key = key

    def acquire(self, *, blocking: bool) -> bool:
        self._held = self._manager.lock(self._key, LEASE_MS)
        return self._held is not False

    def release(self) -> None:
        self._manager.unlock(self._held)


class Threads:
    """Several rows at once, each in its own thread; the threads live as long as this row."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.name = rows[0].name
        self._rows = rows
        self._pool = ThreadPoolExecutor(len(rows))
        self._start = threading.Barrier(len(rows))

    def run(self, seconds: float, limit: int) -> Slice:
        def one(row: Row) -> Slice:
            self._start.wait(10)
            return row.run(seconds, limit)

        done = list(self._pool.map(one, self._rows))
        took_ns = array("q")
        for each in done:
            took_ns.extend(each.took_ns)
        return Slice(took_ns, sum(each.rate for each in done))

    def close(self) -> None:
        self._pool.shutdown()
        for row in self._rows:
            row.close()
