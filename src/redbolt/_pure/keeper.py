"""What the agent does for the leases of one engine: it renews them, and tells when one is lost.

All leases of an engine are renewed on one channel, which only the agent uses. Those that are due about the
same time go out together. Holders never wait for a lock of ours: what they want is a plain flag, and if the
agent has just the same lease in hand they wait until it puts it down. So they may come from anywhere, also
from a signal handler or a finalizer. With a lease in hand the agent only reckons and sends; it takes no lock
that anybody else could have.
"""

from __future__ import annotations

import itertools
import random
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, TypeAlias

from redbolt import _engine, _process
from redbolt._clock import now_ns
from redbolt._engine import GONE, HELD_TOO_LONG, RAN_OUT, UNANSWERED
from redbolt._judge import (
    FAULT,
    GRANTED,
    NO,
    REFUSED,
    WAITING,
    YES,
    give_up_ns,
    renewal_due_ns,
    renewal_pause_ns,
    renewed_life_ms,
    verdict,
)
from redbolt._programs import LIFE
from redbolt._pure.agent import AGENT, NEVER
from redbolt._pure.channel import Channel
from redbolt._pure.connection import HANDSHAKE, MOST_BACKLOG, READY, RESOLVING, Connection
from redbolt._pure.gate import Gate
from redbolt._pure.resp import PLANS, Answer, Plan
from redbolt._pure.task import Task, debt_for

if TYPE_CHECKING:
    from redbolt._pure.pool import Pool

__all__ = ["Keeper", "Renewal"]

_MS: Final = 1_000_000
_FIRST_LOOK: Final = 250_000  # times the lease in ms: surely before it has to be renewed, or is too late
_LOOK_AGAIN_NS = 1_000_000_000  # polls do not see that the machine was suspended
_SURPLUS_NS = 30_000_000_000  # connections that were unused for longer are given back
_MOST_SLACK_NS = 500_000_000
_BATCH = 128  # leases that are in hand at the same time
_CROWDED = MOST_BACKLOG // 2  # unanswered bytes, with which a node is not given more if that can wait
_MOST_READS = 8
_LIMIT_NS = 1_000_000_000
_PUT_DOWN_S = 0.00005

_QUEUED: Final[Answer] = (FAULT, 0, "an earlier write of the token is unanswered")
_DROPPED: Final[Answer] = (FAULT, 0, "the renewal was given up")


class Renewal:
    """See `redbolt._engine.Renewal`. The keeper refers to it weakly."""

    __slots__ = (
        "__weakref__", "back", "drift_ns", "entry", "failed", "failures", "gate", "generation", "in_hand",
        "keeper", "key", "lease_ms", "life", "limit_ns", "lost", "open_rounds", "paused", "plan", "quorum",
        "ref", "renewed", "retry_ns", "slack_ns", "stopped", "surely_ns", "token", "touched", "trying",
        "until_ns", "waiters",
    )  # fmt: skip

    def __init__(
        self,
        keeper: Keeper,
        key: bytes,
        token: bytes,
        touched: int,
        lease_ms: int,
        quorum: int,
        drift_ns: int,
        limit_ns: int,
        started_ns: int,
        valid_until_ns: int,
        until_ns: int,
        plan: Plan | None,
        back: Plan | None,
        gate: _engine.Gate | None,
    ) -> None:
        self.keeper = keeper
        self.generation = _process.generation
        self.key = key
        self.token = token
        self.touched = touched
        self.lease_ms = lease_ms
        self.quorum = quorum
        self.drift_ns = drift_ns
        self.limit_ns = limit_ns
        self.until_ns = until_ns
        self.surely_ns = NEVER  # see `doubt`
        self.plan = plan
        self.back = back
        self.gate = gate
        self.life = started_ns, lease_ms, valid_until_ns  # as one: several threads read and set it
        self.lost = 0
        self.renewed = self.failed = 0
        self.failures = 0  # in a row
        self.retry_ns = 0  # the next try after one of them
        self.trying = False  # a round has no verdict yet
        self.open_rounds = 0  # those that some node has still to answer
        self.stopped = self.paused = False
        self.in_hand = False  # the agent is about to send for it
        self.entry = 0  # the number of its entry in the heap that counts; 0: none was made yet
        self.slack_ns = 0  # how much earlier than that it may be dealt with
        self.waiters: list[Gate] = []
        self.ref: weakref.ref[Renewal] = weakref.ref(self, keeper.on_gone)
        hash(self.ref)  # later it can be too late for that

    # ---- what it is ----

    @property
    def valid_until_ns(self) -> int:
        """End of validity; 0 once it is lost."""
        _process.look()
        return 0 if self.lost or self.generation != _process.generation else self.life[2]

    @property
    def started_ns(self) -> int:
        """The clock just before what last gave the key its life."""
        return self.life[0]

    @property
    def length_ms(self) -> int:
        """That life."""
        return self.life[1]

    @property
    def busy(self) -> bool:
        """Whether a renewal is under way that some node has not answered yet."""
        return self.open_rounds > 0 and self.generation == _process.generation

    # ---- for its holder ----

    def stop(self) -> None:
        """Renew no more, and say no more that it is lost."""
        if self.stopped and not self.in_hand:
            return
        self.stopped = True
        self._wake_waiters()
        if self.generation != _process.generation:
            return
        self.keeper.drop(self)
        self._be_put_down()

    def pause(self) -> None:
        """Begin no renewal until `resume`."""
        self.paused = True
        self._be_put_down()

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self.keeper.change(self)

    def note(self, started_ns: int, length_ms: int, valid_until_ns: int) -> None:
        """The holder itself has given the key a new life."""
        if self.lost or now_ns() >= self.life[2]:
            return
        self.life = (started_ns, length_ms, min(valid_until_ns, started_ns + self.surely_ns))
        self.failures = 0
        self.keeper.change(self)

    def shorten(self, valid_until_ns: int) -> None:
        """Validity ends then, if that is earlier."""
        started_ns, length_ms, known_ns = self.life
        if valid_until_ns < known_ns:
            self.life = (started_ns, length_ms, valid_until_ns)
            self.keeper.change(self)

    def doubt(self, surely_ns: int) -> None:
        """No later renewal is good for longer than that."""
        self.surely_ns = min(self.surely_ns, surely_ns)

    def bound(self, until_ns: int) -> None:
        """It may be held until then."""
        self.until_ns = until_ns
        self.keeper.change(self)

    def lose(self, reason: int) -> None:
        """The holder has found out that it is lost."""
        if not self.lost:
            self.lost = reason
        if self.gate is not None:
            self.gate.wake()
        self._wake_waiters()

    def wait(self, until_ns: int) -> bool:
        """Block until it is lost, or until it was stopped or the clock reads ``until_ns``."""
        gate = Gate()
        waiting = self.keeper.waiting
        try:
            self.waiters.append(gate)
            waiting.add(gate)
            while True:
                _process.look()
                now = now_ns()
                if self.lost:
                    return True
                if self.stopped or self.generation != _process.generation or now >= until_ns:
                    return False
                gate.wait(min(until_ns, now + _LOOK_AGAIN_NS))
        finally:
            waiting.discard(gate)
            if gate in self.waiters:
                self.waiters.remove(gate)

    def _wake_waiters(self) -> None:
        if self.waiters:
            for gate in self.waiters.copy():
                gate.wake()

    def _be_put_down(self) -> None:
        """Wait while the agent has it in hand; it does not once it has seen the flag that was set before."""
        while (
            self.in_hand
            and self.generation == _process.generation
            and threading.get_ident() != AGENT.ident  # a finalizer in the middle of its work
            and not sys.is_finalizing()  # the agent stands still
        ):
            time.sleep(_PUT_DOWN_S)

    # ---- for the agent ----

    def give_up_ns(self) -> int:
        """When it is lost if nothing more happens."""
        if self.plan is None:
            return self.life[2]
        return give_up_ns(self.life[2], self.lease_ms, self.limit_ns)

    def gains(self, now: int) -> bool:
        """Say whether a renewal would make it valid for longer."""
        life_ms = renewed_life_ms(now, self.lease_ms, self.drift_ns, self.until_ns)
        end_ns = min(now + life_ms * _MS - self.drift_ns, now + self.surely_ns)
        return life_ms > 0 and end_ns >= self.life[2] + _MS

    def gains_from_ns(self) -> int:
        """From when on a renewal would do that; NEVER where it is valid for as long as it may be held."""
        until_ns = self.life[2]
        if self.until_ns < until_ns + 2 * _MS:
            return NEVER
        return until_ns + _MS - min(self.surely_ns, self.lease_ms * _MS - self.drift_ns)

    def due_ns(self) -> int:
        """When to renew it; earlier than usual if validity ends before the key does."""
        started_ns, length_ms, until_ns = self.life
        ends_ns = started_ns + length_ms * _MS
        due_ns = renewal_due_ns(ends_ns, self.lease_ms)
        sure_ns = until_ns + self.drift_ns * max(length_ms, self.lease_ms) // self.lease_ms
        return due_ns if sure_ns >= ends_ns else min(due_ns, started_ns + (sure_ns - started_ns) // 3)


class Round(Task):
    """One renewal, on all nodes."""

    __slots__ = (
        "closed", "keeper", "length_ms", "listed", "over_ns", "put_back", "quorum", "ref", "sent",
        "started_ns", "verdict",
    )  # fmt: skip
    kept = True

    def __init__(self, renewal: Renewal, plan: Plan, now: int, nodes: int) -> None:
        length_ms = renewed_life_ms(now, renewal.lease_ms, renewal.drift_ns, renewal.until_ns)
        args = (renewal.token, b"%d" % length_ms)
        super().__init__(plan, renewal.key, args, renewal.limit_ns, now + length_ms * _MS, nodes)
        self.keeper = renewal.keeper
        self.ref = renewal.ref
        self.quorum = renewal.quorum
        self.started_ns = now
        self.due_ns = now + renewal.limit_ns
        self.over_ns = min(self.due_ns, renewal.give_up_ns())
        self.length_ms = length_ms
        self.verdict = WAITING
        self.sent = False
        self.put_back = 0  # a bit for each node that this was dealt with
        self.listed = False  # among those that got an answer
        self.closed = False  # nothing more is awaited

    def settle(self, index: int, answer: Answer) -> None:
        """Count a vote, and have the keeper see what the round has come to."""
        if self.answers[index] is None:
            super().settle(index, answer)
            if not self.listed:
                self.listed = True
                self.keeper.answered.append(self)

    def repeat(self, conn: Connection, form: int) -> None:
        """The node wants another form of it."""
        if not self.keeper.repeat(self, conn, form, self.over_ns):
            self.settle(conn.site.index, _DROPPED)


class Back(Task):
    """A token that is put back on one node; nobody waits for the answer."""

    __slots__ = ("keeper", "ref")
    kept = True

    def __init__(self, renewal: Renewal, plan: Plan, now: int, life_ms: int) -> None:
        args = (renewal.token, b"%d" % life_ms)
        super().__init__(plan, renewal.key, args, renewal.limit_ns, now + life_ms * _MS, 0)
        self.keeper = renewal.keeper
        self.ref = renewal.ref
        self.due_ns = now + renewal.limit_ns

    def settle(self, index: int, answer: Answer) -> None:
        """It is no vote."""

    def repeat(self, conn: Connection, form: int) -> None:
        """The node wants another form of it."""
        self.keeper.repeat(self, conn, form, self.due_ns)


_Entry: TypeAlias = "tuple[int, int, weakref.ref[Renewal]]"


class Keeper:
    """See the module. A ward of the agent, one per pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._number: Callable[[], int] = itertools.count(1).__next__
        self.waiting: set[Gate] = set()  # where somebody waits for a loss
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a forked child: the parent's leases are not ours."""
        self.channel: Channel | None = None
        self.answered: deque[Round] = deque()
        self.waiting.clear()
        self._due_ns = NEVER
        self._changed: dict[weakref.ref[Renewal], None] = {}
        self._poked = False
        self._closing = False
        self._kept: set[weakref.ref[Renewal]] = set()
        self.on_gone = self._kept.discard  # nothing of Python's: no interrupt comes in a finalizer
        self._heap: list[_Entry] = []
        self._rounds: list[tuple[int, int, Round]] = []  # by the end of their time
        self._open = 0  # how many of them some node has still to answer
        self._for_ready: list[list[Round]] = [[] for _ in self._pool.sites]  # for who is being connected to
        self._hands: list[Renewal] = []
        self._unsent: dict[Connection, None] = {}  # on which something is queued, to go out in one write
        self._crowded = False
        self._used_ns = 0

    # ---- as a ward ----

    @property
    def due_ns(self) -> int:
        """When it wants to be looked after next."""
        return 0 if self._changed or self._poked else self._due_ns

    @due_ns.setter
    def due_ns(self, when_ns: int) -> None:
        self._due_ns = when_ns

    @property
    def watched(self) -> dict[int, int]:
        """What its connections wait for."""
        channel = self.channel
        if channel is None:
            return {}
        polled = [conn.polled for conn in channel.conns if conn is not None]
        return {fd: events for fd, events in polled if fd != -1}

    @watched.setter
    def watched(self, _: dict[int, int]) -> None:
        pass

    def look_after(self) -> None:
        """Read, judge, renew, and say when there will be more to do."""
        self._due_ns = NEVER
        self._poked = False
        try:
            self._sort_in()
            if self.channel is not None:
                self._read()
            self._judge_all()
            self._end_rounds()
            self._judge_silence()  # first: who is suspect gets no more
            self._serve()
            self._judge_all()
            self._look_after_channel()
            self._judge_all()
            self._name_next()
        finally:
            self._put_down()

    # ---- for others, from any thread ----

    def keep(self, renewal: Renewal) -> None:
        """Look after a new lease."""
        self._changed[renewal.ref] = None
        AGENT.due(self, renewal.life[0] + renewal.lease_ms * _FIRST_LOOK)
        for site in self._pool.sites:
            if site.suspect:
                self._pool.wake()  # it is asked whether it is back while leases are kept
                break

    def drop(self, renewal: Renewal) -> None:
        """It was stopped. Most of them are before they were ever looked at."""
        self._changed.pop(renewal.ref, None)
        self._kept.discard(renewal.ref)

    def change(self, renewal: Renewal) -> None:
        """Something about it is different: find its place anew."""
        if renewal.generation != _process.generation:
            return
        self._changed[renewal.ref] = None
        AGENT.due(self, min(renewal.due_ns(), renewal.give_up_ns()))

    def poke(self) -> None:
        """Look around, if there is anything to look at."""
        if self.channel is not None:
            self._poked = True
            AGENT.due(self, 0)

    def close(self) -> None:
        """Give the connections back as soon as no renewal is under way."""
        self._closing = True
        self.poke()

    def keeps(self) -> bool:
        """Say whether there are leases to look after."""
        return bool(self._kept or self._changed)

    def nudge(self) -> None:
        """Have all who wait for a loss look at the clock."""
        for gate in self.waiting.copy():
            gate.wake()

    # ---- leases in hand ----

    def _take(self, renewal: Renewal) -> bool:
        """Have a lease in hand; False if there is nothing more to do for it."""
        if not renewal.in_hand:
            renewal.in_hand = True
            self._hands.append(renewal)
        return not renewal.stopped and not renewal.lost

    def _put_down(self) -> None:
        """Send what is queued, and let go of all leases."""
        try:
            for conn in self._unsent:
                if conn.state == READY:
                    with conn.lock:
                        conn.flush()
        finally:
            self._unsent.clear()
            for renewal in self._hands:
                renewal.in_hand = False
            self._hands.clear()

    def _hold(self, conn: Connection, task: Task, form: int, data: bytes, now: int) -> None:
        """Queue a command behind what has to go first."""
        with conn.lock:
            conn.channel.unfinished = True
            conn.send_orphans(now)
            if conn.doubtful and task.plan.tries:
                conn.settle_doubts()
            conn.hold(task, form, data)
        self._unsent[conn] = None
        self._used_ns = now

    def repeat(self, task: Round | Back, conn: Connection, form: int, over_ns: int) -> bool:
        """Send a command in another form, if it may still be sent."""
        renewal = task.ref()
        if renewal is None or conn.state != READY:
            return False
        try:
            if not self._take(renewal) or now_ns() >= min(over_ns, renewal.life[2]):
                return False
            conn.put(task, form, task.plan.packers[form](task.words))
            return True
        finally:
            self._put_down()

    def _is_written_elsewhere(self, index: int, token: bytes) -> bool:
        """Say whether a round, or a watch, has yet to be answered for that token. No lock is taken: see the
        module.
        """
        for channel in list(self._pool.channels):
            owner = channel.owner
            if (
                channel is not self.channel
                and (channel.unfinished or channel.mail or (owner is not None and owner.token == token))
                and channel.holds(index, token)
            ):
                return True
        return False

    # ---- the heap ----

    def _sort_in(self) -> None:
        """Give what is new or has changed its place, and make room where too much is gone."""
        for ref in list(self._changed):
            self._changed.pop(ref, None)
            renewal = ref()
            if renewal is not None and not renewal.stopped and not renewal.lost:
                self._schedule(renewal)
        if len(self._heap) > 2 * len(self._kept) + 64:
            self._heap = [entry for entry in self._heap if self._counts(entry) is not None]
            heapify(self._heap)

    def _counts(self, entry: _Entry) -> Renewal | None:
        """The lease of an entry, if it is still its entry."""
        _, number, ref = entry
        renewal = ref()
        if renewal is None or renewal.entry != number or renewal.stopped or renewal.lost:
            return None
        return renewal

    def _schedule(self, renewal: Renewal) -> None:
        """Find out when to look at a lease next."""
        when_ns = renewal.give_up_ns()
        slack_ns = 0
        if renewal.plan is not None and not renewal.paused and not renewal.trying:
            next_ns = renewal.retry_ns if renewal.failures else renewal.due_ns()
            next_ns = max(next_ns, renewal.gains_from_ns())
            if next_ns < when_ns:
                when_ns = next_ns
                if not renewal.failures:
                    slack_ns = min(_MOST_SLACK_NS, renewal.lease_ms * _MS // 20)
        renewal.slack_ns = slack_ns
        renewal.entry = number = self._number()
        self._kept.add(renewal.ref)
        if when_ns < NEVER:
            heappush(self._heap, (when_ns, number, renewal.ref))

    def _forget(self, renewal: Renewal) -> None:
        self._kept.discard(renewal.ref)

    def _take_due(self) -> list[Renewal]:
        """The next leases to deal with."""
        heap, now = self._heap, now_ns()
        due: list[Renewal] = []
        early: list[_Entry] = []
        while heap and len(due) < _BATCH and heap[0][0] - _MOST_SLACK_NS <= now:
            entry = heappop(heap)
            renewal = self._counts(entry)
            if renewal is None:
                continue
            if entry[0] - renewal.slack_ns > now:
                early.append(entry)
            else:
                due.append(renewal)
        for entry in early:
            heappush(heap, entry)
        return due

    # ---- renewals ----

    def _serve(self) -> None:
        """Deal with the leases that are due."""
        self._crowded = False
        due = self._take_due()
        if not due:
            return
        now = now_ns()
        if any(
            renewal.plan is not None and not renewal.paused and now < renewal.give_up_ns() for renewal in due
        ):
            self._connect(now, due[0].limit_ns)
        for renewal in due:
            if not self._take(renewal):
                self._forget(renewal)
                continue
            now = now_ns()
            if now >= renewal.give_up_ns():
                self._lose(renewal, self._reason(renewal))
            elif renewal.plan is not None and not renewal.paused and not renewal.trying:
                self._try(renewal, renewal.plan, now)
            else:
                self._schedule(renewal)
        self._put_down()

    def _reason(self, renewal: Renewal) -> int:
        """Why it is lost when it is too late."""
        if renewal.plan is None:
            return RAN_OUT
        if not renewal.gains(renewal.give_up_ns()):
            return HELD_TOO_LONG
        return UNANSWERED if renewal.failures or renewal.trying else RAN_OUT

    def _lose(self, renewal: Renewal, reason: int) -> None:
        renewal.lose(reason)
        self._forget(renewal)

    def _connect(self, now: int, limit_ns: int) -> None:
        """See to it that there is a connection to each node that may have one."""
        pool = self._pool
        channel = self.channel
        if channel is None:
            holder = Task(PLANS[LIFE.index], b"", (), _LIMIT_NS, 0, len(pool.sites))
            channel = Channel(len(pool.sites), holder, now)
            with pool.lock:
                self.channel = channel
                pool.channels.add(channel)
        pool.closed_ns = 0
        self._closing = False
        self._used_ns = now
        for site in pool.sites:
            if channel.conns[site.index] is None and not site.is_absent(now):
                self._follow_up(channel, pool.open(channel, site, now, limit_ns), now)

    def _try(self, renewal: Renewal, plan: Plan, now: int) -> None:
        """Begin a round, if there is something to gain."""
        channel = self.channel
        if channel is None or not renewal.gains(now):
            self._schedule(renewal)
            return
        late_ns = renewal.due_ns() + min(_MOST_SLACK_NS, renewal.lease_ms * _MS // 20)
        if now < late_ns and not renewal.failures and self._is_crowded(channel):
            self._crowded = True
            self._schedule(renewal)
            return
        task = Round(renewal, plan, now, len(self._pool.sites))
        renewal.trying = True
        renewal.open_rounds += 1
        self._open += 1
        heappush(self._rounds, (task.over_ns, self._number(), task))
        for site in self._pool.sites:
            conn = channel.conns[site.index]
            if site.suspect:
                task.settle(site.index, (FAULT, 0, f"left out until it answers again: {site.cause}"))
            elif conn is None or conn.state > READY:
                task.settle(site.index, (FAULT, 0, site.cause))
            elif conn.state != READY:
                self._for_ready[site.index].append(task)
            else:
                self._send(conn, task, now)
        self._schedule(renewal)

    def _is_crowded(self, channel: Channel) -> bool:
        """Say whether some node has so much to answer that it should not be given more."""
        return any(
            conn is not None and conn.state == READY and conn.backlog > _CROWDED and not conn.site.suspect
            for conn in channel.conns
        )

    def _send(self, conn: Connection, task: Round, now: int) -> None:
        site = conn.site
        assert task.token is not None
        form = site.forms[task.plan.index]
        data = task.plan.packers[form](task.words)
        if self._is_written_elsewhere(site.index, task.token):
            task.settle(site.index, _QUEUED)
        elif conn.backlog + len(data) > MOST_BACKLOG and conn.slots:
            task.settle(site.index, (FAULT, 0, "too many unanswered commands"))
        else:
            task.sent = True
            self._hold(conn, task, form, data, now)

    def _send_to_ready(self, conn: Connection) -> None:
        """The connection is ready: send the rounds that wait for it."""
        index = conn.site.index
        rounds = self._for_ready[index]
        for task in rounds[:_BATCH]:
            renewal = task.ref()
            now = now_ns()
            if (
                renewal is None
                or not self._take(renewal)
                or now >= min(task.over_ns, renewal.life[2])
                or task.verdict not in (WAITING, GRANTED)
            ):
                task.settle(index, _DROPPED)
            elif task.answers[index] is None:
                self._send(conn, task, now)
        del rounds[:_BATCH]
        self._put_down()
        if rounds:
            self._poked = True

    # ---- what they come to ----

    def _judge_all(self) -> None:
        """See what has become of the rounds that got answers."""
        while self.answered:
            for _ in range(min(_BATCH, len(self.answered))):
                task = self.answered.popleft()
                task.listed = False
                renewal = task.ref()
                if renewal is not None and self._take(renewal):
                    self._judge(task, renewal)
                if not task.open:
                    self._close(task, renewal)
            self._put_down()

    def _judge(self, task: Round, renewal: Renewal) -> None:
        now = now_ns()
        for site, answer in zip(self._pool.sites, task.answers, strict=True):
            if answer is not None and answer[0] == YES:
                renewal.touched |= 1 << site.index
        if task.verdict == WAITING:
            found = verdict(task.yes, task.no, task.open, len(self._pool.sites), task.quorum)
            if found == WAITING:
                return
            task.verdict = found
            renewal.trying = False
            if found == GRANTED:
                self._prolong(renewal, task, now)
            elif found == REFUSED:
                self._clear(renewal, task)
                self._lose(renewal, GONE)
            else:
                self._fail(renewal, task, now)
            if found != GRANTED:
                self._recall(task)
        if task.verdict == GRANTED and not renewal.lost and renewal.back is not None:
            for site, answer in zip(self._pool.sites, task.answers, strict=True):
                if answer is not None and answer[0] == NO and not task.put_back >> site.index & 1:
                    task.put_back |= 1 << site.index
                    self._put_back(renewal, renewal.back, task, site.index)

    def _prolong(self, renewal: Renewal, task: Round, now: int) -> None:
        """A quorum said yes."""
        started_ns, _, until_ns = renewal.life
        begun_ns = task.started_ns
        end_ns = min(begun_ns + task.length_ms * _MS - renewal.drift_ns, begun_ns + renewal.surely_ns)
        if now >= until_ns or now >= end_ns:
            self._lose(renewal, UNANSWERED)
            return
        if begun_ns >= started_ns:  # else the holder has done the same since
            renewal.life = (begun_ns, task.length_ms, end_ns)
        renewal.renewed += 1
        renewal.failures = 0
        self._schedule(renewal)

    def _fail(self, renewal: Renewal, task: Round, now: int) -> None:
        """No quorum said anything."""
        if task.sent:  # it may be executed at any time, also after later ones
            renewal.doubt(task.length_ms * _MS - renewal.drift_ns)
        renewal.failed += 1
        pause_ns = renewal_pause_ns(renewal.failures, renewal.lease_ms)
        renewal.failures += 1
        renewal.retry_ns = now + int(pause_ns * random.uniform(0.5, 1.0))
        self._schedule(renewal)

    def _recall(self, task: Round) -> None:
        """It came to nothing: it needs no more nodes."""
        for index, rounds in enumerate(self._for_ready):
            if task in rounds:
                rounds.remove(task)
                task.settle(index, _DROPPED)

    def _clear(self, renewal: Renewal, task: Round) -> None:
        """A quorum does not have the token: delete it elsewhere."""
        if renewal.back is None:
            return
        left = renewal.touched
        for index, answer in enumerate(task.answers):
            if answer is not None and answer[0] == NO:
                left &= ~(1 << index)
        if left:
            debt = debt_for(renewal.back, (renewal.key, renewal.token))
            self._pool.care.discarded.append((debt, left))
            self._pool.wake()

    def _put_back(self, renewal: Renewal, back: Plan, task: Round, index: int) -> None:
        """Give a node the token again, for the time that it has elsewhere."""
        channel = self.channel
        conn = None if channel is None else channel.conns[index]
        now = now_ns()
        life_ms = (task.started_ns - now) // _MS + task.length_ms
        if conn is None or conn.state != READY or conn.site.suspect:
            return
        if life_ms <= 0 or now >= min(task.over_ns, renewal.life[2]):
            return
        command = Back(renewal, back, now, life_ms)
        form = conn.site.forms[back.index]
        data = back.packers[form](command.words)
        if conn.backlog + len(data) > MOST_BACKLOG or self._is_written_elsewhere(index, renewal.token):
            return
        renewal.touched |= 1 << index
        self._hold(conn, command, form, data, now)

    def _end_rounds(self) -> None:
        """Whoever has not answered a round in its time has no vote in it."""
        rounds, now = self._rounds, now_ns()
        while rounds and (rounds[0][2].closed or rounds[0][0] <= now):
            _, _, task = heappop(rounds)
            if task.closed:
                continue
            for index, answer in enumerate(task.answers):
                if answer is None:
                    task.settle(index, (FAULT, 0, f"no answer within {task.limit_ns // _MS} ms"))
                    if task in self._for_ready[index]:
                        self._for_ready[index].remove(task)
        self._judge_all()

    def _close(self, task: Round, renewal: Renewal | None) -> None:
        """All nodes have answered, or had their time."""
        if not task.closed:
            task.closed = True
            self._open -= 1
            if renewal is not None:
                renewal.open_rounds -= 1

    # ---- connections ----

    def _read(self) -> None:
        """Take in what has come, and go on with connections that are being made."""
        channel = self.channel
        assert channel is not None
        for _ in range(_MOST_READS):
            happened = channel.poll.poll(0)
            now = now_ns()
            for fd, events in happened:
                conn = channel.by_fd.get(fd)
                if conn is not None:
                    conn.proceed(now, events)
                    if events & ~select.POLLOUT and conn.open():
                        conn.receive(None)
                    self._follow_up(channel, conn, now)
            if not happened:
                break
            self._judge_all()
        now = now_ns()
        for conn in list(channel.conns):
            if conn is None or conn.state >= HANDSHAKE:
                continue
            if conn.connect_by_ns and now >= conn.connect_by_ns:
                conn.end(f"no connection within {conn.site.connect_ns // _MS} ms")
            elif conn.state == RESOLVING or conn.again_ns:
                conn.proceed(now, 0)
            self._follow_up(channel, conn, now)

    def _follow_up(self, channel: Channel, conn: Connection, now: int) -> None:
        """Do what the state of a connection calls for."""
        index = conn.site.index
        if conn.state > READY:
            cause: Answer = (FAULT, 0, conn.cause)
            for task, _, _ in conn.slots.copy():
                if task.kept:
                    task.settle(index, cause)
            self._pool.lose(conn)
            if conn.degraded and not conn.useless and self._for_ready[index]:
                # At once again, without what the node does not know.
                self._follow_up(channel, self._pool.open(channel, conn.site, now, conn.limit_ns), now)
                return
            for task in self._for_ready[index]:
                task.settle(index, cause)
            self._for_ready[index].clear()
        elif conn.state == READY and self._for_ready[index]:
            self._send_to_ready(conn)
        channel.track(conn)

    def _look_after_channel(self) -> None:
        """See to its connections, and give them back when nobody needs them."""
        channel = self.channel
        if channel is None:
            return
        for conn in list(channel.conns):
            if conn is not None and conn.state == READY and self._for_ready[conn.site.index]:
                self._send_to_ready(conn)
        self._judge_silence()
        now = now_ns()
        channel.unfinished = channel.is_unfinished()
        end_ns = now if self._closing else self._used_ns + _SURPLUS_NS
        if self._open:
            return
        if now < end_ns:
            self._wish(end_ns)
            return
        with self._pool.lock:
            self._pool.dismiss(channel)
            self.channel = None
        self._closing = False

    def _judge_silence(self) -> None:
        """A node that is silent for its limit is suspect; one that is silent for longer is given up."""
        channel, now = self.channel, now_ns()
        if channel is None:
            return
        for conn in list(channel.conns):
            if conn is None or conn.state > READY or not conn.awaits():
                continue
            due_ns, site = conn.due_ns(), conn.site
            if due_ns <= now:
                if not site.suspect:
                    site.doubt(conn.overdue_text())
                    self._pool.wake()  # it is connected to anew, and asked whether it is back
                due_ns = conn.replace_ns()
                if due_ns <= now:
                    conn.give_up()
                    self._follow_up(channel, conn, now)
                    continue
            self._wish(due_ns)
            if conn.state < HANDSHAKE:
                self._wish(conn.connect_by_ns or NEVER)
                self._wish(conn.again_ns or NEVER)

    # ---- time ----

    def _wish(self, when_ns: int) -> None:
        if when_ns < self._due_ns:
            self._due_ns = when_ns

    def _name_next(self) -> None:
        """Say when there will be something to do."""
        heap, rounds, now = self._heap, self._rounds, now_ns()
        while heap and self._counts(heap[0]) is None:
            heappop(heap)
        while rounds and rounds[0][2].closed:
            heappop(rounds)
        if rounds:
            self._wish(rounds[0][0])
        if heap:
            when_ns = heap[0][0]
            self._wish(max(when_ns, now + _MS) if self._crowded else when_ns)
        if self._kept:
            self._wish(now + _LOOK_AGAIN_NS)
