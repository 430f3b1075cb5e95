"""What the first in line hears of a key, and what it makes of that.

It tries and arms in one write: behind the try goes a PTTL, and where CLIENT TRACKING is on, the node will
tell of the next change of what was read. What it tells may be a release or a renewal. The first time it is
answered with a try; where that was refused, with one more PTTL, which arms again and costs the holder's node
one command per renewal. After a wake that came to nothing there is a gap, so that nobody can make us storm.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from redbolt import _process
from redbolt._clock import now_ns
from redbolt._drive import Ears, Listen, Step, Target
from redbolt._engine import CHANGED, LIFE_TOLD, LOST, READY, Attempt, Engine, Event, Votes
from redbolt._judge import GRANTED, REFUSED
from redbolt._queue import JUST_NS, RACE_NS, Queue, Waiter, Waiting
from redbolt._watch import ears_for
from redbolt.errors import SetupError
from redbolt.retry import jitter

__all__ = ["WAYS", "Hearing"]

WAYS: Final = ("tracking", "channel", "polling")
_NEVER: Final = (1 << 63) - 1
_GAP_NS: Final = 2_000_000  # between a wake that came to nothing and the answer to the next one
_GAPS: Final = 18  # with many rivals it is longer, so that there are about so many until it is our turn again
_MOST_GAP_NS: Final = 10_000_000
_LEAST_GAP_NS: Final = 500_000  # and shorter for who has waited for longer than usual
_YIELD_S: Final = 800e-6  # who has just had the lock lets others go first for so long, and then competes
_EVEN_S: Final = 400e-6  # processes that were told at once answer within this time, in a random order
_AGE_S: Final = 0.01  # and sooner if they have waited for longer than this
_EVERY: Final = 4  # else that is found out after every so many releases
_RENEWS_NS: Final = 60_000_000_000  # so long a change is taken for a renewal once one was
_ENDLESS_NS: Final = 5_000_000_000  # a key without an end is looked at so often
_LOST_S: Final = 0.002  # bound of the pause after a lost connection; doubles with each
_ENDED_NS: Final = 1_000_000  # a life in whole milliseconds may last that much longer


class Hearing:
    """Listens for one waiter; on many nodes to the one that is asked first, and to a second in case it is
    silent.
    """

    def __init__(
        self, engine: Engine, target: Target, queue: Queue, waiter: Waiter, waiting: str | None
    ) -> None:
        self._engine = engine
        self._target = target
        self._queue = queue
        self._waiter = waiter
        self._forced = waiting is not None
        if waiting is not None:
            self._ways = [waiting]
            if waiting == "polling":  # the others say so when they begin to listen
                queue.way = Waiting(waiting, "it was asked for")
        else:
            self._ways = [way for way in WAYS if way != "channel" or target.topic]
        self._nodes = len(engine.nodes)
        self._mark = engine.mark(target.key)
        self._topic_mark = engine.mark(target.topic) if target.topic else 0
        self._ears: Ears | None = None
        self._generation = 0  # of the process that opened them
        self._wide = False
        self._deaf = 0  # a bit for each node that has not this way
        self._skipped = 0  # and that was asked first, and could not say
        self._armed = 0  # and that will tell
        self._asked = 0  # and that has not answered yet
        self._ends_ns: dict[int, int] = {}  # when the key's life ends there
        self._probed = 0  # a bit for each node that was asked because of a change
        self._rearm_ns = 0
        self._later = 0  # a bit for each node that is not to be asked before
        self._refused_ns = -_NEVER  # when a wake last came to nothing
        self._hinted = False
        self._losses = 0
        self.doubts = False  # whether all nodes should be looked at

    # ---- how one listens ----

    def listens(self) -> bool:
        """Whether there is something to listen to."""
        return self._ways[0] != "polling"

    def fails(self) -> bool:
        """Whether it does not come to listening, again and again: tries have to tell how things are."""
        return self._losses > 1

    def _do_without(self, index: int) -> None:
        """A node has not this way.

        Raises:
            SetupError: no node has, and it was the one that was asked for.
        """
        self._deaf |= 1 << index
        if self._nodes > 1 and self._wanted():
            return
        node = self._engine.nodes[index]
        way = self._ways.pop(0)
        reason = f"{node.address} does not know or permit waiting by {way}"
        if not self._ways:
            self._ways.append("polling")
        self._queue.way = Waiting(self._ways[0], reason)
        self._deaf = 0
        self.close()
        if self._forced:
            raise SetupError(
                f"cannot wait for {self._target.key!r}: {reason}", self._target.key, {node.address: reason}
            )

    def close(self) -> None:
        """Listen no more. May be called again."""
        ears, self._ears, self._waiter.ears = self._ears, None, None
        self._armed = self._asked = 0
        if ears is not None and self._generation == _process.generation:
            ears.close()

    def _open(self) -> Ears:
        ears = self._ears
        if ears is None:
            way = self._ways[0]
            self._generation = _process.generation
            ears = self._ears = ears_for(self._engine, way == "tracking", self._waiter.gate)
            self._waiter.ears = ears
            if self._queue.way != way or self._queue.way.reason == "not waited yet":
                reason = "it was asked for" if self._forced else "the best that there is"
                self._queue.way = Waiting(way, reason)
        return ears

    # ---- on many nodes ----

    def first_node(self) -> int:
        """The node to ask before the others; below 0: all at once."""
        if self._nodes == 1 or self._wide:
            return -1
        absent = self._engine.absent() | self._skipped | self._stuck()
        if absent.bit_count() > self._nodes - self._target.quorum:
            return -1
        absent |= self._deaf  # the one that is asked is one that tells
        return next((index for index in self._queue.order if not absent >> index & 1), -1)

    def skip(self, index: int) -> None:
        """That one could not say: ask the next one first."""
        self._skipped |= 1 << index
        self._forget(1 << index)

    def pass_over(self) -> None:
        """A quorum was free, though the first node said no: until its key ends, the next one is first."""
        first = self.first_node()
        if first in self._ends_ns:
            self._queue.stuck_ns[first] = self._ends_ns[first]

    def differs(self) -> bool:
        """Whether the key is gone on another node than the one that is asked first."""
        first, now = self.first_node(), now_ns()
        return first >= 0 and any(
            index != first and ends_ns <= now for index, ends_ns in self._ends_ns.items()
        )

    def _stuck(self) -> int:
        stuck, now = 0, now_ns()
        for index, until_ns in list(self._queue.stuck_ns.items()):
            if now < until_ns:
                stuck |= 1 << index
            else:
                self._queue.stuck_ns.pop(index, None)
        return stuck

    def widen(self) -> None:
        """The first node says yes, and the others no, again and again: listen to all of them."""
        self._wide = True

    def _wanted(self) -> int:
        """A bit for each node to listen to."""
        if self._nodes == 1:
            return 1 & ~self._deaf
        absent = self._engine.absent() | self._skipped | self._deaf | self._stuck()
        wanted = 0
        for index in self._queue.order:
            if not absent >> index & 1:
                wanted |= 1 << index
                if not self._wide and wanted.bit_count() == 2:
                    break
        return wanted

    # ---- tries ----

    def ears(self, nodes: int) -> Ears | None:
        """With what to make a try on these nodes, so that they tell of changes; None for the ordinary way."""
        if self._ears is None or (nodes == -1 and self._nodes > 1 and not self._wide):
            return None
        nodes &= (1 << self._nodes) - 1
        self._asked |= nodes
        self._armed &= ~nodes
        return self._ears

    def refused(self, votes: Votes) -> None:
        """A try was not granted."""
        now = now_ns()
        self._skipped = 0
        if votes.verdict != REFUSED:
            self._forget(-1)
            self.close()  # so that the next try does not depend on it
        elif self._hinted:
            self._refused_ns = now
            if not self._queue.held_here():
                self._queue.raced_ns = self._queue.renewing_ns = now
        self._hinted = False

    def hint_ns(self, now: int) -> int:
        """When to try because of a hint that came now."""
        self._hinted = True
        return self._answer_ns(now)

    def _answer_ns(self, now: int) -> int:
        queue = self._queue
        age_ns = now - queue.freed_ns
        just = age_ns < JUST_NS
        pause = 0.0
        if now < queue.raced_ns + RACE_NS or (just and queue.freed % _EVERY == 0):
            pause = jitter(_EVEN_S)
            pause = _YIELD_S + pause if just else pause * min(1, _AGE_S * 1e9 / age_ns)
        gap_ns = _GAP_NS
        if age_ns < RACE_NS:
            usual_ns = queue.usual_ns
            gap_ns = max(gap_ns, min(usual_ns // _GAPS, _MOST_GAP_NS))
            if age_ns > usual_ns:
                gap_ns = max(_LEAST_GAP_NS, gap_ns * usual_ns // age_ns)
        return max(now, self._refused_ns + gap_ns) + int(pause * 1e9)

    # ---- listening ----

    def answers_at_once(self) -> bool:
        """Whether a hint that comes now is answered by a try, and without a pause."""
        queue, now = self._queue, now_ns()
        return (
            self._ears is not None
            and not self._wide
            and self._losses == 0
            and not queue.held_here()
            and now >= queue.renewing_ns + _RENEWS_NS
            and now >= queue.raced_ns + RACE_NS
            and now >= queue.freed_ns + JUST_NS
            and now >= self._refused_ns + _GAP_NS
        )

    def listen(self, until_ns: int, attempt: Attempt | None = None) -> Generator[Step, Any, int]:
        """Wait until then, or until something has happened; when to try because of that, if at all. An
        ``attempt`` may be made at once.
        """
        ears = self._open()
        now = now_ns()
        wanted = self._wanted()
        missing = wanted & ~(self._armed | self._asked)
        if now >= self._rearm_ns:
            self._later = 0
        if missing & self._later:
            until_ns = min(until_ns, self._rearm_ns)
            missing &= ~self._later
        if missing:
            self._asked |= missing
            ears.arm(self._target.key, missing, self._target.limit_ns, self._topic())
        life_ns = self._life_ns(wanted)
        if now >= life_ns:
            self._ends_ns.clear()
            return now
        if self._waiter.gift:
            return _NEVER
        try:
            events: list[Event] = yield Listen(ears, min(until_ns, life_ns), attempt)
        except RuntimeError:
            if self._generation == _process.generation:
                raise
            return _NEVER  # a signal handler has forked, and this is the child: those are the parent's
        if attempt is not None and attempt[0].verdict == GRANTED:
            self._armed = self._asked = 0  # if that was not enough, all begins anew
            return _NEVER
        hint_ns = _NEVER
        for event in events:
            hint_ns = min(hint_ns, self._hear(*event))
        if attempt is not None and attempt[0].started_ns and self._nodes == 1:  # its answer may come later
            nodes = attempt[9] & (1 << self._nodes) - 1
            for what, index, mark, value in events:
                if what == LIFE_TOLD and mark == self._mark:
                    nodes &= ~(1 << index)
                    if value == -2:  # it ended just behind that try, which is over now: another one follows
                        self._ends_ns[index] = now_ns()
            self._asked |= nodes
        return hint_ns

    def _topic(self) -> bytes:
        return self._target.topic if self._ways[0] == "channel" else b""

    def _life_ns(self, wanted: int) -> int:
        """When the key has come to its end on as many nodes as are needed."""
        ends_ns = self._ends_ns
        if self._wide:
            free = self._nodes - wanted.bit_count()  # or unknown
            heard = [index for index in range(self._nodes) if wanted >> index & 1]
            ordered = sorted(ends_ns.get(index, _NEVER) for index in heard)
            place = self._target.quorum - free - 1
            return ordered[place] if 0 <= place < len(ordered) else _NEVER
        first = self.first_node()
        return min(ends_ns.values(), default=_NEVER) if first < 0 else ends_ns.get(first, _NEVER)

    def _hear(self, what: int, index: int, mark: int, value: int) -> int:
        """Take one event in; when to try because of it, if at all."""
        now, bit = now_ns(), 1 << index
        if what == CHANGED:
            if mark not in (0, self._mark, self._topic_mark):
                return _NEVER
            if mark != self._topic_mark or not mark:
                self._armed &= ~bit
                self._asked &= ~bit
            if now < self._queue.renewing_ns + _RENEWS_NS or self._queue.held_here():
                self._probed |= bit
                self._armed &= ~bit
                self._later |= bit
                self._rearm_ns = max(self._rearm_ns, self._answer_ns(now))
                return _NEVER
            return self.hint_ns(now)
        if what == LIFE_TOLD:
            return self._hear_life(index, value, now) if mark == self._mark else _NEVER
        if what == LOST:
            self._forget(bit)
            if value:
                self._do_without(index)
                return _NEVER
            self._later |= bit
            self._losses = min(self._losses + 1, 10)
            self._rearm_ns = now + int(jitter(_LOST_S * 2**self._losses) * 1e9)
            return _NEVER
        if what == READY:
            self._asked &= ~bit
        return _NEVER

    def _hear_life(self, index: int, value: int, now: int) -> int:
        bit = 1 << index
        self._armed |= bit
        self._asked &= ~bit
        self._losses = 0
        probed = self._probed & bit
        self._probed &= ~bit
        if value == -2:
            first = self.first_node()
            if self._nodes > 1 and self._queue.held_here():  # more likely that node has lost it
                self.doubts = True
                return _NEVER
            if self._wide or first in (-1, index):
                self._ends_ns.pop(index, None)
                self._hinted = True
                return now
            self._ends_ns[index] = now  # if the first one falls silent, this one is asked at once
            return _NEVER
        self._ends_ns[index] = now + (_ENDLESS_NS if value < 0 else value * 1_000_000 + _ENDED_NS)
        if probed:
            self._refused_ns = now
            if not self._queue.held_here():
                self._queue.raced_ns = self._queue.renewing_ns = now
        return _NEVER

    def _forget(self, nodes: int) -> None:
        """Nothing is to be expected of these nodes."""
        self._armed &= ~nodes
        self._asked &= ~nodes
        self._probed &= ~nodes
        for index in range(self._nodes):
            if nodes >> index & 1:
                self._ends_ns.pop(index, None)
