"""A process that holds many leases for ``python -m bench renew``: ``python -m bench.renew_worker``.

What it reads and writes are lines of JSON:

1. It reads ``nodes`` (each with its ``url``), ``library``, ``options``, ``packages``, and ``lease_s``, how
   long a lease is. It writes ``versions``, of the packages; or ``missing``, and why, where the library is
   not there.
2. It reads ``leases``, how many to hold, and ``key``, with which their names begin. It acquires them one
   after the other, and writes ``acquired_s``, how long that took.
3. It reads ``seconds``, waits so long while they are renewed, and writes what came of it; see `measured`.

It reads in its only thread, so that every other one is the library's; it ends as soon as it sees its
standard input end, also while it acquires or waits.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

from bench.contenders import Unfit

__all__ = ["CROWDS", "Crowd", "measured"]

PATIENCE = 30
"""Seconds in which a lock that nobody else wants must be granted."""


class Crowd(Protocol):
    """Many locks of one library."""

    def acquire(self, key: str) -> bool:
        """Try to take one more, that is renewed from then on."""

    def renewed(self) -> list[int]:
        """How often each of them was."""

    def failed(self) -> int:
        """How many renewals were not granted."""

    def lost(self) -> int:
        """How many locks are not held any more."""


class Parent:
    """The one who says what to do. When nothing more can come from there, the process ends."""

    def __init__(self) -> None:
        self._rest = b""

    def hear(self) -> Any:
        """The next line."""
        while b"\n" not in self._rest:
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end = time.monotonic() + seconds
        while select.select([0], [], [], max(end - time.monotonic(), 0))[0]:
            self._read()

    def _read(self) -> None:
        data = os.read(0, 65536)
        if not data:
            os._exit(1)
        self._rest += data


# ---- the libraries ----

Urls = Sequence[str]
Options = Mapping[str, Any]


class _Redbolt:
    """A lock object per lease, as each needs a holder; they share the engine, which the option names."""

    def __init__(self, urls: Urls, options: Options, lease_s: float) -> None:
        import redbolt

        engine = options.get("engine")
        redbolt.engine(engine)  # a forced one that is not there: ImportError
        make: Any = redbolt.Lock if len(urls) == 1 else redbolt.RedLock
        nodes = [redbolt.Node.from_url(url) for url in urls]
        where = nodes[0] if len(nodes) == 1 else nodes
        self._make: Callable[[str], Any] = lambda key: make(
            where, key, timeout=lease_s, renew=True, thread_local=False, engine=engine
        )
        self._undecided = redbolt.NodesUnavailable
        self._locks: list[Any] = []
        self._leases: list[Any] = []

    def acquire(self, key: str) -> bool:
        lock = self._make(key)
        try:
            if not lock.acquire(blocking=False):
                return False
        except self._undecided:
            return False
        if lock.lease.renewal is None:
            raise RuntimeError(f"the lease of {key} is not renewed")
        self._locks.append(lock)  # it is renewed as long as there is its lock
        self._leases.append(lock.lease)
        return True

    def renewed(self) -> list[int]:
        return [lease.renewal.renewed for lease in self._leases]

    def failed(self) -> int:
        return sum(lease.renewal.failed for lease in self._leases)

    def lost(self) -> int:
        return sum(not lease.held or lease.lost.is_set() for lease in self._leases)


class _PythonRedisLock:
    """A lock object per lease, on one client; each has a thread that renews it."""

    def __init__(self, urls: Urls, options: Options, lease_s: float) -> None:
        import redis
        import redis_lock  # type: ignore[import-not-found]

        class Counted(redis_lock.Lock):  # type: ignore[misc]
            renewed = failed = 0

            def extend(self, expire: int | None = None) -> None:
                try:
                    super().extend(expire)
                except BaseException:
                    self.failed += 1
                    raise
                self.renewed += 1

        if lease_s != int(lease_s):
            raise Unfit("its leases are whole seconds")
        # All threads renew at once, and one that gets no connection has lost its lock.
        client = redis.Redis.from_url(urls[0], max_connections=10_000)
        expire = int(lease_s)
        self._make: Callable[[str], Any] = lambda key: Counted(client, key, expire, auto_renewal=True)
        self._locks: list[Any] = []

    def acquire(self, key: str) -> bool:
        lock = self._make(key)
        if not lock.acquire(blocking=False):
            return False
        self._locks.append(lock)
        return True

    def renewed(self) -> list[int]:
        return [lock.renewed for lock in self._locks]

    def failed(self) -> int:
        return sum(lock.failed for lock in self._locks)

    def lost(self) -> int:
        return sum(lock.get_owner_id() != lock.id for lock in self._locks)


CROWDS: dict[str, Callable[[Urls, Options, float], Crowd]] = {
    "redbolt": _Redbolt,
    "python-redis-lock": _PythonRedisLock,
}


# ---- what is measured ----


def sockets() -> int | None:
    """How many descriptors of this process are sockets; None where one cannot see that."""
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return None
    return sum(_leads_to(f"{folder}/{number}").startswith("socket:") for number in os.listdir(folder))


def _leads_to(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # closed meanwhile
        return ""


def threads() -> int | None:
    """How many threads this process has; None where one cannot see that."""
    folder = "/proc/self/task"
    return len(os.listdir(folder)) if os.path.isdir(folder) else None


def measured(crowd: Crowd, seconds: float, wait: Callable[[float], None]) -> dict[str, Any]:
    """Let the leases be renewed for so long.

    Returns:
        ``seconds`` that it took, and of that time: ``cpu_s``, the seconds of CPU of this process, all its
        threads; ``renewals`` granted, the ``least`` of them that a lease had, and how many ``failed``. At the
        end ``lost``; ``sockets`` and ``threads`` at the beginning and at the end, where one can see them.
    """
    first = sockets(), threads()
    failed, renewed = crowd.failed(), crowd.renewed()
    begin, cpu = time.monotonic(), time.process_time()
    wait(seconds)
    cpu_s, took = time.process_time() - cpu, time.monotonic() - begin
    lost = crowd.lost()
    more = [after - before for after, before in zip(crowd.renewed(), renewed, strict=True)]
    return {
        "seconds": took,
        "cpu_s": cpu_s,
        "renewals": sum(more),
        "least": min(more),
        "failed": crowd.failed() - failed,
        "lost": lost,
        "sockets": [first[0], sockets()],
        "threads": [first[1], threads()],
    }


# ---- the process ----


def hold(crowd: Crowd, key: str, leases: int, wait: Callable[[float], None]) -> float:
    """Acquire so many locks, and say how long that took."""
    begin = time.monotonic()
    for number in range(leases):
        end = time.monotonic() + PATIENCE
        while not crowd.acquire(f"{key}:{number}"):
            if time.monotonic() > end:
                raise TimeoutError(f"a lock that nobody else wants was not granted in {PATIENCE} s")
        wait(0)
    return time.monotonic() - begin


def main() -> None:
    parent = Parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes where the errors go

    def tell(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), file=out, flush=True)

    begun = parent.hear()
    urls = [node["url"] for node in begun["nodes"]]
    try:
        crowd = CROWDS[begun["library"]](urls, begun["options"], begun["lease_s"])
    except (ImportError, Unfit) as error:
        tell({"missing": str(error)})
        return
    tell({"versions": ", ".join(f"{package} {version(package)}" for package in begun["packages"])})
    told = parent.hear()
    tell({"acquired_s": hold(crowd, told["key"], told["leases"], parent.wait)})
    tell(measured(crowd, parent.hear()["seconds"], parent.wait))
    parent.hear()  # nothing comes: it ends, with all that it holds


if __name__ == "__main__":
    main()
