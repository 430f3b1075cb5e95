"""The plain lock: a key with a token and a time to live, on one node (`Lock`) or a quorum of nodes
(`RedLock`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from types import SimpleNamespace, TracebackType
from typing import Any, Self

from redbolt import _process
from redbolt._arguments import check_bool, key_bytes, lease_ms, milliseconds, seconds, token_bytes
from redbolt._clock import now_ns
from redbolt._drive import Target, run
from redbolt._engine import EngineChoice, Votes, chosen
from redbolt._judge import GRANTED, REFUSED, drift_ns, validity_end_ns
from redbolt._programs import DROP, EXISTS, EXTEND, OWNED
from redbolt._steps.acquire import acquire, foreign_type, unavailable
from redbolt._steps.release import conclude, release
from redbolt.errors import LockError, LockLost, LockNotOwned, LockTimeout
from redbolt.lease import Lease
from redbolt.node import Node, NodeLike, as_node, as_nodes
from redbolt.retry import Retry

__all__ = ["Lock", "RedLock"]

_log = logging.getLogger("redbolt")

_DEFAULT_LEASE = 30.0
_DRIFT_FACTOR = 0.01
_LOCK_LIMIT = 1.0  # node time limit of a Lock: its node's socket_timeout, at most this
_REDLOCK_LIMIT = 0.05


class _ThreadHold(threading.local):
    lease: Lease | None = None


class Lock:
    """A mutual exclusion lock on one Redis or Valkey server, with a lease.

    The key is exactly ``prefix + name``, its value a random token: the layout of redis-py, redlock-py,
    redsync and node-redlock, so they and this lock exclude one another.

    Args:
        client: the node: a URL (``redis://``, ``rediss://``, ``unix://``), a ``redis.Redis`` or
            ``valkey.Valkey`` whose settings are copied, or a `Node`.
        name: name of the lock.
        timeout: length of the lease in seconds; rounded up to whole milliseconds. None (the default) for 30
            seconds.
        sleep: seconds between two tries of a waiting acquire. Default 0.1.
        blocking: whether `acquire` waits while the lock is taken. Default True.
        blocking_timeout: how many seconds it waits at most. None (the default) for ever; 0 tries once.
        thread_local: True (the default): a lease belongs to the thread that acquired it, and no other can
            release it. False: the object has one current lease, which any thread may release.
        raise_on_release_error: False makes the end of a ``with`` block log a failed release instead of
            raising it.
        prefix: put before the name to make the key, to keep locks apart from data. Default none.
        retry: a `Retry`; overrides ``sleep``.
        node_timeout: seconds that a node may take to answer. Default: the client's socket timeout, at most 1.
        engine: ``"native"`` or ``"pure"`` force an engine; None (the default) takes the best that is
            installed.

    Raises:
        ValueError, TypeError: an argument cannot work; nothing is sent.
        ImportError: the forced engine is not installed.
    """

    def __init__(
        self,
        client: NodeLike,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        prefix: str | bytes = "",
        retry: Retry | None = None,
        node_timeout: float | None = None,
        engine: str | None = None,
    ) -> None:
        node = as_node(client)
        if node_timeout is None:
            node_timeout = min(node.socket_timeout or _LOCK_LIMIT, _LOCK_LIMIT)
        self._set_up(
            (node,), name, timeout, sleep, blocking, blocking_timeout, thread_local, raise_on_release_error,
            prefix, retry, node_timeout, engine, None, _DRIFT_FACTOR,
        )  # fmt: skip

    def _set_up(
        self,
        nodes: tuple[Node, ...],
        name: str | bytes,
        timeout: float | None,
        sleep: float,
        blocking: bool,
        blocking_timeout: float | None,
        thread_local: bool,
        raise_on_release_error: bool,
        prefix: str | bytes,
        retry: Retry | None,
        node_timeout: float,
        engine: str | None,
        quorum: int | None,
        drift_factor: float,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.sleep = seconds(sleep, "sleep", zero=True)
        self.blocking = check_bool(blocking, "blocking")
        self.blocking_timeout = (
            None if blocking_timeout is None else seconds(blocking_timeout, "blocking_timeout", zero=True)
        )
        self.thread_local = check_bool(thread_local, "thread_local")
        self.raise_on_release_error = check_bool(raise_on_release_error, "raise_on_release_error")
        if retry is not None and not isinstance(retry, Retry):
            raise TypeError(f"retry must be a redbolt.Retry or None, not {type(retry).__name__}")
        self.retry = retry if retry is not None else Retry(delay=sleep)
        if isinstance(drift_factor, bool) or not isinstance(drift_factor, (int, float)):
            raise TypeError(f"drift_factor must be a number, not {type(drift_factor).__name__}")
        if not 0 <= drift_factor < 1:
            raise ValueError(f"drift_factor must be from 0 to below 1, not {drift_factor!r}")
        self._drift_factor = drift_factor
        self._lease_ms = lease_ms(_DEFAULT_LEASE if timeout is None else timeout, drift_factor)
        majority = len(nodes) // 2 + 1
        if quorum is not None and (isinstance(quorum, bool) or not isinstance(quorum, int)):
            raise TypeError(f"quorum must be an int or None, not {type(quorum).__name__}")
        self._quorum = majority if quorum is None else quorum
        if not majority <= self._quorum <= len(nodes):
            raise ValueError(f"quorum must be from {majority} (a majority) to {len(nodes)}, not {quorum}")
        self._key = key_bytes(prefix, name)
        self._limit_ns = milliseconds(node_timeout, "node_timeout") * 1_000_000
        self._drift_ns = drift_ns(self._lease_ms, drift_factor)
        self._target = Target(self._key, self._lease_ms, self._quorum, self._drift_ns, self._limit_ns)
        self._engine, self._choice = chosen(nodes, engine)
        self._hold: Any = _ThreadHold() if thread_local else SimpleNamespace(lease=None)

    def __repr__(self) -> str:
        nodes = ", ".join(node.address for node in self.nodes)
        return f"<{type(self).__name__} {self._key!r} on {nodes}>"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The servers it lives on."""
        return self._engine.nodes

    @property
    def engine_choice(self) -> EngineChoice:
        """Which engine it uses, and why; ``redbolt.engine(lock)`` tells the same."""
        return self._choice

    @property
    def lease(self) -> Lease | None:
        """The current lease (of this thread, if ``thread_local``), also one that ran out; None if there is
        none.
        """
        lease: Lease | None = self._hold.lease
        return lease

    @property
    def held(self) -> bool:
        """Whether the current lease is valid now, judged by the local clock; nothing is asked."""
        lease: Lease | None = self._hold.lease
        return lease is not None and lease.held

    def left(self) -> float:
        """Seconds for which the current lease is still valid, judged by the local clock; 0.0 if it is not
        held.
        """
        lease: Lease | None = self._hold.lease
        return 0.0 if lease is None else lease.left()

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Take the lock.

        Args:
            sleep, blocking, blocking_timeout: as in the constructor, for this call.
            token: a value of the caller's own to mark the acquisition; it must be used for nothing else.
                Default: a fresh random one.

        Returns:
            True when the lock is held; False when it stayed taken by somebody else.

        Raises:
            LockError: the caller holds it already (this lock is not reentrant).
            NodesUnavailable: no quorum of nodes could be reached: at once without blocking, else at the end
                of the waiting time; where that is unlimited, after one lease length.
            SetupError: waiting cannot help: wrong credentials, missing permissions, no such database.
            ValueError, TypeError: an argument cannot work; nothing was sent.

        The source of the algorithm is https://redis.io/docs/latest/develop/use/patterns/distributed-locks/.
        """
        engine, hold = self._engine, self._hold
        before: Lease | None = hold.lease
        if before is not None and before.held and before.owner == _process.owner():
            raise LockError(
                f"lock {self._key!r} is held by this caller already, and is not reentrant", self._key
            )
        if sleep is not None:
            sleep = seconds(sleep, "sleep", zero=True)
        blocking = self.blocking if blocking is None else check_bool(blocking, "blocking")
        if blocking_timeout is None:
            blocking_timeout = self.blocking_timeout
        else:
            seconds(blocking_timeout, "blocking_timeout", zero=True)
        own, started_ns = (None, 0) if token is None else (token_bytes(token), now_ns())
        votes: Votes | None = None
        mine: Lease | None = None
        try:
            if own is None or not engine.pending(own):
                votes = engine.votes()
                if engine.attempt(
                    votes, self._key, own, self._lease_ms, self._quorum, self._drift_ns, self._limit_ns
                ):
                    mine = hold.lease = Lease(self._key, self._lease_ms, votes, _process.owner())
                    return True
                started_ns = started_ns or votes.started_ns
            if not blocking:
                if votes is not None and votes.verdict == REFUSED:
                    return False
                raise unavailable(engine, votes, self._target, "cannot acquire")

            def granted(votes: Votes) -> None:
                nonlocal mine
                mine = hold.lease = Lease(self._key, self._lease_ms, votes, _process.owner())

            deadline_ns = None if blocking_timeout is None else started_ns + int(blocking_timeout * 1e9)
            retry = self.retry if sleep is None else Retry(self.retry.count, sleep)
            steps = acquire(engine, self._target, votes, own, retry, started_ns, deadline_ns, granted)
            return run(steps, engine)
        except BaseException:
            # An interrupt may come at any moment, also between the grant and the return.
            if votes is not None and votes.verdict == GRANTED:
                engine.discard(self._key, votes.token, votes.touched)
            if mine is not None:
                engine.discard(self._key, mine.token, mine.touched)
                if hold.lease is mine:
                    hold.lease = None
            raise

    def _current(self, what: str) -> Lease:
        lease: Lease | None = self._hold.lease
        if lease is None:
            raise LockNotOwned(f"cannot {what} lock {self._key!r}: it is not held by this caller", self._key)
        if lease.inherited:
            raise LockNotOwned(
                f"cannot {what} lock {self._key!r}: it is held by the parent of this process", self._key
            )
        return lease

    def release(self) -> None:
        """Give the lock back. It is no longer claimed from the moment of the call, whatever comes of it.

        Raises:
            LockNotOwned: this caller does not hold it; nothing was sent.
            LockLost: the lease had ended before, or somebody removed the key.
            ReleaseUnconfirmed: no quorum of nodes confirmed it in time. Calling again is safe; the key ends
                with its lease anyway.
        """
        engine, hold = self._engine, self._hold
        lease = self._current("release")
        first = not lease.release_unknown
        lease.release_unknown = True  # until we know better
        votes = engine.votes()
        try:
            hold.lease = None  # first: the next holder may be another thread with this object
            engine.round(votes, DROP, self._key, (lease.token,), self._quorum, self._limit_ns, lease.touched)
            if votes.verdict != GRANTED:
                votes = run(release(engine, self._target, lease, votes, votes.started_ns), engine)
                first = False
        except BaseException:
            if hold.lease is None:
                hold.lease = lease  # it can be tried again
            raise
        if votes.hits:
            lease.end()
        else:
            conclude(lease, votes, first)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Lengthen the lease.

        Args:
            additional_time: seconds to add to what is left of the lease.
            replace_ttl: True: the seconds are the new remaining time, instead of being added. Default False.

        Returns:
            True.

        Raises:
            LockNotOwned: this caller does not hold it; nothing was sent.
            LockLost: the lease has ended; nothing revives it.
            NodesUnavailable: no quorum of nodes answered; the lease ends as before, or as asked if that is
                sooner.
            ValueError, TypeError: an argument cannot work; nothing was sent.
        """
        length_ms = milliseconds(additional_time, "additional_time")
        check_bool(replace_ttl, "replace_ttl")
        lease = self._current("extend")
        now = now_ns()
        if not lease.held:
            raise LockLost(f"cannot extend lock {self._key!r}: its lease has ended", self._key)
        if not replace_ttl:
            length_ms += -(-(lease.started_ns + lease.length_ms * 1_000_000 - now) // 1_000_000)
        return self._renew(lease, length_ms, now)

    def reacquire(self) -> bool:
        """Give the lease its full length again, from now on.

        Returns:
            True.

        Raises:
            LockNotOwned, LockLost, NodesUnavailable: as in `extend`.
        """
        lease = self._current("reacquire")
        if not lease.held:
            raise LockLost(f"cannot reacquire lock {self._key!r}: its lease has ended", self._key)
        return self._renew(lease, self._lease_ms, now_ns())

    def _renew(self, lease: Lease, length_ms: int, now: int) -> bool:
        drift = drift_ns(length_ms, self._drift_factor)
        if validity_end_ns(0, length_ms, drift) <= 0:
            raise ValueError(f"{length_ms} ms leave no validity: clock drift alone takes more")
        lease.shorten(validity_end_ns(now, length_ms, drift))
        engine, votes = self._engine, self._engine.votes()
        engine.round(votes, EXTEND, self._key, (lease.token, b"%d" % length_ms), self._quorum, self._limit_ns)
        valid_until_ns = validity_end_ns(votes.started_ns, length_ms, drift)
        if votes.verdict == GRANTED and votes.ended_ns < valid_until_ns:
            lease.renew(votes.started_ns, length_ms, valid_until_ns)
            return True
        if votes.verdict == REFUSED or (votes.verdict == GRANTED and not lease.held):
            lease.end()
            engine.discard(self._key, lease.token, lease.touched)
            raise LockLost(f"lock {self._key!r} is lost: its token is gone from the servers", self._key)
        raise unavailable(engine, votes, self._target, "cannot extend")

    def locked(self) -> bool:
        """Ask the servers whether anybody holds the lock, so that a try now would be refused.

        Raises:
            NodesUnavailable: too few nodes answered to tell.
        """
        votes = self._engine.votes()
        enough = len(self.nodes) - self._quorum + 1
        self._engine.round(votes, EXISTS, self._key, (), enough, self._limit_ns)
        if votes.verdict in (GRANTED, REFUSED):
            return votes.verdict == GRANTED
        raise unavailable(self._engine, votes, self._target, "cannot tell who holds")

    def owned(self) -> bool:
        """Ask the servers whether a quorum of them still has the token of the current lease.

        Raises:
            NodesUnavailable: too few nodes answered to tell.
        """
        lease: Lease | None = self._hold.lease
        if lease is None or not lease.held:
            return False
        votes = self._engine.votes()
        args = (lease.token, b"%d" % len(lease.token))
        self._engine.round(votes, OWNED, self._key, args, self._quorum, self._limit_ns)
        if votes.verdict in (GRANTED, REFUSED):
            return votes.verdict == GRANTED and lease.held
        raise unavailable(self._engine, votes, self._target, "cannot tell who holds")

    def __enter__(self) -> Self:
        before = self._hold.lease
        try:
            if self.acquire():
                return self
            found = run(foreign_type(self._engine, self._target), self._engine)
            why = f"its key holds a {found}, which no lock put there" if found else "somebody else holds it"
            raise LockTimeout(f"lock {self._key!r} was not acquired in the time given: {why}", self._key)
        except BaseException:
            lease = self._hold.lease
            if lease is not None and lease is not before and lease.owner == _process.owner():
                # Acquired by this call, and interrupted before the block began.
                self._engine.discard(self._key, lease.token, lease.touched)
                self._hold.lease = None
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lease = self.lease
        lost = lease is not None and not lease.held and not lease.release_unknown
        try:
            self.release()
            if lost:
                raise LockLost(f"the lease of lock {self._key!r} ended while its block ran", self._key)
        except LockError as problem:
            if error is not None:
                error.add_note(f"and the lock was not released cleanly: {problem}")
            elif self.raise_on_release_error:
                raise
            else:
                _log.warning("lock %r was not released cleanly: %s", self._key, problem)


class RedLock(Lock):
    """A mutual exclusion lock on a quorum of independent Redis or Valkey servers.

    It is granted by a majority, so it survives the loss of a minority. The source of the algorithm is
    https://redis.io/docs/latest/develop/use/patterns/distributed-locks/; all nodes are asked at once, and
    the answer is there with the fastest quorum.

    Args:
        clients: the nodes: a sequence of URLs, plain ``redis.Redis`` clients or `Node` objects; an odd
            number is best.
        name, timeout, sleep, blocking, blocking_timeout, thread_local, raise_on_release_error, prefix,
            retry, engine: as for `Lock`.
        node_timeout: seconds that a node may take to answer. Default 0.05. One that takes longer is left
            out until it answers.
        quorum: how many nodes must agree; default and least: a majority.
        drift_factor: how far clocks may run apart, as a part of the lease. Default 0.01.

    Raises:
        ValueError, TypeError: an argument cannot work; nothing is sent.
        ImportError: the forced engine is not installed.
    """

    def __init__(
        self,
        clients: Iterable[NodeLike],
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        prefix: str | bytes = "",
        retry: Retry | None = None,
        node_timeout: float = _REDLOCK_LIMIT,
        engine: str | None = None,
        quorum: int | None = None,
        drift_factor: float = _DRIFT_FACTOR,
    ) -> None:
        self._set_up(
            as_nodes(clients), name, timeout, sleep, blocking, blocking_timeout, thread_local,
            raise_on_release_error, prefix, retry, node_timeout, engine, quorum, drift_factor,
        )  # fmt: skip
