"""A lock that its holder may acquire again, in the layout of Redisson's RLock."""

from __future__ import annotations

import threading
from typing import Any

from redbolt import _process
from redbolt._body import Command, OneNode
from redbolt._clock import now_ns
from redbolt._drive import Target, run
from redbolt._engine import MAX_KEY, Engine
from redbolt._judge import GRANTED, REFUSED
from redbolt._programs import COUNT, ENTER, FORCE, HOLDS, LEAVE, PROLONG, SUCCEED, Program
from redbolt._steps.acquire import unavailable
from redbolt._steps.reenter import reenter, set_count
from redbolt.errors import LockLost
from redbolt.lease import Anchor, Lease
from redbolt.retry import Retry

__all__ = ["ReentrantLock"]

_LATCH_MS = b"20000"  # longer than a release is repeated; Redisson's own is 16 to 20 s


class _Holds(threading.local):
    """The leases of one thread, shared by all objects of the same nodes and name."""

    def __init__(self) -> None:
        self.leases: dict[tuple[Engine, bytes], Lease] = {}
        self.anchors: dict[tuple[Engine, bytes], Anchor] = {}


_holds = _Holds()


class _Place:
    """Where this thread's lease of one lock is kept."""

    __slots__ = ("_name",)

    def __init__(self, engine: Engine, key: bytes) -> None:
        self._name = engine, key

    @property
    def lease(self) -> Lease | None:
        return _holds.leases.get(self._name)

    @lease.setter
    def lease(self, lease: Lease | None) -> None:
        if lease is None:
            _holds.leases.pop(self._name, None)
            _holds.anchors.pop(self._name, None)
        else:
            _holds.leases[self._name] = lease

    @property
    def anchor(self) -> Anchor | None:
        return _holds.anchors.get(self._name)

    @anchor.setter
    def anchor(self, anchor: Anchor | None) -> None:
        if anchor is None:
            _holds.anchors.pop(self._name, None)
        else:
            _holds.anchors[self._name] = anchor


def companion(purpose: str, key: bytes) -> bytes:
    """The name of a further key or channel of a lock, in the same slot of a cluster as its key."""
    return b"%b:%b" % (purpose.encode(), key) if b"{" in key else b"%b:{%b}" % (purpose.encode(), key)


class ReentrantLock(OneNode):
    """A mutual exclusion lock on one Redis or Valkey server that its holder may acquire again.

    The thread that holds it may acquire it again, also with another object of the same client and name; it is
    free when it was released as often. The server keeps it as Redisson's RLock does: a hash under the very
    name, whose one field names the owner and counts. So Java services with Redisson and this lock exclude one
    another.

    Args:
        client, name, sleep, blocking, blocking_timeout, raise_on_release_error, prefix, retry, node_timeout,
            engine, max_handoffs, local_queue, waiting, renew, max_hold, on_lost: as for `Lock`.
        timeout: length of the lease in seconds, which begins anew whenever the count changes; rounded up to
            whole milliseconds. None (the default) for 30 seconds, renewed every third of that while the
            thread that holds it lives (with Redisson, while the client does).
        thread_local: True; such a lock always belongs to a thread.

    Raises:
        ValueError, TypeError: an argument cannot work; nothing is sent.
        ImportError: the forced engine is not installed.
    """

    def _aim(self, plain: Target) -> Target:
        if not self.thread_local:
            raise ValueError("thread_local must be True: this lock belongs to the thread that holds it")
        self._channel = companion("redisson_lock__channel", plain.key)
        self._latch = companion("redisson_unlock_latch", plain.key) + b":"
        if len(self._latch) + 32 > MAX_KEY:
            raise ValueError(f"prefix and name are too long: {len(plain.key)} bytes leave no room for more")
        self._introduce()
        return plain._replace(
            program=ENTER, extra=(self._channel,), type="hash", fresh=self._owner, swap=SUCCEED,
            topic=self._channel,
        )  # fmt: skip

    def _owner(self) -> bytes:
        """An owner for one acquisition: as Redisson's, the id of the client and a number, used only once."""
        if self._generation != _process.generation:
            self._introduce()
        return self._owner_form % _process.number()

    def _introduce(self) -> None:
        """Get to know the id of this process as a client of the node; a fork has another one."""
        self._generation = _process.generation
        client = _process.client_id(self._engine.nodes)
        self._owner_form = client + b":%d"
        self._latch_form = self._latch.replace(b"%", b"%%") + client[-12:] + b"%020x"

    def _place(self) -> Any:
        return _Place(self._engine, self._key)

    def _drop(self, lease: Lease) -> Command:
        if not lease.latch:  # made once, and kept when the release is repeated
            if self._generation != _process.generation:
                self._introduce()
            lease.latch = self._latch_form % _process.number()
        return LEAVE, (lease.token, self._channel, lease.latch, _LATCH_MS)

    def _prolong(self, lease: Lease, length_ms: int) -> Command:
        return COUNT, (lease.token, b"%d" % length_ms, b"%d" % lease.count)

    def _renewal(self) -> tuple[Program, Program | None]:
        return PROLONG, None  # on a single node there is nothing to put back

    def _owns(self, lease: Lease) -> Command:
        return HOLDS, (lease.token,)

    @property
    def hold_count(self) -> int:
        """How often the calling thread holds the lock, judged by the local clock; 0 if it does not."""
        lease: Lease | None = self._hold.lease
        return lease.count if lease is not None and lease.held else 0

    def _again(self, lease: Lease, token: bytes | None, retry: Retry, wait_ns: int | None) -> bool:
        if token is not None and token != lease.token:
            raise ValueError("this thread holds the lock already, and not as the owner that token= names")
        deadline_ns = None if wait_ns is None else now_ns() + wait_ns
        count = lease.count
        try:
            if run(reenter(self._engine, self._target, lease, retry, deadline_ns), self._engine):
                return True
        except BaseException:
            lease.count = count  # an interrupt may also come when it was counted already
            raise
        lease.count = count
        self._forget(lease)
        return False

    def _once_less(self, lease: Lease) -> None:
        # Counts are set and not added to, so it does not matter if the server hears nothing of this one.
        lease.count -= 1
        if lease.held:
            votes = run(set_count(self._engine, self._target, lease), self._engine)
            if votes.verdict != REFUSED:
                return
        self._forget(lease)
        raise LockLost(f"lock {self._key!r} was lost before it was released", self._key)

    def _forget(self, lease: Lease) -> None:
        """The lock is no longer this thread's."""
        lease.lose()
        if self._hold.lease is lease:
            self._hold.lease = self._hold.anchor = None
        self._target.take_back(self._engine, lease.token, lease.touched)

    def force_unlock(self) -> bool:
        """Free the lock, whoever holds it, and wake those who wait for it. The holder is not told.

        Returns:
            Whether anybody held it. A key of another type is left alone.

        Raises:
            NodesUnavailable, SetupError: the node did not answer.
        """
        engine, target, lease = self._engine, self._target, self.lease
        votes = engine.votes()
        engine.round(votes, FORCE, self._key, (self._channel,), target.quorum, target.limit_ns)
        if votes.verdict not in (GRANTED, REFUSED):
            raise unavailable(engine, votes, target, "cannot free")
        if lease is not None:
            lease.end()
            self._hold.lease = self._hold.anchor = None
        return votes.verdict == GRANTED
