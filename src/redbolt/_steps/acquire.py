"""A refused or failed acquire goes on: it stands in line, and as the first one tries again, until it is
granted or the waiting is over.

The try is the algorithm of https://redis.io/docs/latest/develop/use/patterns/distributed-locks/
("Redlock"), with one node or many; pauses, where there is nothing to listen to, follow
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/ ("full jitter").

Who is first in line has three reasons to try:

-   **A hint.** The node says that the key has changed, or somebody in this process has released. A hint is
    never "free": it may come too late, twice, or for a renewal.
-   **The end of a life.** A key that nobody releases ends with its lease, and nodes tell of that up to 100 ms
    late. A key without an end is looked at again from time to time.
-   **A pause is over.** After a fault, after a split vote, with a number of tries, and where nothing can be
    listened to.

On many nodes parallel tries of several processes split the votes: everybody has two nodes, nobody three. So
while the lock is contended only the first node in an order common to all is asked, and the others when that
one has said yes. It may keep the token of somebody who died in the middle of a try, while the others are
free: so when it has said no and then nothing happens for a moment, all are looked at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, TypeAlias

from redbolt import _process
from redbolt._clock import now_ns
from redbolt._drive import Ask, Step, Target, Try, Wait
from redbolt._engine import Attempt, Engine, Votes
from redbolt._judge import FAULT, GRANTED, REFUSED, UNDECIDED, YES
from redbolt._programs import LIFE, TYPE
from redbolt._queue import PATIENCE_NS, Queue, Waiter
from redbolt._steps.hear import Hearing
from redbolt.errors import NodesUnavailable, SetupError, is_setup_fault
from redbolt.lease import Lease
from redbolt.retry import Retry, jitter

__all__ = ["Together", "acquire", "causes", "foreign_type", "unavailable"]

_log = logging.getLogger("redbolt")
_NEVER: Final = (1 << 63) - 1
_PENDING_NS: Final = 1_000_000
_SHORT_NS: Final = 2_000_000  # what is shorter is waited for at the gate, which is more exact than poll()
_LOOK_NS: Final = 50_000_000
_LONGEST_LOOK_NS: Final = 5_000_000_000
_SPLIT_ROUNDS: Final = 4  # bound of the first pause after a split vote, in measured rounds; doubles with each
_MOST_SPLITS: Final = 3  # after so many in a row it is no race: the others are held; all are listened to
_FAULT_S: Final = 0.01  # bound of the first pause after a fault; doubles with each
_LONGEST_S: Final = 1.0  # and its end
_WIDE_S: Final = 5.0  # longest pause while all are listened to
_TYPE_NS: Final = 60_000_000_000


class Together(NamedTuple):
    """The votes of a first node and of the others, as one."""

    verdict: int
    yes: int
    no: int
    hits: int
    token: bytes
    started_ns: int
    ended_ns: int
    valid_until_ns: int
    touched: int
    told: list[tuple[int, str]]

    def outcomes(self) -> list[tuple[int, str]]:
        """Per node, what it said."""
        return self.told


def _together(first: Votes, others: Votes) -> Together:
    pairs = zip(first.outcomes(), others.outcomes(), strict=True)
    told = [mine if mine[0] else other for mine, other in pairs]
    verdict = others.verdict
    if verdict == GRANTED and others.ended_ns >= first.valid_until_ns:
        verdict = UNDECIDED
    return Together(
        verdict, first.yes + others.yes, others.no, 0, first.token, first.started_ns, others.ended_ns,
        min(first.valid_until_ns, others.valid_until_ns), first.touched | others.touched, told,
    )  # fmt: skip


Granted: TypeAlias = Callable[[Votes | Lease], None]


def causes(engine: Engine, votes: Votes) -> dict[str, str]:
    """What each node that could not vote gave as its cause."""
    told = zip(engine.nodes, votes.outcomes(), strict=True)
    return {node.address: node.scrubbed(text) for node, (vote, text) in told if vote == FAULT}


def unavailable(
    engine: Engine, votes: Votes | None, target: Target, what: str
) -> NodesUnavailable | SetupError:
    """The error for a round without a quorum; without votes, for one that could not even begin."""
    what = f"{what} {target.key!r}"
    if votes is None:
        return NodesUnavailable(f"{what}: an earlier write of this token was not answered yet", target.key)
    told = causes(engine, votes)
    total = len(engine.nodes)
    if sum(map(is_setup_fault, told.values())) > total - target.quorum:
        return SetupError(f"{what}: the servers are not set up for it", target.key, told)
    taken = f", {votes.no} of them that it is taken" if votes.no else ""
    reached = f"{votes.yes + votes.no} of {total} nodes answered{taken}; it needs {target.quorum}"
    return NodesUnavailable(f"{what}: {reached}", target.key, told)


def acquire(
    engine: Engine,
    target: Target,
    queue: Queue,
    waiter: Waiter,
    first: Votes | None,
    token: bytes | None,
    retry: Retry,
    waiting: str | None,
    started_ns: int,
    deadline_ns: int | None,
    granted: Granted,
) -> Generator[Step, Any, bool]:
    """Go on after a first try that was not granted, or stand in line without one.

    Args:
        engine: where the tries go.
        target: what is wanted.
        queue: the line.
        waiter: the place in it.
        first: the result of the first try; None if there was none yet.
        token: the caller's own token, or None for a fresh one per try.
        retry: how many tries, and the pauses where there is nothing to listen to.
        waiting: the only way in which to listen, or None for the best that the nodes have.
        started_ns: when the acquire began.
        deadline_ns: when the waiting ends; None for never.
        granted: called with the votes of the granted try, or with the lease that was handed on, before
            anything else can happen.

    Returns:
        True when granted, False when it stayed taken.

    Raises:
        NodesUnavailable: no quorum could be reached until the end, or without a deadline or number of tries
            for one lease length.
        SetupError: a quorum is impossible, and waiting cannot mend it; or the nodes have not the one way of
            waiting that was asked for.
    """
    hearing = Hearing(engine, target, queue, waiter, waiting)
    turn = _Turn(
        engine, target, queue, waiter, hearing, first, token, retry, started_ns, deadline_ns, granted
    )
    generation = _process.generation
    try:
        queue.join(waiter)
        while True:
            if generation != _process.generation:  # a signal handler has forked: the child waits on its own
                generation = _process.generation
                hearing.close()
                waiter.stay()
                queue.join(waiter)
            if waiter.gift:
                granted(waiter.gift[0])
                waiter.accepted = True
                return True
            step = turn.in_front() if queue.is_first(waiter) else turn.in_line()
            outcome = yield from step
            if outcome is not None:
                return outcome
    finally:
        try:
            queue.leave(waiter)
        except BaseException:  # an interrupt hits that, too
            queue.leave(waiter)
            raise
        finally:
            hearing.close()


class _Turn:
    """One waiting acquire: what it knows, and when it tries again."""

    def __init__(
        self,
        engine: Engine,
        target: Target,
        queue: Queue,
        waiter: Waiter,
        hearing: Hearing,
        first: Votes | None,
        token: bytes | None,
        retry: Retry,
        started_ns: int,
        deadline_ns: int | None,
        granted: Granted,
    ) -> None:
        self.engine = engine
        self.target = target
        self.queue = queue
        self.waiter = waiter
        self.hearing = hearing
        self.token = token
        self.retry = retry
        self.deadline_ns = deadline_ns
        self.granted = granted
        self.votes: Votes | Together | None = None
        self.reached_ns = started_ns  # when a quorum could last say anything
        self.tries = 0
        self.splits = 0
        self.faults = 0
        self.freed = queue.freed
        self.due_ns = 0  # when it tries again, whatever it hears
        self.pause_ns = -1 if retry.count is not None else _NEVER  # end of the pause after which a try counts
        self.eager = True  # whether something that it hears brings the try forward
        self.last_chance = False
        self.look_ns = _NEVER  # when all nodes are looked at, since only the first one has said no
        self.looks = 0  # how often in a row that came to nothing
        self.unsure = False  # whether the nodes could not say
        self.all_at_once = False
        if first is not None:
            self.tries = 1
            self.judge(first)
        elif retry.count is not None:
            self.pause(now_ns())

    # ---- what a try came to ----

    def judge(self, votes: Votes | Together) -> None:
        """Decide when to try again after a try that was not granted.

        Raises:
            NodesUnavailable: the nodes were away for a lease length, and nothing else ends the waiting.
            SetupError: a quorum is impossible, and waiting cannot mend it.
        """
        self.votes = self.queue.seen = votes
        now = now_ns()
        self.eager = False
        if votes.verdict == REFUSED:
            self.reached_ns = votes.ended_ns
            if votes.yes and self.splits < 20:  # a split vote: somebody else tries right now, too
                bound = _SPLIT_ROUNDS * (votes.ended_ns - votes.started_ns) * 2**self.splits
                self.splits += 1
                self.pause(now)
                self.due_ns = min(self.due_ns, now + int(jitter(bound)))
                if self.splits >= _MOST_SPLITS and self.hearing.listens():
                    self.hearing.widen()
                    self.eager = True
                    if self.retry.count is None:
                        bound_s = self.retry.delay * 2 ** (self.splits - _MOST_SPLITS)
                        self.due_ns = now + int(jitter(min(_WIDE_S, bound_s)) * 1e9)
                return
            self.splits = self.faults = 0
            self.eager = True
            self.rest(now)
        else:
            error = unavailable(self.engine, votes, self.target, "cannot acquire")
            silent_ns = votes.ended_ns - self.reached_ns
            unbounded = self.deadline_ns is None and self.retry.count is None
            if isinstance(error, SetupError) or (unbounded and silent_ns >= self.target.lease_ms * 1_000_000):
                raise error
            self.back_off(now)

    def rest(self, now: int) -> None:
        """Try again because of a hint; or without anything to listen to, or with a number of tries, after a
        pause.
        """
        if self.hearing.listens() and self.retry.count is None:
            self.due_ns = _NEVER
            self.eager = True  # or nothing would ever come
        elif now >= self.pause_ns or self.retry.count is None:
            self.pause(now)
        else:  # a hint came in between: the pause goes on
            self.due_ns = self.pause_ns

    def back_off(self, now: int) -> None:
        """Try again after a fault: no later than the policy says, and soon at first."""
        self.pause(now)
        if self.retry.count is None:
            bound_s = min(_FAULT_S * 2**self.faults, _LONGEST_S)
            self.due_ns = min(self.due_ns, now + int(jitter(bound_s) * 1e9))
        self.faults = min(self.faults + 1, 20)

    def pause(self, now: int) -> None:
        """Try again after the pause that the policy says."""
        self.due_ns = self.pause_ns = now + int(self.retry.pause(max(1, self.tries)) * 1e9)

    # ---- the end of the waiting ----

    def last_ns(self) -> int:
        """When the last try begins, if there is a deadline: about the time that it takes before it."""
        if self.deadline_ns is None:
            return _NEVER
        votes = self.votes
        took_ns = 0 if votes is None else min(2 * (votes.ended_ns - votes.started_ns), 5_000_000)
        return self.deadline_ns - 1_000_000 - took_ns

    def end(self) -> bool:
        """The waiting is over: False if the lock stayed taken.

        Raises:
            NodesUnavailable, SetupError: the nodes could not say.
        """
        queue, votes = self.queue, self.votes
        if not queue.is_first(self.waiter) or (votes is None and self.token is None):
            votes = queue.seen
            if votes is None or queue.held_here():  # others were before us, and are still
                return False
        if votes is not None and votes.verdict == REFUSED:
            return False
        raise unavailable(self.engine, votes, self.target, "cannot acquire")

    # ---- in line ----

    def in_line(self) -> Generator[Step, Any, bool | None]:
        """Wait behind others; None when something has happened."""
        queue, waiter = self.queue, self.waiter
        now = now_ns()
        until_ns = _NEVER if self.deadline_ns is None else self.deadline_ns
        if waiter.reserved:  # somebody is about to hand it the lock, or cannot: that is soon known
            until_ns = min(until_ns + 2 * self.target.limit_ns, _NEVER)
        if now >= until_ns:
            return self.end()
        if waiter.reserved:
            yield Wait(waiter.gate, until_ns)
            return None
        if self.retry.count is not None:  # a pause counts as a try: the first one makes it for all
            if now >= self.pause_ns:
                self.tries += 1
                self.pause(now)
            if self.tries >= self.retry.count:
                return self.end()
            until_ns = min(until_ns, self.pause_ns)
        if queue.sentinel is None:
            queue.sentinel = waiter
        if queue.sentinel is waiter:
            stuck_ns = queue.moved_ns + PATIENCE_NS
            if now < stuck_ns:
                until_ns = min(until_ns, stuck_ns)
            else:
                queue.sentinel = None
                if not (queue.aware is not None and queue.is_first(queue.aware)):
                    queue.wake_first()
        yield Wait(waiter.gate, until_ns)
        return None

    # ---- as the first ----

    def in_front(self) -> Generator[Step, Any, bool | None]:
        """Wait for a reason to try, and try; None when something has happened."""
        queue, waiter = self.queue, self.waiter
        now = now_ns()
        if queue.aware is not waiter:
            queue.aware = waiter
            self.aware_ns = now
            if queue.sentinel is waiter:
                queue.sentinel = None
        last_ns = self.last_ns()
        if self.deadline_ns is not None:
            if now >= self.deadline_ns:
                return self.end()
            if self.last_chance:  # another try might not end in time; the whole budget is waited
                yield Wait(waiter.gate, self.deadline_ns)
                return None
        if self.retry.count is not None and self.tries >= self.retry.count:
            return self.end()
        counted = self.retry.count is not None
        trusts = queue.held_here() or now < queue.moved_ns + PATIENCE_NS
        if trusts and not (counted and now >= self.pause_ns):
            trust_ns = max(queue.moved_ns, self.aware_ns) + PATIENCE_NS
            if now < trust_ns:
                yield Wait(waiter.gate, min(trust_ns, last_ns, self.pause_ns if counted else _NEVER))
                return None
            if self.due_ns == 0:  # it has not tried yet, and would do so in vain
                self.rest(now)
        if self.freed != queue.freed:
            self.freed = queue.freed
            if self.eager:
                self.due_ns = min(self.due_ns or _NEVER, self.hearing.hint_ns(now))
        due_ns = min(self.due_ns, last_ns)
        if now < due_ns:
            yield from self._mention_type()
            return (yield from self._await(now, due_ns))
        self.last_chance = now >= last_ns
        if self.token is not None and self.engine.pending(self.token):
            self.due_ns = now + _PENDING_NS
            return None
        counts = now >= self.pause_ns
        return (yield from self._try(counts or not counted))

    def _await(self, now: int, due_ns: int) -> Generator[Step, Any, bool | None]:
        """Wait until then, or until there is an earlier reason to try; True if that was done at once, and
        granted.
        """
        if not (self.eager and self.hearing.listens()) or due_ns - now < _SHORT_NS:
            yield Wait(self.waiter.gate, due_ns)
            return None
        if now >= self.look_ns:
            yield from self._look()
            return None
        if self.look_ns == _NEVER:
            if self.unsure or self.hearing.differs():
                self.look_ns = now + min(_LOOK_NS << self.looks, _LONGEST_LOOK_NS)
            else:
                self.looks = 0
        votes: Votes | None = None
        ready: Attempt | None = None  # without rivals all nodes are asked at once
        if self.hearing.answers_at_once() and not (self.token and self.engine.pending(self.token)):
            votes = self.engine.votes()
            ready = (votes, *self.target.arguments(self.token), -1)
        try:
            hint_ns = yield from self.hearing.listen(min(due_ns - _SHORT_NS // 2, self.look_ns), ready)
            if votes is not None and votes.started_ns:
                self.queue.tries += 1
                counts = self.retry.count is None
                self.tries += counts
                if votes.verdict == GRANTED:
                    self.granted(votes)
                    self.queue.note_grant()
                    return True
                return (yield from self._conclude(votes, -1, counts))
        except BaseException:
            if votes is not None and votes.verdict == GRANTED:
                self.target.take_back(self.engine, votes.token, votes.touched)
            raise
        if self.hearing.doubts:
            self.hearing.doubts = False
            self.look_ns = now_ns()
        if self.hearing.fails() and self.due_ns == _NEVER:
            self.back_off(now_ns())
        if self.hearing.listens():
            self.due_ns = min(self.due_ns, hint_ns)
        else:  # there is nothing to listen to after all
            self.pause(now_ns())
        return None

    def _look(self) -> Generator[Step, Any, None]:
        """See whether a quorum is free, although the first node says no."""
        votes, target = self.engine.votes(), self.target
        self.look_ns = _NEVER
        yield Ask(votes, LIFE, target.key, (), target.quorum, target.limit_ns)
        if votes.verdict == GRANTED:
            self.all_at_once = True
            self.due_ns = 0
        self.looks = min(self.looks + 1, 20)
        self.unsure = votes.verdict not in (GRANTED, REFUSED)

    def _mention_type(self) -> Generator[Step, Any, None]:
        """Say it once if the key is none that a lock makes."""
        queue, votes = self.queue, self.votes
        if votes is None or votes.verdict != REFUSED or now_ns() < queue.type_ns + _TYPE_NS:
            return
        queue.type_ns = now_ns()
        if found := (yield from foreign_type(self.engine, self.target)):
            _log.warning(
                "waiting for lock %r, but its key holds a %s; no lock put that there", self.target.key, found
            )

    def _try(self, counts: bool) -> Generator[Step, Any, bool | None]:
        """Try; True if that was granted."""
        target = self.target
        votes = self.engine.votes()
        try:
            self.queue.tries += 1
            self.tries += counts
            together = self.last_chance or self.all_at_once or not self.hearing.listens()
            first = -1 if together else self.hearing.first_node()
            if first < 0:
                yield Try(votes, target.arguments(self.token), -1, self.hearing.ears(-1))
            else:
                alone = target._replace(quorum=1)
                yield Try(votes, alone.arguments(self.token), 1 << first, self.hearing.ears(1 << first))
            return (yield from self._conclude(votes, first, counts))
        except BaseException:
            if votes.verdict == GRANTED:
                target.take_back(self.engine, votes.token, votes.touched)
            raise

    def _conclude(self, votes: Votes, first: int, counts: bool) -> Generator[Step, Any, bool | None]:
        """Go on after a try on the first node, or on all of them (below 0); True if the lock was granted."""
        engine, target = self.engine, self.target
        both: Votes | Together = votes
        others: Votes | None = None
        self.look_ns = _NEVER
        try:
            if first >= 0:
                if votes.verdict == GRANTED:
                    others = engine.votes()
                    rest = target._replace(quorum=target.quorum - 1).arguments(votes.token)
                    yield Try(others, rest, (1 << len(engine.nodes)) - 1 - (1 << first))
                    both = _together(votes, others)
                    if both.verdict != GRANTED:
                        late = others.touched if others.verdict == GRANTED else 0
                        target.take_back(engine, votes.token, 1 << first | late)
                elif votes.verdict == REFUSED:
                    self.look_ns = votes.ended_ns + _LOOK_NS
                else:
                    self.hearing.skip(first)  # it cannot say: the next one is asked at once, in the same try
                    self.tries -= counts
                    self.due_ns = 0
                    return None
            if both.verdict == GRANTED:
                self.granted(both)
                self.queue.note_grant()
                if self.all_at_once:
                    self.hearing.pass_over()
                return True
        except BaseException:
            if others is not None and others.verdict == GRANTED:
                target.take_back(engine, others.token, others.touched)
            raise
        self.all_at_once = self.unsure = False
        self.looks = 0
        self.hearing.refused(both)
        self.judge(both)
        return None


def foreign_type(engine: Engine, target: Target) -> Generator[Step, Any, str]:
    """Ask once what type the key has; its name if it is none that a lock makes, else an empty string."""
    votes = engine.votes()
    yield Ask(votes, TYPE, target.key, (), target.quorum, target.limit_ns)
    types = {text for vote, text in votes.outcomes() if vote == YES}
    return ", ".join(sorted(types - {target.type, "none", ""}))
