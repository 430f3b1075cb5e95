"""Threads that stand in line for a lock, in a known order; and what is on the servers of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from redbolt import Lock, ReentrantLock
from redbolt._programs import DROP, ENTER, LEAVE, SUCCEED, SWAP, TAKE, Program
from redbolt.lease import Lease

from .clients import SLACK, HasAddress, eventually, raw
from .rounds import InBackground
from .waiting import NAME

__all__ = ["AnyLock", "Holder", "Line", "Stay", "count_writes", "left", "nothing_left", "token_on", "writes"]

AnyLock: TypeAlias = Lock | ReentrantLock
LATCH = b"redisson_unlock_latch:"
READS = ("PTTL", "HELLO", "CLIENT", "PING", "TYPE", "GET", "HGETALL", "EXISTS", "GETRANGE", "HEXISTS", "KEYS")


class Line:
    """Threads in line for the lock that ``make`` makes, each with an object of its own unless told otherwise.

    Attributes:
        queue: the one that they stand in.
        served: the numbers of those that were granted it, in that order.
    """

    def __init__(self, make: Callable[..., AnyLock]) -> None:
        self._make = make
        self.queue = make()._queue
        self.served: list[int] = []
        self.threads: list[InBackground[bool]] = []

    def join(
        self,
        number: int,
        lock: AnyLock | None = None,
        inside: Callable[[AnyLock], object] | None = None,
        keep: bool = False,
        **arguments: object,
    ) -> InBackground[bool]:
        """Let one more thread wait; returns when it stands in line. Its result: whether it was granted.

        Args:
            number: what is noted when it was granted.
            lock: the object to use.
            inside: called with it while it is held.
            keep: whether it never gives it back.
            arguments: for `acquire`.
        """
        mine = lock or self._make()
        before = set(self.queue.waiters)

        def work() -> bool:
            if not mine.acquire(**arguments):  # type: ignore[arg-type]
                return False
            self.served.append(number)
            if inside is not None:
                inside(mine)
            if not keep:
                mine.release()
            return True

        thread = InBackground(work)
        self.threads.append(thread)

        def stands() -> bool:
            return bool(set(self.queue.waiters) - before) or not thread.is_alive()

        eventually(stands, what="it stands in line")
        return thread

    def join_all(self, numbers: Iterable[int], **arguments: object) -> None:
        """Several, one after the other."""
        for number in numbers:
            self.join(number, **arguments)  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """How many stand in line."""
        return len(self.queue.waiters)

    def listens(self) -> None:
        """Wait until the first one in line listens to the servers."""
        eventually(lambda: self.queue.waiters[0].ears is not None, what="the first one listens")

    def end(self) -> list[bool]:
        """Wait for all of them; returns whether each was granted it. Nobody is left in line."""
        results = [thread.result() for thread in self.threads]
        assert self.size == 0
        self.threads.clear()
        return results


def token_on(server: HasAddress, name: str = NAME) -> bytes | None:
    """The token that a key holds, plain or reentrant; None if there is no such key."""
    kind = raw(server, "TYPE", name)
    if kind == b"hash":
        (token,) = raw(server, "HGETALL", name)
        assert isinstance(token, bytes)
        return token
    value: bytes | None = raw(server, "GET", name)
    return value


def left(servers: Iterable[HasAddress]) -> dict[str, list[bytes]]:
    """The keys on each server that has any; but not latches, which may stay until they end by themselves."""
    found = {server.url: raw(server, "KEYS", "*") for server in servers}
    locks = {url: [key for key in keys if not key.startswith(LATCH)] for url, keys in found.items()}
    return {url: keys for url, keys in locks.items() if keys}


def nothing_left(servers: Iterable[HasAddress], timeout: float = 1.0) -> None:
    """Check that no server keeps a key, or only for a moment."""
    servers = list(servers)

    def clean() -> bool:
        found = left(servers)
        assert not found, str(found)
        return True

    eventually(clean, timeout, "no key is left")


def writes(seen: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those of the commands that a `Monitor` has seen that change something, scripts as a whole."""
    return [argv for argv in seen if argv[0] not in READS and not argv[0].startswith(".")]


def _shown(body: bytes) -> str:
    """A script as MONITOR shows it."""
    return body.decode().replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _scripts(program: Program) -> set[str]:
    words = [form[1] for form in program.forms if form[0] in (b"EVAL", b"EVALSHA")]
    return {_shown(word) for word in words if isinstance(word, bytes)}


_SCRIPTS = {
    text: program.name for program in (DROP, SWAP, ENTER, LEAVE, SUCCEED) for text in _scripts(program)
}
_SAME = {ENTER.name: TAKE.name, LEAVE.name: DROP.name, SUCCEED.name: SWAP.name}


def _name_of(argv: tuple[str, ...]) -> str:
    if argv[0] == "SET":
        return SWAP.name if "IFEQ" in argv else TAKE.name
    if argv[0] in ("DELIFEQ", "DELEX"):
        return DROP.name
    if argv[0] in ("EVAL", "EVALSHA"):
        name = _SCRIPTS.get(argv[1], argv[0])
        return _SAME.get(name, name)
    return argv[0]


def count_writes(seen: Iterable[tuple[str, ...]]) -> list[str]:
    """The programs, by name, that changed something: "take", "swap", "drop" for every kind of lock.

    A script that the server did not know yet, and got a second time, counts once.
    """
    names: list[str] = []
    unknown: set[tuple[str, ...]] = set()
    for argv in writes(seen):
        name = _name_of(argv)
        if argv[0] == "EVALSHA":
            unknown.add((name, *argv[2:]))
        elif argv[0] == "EVAL" and (name, *argv[2:]) in unknown:
            continue
        names.append(name)
    return names


class Holder:
    """Holds a lock in a thread of its own, until it is told to let go."""

    def __init__(self, lock: AnyLock) -> None:
        self.lock = lock
        self.lease: Lease
        self._go, self._held = threading.Event(), threading.Event()
        self.releasing = InBackground(self._work)
        eventually(self._held.is_set, what="it holds the lock")

    def _work(self) -> None:
        assert self.lock.acquire(blocking=False)
        assert self.lock.lease is not None
        self.lease = self.lock.lease
        self._held.set()
        self._go.wait()
        self.lock.release()

    @property
    def token(self) -> bytes:
        return self.lease.token

    def let_go(self) -> InBackground[None]:
        """Have it release; its result is that of the release."""
        self._go.set()
        return self.releasing


class Stay:
    """For the ``inside`` of a `Line`: it stays there until the test has seen enough."""

    def __init__(self) -> None:
        self.lock: AnyLock | None = None
        self.lease: Lease
        self._inside, self._leave = threading.Event(), threading.Event()

    def __call__(self, lock: AnyLock) -> None:
        assert lock.lease is not None
        self.lease = lock.lease
        self.lock = lock
        self._inside.set()
        assert self._leave.wait(30 * SLACK)

    def inside(self) -> Lease:
        """Wait until somebody is there; its lease."""
        eventually(self._inside.is_set, what="somebody has got the lock")
        return self.lease

    def leave(self) -> None:
        self._leave.set()
