"""The waiters of one name in one process: first come, first served, and only the first talks to the servers.

Nothing here takes a lock that an interrupt could leave taken: lists and deques are changed by single calls,
and where two threads must not both act, the one acts whose ``pop`` succeeds.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Final

from redbolt import _process
from redbolt._clock import now_ns, on_offset
from redbolt._drive import Ears, Target
from redbolt._engine import Engine, Gate, Votes, common_order
from redbolt._programs import Program
from redbolt.lease import Lease

__all__ = ["JUST_NS", "PATIENCE_NS", "RACE_NS", "Queue", "Waiter", "Waiting", "queue_for"]

JUST_NS: Final = 2_000_000
"""Who has given the lock back that lately has "just" had it."""
RACE_NS: Final = 1_000_000_000
"""So long after a lost race there are rivals."""
PATIENCE_NS: Final = 20_000_000
"""So long the first in line trusts that a holder in this process will hand the lock on."""


class Waiter:
    """Somebody who waits for the lock.

    Attributes:
        target: what it wants.
        owner: whose the lease will be.
        gate: where it waits.
        willing: whether it takes a lease that is handed on; not with a token of the caller's own.
        renewed: whether its lease will be renewed, so that it can be passed on as it is.
        gift: the lease that was handed to it.
        accepted: whether it has made that its own.
        gone: whether it left while somebody was about to hand it the lease.
        ears: what it listens with just now.
    """

    __slots__ = (
        "_open", "accepted", "ears", "gate", "generation", "gift", "gone", "owner", "renewed", "target",
        "willing",
    )  # fmt: skip

    def __init__(
        self,
        target: Target,
        gate: Gate,
        willing: bool = True,
        renewed: bool = False,
    ) -> None:
        self.target = target
        self.owner = _process.owner()
        self.generation = _process.generation
        self.gate = gate
        self.willing = willing
        self.renewed = renewed
        self.gift: list[Lease] = []
        self.accepted = False
        self.gone = False
        self.ears: Ears | None = None
        self._open = [True]

    def claim(self) -> bool:
        """Win the right to decide about it: for one who hands on, or for itself when it leaves."""
        try:
            return self._open.pop()
        except IndexError:
            return False

    def stay(self) -> None:
        """It is a forked child's now: whatever was on its way to it is the parent's."""
        self.generation = _process.generation
        self.owner = _process.owner()
        self.gift.clear()
        self.accepted = self.gone = False
        self._open = [True]

    def reopen(self) -> None:
        """Give that right back."""
        if not self._open:
            self._open.append(True)

    @property
    def reserved(self) -> bool:
        """Whether somebody is about to hand it the lock."""
        return not self._open

    def wake(self) -> None:
        """Have it look around."""
        self.gate.wake()
        ears = self.ears
        if ears is not None:
            ears.poke()


class Waiting(str):
    """By which way one waits: "tracking", "channel" or "polling"; ``reason`` says why."""

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, way: str, reason: str) -> Waiting:
        self = super().__new__(cls, way)
        self.reason = reason
        return self


class Queue:
    """See the module.

    Attributes:
        waiters: in their order. The first one asks the servers.
        lease: the valid lease that somebody in this process holds, as far as is known.
        handoffs: how often the lock was handed on since it was last taken from the servers.
        freed: grows with each release to the servers.
        freed_ns: when that was last done while others of the process waited.
        usual_ns: how long it usually takes until the lock is got back, when rivals have it in between.
        moved_ns: when the lock was last handed on, or was about to be, if it was not released since.
        aware: the waiter that knows that it is the first.
        sentinel: a waiter in line that wakes the first one, which may not know that it is, when nothing has
            moved for long. There is one, or else the first one is woken at once: mostly it need not be.
        seen: what the first one last heard from the servers.
        renewing_ns: when a change of the key turned out to be no release.
        raced_ns: when somebody outside was last faster after a release.
        unheard: how many hand-offs in a row each node was too late for.
        stuck_ns: nodes that keep a token which nobody holds, and until when.
        type_ns: when the type of the key was last asked for.
        way: how the first one waits, or would.
        tries, grants: how many tries those who waited have made, and how many were granted.
    """

    __slots__ = (
        "__weakref__", "aware", "engine", "freed", "freed_ns", "grants", "handoffs", "lease", "moved_ns",
        "order", "raced_ns", "renewing_ns", "seen", "sentinel", "stuck_ns", "tries", "type_ns",
        "unheard", "usual_ns", "waiters", "way",
    )  # fmt: skip

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.order = common_order(engine.nodes)
        self.way = Waiting("tracking", "not waited yet")
        self.reset()
        _queues.add(self)

    def reset(self) -> None:
        """Begin anew, as in a forked child: whoever waits is another process's."""
        self.waiters: deque[Waiter] = deque()
        self.lease: Lease | None = None
        self.handoffs = self.freed = self.tries = self.grants = 0
        self.freed_ns = self.moved_ns = self.renewing_ns = self.raced_ns = self.type_ns = -(1 << 62)
        self.aware: Waiter | None = None
        self.sentinel: Waiter | None = None
        self.seen: Votes | None = None
        self.usual_ns = 15_000_000
        self.unheard = [0] * len(self.engine.nodes)
        self.stuck_ns: dict[int, int] = {}

    def held_here(self) -> bool:
        """Whether somebody in this process holds a valid lease."""
        lease = self.lease
        return lease is not None and lease.held

    # ---- for those who wait ----

    def join(self, waiter: Waiter) -> None:
        """Stand at the end of the line."""
        self.waiters.append(waiter)

    def is_first(self, waiter: Waiter) -> bool:
        """Whether nobody is before it."""
        try:
            return self.waiters[0] is waiter
        except IndexError:
            return False

    def leave(self, waiter: Waiter) -> None:
        """Go, with the lock or without it. May be called again, if it was interrupted.

        A lease that was handed over and not accepted is given back to the servers.
        """
        waiter.gone = True  # before anything else: whoever is about to hand on sees that, or is seen here
        first = self.is_first(waiter)
        waiter.claim()
        self._remove(waiter)
        if waiter.gift and not waiter.accepted:
            self.take_back_gift(waiter)
        if self.sentinel is waiter:
            self.sentinel = None
            first = True
        if first and self.waiters and self.sentinel is None:
            self.wake_first()

    def take_back_gift(self, waiter: Waiter) -> None:
        """Release what was handed to a waiter that has gone."""
        for lease in list(waiter.gift):  # forgotten last: an interrupt may come, and then it is done again
            lease.end()
            waiter.target.take_back(self.engine, lease.token, lease.touched)
            self.set_free(lease)
        waiter.gift.clear()

    # ---- for those who hold ----

    def note_grant(self) -> None:
        """The lock was got from the servers by one who waited."""
        self.grants += 1
        age_ns = now_ns() - self.freed_ns
        if JUST_NS < age_ns < RACE_NS:
            self.usual_ns += (age_ns - self.usual_ns) // 4

    def set_free(self, lease: Lease) -> None:
        """The lock was released to the servers."""
        if self.lease is lease:
            self.lease = None
        self.handoffs = 0
        self.moved_ns = -(1 << 62)
        self.freed += 1
        self.freed_ns = now_ns()
        self.wake_first()

    def wake_first(self) -> None:
        """Have the first one in line look around."""
        try:
            self.waiters[0].wake()
        except IndexError:
            pass

    def reserve(self, meant: list[Waiter]) -> Waiter | None:
        """Take the first one out of the line, to hand it the lock; None if it cannot be, or there is none.

        It is noted as ``meant`` before, in case an interrupt comes: then it has to be put back.
        """
        while True:
            try:
                waiter = self.waiters[0]
            except IndexError:
                return None
            if not waiter.willing:
                return None
            self.moved_ns = now_ns()
            meant[:] = [waiter]
            claimed = waiter.claim()
            self._remove(waiter)
            if claimed:
                return waiter
            meant.clear()  # it is about to leave

    def put_back(self, waiter: Waiter) -> None:
        """It cannot be handed the lock: it is the first again."""
        self.moved_ns = -(1 << 62)
        if waiter.generation != _process.generation:
            return  # a signal handler has forked: it waits in the parent
        waiter.reopen()
        if not self.is_first(waiter):
            self.waiters.appendleft(waiter)
        if waiter.gone:
            self._remove(waiter)
            self.wake_first()
        else:
            waiter.wake()

    def give(self, waiter: Waiter, lease: Lease) -> None:
        """Hand a reserved waiter its lease. May be called again, if it was interrupted."""
        self.handoffs += 1
        self.moved_ns = now_ns()
        if not waiter.accepted:
            self.lease = lease
        if self.sentinel is waiter:
            self.sentinel = None
        if not waiter.gift and not waiter.accepted:
            waiter.gift.append(lease)
        if waiter.gone and not waiter.accepted:
            self.take_back_gift(waiter)
            return
        waiter.wake()
        if self.sentinel is None:
            self.wake_first()

    def _remove(self, waiter: Waiter) -> None:
        try:
            self.waiters.remove(waiter)
        except ValueError:
            pass  # somebody else was faster


_queues: weakref.WeakSet[Queue] = weakref.WeakSet()
_by_name: weakref.WeakValueDictionary[tuple[Engine, bytes, int], Queue] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # a signal handler may make a lock while its thread makes one


def queue_for(engine: Engine, key: bytes, program: Program) -> Queue:
    """The process's one queue for a name on these nodes, kept in this way."""
    name = engine, key, program.index
    with _lock:
        queue = _by_name.get(name)
        if queue is None:
            queue = _by_name[name] = Queue(engine)
        return queue


def _on_offset(offset_ns: int) -> None:
    for queue in list(_queues):
        for waiter in list(queue.waiters):
            waiter.wake()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    for queue in list(_queues):
        waiters = list(queue.waiters)
        queue.reset()
        for waiter in waiters:  # one may be that of the thread that has forked, in a signal handler
            waiter.wake()


on_offset(_on_offset)
_process.on_fork(_after_fork)
