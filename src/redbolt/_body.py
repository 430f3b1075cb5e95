"""What all locks with a lease have in common: one body, of which `Lock`, `RedLock` and `ReentrantLock` are
the faces.
"""

from __future__ import annotations

import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any, NoReturn, Self, TypeAlias

from redbolt import _process
from redbolt._arguments import (
    check_bool,
    check_drift,
    check_handoffs,
    check_quorum,
    key_bytes,
    lease_ms,
    milliseconds,
    seconds,
    token_bytes,
)
from redbolt._clock import now_ns
from redbolt._drive import Target, run
from redbolt._engine import Votes, chosen
from redbolt._judge import GRANTED, REFUSED, drift_ns, validity_end_ns
from redbolt._losses import OnLost, losses_of
from redbolt._programs import EXISTS, EXTEND, FORGET, Program
from redbolt._queue import Queue, Waiter, Waiting, queue_for
from redbolt._steps.acquire import acquire, foreign_type, unavailable
from redbolt._steps.hand_on import hand_on
from redbolt._steps.hear import WAYS
from redbolt._steps.release import conclude, release
from redbolt._steps.settle import settle
from redbolt.errors import LockError, LockLost, LockNotOwned, LockTimeout, ReleaseUnconfirmed
from redbolt.lease import Anchor, Lease, Lost
from redbolt.node import Node, NodeLike, as_node
from redbolt.retry import Retry

__all__ = ["DRIFT_FACTOR", "MAX_HANDOFFS", "REDLOCK_LIMIT", "Body", "Command", "OneNode", "node_limit"]

_log = logging.getLogger("redbolt")
_NEVER = 1 << 62

DRIFT_FACTOR = 0.01
MAX_HANDOFFS = 16  # in a row; without an end other processes would starve
_DEFAULT_LEASE = 30.0
_NODE_LIMIT = 1.0
REDLOCK_LIMIT = 0.05  # default node time limit in seconds where a majority will do
_NAMELESS = (
    "this lock was made without a name; give it one, or use lock(), unlock() and extend() with a resource"
)

Command: TypeAlias = tuple[Program, tuple[bytes, ...]]
"""A program and its arguments behind the key."""


def node_limit(node: Node) -> float:
    """Seconds that the node of a lock on a single one may take to answer."""
    return min(node.socket_timeout or _NODE_LIMIT, _NODE_LIMIT)


class _ThreadHold(threading.local):
    lease: Lease | None = None
    anchor: Anchor | None = None


class Body(ABC):
    """A lock with a lease. A face says by which programs it is kept, and what a second acquire means."""

    name: str | bytes | None

    def _set_up(
        self,
        nodes: tuple[Node, ...],
        name: str | bytes | None,
        key: bytes,
        timeout: float | None,
        sleep: float,
        blocking: bool,
        blocking_timeout: float | None,
        thread_local: bool,
        raise_on_release_error: bool,
        retry: Retry | None,
        node_timeout: float,
        engine: str | None,
        quorum: int | None,
        drift_factor: float,
        max_handoffs: int,
        local_queue: bool,
        waiting: str | None,
        renew: bool | None,
        max_hold: float | None,
        on_lost: OnLost | None,
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
        self.retry = retry if retry is not None else polling(self.sleep)
        if waiting is not None and waiting not in WAYS:
            raise ValueError(f"waiting must be None or one of {', '.join(WAYS)}, not {waiting!r}")
        self._max_handoffs = check_handoffs(max_handoffs)
        self._waiting = waiting
        self._renewed = timeout is None if renew is None else check_bool(renew, "renew")
        self._hold_ns = _NEVER if max_hold is None else milliseconds(max_hold, "max_hold") * 1_000_000
        if max_hold is not None and not self._renewed:
            raise ValueError("max_hold is for leases that are renewed; a fixed one has its timeout")
        if on_lost is not None and not callable(on_lost):
            raise TypeError(f"on_lost must be callable or None, not {type(on_lost).__name__}")
        self._on_lost = on_lost
        self._kept = self._renewed or on_lost is not None  # whether the agent looks after its leases
        if self._kept and _process.is_subinterpreter():
            raise RuntimeError(
                "there is no agent in a sub-interpreter, so no lease is renewed there: give a timeout, and"
                " neither renew=True nor on_lost"
            )
        self._drift_factor = check_drift(drift_factor)
        self._lease_ms = lease_ms(_DEFAULT_LEASE if timeout is None else timeout, drift_factor)
        self._quorum = check_quorum(quorum, len(nodes))
        self._key = key
        self._limit_ns = milliseconds(node_timeout, "node_timeout") * 1_000_000
        self._engine, self.engine_choice = chosen(nodes, engine)
        plain = Target(
            self._key, self._lease_ms, self._quorum, drift_ns(self._lease_ms, drift_factor), self._limit_ns
        )
        self._target = self._aim(plain)
        self._tail = self._target[1:7]  # the arguments of a try behind its token
        if waiting == "channel" and not self._target.topic:
            raise ValueError("waiting must not be 'channel': nothing is published when this lock is released")
        self._line = check_bool(local_queue, "local_queue")
        program = self._target.program
        self._queue = queue_for(self._engine, key, program) if local_queue else Queue(self._engine)
        self._hold = self._place()
        self._me = weakref.ref(self)
        if self._hold_ns < self._lease_ms * 1_000_000:
            raise ValueError(f"max_hold must not be shorter than a lease, {self._lease_ms / 1000:g} s")

    # ---- what makes a face ----

    def _aim(self, plain: Target) -> Target:
        """What is asked of the nodes; a face may keep the lock in another way than in a plain key."""
        return plain

    def _place(self) -> Any:
        """Where the current lease is kept, as its attributes ``lease`` and ``anchor``."""
        return _ThreadHold() if self.thread_local else SimpleNamespace(lease=None, anchor=None)

    def _again(self, lease: Lease, token: bytes | None, retry: Retry, wait_ns: int | None) -> bool:
        """The caller, who holds the lock, acquires it again; False means that it was not held after all.

        ``wait_ns`` is how long nodes that do not answer are asked again, None for the rest of the lease.
        """
        raise LockError(f"lock {self._key!r} is held by this caller already, and is not reentrant", self._key)

    def _once_less(self, lease: Lease) -> None:
        """The caller, who holds the lock more than once, gives it back once."""
        raise AssertionError("a lock that is not reentrant is held once")

    def _renewal(self) -> tuple[Program, Program | None]:
        """What renews a lease, and what puts it back on a node that has lost it."""
        return EXTEND, self._target.program

    @abstractmethod
    def _drop(self, lease: Lease) -> Command:
        """The delete that ends the lease."""

    @abstractmethod
    def _prolong(self, lease: Lease, length_ms: int) -> Command:
        """What gives the key a new life."""

    @abstractmethod
    def _owns(self, lease: Lease) -> Command:
        """What asks whether the token is still there."""

    # ---- what they share ----

    def __repr__(self) -> str:
        nodes = ", ".join(node.address for node in self.nodes)
        return f"<{type(self).__name__} {self._key!r} on {nodes}>"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The servers it lives on."""
        return self._engine.nodes

    @property
    def lease(self) -> Lease | None:
        """The current lease (of this thread, if ``thread_local``), also one that ran out; None if there is
        none.
        """
        lease: Lease | None = self._hold.lease
        return lease

    @property
    def waiting(self) -> Waiting:
        """How one waits for this lock while it is taken: "tracking" (the server tells of changes of the key),
        "channel" (it tells of what is published there) or "polling"; its attribute ``reason`` says why.
        """
        return self._queue.way

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

    @property
    def lost(self) -> Lost:
        """Whether the current lease was lost: ``is_set()`` says so at once, ``wait(timeout)`` blocks, and
        ``reason`` tells why. It stays that of this lease, also in other threads and after the next acquire.
        """
        return Lost(self._hold.lease)

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
            LockError: the caller holds it already, and the lock is not reentrant.
            NodesUnavailable: no quorum of nodes could be reached: at once without blocking, else at the end
                of the waiting time; where that is unlimited, after one lease length.
            SetupError: waiting cannot help: wrong credentials, missing permissions, no such database.
            ValueError, TypeError: an argument cannot work; nothing was sent.

        The source of the algorithm is https://redis.io/docs/latest/develop/use/patterns/distributed-locks/.
        """
        _process.look()
        engine, hold, target = self._engine, self._hold, self._target
        if not target.key:
            raise ValueError(_NAMELESS)
        if sleep is not None:
            sleep = seconds(sleep, "sleep", zero=True)
        blocking = self.blocking if blocking is None else check_bool(blocking, "blocking")
        if blocking_timeout is None:
            blocking_timeout = self.blocking_timeout
        else:
            seconds(blocking_timeout, "blocking_timeout", zero=True)
        own, started_ns = (None, 0) if token is None else (token_bytes(token), now_ns())
        before: Lease | None = hold.lease
        if before is not None and before.held and before.owner == _process.owner():
            started_ns = started_ns or now_ns()
            retry = self.retry if sleep is None else polling(sleep, self.retry.count)
            wait_ns = None if blocking_timeout is None else int(blocking_timeout * 1e9)
            if self._again(before, own, retry, wait_ns if blocking else 0):
                return True
        votes: Votes | None = None
        mine: Lease | None = None
        queue = self._queue
        try:
            # Whoever waits was there before; but without waiting one can only try.
            if not (queue.waiters and blocking and blocking_timeout != 0) and (
                own is None or not engine.pending(own)
            ):
                votes = engine.votes()
                token = target.fresh() if own is None and target.fresh is not None else own
                if engine.attempt(votes, self._key, token, *self._tail):
                    mine = Lease(self._key, self._lease_ms, votes, _process.owner(), self._me)
                    if self._kept:
                        self._keep(mine)
                    hold.lease = queue.lease = mine
                    return True
                started_ns = started_ns or votes.started_ns
            if not blocking:
                if votes is not None and votes.verdict == REFUSED:
                    return False
                raise unavailable(engine, votes, target, "cannot acquire")

            def granted(got: Votes | Lease) -> None:
                nonlocal mine
                if isinstance(got, Lease):
                    mine = got
                    mine.belong(self._me)
                else:
                    mine = Lease(self._key, self._lease_ms, got, _process.owner(), self._me)
                if self._kept:
                    self._keep(mine)
                hold.lease = queue.lease = mine

            started_ns = started_ns or now_ns()
            deadline_ns = None if blocking_timeout is None else started_ns + int(blocking_timeout * 1e9)
            retry = self.retry if sleep is None else polling(sleep, self.retry.count)
            if not self._line:
                queue = Queue(engine)
            waiter = Waiter(target, engine.gate(), own is None, self._renewed)
            steps = acquire(
                engine, target, queue, waiter, votes, own, retry, self._waiting, started_ns, deadline_ns,
                granted,
            )  # fmt: skip
            return run(steps, engine)
        except BaseException:
            # An interrupt may come at any moment, also between the grant and the return.
            if mine is not None:
                mine.end()  # first: nothing renews it while it is taken back
            if votes is not None and votes.verdict == GRANTED:
                target.take_back(engine, votes.token, votes.touched)
            if mine is not None:
                target.take_back(engine, mine.token, mine.touched)
                if hold.lease is mine:
                    hold.lease = hold.anchor = None
                queue.set_free(mine)
            raise

    def _keep(self, lease: Lease) -> None:
        """Have the agent look after a lease that this caller has got."""
        losses = losses_of(self._engine)
        until_ns = _NEVER if self._hold_ns == _NEVER else now_ns() + self._hold_ns
        if lease.renewal is not None and (lease.renewed or not self._renewed):
            lease.renewal.bound(until_ns)
        else:
            program, back = self._renewal() if self._renewed else (None, None)
            target, started_ns, length_ms = self._target, lease.started_ns, lease.length_ms
            valid_until_ns = lease.valid_until_ns
            lease.renewal = self._engine.renew(
                lease.key, lease.token, lease.touched, self._lease_ms, target.quorum, target.drift_ns,
                target.limit_ns, started_ns, valid_until_ns, until_ns, program, back,
                losses.gate,  # the next holder may want to hear of it, if this one does not
            )  # fmt: skip
            lease.renewed = self._renewed
            if length_ms != self._lease_ms:  # it was another lock's, or was extended
                lease.renewal.note(started_ns, length_ms, valid_until_ns)
            if lease.surely_ns is not None:
                lease.renewal.doubt(lease.surely_ns)
        if self._on_lost is not None:
            losses.listen(lease, self._on_lost)
        hold = self._hold
        if hold.anchor is None:
            hold.anchor = Anchor(lease)
        else:
            hold.anchor.lease = lease

    def _part_with(self, lease: Lease) -> None:
        """Let go of a lease without ending it."""
        hold, queue = self._hold, self._queue
        if hold.anchor is not None:
            hold.anchor.lease = None
        if hold.lease is lease:
            hold.lease = None
        if queue.lease is lease:
            queue.lease = None

    def _hand_over(self, lease: Lease) -> None:
        if self._current("hand over") is not lease:
            raise LockNotOwned(
                f"cannot hand over lock {self._key!r}: this lease is not held by this caller", self._key
            )
        if not lease.held:
            raise LockLost(f"cannot hand over lock {self._key!r}: {lease.lost_reason}", self._key)
        place = self._engine, self._target.program
        try:
            self._part_with(lease)
            lease.offer(place)
        except BaseException:  # an interrupt: it is done all the same, and may be adopted again
            self._part_with(lease)
            lease.offer(place)
            raise

    def adopt(self, lease: Lease) -> None:
        """Become the holder of a lease that another thread has handed over (`Lease.hand_over`).

        Args:
            lease: of a lock with the same nodes and name, of the same kind.

        Raises:
            LockError: nobody has handed it over, or the caller holds the lock already.
            LockLost: it is lost by now.
            ValueError: it is of another lock.
        """
        place = lease.offered
        if place is None:
            raise LockError(f"nobody has handed over this lease of lock {lease.key!r}", lease.key)
        if lease.key != self._key or place != (self._engine, self._target.program):
            raise ValueError(f"the lease of {lease.key!r} is not one of lock {self._key!r}")
        before: Lease | None = self._hold.lease
        if before is not None and before.held:
            raise LockError(f"lock {self._key!r} is held by this caller already", self._key)
        if not lease.take_over(_process.owner()):
            raise LockError(f"somebody else has taken over this lease of lock {self._key!r}", self._key)
        try:
            lease.belong(self._me)
            losses_of(self._engine).forget(lease)  # from now on it is this lock that is told
            self._hold.lease = self._queue.lease = lease
            if lease.held and (self._kept or lease.renewal is not None):
                self._keep(lease)
        except BaseException:  # an interrupt: it is nobody's again
            self._part_with(lease)
            lease.offer(place)
            raise
        if not lease.held:
            reason = lease.lost_reason
            self._part_with(lease)
            raise LockLost(f"cannot adopt the lease of lock {self._key!r}: {reason}", self._key)

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

        A reentrant lock is free when it was released as often as it was acquired; until then each release
        begins its lease anew.

        Raises:
            LockNotOwned: this caller does not hold it; nothing was sent.
            LockLost: the lease had ended before, or somebody removed the key.
            ReleaseUnconfirmed: no quorum of nodes confirmed it in time. Calling again is safe; the key ends
                with its lease anyway.
        """
        engine, hold = self._engine, self._hold
        lease = self._current("release")
        if lease.count > 1:
            self._once_less(lease)
            return
        queue, limit_ns, begun_ns = self._queue, self._limit_ns, 0
        passes = queue.waiters and queue.handoffs < self._max_handoffs and lease.held
        lost = lease.found_lost
        first = not lease.release_unknown
        lease.release_unknown = True  # until we know better
        votes = engine.votes()
        drop = self._drop(lease)
        if queue.lease is lease:
            queue.lease = None
        try:
            if hold.anchor is not None:
                hold.anchor.lease = None
            hold.lease = None  # first: the next holder may be another thread with this object
            if passes:
                begun_ns = now_ns()
                swapped = run(hand_on(engine, self._target, queue, lease, self._renewed), engine)
                if swapped is True:
                    return
                if swapped:  # in vain, and some nodes may have exchanged the token before it was taken back
                    first = swapped.verdict == REFUSED and not swapped.yes
                    limit_ns = max(1_000_000, begun_ns + limit_ns - now_ns())
            lease.abandon()
            program, args = drop
            engine.round(votes, program, self._key, args, self._quorum, limit_ns, lease.touched)
            if votes.verdict != GRANTED:
                begun_ns = begun_ns or votes.started_ns
                votes = run(release(engine, self._target, drop, lease.touched, votes, begun_ns), engine)
                first = False
        except ReleaseUnconfirmed as error:
            if not lost:
                hold.lease = lease
                raise
            if queue.waiters:
                queue.set_free(lease)
            self._conclude_lost(lease, lost, error)
        except BaseException:
            lease.abandon()
            if hold.lease is None and not lease.ended:
                hold.lease = lease  # it can be tried again
            raise
        finally:
            if queue.waiters and not lease.ended:
                queue.set_free(lease)
        if lease.latch:
            engine.post(FORGET, lease.latch, ())
        if lost:
            self._conclude_lost(lease, lost)
        if votes.hits:
            lease.end()
        else:
            conclude(lease, votes, first)
        if self._on_lost is not None:
            losses_of(engine).forget(lease)

    def _conclude_lost(self, lease: Lease, reason: str, error: ReleaseUnconfirmed | None = None) -> NoReturn:
        if self._on_lost is not None:
            losses_of(self._engine).forget(lease)
        lease.end()
        raise LockLost(f"lock {self._key!r} was lost before it was released: {reason}", self._key) from error

    def extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Lengthen the lease.

        Args:
            additional_time: seconds to add to what is left of the lease.
            replace_ttl: True: the seconds are the new remaining time, instead of being added. Default False.
                A lease that is renewed is not made shorter than it is made by each renewal.

        Returns:
            True. After an extension that was not answered (`NodesUnavailable`) the lease is good for no
            longer than that one was, since it may still be executed.

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
        with self._quiet(lease):
            now = now_ns()
            if not lease.held:
                raise LockLost(f"cannot extend lock {self._key!r}: its lease has ended", self._key)
            if not replace_ttl:
                length_ms += -(-(lease.started_ns + lease.length_ms * 1_000_000 - now) // 1_000_000)
            if lease.renewed:
                length_ms = max(length_ms, self._lease_ms)
            return self._renew(lease, length_ms, now)

    def reacquire(self) -> bool:
        """Give the lease its full length again, from now on.

        Returns:
            True.

        Raises:
            LockNotOwned, LockLost, NodesUnavailable: as in `extend`.
        """
        lease = self._current("reacquire")
        with self._quiet(lease):
            if not lease.held:
                raise LockLost(f"cannot reacquire lock {self._key!r}: its lease has ended", self._key)
            return self._renew(lease, self._lease_ms, now_ns())

    @contextmanager
    def _quiet(self, lease: Lease) -> Iterator[None]:
        """Nothing but the holder writes the token meanwhile."""
        renewal = lease.renewal
        if renewal is None:
            yield
            return
        try:
            renewal.pause()
            run(settle(lease, now_ns() + self._limit_ns), self._engine)
            yield
        finally:
            renewal.resume()

    def _renew(self, lease: Lease, length_ms: int, now: int) -> bool:
        drift = drift_ns(length_ms, self._drift_factor)
        if validity_end_ns(0, length_ms, drift) <= 0:
            raise ValueError(f"{length_ms} ms leave no validity: clock drift alone takes more")
        lease.shorten(validity_end_ns(now, length_ms, drift))
        engine, votes = self._engine, self._engine.votes()
        program, args = self._prolong(lease, length_ms)
        try:
            engine.round(votes, program, self._key, args, self._quorum, self._limit_ns)
        except BaseException:
            lease.doubt(now, validity_end_ns(now, length_ms, drift))
            raise
        valid_until_ns = validity_end_ns(votes.started_ns, length_ms, drift)
        if votes.verdict == GRANTED and votes.ended_ns < valid_until_ns:
            lease.renew(votes.started_ns, length_ms, valid_until_ns)
            return True
        if votes.verdict == REFUSED or (votes.verdict == GRANTED and not lease.held):
            lease.lose()
            self._target.take_back(engine, lease.token, lease.touched)
            raise LockLost(f"lock {self._key!r} is lost: its token is gone from the servers", self._key)
        if votes.touched:
            lease.doubt(votes.started_ns, valid_until_ns)
        raise unavailable(engine, votes, self._target, "cannot extend")

    def locked(self) -> bool:
        """Ask the servers whether anybody holds the lock, so that a try now would be refused.

        Raises:
            NodesUnavailable: too few nodes answered to tell.
        """
        if not self._key:
            raise ValueError(_NAMELESS)
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
        program, args = self._owns(lease)
        self._engine.round(votes, program, self._key, args, self._quorum, self._limit_ns)
        if votes.verdict in (GRANTED, REFUSED):
            return votes.verdict == GRANTED and lease.held
        raise unavailable(self._engine, votes, self._target, "cannot tell who holds")

    def __enter__(self) -> Self:
        before: Lease | None = self._hold.lease
        count = 0 if before is None else before.count
        try:
            if self.acquire():
                return self
            found = run(foreign_type(self._engine, self._target), self._engine)
            why = f"its key holds a {found}, which no lock put there" if found else "somebody else holds it"
            raise LockTimeout(f"lock {self._key!r} was not acquired in the time given: {why}", self._key)
        except BaseException:
            lease = self._hold.lease
            # Acquired by this call, and interrupted before the block began?
            if before is not None and lease is before:
                before.count = count
            elif lease is not None and lease.owner == _process.owner():
                lease.end()
                self._target.take_back(self._engine, lease.token, lease.touched)
                self._hold.lease = None
                self._queue.set_free(lease)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lease = self.lease
        lost = "" if lease is None or lease.release_unknown else lease.lost_reason
        try:
            self.release()
            if lost:
                raise LockLost(f"lock {self._key!r} was lost while its block ran: {lost}", self._key)
        except LockError as problem:
            if error is not None:
                error.add_note(f"and the lock was not released cleanly: {problem}")
            elif self.raise_on_release_error:
                raise
            else:
                _log.warning("lock %r was not released cleanly: %s", self._key, problem)


def polling(sleep: float, count: int | None = None) -> Retry:
    """Pauses of up to ``sleep`` seconds, evenly drawn."""
    return Retry(count, sleep, backoff=1.0, max_delay=max(sleep, 1e-9))


class OneNode(Body):
    """A lock on a single server."""

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
        max_handoffs: int = MAX_HANDOFFS,
        local_queue: bool = True,
        waiting: str | None = None,
        renew: bool | None = None,
        max_hold: float | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        node = as_node(client)
        if node_timeout is None:
            node_timeout = node_limit(node)
        self._set_up(
            (node,), name, key_bytes(prefix, name), timeout, sleep, blocking, blocking_timeout, thread_local,
            raise_on_release_error, retry, node_timeout, engine, None, DRIFT_FACTOR, max_handoffs,
            local_queue, waiting, renew, max_hold, on_lost,
        )  # fmt: skip
